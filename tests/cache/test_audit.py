"""The recount sees what is wrong."""

from __future__ import annotations

import pytest

from kvd.arena.page_table import PageState
from kvd.cache.audit import check
from tests.cache.conftest import FOURS, Cache, packed


def test_a_cache_of_everything_is_right() -> None:
    cache = Cache(layout=FOURS)
    kept, lease = cache.hold("a" * 8), cache.hold("a" * 16)
    cache.match("aaaaaa??", exact_tail=True)
    cache.pin("a" * 12)
    cache.state.drop(cache.namespace, packed("a" * 16), 3)
    cache.reserve(lease, 2)
    cache.reserve(cache.match("q", session=2), 2)
    cache.state.end_session(2)
    cache.state.keep(kept, 1)
    check(cache.state)
    assert len(cache.counts()) == 5


def test_a_page_in_the_wrong_state_is_seen(cache: Cache) -> None:
    cache.hold("abc")
    cache.arena.pool.states[15] = PageState.COMMITTED
    with pytest.raises(AssertionError):
        check(cache.state)


def test_a_lock_without_a_holder_is_seen(cache: Cache) -> None:
    cache.hold("abc").node.locks += 1
    with pytest.raises(AssertionError):
        check(cache.state)


def test_a_page_too_many_of_a_namespace_is_seen(cache: Cache) -> None:
    cache.fill("abc")
    cache.namespace.num_pages += 1
    with pytest.raises(AssertionError):
        check(cache.state)


def test_a_block_too_many_in_the_tree_is_seen(cache: Cache) -> None:
    cache.fill("abc")
    cache.namespace.tree.counts[0] += 1
    cache.namespace.num_pages += 1
    with pytest.raises(AssertionError):
        check(cache.state)


def test_a_node_too_many_in_the_tree_is_seen(cache: Cache) -> None:
    cache.fill("abc")
    cache.namespace.tree.num_nodes += 1
    with pytest.raises(AssertionError):
        check(cache.state)


def test_a_detached_node_in_the_tree_is_seen(cache: Cache) -> None:
    cache.hold("abc").node.detached = True
    with pytest.raises(AssertionError):
        check(cache.state)


def test_a_parent_that_is_older_than_its_child_is_seen(cache: Cache) -> None:
    for text in ("abc", "ab"):
        cache.fill(text)
    leaf = cache.namespace.lru.coldest()
    assert leaf
    leaf.stamp += 100
    with pytest.raises(AssertionError):
        check(cache.state)
