"""A CacheState and a Model side by side: how they are made, asked, and compared after each step."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from kvd.arena.page_table import PageState
from kvd.arena.runs import pages_of
from kvd.cache import plan as plans
from kvd.cache.audit import check
from kvd.cache.memory import NO_QUOTA, Namespace, Quota
from kvd.cache.rows import row_bytes, rows_of
from kvd.cache.state import CacheState
from kvd.cache.stores import StoreState
from kvd.config import CacheConfig, LimitConfig
from kvd.protocol.errors import BadRequest, Dropped, LeaseEnded, LimitExceeded, OutOfPages
from kvd.protocol.keys import BlockKey, Identity, chain
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run
from tests.cache import model as slow
from tests.cache.books import Books
from tests.cache.conftest import by_age
from tests.cache.heard import Heard, present
from tests.cache.model import Model, Name, Page, Refused, Tokens

if TYPE_CHECKING:
    from kvd.cache.leases import Lease
    from kvd.cache.plan import Matched, Plan, Step
    from kvd.cache.radix import Node
    from kvd.cache.stores import Admission

SMALL = Layout(1, 1, 2, "float16", block_size=1, num_planes=1)  # 4 bytes a page
PAIRS = Layout(1, 1, 2, "float16", block_size=2, num_planes=1)  # 8 bytes a page
FOURS = Layout(1, 1, 1, "float16", block_size=4, num_planes=1)  # 8 bytes a page
NUM_PAGES = {SMALL: 48, PAIRS: 32, FOURS: 32}
EXTENT = 16
IMAGE = bytes([1]) * 32

ERRORS = {
    "ended": LeaseEnded,
    "limit": LimitExceeded,
    "bad": BadRequest,
    "dropped": Dropped,
    "pages": OutOfPages,
}


@dataclass(frozen=True)
class Spec:
    layout: Layout
    extras: bool = False
    quota: Quota = NO_QUOTA

    @property
    def row_bytes(self) -> int:
        return row_bytes(extras=self.extras)


SPECS = [
    Spec(SMALL),
    Spec(PAIRS),
    Spec(SMALL, quota=Quota(guaranteed_bytes=32)),
    Spec(FOURS, extras=True),
    Spec(SMALL, extras=True, quota=Quota(max_bytes=48)),
    Spec(PAIRS, quota=Quota(guaranteed_bytes=32, max_bytes=96)),
    Spec(FOURS, quota=Quota(guaranteed_bytes=96)),
]

any_number = st.integers(0, 1000)
small_number = st.integers(0, 2)
some_space = st.sampled_from([0, 0, 1, 1, 2, 3, 4, 5, 6])
some_tokens = st.lists(st.sampled_from([0, 0, 1, 1, 2]), min_size=1, max_size=12).map(tuple)
# Tokens that begin as something that is there, cut at some length, and then go their own way.
prompts = st.tuples(any_number, st.integers(0, 15), some_tokens)
Prompt = tuple[int, int, Tokens]


def encode(space: Namespace, tokens: Tokens) -> bytes:
    """Tokens as rows; from 2 on they are images."""
    extras = tuple((place, IMAGE) for place, token in enumerate(tokens) if token >= 2)
    ids = np.array([token % 2 for token in tokens], "<u4").tobytes()
    return rows_of(ids, extras, 0, space.tree.row_bytes)


def decode(space: Namespace, rows: bytes | bytearray) -> Tokens:
    words = np.frombuffer(rows, "<u4").reshape(-1, space.tree.row_bytes // 4)
    return tuple((words[:, 0] + 2 * words[:, 1:].any(axis=1)).tolist())


def fitting(space: Namespace, tokens: Tokens) -> Tokens:
    """The same without images, where the namespace has no extras."""
    return tokens if space.tree.row_bytes > 4 else tuple(token % 2 for token in tokens)


class Machine(RuleBasedStateMachine):
    @initialize(
        capacity_bytes=st.sampled_from([128, 192, 256, 320]),
        watermarks=st.sampled_from([(1.0, 1.0), (0.5, 0.25), (0.25, 0.125)]),
        many=st.booleans(),
        record_bytes=st.sampled_from([0, 24]),
        reserved_fraction=st.sampled_from([0.4, 1.0]),
        ready=st.booleans(),
        stores=st.sampled_from([(), (64, 160), (240, 96)]),
        admission=st.sampled_from(["all", "reused"]),
    )
    def start(
        self,
        capacity_bytes: int,
        watermarks: tuple[float, float],
        many: bool,
        record_bytes: int,
        reserved_fraction: float,
        ready: bool,
        stores: tuple[int, ...],
        admission: Admission,
    ) -> None:
        slots, leases, spaces, layouts, pins = (12, 8, 8, 3, 6) if many else (3, 2, 3, 2, 2)
        limits = slow.Limits(
            capacity_bytes=capacity_bytes,
            watermarks=watermarks,
            slots=slots,
            session_leases=leases,
            session_reserved_fraction=reserved_fraction,
            namespaces=spaces,
            layouts=layouts,
            pins=pins,
            pinned_fraction=0.5,
            owner_pinned_fraction=0.3,
        )
        config = LimitConfig(
            session_leases=leases,
            session_reserved_fraction=reserved_fraction,
            namespaces=spaces,
            layouts=layouts,
            pins=pins,
            pinned_fraction=0.5,
            owner_pinned_fraction=0.3,
        )
        records = {layout: layout.page_bytes for layout in NUM_PAGES}
        taken = zip(stores, ("all", admission), strict=False)
        self.stores = [
            StoreState(tier, f"disk{tier}", size, admitted, records)
            for tier, (size, admitted) in enumerate(taken, 1)
        ]
        self.state = CacheState(
            capacity_bytes, slots, CacheConfig(*watermarks), config, self.stores
        )
        self.heard = Heard()
        self.state.tell(self.heard)
        slow_stores = [slow.Store(store.usable_bytes, store.admission) for store in self.stores]
        self.model, self.books = Model(limits, slow_stores), Books()
        self.record_bytes = record_bytes
        self.sessions, self.num_sessions = [1, 2, 3], 3
        self.ended: list[int] = []
        self.in_backing: list[tuple[int, Run]] = []
        self.now = 0.0
        if ready and (space := self.opened(1, 0)):
            self.begin_backing(space.arena.id)
            while self.in_backing:
                self.backing_ended(pick=0, backed=True)

    # --- plans ---

    def told(self, plan: Plan, taker: Namespace | None = None, excess: int = 0) -> None:
        """The model hears what the memory chose: evictions, and memory that comes and goes.

        Up to `excess` of the taker's own blocks may go before what is colder.
        """
        self.books.carry_out(plan)
        for step in plan:
            match step:
                case plans.Freed(arena, pages):
                    for page in pages.tolist():
                        excess = self.model.evict(
                            Page(arena, page), taker.id if taker else None, excess
                        )
                case plans.Unback(arena, run):
                    self.model.unback(self.pages(arena, run))
                case plans.Back(arena, run):
                    self.model.begin_backing(self.pages(arena, run))
                    extents = range(run.first, run.first + run.count, EXTENT)
                    self.in_backing += [(arena, Run(first, EXTENT)) for first in extents]

    def pages(self, arena: int, run: Run) -> list[Page]:
        return [Page(arena, page) for page in pages_of([run]).tolist()]

    def begin_backing(self, arena: int) -> None:
        plan: list[Step] = []
        self.state.memory.begin_backing(self.state.memory.arenas[arena], EXTENT, plan)
        self.told(plan)

    def backing_ended(self, pick: int, backed: bool) -> None:
        arena, run = self.in_backing.pop(pick % len(self.in_backing))
        self.model.end_backing(self.pages(arena, run), backed=backed)
        self.state.memory.may_back &= backed  # what the manager does
        arena_state = self.state.memory.arenas[arena]
        self.books.carry_out(self.state.memory.end_backing(arena_state, run, backed=backed))
        assert self.books.freed == (self.pages(arena, run) if backed else [])

    # --- namespaces ---

    def opened(self, session: int, number: int) -> Namespace | None:
        """The namespace, opened by the session; None where that is refused."""
        spec = SPECS[number]
        is_known = self.model.find_namespace(number) is not None
        if not is_known and not self.made_place(spec):
            return None
        arena = self.state.find_arena(spec.layout, spec.row_bytes)
        assert arena
        quota = spec.quota
        args = session, bytes([number]), Identity("model", str(number)), "", arena
        try:
            expected = self.model.open(
                session,
                slow.Namespace(number, arena.id, quota.guaranteed_bytes, quota.max_bytes),
            )
        except Refused as refused:
            with pytest.raises(ERRORS[refused.kind]):
                self.state.open_namespace(*args, quota=quota)
            return None
        space = self.state.open_namespace(*args, quota=quota)
        assert space.id == expected
        return space

    def made_place(self, spec: Spec) -> bool:
        """For one more namespace, and its arena where there is none."""
        names = self.names()
        layout, width = spec.layout, spec.row_bytes
        for_arena = self.model.find_arena(layout.page_bytes, layout.block_size, width) is None
        assert for_arena == (self.state.find_arena(layout, width) is None)
        try:
            self.model.make_place(for_arena=for_arena)
        except Refused as refused:
            for refuse in (self.state.check_can_make_place, self.state.make_place):
                with pytest.raises(ERRORS[refused.kind]):
                    refuse(for_arena=for_arena)
            return False
        self.state.check_can_make_place(for_arena=for_arena)
        plan = self.state.make_place(for_arena=for_arena)
        self.books.carry_out(plan)
        self.check_forgotten(plan, names.keys() - self.names().keys())
        if for_arena:
            self.add_arena(layout, width)
        return True

    def add_arena(self, layout: Layout, width: int) -> None:
        num_pages = NUM_PAGES[layout]
        arena = self.state.add_arena(layout, width, num_pages, EXTENT, self.record_bytes)
        added = slow.Arena(
            layout.block_size, layout.page_bytes, width, num_pages, EXTENT, self.record_bytes
        )
        self.model.add_arena(arena.id, added)
        self.books.add_arena(arena.id, layout, width, num_pages)

    def some_space(self, pick: int) -> Namespace:
        spaces = list(self.state.namespaces.values())
        return spaces[pick % len(spaces)]

    # --- stores ---

    def names(self) -> dict[BlockKey, Name]:
        """All blocks that any tier has, by their keys."""
        return {
            chain(space.key, encode(space, name[1]), space.tree.block_bytes)[-1]: name
            for space in self.state.namespaces.values()
            if space.id in self.model.namespaces
            for name in self.model.names_in(space.id)
        }

    def check_forgotten(self, plan: Plan, keys: Set[BlockKey]) -> None:
        """Each store is told of exactly these blocks, each before the one that it follows."""
        for store in self.stores:
            steps = [step for step in plan if isinstance(step, plans.Forgotten)]
            told = [key for step in steps if step.tier == store.tier for key in step.keys]
            assert len(told) == len(set(told))
            assert set(told) == keys

    def told_of_copies(self, plan: Plan, kept: Set[Name] = frozenset()) -> None:
        """Each copy that goes is the least recent leaf, but for what is kept at that time.

        It is of its layout alone where that may take only so much.
        """
        names = self.names()
        for step in plan:
            assert isinstance(step, plans.Forgotten)
            store = self.model.stores[step.tier - 1]
            for key in step.keys:
                leaves = self.model.leaves(store, kept)
                own = {name for name in leaves if self.layout_of(name) == step.layout}
                is_bounded = step.layout in self.stores[step.tier - 1].most_bytes
                choices = [leaves, own] if is_bounded else [leaves]
                assert names[key] in map(self.model.coldest, choices)
                self.model.forget_copy(store, names[key])

    def layout_of(self, name: Name) -> Layout:
        return self.state.namespaces[name[0]].arena.layout

    def used_bytes_of(self, store: slow.Store, layout: Layout) -> int:
        coming = [block.name for write in store.writes for block in write.blocks]
        names = [*store.copies, *coming]
        return self.model.bytes_of(name for name in names if self.layout_of(name) == layout)

    def kept(self, tier: int) -> set[Name]:
        """The paths of the blocks that waited longest in their namespaces."""
        return {
            block.name
            for space in self.state.namespaces.values()
            for node in list(space.tree.unsaved[tier])[:1]
            for block in self.model.known(space.id, decode(space, node.path_tokens()))
        }

    # --- choosing ---

    def tokens(self, space: Namespace, prompt: Prompt) -> Tokens:
        pick, cut, suffix = prompt
        known = sorted(tokens for _, tokens in self.model.names_in(space.id))
        return (known[pick % len(known)][:cut] if known else ()) + fitting(space, suffix)

    def both(self, pick: int) -> tuple[Lease, slow.Lease]:
        keys = sorted(self.model.leases)
        session, lease_id = keys[pick % len(keys)]
        return self.state.leases.get(session, lease_id), self.model.leases[session, lease_id]

    def some_lease(self) -> bool:
        return bool(self.model.leases)

    def check_matched(self, answer: Matched, expected: slow.Lease) -> None:
        arena = answer.lease.namespace.arena.id
        assert answer.lease.num_matched == expected.num_matched
        pages = [Page(arena, page) for page in pages_of(answer.lease.runs).tolist()]
        assert pages == [block.page for block in expected.blocks[: expected.num_matched]]

    # --- after every step ---

    @invariant()
    def books_agree(self) -> None:
        check(self.state)
        assert list(self.state.memory.arenas) == list(self.model.arenas)
        assert self.books.tables.keys() == self.model.arenas.keys()
        for number, arena in self.state.memory.arenas.items():
            expected = [self.model.pages[Page(number, p)] for p in range(arena.pool.num_pages)]
            assert [PageState(s).name.lower() for s in arena.pool.states.tolist()] == expected
            table = self.books.tables[number]
            assert table.records["state"].tolist() == arena.pool.states.tolist()
            assert table.sealed(table.records).all()

    @invariant()
    def memory_is_within_the_capacity(self) -> None:
        memory = self.state.memory
        assert memory.taken_bytes == self.model.taken_bytes()
        counts = {state.name.lower(): 0 for state in PageState}
        for state in self.model.pages.values():
            counts[state] += 1
        assert memory.pages_by_state() == counts

    @invariant()
    def namespaces_agree(self) -> None:
        assert list(self.state.namespaces) == list(self.model.namespaces)
        for space in self.state.namespaces.values():
            expected = self.model.namespaces[space.id]
            assert (space.arena.id, space.sessions) == (expected.arena, expected.sessions)
            assert space.num_pages == self.model.num_pages(space.id) <= space.max_pages

    @invariant()
    def blocks_agree(self) -> None:
        found = {
            key: page for space in self.state.namespaces.values() for key, page in blocks_of(space)
        }
        assert found == {key: block.page for key, block in self.model.index.items()}

    @invariant()
    def copies_agree(self) -> None:
        for store, expected in zip(self.stores, self.model.stores, strict=True):
            copies: set[Name] = set()
            keys: set[BlockKey] = set()
            unsaved: set[Name] = set()
            for space in self.state.namespaces.values():
                for node in space.tree.nodes():
                    if node.is_in(store.tier):
                        copies.update(names_of(space, node))
                        keys.update(node.block_keys())
                    if node in space.tree.unsaved[store.tier]:
                        unsaved.update(names_of(space, node))
            assert copies == expected.copies
            # The store has nothing else, but for what is on its way there.
            writes = [write for write in self.state.stores.writes if write.store is store]
            assert keys <= self.books.records[store.tier]
            assert self.books.records[store.tier] <= keys.union(*(each.keys for each in writes))
            assert self.state.stores.used_bytes(store) == self.model.used_bytes_in(expected)
            # A node that waits may have grown meanwhile: what it has more waits too.
            more = unsaved - expected.wanted
            assert expected.wanted <= unsaved
            assert more <= self.model.index.keys() - copies - self.model.coming(expected)
            expected.wanted = unsaved
        assert self.state.counters["pressure_drops"] == self.model.pressure_drops

    @invariant()
    def what_was_told_agrees(self) -> None:
        assert self.heard.parents.keys() == present(self.state.namespaces)

    @invariant()
    def ages_agree(self) -> None:
        for space in self.state.namespaces.values():
            pages = [page for node in by_age(space.tree) for page in reversed(node.pages)]
            expected = [block.page for block in self.model.unlocked(space.id)]
            assert [Page(space.arena.id, page) for page in pages] == expected

    @invariant()
    def leases_agree(self) -> None:
        keys = {(lease.session, lease.id) for lease in self.state.leases}
        assert keys == set(self.model.leases)
        assert len({lease.slot for lease in self.state.leases}) == len(keys)
        for lease in self.state.leases:
            expected = self.model.leases[lease.session, lease.id]
            arena = lease.namespace.arena.id
            assert {Page(arena, page) for page in lease.reserved} == expected.reserved
            assert decode(lease.namespace, lease.node.path_tokens()) == expected.tokens
            pages = [Page(arena, page) for page in lease.node.path_pages().tolist()]
            assert pages == [block.page for block in expected.blocks]
            assert self.books.generations[lease.slot] == lease.generation

    @invariant()
    def pins_agree(self) -> None:
        found = [(pin.id, pin.owner, pin.num_blocks, pin.expires) for pin in self.state.pins]
        assert found == [
            (number, pin.owner, len(pin.blocks), pin.expires)
            for number, pin in self.model.pins.items()
        ]
        expiries = [pin.expires for pin in self.model.pins.values()]
        assert self.state.pins.next_expiry() == min(expiries, default=None)


def names_of(space: Namespace, node: Node) -> list[Name]:
    size, tokens = space.arena.layout.block_size, decode(space, node.path_tokens())
    last = len(tokens) // size
    return [(space.id, tokens[: end * size]) for end in range(last - node.num_blocks + 1, last + 1)]


def blocks_of(space: Namespace) -> Iterator[tuple[Name, Page]]:
    """Those in memory."""
    for node in space.tree.nodes():
        for name, page in zip(names_of(space, node), node.pages, strict=bool(node.pages)):
            yield name, Page(space.arena.id, page)
