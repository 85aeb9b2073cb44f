"""What is known of evicted blocks: what a cache of endless size would have had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.cache import evicted
from kvd.cache.evicted import Evicted
from kvd.protocol.keys import chain
from tests.cache.conftest import FOURS, Cache, disk, packed

if TYPE_CHECKING:
    import pytest

NAMESPACE = b"n" * 32


def keys_of(text: str) -> list[bytes]:
    return chain(NAMESPACE, packed(text), 4)


def num_known(known: Evicted, text: str, first: int = 0) -> int:
    parent = keys_of(text)[first - 1] if first else NAMESPACE
    return known.num_following(parent, packed(text), 4 * first, 4)


def test_what_was_evicted_is_known_in_its_order_from_its_beginning_on() -> None:
    known = Evicted()
    known.add(keys_of("abcdef")[2:4])
    assert num_known(known, "abcdef", first=2) == 2
    assert num_known(known, "abcdef", first=1) == num_known(known, "cd") == 0


def test_of_two_with_one_slot_the_later_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted, "NUM_PLACES", 1)
    known = Evicted()
    first, second = keys_of("ab")
    known.add([first])
    known.add([second])
    assert first not in known
    assert second in known


def test_so_many_blocks_at_most_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted, "MAX_LOOKED_AT", 3)
    known = Evicted()
    known.add(keys_of("abcdef"))
    assert num_known(known, "abcdef") == 3


ALL = "abcdefghijklmnop"


def num_evicted(cache: Cache) -> int:
    return cache.state.counters["tokens_evicted"]


def test_a_match_counts_what_was_evicted_behind_what_it_found(cache: Cache) -> None:
    cache.fill(ALL)
    cache.fill("xyz")
    assert cache.match(ALL + "q").num_matched == 13
    assert num_evicted(cache) == 3


def test_what_was_never_there_is_not_evicted(cache: Cache) -> None:
    cache.fill(ALL)
    cache.fill("xyz")
    cache.match("uvw")
    assert num_evicted(cache) == 0


def test_of_an_evicted_block_what_an_exact_tail_has_is_not_missed() -> None:
    cache = Cache(layout=FOURS)
    cache.fill("abcd")
    cache.fill("abxx" + "wxyz" * 15)
    assert cache.match("abcd", exact_tail=True).tail
    assert (cache.state.counters["tokens_matched"], num_evicted(cache)) == (2, 2)


def test_what_a_store_has_is_late_and_not_evicted() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill(ALL)
    cache.save(store)
    cache.fill("xyz")
    cache.match(ALL)
    assert num_evicted(cache) == 0


def test_what_its_last_store_evicts_is_evicted() -> None:
    cache = Cache(stores=[store := disk()])
    cache.store("ab", store)
    store.usable_bytes = 0
    cache.state.stores.trim(store, [])
    cache.match("ab")
    assert num_evicted(cache) == 2
    assert store.counters["evicted"] == 2
