"""CacheState: match, reserve, commit, release, end of sessions, over all parts of the cache.

Concurrency: the state belongs to one event loop. Every method runs to its end without an await, so
there is no lock; what takes time (backing) is begun here, done elsewhere, and ended here by a
second call that names pages, never nodes. Each method returns its answer with a plan: the steps
that the caller must carry out, in their order, before the answer leaves the daemon.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvd.arena.base import GROUP_PAGES
from kvd.arena.page_table import PageState
from kvd.arena.runs import Pages, pages_of, runs_of
from kvd.cache.leases import Lease, LeaseTable
from kvd.cache.pages import PagePool
from kvd.cache.policy import Lru
from kvd.cache.radix import Node, Tree
from kvd.protocol.errors import BadRequest, LeaseEnded, LimitExceeded
from kvd.protocol.messages import Run, Runs, Shortage

if TYPE_CHECKING:
    from kvd.protocol.codec import Tokens
    from kvd.protocol.keys import Identity
    from kvd.protocol.layout import Layout

# --- steps of a plan -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserved:
    """Note that `session` may write these pages."""

    arena: int
    pages: Pages
    session: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Note these blocks, the first of which follows the block in page `parent` (-1: none)."""

    arena: int
    pages: Pages
    parent: int
    first_block: int
    tokens: Tokens
    namespace: int


