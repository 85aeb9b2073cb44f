"""Which block goes first."""

from __future__ import annotations

from kvd.cache.policy import Lru
from kvd.cache.radix import Node, Tree
from kvd.protocol.codec import TOKEN_BYTES


def nodes(*lengths: int) -> list[Node]:
    tree = Tree(1, TOKEN_BYTES, Lru())
    return [Node(tree, bytes(4 * length), range(length)) for length in lengths]


def test_the_first_to_come_is_the_first_to_go() -> None:
    lru, (a, b, c) = Lru(), nodes(1, 2, 3)
    for node in (b, a, c):
        lru.add(node)
    assert list(lru) == [b, a, c]
    assert lru.coldest() is b


def test_nothing_has_no_coldest() -> None:
    lru = Lru()
    assert lru.coldest() is None
    assert lru.num_blocks == 0


def test_who_leaves_and_comes_again_is_the_last() -> None:
    lru, (a, b) = Lru(), nodes(1, 1)
    lru.add(a)
    lru.add(b)
    lru.discard(a)
    assert a not in lru
    lru.add(a)
    assert list(lru) == [b, a]


def test_the_blocks_of_its_nodes_are_counted() -> None:
    lru, (a, b) = Lru(), nodes(3, 5)
    lru.add(a)
    lru.add(b)
    assert lru.num_blocks == 8
    lru.shorten(2)
    del b.pages[3:]
    assert lru.num_blocks == 6
    lru.discard(b)
    assert lru.num_blocks == 3


def test_equal_nodes_are_two_nodes() -> None:
    lru, (a, b) = Lru(), nodes(2, 2)
    lru.add(a)
    assert b not in lru
    lru.discard(b)
    assert list(lru) == [a]
