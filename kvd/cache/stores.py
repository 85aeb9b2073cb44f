"""Stores: which blocks have copies in the tiers below memory, which go down, and which go.

Every store gets its copies from memory, the oldest ones without a copy first, whether or not the
tiers between have them: so no block is read to be moved down, and one that memory evicts is only
forgotten there. What a store has is closed under prefixes: a block's ancestors go down before it or
with it, and it goes before them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from kvd.cache.plan import Forgotten
from kvd.cache.radix import MEMORY, Found

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.cache.memory import ArenaState, Memory, Namespace
    from kvd.cache.plan import Plan
    from kvd.cache.radix import Node
    from kvd.protocol.keys import BlockKey
    from kvd.protocol.layout import Layout

T = TypeVar("T")
Admission = Literal["all", "reused"]


@dataclass(eq=False, slots=True)
class StoreState:
    """One tier below memory: number `tier` of all.

    `record_bytes` says what a block of a layout takes of `usable_bytes`, and `most_bytes` what all
    of them may take where that is less. `unknown_bytes` of a layout are taken by records of which
    this start knows nothing. `admission`: whether each block gets a copy, or one that was matched
    again. While it fails nothing goes down, or comes up. `counters` are of what was moved.
    """

    tier: int
    name: str
    usable_bytes: int
    admission: Admission = "all"
    record_bytes: dict[Layout, int] = field(default_factory=dict)
    most_bytes: dict[Layout, int] = field(default_factory=dict)
    unknown_bytes: dict[Layout, int] = field(default_factory=dict)
    turn: int = 0
    may_write: bool = True
    may_read: bool = True
    counters: Counter[str] = field(default_factory=Counter)

    def keeps(self, layout: Layout) -> bool:
        """Whether it has room for a block of a layout at all."""
        return 0 < self.record_bytes.get(layout, 0) <= self.usable_bytes

    def most_of(self, layout: Layout) -> int:
        """What its blocks of a layout may take."""
        return min(self.usable_bytes, self.most_bytes.get(layout, self.usable_bytes))

    def num_unknown_bytes(self, layout: Layout | None = None) -> int:
        """Of a layout, or all."""
        known = self.unknown_bytes
        return known.get(layout, 0) if layout else sum(known.values())

    def num_possible(self, layout: Layout) -> int:
        """How many blocks of a layout it could hold if all went that may go."""
        room = min(
            self.most_of(layout) - self.num_unknown_bytes(layout),
            self.usable_bytes - self.num_unknown_bytes(),
        )
        return max(room, 0) // self.record_bytes[layout]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks at the end of a path that is locked until their copies are there."""

    space: Namespace
    end: Node
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Write:
    """Copies on their way to a store: of each block its page, key, parent's key and rows.

    They take `num_bytes` there.
    """

    store: StoreState
    arena: ArenaState
    pieces: list[_Piece]
    pages: Pages
    keys: list[BlockKey]
    parents: list[bytes]
    rows: list[bytes]
    num_bytes: int


