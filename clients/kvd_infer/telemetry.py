"""Every metric and span name of the engine, in one place. The OpenTelemetry API alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import metrics, trace

tracer = trace.get_tracer("kvd_infer")
_meter = metrics.get_meter("kvd_infer")

# A request is from its arrival to its end; a step is linked to all requests of which it computes
# tokens. What the client asks of kvd within a match or a commit is a child there, and in kvd.
REQUEST = "kvd_infer.request"
STEP = "kvd_infer.step"
MATCH = "kvd_infer.match"
ATTENTION = "kvd_infer.attention"  # of one layer
COMMIT = "kvd_infer.commit"

attention_latency = _meter.create_histogram(
    "kvd_infer.attention_latency", "s", "Attention of all layers in one step, with its writes"
)
step_time = _meter.create_histogram("kvd_infer.step_time", "s", "One step of the engine")
batch_size = _meter.create_histogram("kvd_infer.batch_size", "{sequence}", "Sequences in a step")
tokens = _meter.create_counter(
    "kvd_infer.tokens", "{token}", "Tokens by source: computed here, or the tier that had them"
)


@contextmanager
def step(requests: Sequence[trace.Span]) -> Iterator[None]:
    """One step, for these requests."""
    links = [trace.Link(request.get_span_context()) for request in requests]
    started = time.perf_counter()
    with tracer.start_as_current_span(STEP, links=links):
        yield
    step_time.record(time.perf_counter() - started)
    batch_size.record(len(requests))
