"""Memory: which pages, of which layout, and what goes so that there are some.

All layouts share one capacity. Each has an arena whose extents have memory or not, each namespace
has its blocks by age, and ages are stamps of one clock: the coldest block of all is the coldest of
the coldest. Between layouts memory moves by whole extents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvd.arena.page_table import PageState
from kvd.arena.runs import pages_of
from kvd.cache.evicted import Evicted
from kvd.cache.plan import Back, Freed, Plan, Unback
from kvd.cache.radix import MEMORY
from kvd.protocol.codec import TOKEN_BYTES
from kvd.protocol.keys import NamespaceInfo
from kvd.protocol.messages import Run, Shortage

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.cache.pages import PagePool
    from kvd.cache.policy import Lru
    from kvd.cache.radix import Node, Tree
    from kvd.config import CacheConfig
    from kvd.protocol.keys import Identity
    from kvd.protocol.layout import Layout

# For pages of the same layout, for those of another, above the watermark, or above a capacity that
# is smaller than an earlier start's.
EvictionReason: TypeAlias = Literal["room", "layout", "watermark", "capacity"]

# Moving an extent costs its zeroing, so memory moves to a layout only from one whose coldest blocks
# are this many times older. Models that are used alike do not take it from each other in turns.
MOVE_AGE_RATIO = 2
# Blocks evicted elsewhere, in a fragmented arena, may not make an extent whole: so many times what
# is missing may go for it at one reserve.
MOVE_BUDGET = 2
# As much of the capacity may lie free in broken groups before they are used again.
MAX_BROKEN_FRACTION = 1 / 16


@dataclass(eq=False, slots=True)
class ArenaState:
    """The pages of one layout and row width in the tier.

    Each has `record_bytes` in the page table beside it. Of `unverified` pages, which an earlier
    epoch committed, the checksum was not looked at yet.
    """

    id: int
    layout: Layout
    row_bytes: int
    pool: PagePool
    record_bytes: int = 0
    namespaces: list[Namespace] = field(default_factory=list)
    unverified: set[int] = field(default_factory=set)

    @property
    def page_bytes(self) -> int:
        """What a page takes of the capacity."""
        return self.layout.page_bytes + self.record_bytes

    @property
    def extent_bytes(self) -> int:
        return self.pool.extent_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class Quota:
    """What a namespace keeps whatever others need, and what it gets at most (0: no bound)."""

    guaranteed_bytes: int = 0
    max_bytes: int = 0


NO_QUOTA = Quota()


@dataclass(eq=False, slots=True)
class Namespace:
    """The domain in which equal tokens mean equal KV.

    `num_pages` are its blocks', those that left the tree under leases, and its leases' reserved
    ones. `generation` counts drops; `sessions` have it open.
    """

    id: int
    key: bytes
    identity: Identity
    salt: str
    arena: ArenaState
    tree: Tree
    quota: Quota
    num_pages: int = 0
    generation: int = 0
    sessions: set[int] = field(default_factory=set)

    @property
    def lru(self) -> Lru:
        """Its unlocked blocks in memory, by age."""
        return self.tree.lrus[MEMORY]

    @property
    def has_extras(self) -> bool:
        return self.tree.row_bytes > TOKEN_BYTES

    @property
    def info(self) -> NamespaceInfo:
        return NamespaceInfo(self.identity, self.arena.layout, self.salt, self.has_extras)

    @property
    def guaranteed_pages(self) -> int:
        return self.quota.guaranteed_bytes // self.arena.layout.page_bytes

    @property
    def max_pages(self) -> int:
        """All pages of the arena, where it has no bound."""
        if not self.quota.max_bytes:
            return self.arena.pool.num_pages
        return self.quota.max_bytes // self.arena.layout.page_bytes


class Memory:
    """The capacity of one memory tier, and the arenas that share it."""

    def __init__(self, capacity_bytes: int, config: CacheConfig, counters: Counter[str]) -> None:
        self.capacity_bytes = capacity_bytes
        self.config = config
        self.arenas: dict[int, ArenaState] = {}
        self.num_touches = 0
        self.evicted = Evicted()
        self._counters = counters
        # False while the file system has no memory, whatever the capacity says.
        self.may_back = True

    def touch(self) -> int:
        """The clock: each touch is later than all before."""
        self.num_touches += 1
        return self.num_touches

    # --- making room ---

    def make_room(self, space: Namespace, count: int, plan: Plan) -> bool:
        """See that `count` pages are free for a namespace; False where they are not, or not yet.

        Free pages come first, then memory that the tier may still take, then memory that lies idle
        in other arenas, then the least recent blocks.
        """
        pool = space.arena.pool
        if count > min(pool.num_pages, space.max_pages):
            return False
        # What it may not have beside its own blocks, it makes room for itself, whatever is free.
        excess = max(0, space.num_pages + count - space.max_pages)
        if excess > space.lru.num_blocks:
            return False
        missing = max(0, count - pool.num_free - excess)
        if missing:
            self.begin_backing(space.arena, missing - pool.num_backing, plan)
            if not pool.num_backing:
                self._move(space, missing, plan)
            # Memory on its way is waited for before anything is evicted for want of it.
            if pool.num_backing or excess + missing > self._num_evictable(space):
                return False
        self._evict([space], space, excess, plan)
        self._evict(space.arena.namespaces, space, missing, plan)
        return True

    def spare(self, space: Namespace, needed: int, ahead: int, plan: Plan) -> int:
        """How many pages ahead there may be now; evicts for them once all memory is taken."""
        pool = space.arena.pool
        left = space.max_pages - space.num_pages - needed
        own = max(0, min(ahead - left, space.lru.num_blocks))
        self._evict([space], space, own, plan)
        ahead = min(ahead, left + own)
        missing = needed + ahead - pool.num_free
        if missing > 0 and not pool.num_backing and not self._num_backable(space.arena):
            missing = min(missing, self._num_evictable(space))
            self._evict(space.arena.namespaces, space, missing, plan)
        return max(0, min(ahead, pool.num_free - needed))

    def make_groups(self, space: Namespace, count: int, plan: Plan) -> None:
        """Evict the coldest ends, group by group, until `count` pages can be had in whole groups.

        Else what is left over of many leases, a few pages each, would make the runs of the next
        one short. At most `count` blocks go for it, and none while there is memory to be had, or
        while much lies in broken groups: that is used up first, or short prompts would leave most
        of the memory unused.
        """
        pool, left = space.arena.pool, count
        wanted = count // pool.group_pages
        if pool.num_backing or self._num_backable(space.arena):
            return
        if self._much_is_broken(space.arena):
            return
        for victim in _coldest_first(space.arena.namespaces, space):
            if left <= 0 or pool.num_whole_groups >= wanted:
                return
            # No group becomes whole before all that the leaf has in it are gone.
            size = min(left, _in_last_group(victim), _allowance(victim, space))
            self._shorten(victim, size, "room", plan)
            left -= size

    def _much_is_broken(self, arena: ArenaState) -> bool:
        """Whether more than one group of it lies free in broken ones, and much of the capacity."""
        broken_bytes = sum(each.pool.num_broken * each.page_bytes for each in self.arenas.values())
        is_much = broken_bytes > MAX_BROKEN_FRACTION * self.capacity_bytes
        return is_much and arena.pool.num_broken > arena.pool.group_pages

    def _move(self, space: Namespace, missing: int, plan: Plan) -> None:
        """Take memory from other arenas: what is idle there, and what held much colder blocks."""
        arena = space.arena
        pages = min(missing, arena.pool.num_unbacked)
        wanted = -(-pages // arena.pool.extent_pages) * arena.extent_bytes
        if not wanted or not self.may_back:
            return
        others = [other for other in self.arenas.values() if other is not arena]
        budget = MOVE_BUDGET * wanted
        self._unback(others, wanted, plan)
        at_least = self._age_to_move(space, missing)
        for victim in _coldest_first(
            [each for other in others for each in other.namespaces], space
        ):
            if self._left_bytes() >= wanted or budget <= 0 or self._age(victim) <= at_least:
                break
            size = min(_in_last_group(victim), _allowance(victim, space))
            self._shorten(victim, size, "layout", plan)
            budget -= size * victim.arena.page_bytes
            self._unback([victim.arena], wanted, plan)
        self.begin_backing(arena, missing, plan)

    def _age_to_move(self, space: Namespace, missing: int) -> int:
        """How old another layout's blocks must be to go for a namespace, in touches."""
        own = next(_coldest_first(space.arena.namespaces, space), None)
        if own is None or missing > self._num_evictable(space):
            return -1
        return MOVE_AGE_RATIO * self._age(own)

    def _age(self, space: Namespace) -> int:
        """Touches since that of its coldest block."""
        return self.num_touches - _leaf(space).stamp

    def _unback(self, arenas: Iterable[ArenaState], wanted_bytes: int, plan: Plan) -> None:
        """Take whole free extents out of arenas until so many bytes of the capacity are left."""
        for arena in arenas:
            needed = wanted_bytes - self._left_bytes()
            if needed > 0:
                runs = arena.pool.unback(-(-needed // arena.extent_bytes))
                plan += [Unback(arena.id, run) for run in runs]
                self._counters["pages_unbacked"] += sum(run.count for run in runs)

    # --- backing ---

    def back_ahead(self) -> Plan:
        """Have `back_ahead_bytes` of free memory ready in each arena, while the capacity lasts.

        It is ready in whole groups, unless so much lies in broken ones that this is used first.
        """
        plan: Plan = []
        # Of a small capacity no layout takes much before it is asked for.
        size = min(self.config.back_ahead_bytes, self.capacity_bytes // 16)
        for arena in self.arenas.values():
            pool = arena.pool
            ready = pool.num_free - (0 if self._much_is_broken(arena) else pool.num_broken)
            missing = math.ceil(size / arena.layout.page_bytes) - ready - pool.num_backing
            # A layout of which nothing was reserved yet needs nothing.
            if pool.num_backed and missing > 0:
                self.begin_backing(arena, missing, plan)
        return plan

    def begin_backing(self, arena: ArenaState, num_pages: int, plan: Plan) -> None:
        """Choose unbacked extents for at least `num_pages` pages, as far as the capacity goes."""
        wanted = -(-num_pages // arena.pool.extent_pages)
        count = min(wanted, self._num_backable(arena))
        if count > 0:
            plan += [Back(arena.id, run) for run in arena.pool.begin_backing(count)]

    def end_backing(self, arena: ArenaState, run: Run, *, backed: bool) -> Plan:
        arena.pool.end_backing(run, backed=backed)
        return [Freed(arena.id, pages_of([run]))] if backed else []

    def _num_backable(self, arena: ArenaState) -> int:
        """Extents for which there is memory, and room in the arena."""
        if not self.may_back:
            return 0
        extents = arena.pool.num_unbacked // arena.pool.extent_pages
        return max(0, min(self._left_bytes() // arena.extent_bytes, extents))

    def _left_bytes(self) -> int:
        return self.capacity_bytes - self.taken_bytes

    @property
    def taken_bytes(self) -> int:
        """Of the capacity, by pages that have memory."""
        return sum(arena.pool.num_backed * arena.page_bytes for arena in self.arenas.values())

    # --- eviction ---

    def trim(self) -> Plan:
        """Evict from the high watermark down to the low one, the least recent blocks of all."""
        plan: Plan = []
        used = self.used_bytes()
        if used <= self.config.high_watermark * self.capacity_bytes:
            return plan
        for victim in _coldest_first(self.spaces(), None):
            excess = used - self.config.low_watermark * self.capacity_bytes
            if excess <= 0:
                break
            page_bytes = victim.arena.page_bytes
            size = min(_allowance(victim, None), int(-(-excess // page_bytes)))
            self._shorten(victim, size, "watermark", plan)
            used -= size * page_bytes
        return plan

    def set_quota(self, space: Namespace, quota: Quota, plan: Plan) -> None:
        """Bound a namespace anew; of what it has above that goes what may."""
        space.quota = quota
        excess = max(0, space.num_pages - space.max_pages)
        self._evict([space], space, min(excess, space.lru.num_blocks), plan)

    def shrink(self, plan: Plan) -> None:
        """Give memory back until no more is taken than the capacity, as far as blocks may go."""
        self._unback(self.arenas.values(), 0, plan)
        for victim in _coldest_first(self.spaces(), None):
            if self._left_bytes() >= 0:
                break
            size = min(_in_last_group(victim), _allowance(victim, None))
            self._shorten(victim, size, "capacity", plan)
            self._unback([victim.arena], 0, plan)

    def free(self, space: Namespace, pages: Pages, plan: Plan) -> None:
        """A namespace gives pages back."""
        if len(pages):
            space.num_pages -= len(pages)
            plan.append(self.free_pages(space.arena, pages))

    def free_pages(self, arena: ArenaState, pages: Pages) -> Freed:
        """Pages that belong to no namespace are nobody's."""
        arena.pool.free(pages)
        if arena.unverified:
            arena.unverified.difference_update(pages.tolist())
        return Freed(arena.id, pages)

    def _evict(self, spaces: Iterable[Namespace], space: Namespace, count: int, plan: Plan) -> None:
        """Shorten the coldest leaves, on behalf of `space`; `count` blocks are there to go."""
        left = count
        for victim in _coldest_first(spaces, space):
            if left <= 0:
                break
            size = min(left, _allowance(victim, space))
            self._shorten(victim, size, "room", plan)
            left -= size

    def _shorten(self, victim: Namespace, count: int, reason: EvictionReason, plan: Plan) -> None:
        """Evict blocks from the end of a namespace's coldest leaf.

        Nobody waits for a store: what has no copy there yet is lost, and counted.
        """
        leaf = _leaf(victim)
        self._counters["blocks_evicted"] += count
        self._counters[f"evictions_{reason}"] += count
        if any(leaf in unsaved for unsaved in victim.tree.unsaved):
            self._counters["pressure_drops"] += count
        cut = victim.tree.cut(leaf, count)
        if cut.was_last:
            self.evicted.add(cut.keys)
        self.free(victim, cut.pages, plan)

    def _num_evictable(self, space: Namespace) -> int:
        """Blocks in the namespace's own arena that may go for it."""
        return sum(
            min(other.lru.num_blocks, _spendable(other, space)) for other in space.arena.namespaces
        )

    def spaces(self) -> Iterable[Namespace]:
        return (space for arena in self.arenas.values() for space in arena.namespaces)

    def used_bytes(self) -> int:
        return sum(arena.pool.num_held * arena.page_bytes for arena in self.arenas.values())

    # --- what people ask ---

    def shortage(self, space: Namespace, num_wanted: int) -> Shortage:
        counts = space.arena.pool.counts()
        unlocked = sum(other.lru.num_blocks for other in space.arena.namespaces)
        return Shortage(
            num_wanted,
            counts["free"],
            counts["committed"] + counts["detached"] - unlocked,
            counts["reserved"],
            counts["quarantined"],
            space.arena.pool.num_pages,
            space.max_pages if space.quota.max_bytes else 0,
        )

    def pages_by_state(self) -> dict[str, int]:
        pages: Counter[str] = Counter({state.name.lower(): 0 for state in PageState})
        for arena in self.arenas.values():
            pages.update(arena.pool.counts())
        return dict(pages)


def _leaf(space: Namespace) -> Node:
    leaf = space.lru.coldest()
    assert leaf is not None
    return leaf


def _coldest_first(spaces: Iterable[Namespace], space: Namespace | None) -> Iterator[Namespace]:
    """Again and again, whose coldest leaf is the coldest, of those that may lose it for `space`.

    Whoever asks takes some of that leaf each time.
    """
    heap = [(_leaf(each).stamp, each.id, each) for each in spaces if _may_lose(each, space)]
    heapify(heap)
    while heap:
        victim = heap[0][2]
        yield victim
        if _may_lose(victim, space):
            heapreplace(heap, (_leaf(victim).stamp, victim.id, victim))
        else:
            heappop(heap)


def _may_lose(victim: Namespace, space: Namespace | None) -> bool:
    return victim.lru.num_blocks > 0 and _spendable(victim, space) > 0


def _spendable(victim: Namespace, space: Namespace | None) -> int:
    """How many pages a namespace may lose: for itself any, for others what is not guaranteed."""
    return max(0, victim.num_pages - (0 if victim is space else victim.guaranteed_pages))


def _allowance(victim: Namespace, space: Namespace | None) -> int:
    """How many blocks of its coldest leaf may go at once."""
    return min(_leaf(victim).num_blocks, _spendable(victim, space))


def _in_last_group(space: Namespace) -> int:
    """How many blocks at the end of a namespace's coldest leaf lie in one group of pages."""
    leaf, group_pages = _leaf(space), space.arena.pool.group_pages
    group = leaf.pages[-1] // group_pages
    size = 1
    while size < leaf.num_blocks and leaf.pages[-size - 1] // group_pages == group:
        size += 1
    return size
