"""Manager: owns CacheState and carries out its plans.

The router calls it directly: what can be answered at once (every hit, every release, a reserve
while pages are free) is answered in the call, between two awaits. Only a reserve that must wait for
memory or for other leases is awaited, in the order of arrival.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import anyio
import msgspec

from kvd.actors.tier import TierActor, backing_pieces
from kvd.arena.header import NUM_SLOTS, SharedHeader
from kvd.arena.page_table import PageState
from kvd.arena.runs import pages_of, runs_of
from kvd.cache.state import (
    ArenaState,
    CacheState,
    Committed,
    Ended,
    Freed,
    Granted,
    Namespace,
    Plan,
    Quarantined,
    Reserved,
)
from kvd.protocol.errors import BadRequest, KvdError, LeaseEnded, OutOfPages, TierFailed
from kvd.protocol.keys import Identity, check_identity, fingerprint, namespace_key
from kvd.protocol.layout import Layout, check_layout
from kvd.protocol.messages import (
    CommitItem,
    CommitResult,
    MatchItem,
    MatchResult,
    NamespaceStatus,
    Run,
    Runs,
    Shortage,
    TierStatus,
)

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from kvd.cache.leases import Lease
    from kvd.config import CacheConfig, LimitConfig
    from kvd.protocol.codec import Tokens
    from kvd.tiers.base import TierArena

logger = logging.getLogger(__name__)

# After the file system refused memory it is asked again only so much later.
BACKING_PAUSE_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class _Waiter:
    """A reserve that could not be answered at once."""

    lease: Lease
    start: int
    stop: int
    ahead: int
    done: anyio.Event = field(default_factory=anyio.Event)
    runs: Runs = ()
    error: KvdError | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    namespace: Namespace
    arena: TierArena


class Manager:
    """The cache of one daemon: one memory tier and what is known about it."""

    def __init__(
        self, config: CacheConfig, limits: LimitConfig, tier: TierActor, header: SharedHeader
    ) -> None:
        self._config = config
        self._limits = limits
        self._tier = tier
        self._header = header
        self.state = CacheState(
            tier.tier.capacity_bytes,
            NUM_SLOTS,
            high_watermark=config.high_watermark,
            low_watermark=config.low_watermark,
            max_session_leases=limits.session_leases,
        )
        self._arenas: list[TierArena] = []
        self._opening = anyio.Lock()
        self._waiters: deque[_Waiter] = deque()
        self._untidy = anyio.Event()
        self._begun: list[tuple[ArenaState, Run]] = []
        self._closing = False
        self._tasks: TaskGroup | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the tier in order: evict above the watermark, have some memory ready."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            while not self._closing:
                await self._untidy.wait()
                self._untidy = anyio.Event()
                begun, self._begun = self._begun, []
                for arena, piece in begun:
                    self._tasks.start_soon(self._back_piece, arena, piece)
                self._carry_out(self.state.trim())
                self._back_ahead()
            self._tasks.cancel_scope.cancel()

    def close(self) -> None:
        """Begin nothing more; memory that was being given is given up."""
        self._closing = True
        self._untidy.set()

    # --- verbs ---

    async def open(self, identity: Identity, layout: Layout, salt: str) -> Opened:
        """The namespace of an identity, layout and salt; its arena is made at the first use."""
        check_identity(identity)
        check_layout(layout)
        async with self._opening:
            arena = self.state.find_arena(layout)
            if arena is None:
                made = await self._tier.create_arena(layout, fingerprint(identity, layout))
                arena = self.state.add_arena(layout, made.num_pages, made.extent_pages)
                self._arenas.append(made)
        key = namespace_key(identity, layout, salt)
        namespace = self.state.open_namespace(key, identity, salt, arena)
        self._untidy.set()
        return Opened(namespace, self._arenas[arena.id])

    def match(self, session: int, item: MatchItem, tokens: Tokens) -> tuple[Lease, MatchResult]:
        """Lease the longest resident prefix; pages to reserve are the caller's next step."""
        matched = self.state.match(
            session, item.lease, self.state.namespaces[item.namespace], tokens
        )
        self._carry_out(matched.plan)
        lease = matched.lease
        num_tokens = lease.num_matched * lease.namespace.arena.layout.block_size
        by_tier = {self._tier.tier.name: num_tokens} if num_tokens else {}
        result = MatchResult(
            num_tokens, matched.runs, lease.slot, lease.generation, tokens_by_tier=by_tier
        )
        return lease, result

    def lease(self, session: int, lease_id: int) -> Lease:
        return self.state.leases.get(session, lease_id)

    def reserve_now(self, lease: Lease, start: int, stop: int, ahead: int) -> Runs | None:
        """The pages, if they can be had without waiting and without overtaking who waits."""
        if self._waiters and stop > len(lease.granted):
            return None
        answer = self.state.reserve(lease, start, stop, ahead)
        if not isinstance(answer, Granted):
            self._back(lease.namespace.arena, answer.backing)
            return None
        self._write(answer.plan)
        self._untidy.set()
        return runs_of(answer.pages)

    async def reserve(
        self, lease: Lease, start: int, stop: int, ahead: int, seconds: float
    ) -> Runs:
        """The pages, in the order of arrival; raises OutOfPages or LeaseEnded."""
        wanted = stop - len(lease.granted)
        # Beside what the lease itself holds there will never be more.
        own = lease.num_blocks + len(lease.reserved)
        if wanted > lease.namespace.arena.pool.num_pages - own:
            raise out_of_pages(self.shortage(lease, wanted))
        waiter = _Waiter(lease, start, stop, ahead)
        self._waiters.append(waiter)
        self._serve_waiters()
        try:
            with anyio.move_on_after(seconds):
                await waiter.done.wait()
        finally:
            if not waiter.done.is_set():
                self._waiters.remove(waiter)
                self._serve_waiters()
        if waiter.error:
            raise waiter.error
        if not waiter.done.is_set():
            raise out_of_pages(self.shortage(lease, stop - len(lease.granted)))
        return waiter.runs

    def shortage(self, lease: Lease, num_wanted: int) -> Shortage:
        return self.state.shortage(lease.namespace.arena, num_wanted)

    def commit(self, session: int, item: CommitItem, tokens: Tokens) -> CommitResult:
        lease = self.lease(session, item.lease)
        if sum(run.count for run in item.pages) > lease.namespace.arena.pool.num_pages:
            raise BadRequest("a commit names more pages than there are")
        answer = self.state.commit(lease, item.first_block, pages_of(item.pages), tokens)
        self._carry_out(answer.plan)
        return CommitResult(runs_of(answer.pages), answer.num_duplicates)

    def abort(self, session: int, leases: Sequence[int]) -> None:
        for lease_id in leases:
            if lease := self.state.leases.find(session, lease_id):
                self._carry_out(self.state.abort(lease))

    def release(self, session: int, leases: Sequence[int]) -> None:
        for lease_id in leases:
            self._carry_out(self.state.release(session, lease_id))

    def release_others(self, session: int, living: Sequence[int]) -> None:
        """Release what a session holds beside the leases that it says it has."""
        keep = set(living)
        extra = [lease.id for lease in self.state.leases.of_session(session)]
        self.release(session, [lease_id for lease_id in extra if lease_id not in keep])

    def close_namespace(self, session: int, namespace: int) -> None:
        self.release(
            session,
            [x.id for x in self.state.leases.of_session(session) if x.namespace.id == namespace],
        )

    def end_session(self, session: int) -> None:
        self._carry_out(self.state.end_session(session))

    def session_gone(self, session: int) -> None:
        self._carry_out(self.state.session_gone(session))

    # --- status ---

    def tier_status(self) -> TierStatus:
        pages = {state.name.lower(): 0 for state in PageState}
        for arena in self.state.arenas:
            for name, count in arena.pool.counts().items():
                pages[name] += count
        return TierStatus(
            self._tier.tier.name,
            self.state.capacity_bytes,
            sum(arena.backed_bytes for arena in self._arenas),
            pages,
        )

    def namespace_status(self) -> tuple[NamespaceStatus, ...]:
        return tuple(map(_namespace_status, self.state.namespaces.values()))

    # --- carrying out ---

    def _carry_out(self, plan: Plan) -> None:
        """Write down what the state decided; then see who can go on with what became free."""
        self._write(plan)
        if plan:
            self._serve_waiters()

    def _write(self, plan: Plan) -> None:
        for step in plan:
            match step:
                case Reserved():
                    self._arenas[step.arena].table.reserve(step.pages, step.session)
                case Committed():
                    self._arenas[step.arena].table.commit(
                        step.pages, step.parent, step.first_block, step.tokens, step.namespace
                    )
                case Freed():
                    self._arenas[step.arena].table.free(step.pages)
                case Quarantined():
                    self._arenas[step.arena].table.quarantine(step.pages)
                case Ended():
                    self._header.set_generation(step.slot, step.generation)
                case _:
                    assert_never(step)

    def _serve_waiters(self) -> None:
        """Answer the waiting reserves from the front, as far as pages go."""
        self._dismiss_ended()
        while self._waiters:
            waiter = self._waiters[0]
            try:
                answer = self.state.reserve(waiter.lease, waiter.start, waiter.stop, waiter.ahead)
            except BadRequest as error:  # the pages before were never granted, or aborted meanwhile
                self._dismiss(waiter, error)
                continue
            if not isinstance(answer, Granted):
                self._back(waiter.lease.namespace.arena, answer.backing)
                return
            self._write(answer.plan)
            waiter.runs = runs_of(answer.pages)
            self._waiters.popleft()
            waiter.done.set()
            self._untidy.set()

    def _dismiss_ended(self) -> None:
        """Tell the waiters whose leases have ended, wherever they stand."""
        for waiter in list(self._waiters):
            lease = waiter.lease
            if self.state.leases.find(lease.session, lease.id) is not lease:
                self._dismiss(
                    waiter, LeaseEnded(f"lease {lease.id} ended while it waited for pages")
                )

    def _dismiss(self, waiter: _Waiter, error: KvdError) -> None:
        waiter.error = error
        self._waiters.remove(waiter)
        waiter.done.set()

    # --- memory ---

    def _back_ahead(self) -> None:
        """Have `back_ahead_bytes` of free memory ready in each arena, while the capacity lasts."""
        # Of a small capacity no layout takes much before it is asked for.
        size = min(self._config.back_ahead_bytes, self.state.capacity_bytes // 16)
        for arena in self.state.arenas:
            ahead = math.ceil(size / arena.layout.page_bytes)
            pool = arena.pool
            if not pool.num_backed:  # a layout of which nothing was reserved yet needs nothing
                continue
            if (missing := ahead - pool.num_free) > 0 and not pool.num_backing:
                self._back(arena, self.state.begin_backing(arena, missing))

    def _back(self, arena: ArenaState, runs: Sequence[Run]) -> None:
        """Have memory given. Tasks are started by `run`: this is called from no task of its own."""
        for run in runs:
            self._begun += [(arena, piece) for piece in backing_pieces(self._arenas[arena.id], run)]
            self._untidy.set()

    async def _back_piece(self, arena: ArenaState, piece: Run) -> None:
        try:
            await self._tier.back(self._arenas[arena.id], piece)
            backed = True
        except TierFailed as error:
            backed = False
            self._pause_backing(error)
        self._carry_out(self.state.end_backing(arena, piece, backed=backed))
        if not backed:
            self._serve_waiters()

    def _pause_backing(self, error: TierFailed) -> None:
        """The file system is full: go on with what there is, and ask again later."""
        assert self._tasks is not None
        if self.state.may_back:
            self.state.may_back = False
            logger.error("reason=no_memory %s; asking again in %s s", error, BACKING_PAUSE_SECONDS)
            self._tasks.start_soon(self._resume_backing)

    async def _resume_backing(self) -> None:
        await anyio.sleep(BACKING_PAUSE_SECONDS)
        self.state.may_back = True
        self._serve_waiters()
        self._untidy.set()


def out_of_pages(shortage: Shortage) -> OutOfPages:
    return OutOfPages(
        f"{shortage.num_wanted} pages wanted, {shortage.num_free} free; of {shortage.num_pages} "
        f"{shortage.num_locked} are locked by leases, {shortage.num_reserved} reserved, "
        f"{shortage.num_quarantined} quarantined",
        **msgspec.structs.asdict(shortage),
    )


def _namespace_status(namespace: Namespace) -> NamespaceStatus:
    nodes = list(namespace.tree.nodes())
    return NamespaceStatus(
        namespace.id,
        namespace.identity.model,
        namespace.identity.revision,
        namespace.salt,
        namespace.arena.layout.block_size,
        namespace.arena.layout.page_bytes,
        sum(node.num_blocks for node in nodes),
        len(nodes),
    )