class Stores:
    """The tiers below memory, and what is on its way to them."""

    def __init__(
        self, stores: Sequence[StoreState], memory: Memory, counters: Counter[str]
    ) -> None:
        self._stores = stores
        self._memory = memory
        self._counters = counters
        self.writes: list[Write] = []

    def __iter__(self) -> Iterator[StoreState]:
        return iter(self._stores)

    @property
    def readable(self) -> int:
        """A bit for each store that can be read now."""
        return sum(1 << store.tier for store in self._stores if store.may_read)

    # --- down ---

    def admit(self, space: Namespace, end: Node, *, is_new: bool) -> None:
        """Blocks were committed, or matched: stores that take such shall have copies of them."""
        for store in self._stores:
            if store.admission == "all" or not is_new:
                space.tree.admit(end, store.tier)

    def set_admission(self, admission: Admission) -> None:
        """From here on; where that is "all" now, it is so for what is in memory already."""
        if any(store.admission != admission for store in self._stores):
            for store in self._stores:
                store.admission = admission
            self.admit_all()

    def admit_all(self) -> None:
        """What is in memory alone shall have copies as if it were new."""
        for store in self._stores:
            for space in self._memory.spaces() if store.admission == "all" else ():
                for node in space.tree.nodes():
                    if node.is_in(MEMORY):  # else there is nothing to copy from
                        space.tree.admit(node, store.tier)

    def num_unsaved_bytes(self, store: StoreState) -> int:
        """What is in memory and waits for a copy, locked or not, or lost it for want of room."""
        return sum(
            node.num_blocks * space.arena.layout.page_bytes
            for space in self._memory.spaces()
            for node in (*space.tree.unsaved[store.tier], *space.tree.let_go[store.tier])
        )

    def num_without_room(self, stores: Sequence[StoreState]) -> int:
        """Blocks in memory whose copies made room for others, and that none of these has now."""
        tiers = [store.tier for store in stores]
        let_go = {
            node
            for space in self._memory.spaces()
            for tier in tiers
            for node in space.tree.let_go[tier]
        }
        return sum(
            node.num_blocks
            for node in let_go
            if not any(node.is_in(tier) or _waits(node, tier) for tier in tiers)
        )

    def next_write(self, store: StoreState, max_bytes: int, plan: Plan) -> Write | None:
        """The oldest blocks of one layout that wait for a copy, `max_bytes` of them or one block.

        Layouts, and their namespaces, come in turns. The blocks are locked until `end_write`. What
        goes in the store to make room is in the plan. None where nothing waits, or nothing has
        room.
        """
        arenas = list(self._memory.arenas.values())
        store.turn += 1
        for arena in _in_turn(arenas, store.turn):
            if store.keeps(arena.layout) and (
                write := self._write_of(store, arena, max_bytes, plan)
            ):
                return write
        return None

    def _write_of(
        self, store: StoreState, arena: ArenaState, max_bytes: int, plan: Plan
    ) -> Write | None:
        layout = arena.layout
        record, most = store.record_bytes[layout], store.most_of(layout)
        left = max(1, max_bytes // layout.page_bytes)
        left = min(left, store.num_possible(layout), self._num_unsaved(store, arena, left))
        if not left:
            return None
        # What the oldest ones follow stays, or the same blocks would go and come again for ever.
        held = [
            (space, space.tree.lock(Found(node, node.num_blocks, 0)))
            for space in self._memory.spaces()
            for node in islice(space.tree.unsaved[store.tier], 1)
        ]
        self._make_room(store, left * record, plan, layout)
        for space, end in held:
            space.tree.unlock(end)
        room = min(
            most - self.used_bytes(store, layout), store.usable_bytes - self.used_bytes(store)
        )
        left = min(left, room // record)
        pieces: list[_Piece] = []
        for space in _in_turn(arena.namespaces, store.turn // len(self._memory.arenas)):
            while left > 0 and space.tree.unsaved[store.tier]:
                for node in _missing(next(iter(space.tree.unsaved[store.tier])), store.tier):
                    if left <= 0:
                        break
                    size = min(left, node.num_blocks)
                    end = space.tree.begin_saving(node, size, store.tier)
                    pieces.append(_Piece(space, end, size))
                    left -= size
        write = _write(store, arena, pieces) if pieces else None
        if write:
            self.writes.append(write)
        return write

    def _num_unsaved(self, store: StoreState, arena: ArenaState, most: int) -> int:
        """How many blocks of a layout wait for a copy, counted up to `most` of them."""
        count = 0
        for space in arena.namespaces:
            for node in space.tree.unsaved[store.tier]:
                count += node.num_blocks
                if count >= most:
                    return count
        return count

    def end_write(self, write: Write, plan: Plan, *, saved: bool) -> int:
        """The copies are in the store, or will not be; how many blocks have one now.

        Of the others no record shall stay, whole or in part, of which nobody knows.
        """
        self.writes.remove(write)
        count = 0
        for piece in write.pieces:
            done = piece.space.tree.end_saving(
                piece.end, piece.num_blocks, write.store.tier, saved=saved
            )
            self._memory.free(piece.space, done.gone, plan)
            if done.uncounted:
                plan.append(Forgotten(write.store.tier, write.arena.layout, done.uncounted))
            count += done.num_blocks
        self._counters["blocks_demoted"] += count
        return count

    def waiting(self, store: StoreState) -> list[Node]:
        """What waits for a copy now, or has one on its way; what comes first stands last."""
        nodes: list[Node] = []
        for space in self._memory.spaces():
            if store.keeps(space.arena.layout):
                nodes += reversed(space.tree.unsaved[store.tier])
        writes = [write for write in self.writes if write.store is store]
        return nodes + [piece.end for write in writes for piece in write.pieces]

    def still_wait(self, store: StoreState, nodes: list[Node]) -> bool:
        """Whether any of them wait still; those behind the last that does are taken off."""
        while nodes and not _waits(nodes[-1], store.tier):
            nodes.pop()
        return bool(nodes)

    # --- what goes ---

    def used_bytes(self, store: StoreState, layout: Layout | None = None) -> int:
        """Of its usable bytes, what records take, those on their way included; or a layout's."""
        known = sum(
            space.tree.counts[store.tier] * store.record_bytes.get(space.arena.layout, 0)
            for space in self._spaces(layout)
            if space.tree.counts[store.tier]
        )
        coming = sum(
            write.num_bytes
            for write in self.writes
            if write.store is store and layout in (None, write.arena.layout)
        )
        return known + coming + store.num_unknown_bytes(layout)

    def _spaces(self, layout: Layout | None) -> list[Namespace]:
        return [space for space in self._memory.spaces() if layout in (None, space.arena.layout)]

    def cramped(self, store: StoreState) -> set[Layout]:
        """The layouts of which blocks wait that have no room beside those that are there."""
        return {
            layout
            for layout in store.most_bytes.keys() & store.record_bytes.keys()
            if self.used_bytes(store, layout) + store.record_bytes[layout] > store.most_of(layout)
            and any(space.tree.unsaved[store.tier] for space in self._spaces(layout))
        }

    def num_blocks(self, store: StoreState) -> int:
        return sum(space.tree.counts[store.tier] for space in self._memory.spaces())

    def trim(self, store: StoreState, plan: Plan) -> None:
        """Let go what is more than the store may hold."""
        self._make_room(store, 0, plan)

    def _make_room(
        self, store: StoreState, num_bytes: int, plan: Plan, layout: Layout | None = None
    ) -> None:
        """Have room for so many bytes, of a layout: in what its own may take, and all together."""
        if layout:
            excess = self.used_bytes(store, layout) + num_bytes - store.most_of(layout)
            self._evict(store, layout, excess, plan)
        self._evict(store, None, self.used_bytes(store) + num_bytes - store.usable_bytes, plan)

    def _evict(self, store: StoreState, layout: Layout | None, excess: int, plan: Plan) -> None:
        """Forget the least recent leaves of all namespaces, as far as there are unlocked ones."""
        heap = [
            (leaf.stamp, space.id, space)
            for space in (self._spaces(layout) if excess > 0 else ())
            if (leaf := space.tree.lrus[store.tier].coldest())
        ]
        heapify(heap)
        while heap and excess > 0:
            space = heap[0][2]
            record = store.record_bytes[space.arena.layout]
            leaf = space.tree.lrus[store.tier].coldest()
            assert leaf is not None
            size = min(leaf.num_blocks, -(-excess // record))
            cut = space.tree.cut(leaf, size, store.tier)
            plan.append(Forgotten(store.tier, space.arena.layout, cut.keys))
            if cut.was_last:
                self._memory.evicted.add(cut.keys)
            self._counters["blocks_evicted_stored"] += size
            store.counters["evicted"] += size
            excess -= size * record
            if leaf := space.tree.lrus[store.tier].coldest():
                heapreplace(heap, (leaf.stamp, space.id, space))
            else:
                heappop(heap)

    def forget_keys(self, space: Namespace, keys: list[BlockKey], plan: Plan) -> None:
        """Blocks left the tree: no store shall keep them, nor what is on its way to it."""
        if keys:
            for store in self._stores:
                plan.append(Forgotten(store.tier, space.arena.layout, keys))


def _in_turn(members: list[T], turn: int) -> list[T]:
    """All members, another one first each turn."""
    first = turn % max(1, len(members))
    return members[first:] + members[:first]


def _waits(node: Node, tier: int) -> bool:
    return node in node.tree.unsaved[tier] or bool(node.saving >> tier & 1)


def _missing(node: Node, tier: int) -> list[Node]:
    """The nodes of a path that a store has not and that are not on their way, from the top."""
    nodes = []
    at: Node | None = node
    while at is not None and at.parent is not None and not at.is_in(tier):
        if not at.saving >> tier & 1:
            nodes.append(at)
        at = at.parent
    return nodes[::-1]


def _write(store: StoreState, arena: ArenaState, pieces: list[_Piece]) -> Write:
    pages, keys, parents, rows = [], [], [], []
    for piece in pieces:
        node, width = piece.end, piece.space.tree.block_bytes
        assert node.parent is not None
        own = node.block_keys()
        pages.append(np.array(node.pages, np.int64))
        keys += own
        parents += [node.parent.last_key, *own[:-1]]
        rows += [bytes(node.tokens[at : at + width]) for at in range(0, len(node.tokens), width)]
    num_bytes = len(keys) * store.record_bytes[arena.layout]
    write = Write(store, arena, pieces, np.concatenate(pages), keys, parents, rows, num_bytes)
    assert len(write.pages) == len(write.keys), "what has no page has nothing to be copied"
    return write
