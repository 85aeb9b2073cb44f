"""Random turns on a tree and on plain dicts and sets of what each tier has: they hold the same.

`KVD_STRESS=20 pytest tests/cache/test_radix_against_dict.py` tries twenty times as many histories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd.cache.radix import MEMORY, Node, Tree
from kvd.protocol.codec import TOKEN_BYTES
from kvd.protocol.keys import BlockKey, chain
from tests.cache.conftest import histories

if TYPE_CHECKING:
    from kvd.arena.runs import Pages

BLOCK = 2
KEY = bytes(32)
STORES = (1, 2)

Tokens = tuple[int, ...]
any_number = st.integers(0, 1000)
some_tokens = st.lists(st.integers(0, 1), max_size=12).map(tuple)
long_tokens = st.lists(st.integers(0, 1), min_size=6, max_size=12).map(tuple)
some_tier = st.sampled_from([MEMORY, *STORES])
some_store = st.sampled_from(STORES)


def packed(tokens: Tokens) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def keys_of(tokens: Tokens) -> list[BlockKey]:
    return chain(KEY, packed(tokens), BLOCK * TOKEN_BYTES)


def blocks_of(tokens: Tokens, start: int = 0) -> list[Tokens]:
    """The names of a path's blocks, which are all tokens to their ends, from number `start` on."""
    return [tokens[:end] for end in range((start + 1) * BLOCK, len(tokens) + 1, BLOCK)]


def following(tokens: Tokens, names: set[Tokens]) -> list[Tokens]:
    """Those that follow the block at the end of these tokens."""
    return sorted(name for name in names if name[:-BLOCK] == tokens)


@dataclass(eq=False)
class Holder:
    end: Node
    tokens: Tokens
    pages: list[int]


@dataclass(eq=False)
class Saving(Holder):
    """Copies of the last blocks on their way to a store."""

    num_blocks: int
    store: int


class TreeAndDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree(KEY, BLOCK, TOKEN_BYTES, 1 + len(STORES))
        self.lru = self.tree.lrus[MEMORY]
        self.touches = 0
        self.pages: dict[Tokens, int] = {}
        self.copies: dict[int, set[Tokens]] = {store: set() for store in STORES}
        self.holders: list[Holder] = []
        self.savings: list[Saving] = []
        self.used: set[int] = set()
        self.gone: set[int] = set()

    def known(self, tokens: Tokens) -> list[int]:
        """The pages of the longest prefix of whole blocks."""
        pages: list[int] = []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            if tokens[:end] not in self.pages:
                break
            pages.append(self.pages[tokens[:end]])
        return pages

    def held(self) -> set[int]:
        return {page for holder in self.holders + self.savings for page in holder.pages}

    def here(self, tier: int) -> set[Tokens]:
        return self.copies[tier] if tier else set(self.pages)

    def anywhere(self) -> set[Tokens]:
        return set(self.pages).union(*self.copies.values())

    def forget(self, pages: Pages) -> None:
        """These pages are free, each once, and nobody's."""
        held = self.held()
        freed = pages.tolist()
        assert len(set(freed)) == len(freed)
        assert not (held | self.gone) & set(freed)
        self.gone |= set(freed)
        self.pages = {key: page for key, page in self.pages.items() if page not in self.gone}

    def unlock(self, end: Node, above: Node | None = None) -> None:
        self.touches += 1
        self.forget(self.tree.unlock(end, self.touches, above))

    # --- what is there from before ---

    @initialize(paths=st.lists(st.tuples(some_tier, long_tokens), max_size=6))
    def recover(self, paths: list[tuple[int, Tokens]]) -> None:
        for tier in (MEMORY, *STORES):
            names = {name for one, tokens in paths if one == tier for name in blocks_of(tokens)}
            self.recover_behind(self.tree.root, (), names, tier)

    def recover_behind(self, end: Node, tokens: Tokens, names: set[Tokens], tier: int) -> None:
        """In pieces that end where a path forks, as recovery does."""
        for name in following(tokens, names):
            while len(more := following(name, names)) == 1:
                name = more[0]
            new = blocks_of(name, len(tokens) // BLOCK)
            pages = [len(self.used) + at for at in range(len(new))] if tier == MEMORY else []
            keys = b"".join(keys_of(name)[-len(new) :])
            node = self.tree.recover(end, packed(name[len(tokens) :]), keys, tier, pages)
            self.used.update(pages)
            if tier == MEMORY:
                self.pages.update(zip(new, pages, strict=True))
            else:
                self.copies[tier].update(new)
            self.recover_behind(node, name, names, tier)

    # --- turns ---

    @rule(tokens=some_tokens)
    def hold(self, tokens: Tokens) -> None:
        found = self.tree.find(packed(tokens))
        pages = self.known(tokens)
        assert found.total_blocks == len(pages)
        end = self.tree.lock(found)
        self.holders.append(Holder(end, tokens[: len(pages) * BLOCK], pages))

    @rule(tokens=some_tokens)
    def find_anywhere(self, tokens: Tokens) -> None:
        known = self.anywhere()
        num_blocks = sum(name in known for name in blocks_of(tokens))
        assert self.tree.find(packed(tokens), anywhere=True).total_blocks == num_blocks

    @precondition(lambda self: self.holders)
    @rule(pick=any_number, tokens=some_tokens)
    def append(self, pick: int, tokens: Tokens) -> None:
        """As a commit does: over what is there, then the rest."""
        holder = self.holders[pick % len(self.holders)]
        if holder.end.detached:
            return
        tokens = holder.tokens + tokens[: len(tokens) // BLOCK * BLOCK]
        start = len(holder.tokens)
        found = self.tree.find(packed(tokens[start:]), holder.end)
        holder.end = self.tree.lock(found, below=holder.end)
        rest = tokens[start + found.total_blocks * BLOCK :]
        pages = [len(self.used) + place for place in range(len(rest) // BLOCK)]
        if pages:
            holder.end = self.tree.append(holder.end, packed(rest), pages)
            self.tree.admit(holder.end, STORES[0])
        self.used.update(pages)
        holder.tokens, holder.pages = tokens, self.known(tokens[: len(tokens) - len(rest)]) + pages
        for place, page in enumerate(holder.pages):
            assert self.pages.setdefault(tokens[: (place + 1) * BLOCK], page) == page

    @rule(
        paths=st.lists(long_tokens, min_size=1, max_size=4),
        keep=st.sampled_from([True, False, False]),
    )
    def fill(self, paths: list[Tokens], keep: bool) -> None:
        for tokens in paths:
            self.hold(tokens=tokens)
            self.append(pick=-1, tokens=tokens[len(self.holders[-1].tokens) :])
            if not keep:
                self.let_go(pick=-1)

    @precondition(lambda self: self.holders)
    @rule(pick=any_number)
    def let_go(self, pick: int) -> None:
        holder = self.holders.pop(pick % len(self.holders))
        self.unlock(holder.end)

    @precondition(lambda self: self.holders)
    @rule(pick=any_number, num_blocks=any_number)
    def keep(self, pick: int, num_blocks: int) -> None:
        holder = self.holders[pick % len(self.holders)]
        num_blocks %= len(holder.pages) + 1
        kept = self.tree.node_at(holder.end, num_blocks)
        end, holder.end = holder.end, kept
        holder.tokens = holder.tokens[: num_blocks * BLOCK]
        holder.pages = holder.pages[:num_blocks]
        self.unlock(end, above=kept)

    # --- copies ---

    @precondition(lambda self: self.holders)
    @rule(pick=any_number, store=some_store)
    def admit(self, pick: int, store: int) -> None:
        holder = self.holders[pick % len(self.holders)]
        if not holder.end.detached:
            self.tree.admit(holder.end, store)

    @rule(store=some_store, size=any_number)
    def begin_saving(self, store: int, size: int) -> None:
        """The first blocks that lack on the path of what waited longest."""
        for node in next(iter(self.tree.unsaved[store])).path() if self.tree.unsaved[store] else []:
            if not node.is_in(store) and not node.saving >> store & 1:
                size = 1 + size % node.num_blocks
                end = self.tree.begin_saving(node, size, store)
                tokens = tuple(np.frombuffer(end.path_tokens(), "<u4").tolist())
                pages = end.path_pages().tolist()
                self.savings.append(Saving(end, tokens, pages, size, store))
                return

    @rule(store=some_store)
    def save_all(self, store: int) -> None:
        """First what is on its way, which the rest follows."""
        while self.savings:
            self.end_saving(pick=0, saved=True)
        while self.tree.unsaved[store]:
            self.begin_saving(store=store, size=-1)
            self.end_saving(pick=-1, saved=True)

    @precondition(lambda self: self.savings)
    @rule(pick=any_number, saved=st.booleans())
    def end_saving(self, pick: int, saved: bool) -> None:
        """What is still there has a copy now, where what it follows has one."""
        saving = self.savings.pop(pick % len(self.savings))
        size, copies = saving.num_blocks, self.copies[saving.store]
        num_before = len(copies)
        names = blocks_of(saving.tokens)
        for name, page in list(zip(names, saving.pages, strict=True))[-size:]:
            is_there = self.pages.get(name) == page
            if saved and is_there and (name[:-BLOCK] in copies or len(name) == BLOCK):
                copies.add(name)
        done = self.tree.end_saving(saving.end, size, saving.store, saved=saved)
        assert done.num_blocks == len(copies) - num_before
        self.forget(done.gone)

    # --- removing ---

    @rule(tier=some_tier, sizes=st.lists(any_number, min_size=1, max_size=3))
    def cut(self, tier: int, sizes: list[int]) -> None:
        for size in sizes:
            if leaf := self.tree.lrus[tier].coldest():
                self.cut_leaf(leaf, size, tier)

    def cut_leaf(self, leaf: Node, size: int, tier: int) -> None:
        size = 1 + size % leaf.num_blocks
        tokens = tuple(np.frombuffer(leaf.path_tokens(), "<u4").tolist())
        gone = self.tree.cut(leaf, size, tier)
        assert gone.keys == keys_of(tokens)[: -size - 1 : -1]
        if tier == MEMORY:
            self.forget(gone.pages)
        else:
            self.copies[tier] -= set(blocks_of(tokens)[-size:])

    @precondition(lambda self: self.anywhere())
    @rule(pick=any_number)
    def detach(self, pick: int) -> None:
        """The last block of some prefix, and all behind it."""
        names = sorted(self.anywhere())
        tokens = names[pick % len(names)]
        found = self.tree.find(packed(tokens), anywhere=True)
        self.check_detached(tokens, found.node, found.num_blocks - 1)

    @rule(pick=any_number)
    def seldom_detach_all(self, pick: int) -> None:
        if pick % 8 == 7:
            self.detach_all()

    def detach_all(self) -> None:
        self.check_detached((), self.tree.root, 0)

    def check_detached(self, tokens: Tokens, node: Node, keep: int) -> None:
        names = {name for name in self.anywhere() if name[: len(tokens)] == tokens}
        leaving, held = {self.pages[name] for name in names if name in self.pages}, self.held()
        gone = self.tree.detach(node, keep)
        assert set(gone.held.tolist()) == leaving & held
        assert set(gone.free.tolist()) == leaving - held
        self.check_order(gone.keys, names)
        self.forget(gone.free)
        self.pages = {key: page for key, page in self.pages.items() if page not in leaving}
        for copies in self.copies.values():
            copies -= names

    def check_order(self, keys: list[BlockKey], names: set[Tokens]) -> None:
        """Exactly these, each before the one that it follows."""
        places = {keys_of(name)[-1]: name for name in names}
        assert len(keys) == len(names)
        told: set[Tokens] = set()
        for key in keys:
            assert not set(following(places[key], names)) - told
            told.add(places[key])

    @rule(tokens=some_tokens)
    def find_tail(self, tokens: Tokens) -> None:
        """A search of all blocks behind the prefix finds none that agrees longer."""
        found = self.tree.find(packed(tokens))
        end = self.tree.lock(found)
        at = found.total_blocks * BLOCK
        rest = tokens[at : at + BLOCK]
        agreeing = {
            key: sum(key[at : at + n] == rest[:n] for n in range(1, len(rest) + 1))
            for key in self.pages
            if len(key) == at + BLOCK and key[:at] == tokens[:at]
        }
        longest = max(agreeing.values(), default=0)
        tail = self.tree.find_tail(end, packed(tokens[at:]))
        assert (tail is None) == (longest == 0)
        if tail:
            (key,) = (k for k, page in self.pages.items() if page == tail[0].node.pages[0])
            assert (tail[1], agreeing[key]) == (longest, longest)
        self.unlock(end)

    # --- after every turn ---

    @invariant()
    def every_block_is_where_it_should_be(self) -> None:
        pages: dict[Tokens, int] = {}
        copies: dict[int, set[Tokens]] = {store: set() for store in STORES}
        for node in self.tree.nodes():
            tokens = tuple(np.frombuffer(node.path_tokens(), "<u4").tolist())
            names = blocks_of(tokens)[-node.num_blocks :]
            pages.update(zip(names, node.pages, strict=bool(node.pages)))
            for store in STORES:
                copies[store].update(names if node.is_in(store) else ())
                assert node not in self.tree.unsaved[store] or not node.is_in(store)
        assert (pages, copies) == (self.pages, self.copies)

    @invariant()
    def the_counts_are_right(self) -> None:
        nodes = list(self.tree.nodes())
        assert self.tree.num_nodes == len(nodes)
        assert not any(node.detached for node in nodes)
        held = self.held()
        for tier, lru in enumerate(self.tree.lrus):
            here = self.here(tier)
            assert self.tree.counts[tier] == len(here)
            assert lru.num_blocks == sum(self.pages.get(name) not in held for name in here)
            assert (lru.coldest() is None) == (lru.num_blocks == 0)
        assert self.used == self.gone | held | set(self.pages.values())

    @invariant()
    def holders_hold_what_they_held(self) -> None:
        for holder in self.holders + self.savings:
            assert holder.end.path_pages().tolist() == holder.pages
            assert bytes(holder.end.path_tokens()) == packed(holder.tokens)

    def teardown(self) -> None:
        """Whoever holds lets go, and everything is dropped: every page was free once."""
        while self.holders:
            self.let_go(pick=0)
        while self.savings:
            self.end_saving(pick=0, saved=True)
        self.detach_all()
        assert self.used == self.gone
        assert (self.tree.num_nodes, self.tree.num_blocks, self.lru.num_blocks) == (0, 0, 0)
        assert self.tree.root.children == []


@pytest.mark.timeout(0)
def test_a_tree_holds_what_a_dict_holds() -> None:
    run_state_machine_as_test(TreeAndDict, settings=histories(50))
