"""Random operations on CacheState and on the model: every answer, page and plan must agree.

`KVD_STRESS=2000 pytest tests/cache/test_against_model.py` tries that many histories.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from kvd.arena import page_table
from kvd.arena.page_table import PageState, PageTable, table_bytes
from kvd.arena.runs import Pages, pages_of
from kvd.cache import state as plans
from kvd.cache.state import CacheState, Granted, Namespace, Plan, Short, Step
from kvd.protocol.errors import BadRequest, LeaseEnded, LimitExceeded
from kvd.protocol.keys import Identity
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run
from tests.cache import model as slow
from tests.cache.model import Model, Page, Tokens

if TYPE_CHECKING:
    from kvd.cache.leases import Lease

SMALL = Layout(1, 1, 2, "float16", block_size=1, num_planes=1)  # 4 bytes a page
LARGE = Layout(1, 1, 2, "float16", block_size=2, num_planes=1)  # 8 bytes a page
NUM_PAGES = {SMALL: 48, LARGE: 32}
EXTENT = 16

ERRORS = {"ended": LeaseEnded, "limit": LimitExceeded, "bad": BadRequest}
any_number = st.integers(0, 1000)
small_number = st.integers(0, 2)
some_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
# Tokens that begin as something that is there, cut at some length, and then go their own way.
prompts = st.tuples(any_number, st.integers(0, 15), some_tokens)
Prompt = tuple[int, int, Tokens]


def packed(tokens: Tokens) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def unpacked(tokens: bytes | bytearray) -> Tokens:
    return tuple(np.frombuffer(tokens, "<u4").tolist())


class Books:
    """Carries out plans, step by step, on real page tables; each step must keep the order."""

    def __init__(self, layouts: list[Layout]) -> None:
        self.tables = [
            PageTable(one, NUM_PAGES[one], memoryview(bytearray(table_bytes(one, NUM_PAGES[one]))))
            for one in layouts
        ]
        self.generations: Counter[int] = Counter()
        self.freed: list[Page] = []

    def carry_out(self, plan: Plan) -> None:
        self.freed = []
        for step in plan:
            self.do(step)

    def do(self, step: Step) -> None:
        match step:
            case plans.Reserved(arena, pages, session):
                assert (self.states(arena, pages) == PageState.FREE).all()
                self.tables[arena].reserve(pages, session)
            case plans.Committed(arena, pages, parent, first_block, tokens, namespace):
                assert (self.states(arena, pages) == PageState.RESERVED).all()
                self.tables[arena].commit(pages, parent, first_block, tokens, namespace)
                self.check_parents(arena)
            case plans.Freed(arena, pages):
                for page in pages.tolist():  # one by one: a kill may come after any of them
                    self.tables[arena].free([page])
                    self.check_parents(arena)
                    self.freed.append(Page(arena, page))
            case plans.Quarantined(arena, pages):
                assert (self.states(arena, pages) == PageState.RESERVED).all()
                sessions = self.tables[arena].records["session"][pages]
                self.tables[arena].quarantine(pages)
                assert (self.tables[arena].records["session"][pages] == sessions).all()
            case plans.Ended(slot, generation):
                assert generation > self.generations[slot]
                self.generations[slot] = generation

    def states(self, arena: int, pages: Pages) -> NDArray[np.uint16]:
        return np.asarray(self.tables[arena].records["state"][pages])

    def check_parents(self, arena: int) -> None:
        """A committed block stands behind a committed one of the generation that it names."""
        records = self.tables[arena].records
        children = records[records["state"] == PageState.COMMITTED]
        children = children[children["parent"] != page_table.NO_PARENT]
        parents = records[children["parent"]]
        assert (parents["state"] == PageState.COMMITTED).all()
        assert (parents["generation"] == children["parent_generation"]).all()
        assert (parents["block"] + 1 == children["block"]).all()


class CacheAndModel(RuleBasedStateMachine):
    @initialize(
        capacity_bytes=st.sampled_from([128, 192, 256, 320]),
        ready=st.booleans(),
        watermarks=st.sampled_from([(1.0, 1.0), (0.5, 0.25), (0.25, 0.125)]),
        num_slots=st.sampled_from([3, 12]),
        max_session_leases=st.sampled_from([2, 8]),
    )
    def start(
        self,
        capacity_bytes: int,
        ready: bool,
        watermarks: tuple[float, float],
        num_slots: int,
        max_session_leases: int,
    ) -> None:
        high, low = watermarks
        self.state = CacheState(
            capacity_bytes,
            num_slots,
            high_watermark=high,
            low_watermark=low,
            max_session_leases=max_session_leases,
        )
        layouts = [SMALL, LARGE]
        arenas = [self.state.add_arena(one, NUM_PAGES[one], EXTENT) for one in layouts]
        self.namespaces = [
            self.state.open_namespace(bytes([i]), Identity("model", str(i)), "", arenas[arena])
            for i, arena in enumerate([0, 0, 1])
        ]
        self.model = Model(
            [
                slow.Arena(a.layout.block_size, a.layout.page_bytes, a.pool.num_pages, EXTENT)
                for a in arenas
            ],
            {one.id: one.arena.id for one in self.namespaces},
            capacity_bytes,
            high,
            low,
            num_slots,
            max_session_leases,
        )
        self.books = Books(layouts)
        self.sessions = [1, 2, 3]
        self.num_sessions = 3
        self.ended: list[int] = []
        self.in_backing: list[tuple[int, Run]] = []
        if ready:
            for arena in reversed(arenas):
                self.note_backing(arena.id, self.state.begin_backing(arena, EXTENT))
        while self.in_backing:
            self.end_backing(pick=0, backed=True)

    # --- choosing ---

    def tokens(self, namespace: Namespace, prompt: Prompt) -> Tokens:
        pick, cut, suffix = prompt
        known = sorted(b.tokens for b in self.model.blocks if b.namespace == namespace.id)
        return (known[pick % len(known)][:cut] if known else ()) + suffix

    def both(self, pick: int) -> tuple[Lease, slow.Lease]:
        keys = sorted(self.model.leases)
        session, lease_id = keys[pick % len(keys)]
        return self.state.leases.get(session, lease_id), self.model.leases[session, lease_id]

    def some_lease(self) -> bool:
        return bool(self.model.leases)

    # --- match ---

    @rule(s=small_number, lease_id=st.integers(0, 3), n=small_number, prompt=prompts)
    def match(self, s: int, lease_id: int, n: int, prompt: Prompt) -> None:
        namespace = self.namespaces[n]
        self.do_match(self.sessions[s], lease_id, namespace, self.tokens(namespace, prompt))

    @precondition(some_lease)
    @rule(pick=any_number)
    def match_again(self, pick: int) -> None:
        """The same request twice: the first answer, whatever was committed since."""
        lease, _ = self.both(pick)
        self.do_match(lease.session, lease.id, lease.namespace, unpacked(lease.tokens))
        assert self.state.leases.get(lease.session, lease.id) is lease

    def do_match(self, session: int, lease_id: int, namespace: Namespace, tokens: Tokens) -> bool:
        replaced = self.model.leases.get((session, lease_id))
        held = set(replaced.reserved) if replaced else set()
        try:
            expected = self.model.match(session, lease_id, namespace.id, tokens)
        except slow.Refused as refused:
            with pytest.raises(ERRORS[refused.kind]):
                self.state.match(session, lease_id, namespace, packed(tokens))
            return False
        answer = self.state.match(session, lease_id, namespace, packed(tokens))
        self.books.carry_out(answer.plan)
        assert set(self.books.freed) == (held if expected is not replaced else set())
        assert len(answer.lease.tokens) == 4 * len(tokens)
        size = namespace.arena.layout.block_size
        assert answer.lease.num_matched * size == expected.num_matched
        pages = [Page(namespace.arena.id, page) for page in pages_of(answer.runs).tolist()]
        assert pages == self.model.matched_pages(expected)
        return True

    # --- reserve ---

    @precondition(some_lease)
    @rule(pick=any_number, count=st.integers(0, 24), ahead=st.integers(0, 16))
    def reserve(self, pick: int, count: int, ahead: int) -> None:
        lease, expected = self.both(pick)
        have = len(expected.granted)
        self.do_reserve(lease, expected, have, have + count, ahead)

    @precondition(some_lease)
    @rule(pick=any_number, back=any_number, more=st.integers(-3, 3), ahead=st.integers(0, 3))
    def reserve_again(self, pick: int, back: int, more: int, ahead: int) -> None:
        """A range of which some, or all, was granted before."""
        lease, expected = self.both(pick)
        start = len(expected.granted) - back % (len(expected.granted) + 1)
        self.do_reserve(lease, expected, start, max(start, len(expected.granted) + more), ahead)

    @precondition(some_lease)
    @rule(pick=any_number, beyond=st.integers(1, 3))
    def reserve_beyond_what_was_granted(self, pick: int, beyond: int) -> None:
        lease, expected = self.both(pick)
        start = len(expected.granted) + beyond
        with pytest.raises(BadRequest):
            self.state.reserve(lease, start, start + 1)

    def do_reserve(
        self, lease: Lease, expected: slow.Lease, start: int, stop: int, ahead: int = 0
    ) -> bool:
        arena, have = lease.namespace.arena.id, len(expected.granted)
        if stop <= have:
            answer = self.state.reserve(lease, start, stop, ahead)
            assert isinstance(answer, Granted)
            assert [Page(arena, page) for page in answer.pages.tolist()] == (
                expected.granted[start : stop + ahead]
            )
            assert answer.plan == []
            return True
        count = stop - have
        shortage = self.model.shortage(expected, count)
        num_extents = self.model.extents_to_back(expected, count)
        answer = self.state.reserve(lease, start, stop, ahead)
        if shortage:
            assert isinstance(answer, Short)
            assert slow.Shortage(**msgspec.structs.asdict(answer.shortage)) == shortage
            assert sum(run.count for run in answer.backing) == num_extents * EXTENT
            self.note_backing(arena, answer.backing)
            return False
        assert isinstance(answer, Granted)
        count = self.model.with_ahead(expected, count, ahead)
        evicted = self.model.make_room(expected, count)
        self.books.carry_out(answer.plan)
        assert self.books.freed == evicted
        granted = [Page(arena, page) for page in answer.pages.tolist()]
        fresh = granted[have - start :]
        assert len(fresh) == count
        assert fresh == sorted(set(fresh))
        self.model.grant(expected, fresh)
        assert granted == expected.granted[start:]
        # Noted before the numbers leave the daemon.
        notes = self.books.tables[arena].records[[page.number for page in fresh]]
        assert (notes["state"] == PageState.RESERVED).all()
        assert (notes["session"] == lease.session).all()
        return True

    # --- memory ---

    def pages(self, arena: int, run: Run) -> list[Page]:
        return [Page(arena, page) for page in pages_of([run]).tolist()]

    def note_backing(self, arena: int, runs: list[Run]) -> None:
        for run in runs:
            self.model.begin_backing(self.pages(arena, run))
            extents = range(run.first, run.first + run.count, EXTENT)
            self.in_backing += [(arena, Run(first, EXTENT)) for first in extents]

    @precondition(lambda self: self.in_backing)
    @rule(pick=any_number, backed=st.sampled_from([True, True, True, False]))
    def end_backing(self, pick: int, backed: bool) -> None:
        arena, run = self.in_backing.pop(pick % len(self.in_backing))
        self.model.end_backing(self.pages(arena, run), backed=backed)
        self.state.may_back &= backed  # what the manager does
        self.books.carry_out(self.state.end_backing(self.state.arenas[arena], run, backed=backed))
        assert self.books.freed == (self.pages(arena, run) if backed else [])

    @rule(arena=st.sampled_from([0, 0, 1]))
    def back_ahead(self, arena: int) -> None:
        """What the manager does so that memory is there before somebody waits for it."""
        self.note_backing(arena, self.state.begin_backing(self.state.arenas[arena], EXTENT))

    @precondition(lambda self: not self.model.may_back)
    @rule()
    def memory_may_be_asked_for_again(self) -> None:
        self.state.may_back = self.model.may_back = True

    @precondition(lambda self: self.model.by_age)
    @rule()
    def trim(self) -> None:
        evicted = self.model.trim()
        self.books.carry_out(self.state.trim())
        assert self.books.freed == evicted

    # --- commit ---

    @precondition(lambda self: any(lease.reserved for lease in self.model.leases.values()))
    @rule(
        pick=any_number,
        back=small_number,
        pages=any_number,
        count=st.integers(0, 6),
        known=any_number,
        suffix=some_tokens,
    )
    def commit(
        self, pick: int, back: int, pages: int, count: int, known: int, suffix: Tokens
    ) -> None:
        """Some reserved pages, in any order, as blocks that follow the lease's prefix."""
        lease, expected = self.both(pick)
        chosen = sorted(expected.reserved)
        turn = pages % (len(chosen) + 1)
        chosen = (chosen[turn:] + chosen[:turn])[:count]
        size = self.model.block_size(expected)
        tokens = self.continuation(expected, known) + suffix
        tokens = (tokens + (0,) * 99)[: len(chosen) * size]
        first_block = max(0, len(expected.held) // size - back)
        before = expected.held[first_block * size :]
        named = [self.model.blocks[b] for b in self.model.held_blocks(expected)[first_block:]]
        self.do_commit(lease, expected, first_block, named + chosen, before + tokens)

    def continuation(self, lease: slow.Lease, pick: int) -> Tokens:
        """How another block, which is there, goes on behind the lease's prefix."""
        length = len(lease.held)
        known = sorted(
            block.tokens[length:]
            for block in self.model.blocks
            if block.namespace == lease.namespace and block.tokens[:length] == lease.held
        )
        return known[pick % len(known)] if known else ()

    @precondition(some_lease)
    @rule(
        pick=any_number,
        page=any_number,
        wrong=st.sampled_from(["gap", "twice", "foreign", "half a block", "other tokens"]),
    )
    def commit_what_is_wrong(self, pick: int, page: int, wrong: str) -> None:
        lease, expected = self.both(pick)
        size, arena = self.model.block_size(expected), lease.namespace.arena
        first_block = len(expected.held) // size
        pages = sorted(expected.reserved)[:1]
        tokens = (1,) * size * len(pages)
        match wrong:
            case "gap":
                first_block += 1
            case "twice":
                pages, tokens = pages * 2, tokens * 2
            case "foreign":
                pages = [Page(arena.id, page % arena.pool.num_pages)]
                tokens = (1,) * size
                if pages[0] in expected.reserved:
                    return
            case "half a block":
                tokens += (1,)
            case "other tokens":
                first_block, pages, tokens = 0, [Page(arena.id, 0)], (7,) * size
                if not expected.held:
                    return
        if wrong == "twice" and not pages:
            return
        with pytest.raises(slow.Refused):
            self.model.commit(expected, first_block, pages, tokens)
        with pytest.raises(BadRequest):
            self.state.commit(
                lease, first_block, np.array([p.number for p in pages], np.int64), packed(tokens)
            )

    def do_commit(
        self,
        lease: Lease,
        expected: slow.Lease,
        first_block: int,
        pages: list[Page],
        tokens: Tokens,
    ) -> None:
        now_in, num_duplicates = self.model.commit(expected, first_block, pages, tokens)
        numbers = np.array([page.number for page in pages], np.int64)
        answer = self.state.commit(lease, first_block, numbers, packed(tokens))
        self.books.carry_out(answer.plan)
        assert [Page(lease.namespace.arena.id, page) for page in answer.pages.tolist()] == now_in
        assert answer.num_duplicates == num_duplicates

    # --- what a client does, as one step ---

    @rule(
        s=small_number,
        n=small_number,
        all_prompts=st.lists(prompts, min_size=1, max_size=5),
        ahead=st.integers(0, 4),
        keep=st.sampled_from([True, False, False]),
    )
    def compute(self, s: int, n: int, all_prompts: list[Prompt], ahead: int, keep: bool) -> None:
        """Prompts one after the other: match, reserve, commit; keep the last one's lease."""
        session, namespace = self.sessions[s], self.namespaces[n]
        for prompt in all_prompts:
            tokens = self.tokens(namespace, prompt)
            if self.do_match(session, 4, namespace, tokens):
                self.fill(session, 4, tokens, ahead)
        if not keep:
            self.do_match(session, 4, namespace, ())

    @rule(n=small_number, prompt=prompts, other=prompts, ahead=st.integers(0, 4))
    def race(self, n: int, prompt: Prompt, other: Prompt, ahead: int) -> None:
        """Two sessions match before either commits, prompts that begin alike."""
        namespace = self.namespaces[n]
        tokens = self.tokens(namespace, prompt)
        both = [(self.sessions[0], tokens), (self.sessions[1], tokens[: other[1]] + other[2])]
        granted = [self.do_match(session, 5, namespace, tokens) for session, tokens in both]
        for (session, tokens), is_granted in zip(both, granted, strict=True):
            if is_granted:
                self.fill(session, 5, tokens, ahead)

    def fill(self, session: int, lease_id: int, tokens: Tokens, ahead: int) -> None:
        """Reserve and commit all blocks of these tokens that the lease does not hold."""
        lease = self.state.leases.get(session, lease_id)
        expected = self.model.leases[session, lease_id]
        have, size = len(expected.granted), self.model.block_size(expected)
        count = len(tokens) // size - len(expected.held) // size
        if count <= 0:
            return
        while not self.do_reserve(lease, expected, have, have + count + ahead):
            if not self.in_backing:
                return
            self.end_backing(pick=0, backed=True)
        self.do_commit(
            lease,
            expected,
            len(expected.held) // size,
            expected.granted[have : have + count],
            tokens[len(expected.held) : len(tokens) // size * size],
        )

    # --- ends ---

    @precondition(some_lease)
    @rule(pick=any_number)
    def abort(self, pick: int) -> None:
        lease, expected = self.both(pick)
        given_back = self.model.abort(expected)
        self.books.carry_out(self.state.abort(lease))
        assert set(self.books.freed) == given_back

    @rule(s=small_number, lease_id=st.integers(0, 5))
    def release(self, s: int, lease_id: int) -> None:
        """A lease, an id that was never granted, or one that was released before."""
        session = self.sessions[s]
        known = (session, lease_id) in self.model.leases
        unknown_before = self.state.counters["releases_unknown"]
        given_back = self.model.release(session, lease_id)
        plan = self.state.release(session, lease_id)
        self.books.carry_out(plan)
        assert set(self.books.freed) == given_back
        assert isinstance(plan[0], plans.Ended) if known else plan == []
        assert self.state.counters["releases_unknown"] - unknown_before == (not known)
        with pytest.raises(LeaseEnded):
            self.state.leases.get(session, lease_id)

    @rule(s=small_number)
    def end_session(self, s: int) -> None:
        session = self.sessions[s]
        self.model.end_session(session)
        self.books.carry_out(self.state.end_session(session))
        assert self.books.freed == []
        self.ended.append(session)
        self.num_sessions += 1
        self.sessions[s] = self.num_sessions

    @precondition(lambda self: self.ended)
    @rule(pick=any_number)
    def session_gone(self, pick: int) -> None:
        session = self.ended.pop(pick % len(self.ended))
        freed = self.model.session_gone(session)
        self.books.carry_out(self.state.session_gone(session))
        assert set(self.books.freed) == freed

    # --- after every step ---

    @invariant()
    def books_agree(self) -> None:
        self.state.check()
        for arena, table in zip(self.state.arenas, self.books.tables, strict=True):
            expected = [self.model.pages[Page(arena.id, p)] for p in range(arena.pool.num_pages)]
            assert [PageState(s).name.lower() for s in arena.pool.states.tolist()] == expected
            assert arena.pool.counts() == {
                state.name.lower(): expected.count(state.name.lower()) for state in PageState
            }
            assert [PageState(s) for s in table.records["state"].tolist()] == (
                arena.pool.states.tolist()
            )
            assert table.sealed().all()

    @invariant()
    def blocks_agree(self) -> None:
        found = {block: page for one in self.namespaces for block, page in blocks_of(one)}
        assert found == self.model.blocks

    @invariant()
    def ages_agree(self) -> None:
        for arena in self.state.arenas:
            pages = [page for node in arena.lru for page in reversed(node.pages)]
            expected = [self.model.blocks[block] for block in self.model.unlocked(arena.id)]
            assert [Page(arena.id, page) for page in pages] == expected

    @invariant()
    def leases_agree(self) -> None:
        keys = {(lease.session, lease.id) for lease in self.state.leases}
        assert keys == set(self.model.leases)
        assert len({lease.slot for lease in self.state.leases}) == len(keys)
        for lease in self.state.leases:
            expected = self.model.leases[lease.session, lease.id]
            arena = lease.namespace.arena.id
            assert {Page(arena, page) for page in lease.reserved} == expected.reserved
            assert unpacked(lease.node.path_tokens()) == expected.held
            assert self.books.generations[lease.slot] == lease.generation


def blocks_of(namespace: Namespace) -> Iterator[tuple[slow.Block, Page]]:
    size = namespace.arena.layout.block_size
    for node in namespace.tree.nodes():
        tokens, pages = unpacked(node.path_tokens()), node.path_pages().tolist()
        for at in range(len(pages) - node.num_blocks, len(pages)):
            block = slow.Block(namespace.id, tokens[: (at + 1) * size])
            yield block, Page(namespace.arena.id, pages[at])


@pytest.mark.timeout(0)
def test_the_cache_answers_as_the_model_does() -> None:
    run_state_machine_as_test(
        CacheAndModel,
        settings=settings(
            max_examples=int(os.environ.get("KVD_STRESS", "100")),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
