"""Every metric and span name, in one place. The OpenTelemetry API alone: no SDK, no exporter."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry import metrics, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from kvd.protocol.errors import KvdError

tracer = trace.get_tracer("kvd")
_meter = metrics.get_meter("kvd")
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
NUM_PAGES = "kvd.pages"
TIER = "kvd.tier"
NUM_BLOCKS = "kvd.blocks"
NUM_BYTES = "kvd.bytes"
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


# --- metrics ---


class Metric(NamedTuple):
    name: str
    unit: str
    description: str


# What is there now.
READY = Metric("kvd.ready", "{daemon}", "1 while the daemon serves, else 0")
BLOCKS = Metric("kvd.blocks", "{block}", "Blocks by tier")
PAGES = Metric("kvd.pages", "{page}", "Pages of the memory tier by state")
TIER_DEGRADED = Metric("kvd.tier.degraded", "{tier}", "1 while a tier is in trouble, else 0")
TIER_USED = Metric("kvd.tier.used", "By", "Bytes that a tier takes")
TIER_USABLE = Metric("kvd.tier.usable", "By", "Bytes that blocks may take in a tier")
TIER_WAITING = Metric("kvd.tier.waiting", "By", "Bytes of blocks that wait for a copy in a tier")
SESSIONS = Metric("kvd.sessions", "{session}", "Attached clients")
LEASES = Metric("kvd.leases", "{lease}", "Leases of all sessions, and the daemon's own")
PINS = Metric("kvd.pins", "{pin}", "Pins")
SEQUENCES = Metric("kvd.sequences", "{sequence}", "Saved sequences")
QUEUE = Metric("kvd.queue", "{item}", "What waits: requests, clients that attach, moves, writes")

LEVELS = (
    *(READY, BLOCKS, PAGES, TIER_DEGRADED, TIER_USED, TIER_USABLE, TIER_WAITING),
    *(SESSIONS, LEASES, PINS, SEQUENCES, QUEUE),
)

# What was done since the start.
REQUESTS = Metric("kvd.requests", "{request}", "Requests by verb")
ERRORS = Metric("kvd.errors", "{request}", "Requests that were refused, by the error's code")
FAILURES = Metric("kvd.failures", "{item}", "Items of requests that were refused, by code")
UNDELIVERABLE = Metric("kvd.replies.undeliverable", "{reply}", "Replies that nobody took")
MATCHES = Metric("kvd.matches", "{match}", "Matches by result: hit or miss")
TOKENS = Metric(
    "kvd.tokens", "{token}", "Tokens that matches asked for, by source: the tier, or missed"
)
MISSED = Metric(
    "kvd.tokens.missed",
    "{token}",
    "Missed tokens by reason: new here; late, where a store has them; evicted, at least so many",
)
COMMITTED = Metric("kvd.blocks.committed", "{block}", "New blocks of clients")
DUPLICATE = Metric("kvd.blocks.duplicate", "{block}", "Committed blocks that were there already")
DROPPED = Metric("kvd.blocks.dropped", "{block}", "Blocks removed on request")
EVICTED = Metric("kvd.blocks.evicted", "{block}", "Blocks that made room, by tier and reason")
PRESSURE_DROPS = Metric("kvd.pressure_drops", "{block}", "Evicted before a store had its copy")
DEMOTED = Metric("kvd.blocks.demoted", "{block}", "Blocks copied down, by tier and reason")
PROMOTED = Metric("kvd.blocks.promoted", "{block}", "Blocks read from a tier, by reason")
VERIFIED = Metric("kvd.blocks.verified", "{block}", "Blocks compared with their checksums")
CHECKSUM_FAILURES = Metric("kvd.checksum.failures", "{block}", "Damaged blocks, which were removed")
MISSING = Metric("kvd.blocks.missing", "{block}", "Blocks that a tier should have had")
RESERVED = Metric("kvd.pages.reserved", "{page}", "Pages given to leases")
QUARANTINED = Metric("kvd.pages.quarantined", "{page}", "Pages taken out of use with their session")
RESERVES = Metric("kvd.reserves", "{reserve}", "Reserves that waited, or came out short of pages")
CHECKPOINTS = Metric("kvd.checkpoints", "{checkpoint}", "Checkpoints by result: done or failed")
TIER_WRITTEN = Metric("kvd.tier.written", "By", "Bytes of records written to a tier")
TIER_READ = Metric("kvd.tier.read", "By", "Bytes of blocks read from a tier")
TIER_FAILURES = Metric("kvd.tier.failures", "{call}", "Calls of a tier that failed, by operation")

TOTALS = (
    *(REQUESTS, ERRORS, FAILURES, UNDELIVERABLE, MATCHES, TOKENS, MISSED),
    *(COMMITTED, DUPLICATE, DROPPED, EVICTED, PRESSURE_DROPS, DEMOTED, PROMOTED),
    *(VERIFIED, CHECKSUM_FAILURES, MISSING, RESERVED, QUARANTINED, RESERVES),
    *(CHECKPOINTS, TIER_WRITTEN, TIER_READ, TIER_FAILURES),
)

request_duration = _meter.create_histogram(
    "kvd.request.duration", "s", "How long requests held the daemon, by verb"
)
request_wait = _meter.create_histogram(
    "kvd.request.wait", "s", "How long requests waited that had to, by verb"
)
tier_duration = _meter.create_histogram(
    "kvd.tier.duration", "s", "Reads and writes of blocks, by tier and operation, with their wait"
)
loop_delay = _meter.create_histogram("kvd.loop.delay", "s", "How late the event loop is")


# Of each verb, between two recordings.
NUM_KEPT = 32


@contextmanager
def timed(histogram: metrics.Histogram, attributes: Mapping[str, str]) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        histogram.record(time.perf_counter() - started, attributes)


class Timings:
    """Durations by verb: all are counted; between two calls of `record`, the last few are kept.

    To record one takes the SDK seven microseconds, and to note it here a twentieth of that.
    """

    def __init__(self, histogram: metrics.Histogram) -> None:
        self.counts: Counter[str] = Counter()
        self._histogram = histogram
        self._kept: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_KEPT))

    def note(self, verb: str, seconds: float) -> None:
        self.counts[verb] += 1
        self._kept[verb].append(seconds)

    def record(self) -> None:
        for verb, kept in self._kept.items():
            for seconds in kept:
                self._histogram.record(seconds, {"verb": verb})
            kept.clear()
