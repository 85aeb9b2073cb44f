"""Every metric and span name, in one place. The OpenTelemetry API alone: no SDK, no exporter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from kvd.protocol.errors import KvdError

tracer = trace.get_tracer("kvd")
_propagator = TraceContextTextMapPropagator()

# A request is from when it is read to when it is answered, with all that it waits for, under the
# client's span; the name of its message follows.
REQUEST = "kvd.request"
# Under a request: pages that others must give first.
RESERVE = "kvd.reserve"
# Blocks that matches lack in memory, read from a tier or compared with their checksums; under the
# first request that lacks them. Others that wait for the same are linked to it.
PROMOTE = "kvd.promote"
READ = "kvd.tier.read"
VERIFY = "kvd.verify"
# Blocks written to a tier, linked to the requests that committed them; under a checkpoint where it
# is one's. A checkpoint is linked to the requests that asked for it.
DEMOTE = "kvd.demote"
CHECKPOINT = "kvd.checkpoint"

# Attributes. Tokens by tier have the tier's name behind.
NAMESPACE = "kvd.namespace"  # the name of its model
MATCHED_TOKENS = "kvd.matched_tokens"
PAGES = "kvd.pages"
TIER = "kvd.tier"
BLOCKS = "kvd.blocks"
BYTES = "kvd.bytes"
ERROR = "error.type"  # an error's code


def request_span(verb: str, traceparent: str) -> trace.Span:
    """A span of one request under the client's; a request that carries no trace costs nothing."""
    if not traceparent:
        return trace.INVALID_SPAN
    context = _propagator.extract({"traceparent": traceparent})
    return tracer.start_span(f"{REQUEST}.{verb}", context, kind=trace.SpanKind.SERVER)


def within(span: trace.Span) -> AbstractContextManager[object]:
    """Have what follows be part of a span, which stays open."""
    return nullcontext() if span is trace.INVALID_SPAN else trace.use_span(span)


def child_span(name: str) -> AbstractContextManager[object]:
    """A span under the current one, where there is one."""
    if not trace.get_current_span().get_span_context().is_valid:
        return nullcontext()
    return tracer.start_as_current_span(name)


def refused(error: KvdError) -> None:
    """Tell the current span what its request, or a part of it, was refused with."""
    span = trace.get_current_span()
    span.set_attribute(ERROR, error.code)
    span.set_status(trace.StatusCode.ERROR, error.code)


def linked(span: trace.Span) -> None:
    """The current span, while it is open, waits for what another one began."""
    current = trace.get_current_span()
    if current.is_recording():
        current.add_link(span.get_span_context())
