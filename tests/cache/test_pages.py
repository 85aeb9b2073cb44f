"""One state a page, memory by extents, and long runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.arena.page_table import PageState
from kvd.arena.runs import pages_of, runs_of
from kvd.cache.pages import PagePool
from kvd.protocol.layout import MAX_GROUP_PAGES
from kvd.protocol.messages import Run


def backed_pool(num_pages: int) -> PagePool:
    pool = PagePool(num_pages, MAX_GROUP_PAGES, MAX_GROUP_PAGES)
    for run in pool.begin_backing(num_pages // MAX_GROUP_PAGES):
        pool.end_backing(run, backed=True)
    return pool


def give_back(pool: PagePool, pages: Sequence[int]) -> None:
    pool.free(np.array(pages, np.int64))


# --- memory by extents ---


def test_a_new_pool_has_no_memory() -> None:
    pool = PagePool(64, 32, 16)
    assert pool.counts()["unbacked"] == 64
    assert (pool.num_free, pool.num_backed, pool.num_backing) == (0, 0, 0)


def test_an_extent_counts_as_backed_from_the_start_and_is_free_at_the_end() -> None:
    pool = PagePool(96, 32, 16)
    assert pool.begin_backing(2) == [Run(0, 64)]
    assert (pool.num_free, pool.num_backed, pool.num_backing) == (0, 64, 64)
    pool.end_backing(Run(0, 64), backed=True)
    assert (pool.num_free, pool.num_backed, pool.num_backing) == (64, 64, 0)
    pool.check()


def test_an_extent_that_got_no_memory_may_be_asked_for_again() -> None:
    pool = PagePool(96, 32, 16)
    pool.begin_backing(3)
    pool.end_backing(Run(0, 32), backed=True)
    pool.end_backing(Run(32, 32), backed=False)
    pool.end_backing(Run(64, 32), backed=True)
    assert (pool.num_free, pool.num_backed, pool.num_backing) == (64, 64, 0)
    assert pool.begin_backing(5) == [Run(32, 32)]
    pool.check()


def test_extents_that_are_all_backed_are_none_to_begin() -> None:
    assert backed_pool(64).begin_backing(1) == []


def test_the_last_extents_that_are_all_free_lose_their_memory() -> None:
    pool = backed_pool(96)
    pool.take(3)
    assert pool.unback(2) == [Run(64, 32)]
    assert (pool.num_free, pool.num_backed, pool.num_held) == (61, 64, 3)
    assert pool.unback(9) == [Run(16, 48)]
    assert pool.num_whole_groups == 0
    assert pool.begin_backing(9) == [Run(16, 80)]
    pool.check()


def test_an_extent_with_a_page_that_somebody_has_keeps_its_memory() -> None:
    pool = backed_pool(48)
    give_back(pool, pool.take(48)[1:].tolist())
    assert pool.unback(3) == [Run(16, 32)]
    assert pool.unback(3) == []
    pool.check()


def test_an_extent_on_its_way_is_not_taken_back() -> None:
    pool = PagePool(32, 16, 16)
    pool.begin_backing(2)
    pool.end_backing(Run(0, 16), backed=True)
    assert pool.unback(2) == [Run(0, 16)]
    assert pool.num_held == 0


@pytest.mark.parametrize(("num_pages", "extent_pages"), [(40, 16), (48, 24), (48, 8)])
def test_extents_are_whole_groups_and_pools_whole_extents(
    num_pages: int, extent_pages: int
) -> None:
    with pytest.raises(AssertionError):
        PagePool(num_pages, extent_pages, 16)


# --- runs ---


def test_a_group_is_taken_whole_and_in_line() -> None:
    assert runs_of(backed_pool(64).take(16)) == (Run(0, 16),)


def test_pages_come_in_ascending_order() -> None:
    pool = backed_pool(64)
    pages = pool.take(64)
    give_back(pool, pages[5:9].tolist() + pages[30:50].tolist())
    taken = pool.take(24).tolist()
    assert taken == sorted(taken)


def test_a_few_pages_come_from_a_group_that_is_broken_already() -> None:
    pool = backed_pool(64)
    pool.take(3)
    assert pool.take(5).tolist() == [3, 4, 5, 6, 7]
    assert pool.take(9).tolist() == [*range(16, 25)]  # the broken one has eight
    assert pool.take(8).tolist() == [*range(8, 16)]


def test_a_few_pages_come_from_the_group_of_which_the_least_is_left_over() -> None:
    pool = backed_pool(64)
    pool.take(64)
    give_back(pool, [*range(9), *range(16, 22), *range(32, 48)])
    assert pool.take(5).tolist() == [*range(16, 21)]
    assert pool.take(9).tolist() == [*range(9)]


def test_pages_ahead_fill_a_group() -> None:
    pool = backed_pool(64)
    pool.take(3)
    assert pool.take(9, ahead=7).tolist() == [*range(16, 32)]
    assert pool.take(17, ahead=15).tolist() == [*range(32, 64)]


def test_pages_ahead_begin_no_run_of_their_own() -> None:
    pool = backed_pool(32)
    pool.take(32)
    give_back(pool, [*range(8), *range(16, 26)])
    assert pool.take(9, ahead=7).tolist() == [*range(16, 26)]
    assert pool.take(1, ahead=15).tolist() == [*range(8)]


def test_where_no_group_has_enough_those_with_the_most_are_taken() -> None:
    pool = backed_pool(48)
    pool.take(48)
    give_back(pool, [0, 1, 16, 17, 18, 19, 32, 33, 34])
    assert pool.take(6, ahead=10).tolist() == [16, 17, 18, 19, 32, 33]


def test_interleaved_groups_stay_whole() -> None:
    pool = backed_pool(128)
    taken = [[pool.take(16) for _ in range(2)] for _ in range(4)]
    assert all(len(runs_of(np.concatenate(groups))) == 1 for groups in taken)


def test_the_shortest_run_of_groups_that_suffices_is_taken() -> None:
    pool = backed_pool(16 * 16)
    pool.take(16 * 16)
    for first, count in ((0, 4), (6, 2), (10, 3)):
        give_back(pool, range(first * 16, (first + count) * 16))
    assert runs_of(pool.take(2 * 16)) == (Run(6 * 16, 2 * 16),)
    assert runs_of(pool.take(3 * 16)) == (Run(10 * 16, 3 * 16),)
    assert runs_of(pool.take(2 * 16)) == (Run(0, 2 * 16),)


def test_where_no_run_suffices_the_longest_are_taken() -> None:
    pool = backed_pool(16 * 16)
    pool.take(16 * 16)
    for first, count in ((0, 1), (2, 3), (6, 1), (8, 4)):
        give_back(pool, range(first * 16, (first + count) * 16))
    assert runs_of(pool.take(7 * 16)) == (Run(2 * 16, 3 * 16), Run(8 * 16, 4 * 16))


def test_the_last_pages_are_found_wherever_they_are() -> None:
    pool = backed_pool(48)
    pool.take(48)
    give_back(pool, [1, 17, 18, 19, 40])
    assert pool.take(5).tolist() == [1, 17, 18, 19, 40]
    assert pool.num_free == 0


def test_no_pages_are_no_work() -> None:
    pool = backed_pool(16)
    assert pool.take(0).tolist() == []
    pool.check()


def test_more_than_is_free_is_never_asked_for() -> None:
    pool = backed_pool(16)
    pool.take(10)
    with pytest.raises(AssertionError):
        pool.take(7)


def test_sixteen_interleaved_sequences_keep_runs_of_a_group() -> None:
    """Decoding sequences that reserve a group ahead, until the pool was cycled five times."""
    chance, pool = random.Random(0), backed_pool(4096)
    live: list[list[int]] = [[] for _ in range(16)]
    lengths = [chance.randint(50, 230) for _ in live]
    num_taken = 0
    while num_taken < 5 * pool.num_pages:
        turn = chance.randrange(len(live))
        if len(live[turn]) >= lengths[turn]:
            give_back(pool, live[turn])
            live[turn], lengths[turn] = [], chance.randint(50, 230)
        pages = pool.take(16).tolist()
        num_taken += 16
        left_over = max(len(live[turn]) + 16 - lengths[turn], 0)  # it ends here: not needed
        give_back(pool, pages[16 - left_over :])
        live[turn] += pages[: 16 - left_over]
    runs = [run.count for sequence in live for run in runs_of(sequence)]
    assert median(runs) >= 16
    pool.check()


# --- states ---


def test_a_page_moves_from_state_to_state() -> None:
    pool = backed_pool(16)
    pages = pool.take(4)
    pool.move(pages[:3], PageState.RESERVED, PageState.COMMITTED)
    pool.move(pages[3:], PageState.RESERVED, PageState.QUARANTINED)
    counts = {name: count for name, count in pool.counts().items() if count}
    assert counts == {"free": 12, "committed": 3, "quarantined": 1}
    assert sum(pool.counts().values()) == 16


def test_a_page_in_another_state_is_not_moved() -> None:
    pool = backed_pool(16)
    pages = pool.take(2)
    pool.move(pages[:1], PageState.RESERVED, PageState.COMMITTED)
    with pytest.raises(AssertionError):
        pool.move(pages, PageState.RESERVED, PageState.COMMITTED)
    assert pool.states[pages].tolist() == [PageState.COMMITTED, PageState.RESERVED]


def test_a_page_freed_twice_is_seen() -> None:
    pool = backed_pool(16)
    pages = pool.take(2)
    pool.free(pages)
    with pytest.raises(AssertionError):
        pool.free(pages)


some_turns = st.tuples(st.sampled_from(["take", "free", "unback", "back"]), st.integers(1, 40))


@given(st.lists(some_turns, max_size=30))
def test_any_turns_keep_the_books(turns: list[tuple[str, int]]) -> None:
    pool = backed_pool(96)
    taken: list[int] = []
    for turn, count in turns:
        match turn:
            case "take":
                pages = pool.take(min(count, pool.num_free)).tolist()
                assert not set(pages) & set(taken)
                taken += pages
            case "free":
                give_back(pool, taken[:count])
                taken = taken[count:]
            case "unback":
                pool.unback(count)
            case "back":
                for run in pool.begin_backing(count):
                    pool.end_backing(run, backed=True)
        pool.check()
        assert pool.num_held == len(taken)
    assert pages_of(runs_of(taken)).tolist() == taken
