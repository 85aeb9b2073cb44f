"""Which block goes first."""

from __future__ import annotations

from kvd.cache.policy import Lru
from kvd.cache.radix import MEMORY, Node, Tree
from kvd.protocol.codec import TOKEN_BYTES


def leaves(*stamps: int) -> list[Node]:
    """Unlocked leaves in memory, of one block more each, last touched then."""
    tree = Tree(bytes(32), 1, TOKEN_BYTES)
    found = []
    for number, stamp in enumerate(stamps, 1):
        tokens = b"".join(bytes([number, 0, 0, place]) for place in range(number))
        end = tree.append(tree.lock(tree.find(b"")), tokens, range(number))
        end.locks, end.stamp = 0, stamp
        found.append(end)
    return found


def test_the_least_recent_is_the_first_to_go() -> None:
    lru, nodes = Lru(MEMORY), leaves(3, 1, 2)
    for node in nodes:
        lru.add(node)
    assert lru.coldest() is nodes[1]


def test_nothing_has_no_coldest() -> None:
    lru = Lru(MEMORY)
    assert lru.coldest() is None
    assert lru.num_blocks == 0


def test_who_was_touched_meanwhile_is_no_more_the_first() -> None:
    lru, (a, b) = Lru(MEMORY), leaves(1, 2)
    lru.add(a)
    lru.add(b)
    a.stamp = 3
    assert lru.coldest() is b


def test_who_is_locked_does_not_go_and_comes_again_when_it_is_not() -> None:
    lru, (a, b) = Lru(MEMORY), leaves(1, 2)
    lru.add(a)
    lru.add(b)
    lru.discard(a)
    a.locks = 1
    assert lru.coldest() is b
    a.locks = 0
    lru.add(a)
    assert lru.coldest() is a


def test_a_parent_goes_when_its_children_are_gone() -> None:
    lru, (a, b) = Lru(MEMORY), leaves(1, 2)
    a.num_children[MEMORY] = 1
    lru.add(a)
    lru.add(b)
    assert lru.coldest() is b
    a.num_children[MEMORY] = 0
    lru.offer(a)
    assert lru.coldest() is a


def test_the_blocks_of_its_nodes_are_counted() -> None:
    lru, (a, b) = Lru(MEMORY), leaves(1, 2)
    lru.add(a)
    lru.add(b)
    assert lru.num_blocks == 3
    lru.shorten(1)
    lru.discard(a)
    assert lru.num_blocks == 1


def test_nodes_that_are_touched_without_end_stand_there_once() -> None:
    lru, (a,) = Lru(MEMORY), leaves(0)
    for stamp in range(100):
        a.stamp = stamp
        lru.add(a)
        lru.discard(a)
    assert len(lru._heap) == 1
    assert lru.last_touch == 99