@dataclass(frozen=True, slots=True)
class Freed:
    """Note that nobody holds these pages; descendants stand before their parents."""

    arena: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Note that a session that is over could still write these pages."""

    arena: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Ended:
    """Void the lease in this slot of the shared header, by the next generation."""

    slot: int
    generation: int


Step: TypeAlias = Reserved | Committed | Freed | Quarantined | Ended
Plan: TypeAlias = list[Step]


# --- answers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Matched:
    lease: Lease
    runs: Runs
    plan: Plan


@dataclass(frozen=True, slots=True)
class Granted:
    """Pages for a lease."""

    pages: Pages
    plan: Plan


@dataclass(frozen=True, slots=True)
class Short:
    """No pages now. `backing` extents first, if there are any; else wait for what others hold."""

    backing: list[Run]
    shortage: Shortage


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    pages: Pages
    num_duplicates: int
    plan: Plan


# --- what the state consists of --------------------------------------------------------------


@dataclass(eq=False, slots=True)
class ArenaState:
    """The pages of one layout in the tier, and their unlocked blocks by age."""

    id: int
    layout: Layout
    pool: PagePool
    lru: Lru = field(default_factory=Lru)

    @property
    def backed_bytes(self) -> int:
        return self.pool.num_backed * self.layout.page_bytes


@dataclass(eq=False, slots=True)
class Namespace:
    """The domain in which equal tokens mean equal KV."""

    id: int
    identity: Identity
    salt: str
    arena: ArenaState
    tree: Tree

    @property
    def block_bytes(self) -> int:
        return self.tree.block_bytes


class CacheState:
    """All that the cache knows of one memory tier of `capacity_bytes`."""

    def __init__(
        self,
        capacity_bytes: int,
        num_slots: int,
        *,
        high_watermark: float = 1.0,
        low_watermark: float = 1.0,
        max_session_leases: int = 1 << 16,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.high_watermark = high_watermark
        self.low_watermark = low_watermark
        self.max_session_leases = max_session_leases
        self.arenas: list[ArenaState] = []
        self.namespaces: dict[int, Namespace] = {}
        self.leases = LeaseTable(num_slots)
        self.counters: Counter[str] = Counter()
        self._by_key: dict[bytes, Namespace] = {}
        self._quarantined: dict[int, list[tuple[ArenaState, Pages]]] = {}
        self._touches = 0
        # False while the file system has no memory, whatever the capacity says.
        self.may_back = True

    # --- arenas and namespaces ---

    def find_arena(self, layout: Layout) -> ArenaState | None:
        return next((arena for arena in self.arenas if arena.layout == layout), None)

    def add_arena(self, layout: Layout, num_pages: int, extent_pages: int) -> ArenaState:
        arena = ArenaState(len(self.arenas), layout, PagePool(num_pages, extent_pages))
        self.arenas.append(arena)
        return arena

    def open_namespace(
        self, key: bytes, identity: Identity, salt: str, arena: ArenaState
    ) -> Namespace:
        """The namespace of this key, made at its first use."""
        if found := self._by_key.get(key):
            return found
        tree = Tree(arena.layout.block_size, arena.lru)
        namespace = Namespace(len(self._by_key) + 1, identity, salt, arena, tree)
        self._by_key[key] = self.namespaces[namespace.id] = namespace
        return namespace

    # --- match ---

    def match(self, session: int, lease_id: int, namespace: Namespace, tokens: Tokens) -> Matched:
        """Find the longest prefix of whole blocks and lease it, in one step.

        The same id with the same tokens gets the first answer; with others, the old lease is
        released and its id stands for the new one.
        """
        plan: Plan = []
        if self.leases.is_buried(session, lease_id):
            raise LeaseEnded(f"lease {lease_id} was released: its id is not used again")
        if known := self.leases.find(session, lease_id):
            if known.namespace is namespace and known.tokens == tokens:
                return Matched(known, self._matched_runs(known), plan)
            self._end(known, plan)
        if len(self.leases.of_session(session)) >= self.max_session_leases:
            raise LimitExceeded(f"a session may hold {self.max_session_leases} leases")
        slot, generation = self.leases.take_slot()
        found = namespace.tree.find(tokens)
        lease = Lease(
            session=session,
            id=lease_id,
            namespace=namespace,
            tokens=tokens,
            node=namespace.tree.lock(found),
            num_blocks=found.total_blocks,
            num_matched=found.total_blocks,
            slot=slot,
            generation=generation,
        )
        self.leases.add(lease)
        self._count_match(lease)
        return Matched(lease, self._matched_runs(lease), plan)

    def _matched_runs(self, lease: Lease) -> Runs:
        return runs_of(lease.node.path_pages()[: lease.num_matched])

    def _count_match(self, lease: Lease) -> None:
        num_tokens = len(lease.tokens) // 4
        hit_tokens = lease.num_matched * lease.namespace.arena.layout.block_size
        self.counters["matches"] += 1
        self.counters["match_hits" if hit_tokens else "match_misses"] += 1
        self.counters["tokens_requested"] += num_tokens
        self.counters["tokens_matched"] += hit_tokens

    # --- reserve ---

    def reserve(self, lease: Lease, start: int, stop: int, ahead: int = 0) -> Granted | Short:
        """Pages number `start` to `stop - 1` of those granted to this lease since its last abort.

        Up to `ahead` more come with them, as far as nobody need wait for memory. What was granted
        before is granted again, so that a repeat gets the first answer.
        """
        have = len(lease.granted)
        if start > have:
            raise BadRequest(f"reserve from {start}: the lease was granted {have} pages so far")
        if stop <= have:
            return Granted(lease.granted[start : stop + ahead], [])
        arena, needed = lease.namespace.arena, stop - have
        plan: Plan = []
        if short := self._make_room(arena, needed, plan):
            return short
        count = needed + self._spare(arena, needed, ahead, plan)
        self._make_groups(arena, count, plan)
        pages = arena.pool.take(count)
        lease.granted = np.concatenate((lease.granted, pages))
        lease.reserved.update(pages.tolist())
        plan.append(Reserved(arena.id, pages, lease.session))
        self.counters["pages_reserved"] += len(pages)
        return Granted(lease.granted[start:], plan)

    def _make_room(self, arena: ArenaState, count: int, plan: Plan) -> Short | None:
        """Free pages, else memory that the tier may still take, else the least recent blocks."""
        pool = arena.pool
        missing = count - pool.num_free
        if missing <= 0:
            return None
        if count > pool.num_pages:  # no memory would help
            return Short([], self.shortage(arena, count))
        backing = self.begin_backing(arena, missing - pool.num_backing)
        # Memory on its way is waited for before anything is evicted for want of it.
        if pool.num_backing or missing > arena.lru.num_blocks:
            return Short(backing, self.shortage(arena, count))
        self._evict(arena, missing, plan)
        return None

    def _spare(self, arena: ArenaState, needed: int, ahead: int, plan: Plan) -> int:
        """How many of the pages ahead can be had now; evicts for them once all memory is taken."""
        missing = needed + ahead - arena.pool.num_free
        if missing > 0 and not arena.pool.num_backing and not self._num_backable(arena):
            self._evict(arena, min(missing, arena.lru.num_blocks), plan)
        return min(ahead, arena.pool.num_free - needed)

    def _make_groups(self, arena: ArenaState, count: int, plan: Plan) -> None:
        """Evict the coldest ends, group by group, until `count` pages can be had in whole groups.

        Else what is left over of many leases, a few pages each, would make the runs of the next
        one short. At most `count` blocks go for it, and none while there is memory to be had.
        """
        wanted, left = count // GROUP_PAGES, count
        if arena.pool.num_backing or self._num_backable(arena):
            return
        while left > 0 and arena.pool.num_whole_groups < wanted:
            leaf = arena.lru.coldest()
            if leaf is None:
                return
            # No group becomes whole before all that the leaf has in it are gone.
            size = min(left, _in_last_group(leaf))
            self._evict(arena, size, plan)
            left -= size

    def shortage(self, arena: ArenaState, num_wanted: int) -> Shortage:
        counts = arena.pool.counts()
        return Shortage(
            num_wanted,
            counts["free"],
            counts["committed"] - arena.lru.num_blocks,
            counts["reserved"],
            counts["quarantined"],
            arena.pool.num_pages,
        )

    # --- memory ---

    def begin_backing(self, arena: ArenaState, num_pages: int) -> list[Run]:
        """Choose unbacked extents for at least `num_pages` pages, as far as the capacity goes."""
        wanted = -(-num_pages // arena.pool.extent_pages)
        count = min(wanted, self._num_backable(arena))
        return arena.pool.begin_backing(count) if count > 0 else []

    def _num_backable(self, arena: ArenaState) -> int:
        """Extents for which there is memory, and room in the arena."""
        if not self.may_back:
            return 0
        extent_bytes = arena.pool.extent_pages * arena.layout.page_bytes
        left = self.capacity_bytes - sum(other.backed_bytes for other in self.arenas)
        return min(left // extent_bytes, arena.pool.num_unbacked // arena.pool.extent_pages)

    def end_backing(self, arena: ArenaState, run: Run, *, backed: bool) -> Plan:
        arena.pool.end_backing(run, backed=backed)
        return [Freed(arena.id, pages_of([run]))] if backed else []

    def trim(self) -> Plan:
        """Evict from the high watermark down to the low one, the least recent blocks of all."""
        plan: Plan = []
        used = self._used_bytes()
        if used <= self.high_watermark * self.capacity_bytes:
            return plan
        while used > self.low_watermark * self.capacity_bytes:
            oldest = [a for a in self.arenas if a.lru.coldest()]
            if not oldest:
                break
            arena = min(oldest, key=_coldest_stamp)
            excess = used - self.low_watermark * self.capacity_bytes
            node = arena.lru.coldest()
            assert node is not None
            count = min(node.num_blocks, int(-(-excess // arena.layout.page_bytes)))
            self._evict(arena, count, plan)
            used -= count * arena.layout.page_bytes
        return plan

    def _used_bytes(self) -> int:
        return sum(
            (arena.pool.num_backed - arena.pool.num_backing - arena.pool.num_free)
            * arena.layout.page_bytes
            for arena in self.arenas
        )

    def _evict(self, arena: ArenaState, count: int, plan: Plan) -> None:
        """Shorten the coldest leaves from their ends; `count` blocks are there to be evicted."""
        if count == 0:
            return
        evicted: list[Pages] = []
        left = count
        while left:
            leaf = arena.lru.coldest()
            assert leaf is not None
            size = min(left, leaf.num_blocks)
            evicted.append(leaf.tree.cut(leaf, size))
            left -= size
        self._free(arena, np.concatenate(evicted), plan)
        self.counters["blocks_evicted"] += count

    # --- commit ---

    def commit(self, lease: Lease, first_block: int, pages: Pages, tokens: Tokens) -> CommitAnswer:
        """Make blocks of a lease matchable; the lease's lock moves to the end of them.

        There are three kinds, in this order: blocks this lease committed before (a repeat gets the
        first answer), blocks that others committed meanwhile (theirs stay, the caller's copies are
        private until its release), and new ones.
        """
        block_bytes = lease.namespace.block_bytes
        if len(tokens) != len(pages) * block_bytes:
            raise BadRequest(f"{len(tokens) // 4} tokens are not {len(pages)} whole blocks")
        if first_block > lease.num_blocks:
            raise BadRequest(
                f"commit from block {first_block}: the lease's prefix ends at {lease.num_blocks}"
            )
        repeated = min(lease.num_blocks - first_block, len(pages))
        self._check_repeat(lease, first_block, tokens[: repeated * block_bytes])
        fresh = pages[repeated:]
        if len(set(fresh.tolist())) != len(fresh) or not lease.reserved.issuperset(fresh.tolist()):
            raise BadRequest("a committed page must be reserved by its lease and named once")
        plan: Plan = []
        self._append(lease, fresh, tokens[repeated * block_bytes :], plan)
        now_in = lease.node.path_pages()[first_block : first_block + len(pages)]
        return CommitAnswer(now_in, int((now_in != pages).sum()), plan)

    def _check_repeat(self, lease: Lease, first_block: int, tokens: Tokens) -> None:
        start = first_block * lease.namespace.block_bytes
        if tokens and lease.node.path_tokens()[start : start + len(tokens)] != tokens:
            raise BadRequest(f"blocks from {first_block} on were committed with other tokens")

    def _append(self, lease: Lease, pages: Pages, tokens: Tokens, plan: Plan) -> None:
        """Lead the lease's path over present blocks, then add the rest."""
        tree = lease.namespace.tree
        found = tree.find(tokens, lease.node)
        present = found.total_blocks
        if present:
            lease.node = tree.lock(found, below=lease.node)
            lease.num_blocks += present
            self.counters["blocks_duplicate"] += present
        if present < len(pages):
            rest = tokens[present * lease.namespace.block_bytes :]
            plan.append(self._insert(lease, pages[present:], rest))

    def _insert(self, lease: Lease, pages: Pages, tokens: Tokens) -> Committed:
        namespace, first_block = lease.namespace, lease.num_blocks
        parent = lease.node.pages[-1] if first_block else -1
        listed = pages.tolist()
        lease.node = namespace.tree.append(lease.node, tokens, listed)
        lease.num_blocks += len(listed)
        lease.reserved.difference_update(listed)
        namespace.arena.pool.move(pages, PageState.RESERVED, PageState.COMMITTED)
        self.counters["blocks_committed"] += len(listed)
        return Committed(namespace.arena.id, pages, parent, first_block, tokens, namespace.id)

    # --- ends ---

    def abort(self, lease: Lease) -> Plan:
        """Give back the lease's uncommitted pages; a living session says that no view remains."""
        plan: Plan = []
        lease.granted = lease.granted[:0]
        self._free_reserved(lease, plan)
        return plan

    def release(self, session: int, lease_id: int) -> Plan:
        """End a lease; an unknown id is remembered as ended."""
        plan: Plan = []
        lease = self.leases.find(session, lease_id)
        if lease is None:
            self.counters["releases_unknown"] += 1
        else:
            self._end(lease, plan)
        self.leases.bury(session, lease_id)
        return plan

    def end_session(self, session: int) -> Plan:
        """End a session's leases. Its reserved pages are quarantined: it could still write them."""
        plan: Plan = []
        for lease in self.leases.of_session(session):
            if lease.reserved:
                arena, pages = lease.namespace.arena, np.array(sorted(lease.reserved), np.int64)
                lease.reserved.clear()
                arena.pool.move(pages, PageState.RESERVED, PageState.QUARANTINED)
                self._quarantined.setdefault(session, []).append((arena, pages))
                self.counters["pages_quarantined"] += len(pages)
                plan.append(Quarantined(arena.id, pages))
            self._end(lease, plan)
        self.leases.forget_session(session)
        return plan

    def session_gone(self, session: int) -> Plan:
        """No process of an ended session is left: what it could write is free."""
        plan: Plan = []
        for arena, pages in self._quarantined.pop(session, []):
            self._free(arena, pages, plan)
        return plan

    def _end(self, lease: Lease, plan: Plan) -> None:
        plan.append(Ended(lease.slot, lease.generation + 1))
        self._free_reserved(lease, plan)
        self._touches += 1
        lease.namespace.tree.unlock(lease.node, self._touches)
        self.leases.remove(lease)

    def _free_reserved(self, lease: Lease, plan: Plan) -> None:
        if lease.reserved:
            pages = np.array(sorted(lease.reserved), np.int64)
            lease.reserved.clear()
            self._free(lease.namespace.arena, pages, plan)

    def _free(self, arena: ArenaState, pages: Pages, plan: Plan) -> None:
        arena.pool.free(pages)
        plan.append(Freed(arena.id, pages))

    # --- what must hold at any time ---

    def check(self) -> None:
        """Recount everything from pages and trees; AssertionError where the books differ."""
        for arena in self.arenas:
            arena.pool.check()
            self._check_arena(arena)
        assert sum(arena.backed_bytes for arena in self.arenas) <= self.capacity_bytes
        for namespace in self.namespaces.values():
            self._check_tree(namespace)

    def _check_arena(self, arena: ArenaState) -> None:
        held = {
            PageState.COMMITTED: [
                page
                for namespace in self.namespaces.values()
                if namespace.arena is arena
                for node in namespace.tree.nodes()
                for page in node.pages
            ],
            PageState.RESERVED: [
                page
                for lease in self.leases
                if lease.namespace.arena is arena
                for page in lease.reserved
            ],
            PageState.QUARANTINED: [
                page
                for pieces in self._quarantined.values()
                for other, pages in pieces
                if other is arena
                for page in pages.tolist()
            ],
        }
        for state, pages in held.items():
            assert sorted(pages) == np.flatnonzero(arena.pool.states == state).tolist(), state
        assert arena.lru.num_blocks == sum(node.num_blocks for node in arena.lru)

    def _check_tree(self, namespace: Namespace) -> None:
        lru = namespace.arena.lru
        age = {node: place for place, node in enumerate(lru)}
        locks: Counter[Node] = Counter()
        for lease in self.leases:
            if lease.namespace is namespace:
                locks.update(lease.node.path())
                assert len(lease.node.path_pages()) == lease.num_blocks
        for node in namespace.tree.nodes():
            assert node.num_blocks >= 1
            assert len(node.tokens) == node.num_blocks * namespace.block_bytes
            assert node.locks == locks[node]
            assert (node in lru) == (node.locks == 0)
            assert node.first_blocks == sorted(node.first_blocks)
            for child in node.children:
                assert child.parent is node
                assert node.locks or age[child] < age[node]


def _in_last_group(leaf: Node) -> int:
    """How many blocks at the end of a leaf lie in one group of pages."""
    group = leaf.pages[-1] // GROUP_PAGES
    size = 1
    while size < leaf.num_blocks and leaf.pages[-size - 1] // GROUP_PAGES == group:
        size += 1
    return size


def _coldest_stamp(arena: ArenaState) -> int:
    coldest = arena.lru.coldest()
    assert coldest is not None
    return coldest.stamp
