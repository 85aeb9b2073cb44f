"""The rules of match, reserve, commit and their ends, one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvd.arena.header import SharedHeader, create_header
from kvd.arena.page_table import PageState
from kvd.cache.state import (
    CacheState,
    Committed,
    Ended,
    Freed,
    Granted,
    Plan,
    Quarantined,
    Reserved,
    Short,
)
from kvd.protocol.errors import BadRequest, KvdError, LeaseEnded, LimitExceeded
from kvd.protocol.keys import Identity
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run
from tests.cache.conftest import EXTENT, LAYOUT, Cache, committed, freed, packed


def kinds(plan: Plan) -> list[type]:
    return [type(step) for step in plan]


# --- namespaces and arenas ---


def test_a_namespace_is_made_once(cache: Cache) -> None:
    assert cache.tenant("a") is cache.tenant("a")
    assert cache.tenant("a") is not cache.tenant("b")
    assert cache.state.namespaces[cache.tenant("b").id] is cache.tenant("b")


def test_equal_tokens_of_two_namespaces_never_meet(cache: Cache) -> None:
    cache.fill("abc", salt="one")
    assert cache.match("abc", salt="two").num_matched == 0
    assert cache.match("abc", salt="one").num_matched == 3


def test_an_arena_is_found_by_its_layout(cache: Cache) -> None:
    other = Layout(2, 1, 2, "float16", block_size=1)
    assert cache.state.find_arena(LAYOUT) is cache.arena
    assert cache.state.find_arena(other) is None
    assert cache.state.add_arena(other, 16, 16) is cache.state.find_arena(other)


# --- match ---


def test_a_match_leases_the_longest_prefix(cache: Cache) -> None:
    lease = cache.hold("abcd")
    answer = cache.state.match(1, 1, cache.namespace, packed("abxy"))
    assert answer.lease.num_matched == 2
    assert answer.runs == (Run(int(lease.granted[0]), 2),)
    assert answer.plan == []


def test_a_match_of_nothing_is_a_lease_too(cache: Cache) -> None:
    answer = cache.state.match(1, 1, cache.namespace, packed("xyz"))
    assert (answer.lease.num_matched, answer.runs) == (0, ())
    assert cache.state.leases.get(1, 1) is answer.lease


def test_the_same_match_gets_the_first_answer(cache: Cache) -> None:
    cache.fill("ab")
    lease = cache.match("abcd", lease=7)
    cache.commit(lease, "cd")
    again = cache.state.match(1, 7, cache.namespace, packed("abcd"))
    assert again.lease is lease
    assert sum(run.count for run in again.runs) == again.lease.num_matched == 2


def test_the_same_lease_with_other_tokens_replaces_it(cache: Cache) -> None:
    cache.fill("ab")
    lease = cache.match("ab", lease=7)
    pages = cache.reserve(lease, 2)
    answer = cache.state.match(1, 7, cache.namespace, packed("xy"))
    assert answer.lease is not lease
    assert kinds(answer.plan) == [Ended, Freed]
    assert freed(answer.plan) == pages
    assert cache.state.leases.of_session(1) == [answer.lease]


def test_the_same_lease_in_another_namespace_replaces_it(cache: Cache) -> None:
    lease = cache.match("ab", lease=7)
    other = cache.match("ab", lease=7, salt="tenant")
    assert other is not lease
    assert cache.state.leases.of_session(1) == [other]


def test_two_sessions_may_choose_the_same_lease_id(cache: Cache) -> None:
    one, other = cache.match("a", session=1, lease=7), cache.match("a", session=2, lease=7)
    cache.release(one)
    assert cache.state.leases.get(2, 7) is other


def test_a_match_after_its_release_is_refused(cache: Cache) -> None:
    cache.state.release(1, 7)
    with pytest.raises(LeaseEnded):
        cache.match("ab", lease=7)
    cache.match("ab", session=2, lease=7)


def test_a_session_has_a_bound_of_leases() -> None:
    cache = Cache(max_session_leases=2)
    for lease in (1, 2):
        cache.match("a", lease=lease)
    with pytest.raises(LimitExceeded, match="2"):
        cache.match("a", lease=3)
    cache.match("a", session=2, lease=3)
    cache.match("b", lease=2)  # in the place of another
    cache.state.release(1, 1)
    cache.match("a", lease=3)


def test_a_match_counts_what_it_found(cache: Cache) -> None:
    cache.fill("abc")
    cache.state.counters.clear()
    cache.match("abcd", lease=1)
    cache.match("abcd", lease=1)
    cache.match("x", lease=2)
    expected = {"matches": 2, "match_hits": 1, "match_misses": 1, "tokens_requested": 5}
    assert cache.state.counters == expected | {"tokens_matched": 3}


# --- reserve ---


def test_a_reserve_notes_its_session_before_the_numbers_leave(cache: Cache) -> None:
    lease = cache.match("abc", session=5)
    answer = cache.state.reserve(lease, 0, 3)
    assert isinstance(answer, Granted)
    (note,) = answer.plan
    assert isinstance(note, Reserved)
    assert (note.arena, note.session) == (cache.arena.id, 5)
    assert note.pages.tolist() == answer.pages.tolist()
    assert cache.counts() == {"free": 13, "reserved": 3}


def test_the_same_reserve_gets_the_first_answer(cache: Cache) -> None:
    lease = cache.match("abc")
    pages = cache.reserve(lease, 3)
    again = cache.state.reserve(lease, 0, 3)
    assert isinstance(again, Granted)
    assert (again.pages.tolist(), again.plan) == (pages, [])
    assert cache.counts() == {"free": 13, "reserved": 3}


def test_a_reserve_that_knows_only_a_part_gets_the_rest(cache: Cache) -> None:
    lease = cache.match("abc")
    pages = cache.reserve(lease, 3)
    answer = cache.state.reserve(lease, 1, 5)
    assert isinstance(answer, Granted)
    assert answer.pages.tolist()[:2] == pages[1:]
    assert len(answer.pages) == 4
    assert cache.counts() == {"free": 11, "reserved": 5}


def test_a_reserve_from_beyond_what_was_granted_is_refused(cache: Cache) -> None:
    lease = cache.match("abc")
    cache.reserve(lease, 3)
    with pytest.raises(BadRequest, match="3 pages"):
        cache.state.reserve(lease, 4, 5)


def test_pages_ahead_come_along_when_they_are_there(cache: Cache) -> None:
    lease = cache.match("abc")
    answer = cache.state.reserve(lease, 0, 3, 10)
    assert isinstance(answer, Granted)
    assert len(answer.pages) == 13
    again = cache.state.reserve(lease, 0, 3, 10)
    assert isinstance(again, Granted)
    assert again.pages.tolist() == answer.pages.tolist()


def test_pages_ahead_that_are_not_there_hinder_nothing(cache: Cache) -> None:
    cache.hold("abcdefghijkl")
    answer = cache.state.reserve(cache.match("xyz"), 0, 3, 10)
    assert isinstance(answer, Granted)
    assert len(answer.pages) >= 3


def test_pages_ahead_are_not_waited_for() -> None:
    """One page is free and one is wanted: memory for those ahead may come later."""
    cache = Cache(num_pages=32, backed=False)
    (run,) = cache.state.begin_backing(cache.arena, EXTENT)
    cache.state.end_backing(cache.arena, run, backed=True)
    cache.hold("abcdefghijklmno")
    answer = cache.state.reserve(cache.match("x"), 0, 1, 15)
    assert isinstance(answer, Granted)


def test_a_reserve_asks_for_memory_before_it_evicts() -> None:
    cache = Cache(num_pages=48, backed=False)
    lease = cache.match("abc")
    answer = cache.state.reserve(lease, 0, 17)
    assert isinstance(answer, Short)
    assert answer.backing == [Run(0, 32)]
    assert cache.counts() == {"unbacked": 48}
    plan = cache.state.end_backing(cache.arena, Run(0, 32), backed=True)
    assert freed(plan) == list(range(32))
    assert len(cache.reserve(lease, 17)) == 17


def test_memory_on_its_way_is_not_asked_for_twice() -> None:
    cache = Cache(num_pages=48, backed=False)
    first, second = cache.match("a"), cache.match("b")
    assert isinstance(answer := cache.state.reserve(first, 0, 1), Short)
    assert answer.backing == [Run(0, 16)]
    assert isinstance(answer := cache.state.reserve(second, 0, 1), Short)
    assert answer.backing == []


def test_memory_on_its_way_is_waited_for_before_anything_is_evicted() -> None:
    cache = Cache(num_pages=32, backed=False)
    cache.state.begin_backing(cache.arena, 16)
    cache.state.end_backing(cache.arena, Run(0, 16), backed=True)
    cache.fill("abcdefghijklmnop")
    cache.state.begin_backing(cache.arena, 16)
    lease = cache.match("x")
    assert isinstance(cache.state.reserve(lease, 0, 4), Short)
    assert cache.texts() == {"abcdefghijklmnop"}
    cache.state.end_backing(cache.arena, Run(16, 16), backed=False)
    cache.state.may_back = False
    assert len(cache.reserve(lease, 4)) == 4
    assert cache.texts() == {"abcdefghijkl"}


def test_memory_stops_at_the_capacity_of_the_tier() -> None:
    cache = Cache(num_pages=48, backed=False)
    cache.state.capacity_bytes = 35 * LAYOUT.page_bytes
    lease = cache.match("abc")
    assert isinstance(answer := cache.state.reserve(lease, 0, 48), Short)
    assert answer.backing == [Run(0, 32)]
    cache.state.end_backing(cache.arena, Run(0, 32), backed=True)
    assert isinstance(answer := cache.state.reserve(lease, 0, 48), Short)
    assert answer.backing == []


def test_layouts_share_the_capacity_of_the_tier() -> None:
    cache = Cache(num_pages=32, backed=False)
    cache.state.begin_backing(cache.arena, 16)
    other = cache.state.add_arena(Layout(2, 1, 2, "float16", block_size=1, num_planes=1), 32, 16)
    assert cache.state.begin_backing(other, 32) == []
    cache.state.capacity_bytes = 16 * LAYOUT.page_bytes + 16 * other.layout.page_bytes
    assert cache.state.begin_backing(other, 32) == [Run(0, 16)]


def test_memory_that_could_not_be_had_is_as_if_never_asked_for() -> None:
    cache = Cache(num_pages=32, backed=False)
    assert cache.state.begin_backing(cache.arena, 32) == [Run(0, 32)]
    assert cache.state.end_backing(cache.arena, Run(16, 16), backed=True)
    assert cache.state.end_backing(cache.arena, Run(0, 16), backed=False) == []
    assert cache.counts() == {"unbacked": 16, "free": 16}
    assert cache.state.begin_backing(cache.arena, 32) == [Run(0, 16)]


def test_a_reserve_evicts_where_no_memory_may_be_asked_for() -> None:
    cache = Cache(num_pages=32, backed=False)
    cache.state.begin_backing(cache.arena, 16)
    cache.state.end_backing(cache.arena, Run(0, 16), backed=True)
    cache.fill("abcdefghijklmnop")
    cache.state.may_back = False
    assert len(cache.reserve(cache.match("x"), 4)) == 4
    assert cache.texts() == {"abcdefghijkl"}


def test_a_reserve_evicts_the_least_recent_blocks_from_their_end(cache: Cache) -> None:
    cache.fill("abcdefgh")
    cache.fill("rstuvwxy")
    cache.release(cache.match("abc"))
    answer = cache.state.reserve(cache.match("?"), 0, 9)
    assert isinstance(answer, Granted)
    assert kinds(answer.plan) == [Freed, Reserved]
    assert cache.texts() == {"abc", "rstu"}
    assert cache.state.counters["blocks_evicted"] == 9


def test_a_touch_of_the_end_keeps_the_whole_path(cache: Cache) -> None:
    cache.fill("abcd")
    cache.fill("wxyz")
    cache.release(cache.match("abcd"))
    cache.reserve(cache.match("?"), 12)
    assert cache.texts() == {"abcd"}


def test_a_parent_does_not_go_before_its_children(cache: Cache) -> None:
    for text in ("abcdxy", "abcd", "ab"):
        cache.fill(text)
    answer = cache.state.reserve(cache.match("?"), 0, 16)
    assert isinstance(answer, Granted)
    assert len(freed(answer.plan)) == 6
    assert cache.texts() == set()


def test_a_leased_block_is_never_evicted(cache: Cache) -> None:
    cache.fill("abcdefgh")
    cache.match("abcd")
    assert isinstance(cache.state.reserve(cache.match("?"), 0, 13), Short)
    cache.reserve(cache.match("?"), 12)
    assert cache.texts() == {"abcd"}


def test_a_reserve_that_falls_short_evicts_nothing_and_says_why(cache: Cache) -> None:
    cache.hold("abc")
    cache.fill("xy")
    cache.reserve(cache.match("r"), 4)
    cache.reserve(cache.match("q", session=2), 2)
    cache.state.end_session(2)
    answer = cache.state.reserve(cache.match("?"), 0, 8)
    assert isinstance(answer, Short)
    short = answer.shortage
    assert (answer.backing, short.num_wanted, short.num_free) == ([], 8, 5)
    assert (short.num_locked, short.num_reserved, short.num_quarantined) == (3, 4, 2)
    assert short.num_pages == 16
    assert cache.texts() == {"abc", "xy"}


def test_a_reserve_of_more_pages_than_there_are_takes_no_memory() -> None:
    cache = Cache(num_pages=32, backed=False)
    answer = cache.state.reserve(cache.match("?"), 0, 33)
    assert isinstance(answer, Short)
    assert answer.backing == []
    assert cache.arena.pool.num_backed == 0


def test_a_reserve_repeated_after_an_abort_grants_no_page_of_another(cache: Cache) -> None:
    lease = cache.match("abc")
    cache.reserve(lease, 3)
    cache.state.abort(lease)
    other = cache.match("xyz", session=2)
    cache.reserve(other, 16)
    try:
        answer = cache.state.reserve(lease, 0, 3)
    except KvdError:
        return
    assert isinstance(answer, Short) or other.reserved.isdisjoint(answer.pages.tolist())


# --- commit ---


def test_a_committed_block_is_matched(cache: Cache) -> None:
    pages = cache.commit(cache.match("abc"), "abc")
    answer = cache.state.match(2, 1, cache.namespace, packed("abcd"))
    assert answer.lease.num_matched == 3
    assert [run.first for run in answer.runs] == pages[:1]
    assert cache.counts() == {"free": 13, "committed": 3}


def test_a_commit_notes_parent_place_tokens_and_namespace(cache: Cache) -> None:
    cache.tenant("before")
    lease = cache.match("abcd", salt="mine")
    (a, b, c, d) = cache.reserve(lease, 4)
    first = cache.state.commit(lease, 0, np.array([a, b]), packed("ab"))
    (then,) = committed(cache.state.commit(lease, 2, np.array([c, d]), packed("cd")).plan)
    assert [step.parent for step in committed(first.plan)] == [-1]
    assert (then.parent, then.first_block, then.tokens) == (b, 2, packed("cd"))
    assert (then.pages.tolist(), then.namespace) == ([c, d], cache.tenant("mine").id)


def test_a_commit_locks_what_it_added(cache: Cache) -> None:
    lease = cache.match("abc")
    cache.commit(lease, "abc")
    assert lease.num_blocks == 3
    assert isinstance(cache.state.reserve(cache.match("?"), 0, 14), Short)
    cache.release(lease)
    assert isinstance(cache.state.reserve(cache.match("?"), 0, 14), Granted)


def test_a_commit_of_present_blocks_returns_their_pages(cache: Cache) -> None:
    one, other = cache.match("abcd"), cache.match("abcd", session=2)
    theirs = cache.commit(one, "abc")
    mine = cache.reserve(other, 4)
    answer = cache.state.commit(other, 0, np.array(mine), packed("abcd"))
    assert answer.pages.tolist() == [*theirs, mine[3]]
    assert answer.num_duplicates == 3
    assert other.reserved == set(mine[:3])
    assert cache.state.counters["blocks_duplicate"] == 3


def test_duplicates_are_freed_at_release(cache: Cache) -> None:
    one, other = cache.match("ab"), cache.match("ab")
    cache.commit(one, "ab")
    mine = cache.reserve(other, 2)
    cache.commit(other, "ab", mine)
    assert freed(cache.release(other)) == mine
    assert cache.counts() == {"free": 14, "committed": 2}


def test_a_commit_over_present_blocks_locks_them(cache: Cache) -> None:
    one, other = cache.match("abcd"), cache.match("abcd")
    cache.commit(one, "abcd")
    cache.commit(other, "ab")
    cache.release(one)
    cache.reserve(cache.match("?"), 12)
    assert cache.texts() == {"ab"}


def test_a_commit_sent_twice_gets_the_first_answer(cache: Cache) -> None:
    cache.hold("a")
    lease = cache.match("", session=2)
    pages = np.array(cache.reserve(lease, 3))
    answers = [cache.state.commit(lease, 0, pages, packed("abc")) for _ in range(2)]
    assert answers[0].pages.tolist() == answers[1].pages.tolist()
    assert answers[1].plan == []
    assert cache.counts() == {"free": 12, "reserved": 1, "committed": 3}
    assert [answer.num_duplicates for answer in answers] == [1, 1]


def test_a_commit_may_begin_in_what_was_committed_before(cache: Cache) -> None:
    lease = cache.match("abcd")
    a, b, c, d = cache.reserve(lease, 4)
    cache.state.commit(lease, 0, np.array([a, b]), packed("ab"))
    answer = cache.state.commit(lease, 1, np.array([b, c, d]), packed("bcd"))
    assert answer.pages.tolist() == [b, c, d]
    assert [step.pages.tolist() for step in committed(answer.plan)] == [[c, d]]


def test_a_commit_with_other_tokens_for_known_blocks_is_refused(cache: Cache) -> None:
    lease = cache.match("abc")
    pages = cache.reserve(lease, 3)
    cache.commit(lease, "ab", pages[:2])
    with pytest.raises(BadRequest, match="other tokens"):
        cache.state.commit(lease, 1, np.array(pages[1:]), packed("Bc"))
    assert cache.texts() == {"ab"}


def test_a_commit_that_leaves_a_gap_is_refused(cache: Cache) -> None:
    lease = cache.match("abc")
    pages = cache.reserve(lease, 1)
    with pytest.raises(BadRequest, match="ends at 0"):
        cache.state.commit(lease, 1, np.array(pages), packed("b"))


@pytest.mark.parametrize("text", ["", "a", "abc"])
def test_a_commit_needs_the_tokens_of_whole_blocks(cache: Cache, text: str) -> None:
    lease = cache.match("ab")
    pages = cache.reserve(lease, 2)
    with pytest.raises(BadRequest, match="2 whole blocks"):
        cache.state.commit(lease, 0, np.array(pages), packed(text))


def test_a_page_that_the_lease_did_not_reserve_is_refused(cache: Cache) -> None:
    one, other = cache.match("a"), cache.match("b")
    cache.reserve(one, 1)
    theirs = cache.reserve(other, 1)
    for page in (theirs[0], 15, 16, -1):
        with pytest.raises(BadRequest, match="reserved by its lease"):
            cache.state.commit(one, 0, np.array([page]), packed("a"))


def test_a_page_named_twice_is_refused(cache: Cache) -> None:
    lease = cache.match("ab")
    (page,) = cache.reserve(lease, 1)
    with pytest.raises(BadRequest, match="once"):
        cache.state.commit(lease, 0, np.array([page, page]), packed("ab"))


def test_a_committed_page_is_never_committed_again(cache: Cache) -> None:
    lease = cache.match("ab")
    (page,) = cache.reserve(lease, 1)
    cache.commit(lease, "a", [page])
    with pytest.raises(BadRequest):
        cache.commit(lease, "b", [page])


def test_a_commit_of_nothing_changes_nothing(cache: Cache) -> None:
    lease = cache.hold("ab")
    answer = cache.state.commit(lease, 2, np.empty(0, np.int64), b"")
    assert (answer.pages.tolist(), answer.num_duplicates, answer.plan) == ([], 0, [])


# --- abort, release ---


def test_an_abort_gives_back_what_is_not_committed(cache: Cache) -> None:
    lease = cache.match("abcd")
    pages = cache.reserve(lease, 4)
    cache.commit(lease, "ab", pages[:2])
    assert freed(cache.state.abort(lease)) == pages[2:]
    assert cache.state.abort(lease) == []
    assert cache.state.leases.get(1, lease.id) is lease
    assert cache.counts() == {"free": 14, "committed": 2}


def test_an_aborted_page_cannot_be_committed(cache: Cache) -> None:
    lease = cache.match("a")
    pages = cache.reserve(lease, 1)
    cache.state.abort(lease)
    with pytest.raises(BadRequest):
        cache.commit(lease, "a", pages)


def test_a_release_voids_the_lease_before_its_pages_are_free(cache: Cache) -> None:
    lease = cache.match("abcd")
    pages = cache.reserve(lease, 4)
    cache.commit(lease, "ab", pages[:2])
    plan = cache.release(lease)
    assert kinds(plan) == [Ended, Freed]
    assert plan[0] == Ended(lease.slot, lease.generation + 1)
    assert freed(plan) == pages[2:]


def test_a_release_keeps_what_was_committed(cache: Cache) -> None:
    cache.release(cache.hold("abc"))
    assert cache.texts() == {"abc"}
    assert cache.match("abc").num_matched == 3


def test_releasing_twice_is_counted_and_subtracts_nothing(cache: Cache) -> None:
    one, other = cache.hold("ab"), cache.match("ab")
    cache.release(one)
    assert cache.release(one) == []
    assert cache.state.counters["releases_unknown"] == 1
    assert isinstance(cache.state.reserve(cache.match("?"), 0, 15), Short)
    cache.release(other)
    assert isinstance(cache.state.reserve(cache.match("?"), 0, 15), Granted)


def test_an_ended_lease_is_not_found(cache: Cache) -> None:
    lease = cache.match("a")
    cache.release(lease)
    with pytest.raises(LeaseEnded, match=str(lease.id)):
        cache.state.leases.get(1, lease.id)


def test_a_slot_says_another_generation_for_each_lease(cache: Cache, tmp_path: Path) -> None:
    header = create_header(tmp_path / "header")
    for _ in range(3):
        lease = cache.match("a")
        assert header.generation(lease.slot) == lease.generation
        note_ends(header, cache.release(lease))
        assert header.generation(lease.slot) != lease.generation


def test_a_lease_of_the_next_daemon_holds_in_the_header_of_before(tmp_path: Path) -> None:
    """The header outlives the daemon; the table of leases does not."""
    path, ended = tmp_path / "header", Cache()
    note_ends(create_header(path), ended.release(ended.match("a")))
    header = create_header(path)
    header.begin_epoch(2)
    lease = Cache().match("a")
    assert header.generation(lease.slot) == lease.generation


def note_ends(header: SharedHeader, plan: Plan) -> None:
    for step in plan:
        assert isinstance(step, Ended)
        header.set_generation(step.slot, step.generation)


# --- ends of sessions ---


def test_an_ended_session_leaves_its_blocks_and_frees_their_locks(cache: Cache) -> None:
    cache.hold("abc", session=2)
    assert kinds(cache.state.end_session(2)) == [Ended]
    assert cache.state.leases.of_session(2) == []
    assert cache.texts() == {"abc"}
    assert isinstance(cache.state.reserve(cache.match("?"), 0, 16), Granted)


def test_an_ended_sessions_reserved_pages_are_quarantined(cache: Cache) -> None:
    pages = cache.reserve(cache.match("abc", session=2), 3)
    plan = cache.state.end_session(2)
    assert kinds(plan) == [Quarantined, Ended]
    assert isinstance(plan[0], Quarantined)
    assert plan[0].pages.tolist() == pages
    assert cache.counts() == {"free": 13, "quarantined": 3}
    assert isinstance(cache.state.reserve(cache.match("?"), 0, 14), Short)


def test_quarantined_pages_are_free_once_the_session_is_gone(cache: Cache) -> None:
    pages = [page for text in ("a", "b") for page in cache.reserve(cache.match(text, session=2), 3)]
    cache.reserve(cache.match("c", session=3), 1)
    cache.state.end_session(2)
    cache.state.end_session(3)
    assert sorted(freed(cache.state.session_gone(2))) == pages
    assert cache.counts() == {"free": 15, "quarantined": 1}
    assert cache.state.session_gone(2) == []


def test_a_session_that_goes_before_it_ended_frees_nothing(cache: Cache) -> None:
    cache.reserve(cache.match("a", session=2), 1)
    assert cache.state.session_gone(2) == []
    assert cache.counts() == {"free": 15, "reserved": 1}


def test_an_ended_session_is_forgotten(cache: Cache) -> None:
    cache.state.release(2, 7)
    cache.state.end_session(2)
    assert cache.match("a", session=2, lease=7)


def test_other_sessions_keep_what_they_have(cache: Cache) -> None:
    lease = cache.hold("abc", session=1)
    cache.reserve(lease, 2)
    cache.match("abc", session=2)
    cache.state.end_session(2)
    assert cache.state.leases.get(1, lease.id) is lease
    assert cache.counts() == {"free": 11, "reserved": 2, "committed": 3}
    assert lease.node.locks == 1


# --- watermarks ---


def test_nothing_is_trimmed_up_to_the_high_watermark() -> None:
    cache = Cache(high_watermark=0.75, low_watermark=0.5)
    cache.fill("abcdefghijkl")
    assert cache.state.trim() == []
    cache.fill("x")
    assert len(freed(cache.state.trim())) == 5
    assert cache.counts() == {"free": 8, "committed": 8}
    assert cache.state.trim() == []


def test_trimming_takes_the_least_recent_first() -> None:
    cache = Cache(high_watermark=0.75, low_watermark=0.5)
    for text in ("abcd", "mnop", "wxyz", "!"):
        cache.fill(text)
    cache.release(cache.match("abcd"))
    cache.state.trim()
    assert cache.texts() == {"abcd", "wxy", "!"}


def test_trimming_stops_at_what_is_locked() -> None:
    cache = Cache(high_watermark=0.5, low_watermark=0.0)
    cache.hold("abcdefgh")
    cache.fill("abcdefghij")
    assert len(freed(cache.state.trim())) == 2
    assert cache.texts() == {"abcdefgh"}


def test_trimming_goes_by_age_over_all_layouts() -> None:
    state = CacheState(16 * 4 + 16 * 8, 8, high_watermark=0.5, low_watermark=0.25)
    namespaces = []
    for num_layers in (1, 2):  # pages of 4 bytes, and of 8
        layout = Layout(num_layers, 1, 2, "float16", block_size=1, num_planes=1)
        arena = state.add_arena(layout, 16, 16)
        for run in state.begin_backing(arena, 16):
            state.end_backing(arena, run, backed=True)
        key = bytes([num_layers])
        namespaces.append(state.open_namespace(key, Identity("model", "main"), "", arena))
    for lease_id, text in enumerate(["abcde", "abcde", "vwxyz", "vwxyz"]):  # 120 of 192 bytes
        lease = state.match(1, lease_id, namespaces[lease_id % 2], packed(text)).lease
        answer = state.reserve(lease, 0, 5)
        assert isinstance(answer, Granted)
        state.commit(lease, 0, answer.pages, packed(text))
        state.release(1, lease_id)
    gone = [(step.arena, len(step.pages)) for step in state.trim() if isinstance(step, Freed)]
    assert gone == [(0, 5), (1, 5), (0, 3)]


def test_memory_on_its_way_is_not_used() -> None:
    """What is only being backed holds nothing: blocks need not go for it."""
    cache = Cache(num_pages=64, backed=False, high_watermark=0.75, low_watermark=0.5)
    cache.state.begin_backing(cache.arena, 16)
    cache.state.end_backing(cache.arena, Run(0, 16), backed=True)
    cache.fill("abcdefghijklmnop")
    cache.state.begin_backing(cache.arena, 48)
    assert cache.state.trim() == []


# --- the books ---


def test_the_check_sees_a_page_in_the_wrong_state(cache: Cache) -> None:
    cache.hold("abc")
    cache.state.check()
    cache.arena.pool.states[15] = PageState.COMMITTED
    with pytest.raises(AssertionError):
        cache.state.check()


def test_the_check_sees_a_lock_without_a_lease(cache: Cache) -> None:
    cache.hold("abc").node.locks += 1
    with pytest.raises(AssertionError):
        cache.state.check()


def test_every_step_of_a_plan_is_a_note_of_its_arena(cache: Cache) -> None:
    lease = cache.match("ab")
    answer = cache.state.reserve(lease, 0, 2)
    assert isinstance(answer, Granted)
    commit = cache.state.commit(lease, 0, answer.pages, packed("ab"))
    for step in [*answer.plan, *commit.plan]:
        assert isinstance(step, Reserved | Committed)
        assert step.arena == cache.arena.id
