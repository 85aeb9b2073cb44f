"""Random operations on CacheState and on the model: every answer, page and plan must agree.

`KVD_STRESS=20 pytest tests/cache/test_against_model.py` tries twenty times as many histories.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from kvd.arena.page_table import PageState
from kvd.cache.leases import OWN_SESSION
from kvd.cache.plan import Ended, Granted, Plan, Short
from kvd.protocol.errors import BadRequest, LeaseEnded
from kvd.protocol.keys import chain
from tests.cache.conftest import histories
from tests.cache.machine import (
    ERRORS,
    Machine,
    Prompt,
    any_number,
    decode,
    encode,
    fitting,
    prompts,
    small_number,
    some_space,
    some_tokens,
)
from tests.cache.model import Page, Refused, Tokens

if TYPE_CHECKING:
    from kvd.cache.leases import Lease
    from kvd.cache.memory import Namespace
    from kvd.cache.stores import StoreState, Write
    from tests.cache import model as slow


class CacheAndModel(Machine):
    # --- match and fork ---

    @rule(
        s=small_number,
        lease_id=st.integers(0, 3),
        n=some_space,
        prompt=prompts,
        exact=st.booleans(),
    )
    def match(self, s: int, lease_id: int, n: int, prompt: Prompt, exact: bool) -> None:
        if space := self.opened(self.sessions[s], n):
            tokens = self.tokens(space, prompt)
            self.do_match(self.sessions[s], lease_id, space, tokens, exact_tail=exact)

    @precondition(lambda self: self.model.index)
    @rule(
        s=small_number,
        lease_id=st.integers(0, 3),
        pick=any_number,
        cut=st.integers(1, 3),
        suffix=some_tokens,
    )
    def match_a_part_of_a_block(
        self, s: int, lease_id: int, pick: int, cut: int, suffix: Tokens
    ) -> None:
        blocks = sorted(self.model.index)
        number, tokens = blocks[pick % len(blocks)]
        space = self.opened(self.sessions[s], self.model.namespaces[number].key)
        if space:
            tokens = tokens[:-cut] + fitting(space, suffix)
            self.do_match(self.sessions[s], lease_id, space, tokens, exact_tail=True)

    @precondition(Machine.some_lease)
    @rule(pick=any_number)
    def match_again(self, pick: int) -> None:
        """The same request twice: the first answer, whatever was committed since."""
        lease, expected = self.both(pick)
        match expected.asked:
            case (tuple() as tokens, bool() as exact):
                self.do_match(lease.session, lease.id, lease.namespace, tokens, exact_tail=exact)
                assert self.state.leases.get(lease.session, lease.id) is lease

    def do_match(
        self,
        session: int,
        lease_id: int,
        space: Namespace,
        tokens: Tokens,
        *,
        exact_tail: bool = False,
    ) -> bool:
        before = self.model.leases.get((session, lease_id))
        args = session, lease_id, space, encode(space, tokens)
        try:
            expected = self.model.match(session, lease_id, space.id, tokens, exact_tail=exact_tail)
        except Refused as refused:
            with pytest.raises(ERRORS[refused.kind]):
                self.state.match(*args, exact_tail=exact_tail)
            return False
        answer = self.state.match(*args, exact_tail=exact_tail)
        self.books.carry_out(answer.plan)
        self.check_matched(answer, expected)
        if exact_tail and expected is not before:
            self.check_tail(answer.lease, expected, tokens[len(expected.tokens) :])
        tail = answer.lease.tail and Page(space.arena.id, answer.lease.tail.page)
        assert tail == (expected.tail and expected.tail.page)
        return True

    def check_tail(self, lease: Lease, expected: slow.Lease, rest: Tokens) -> None:
        """No block that follows agrees longer: a hit to the token."""
        agreeing = self.model.agreeing(expected, rest)
        longest = max(agreeing.values(), default=0)
        assert (lease.tail is None) == (longest == 0)
        if lease.tail:
            page = Page(lease.namespace.arena.id, lease.tail.page)
            assert lease.tail.num_tokens == agreeing[page] == longest
            self.model.hold_tail(expected, page)

    @precondition(Machine.some_lease)
    @rule(pick=any_number, lease_id=st.integers(0, 5))
    def fork(self, pick: int, lease_id: int) -> None:
        source, _ = self.both(pick)
        try:
            expected = self.model.fork(source.session, lease_id, source.id)
        except Refused as refused:
            with pytest.raises(ERRORS[refused.kind]):
                self.state.fork(source.session, lease_id, source)
            return
        answer = self.state.fork(source.session, lease_id, source)
        self.books.carry_out(answer.plan)
        self.check_matched(answer, expected)

    # --- reserve ---

    @precondition(Machine.some_lease)
    @rule(pick=any_number, count=st.integers(0, 24), ahead=st.integers(0, 16))
    def reserve(self, pick: int, count: int, ahead: int) -> None:
        lease, expected = self.both(pick)
        have = len(expected.granted)
        self.do_reserve(lease, expected, have, have + count, ahead)

    @precondition(Machine.some_lease)
    @rule(pick=any_number, back=any_number, more=st.integers(-3, 3), ahead=st.integers(0, 3))
    def reserve_again(self, pick: int, back: int, more: int, ahead: int) -> None:
        """A range of which some, or all, was granted before."""
        lease, expected = self.both(pick)
        start = len(expected.granted) - back % (len(expected.granted) + 1)
        self.do_reserve(lease, expected, start, max(start, len(expected.granted) + more), ahead)

    @precondition(Machine.some_lease)
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
        if not expected.reserved.issuperset(expected.granted[start : stop + ahead]):
            with pytest.raises(BadRequest):
                self.state.reserve(lease, start, stop, ahead)
            return False
        if stop < have or start < have == stop:
            answer = self.state.reserve(lease, start, stop, ahead)
            assert isinstance(answer, Granted)
            assert [Page(arena, page) for page in answer.pages.tolist()] == (
                expected.granted[start : stop + ahead]
            )
            assert answer.plan == []
            return True
        count = stop - have
        if count > self.model.num_reservable(lease.session, lease.namespace.id):
            with pytest.raises(ERRORS["pages"]):
                self.state.reserve(lease, start, stop, ahead)
            return False
        at_least = count + self.num_certain(lease, count, ahead)
        answer = self.state.reserve(lease, start, stop, ahead)
        if isinstance(answer, Short):
            self.check_short(lease, expected, count, answer)
            return False
        self.check_room(lease, count, ahead, answer)
        granted = [Page(arena, page) for page in answer.pages.tolist()]
        fresh = granted[have - start :]
        assert at_least <= len(fresh) <= count + ahead
        assert fresh == sorted(set(fresh))
        self.model.grant(expected, fresh)
        assert granted == expected.granted[start:]
        assert self.model.num_reservable(lease.session, lease.namespace.id) >= 0
        # Noted before the numbers leave the daemon.
        notes = self.books.tables[arena].records[[page.number for page in fresh]]
        assert (notes["state"] == PageState.RESERVED).all()
        assert (notes["session"] == lease.session).all()
        return True

    def num_certain(self, lease: Lease, count: int, ahead: int) -> int:
        """How many of the pages ahead come along whatever is evicted: those of whole groups."""
        space = lease.namespace
        size = space.arena.layout.group_pages
        groups = [page.number // size for page in self.model.in_state(space.arena.id, "free")]
        free = size * list(Counter(groups).values()).count(size)
        most = self.model.max_pages(space.id) - self.model.num_pages(space.id)
        reservable = self.model.num_reservable(lease.session, space.id)
        return max(0, min(ahead, free - count, most - count, reservable - count))

    def check_room(self, lease: Lease, count: int, ahead: int, answer: Granted) -> None:
        """Blocks went only where there was no memory to be had, or for the namespace's quota."""
        space, arena = lease.namespace, lease.namespace.arena.id
        assert not self.model.is_impossible(space.id, count)
        excess = self.model.excess(space.id, count + ahead)
        waits = self.model.missing(space.id, count) and self.model.on_its_way(arena)
        assert not waits
        self.told(answer.plan, space, excess)
        num_evicted = sum(page.arena == arena for page in self.books.freed)
        if self.model.backable_extents(arena) or self.model.on_its_way(arena):
            assert num_evicted <= excess

    def check_short(self, lease: Lease, expected: slow.Lease, count: int, answer: Short) -> None:
        """Nothing goes of its own layout, and there was no way to have so many pages now."""
        space, model = lease.namespace, self.model
        missing = model.missing(space.id, count)
        needed = missing + model.excess(space.id, count)
        self.told(answer.plan, space)
        assert all(page.arena != space.arena.id for page in self.books.freed)
        shortage = msgspec.structs.asdict(answer.shortage)
        assert shortage == model.shortage(space.id, count)
        assert answer.hopeless == (not answer.plan and model.is_hopeless(expected, count))
        if model.is_impossible(space.id, count):
            assert answer.plan == []
        elif not model.on_its_way(space.arena.id):
            assert needed > model.num_evictable(space.id)
            assert not model.backable_extents(space.arena.id)
            self.check_nothing_is_idle(space)
        if answer.hopeless:
            again = self.state.reserve(lease, len(lease.granted), len(lease.granted) + count)
            assert isinstance(again, Short)
            assert again.plan == []

    def check_nothing_is_idle(self, space: Namespace) -> None:
        """Memory of other layouts would have moved here, where there is place for it."""
        model, own = self.model, space.arena.id
        if model.may_back and set(model.in_state(own, "unbacked")) - model.being_backed:
            assert not any(model.idle_extents(arena) for arena in model.arenas if arena != own)

    # --- memory ---

    @precondition(lambda self: self.in_backing)
    @rule(pick=any_number, backed=st.sampled_from([True, True, True, False]))
    def end_backing(self, pick: int, backed: bool) -> None:
        self.backing_ended(pick, backed)

    @precondition(lambda self: self.model.arenas)
    @rule(pick=any_number)
    def back_ahead(self, pick: int) -> None:
        """What the manager does so that memory is there before somebody waits for it."""
        arenas = list(self.model.arenas)
        self.begin_backing(arenas[pick % len(arenas)])

    @precondition(lambda self: not self.model.may_back)
    @rule()
    def memory_may_be_asked_for_again(self) -> None:
        self.state.memory.may_back = self.model.may_back = True

    @precondition(lambda self: self.model.by_age)
    @rule()
    def trim(self) -> None:
        evicted = self.model.trim()
        self.books.carry_out(self.state.memory.trim())
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
        size = self.model.size(expected.namespace)
        suffix = fitting(lease.namespace, suffix)
        tokens = (self.continuation(expected, known) + suffix + (0,) * 99)[: len(chosen) * size]
        first_block = max(0, len(expected.blocks) - back)
        before = expected.tokens[first_block * size :]
        named = [block.page for block in expected.blocks[first_block:]]
        self.do_commit(lease, expected, first_block, named + chosen, before + tokens)

    def continuation(self, lease: slow.Lease, pick: int) -> Tokens:
        """How another block, which is there, goes on behind the lease's prefix."""
        length = len(lease.tokens)
        known = sorted(
            block.tokens[length:]
            for block in self.model.of_namespace(lease.namespace)
            if block.tokens[:length] == lease.tokens
        )
        return known[pick % len(known)] if known else ()

    @precondition(Machine.some_lease)
    @rule(
        pick=any_number,
        page=any_number,
        wrong=st.sampled_from(["gap", "twice", "foreign", "half a block", "other tokens"]),
    )
    def commit_what_is_wrong(self, pick: int, page: int, wrong: str) -> None:
        lease, expected = self.both(pick)
        size, arena = self.model.size(expected.namespace), lease.namespace.arena
        first_block = len(expected.blocks)
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
            case "half a block":
                tokens += (1,)
            case "other tokens":
                first_block, pages = 0, [Page(arena.id, 0)]
                tokens = tuple(1 - token % 2 for token in expected.tokens[:size])
        if (wrong == "twice" and not pages) or (wrong == "other tokens" and not expected.blocks):
            return
        if wrong == "foreign" and pages[0] in expected.reserved:
            return
        with pytest.raises(Refused, match="bad"):
            self.model.commit(expected, first_block, pages, tokens)
        numbers = np.array([page.number for page in pages], np.int64)
        with pytest.raises(BadRequest):
            self.state.commit(lease, first_block, numbers, encode(lease.namespace, tokens))

    def do_commit(
        self,
        lease: Lease,
        expected: slow.Lease,
        first_block: int,
        pages: list[Page],
        tokens: Tokens,
    ) -> None:
        numbers = np.array([page.number for page in pages], np.int64)
        rows = encode(lease.namespace, tokens)
        try:
            now_in, num_duplicates = self.model.commit(expected, first_block, pages, tokens)
        except Refused as refused:
            with pytest.raises(ERRORS[refused.kind]):
                self.state.commit(lease, first_block, numbers, rows)
            return
        answer = self.state.commit(lease, first_block, numbers, rows)
        self.books.carry_out(answer.plan)
        assert [Page(lease.namespace.arena.id, page) for page in answer.pages.tolist()] == now_in
        assert answer.num_duplicates == num_duplicates

    # --- what a client does, as one step ---

    @rule(
        s=small_number,
        n=some_space,
        all_prompts=st.lists(prompts, min_size=1, max_size=5),
        ahead=st.integers(0, 4),
        exact=st.booleans(),
        keep=st.sampled_from([True, False, False]),
    )
    def compute(
        self,
        s: int,
        n: int,
        all_prompts: list[Prompt],
        ahead: int,
        exact: bool,
        keep: bool,
    ) -> None:
        """Prompts one after the other: match, reserve, commit; keep the last one's lease."""
        session = self.sessions[s]
        space = self.opened(session, n)
        if space is None:
            return
        for prompt in all_prompts:
            tokens = self.tokens(space, prompt)
            if self.do_match(session, 4, space, tokens, exact_tail=exact):
                self.fill(session, 4, tokens, ahead)
        if not keep:
            self.do_match(session, 4, space, ())

    @rule(n=some_space, prompt=prompts, other=prompts, ahead=st.integers(0, 4))
    def race(self, n: int, prompt: Prompt, other: Prompt, ahead: int) -> None:
        """Two sessions match before either commits, prompts that begin alike."""
        spaces = [self.opened(session, n) for session in self.sessions[:2]]
        if not (spaces[0] and spaces[1]):
            return
        tokens = self.tokens(spaces[0], prompt)
        others = tokens[: other[1]] + fitting(spaces[0], other[2])
        both = [(self.sessions[0], tokens), (self.sessions[1], others)]
        granted = [self.do_match(session, 5, spaces[0], tokens) for session, tokens in both]
        for (session, tokens), is_granted in zip(both, granted, strict=True):
            if is_granted:
                self.fill(session, 5, tokens, ahead)

    def fill(self, session: int, lease_id: int, tokens: Tokens, ahead: int) -> None:
        """Reserve and commit all blocks of these tokens that the lease does not hold."""
        lease = self.state.leases.get(session, lease_id)
        expected = self.model.leases[session, lease_id]
        have, size = len(expected.granted), self.model.size(expected.namespace)
        count = len(tokens) // size - len(expected.blocks)
        if count <= 0:
            return
        while not self.do_reserve(lease, expected, have, have + count + ahead):
            if not self.in_backing:
                return
            self.backing_ended(pick=0, backed=True)
        self.do_commit(
            lease,
            expected,
            len(expected.blocks),
            expected.granted[have : have + count],
            tokens[len(expected.tokens) : len(tokens) // size * size],
        )

    # --- pins and drops ---

    @precondition(lambda self: self.model.namespaces)
    @rule(
        owner=st.sampled_from(["me", "you"]),
        n=any_number,
        prompt=prompts,
        seconds=st.integers(1, 20),
    )
    def pin(self, owner: str, n: int, prompt: Prompt, seconds: int) -> None:
        space = self.some_space(n)
        tokens = self.tokens(space, prompt)
        args = owner, space, encode(space, tokens), seconds, self.now
        try:
            expected = self.model.pin(owner, space.id, tokens, self.now + seconds)
        except Refused as refused:
            with pytest.raises(ERRORS[refused.kind]):
                self.state.pin(*args)
            return
        answer = self.state.pin(*args)
        self.books.carry_out(answer.plan)
        assert (answer.pin, answer.num_blocks) == expected

    @precondition(lambda self: self.model.pins)
    @rule(owner=st.sampled_from(["me", "you"]), pick=any_number, every=st.booleans())
    def unpin(self, owner: str, pick: int, every: bool) -> None:
        pins = list(self.model.pins)
        numbers = () if every else (pins[pick % len(pins)],)
        num_pins, plan = self.state.unpin(owner, numbers)
        self.books.carry_out(plan)
        assert num_pins == self.model.unpin_owner(owner, numbers)

    @rule(seconds=st.integers(0, 10))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.model.expire(self.now)
        self.books.carry_out(self.state.expire(self.now))

    @precondition(lambda self: self.names())
    @rule(pick=any_number, behind=some_tokens, back=small_number, every=st.integers(0, 9))
    def drop(self, pick: int, behind: Tokens, back: int, every: int) -> None:
        """Some block that is there and what is behind it, or that is not there; seldom all."""
        names = self.names()
        blocks = sorted(names.values())
        number, tokens = blocks[pick % len(blocks)]
        space = self.state.namespaces[number]
        from_block = max(0, len(tokens) // self.model.size(number) - back)
        tokens = tokens + fitting(space, behind) if every else ()
        from_block = from_block if tokens else 0
        expected = self.model.drop(number, tokens, from_block)
        answer = self.state.drop(space, encode(space, tokens), from_block)
        self.books.carry_out(answer.plan)
        assert (answer.num_blocks, answer.num_detached) == expected
        self.check_forgotten(answer.plan, names.keys() - self.names().keys())

    # --- stores ---

    @precondition(lambda self: self.stores)
    @rule(pick=any_number, max_bytes=st.integers(1, 48))
    def begin_write(self, pick: int, max_bytes: int) -> None:
        self.next_write(self.stores[pick % len(self.stores)], max_bytes)

    @precondition(lambda self: self.state.stores.writes)
    @rule(s=small_number, lease_id=st.integers(0, 3), pick=any_number)
    def match_what_is_on_its_way(self, s: int, lease_id: int, pick: int) -> None:
        names = sorted(set().union(*map(self.model.coming, self.model.stores)))
        if names:
            number, tokens = names[pick % len(names)]
            if space := self.opened(self.sessions[s], self.model.namespaces[number].key):
                self.do_match(self.sessions[s], lease_id, space, tokens)

    @precondition(lambda self: self.state.stores.writes)
    @rule(pick=any_number, saved=st.sampled_from([True, True, False]))
    def end_write(self, pick: int, saved: bool) -> None:
        writes = self.state.stores.writes
        self.oldest_ended(writes[pick % len(writes)].store, saved=saved)

    @precondition(lambda self: self.stores)
    @rule(pick=any_number)
    def write_all(self, pick: int) -> None:
        store = self.stores[pick % len(self.stores)]
        num_writes = 0
        while self.next_write(store, 64):
            while self.model.stores[store.tier - 1].writes:
                self.oldest_ended(store, saved=True)
            num_writes += 1
            assert num_writes < 100, "the same blocks go down again and again"

    def next_write(self, store: StoreState, max_bytes: int) -> Write | None:
        """What goes down are blocks that the store wants, or that these follow."""
        expected, kept, names = (
            self.model.stores[store.tier - 1],
            self.kept(store.tier),
            self.names(),
        )
        plan: Plan = []
        write = self.state.stores.next_write(store, max_bytes, plan)
        self.told_of_copies(plan, kept)
        self.books.carry_out(plan)
        if write is None:
            for space in self.wanting(expected):
                layout, leaves = space.arena.layout, self.model.leaves(expected, kept)
                room = store.usable_bytes - self.model.used_bytes_in(expected)
                own_room = store.most_of(layout) - self.used_bytes_of(expected, layout)
                assert min(room, own_room) < layout.page_bytes
                if own_room >= layout.page_bytes:
                    assert not leaves
                elif store.most_of(layout) >= layout.page_bytes:
                    assert layout not in map(self.layout_of, leaves)
            return None
        self.books.records[store.tier].update(write.keys)
        self.model.begin_write(expected, [names[key] for key in write.keys])
        layout = write.arena.layout
        assert self.used_bytes_of(expected, layout) <= store.most_of(layout)
        blocks = expected.writes[-1].blocks
        assert [Page(write.arena.id, page) for page in write.pages.tolist()] == [
            block.page for block in blocks
        ]
        assert write.num_bytes <= max(max_bytes, write.arena.layout.page_bytes)
        for block, key, parent, rows in zip(
            blocks, write.keys, write.parents, write.rows, strict=True
        ):
            space = self.state.namespaces[block.namespace]
            assert decode(space, rows) == block.tokens[-len(rows) // space.tree.row_bytes :]
            assert chain(parent, rows, len(rows)) == [key]
        return write

    def wanting(self, store: slow.Store) -> list[Namespace]:
        return [self.state.namespaces[number] for number in {name[0] for name in store.wanted}]

    def oldest_ended(self, store: StoreState, *, saved: bool) -> None:
        """A store's writes end in the order in which they began."""
        write = next(one for one in self.state.stores.writes if one.store is store)
        plan: Plan = []
        count = self.state.stores.end_write(write, plan, saved=saved)
        assert count == self.model.end_write(self.model.stores[store.tier - 1], saved=saved)
        self.books.carry_out(plan)

    @precondition(lambda self: self.stores and self.model.namespaces)
    @rule(n=any_number, prompt=prompts)
    def read_up(self, n: int, prompt: Prompt) -> None:
        """What a promotion does: a lease of the daemon's own, and pages for what is lacking."""
        space = self.some_space(n)
        tokens = self.tokens(space, prompt)
        lacking = self.state.lacking(space, encode(space, tokens))
        expected = self.model.lacking(space.id, tokens)
        assert (lacking is None) == (expected is None)
        if lacking is None or expected is None:
            return
        names = self.names()
        assert (lacking.tier, [names[key] for key in lacking.keys]) == expected
        _, end = expected[1][-1]
        if self.do_match(OWN_SESSION, 0, space, end):
            self.fill(OWN_SESSION, 0, end, 0)
            self.model.release(OWN_SESSION, 0)
            self.books.carry_out(self.state.release(OWN_SESSION, 0))

    @precondition(lambda self: self.stores)
    @rule(pick=any_number, works=st.booleans())
    def store_fails(self, pick: int, works: bool) -> None:
        """Or works again."""
        store = self.stores[pick % len(self.stores)]
        store.may_write = store.may_read = works
        self.model.stores[store.tier - 1].works = works

    @precondition(lambda self: self.stores)
    @rule(pick=any_number, usable_bytes=st.sampled_from([32, 96, 240]))
    def store_has_another_size(self, pick: int, usable_bytes: int) -> None:
        store = self.stores[pick % len(self.stores)]
        expected = self.model.stores[store.tier - 1]
        store.usable_bytes = expected.usable_bytes = usable_bytes
        plan: Plan = []
        self.state.stores.trim(store, plan)
        self.told_of_copies(plan)
        self.books.carry_out(plan)
        is_within = self.model.used_bytes_in(expected) <= usable_bytes
        assert is_within or not self.model.leaves(expected, set())

    @precondition(lambda self: self.stores)
    @rule(pick=any_number, most_bytes=st.sampled_from([0, 24, 96]))
    def layout_has_another_room(self, pick: int, most_bytes: int) -> None:
        store = self.stores[pick % len(self.stores)]
        store.most_bytes[list(store.record_bytes)[pick % len(store.record_bytes)]] = most_bytes

    @precondition(lambda self: self.stores)
    @rule(pick=any_number)
    def store_gives_up_a_layout(self, pick: int) -> None:
        """Between its writes; what memory has of it goes down again."""
        store = self.stores[pick % len(self.stores)]
        expected = self.model.stores[store.tier - 1]
        layout = list(store.record_bytes)[pick % len(store.record_bytes)]
        if not expected.writes:
            gone = {name for name in expected.copies if self.layout_of(name) == layout}
            keys = {key for key, name in self.names().items() if name in gone}
            self.state.forget_copies(layout, store.tier)
            self.books.records[store.tier] -= keys
            self.model.give_up(expected, gone)

    @precondition(lambda self: any(store.copies for store in self.model.stores))
    @rule(pick=any_number)
    def copy_is_damaged(self, pick: int) -> None:
        """It goes with what follows it; what memory has of them goes down again."""
        store = next(store for store in self.stores if self.model.stores[store.tier - 1].copies)
        expected = self.model.stores[store.tier - 1]
        number, tokens = sorted(expected.copies)[pick % len(expected.copies)]
        space = self.state.namespaces[number]
        plan = self.state.remove_copy(space, encode(space, tokens), store.tier)
        gone = {
            name
            for name in expected.copies
            if name[0] == number and name[1][: len(tokens)] == tokens
        }
        self.books.carry_out(plan)
        self.model.give_up(expected, gone)

    # --- ends ---

    @precondition(Machine.some_lease)
    @rule(pick=any_number)
    def abort(self, pick: int) -> None:
        lease, expected = self.both(pick)
        self.model.abort(expected)
        self.books.carry_out(self.state.abort(lease))

    @precondition(Machine.some_lease)
    @rule(pick=any_number, num_blocks=st.integers(0, 8))
    def keep(self, pick: int, num_blocks: int) -> None:
        lease, expected = self.both(pick)
        self.model.keep(expected, num_blocks)
        self.books.carry_out(self.state.keep(lease, num_blocks))

    @rule(s=small_number, lease_id=st.integers(0, 5))
    def release(self, s: int, lease_id: int) -> None:
        """A lease, an id that was never granted, or one that was released before."""
        session = self.sessions[s]
        known = (session, lease_id) in self.model.leases
        unknown_before = self.state.counters["releases_unknown"]
        self.model.release(session, lease_id)
        plan = self.state.release(session, lease_id)
        self.books.carry_out(plan)
        assert isinstance(plan[0], Ended) if known else plan == []
        assert self.state.counters["releases_unknown"] - unknown_before == (not known)
        with pytest.raises(LeaseEnded):
            self.state.leases.get(session, lease_id)

    @precondition(lambda self: self.model.namespaces)
    @rule(s=small_number, n=any_number, by_all=st.booleans())
    def close(self, s: int, n: int, by_all: bool) -> None:
        space = self.some_space(n)
        for session in self.sessions if by_all else [self.sessions[s]]:
            self.model.close(session, space.id)
            self.books.carry_out(self.state.close_namespace(session, space))

    @rule(s=small_number)
    def end_session(self, s: int) -> None:
        session = self.sessions[s]
        self.model.end_session(session)
        self.books.carry_out(self.state.end_session(session))
        self.ended.append(session)
        self.num_sessions += 1
        self.sessions[s] = self.num_sessions

    @precondition(lambda self: self.ended)
    @rule(pick=any_number)
    def session_gone(self, pick: int) -> None:
        session = self.ended.pop(pick % len(self.ended))
        self.model.session_gone(session)
        self.books.carry_out(self.state.session_gone(session))


@pytest.mark.timeout(0)
def test_the_cache_answers_as_the_model_does() -> None:
    run_state_machine_as_test(CacheAndModel, settings=histories(60))
