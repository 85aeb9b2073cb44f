"""Manager: owns CacheState and carries out its plans.

The router calls it directly: what can be answered at once (every hit, every release, a reserve
while pages are free) is answered in the call, between two awaits. Only a reserve that must wait for
memory or for other leases is awaited, in the order of arrival.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import anyio
import msgspec

from kvd.actors.copies import pages_named
from kvd.actors.origins import Origins
from kvd.actors.queue import CallQueue
from kvd.actors.reserves import Reserves
from kvd.actors.signal import Signal, Want
from kvd.actors.status import memory_status, store_status
from kvd.actors.tier import TierActor, backing_pieces
from kvd.actors.together import together
from kvd.arena.header import NUM_SLOTS, SharedHeader
from kvd.arena.page_table import record_bytes
from kvd.arena.runs import Pages, pages_of, runs_of
from kvd.cache.leases import OWN_SESSION
from kvd.cache.memory import NO_QUOTA, ArenaState, Namespace, Quota
from kvd.cache.plan import (
    Back,
    Committed,
    Detached,
    Ended,
    Forgotten,
    Freed,
    Plan,
    Quarantined,
    Removed,
    Reserved,
    Unback,
    Unnamed,
    merged,
)
from kvd.cache.rows import row_bytes, rows_of
from kvd.cache.state import CacheState
from kvd.protocol.errors import TierFailed, UnknownNamespace
from kvd.protocol.keys import Identity, NamespaceInfo, check_identity
from kvd.protocol.layout import Layout, check_layout, check_rows
from kvd.protocol.messages import (
    CommitItem,
    CommitResult,
    DropItem,
    DropResult,
    ExtendItem,
    ForkItem,
    MatchItem,
    MatchResult,
    PinItem,
    PinResult,
    PrefetchItem,
    Run,
    TierStatus,
)

if TYPE_CHECKING:
    import numpy as np
    from anyio.abc import TaskStatus
    from numpy.typing import NDArray

    from kvd.actors.store import StoreActor
    from kvd.arena.base import Arena
    from kvd.arena.device import DeviceArena
    from kvd.cache.leases import Lease
    from kvd.config import Config
    from kvd.protocol.codec import Tokens
    from kvd.protocol.messages import Extras
    from kvd.tiers.base import TierArena

logger = logging.getLogger(__name__)

# After the file system refused memory it is asked again only so much later.
BACKING_PAUSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Match:
    """A lease on what memory has of `rows`; whether more of them could be had by waiting."""

    lease: Lease
    rows: bytes
    lacks_more: bool


@dataclass(frozen=True, slots=True)
class Opened:
    namespace: Namespace
    arena: TierArena


class Manager:
    """The cache of one daemon: one memory tier, the stores below it, and what is known of both.

    `changed` tells that there are new blocks, or a store that works again; `unsummed` are pages of
    blocks that have no checksum yet, by arena. `trouble` says in words why memory is of no use to
    who comes.
    """

    def __init__(
        self,
        config: Config,
        tier: TierActor,
        header: SharedHeader,
        stores: Sequence[StoreActor],
        changed: Signal,
    ) -> None:
        self._config = config
        self._tier = tier
        self._header = header
        self._stores = stores
        self.state = CacheState(
            tier.tier.capacity_bytes,
            NUM_SLOTS,
            config.cache,
            config.limits,
            [store.state for store in stores],
        )
        self.arenas: dict[int, TierArena] = {}
        self.changed = changed
        self.unsummed: deque[tuple[int, Pages]] = deque()
        self.trouble = ""
        self.origins = Origins()
        self._opening = anyio.Lock()
        self._untidy = Want()
        self._pinned = Want()
        self._paused = Want()
        self.reserves = Reserves(self.state, self._write, self._untidy.set)
        # Work for the tier's thread.
        self.queue = CallQueue(tier.tier.name)
        self._holds = itertools.count(1)
        self._earlier: set[int] = set()
        self._untold: set[int] = set()
        self._closing = False

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the tier in order: evict above the watermark, have some memory ready."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.queue.run)
            tasks.start_soon(self._resume_backing)
            tasks.start_soon(self._expire_pins)
            task_status.started()
            while not self._closing:
                await self._untidy.wait()
                self.carry_out(self.state.memory.trim())
                self._write(self.state.memory.back_ahead())
            tasks.cancel_scope.cancel()

    def close(self) -> None:
        """Begin nothing more; memory that was being given is given up."""
        self._closing = True
        self._untidy.set()

    def configure(self, config: Config) -> None:
        """Go by another configuration, in open namespaces too.

        Raises ConfigError where it guarantees more than there is, and changes nothing then.
        """
        spaces = self.state.namespaces.values()
        quotas = {space: _quota(config, space.identity, space.salt) for space in spaces}
        self.carry_out(self.state.configure(config.cache, config.limits, quotas))
        self._config = config
        self.reserves.serve()
        self._untidy.set()
        self.changed.set()

    # --- namespaces ---

    async def open(
        self, session: int, identity: Identity, layout: Layout, salt: str, *, extras: bool
    ) -> Opened:
        """The namespace of an identity, layout and salt; its arena is made at the first use."""
        check_identity(identity)
        check_layout(layout)
        info = NamespaceInfo(identity, layout, salt, extras)
        key = info.key
        async with self._opening:
            self.state.check_open(session, key, _quota(self._config, identity, salt))
            known = self.state.find_namespace(key)
            arena = known.arena if known else await self._place_for(info)
            quota = _quota(self._config, identity, salt)  # a reload may have come between
            namespace = self.state.open_namespace(session, key, identity, salt, arena, quota=quota)
            if known is None:
                self._tell_stores(info)
        self._untidy.set()
        return Opened(namespace, self.arenas[arena.id])

    async def _place_for(self, info: NamespaceInfo) -> ArenaState:
        """The arena of a namespace that is made now; others go at the end, when nothing can fail.

        Raises BadRequest, LimitExceeded, TierFailed; then all is as it was.
        """
        layout, width = info.layout, row_bytes(extras=info.extras)
        arena = self.state.find_arena(layout, width)
        self.state.check_can_make_place(for_arena=arena is None)
        made = self.arenas[arena.id] if arena else await self._tier.create_arena(layout, width)
        try:
            # Before a record has this number, it is known what it stands for.
            await self._tier.note_namespace(made, self.state.next_number, info)
            self.carry_out(self.state.make_place(for_arena=arena is None))
        except BaseException:
            if arena is None:
                self.queue.put(self._tier.remove_arena, made)
            raise
        return arena or self.add_arena(made)

    def _tell_stores(self, info: NamespaceInfo) -> None:
        """See that the stores can keep blocks of a namespace; where they cannot, they do not."""
        for actor in self._stores:
            actor.prepare(info)

    def quarantine(self, arena: ArenaState, session: int, pages: Pages) -> None:
        """Keep pages from use that a session of an earlier epoch, 0 if not known, may write."""
        self.state.quarantined.setdefault(session, []).append((arena, pages))
        self._earlier.add(session)

    def add_arena(self, made: TierArena) -> ArenaState:
        """An arena of the tier, new or adopted."""
        layout, width = made.layout, made.row_bytes
        if self.state.find_arena(layout, width):
            raise TierFailed(f"there is an arena of {layout} already")
        size = record_bytes(layout, width)
        arena = self.state.add_arena(layout, width, made.num_pages, made.extent_pages, size)
        self.arenas[arena.id] = made
        return arena

    def give_up(self, made: TierArena) -> None:
        """An arena could not be adopted: nobody uses it yet, and it is as if it never was."""
        number = next((one for one, arena in self.arenas.items() if arena is made), None)
        if number is not None:
            del self.arenas[number]
            self.state.give_up(self.state.memory.arenas[number])

    def restore_namespace(self, number: int, info: NamespaceInfo, arena: ArenaState) -> Namespace:
        """A namespace of an earlier epoch, under the number that records have for it."""
        quota = _quota(self._config, info.identity, info.salt)
        namespace = self.state.restore_namespace(number, info, arena, quota)
        self._tell_stores(info)
        return namespace

    async def known_namespace(self, info: NamespaceInfo) -> Namespace:
        """The namespace of which a store has blocks, made where memory has none of it."""
        if (known := self.state.find_namespace(info.key)) is not None:
            return known
        width = row_bytes(extras=info.extras)
        arena = self.state.find_arena(info.layout, width)
        self.state.check_place(for_arena=arena is None)
        arena = arena or self.add_arena(await self._tier.create_arena(info.layout, width))
        number = self.state.next_number
        await self._tier.note_namespace(self.arenas[arena.id], number, info)
        return self.restore_namespace(number, info, arena)

    def close_namespace(self, session: int, number: int) -> None:
        if (namespace := self.state.namespaces.get(number)) is not None:
            self.carry_out(self.state.close_namespace(session, namespace))

    def _opened(self, session: int, number: int) -> Namespace:
        namespace = self.state.namespaces.get(number)
        if namespace is None or session not in namespace.sessions:
            raise UnknownNamespace(f"this session has not opened namespace {number}")
        return namespace

    def named(self, session: int, item: PrefetchItem, tokens: Tokens) -> tuple[Namespace, bytes]:
        """The namespace and the rows that an item names."""
        namespace = self._opened(session, item.namespace)
        return namespace, _rows(namespace, tokens, item.extras)

    def known(self, number: int) -> Namespace:
        if (namespace := self.state.namespaces.get(number)) is None:
            raise UnknownNamespace(f"there is no namespace {number}")
        return namespace

    # --- leases ---

    def match(self, session: int, item: MatchItem, tokens: Tokens) -> Match:
        """Lease the longest prefix in memory; pages to reserve are the caller's next step."""
        namespace = self._opened(session, item.namespace)
        if item.exact_tail:
            check_rows(namespace.arena.layout)
        rows = _rows(namespace, tokens, item.extras)
        matched = self.state.match(
            session,
            item.lease,
            namespace,
            rows,
            exact_tail=item.exact_tail,
            now=time.monotonic(),
        )
        self.carry_out(matched.plan)
        return self._match(matched.lease, rows)

    def extend(
        self,
        session: int,
        item: MatchItem | ExtendItem,
        tokens: Tokens,
        *,
        exact_tail: bool = False,
    ) -> Match:
        """Lease what more of a match's tokens is in memory now."""
        lease = self.lease(session, item.lease)
        rows = _rows(lease.namespace, tokens, item.extras)
        self.carry_out(self.state.extend(lease, rows, exact_tail=exact_tail).plan)
        return self._match(lease, rows)

    def _match(self, lease: Lease, rows: bytes) -> Match:
        if self._config.cache.admission == "reused":
            self.changed.set()  # what was matched again shall have copies
        return Match(lease, rows, self.state.lacks_more(lease, rows))

    def matched(self, match: Match, came: dict[str, int] | None = None) -> MatchResult:
        """The answer to a match; `came` are blocks that were read for it, by tier."""
        lease = match.lease
        result = self._result(lease, came or {})
        if match.lacks_more:
            pending = self.state.num_pending(lease, match.rows)
            result = msgspec.structs.replace(result, pending_tokens=pending)
        self.state.count_match(lease, match.rows, result.tokens_by_tier, result.pending_tokens)
        return result

    def fork(self, session: int, item: ForkItem) -> tuple[Lease, MatchResult]:
        """Lease the committed blocks of a lease once more."""
        source = self.lease(session, item.source)
        matched = self.state.fork(session, item.lease, source, time.monotonic())
        self.state.counters["forks"] += 1
        self.carry_out(matched.plan)
        return matched.lease, self._result(matched.lease, {})

    def _result(self, lease: Lease, came: dict[str, int]) -> MatchResult:
        size = lease.namespace.arena.layout.block_size
        num_tokens = lease.num_matched * size
        rest = num_tokens + (lease.tail.num_tokens if lease.tail else 0)
        by_tier: dict[str, int] = {}
        for name, count in came.items():
            by_tier[name] = min(count * size, rest)  # what came may have gone again
            rest -= by_tier[name]
        by_tier[self._tier.tier.name] = rest
        return MatchResult(
            num_tokens,
            lease.runs,
            lease.slot,
            lease.generation,
            tokens_by_tier={name: count for name, count in by_tier.items() if count},
            tail=lease.tail,
        )

    def lease(self, session: int, lease_id: int) -> Lease:
        return self.state.leases.get(session, lease_id)

    def unverified(
        self, session: int, item: CommitItem, tokens: Tokens
    ) -> tuple[Namespace, Tokens] | None:
        """What is to be verified before a commit: tokens of which blocks are there already."""
        lease = self.lease(session, item.lease)
        if not lease.namespace.arena.unverified:
            return None
        first = item.first_block * lease.namespace.arena.layout.block_size
        rows = _rows(lease.namespace, tokens, item.extras, first)
        start = item.first_block * lease.namespace.tree.block_bytes
        return lease.namespace, bytes(lease.node.path_tokens()[:start]) + rows

    def commit(self, session: int, item: CommitItem, tokens: Tokens) -> CommitResult:
        lease = self.lease(session, item.lease)
        pages = pages_named(lease, item.pages)
        first = item.first_block * lease.namespace.arena.layout.block_size
        rows = _rows(lease.namespace, tokens, item.extras, first)
        answer = self.state.commit(lease, item.first_block, pages, rows)
        self.carry_out(answer.plan)
        return CommitResult(runs_of(answer.pages), answer.num_duplicates)

    def abort(self, session: int, leases: Sequence[int]) -> None:
        plan: Plan = []
        for lease_id in leases:
            if lease := self.state.leases.find(session, lease_id):
                plan += self.state.abort(lease)
        self.carry_out(merged(plan))

    def release(self, session: int, leases: Sequence[int], keep_blocks: int = 0) -> None:
        plan: Plan = []
        for lease_id in leases:
            if not keep_blocks:
                plan += self.state.release(session, lease_id)
            elif lease := self.state.leases.find(session, lease_id):
                plan += self.state.keep(lease, keep_blocks)
        self.carry_out(merged(plan))

    def release_others(self, session: int, living: Sequence[int]) -> None:
        """Release what a session holds beside the leases that it says it has."""
        keep = set(living)
        extra = [lease.id for lease in self.state.leases.of_session(session)]
        self.release(session, [lease_id for lease_id in extra if lease_id not in keep])

    def end_session(self, session: int) -> None:
        self.carry_out(merged(self.state.end_session(session)))

    def session_gone(self, session: int) -> None:
        self.carry_out(self.state.session_gone(session))

    def free_earlier(self, living: set[int]) -> None:
        """Free what sessions of an earlier epoch could write, but for those whose processes live.

        What it is not known of who could write it waits for all of them.
        """
        for session in self._earlier - living - self._untold:
            if session or not (living or self._untold):
                self._earlier.discard(session)
                self.session_gone(session)

    def expect_earlier(self, told: set[int]) -> None:
        """Which sessions of an earlier epoch have files that tell when their processes are gone.

        Of any other it is never known: what it could write stays out of use.
        """
        self._untold = self._earlier - told - {0}
        if self._untold:
            logger.warning(
                "reason=session_files_missing %d sessions that could write pages left no file: "
                "these pages stay out of use until the machine starts anew",
                len(self._untold),
            )

    # --- leases of the daemon's own ---

    @contextmanager
    def holding(self, space: Namespace, tokens: Tokens) -> Iterator[Lease]:
        """A lease of the daemon's own on what memory has of these tokens."""
        number = next(self._holds)
        lease = self.state.hold(number, space, tokens, time.monotonic())
        try:
            yield lease
        finally:
            self.let_go(number)

    def hold(self, lease: Lease) -> int:
        """Hold a lease's blocks in the daemon's own name, until `let_go` of this number."""
        number = next(self._holds)
        self.carry_out(self.state.fork(OWN_SESSION, number, lease, time.monotonic()).plan)
        return number

    def let_go(self, number: int) -> None:
        self.release(OWN_SESSION, [number])

    def memory(self, lease: Lease) -> Arena | DeviceArena:
        return self.arenas[lease.namespace.arena.id].memory

    # --- pins and drops ---

    def pin(self, item: PinItem, owner: str, tokens: Tokens) -> PinResult:
        namespace = self.known(item.namespace)
        rows = _rows(namespace, tokens, item.extras)
        pinned = self.state.pin(owner, namespace, rows, item.seconds, time.monotonic())
        self.carry_out(pinned.plan)
        self._pinned.set()
        layout = namespace.arena.layout
        return PinResult(
            pinned.pin, pinned.num_blocks * layout.block_size, pinned.num_blocks * layout.page_bytes
        )

    def unpin(self, owner: str, pins: tuple[int, ...]) -> int:
        count, plan = self.state.unpin(owner, pins)
        self.carry_out(plan)
        return count

    async def _expire_pins(self) -> None:
        while True:
            expiry = self.state.pins.next_expiry()
            seconds = math.inf if expiry is None else max(0.0, expiry - time.monotonic())
            with anyio.move_on_after(seconds):
                await self._pinned.wait()
            self.carry_out(self.state.expire(time.monotonic()))

    def drop(self, item: DropItem, tokens: Tokens) -> DropResult:
        namespace = self.known(item.namespace)
        rows = _rows(namespace, tokens, item.extras)
        answer = self.state.drop(namespace, rows, item.from_block)
        self.carry_out(answer.plan)
        by_tier = dict(zip(self.tier_names, answer.num_blocks, strict=True))
        return DropResult(by_tier, answer.num_detached)

    async def settle(self) -> None:
        """When it returns, no store has anything of what was dropped, whatever happens.

        Raises TierFailed where that cannot be said of one; the others have it done.
        """
        await together(*(actor.sync for actor in self._stores))

    # --- status ---

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The fastest first."""
        return (self._tier.tier.name, *(store.name for store in self._stores))

    def tier_status(self) -> tuple[TierStatus, ...]:
        """All tiers, the fastest first."""
        memory = memory_status(self._tier.tier, self.arenas.values(), self.state, self.trouble)
        return (memory, *(store_status(actor, self.state) for actor in self._stores))

    # --- carrying out ---

    def carry_out(self, plan: Plan) -> None:
        """Write down what the state decided; then see who can go on with what became free."""
        self._write(plan)
        if plan:
            self.reserves.serve()

    def _write(self, plan: Plan) -> None:
        for step in plan:
            match step:
                case Reserved():
                    self.arenas[step.arena].table.reserve(step.pages, step.session)
                case Committed():
                    self.arenas[step.arena].table.commit(
                        step.pages, step.parent, step.first_block, step.rows, step.namespace
                    )
                    self.origins.note(step.arena, self.arenas[step.arena].table, step.pages)
                    if self._tier.tier.survives:
                        self.unsummed.append((step.arena, step.pages))
                    self.changed.set()
                case Detached():
                    self.arenas[step.arena].table.detach(step.pages)
                case Freed():
                    self.arenas[step.arena].table.free(step.pages)
                case Quarantined():
                    self.arenas[step.arena].table.quarantine(step.pages)
                case Ended():
                    self._header.set_generation(step.slot, step.generation)
                case Back():
                    for piece in backing_pieces(self.arenas[step.arena], step.run):
                        self.queue.put(self._back, self.state.memory.arenas[step.arena], piece)
                case Unback():
                    arena = self.arenas[step.arena]
                    arena.table.unback(pages_of([step.run]))
                    self.queue.put(self._tier.unback, arena, step.run)
                case Forgotten():
                    self._stores[step.tier - 1].forget(step.layout, step.keys)
                case Unnamed():
                    self._forget_namespace(self.arenas[step.arena], step.namespace, step.key)
                case Removed():
                    self._remove_arena(self.arenas.pop(step.arena))
                case _:
                    assert_never(step)

    def _forget_namespace(self, arena: TierArena, number: int, key: bytes) -> None:
        self.queue.put(self._tier.forget_namespace, arena, number)
        for actor in self._stores:
            actor.forget_namespaces(arena.layout, [key])

    def _remove_arena(self, arena: TierArena) -> None:
        self.queue.put(self._tier.remove_arena, arena)
        if not any(other.layout == arena.layout for other in self.arenas.values()):
            for actor in self._stores:
                actor.remove_store(arena.layout)

    def begin_anew(self, actor: StoreActor, layout: Layout) -> None:
        """A store gives up what it has of a layout; what memory has of it goes down again."""
        actor.remove_store(layout)
        spaces = [space for space in self.state.memory.spaces() if space.arena.layout == layout]
        num_blocks = sum(space.tree.counts[actor.state.tier] for space in spaces)
        logger.warning(
            "reason=crowded tier=%s gives up %d blocks of a layout, whose files have the room that "
            "is due to others and cannot shrink",
            actor.name,
            num_blocks,
        )
        self.state.counters["blocks_crowded_out"] += num_blocks
        self.state.forget_copies(layout, actor.state.tier)
        for space in spaces:
            actor.prepare(space.info)

    # --- memory ---

    async def checksums(self, arena: TierArena, pages: Pages) -> NDArray[np.uint64]:
        """The checksum of each page as it is now; within the queue, or of pages that are held."""
        return await self._tier.checksums(arena, pages)

    async def _back(self, arena: ArenaState, piece: Run) -> None:
        try:
            await self._tier.back(self.arenas[arena.id], piece)
            backed = True
        except TierFailed as error:
            backed = False
            self._pause_backing(error)
        self.carry_out(self.state.memory.end_backing(arena, piece, backed=backed))
        if not backed:
            self.reserves.serve()

    def _pause_backing(self, error: TierFailed) -> None:
        """The file system is full: go on with what there is, and ask again later."""
        memory = self.state.memory
        if memory.may_back:
            memory.may_back = False
            logger.error("reason=no_memory %s; asking again in %s s", error, BACKING_PAUSE_SECONDS)
            self._paused.set()

    async def _resume_backing(self) -> None:
        while True:
            await self._paused.wait()
            await anyio.sleep(BACKING_PAUSE_SECONDS)
            self.state.memory.may_back = True
            self.reserves.serve()
            self._untidy.set()


def _quota(config: Config, identity: Identity, salt: str) -> Quota:
    for quota in config.quotas:
        if quota.model in ("", identity.model) and quota.salt in ("", salt):
            return Quota(quota.guaranteed_bytes, quota.max_bytes)
    return NO_QUOTA


def _rows(namespace: Namespace, tokens: Tokens, extras: Extras, first: int = 0) -> bytes:
    return rows_of(tokens, extras, first, namespace.tree.row_bytes)
