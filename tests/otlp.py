"""Collector: a receiver of OTLP over HTTP, which keeps what processes send it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Received:
    """A span; ids are hexadecimal, and `parent` is empty for the first of a trace."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    links: list[str]
    attributes: dict[str, Any]
    start: int
    end: int
    is_error: bool


class Collector:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.spans: list[Received] = []
        self.metrics: list[ExportMetricsServiceRequest] = []

    def named(self, name: str) -> list[Received]:
        """In the order in which they began."""
        found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.start)

    def under(self, parent: Received, name: str) -> list[Received]:
        return [span for span in self.named(name) if span.parent == parent.id]

    def take(self, path: str, body: bytes) -> None:
        match path:
            case "/v1/traces":
                self._take_spans(body)
            case "/v1/metrics":
                self.metrics.append(ExportMetricsServiceRequest.FromString(body))
            case _:
                raise AssertionError(path)

    def _take_spans(self, body: bytes) -> None:
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(sent.resource.attributes)["service.name"]
            self.spans += [
                Received(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    [link.span_id.hex() for link in span.links],
                    _values(span.attributes),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                )
                for scope in sent.scope_spans
                for span in scope.spans
            ]


@contextmanager
def running_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")  # as a response has that tells of no fault
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
