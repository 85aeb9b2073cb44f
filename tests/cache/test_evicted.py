"""What is remembered of evicted blocks: the last ones, and which those are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.evicted import Evicted
from kvd.protocol.keys import BlockKey
from tests.cache.conftest import Cache, disk, packed

MAX_BLOCKS = 8


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "little") + bytes(24))


def last_different(numbers: list[int], count: int) -> set[int]:
    return set(list(dict.fromkeys(reversed(numbers)))[:count])


@given(st.lists(st.lists(st.integers(0, 20))))
def test_half_of_the_last_blocks_are_known_and_never_more_than_all(
    history: list[list[int]],
) -> None:
    evicted = Evicted(MAX_BLOCKS)
    for numbers in history:
        evicted.add(map(key, numbers))
    added = [number for numbers in history for number in numbers]
    known = {number for number in range(30) if key(number) in evicted}
    assert last_different(added, MAX_BLOCKS // 2) <= known <= last_different(added, MAX_BLOCKS)


@pytest.fixture
def evicted(cache: Cache) -> Evicted:
    return cache.memory.evicted


def keys_of(cache: Cache, text: str) -> list[BlockKey]:
    found = cache.namespace.tree.find(packed(text), anywhere=True)
    return [one for node in found.node.path() for one in node.block_keys()]


def test_what_memory_alone_had_is_evicted(cache: Cache, evicted: Evicted) -> None:
    cache.fill("abcd")
    *kept, first, second = keys_of(cache, "abcd")
    cache.fill("w" * 14)
    assert first in evicted
    assert second in evicted
    assert not any(one in evicted for one in kept)


def test_what_a_store_has_is_evicted_when_the_store_lets_it_go() -> None:
    store = disk(4)
    cache = Cache(stores=[store])
    cache.store("abcd", store)
    keys = keys_of(cache, "abcd")
    assert not any(one in cache.memory.evicted for one in keys)
    cache.fill("wxyz")
    cache.save(store)
    assert all(one in cache.memory.evicted for one in keys)


def test_what_was_dropped_was_not_evicted(cache: Cache, evicted: Evicted) -> None:
    cache.fill("abcd")
    keys = keys_of(cache, "abcd")
    cache.state.drop(cache.namespace, b"")
    assert not any(one in evicted for one in keys)
