"""Collector: a receiver of OTLP, over HTTP or gRPC, which keeps what processes send it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


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
    """`endpoint` and `protocol` are what the variables of exporters must say."""

    def __init__(self, endpoint: str, protocol: str) -> None:
        self.endpoint = endpoint
        self.protocol = protocol
        self.spans: list[Received] = []
        self.metrics: list[ExportMetricsServiceRequest] = []

    def named(self, name: str) -> list[Received]:
        """In the order in which they began."""
        found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.start)

    def under(self, parent: Received, name: str) -> list[Received]:
        return [span for span in self.named(name) if span.parent == parent.id]

    def take_metrics(self, request: ExportMetricsServiceRequest) -> None:
        self.metrics.append(request)

    def take_spans(self, request: ExportTraceServiceRequest) -> None:
        for sent in request.resource_spans:
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


def running_collector(protocol: str = "http/protobuf") -> AbstractContextManager[Collector]:
    return _over_grpc() if protocol == "grpc" else _over_http()


@contextmanager
def _over_http() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            match self.path:
                case "/v1/traces":
                    collector.take_spans(ExportTraceServiceRequest.FromString(body))
                case "/v1/metrics":
                    collector.take_metrics(ExportMetricsServiceRequest.FromString(body))
                case path:
                    raise AssertionError(path)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")  # as a response has that tells of no fault
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}", "http/protobuf")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


class _Traces(TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: ExportTraceServiceRequest, _: object) -> ExportTraceServiceResponse:
        self._collector.take_spans(request)
        return ExportTraceServiceResponse()


class _Metrics(MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(
        self, request: ExportMetricsServiceRequest, _: object
    ) -> ExportMetricsServiceResponse:
        self._collector.take_metrics(request)
        return ExportMetricsServiceResponse()


@contextmanager
def _over_grpc() -> Iterator[Collector]:
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    collector = Collector(f"http://127.0.0.1:{port}", "grpc")
    add_TraceServiceServicer_to_server(_Traces(collector), server)
    add_MetricsServiceServicer_to_server(_Metrics(collector), server)
    server.start()
    try:
        yield collector
    finally:
        server.stop(grace=None).wait()


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
