"""Mover: copies blocks between memory and the stores, down in the background and up when asked.

Concurrency: what it does is booked in the state between two awaits. Meanwhile it names pages with
their generations and keys, never nodes: whatever was evicted, committed or dropped while it waited,
the state or the page table says when it is done. Pages that it reads without holding them are read
in the thread that gives memory and takes it, so that none is taken under it.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import anyio
from opentelemetry.trace import Link, use_span

from kvd import telemetry
from kvd.actors.signal import Signal
from kvd.actors.together import together
from kvd.actors.turns import again_and_again
from kvd.arena.page_table import NO_PARENT, PageState
from kvd.arena.runs import pages_of
from kvd.cache.radix import MEMORY
from kvd.cache.recovery import about
from kvd.protocol.errors import KvdError, OutOfPages, TierFailed
from kvd.telemetry import tier_duration, timed
from kvd.tiers import copying
from kvd.tiers.copying import Copy

if TYPE_CHECKING:
    from anyio.abc import TaskStatus
    from opentelemetry.trace import Span

    from kvd.actors.manager import Manager
    from kvd.actors.sequences import Sequences
    from kvd.actors.store import StoreActor
    from kvd.arena.runs import Pages
    from kvd.cache.leases import Lease
    from kvd.cache.memory import ArenaState, Namespace
    from kvd.cache.plan import Lacking, Plan
    from kvd.cache.stores import Write
    from kvd.config import CacheConfig, Config
    from kvd.protocol.codec import Tokens
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import TierArena

logger = logging.getLogger(__name__)

DemotionReason: TypeAlias = Literal["watermark", "checkpoint"]
PromotionReason: TypeAlias = Literal["match", "prefetch"]

# What goes down at once: the store's writer is busy with it for a tenth of a second or so.
DEMOTE_BYTES = 64 << 20
# What comes up at once: what is there by a deadline is whole pieces of this.
PROMOTE_BYTES = 16 << 20
HELD_FRACTION = 16
# What is summed at once, in the thread that gives memory: some milliseconds.
SUMMED_BYTES = 32 << 20
# A promotion that finds no pages in this time is given up: those in use may stay so for long.
PROMOTE_SECONDS = 0.5
# What is prefetched is given up after so long, and so many at once.
PREFETCH_SECONDS = 60.0
MAX_PREFETCHES = 32
# So many promotions at once from one store, each of which holds pages; others wait without.
MAX_PROMOTIONS = 2
# So much of one store is waited for at once; what is more is a miss.
MAX_WORKS = 256


@dataclass(eq=False, slots=True)
class _Work:
    """Something that matches wait for, of a tier, done once for all of them.

    `reason` is that of who asked first.
    """

    tier: int
    reason: PromotionReason
    span: Span
    done: anyio.Event = field(default_factory=anyio.Event)
    is_good: bool = False


class Mover:
    """All movement of one daemon."""

    def __init__(
        self,
        config: CacheConfig,
        manager: Manager,
        sequences: Sequences,
        stores: Sequence[StoreActor],
    ) -> None:
        self._config = config
        self._other_time = Signal()
        self._manager = manager
        self._sequences = sequences
        self._state = manager.state
        self._stores = stores
        # What is on its way is held: of a small memory never so much that others wait for it.
        most = self._state.memory.capacity_bytes // HELD_FRACTION
        self._demote_bytes = min(DEMOTE_BYTES, most)
        self._promote_bytes = min(PROMOTE_BYTES, most)
        self._writing = {store: anyio.Lock() for store in stores}
        self._promoting = {store: anyio.Semaphore(MAX_PROMOTIONS) for store in stores}
        self._works: dict[object, _Work] = {}
        self._num_prefetching = 0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(again_and_again, self._sum)
            for store in self._stores:
                self._tasks.start_soon(again_and_again, self._demote, store)
            self._tasks.start_soon(again_and_again, self._checkpoint_by_time)
            task_status.started()

    @property
    def num_works(self) -> int:
        """What is being brought to memory, or verified, or waits for its turn."""
        return len(self._works)

    async def close(self) -> None:
        """Save what is not saved yet, as far as there is time, and stop."""
        try:
            await self.checkpoint()
        except KvdError as error:
            logger.error("reason=not_saved %s", error)
        except anyio.get_cancelled_exc_class():
            logger.error("reason=not_saved the stop had no time left for it")
            raise
        finally:
            self._tasks.cancel_scope.cancel()

    def configure(self, config: Config) -> None:
        """Go by another configuration; another time between checkpoints begins now."""
        if config.cache.checkpoint_seconds != self._config.checkpoint_seconds:
            self._other_time.set()
        self._config = config.cache

    # --- down ---

    async def _demote(self, actor: StoreActor) -> None:
        """Copy some blocks down, the oldest first, or wait until memory is full enough."""
        if not (self._is_due(actor) and await self._demote_some(actor, "watermark")):
            await self._manager.changed.wait()

    def _is_due(self, actor: StoreActor) -> bool:
        memory = self._state.memory
        is_full = memory.used_bytes() > self._config.demote_watermark * memory.capacity_bytes
        return actor.state.may_write and is_full

    async def _demote_some(self, actor: StoreActor, reason: DemotionReason) -> bool:
        """Copy some blocks down; False where there are none to be copied."""
        async with self._writing[actor]:
            for layout in self._state.stores.cramped(actor.state):
                await self._make_place(actor, layout)
            plan: Plan = []
            write = self._state.stores.next_write(actor.state, self._demote_bytes, plan)
            self._manager.carry_out(plan)
            if write is None:
                return False
            bad: list[int] = []
            saved = has_failed = False
            try:
                bad = await self._write(actor, write)
                saved = not bad
            except KvdError as error:
                logger.debug("%d blocks not copied down: %s", len(write.pages), error)
                has_failed = True
            finally:
                plan = []
                count = self._state.stores.end_write(write, plan, saved=saved)
                actor.state.counters[f"demoted_{reason}"] += count
                self._manager.carry_out(plan)
                # What was on its way may be evicted now.
                self._manager.reserves.serve()
        for place in bad:
            self._remove_page(self._manager.arenas[write.arena.id], int(write.pages[place]))
        return not has_failed

    async def _make_place(self, actor: StoreActor, layout: Layout) -> None:
        """Where another layout has the room that is due to this one for good, it begins anew."""
        try:
            crowding = await actor.crowding(layout)
        except KvdError:  # it is known to be in trouble
            return
        if crowding is not None:
            self._manager.begin_anew(actor, crowding)
            await actor.settle()  # from then on it is known what room there is

    async def _write(self, actor: StoreActor, write: Write) -> list[int]:
        """The places of blocks that are not what their checksum says; then not all were copied."""
        arena, store = self._manager.arenas[write.arena.id], actor.store(write.arena.layout)
        assert store is not None
        abouts = [about(*each) for each in zip(write.parents, write.rows, strict=True)]
        sums = arena.table.checksums(write.pages).tolist()
        with (
            telemetry.tracer.start_as_current_span(
                telemetry.DEMOTE,
                attributes=_sizes(actor, arena.layout, len(write.pages)),
                links=self._manager.origins.links(write.arena.id, arena.table, write.pages),
            ),
            timed(tier_duration, {"tier": actor.name, "operation": "write"}),
        ):
            job = actor.submit(
                actor.writer.write,
                *(store, arena, write.pages, write.keys, abouts, sums),
                then=lambda _: actor.wrote(store, write.keys),
            )
            bad: list[int] = await actor.finish(job)
        if not bad:
            actor.state.counters["written_bytes"] += write.num_bytes
        return bad

    async def checkpoint(self, asked: Sequence[Span] = ()) -> int:
        """Copy down all that has no copy yet in the stores that survive; how many blocks.

        When it returns they survive a power loss, with the saved sequences, and what was dropped
        before stays dropped. All is tried beside each other, however long one of them takes; raises
        the first error, and TierFailed where blocks have no copy since later ones took their room.
        It is linked to the requests that `asked` for it.
        """
        links = [Link(span.get_span_context()) for span in asked]
        try:
            with telemetry.tracer.start_as_current_span(telemetry.CHECKPOINT, links=links):
                num_blocks = await self._checkpoint()
        except BaseException:
            self._state.counters["checkpoints_failed"] += 1
            raise
        self._state.counters["checkpoints_done"] += 1
        return num_blocks

    async def _checkpoint(self) -> int:
        before = self._state.counters["blocks_demoted"]
        surviving = [actor for actor in self._stores if actor.tier.survives]
        saves = [functools.partial(self._save_all, actor) for actor in surviving]
        await together(self._sequences.checkpoint, *saves)
        if count := self._state.stores.num_without_room([actor.state for actor in surviving]):
            raise TierFailed(f"{count} blocks have no room in the tiers that survive")
        return self._state.counters["blocks_demoted"] - before

    async def _checkpoint_by_time(self) -> None:
        with anyio.move_on_after(self._config.checkpoint_seconds):
            await self._other_time.wait()
            return
        try:
            await self.checkpoint()
        except KvdError as error:
            logger.error("reason=not_saved %s", error)

    async def _save_all(self, actor: StoreActor) -> None:
        counters, num_given_up = self._state.counters, -1
        await actor.settle()  # a new layout's store is being made, perhaps
        while num_given_up != counters["blocks_crowded_out"]:
            # What a store gives up to begin anew goes down again.
            num_given_up = counters["blocks_crowded_out"]
            await self._save_waiting(actor)
        await actor.sync()
        actor.check_layouts()

    async def _save_waiting(self, actor: StoreActor) -> None:
        """Copy down all that waits for it now."""
        stores = self._state.stores
        waiting = stores.waiting(actor.state)
        while stores.still_wait(actor.state, waiting):
            # What another one had begun meanwhile may have been all.
            if not await self._demote_some(actor, "checkpoint") and stores.still_wait(
                actor.state, waiting
            ):
                raise TierFailed(
                    f"tier {actor.name} took not all blocks: {actor.trouble or 'it is full'}"
                )

    # --- up ---

    async def prepare(
        self,
        space: Namespace,
        tokens: Tokens,
        seconds: float,
        *,
        promote: bool = True,
        reason: PromotionReason = "match",
    ) -> dict[str, int]:
        """Verify and, to `promote`, read what these tokens lack in memory, while there is time.

        In order, so that what is there in time is the longer prefix; what has begun goes on behind.
        How many blocks came from which tier.
        """
        came: Counter[str] = Counter()
        with anyio.move_on_after(seconds):
            while space.id in self._state.namespaces and (
                lacking := self._state.lacking(space, tokens)
            ):
                if lacking.keys and not promote:
                    break
                before = space.tree.find(tokens).total_blocks
                work = self._work(space, tokens, lacking, reason)
                if work is None:
                    break
                await work.done.wait()
                num_blocks = space.tree.find(tokens).total_blocks - before
                if lacking.keys and num_blocks > 0:
                    came[self._stores[lacking.tier - 1].name] += num_blocks
                if not work.is_good:
                    break
        return dict(came)

    def prefetch(self, space: Namespace, tokens: Tokens) -> None:
        """Bring what these tokens lack to memory, in the background; nobody waits for it.

        Of too many at once the last are left out: they are brought when they are asked for.
        """
        if self._num_prefetching < MAX_PREFETCHES:
            self._num_prefetching += 1
            self._tasks.start_soon(self._prefetch, space, tokens)

    async def _prefetch(self, space: Namespace, tokens: Tokens) -> None:
        try:
            await self.prepare(space, tokens, PREFETCH_SECONDS, reason="prefetch")
        finally:
            self._num_prefetching -= 1

    def _work(
        self, space: Namespace, tokens: Tokens, lacking: Lacking, reason: PromotionReason
    ) -> _Work | None:
        """What brings some of what is lacking, begun now or under way already.

        None where too much waits for a store: it outlives who asked, each with its tokens.
        """
        name = lacking.keys[0] if lacking.keys else (space.arena.id, int(lacking.pages[0]))
        work = self._works.get(name)
        if work is None:
            waiting = sum(each.tier == lacking.tier for each in self._works.values())
            if lacking.keys and waiting >= MAX_WORKS:
                return None
            span = telemetry.tracer.start_span(
                telemetry.PROMOTE if lacking.keys else telemetry.VERIFY,
                attributes={telemetry.NAMESPACE: space.identity.model},
            )
            work = self._works[name] = _Work(lacking.tier, reason, span)
            self._tasks.start_soon(self._bring, name, space, tokens, lacking, work)
        else:
            telemetry.linked(work.span)
        return work

    async def _bring(
        self, name: object, space: Namespace, tokens: Tokens, lacking: Lacking, work: _Work
    ) -> None:
        with use_span(work.span, end_on_exit=True):
            try:
                if lacking.keys:
                    async with self._promoting[self._stores[lacking.tier - 1]]:
                        work.is_good = await self._promote(space, tokens, work)
                else:
                    size = max(1, SUMMED_BYTES // space.arena.layout.page_bytes)
                    await self._manager.queue.call(self.verify, space.arena, lacking.pages[:size])
                    work.is_good = True
            except KvdError as error:
                telemetry.refused(error)
                logger.debug("blocks could not be brought: %s", error)
            except Exception:
                logger.exception("reason=internal blocks could not be brought")
            finally:
                del self._works[name]
                work.done.set()

    async def _promote(self, space: Namespace, tokens: Tokens, work: _Work) -> bool:
        """Read the next blocks of these tokens into memory; True when it is worth to look again.

        As a client would: a lease of the daemon's own on what is there, pages for the rest, commit.
        """
        tier, layout = work.tier, space.arena.layout
        actor = self._stores[tier - 1]
        store, arena = actor.store(layout), self._manager.arenas.get(space.arena.id)
        if store is None or arena is None:  # gone, while this waited for its turn
            return True
        with self._manager.holding(space, tokens) as lease:
            lacking = self._state.lacking(space, tokens)
            if lacking is None or lacking.tier != tier:
                return True
            keys = lacking.keys[: max(1, self._promote_bytes // layout.page_bytes)]
            first, width = lease.num_blocks, space.tree.block_bytes
            pages = await self._pages(lease, len(keys))
            with (
                telemetry.tracer.start_as_current_span(
                    telemetry.READ, attributes=_sizes(actor, layout, len(keys))
                ),
                timed(tier_duration, {"tier": actor.name, "operation": "read"}),
            ):
                copies = await actor.read(copying.read, store, arena, pages, keys)
            good = next((at for at, copy in enumerate(copies) if copy is not Copy.GOOD), len(keys))
            if good:
                rows = tokens[first * width : (first + good) * width]
                self._manager.carry_out(self._state.commit(lease, first, pages[:good], rows).plan)
                self._state.counters["blocks_promoted"] += good
                actor.state.counters[f"promoted_{work.reason}"] += good
                actor.state.counters["read_bytes"] += good * layout.page_bytes
            if good < len(keys):
                self.remove(space, tokens[: (first + good + 1) * width], copies[good], tier)
        return True

    async def _pages(self, lease: Lease, num_pages: int) -> Pages:
        """Pages to read into. Raises OutOfPages, but not while memory for them is on its way."""
        while True:
            try:
                return pages_of(
                    await self._manager.reserves.in_turn(lease, 0, num_pages, 0, PROMOTE_SECONDS)
                )
            except OutOfPages:
                if not lease.namespace.arena.pool.num_backing:
                    raise

    # --- checksums ---

    async def _sum(self) -> None:
        """Sum blocks up soon after their commit, so that damage is seen from then on."""
        while self._manager.unsummed:
            await self._manager.queue.call(self._sum_some)
        await self._manager.changed.wait()

    async def _sum_some(self) -> None:
        number, pages = self._manager.unsummed.popleft()
        arena, state = self._manager.arenas.get(number), self._state.memory.arenas.get(number)
        if arena is None or state is None:
            return
        pages = pages[state.pool.states[pages] == PageState.COMMITTED]
        size = max(1, SUMMED_BYTES // arena.layout.page_bytes)
        if len(pages) > size:
            self._manager.unsummed.appendleft((number, pages[size:]))
        pages = pages[:size]
        if not len(pages):
            return
        generations = arena.table.generations(pages)
        try:
            sums = await self._manager.checksums(arena, pages)
        except Exception:  # they are tried again, behind those that may do better
            self._manager.unsummed.append((number, pages))
            raise
        arena.table.add_checksums(pages, generations, sums)

    async def verify(self, arena: ArenaState, pages: Pages) -> tuple[int, int]:
        """Compare blocks in memory with their checksums; how many were looked at and how many bad.

        To be called by `Manager.queue`. Bad ones are removed, with all that follows them.
        """
        there = self._manager.arenas.get(arena.id)
        pages = pages[arena.pool.states[pages] == PageState.COMMITTED]
        if there is None or not len(pages):
            return 0, 0
        pages = pages[there.table.checksums(pages) != 0]
        generations = there.table.generations(pages)
        sums = await self._manager.checksums(there, pages)
        is_same = arena.pool.states[pages] == PageState.COMMITTED
        pages, sums, generations = pages[is_same], sums[is_same], generations[is_same]
        is_same = there.table.generations(pages) == generations
        is_good = there.table.checksums(pages) == sums
        self._state.counters["blocks_verified"] += len(pages)
        arena.unverified.difference_update(pages[is_same & is_good].tolist())
        bad = pages[is_same & ~is_good].tolist()
        for page in bad:
            self._remove_page(there, page)
        return len(pages), len(bad)

    def _remove_page(self, arena: TierArena, page: int) -> None:
        """A page in memory is not what was committed to it."""
        parts: list[bytes] = []
        width = arena.layout.block_size * arena.row_bytes
        records = arena.table.records
        number = int(records[page]["namespace"])
        while page != NO_PARENT and records[page]["state"] == PageState.COMMITTED:
            parts.append(records[page]["rows"].tobytes()[:width])
            page = int(records[page]["parent"])
        if page == NO_PARENT and (space := self._state.namespaces.get(number)):
            self.remove(space, b"".join(reversed(parts)), Copy.BAD)

    def remove(self, space: Namespace, tokens: Tokens, copy: Copy, tier: int = MEMORY) -> None:
        """A block is not what it was, or is not there; it goes with all that follows it.

        From memory it goes everywhere, since its copies were made from there; from a store only
        there, and what memory has is copied anew.
        """
        if tier == MEMORY:
            plan = self._state.remove(space, tokens)
        else:
            plan = self._state.remove_copy(space, tokens, tier)
        if not plan:
            return  # it went meanwhile
        if copy is Copy.BAD:
            self._state.counters["checksum_failures"] += 1
            logger.error(
                "reason=checksum namespace=%s: a block, %d tokens in, is damaged: it is removed "
                "with what follows it",
                space.identity.model,
                len(tokens) // space.tree.row_bytes,
            )
        else:
            self._state.counters["blocks_missing"] += 1
        self._manager.carry_out(plan)


def _sizes(actor: StoreActor, layout: Layout, num_blocks: int) -> dict[str, str | int]:
    """The attributes of a span in which a tier reads or writes blocks."""
    return {
        telemetry.TIER: actor.name,
        telemetry.NUM_BLOCKS: num_blocks,
        telemetry.NUM_BYTES: num_blocks * layout.page_bytes,
    }
