"""The tree of tokens: where a match ends, and what split, merge and cut leave behind."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.cache import radix
from kvd.cache.radix import MEMORY, Node, Tree
from kvd.cache.radix import _common_rows as common_rows
from kvd.protocol.codec import TOKEN_BYTES
from tests.cache.conftest import by_age

BLOCK = 4


def packed(*tokens: int) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def blocks(text: str) -> bytes:
    """Each letter is one block of four tokens."""
    return packed(*(ord(letter) for letter in text for _ in range(BLOCK)))


class Grown:
    """A tree and its LRU; `grow("abc")` holds a path that ends in c."""

    def __init__(self) -> None:
        self.tree = Tree(bytes(32), BLOCK, TOKEN_BYTES)
        self.lru = self.tree.lrus[MEMORY]
        self.touches = 0
        self.next_page = 0

    def grow(self, text: str) -> Node:
        tokens = blocks(text)
        found = self.tree.find(tokens)
        end = self.tree.lock(found)
        rest = tokens[found.total_blocks * self.tree.block_bytes :]
        if rest:
            num_pages = len(rest) // self.tree.block_bytes
            pages = range(self.next_page, self.next_page + num_pages)
            self.next_page += num_pages
            end = self.tree.append(end, rest, pages)
        return end

    def let_go(self, end: Node) -> None:
        self.touches += 1
        self.tree.unlock(end, self.touches)

    def put(self, text: str) -> None:
        self.let_go(self.grow(text))

    def shape(self) -> set[str]:
        """The letters of each node, after those of its ancestors: "ab|c"."""
        return {
            "|".join("".join(map(chr, np.frombuffer(n.tokens, "<u4")[::BLOCK])) for n in end.path())
            for end in self.tree.nodes()
        }


@pytest.fixture
def grown() -> Grown:
    return Grown()


# --- find ---


def test_nothing_is_found_in_an_empty_tree(grown: Grown) -> None:
    found = grown.tree.find(blocks("abc"))
    assert (found.node, found.num_blocks, found.total_blocks) == (grown.tree.root, 0, 0)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"),
    [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2), (11, 2), (12, 3), (13, 3)],
)
def test_only_whole_blocks_are_found(grown: Grown, num_tokens: int, num_blocks: int) -> None:
    grown.put("abc")
    assert grown.tree.find(blocks("abcd")[: num_tokens * 4]).total_blocks == num_blocks


@pytest.mark.parametrize("place", range(12))
def test_a_block_with_one_other_token_is_another_block(grown: Grown, place: int) -> None:
    grown.put("abc")
    tokens = np.frombuffer(blocks("abc"), "<u4").copy()
    tokens[place] += 1
    assert grown.tree.find(tokens.tobytes()).total_blocks == place // BLOCK


@pytest.mark.parametrize("factor", [1, 1 << 8, 1 << 16, 1 << 24])
def test_every_byte_of_a_token_counts(grown: Grown, factor: int) -> None:
    grown.put("a")
    tokens = packed(97, 97, 97, 97 ^ factor)
    assert grown.tree.find(tokens).total_blocks == 0


def test_a_match_may_end_in_at_the_end_of_or_behind_a_node(grown: Grown) -> None:
    lower = grown.grow("abcd")
    grown.let_go(grown.grow("abxy"))
    upper = lower.parent
    found = {text: grown.tree.find(blocks(text)) for text in ("a", "ab", "abc", "abcd", "abcde")}
    assert [one.total_blocks for one in found.values()] == [1, 2, 3, 4, 4]
    assert [one.num_blocks for one in found.values()] == [1, 2, 1, 2, 2]
    assert [one.node for one in found.values()] == [upper, upper, lower, lower, lower]


def test_a_search_may_start_at_the_end_of_a_path(grown: Grown) -> None:
    grown.put("abcd")
    start = grown.grow("ab")
    found = grown.tree.find(blocks("cx"), start)
    assert (found.total_blocks, found.num_blocks) == (1, 1)
    assert grown.tree.find(blocks("x"), start).node is start


def test_many_children_are_told_apart(grown: Grown) -> None:
    chance = np.random.default_rng(0)
    firsts = chance.permutation(500)
    for first in firsts.tolist():
        grown.put("r" + chr(1000 + first) + "s")
    for first in range(500):
        assert grown.tree.find(blocks("r" + chr(1000 + first) + "s")).total_blocks == 3
    assert grown.tree.find(blocks("r" + chr(1500) + "s")).total_blocks == 1
    (root,) = grown.tree.root.children
    assert root.first_blocks == sorted(root.first_blocks)


# --- lock and split ---


def test_a_lock_in_the_middle_splits_the_node_there(grown: Grown) -> None:
    grown.put("abcd")
    upper = grown.grow("ab")
    assert grown.shape() == {"ab", "ab|cd"}
    assert (upper.locks, upper.children[0].locks) == (1, 0)


def test_a_split_keeps_the_identity_of_the_lower_half(grown: Grown) -> None:
    end = grown.grow("abcd")
    grown.grow("ab")
    assert grown.tree.find(blocks("abcd")).node is end
    assert end.path_pages().tolist() == [0, 1, 2, 3]
    assert bytes(end.path_tokens()) == blocks("abcd")


def test_a_split_copies_the_locks(grown: Grown) -> None:
    end = grown.grow("abcd")
    grown.grow("abcd")
    upper = grown.grow("ab")
    assert (upper.locks, end.locks) == (3, 2)


def test_a_split_leaves_the_unlocked_half_at_its_age(grown: Grown) -> None:
    grown.put("abcd")
    grown.put("xy")
    cold = grown.lru.coldest()
    grown.grow("a")
    assert grown.lru.coldest() is cold
    assert cold is not None
    assert cold.num_blocks == 3
    assert grown.lru.num_blocks == 5


def test_a_locked_path_is_not_in_the_lru(grown: Grown) -> None:
    grown.put("abcd")
    end = grown.grow("abcd")
    assert by_age(grown.tree) == []
    grown.let_go(end)
    assert by_age(grown.tree) == [end]


def test_a_lock_goes_on_below_a_path_that_is_locked(grown: Grown) -> None:
    grown.put("abcd")
    upper = grown.grow("ab")
    end = grown.tree.lock(grown.tree.find(blocks("c"), upper), below=upper)
    assert (upper.locks, end.locks) == (1, 1)
    assert end.parent is upper
    assert grown.shape() == {"ab", "ab|c", "ab|c|d"}
    grown.let_go(end)
    assert upper.locks == 0


# --- append ---


def test_a_leaf_held_alone_grows(grown: Grown) -> None:
    end = grown.grow("ab")
    assert grown.tree.append(end, blocks("cd"), [7, 8]) is end
    assert grown.shape() == {"abcd"}
    assert end.path_pages().tolist() == [0, 1, 7, 8]


def test_a_leaf_that_others_hold_gets_a_child(grown: Grown) -> None:
    grown.grow("ab")
    end = grown.grow("ab")
    child = grown.tree.append(end, blocks("c"), [7])
    assert (end.locks, child.locks) == (2, 1)
    assert grown.shape() == {"ab", "ab|c"}


def test_a_node_with_children_gets_another(grown: Grown) -> None:
    grown.put("abc")
    end = grown.grow("ab")
    grown.tree.append(end, blocks("x"), [7])
    assert grown.shape() == {"ab", "ab|c", "ab|x"}


def test_the_root_gets_children_only(grown: Grown) -> None:
    grown.grow("a")
    grown.grow("x")
    assert grown.tree.root.num_blocks == 0
    assert grown.shape() == {"a", "x"}


# --- what a tree tells ---


@pytest.mark.parametrize(("there", "num_common"), [("ac", 0), ("ab", 2), ("abd", 2)])
def test_the_block_where_tokens_leave_the_tree_agrees_in_its_first_ones(
    grown: Grown, there: str, num_common: int
) -> None:
    grown.put(there)
    rest = packed(ord("b"), ord("b"), 1, 1)
    found = grown.tree.find(blocks("a") + rest)
    assert (found.total_blocks, grown.tree.num_common(found, rest)) == (1, num_common)


def test_behind_a_branch_the_nearest_child_counts(grown: Grown) -> None:
    for text in ("ab", "ac", "ad"):
        grown.put(text)
    rest = packed(ord("c"), ord("c"), ord("c"), 1)
    assert grown.tree.num_common(grown.tree.find(blocks("a") + rest), rest) == 3
    assert grown.tree.num_common(grown.tree.find(blocks("x")), blocks("x")) == 0


# --- unlock and merge ---


def test_only_children_merge_when_they_are_unlocked_together(grown: Grown) -> None:
    grown.put("abcd")
    end = grown.grow("ab")
    lower = grown.grow("abcd")
    grown.let_go(end)
    assert grown.shape() == {"ab", "ab|cd"}
    grown.let_go(lower)
    assert grown.shape() == {"abcd"}
    assert by_age(grown.tree) == [lower]
    assert lower.path_pages().tolist() == [0, 1, 2, 3]
    assert bytes(lower.path_tokens()) == blocks("abcd")


def test_a_long_chain_becomes_one_node(grown: Grown) -> None:
    text = "abcdefghij"
    ends = [grown.grow(text[:length]) for length in range(1, len(text) + 1)]
    for end in ends:
        grown.let_go(end)
    assert grown.shape() == {text}
    assert grown.lru.num_blocks == len(text)


def test_a_branch_stays_apart(grown: Grown) -> None:
    grown.put("abcd")
    grown.put("abxy")
    assert grown.shape() == {"ab", "ab|cd", "ab|xy"}


def test_a_chain_above_a_branch_merges_and_keeps_both_children(grown: Grown) -> None:
    ends = [grown.grow("a"), grown.grow("ab"), grown.grow("abc"), grown.grow("abx")]
    for end in ends:
        grown.let_go(end)
    assert grown.shape() == {"ab", "ab|c", "ab|x"}
    assert grown.tree.find(blocks("abx")).total_blocks == 3


def test_what_was_touched_at_another_time_does_not_merge(grown: Grown) -> None:
    """It would be as recent as what it merged with."""
    grown.put("abcd")
    grown.put("ab")
    assert grown.shape() == {"ab", "ab|cd"}


def test_a_path_is_unlocked_leaf_first(grown: Grown) -> None:
    grown.put("abx")
    grown.put("aby")
    grown.put("abx")
    ages = [
        "".join(map(chr, np.frombuffer(node.tokens, "<u4")[::BLOCK])) for node in by_age(grown.tree)
    ]
    assert ages == ["y", "x", "ab"]


def test_a_touched_node_says_which_touch_it_was(grown: Grown) -> None:
    grown.put("ab")
    grown.put("ab")
    cold = grown.lru.coldest()
    assert cold is not None
    assert cold.stamp == 2


# --- cut ---


def test_a_leaf_is_cut_from_its_end(grown: Grown) -> None:
    grown.put("abcd")
    leaf = grown.lru.coldest()
    assert leaf
    assert grown.tree.cut(leaf, 3).pages.tolist() == [3, 2, 1]
    assert grown.shape() == {"a"}
    assert grown.lru.num_blocks == 1
    assert grown.tree.find(blocks("abcd")).total_blocks == 1


def test_a_leaf_that_is_cut_whole_leaves_the_tree(grown: Grown) -> None:
    grown.put("abcd")
    grown.put("abxy")
    leaf = grown.lru.coldest()
    assert leaf
    assert grown.tree.cut(leaf, 2).pages.tolist() == [3, 2]
    assert grown.shape() == {"ab", "ab|xy"}
    assert leaf not in by_age(grown.tree)
    assert grown.tree.find(blocks("abcd")).total_blocks == 2


def test_what_was_cut_may_grow_again(grown: Grown) -> None:
    grown.put("abcd")
    leaf = grown.lru.coldest()
    assert leaf
    grown.tree.cut(leaf, 2)
    grown.put("abcx")
    assert grown.shape() in ({"abcx"}, {"ab", "ab|cx"})
    assert grown.tree.find(blocks("abcd")).total_blocks == 3


def test_a_locked_leaf_is_not_cut(grown: Grown) -> None:
    with pytest.raises(AssertionError):
        grown.tree.cut(grown.grow("ab"), 1)


def test_a_node_with_children_is_not_cut(grown: Grown) -> None:
    grown.put("abc")
    grown.put("abx")
    (upper,) = grown.tree.root.children
    with pytest.raises(AssertionError):
        grown.tree.cut(upper, 1)


def test_a_tree_whose_blocks_are_all_gone_is_empty(grown: Grown) -> None:
    for text in ("abcd", "abxy", "r"):
        grown.put(text)
    pages = []
    while leaf := grown.lru.coldest():
        pages += grown.tree.cut(leaf, 1).pages.tolist()
    assert sorted(pages) == list(range(7))
    assert grown.shape() == set()
    assert grown.lru.num_blocks == 0


# --- a part of a path ---


@pytest.mark.parametrize("num_blocks", range(6))
def test_a_path_has_a_node_at_every_block(grown: Grown, num_blocks: int) -> None:
    grown.grow("ab")
    end = grown.grow("abcde")
    node = grown.tree.node_at(end, num_blocks)
    assert node.path_pages().tolist() == list(range(num_blocks))
    assert end.path_pages().tolist() == list(range(5))


def test_the_end_of_a_path_is_unlocked_alone(grown: Grown) -> None:
    end = grown.grow("abcde")
    kept = grown.tree.node_at(end, 2)
    grown.tree.unlock(end, 1, above=kept)
    assert (kept.locks, end.locks) == (1, 0)
    assert grown.lru.num_blocks == 3
    grown.let_go(kept)
    assert grown.lru.num_blocks == 5


# --- the tail ---


def tail(grown: Grown, end: Node, *tokens: int) -> tuple[str, int] | None:
    if found := grown.tree.find_tail(end, packed(*tokens)):
        place, num_tokens = found
        return chr(int(np.frombuffer(place.node.tokens, "<u4")[0])), num_tokens
    return None


def test_the_tail_is_found_among_the_children(grown: Grown) -> None:
    for text in ("ra", "rb", "rc"):
        grown.put(text)
    end = grown.grow("r")
    a, b = ord("a"), ord("b")
    assert tail(grown, end, b, b, b, a) == ("b", 3)
    assert tail(grown, end, b, b, b + 1, b) == ("b", 2)
    assert tail(grown, end, a, a, 0, 0) == ("a", 2)
    assert tail(grown, end, a) == ("a", 1)
    assert tail(grown, end, 0, a, a, a) is None


def test_nothing_and_a_leaf_have_no_tail(grown: Grown) -> None:
    end = grown.grow("r")
    assert tail(grown, end, 1) is None
    assert tail(grown, grown.tree.root) is None


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The first block of each child that was looked at."""
    looks: list[bytes] = []

    def look(block: bytes, rest: bytes, row_bytes: int) -> int:
        looks.append(block)
        return common_rows(block, rest, row_bytes)

    monkeypatch.setattr(radix, "_common_rows", look)
    return looks


