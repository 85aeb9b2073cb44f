"""Metrics: what the daemon counts anyway, read now and then for whoever exports it.

Concurrency: exporters ask in threads of their own, so they get the values as they were read last,
on the event loop, to which all state belongs.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, get_args

import anyio
from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from kvd import telemetry
from kvd.actors.mover import DemotionReason, PromotionReason
from kvd.actors.turns import again_and_again
from kvd.cache.memory import EvictionReason
from kvd.protocol.errors import ERRORS
from kvd.protocol.verbs import VERBS
from kvd.telemetry import Metric, loop_delay

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from kvd.actors.manager import Manager
    from kvd.actors.mover import Mover
    from kvd.actors.router import Router
    from kvd.actors.sequences import Sequences
    from kvd.actors.sessions import SessionTable
    from kvd.actors.store import StoreActor
    from kvd.protocol.messages import TierStatus

# So often it is seen how late the loop is.
BEAT_SECONDS = 0.25
# So old may be what an exporter is told that does not ask on the loop.
READ_SECONDS = 10.0


class Value(NamedTuple):
    metric: Metric
    value: float
    attributes: dict[str, str]


class Metrics:
    """The values of one daemon. Of several in one process the last that began is told of."""

    latest: ClassVar[dict[Metric, list[Observation]]] = {}

    def __init__(
        self,
        manager: Manager,
        mover: Mover,
        router: Router,
        sequences: Sequences,
        sessions: SessionTable,
        stores: Sequence[StoreActor],
    ) -> None:
        self._manager = manager
        self._mover = mover
        self._router = router
        self._sequences = sequences
        self._sessions = sessions
        self._stores = stores
        self._observed: dict[Metric, list[Observation]] = {}
        self._scope = anyio.CancelScope()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """See how late the loop is, and read all values now and then, until close()."""
        Metrics.latest = self._observed
        task_status.started()
        with self._scope:
            await again_and_again(self._turn)
        self.read()

    def close(self) -> None:
        self._scope.cancel()

    async def _turn(self) -> None:
        self.read()
        for _ in range(round(READ_SECONDS / BEAT_SECONDS)):
            await self._beat()

    async def _beat(self) -> None:
        due = time.monotonic() + BEAT_SECONDS
        await anyio.sleep(BEAT_SECONDS)
        loop_delay.record(max(0.0, time.monotonic() - due))  # uvloop counts milliseconds
        self._router.timings.record()

    def read(self) -> None:
        """Read all values; to be called on the loop."""
        self._router.timings.record()
        observed = defaultdict(list)
        for metric, value, attributes in self._values():
            observed[metric].append(Observation(value, attributes))
        self._observed.update(observed)

    # --- values ---

    def _values(self) -> Iterator[Value]:
        tiers = self._manager.tier_status()
        yield from self._holders()
        yield from self._queues()
        yield from self._requests()
        for name, count in tiers[0].pages.items():
            yield Value(telemetry.PAGES, count, {"state": name})
        for tier in tiers:
            yield from _tier(tier)
        yield from self._matches([tier.name for tier in tiers])
        yield from self._blocks(tiers[0].name)
        for store in self._stores:
            yield from _moved(store)

    def _holders(self) -> Iterator[Value]:
        state = self._manager.state
        yield Value(telemetry.READY, int(self._router.is_ready), {})
        yield Value(telemetry.SESSIONS, len(self._sessions), {})
        yield Value(telemetry.LEASES, len(state.leases), {})
        yield Value(telemetry.PINS, len(state.pins), {})
        yield Value(telemetry.SEQUENCES, len(self._sequences), {})

    def _queues(self) -> Iterator[Value]:
        yield Value(telemetry.QUEUE, self._router.num_waiting, {"queue": "requests"})
        yield Value(telemetry.QUEUE, self._router.num_attaching, {"queue": "attach"})
        yield Value(telemetry.QUEUE, self._mover.num_works, {"queue": "moves"})
        for store in self._stores:
            yield Value(telemetry.QUEUE, store.num_waiting, {"queue": "store", "tier": store.name})

    def _requests(self) -> Iterator[Value]:
        counters, timings = self._router.counters, self._router.timings
        for verb in VERBS:
            yield Value(telemetry.REQUESTS, timings.counts[verb], {"verb": verb})
        for code in ERRORS:
            yield Value(telemetry.ERRORS, counters[f"errors_{code}"], {"code": code})
            yield Value(telemetry.FAILURES, counters[f"failures_{code}"], {"code": code})
        yield Value(telemetry.UNDELIVERABLE, counters["replies_undeliverable"], {})

    def _matches(self, tiers: list[str]) -> Iterator[Value]:
        counters = self._manager.state.counters
        yield Value(telemetry.MATCHES, counters["match_hits"], {"result": "hit"})
        yield Value(telemetry.MATCHES, counters["match_misses"], {"result": "miss"})
        for tier in tiers:
            yield Value(telemetry.TOKENS, counters[f"tokens_from_{tier}"], {"source": tier})
        missed = counters["tokens_requested"] - counters["tokens_matched"]
        late, evicted = counters["tokens_late"], counters["tokens_evicted"]
        yield Value(telemetry.TOKENS, missed, {"source": "missed"})
        yield Value(telemetry.MISSED, missed - late - evicted, {"reason": "new"})
        yield Value(telemetry.MISSED, late, {"reason": "late"})
        yield Value(telemetry.MISSED, evicted, {"reason": "evicted"})

    def _blocks(self, memory: str) -> Iterator[Value]:
        counters = self._manager.state.counters
        for metric, name in _PLAIN:
            yield Value(metric, counters[name], {})
        for reason in get_args(EvictionReason):
            where = {"tier": memory, "reason": reason}
            yield Value(telemetry.EVICTED, counters[f"evictions_{reason}"], where)
        for result in ("waited", "short"):
            yield Value(telemetry.RESERVES, counters[f"reserves_{result}"], {"result": result})
        for result in ("done", "failed"):
            yield Value(
                telemetry.CHECKPOINTS, counters[f"checkpoints_{result}"], {"result": result}
            )


# Counters of the state that are a metric each.
_PLAIN = (
    (telemetry.COMMITTED, "blocks_committed"),
    (telemetry.DUPLICATE, "blocks_duplicate"),
    (telemetry.DROPPED, "blocks_dropped"),
    (telemetry.PRESSURE_DROPS, "pressure_drops"),
    (telemetry.VERIFIED, "blocks_verified"),
    (telemetry.CHECKSUM_FAILURES, "checksum_failures"),
    (telemetry.MISSING, "blocks_missing"),
    (telemetry.RESERVED, "pages_reserved"),
    (telemetry.QUARANTINED, "pages_quarantined"),
)


def _tier(tier: TierStatus) -> Iterator[Value]:
    here = {"tier": tier.name}
    yield Value(telemetry.BLOCKS, tier.num_blocks, here)
    yield Value(telemetry.TIER_DEGRADED, int(bool(tier.trouble)), here)
    yield Value(telemetry.TIER_USED, tier.used_bytes, here)
    yield Value(telemetry.TIER_USABLE, tier.usable_bytes, here)
    yield Value(telemetry.TIER_WAITING, tier.waiting_bytes, here)


def _moved(store: StoreActor) -> Iterator[Value]:
    """What went to a store, came from it, or went from it to make room."""
    counters, tier = store.state.counters, {"tier": store.name}
    yield Value(telemetry.EVICTED, counters["evicted"], {**tier, "reason": "room"})
    for reason in get_args(DemotionReason):
        yield Value(telemetry.DEMOTED, counters[f"demoted_{reason}"], {**tier, "reason": reason})
    for reason in get_args(PromotionReason):
        yield Value(telemetry.PROMOTED, counters[f"promoted_{reason}"], {**tier, "reason": reason})
    yield Value(telemetry.TIER_WRITTEN, counters["written_bytes"], tier)
    yield Value(telemetry.TIER_READ, counters["read_bytes"], tier)
    for operation in ("read", "write"):
        count = store.counters[f"{operation}_failures"]
        yield Value(telemetry.TIER_FAILURES, count, {**tier, "operation": operation})


def _observe(metric: Metric, _: CallbackOptions) -> Iterable[Observation]:
    return Metrics.latest.get(metric, ())


_meter = metrics.get_meter("kvd")
for _created, _metrics in (
    (_meter.create_observable_counter, telemetry.TOTALS),
    (_meter.create_observable_up_down_counter, telemetry.LEVELS),
):
    for _metric in _metrics:
        _created(_metric.name, [functools.partial(_observe, _metric)], *_metric[1:])
