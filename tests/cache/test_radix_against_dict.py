"""Random turns on a tree and on a plain dict from tokens to pages: they hold the same.

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
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd.cache.radix import MEMORY, Node, Tree
from kvd.protocol.codec import TOKEN_BYTES
from tests.cache.conftest import histories

if TYPE_CHECKING:
    from kvd.arena.runs import Pages

BLOCK = 2

Tokens = tuple[int, ...]
any_number = st.integers(0, 1000)
some_tokens = st.lists(st.integers(0, 1), max_size=12).map(tuple)


def packed(tokens: Tokens) -> bytes:
    return np.array(tokens, "<u4").tobytes()


@dataclass(eq=False)
class Holder:
    end: Node
    tokens: Tokens
    pages: list[int]


class TreeAndDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree(bytes(32), BLOCK, TOKEN_BYTES)
        self.lru = self.tree.lrus[MEMORY]
        self.touches = 0
        self.pages: dict[Tokens, int] = {}
        self.holders: list[Holder] = []
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

    def forget(self, pages: Pages) -> None:
        """These pages are free, each once, and nobody's."""
        held = {page for holder in self.holders for page in holder.pages}
        freed = pages.tolist()
        assert len(set(freed)) == len(freed)
        assert not (held | self.gone) & set(freed)
        self.gone |= set(freed)
        self.pages = {key: page for key, page in self.pages.items() if page not in self.gone}

    def unlock(self, end: Node, above: Node | None = None) -> None:
        self.touches += 1
        self.forget(self.tree.unlock(end, self.touches, above))

    # --- turns ---

    @rule(tokens=some_tokens)
    def hold(self, tokens: Tokens) -> None:
        found = self.tree.find(packed(tokens))
        pages = self.known(tokens)
        assert found.total_blocks == len(pages)
        end = self.tree.lock(found)
        self.holders.append(Holder(end, tokens[: len(pages) * BLOCK], pages))

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
        self.used.update(pages)
        holder.tokens, holder.pages = tokens, self.known(tokens[: len(tokens) - len(rest)]) + pages
        for place, page in enumerate(holder.pages):
            assert self.pages.setdefault(tokens[: (place + 1) * BLOCK], page) == page

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

    @precondition(lambda self: self.lru.num_blocks)
    @rule(size=any_number)
    def cut(self, size: int) -> None:
        leaf = self.lru.coldest()
        assert leaf
        self.forget(self.tree.cut(leaf, 1 + size % leaf.num_blocks).pages)

    @precondition(lambda self: self.pages)
    @rule(pick=any_number)
    def detach(self, pick: int) -> None:
        """The last block of some prefix, and all behind it."""
        tokens = sorted(self.pages)[pick % len(self.pages)]
        found = self.tree.find(packed(tokens))
        self.check_detached(tokens, found.node, found.num_blocks - 1)

    @rule()
    def detach_all(self) -> None:
        self.check_detached((), self.tree.root, 0)

    def check_detached(self, tokens: Tokens, node: Node, keep: int) -> None:
        leaving = {page for key, page in self.pages.items() if key[: len(tokens)] == tokens}
        held = {page for holder in self.holders for page in holder.pages}
        gone = self.tree.detach(node, keep)
        assert set(gone.held.tolist()) == leaving & held
        assert set(gone.free.tolist()) == leaving - held
        self.forget(gone.free)
        self.pages = {key: page for key, page in self.pages.items() if page not in leaving}

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
        found = {}
        for node in self.tree.nodes():
            tokens = tuple(np.frombuffer(node.path_tokens(), "<u4").tolist())
            pages = node.path_pages().tolist()
            for place in range(len(pages) - node.num_blocks, len(pages)):
                found[tokens[: (place + 1) * BLOCK]] = pages[place]
        assert found == self.pages

    @invariant()
    def the_counts_are_right(self) -> None:
        nodes = list(self.tree.nodes())
        assert self.tree.num_nodes == len(nodes)
        assert self.tree.num_blocks == len(self.pages)
        assert not any(node.detached for node in nodes)
        held = {page for holder in self.holders for page in holder.pages}
        assert self.lru.num_blocks == len(set(self.pages.values()) - held)
        assert self.used == self.gone | held | set(self.pages.values())

    @invariant()
    def holders_hold_what_they_held(self) -> None:
        for holder in self.holders:
            assert holder.end.path_pages().tolist() == holder.pages
            assert bytes(holder.end.path_tokens()) == packed(holder.tokens)

    def teardown(self) -> None:
        """Whoever holds lets go, and everything is dropped: every page was free once."""
        while self.holders:
            self.let_go(pick=0)
        self.detach_all()
        assert self.used == self.gone
        assert (self.tree.num_nodes, self.tree.num_blocks, self.lru.num_blocks) == (0, 0, 0)
        assert self.tree.root.children == []


@pytest.mark.timeout(0)
def test_a_tree_holds_what_a_dict_holds() -> None:
    run_state_machine_as_test(TreeAndDict, settings=histories(50))