def test_a_tail_is_sought_near_where_it_would_be_alone(looks: list[bytes]) -> None:
    tree = Tree(bytes(32), BLOCK, TOKEN_BYTES, num_tiers=2)
    for number in range(10_000):
        tree.recover(tree.root, packed(1, 1, *divmod(number, 200)), bytes(32), MEMORY + 1)
    tree.recover(tree.root, packed(1, 1, 10, 0), bytes(32), MEMORY, [7])
    found = tree.find_tail(tree.root, packed(1, 1, 10, 20, 1))
    assert found is not None
    assert (list(found[0].node.pages), found[1]) == ([7], 3)
    assert tree.find_tail(tree.root, packed(1, 1, 40, 200)) is None
    assert len(looks) <= 4 * radix.MAX_LOOKED_AT


# --- detach ---


def test_an_unlocked_end_is_free_at_once(grown: Grown) -> None:
    grown.put("abcd")
    grown.put("abxy")
    found = grown.tree.find(blocks("ab"))
    gone = grown.tree.detach(found.node, keep=1)
    assert (sorted(gone.free.tolist()), gone.held.tolist()) == ([1, 2, 3, 4, 5], [])
    assert (grown.shape(), grown.lru.num_blocks) == ({"a"}, 1)


def test_a_descendant_is_free_before_its_parent(grown: Grown) -> None:
    for text in ("abcd", "abxy", "abxz"):
        grown.put(text)
    pages = grown.tree.detach(grown.tree.root).free.tolist()
    assert pages.index(3) < pages.index(2) < pages.index(1) < pages.index(0)
    assert pages.index(5) < pages.index(4) < pages.index(1)
    assert pages.index(6) < pages.index(4)


