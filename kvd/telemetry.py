"""Every metric and span name, in one place. The OpenTelemetry API alone: no SDK, no exporter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_tracer = trace.get_tracer("kvd")
_propagator = TraceContextTextMapPropagator()

REQUEST_SPAN = "kvd.request"


def request_span(verb: str, traceparent: str) -> AbstractContextManager[object]:
    """A span of one request under the client's; a request that carries no trace costs nothing."""
    if not traceparent:
        return nullcontext()
    context = _propagator.extract({"traceparent": traceparent})
    return _tracer.start_as_current_span(
        f"{REQUEST_SPAN}.{verb}", context, kind=trace.SpanKind.SERVER
    )