def test_a_locked_end_is_held_and_found_no_more(grown: Grown) -> None:
    end = grown.grow("abcd")
    gone = grown.tree.detach(end, keep=1)
    assert (gone.free.tolist(), gone.held.tolist()) == ([], [3, 2, 1])
    assert end.detached
    assert grown.shape() == {"a"}
    assert end.path_pages().tolist() == [0, 1, 2, 3]


def test_detached_blocks_are_gone_with_the_last_who_holds_them(grown: Grown) -> None:
    one, other = grown.grow("ab"), grown.grow("abcd")
    grown.tree.detach(grown.tree.root)
    assert (grown.tree.num_blocks, grown.tree.num_nodes) == (0, 0)
    assert grown.tree.unlock(one, 1).tolist() == []
    assert grown.tree.unlock(other, 2).tolist() == [3, 2, 1, 0]
    assert grown.lru.num_blocks == 0


def test_a_second_detachment_above_takes_what_is_left(grown: Grown) -> None:
    end = grown.grow("abcd")
    grown.tree.detach(end, keep=2)
    (upper,) = grown.tree.root.children
    assert grown.tree.detach(upper).held.tolist() == [1, 0]
    assert grown.tree.unlock(end, 1).tolist() == [3, 2, 1, 0]


def test_what_grows_in_the_place_of_a_detached_node_is_another(grown: Grown) -> None:
    old = grown.grow("abc")
    grown.tree.detach(old, keep=1)
    new = grown.grow("abc")
    assert new.path_pages().tolist() == [0, 3, 4]
    assert grown.tree.unlock(old, 1).tolist() == [2, 1]
    assert grown.shape() == {"a", "a|bc"}


def test_a_detached_path_may_be_split_and_let_go_from_its_end(grown: Grown) -> None:
    end = grown.grow("abcd")
    grown.tree.detach(grown.tree.root)
    kept = grown.tree.node_at(end, 2)
    assert grown.tree.unlock(end, 1, above=kept).tolist() == [3, 2]
    assert (kept.detached, grown.tree.num_nodes) == (True, 0)
    assert grown.tree.unlock(kept, 2).tolist() == [1, 0]
