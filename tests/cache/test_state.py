"""The rules of match, reserve, commit and their ends, one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.arena.header import SharedHeader, create_header
from kvd.arena.runs import pages_of
from kvd.cache.audit import check
from kvd.cache.memory import Quota
from kvd.cache.plan import (
    Committed,
    Detached,
    DropAnswer,
    Ended,
    Forgotten,
    Freed,
    Granted,
    Pinned,
    Plan,
    Quarantined,
    Removed,
    Reserved,
    Short,
    Unnamed,
)
from kvd.cache.rows import row_bytes, rows_of
from kvd.config import CacheConfig, LimitConfig
from kvd.protocol.codec import TOKEN_BYTES
from kvd.protocol.errors import (
    BadRequest,
    ConfigError,
    Dropped,
    KvdError,
    LeaseEnded,
    LimitExceeded,
    OutOfPages,
)
from kvd.protocol.keys import chain
from kvd.protocol.layout import Layout
from kvd.protocol.messages import EXTRA_BYTES, Run, Tail
from tests.cache.conftest import (
    EXTENT,
    FOURS,
    LAYOUT,
    Cache,
    committed,
    disk,
    forgotten,
    freed,
    kinds,
    packed,
    text_of,
)

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
    assert cache.state.find_arena(LAYOUT, TOKEN_BYTES) is cache.arena
    assert cache.state.find_arena(other, TOKEN_BYTES) is None
    assert cache.add_arena(other, 16) is cache.state.find_arena(other, TOKEN_BYTES)


def test_an_arena_is_found_by_the_width_of_its_rows(cache: Cache) -> None:
    width = row_bytes(extras=True)
    assert cache.state.find_arena(LAYOUT, width) is None
    wider = cache.state.add_arena(LAYOUT, width, 16, EXTENT)
    assert cache.state.find_arena(LAYOUT, width) is wider
    assert cache.state.find_arena(LAYOUT, TOKEN_BYTES) is cache.arena


def test_a_namespace_has_the_rows_of_its_arena() -> None:
    cache = Cache(row_bytes=row_bytes(extras=True))
    assert cache.namespace.tree.row_bytes == TOKEN_BYTES + EXTRA_BYTES


def test_equal_ids_with_other_digests_never_meet() -> None:
    cache = Cache(row_bytes=row_bytes(extras=True))
    space = cache.namespace
    cat, dog = (
        rows_of(packed("ab"), ((1, bytes([image]) * 32),), 0, space.tree.row_bytes)
        for image in (1, 2)
    )
    lease = cache.state.match(1, 1, space, cat).lease
    answer = cache.state.commit(lease, 0, np.array(cache.reserve(lease, 2)), cat)
    assert [step.rows for step in committed(answer.plan)] == [cat]
    assert cache.state.match(1, 2, space, dog).lease.num_matched == 1
    assert cache.state.match(1, 3, space, cat).lease.num_matched == 2


def test_guarantees_beyond_the_capacity_are_refused(cache: Cache) -> None:
    cache.tenant("mine", guaranteed_bytes=60)
    with pytest.raises(LimitExceeded, match="quotas"):
        cache.tenant("yours", guaranteed_bytes=8)
    cache.tenant("theirs", guaranteed_bytes=4)


def test_guarantees_beyond_the_capacity_configure_nothing(cache: Cache) -> None:
    space, limits = cache.tenant("mine"), cache.state.limits
    quotas = {space: Quota(guaranteed_bytes=10**6)}
    with pytest.raises(ConfigError, match="quotas: they guarantee open namespaces more"):
        cache.state.configure(CacheConfig(), LimitConfig(pins=1), quotas)
    assert (cache.state.limits, space.quota) == (limits, Quota())


def test_pins_above_a_lowered_bound_stay_and_no_more_come(cache: Cache) -> None:
    cache.fill("abc")
    cache.state.pin("me", cache.namespace, packed("ab"), 60, 0.0)
    cache.state.configure(CacheConfig(), LimitConfig(pins=1), {})
    with pytest.raises(LimitExceeded, match="all 1 pins"):
        cache.state.pin("me", cache.namespace, packed("abc"), 60, 0.0)
    assert len(cache.state.pins) == 1


def test_a_closed_namespace_keeps_its_blocks_and_ends_its_leases(cache: Cache) -> None:
    lease, other = cache.hold("abc"), cache.match("x", salt="other")
    pages = cache.reserve(lease, 2)
    plan = cache.state.close_namespace(1, cache.namespace)
    assert (kinds(plan), freed(plan)) == ([Ended, Freed], pages)
    assert cache.state.leases.of_session(1) == [other]
    assert cache.texts() == {"abc"}
    assert cache.namespace.sessions == set()


# --- place for others ---


def closed(cache: Cache, *salts: str) -> None:
    for salt in salts:
        space = next(one for one in cache.state.namespaces.values() if one.salt == salt)
        cache.state.close_namespace(1, space)


def test_there_is_place_up_to_the_limit() -> None:
    cache = Cache(namespaces=2)
    assert cache.state.make_place(for_arena=True) == []


def test_the_idle_namespace_that_is_coldest_makes_place() -> None:
    cache = Cache(namespaces=3)
    for text, salt in (("abc", ""), ("xy", "cold"), ("abc", "open")):
        cache.fill(text, salt)
    cache.release(cache.match("a"))
    closed(cache, "", "cold")
    assert len(freed(cache.state.make_place(for_arena=False))) == 2
    assert {space.salt for space in cache.state.namespaces.values()} == {"", "open"}
    check(cache.state)


@pytest.mark.parametrize("held", ["open", "pinned"])
def test_a_namespace_in_use_makes_no_place(held: str) -> None:
    cache = Cache(namespaces=1)
    cache.fill("abc")
    if held == "pinned":
        cache.pin("a")
        closed(cache, "")
    with pytest.raises(LimitExceeded, match="all 1 namespaces"):
        cache.state.make_place(for_arena=False)
    assert cache.texts() == {"abc"}


def test_a_namespace_that_made_place_is_made_anew() -> None:
    cache = Cache(namespaces=1)
    cache.fill("abc")
    closed(cache, "")
    plan = cache.state.make_place(for_arena=False)
    assert plan[-1] == Unnamed(cache.arena.id, cache.namespace.id, cache.namespace.key)
    assert cache.tenant("").id != cache.namespace.id
    assert cache.match("abc").num_matched == 0


def test_an_unused_layout_makes_place_with_its_namespaces() -> None:
    cache = Cache(32, layouts=2)
    wide = cache.add_wide(16, backed=False)
    cache.fill("abc")
    closed(cache, "")
    plan = cache.state.make_place(for_arena=True)
    assert kinds(plan) == [Freed, Unnamed, Removed]
    assert list(cache.memory.arenas.values()) == [wide]
    assert {space.salt for space in cache.state.namespaces.values()} == {"wide"}


@pytest.mark.parametrize("held", ["quarantined", "on its way"])
def test_a_layout_whose_memory_is_in_use_makes_no_place(held: str) -> None:
    cache = Cache(32, layouts=1, backed=held != "on its way")
    if held == "quarantined":
        cache.reserve(cache.match("a"), 1)
        cache.state.end_session(1)
    else:
        cache.begin_backing(1)
        closed(cache, "")
    with pytest.raises(LimitExceeded, match="all 1 layouts"):
        cache.state.make_place(for_arena=True)


def test_where_no_place_can_be_made_nothing_goes() -> None:
    cache = Cache(32, namespaces=2, layouts=1)
    cache.fill("abc", salt="idle")
    closed(cache, "idle")
    with pytest.raises(LimitExceeded, match="all 1 layouts"):
        cache.state.make_place(for_arena=True)
    assert cache.texts("idle") == {"abc"}


# --- match ---


def test_a_match_leases_the_longest_prefix(cache: Cache) -> None:
    lease = cache.hold("abcd")
    answer = cache.state.match(1, 1, cache.namespace, packed("abxy"))
    assert answer.lease.num_matched == 2
    assert answer.lease.runs == (Run(int(lease.granted[0]), 2),)
    assert answer.plan == []


def test_a_match_of_nothing_is_a_lease_too(cache: Cache) -> None:
    answer = cache.state.match(1, 1, cache.namespace, packed("xyz"))
    assert (answer.lease.num_matched, answer.lease.runs) == (0, ())
    assert cache.state.leases.get(1, 1) is answer.lease


def test_the_same_match_gets_the_first_answer(cache: Cache) -> None:
    cache.fill("ab")
    lease = cache.match("abcd", lease=7)
    cache.commit(lease, "cd")
    again = cache.state.match(1, 7, cache.namespace, packed("abcd"))
    assert again.lease is lease
    assert sum(run.count for run in again.lease.runs) == again.lease.num_matched == 2


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
    cache = Cache(session_leases=2)
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
    expected |= {"tokens_matched": 3, "tokens_from_memory": 3}
    assert +cache.state.counters == expected


def hits(cache: Cache) -> dict[str, int]:
    return {text_of(node): node.hits for node in cache.namespace.tree.nodes()}


def test_a_match_counts_in_each_node_that_it_goes_through(cache: Cache) -> None:
    cache.fill("abcd")
    cache.release(cache.match("abcd"))
    assert hits(cache) == {"abcd": 1}
    cache.release(cache.match("abx"))
    assert hits(cache) == {"ab": 2, "abcd": 1}
    cache.release(cache.match("abcd"))  # they are one again, of which the first blocks count
    assert hits(cache) == {"abcd": 3}


def test_a_match_that_is_repeated_counts_once(cache: Cache) -> None:
    cache.fill("ab")
    for _ in range(2):
        cache.match("ab", lease=1)
    assert hits(cache) == {"ab": 1}


# --- the exact tail ---


@pytest.fixture
def fours() -> Cache:
    """Blocks of four letters."""
    return Cache(layout=FOURS)


@pytest.mark.parametrize("num_tokens", range(1, 4))
def test_a_tail_is_leased_to_the_token(fours: Cache, num_tokens: int) -> None:
    page = fours.hold("abcdefgh").granted[1]
    text = "abcd" + "efgh"[:num_tokens] + "????"
    lease = fours.match(text, exact_tail=True)
    assert (lease.num_matched, lease.tail) == (1, Tail(page, num_tokens))
    assert fours.state.counters["tokens_matched"] == 4 + num_tokens


def test_a_tail_may_be_all_that_is_asked_for(fours: Cache) -> None:
    page = fours.hold("abcd").granted[0]
    assert fours.match("abc", exact_tail=True).tail == Tail(page, 3)
    assert fours.match("abc").tail is None


@pytest.mark.parametrize("text", ["abcd", "abcdXfgh", "", "Xbcd"])
def test_where_no_token_agrees_there_is_no_tail(fours: Cache, text: str) -> None:
    fours.fill("abcdefgh")
    assert fours.match(text, exact_tail=True).tail is None


def test_the_tail_is_the_block_that_agrees_longest(fours: Cache) -> None:
    for text in ("abcd", "abxx", "azzz", "bbbb", "aaaa"):
        fours.fill(text)
    for text, num_tokens in (("abc?", 3), ("abx?", 3), ("ab??", 2), ("az??", 2), ("a???", 1)):
        tail = fours.match(text, exact_tail=True).tail
        assert tail
        assert tail.num_tokens == num_tokens


def test_a_tail_is_one_block_of_a_longer_node(fours: Cache) -> None:
    fours.fill("abcdefghijkl")
    lease = fours.match("abcde???", exact_tail=True)
    fours.reserve(fours.match("?"), 14)
    assert fours.texts() == {"abcdefgh"}
    assert lease.tail_node
    assert lease.tail_node.num_blocks == 1


@pytest.mark.parametrize("end", ["commit", "release", "keep", "session"])
def test_a_tail_is_held_until_the_commit_or_the_end(fours: Cache, end: str) -> None:
    fours.fill("abcdefgh")
    lease = fours.match("abcdef??", exact_tail=True)
    assert fours.namespace.lru.num_blocks == 0
    match end:
        case "commit":
            fours.commit(lease, "ef??")
        case "release":
            fours.release(lease)
        case "keep":
            fours.state.keep(lease, 1)
        case "session":
            fours.state.end_session(1)
    assert lease.tail is None
    assert fours.namespace.lru.num_blocks >= 1
    check(fours.state)


def test_the_same_match_gets_its_tail_again(fours: Cache) -> None:
    fours.fill("abcd")
    first = fours.match("abc", lease=7, exact_tail=True)
    tail = first.tail
    again = fours.state.match(1, 7, fours.namespace, packed("abc"), exact_tail=True)
    assert (again.lease, again.lease.tail) == (first, tail)
    assert fours.state.match(1, 7, fours.namespace, packed("abc")).lease.tail is None


some_text = st.text("ab", max_size=13)


@given(st.lists(some_text, max_size=5), some_text)
def test_a_hit_ends_at_the_first_token_that_differs(texts: list[str], prompt: str) -> None:
    """From all that is there; without the tail, at the end of the block before."""
    cache = Cache(32, layout=FOURS)
    whole = [text[: len(text) // 4 * 4] for text in texts]
    for text in whole:
        cache.fill(text)
    lengths = range(1, len(prompt) + 1)
    longest = sum(any(text.startswith(prompt[:n]) for text in whole) for n in lengths)
    for exact_tail, num_tokens in ((True, longest), (False, longest // 4 * 4)):
        cache.state.counters.clear()
        cache.release(cache.match(prompt, exact_tail=exact_tail))
        assert cache.state.counters["tokens_matched"] == num_tokens
        check(cache.state)


# --- fork ---


def test_a_fork_holds_what_its_source_holds(cache: Cache) -> None:
    source = cache.hold("abc")
    answer = cache.state.fork(1, 7, source)
    cache.release(source)
    assert cache.namespace.lru.num_blocks == 0
    assert [run.count for run in answer.lease.runs] == [3]
    assert cache.commit(answer.lease, "de")
    assert cache.texts() == {"abcde"}


def test_a_fork_has_no_reserved_page_of_its_source(cache: Cache) -> None:
    source = cache.hold("abc")
    cache.reserve(source, 2)
    fork = cache.fork(source)
    assert (fork.reserved, len(fork.granted)) == (set(), 0)


def test_the_same_fork_gets_the_first_answer(cache: Cache) -> None:
    source = cache.hold("abc")
    first = cache.fork(source, lease=7)
    cache.commit(source, "d")
    again = cache.state.fork(1, 7, source)
    assert again.lease is first
    assert sum(run.count for run in again.lease.runs) == 3


def test_a_fork_in_the_place_of_a_lease_ends_it(cache: Cache) -> None:
    source, other = cache.hold("abc"), cache.match("x", lease=7)
    answer = cache.state.fork(1, 7, source)
    assert answer.plan == [Ended(other.slot, other.generation + 1)]
    assert cache.state.leases.of_session(1) == [source, answer.lease]


def test_a_fork_onto_its_source_is_refused(cache: Cache) -> None:
    source = cache.hold("abc")
    cache.state.drop(cache.namespace, b"")
    with pytest.raises(BadRequest, match="itself"):
        cache.state.fork(1, source.id, source)
    assert cache.counts() == {"free": 13, "detached": 3}


def test_a_fork_after_its_release_is_refused(cache: Cache) -> None:
    source = cache.hold("abc")
    cache.state.release(1, 7)
    with pytest.raises(LeaseEnded):
        cache.fork(source, lease=7)


def test_a_fork_is_as_old_as_its_source(cache: Cache) -> None:
    source = cache.hold("ab")
    cache.state.drop(cache.namespace, b"")
    fork = cache.fork(source)
    cache.release(source)
    assert cache.counts() == {"free": 14, "detached": 2}
    with pytest.raises(Dropped):
        cache.commit(fork, "c")


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


def test_a_reserve_of_nothing_notes_nothing(cache: Cache) -> None:
    answer = cache.state.reserve(cache.match("abc"), 0, 0)
    assert isinstance(answer, Granted)
    assert (answer.pages.tolist(), answer.plan) == ([], [])


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
    cache.back(EXTENT)
    cache.hold("abcdefghijklmno")
    answer = cache.state.reserve(cache.match("x"), 0, 1, 15)
    assert isinstance(answer, Granted)


def test_a_session_has_a_bound_of_uncommitted_pages() -> None:
    cache = Cache(session_reserved_fraction=0.5)
    lease = cache.match("abcd")
    pages = cache.reserve(lease, 6)
    with pytest.raises(OutOfPages, match="commit or release"):
        cache.state.reserve(cache.match("x"), 0, 3)
    cache.reserve(cache.match("y", session=2), 3)
    cache.commit(lease, "abcd", pages[:4])
    assert len(cache.reserve(lease, 6)) == 6
    cache.release(lease)
    assert len(cache.reserve(cache.match("x"), 8)) == 8


def test_pages_ahead_stop_at_the_bound_of_a_session() -> None:
    cache = Cache(session_reserved_fraction=0.5)
    answer = cache.state.reserve(cache.match("x"), 0, 2, ahead=16)
    assert isinstance(answer, Granted)
    assert len(answer.pages) == 8


def test_waiting_is_in_vain_where_nobody_else_has_a_page(cache: Cache) -> None:
    lease = cache.hold("abc")
    answer = cache.state.reserve(lease, 3, 17)
    assert isinstance(answer, Short)
    assert answer.hopeless
    cache.hold("xyz", session=2)
    answer = cache.state.reserve(lease, 3, 14)
    assert isinstance(answer, Short)
    assert not answer.hopeless


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
    assert [run.first for run in answer.lease.runs] == pages[:1]
    assert cache.counts() == {"free": 13, "committed": 3}


def test_a_commit_notes_parent_place_rows_and_namespace(cache: Cache) -> None:
    cache.tenant("before")
    lease = cache.match("abcd", salt="mine")
    (a, b, c, d) = cache.reserve(lease, 4)
    first = cache.state.commit(lease, 0, np.array([a, b]), packed("ab"))
    (then,) = committed(cache.state.commit(lease, 2, np.array([c, d]), packed("cd")).plan)
    assert [step.parent for step in committed(first.plan)] == [-1]
    assert (then.parent, then.first_block, then.rows) == (b, 2, packed("cd"))
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
    with pytest.raises(BadRequest, match="whole blocks"):
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


# --- keep ---


def test_what_is_not_kept_may_be_evicted(cache: Cache) -> None:
    lease = cache.hold("abcdef")
    cache.state.keep(lease, 2)
    assert (lease.num_blocks, lease.num_matched) == (2, 0)
    cache.reserve(cache.match("?"), 14)
    assert cache.texts() == {"ab"}


def test_a_lease_that_keeps_blocks_gives_its_pages_back(cache: Cache) -> None:
    lease = cache.hold("abc")
    pages = cache.reserve(lease, 3)
    assert freed(cache.state.keep(lease, 9)) == pages
    assert (lease.num_blocks, len(lease.granted)) == (3, 0)


def test_a_lease_may_keep_nothing(cache: Cache) -> None:
    lease = cache.hold("abc")
    cache.state.keep(lease, 0)
    assert lease.node is cache.namespace.tree.root
    assert cache.namespace.lru.num_blocks == 3
    cache.commit(lease, "xyz")
    assert cache.texts() == {"abc", "xyz"}


def test_a_lease_goes_on_from_what_it_keeps(cache: Cache) -> None:
    lease, other = cache.hold("abcd"), cache.hold("abcd")
    cache.state.keep(lease, 1)
    cache.commit(lease, "xy")
    cache.release(other)
    assert (lease.num_blocks, cache.texts()) == (3, {"abcd", "axy"})
    check(cache.state)


def test_a_lease_that_kept_blocks_is_not_its_match_any_more(cache: Cache) -> None:
    cache.fill("abcd")
    lease = cache.match("abcd", lease=7)
    cache.state.keep(lease, 1)
    assert cache.match("abcd", lease=7).num_matched == 4


# --- pins ---


def test_a_pinned_block_is_not_evicted(cache: Cache) -> None:
    cache.fill("abcdef")
    answer = cache.state.pin("me", cache.namespace, packed("abcx"), 10, 0)
    assert (answer.num_blocks, answer.plan) == (3, [])
    cache.reserve(cache.match("?"), 13)
    assert cache.texts() == {"abc"}


def test_a_pin_ends_with_its_time_and_not_before(cache: Cache) -> None:
    cache.fill("abc")
    cache.pin("abc", seconds=10, now=100)
    cache.state.expire(109.9)
    assert (cache.namespace.lru.num_blocks, cache.state.pins.next_expiry()) == (0, 110)
    cache.state.expire(110)
    assert (cache.namespace.lru.num_blocks, cache.state.pins.next_expiry()) == (3, None)
    assert cache.state.counters["pins_expired"] == 1


def test_a_pin_is_renewed_by_its_owner(cache: Cache) -> None:
    cache.fill("ab")
    number = cache.pin("abcd", seconds=10)
    cache.fill("abc")
    assert cache.pin("abcd", seconds=30) == number
    cache.state.expire(20)
    assert [pin.num_blocks for pin in cache.state.pins] == [3]
    assert cache.pin("abcd", owner="you") != number


def test_what_is_not_there_is_not_pinned(cache: Cache) -> None:
    assert cache.state.pin("me", cache.namespace, packed("abc"), 10, 0) == Pinned(0, 0, [])
    assert len(cache.state.pins) == 0


def test_an_owner_unpins_its_own(cache: Cache) -> None:
    cache.fill("abc")
    one, other = cache.pin("a"), cache.pin("ab")
    theirs = cache.pin("abc", owner="you")
    assert cache.state.unpin("me", (one, theirs))[0] == 1
    assert [pin.id for pin in cache.state.pins] == [other, theirs]
    assert cache.state.unpin("me")[0] == 1
    assert [pin.id for pin in cache.state.pins] == [theirs]


def test_a_pin_beyond_a_quota_changes_nothing(cache: Cache) -> None:
    cache.fill("abcdef")
    cache.pin("abc")
    with pytest.raises(LimitExceeded, match="me"):
        cache.pin("abcdef")
    assert [pin.num_blocks for pin in cache.state.pins] == [3]
    check(cache.state)


def test_a_pin_outlives_the_session(cache: Cache) -> None:
    cache.fill("abc")
    cache.pin("abc")
    cache.state.end_session(1)
    cache.reserve(cache.match("?", session=2), 13)
    assert cache.texts() == {"abc"}


# --- drop ---


def test_a_dropped_block_and_all_behind_it_are_found_no_more(cache: Cache) -> None:
    for text in ("abcd", "abxy", "r"):
        cache.fill(text)
    answer = cache.state.drop(cache.namespace, packed("abc"), 1)
    assert (answer.num_blocks, answer.num_detached) == ([5], 0)
    assert len(freed(answer.plan)) == 5
    assert cache.texts() == {"a", "r"}


def test_without_tokens_everything_is_dropped(cache: Cache) -> None:
    cache.fill("abcd")
    cache.hold("abxy")
    answer = cache.state.drop(cache.namespace, b"")
    assert (answer.num_blocks, answer.num_detached) == ([6], 4)
    assert kinds(answer.plan) == [Freed, Detached]
    assert cache.match("ab").num_matched == 0
    check(cache.state)


def test_of_many_that_share_nothing_all_are_dropped_but_for_who_holds_them() -> None:
    cache = Cache(64)
    held = [cache.hold(text) for text in ("ab", "cd", "e")]
    for text in ("abx", "cdy", *"fghijklmnopqrstuvwz"):
        cache.fill(text)
    answer = cache.state.drop(cache.namespace, b"")
    assert (answer.num_blocks, answer.num_detached) == ([26], 5)
    check(cache.state)
    for lease in held:
        cache.release(lease)
    check(cache.state)
    assert (cache.texts(), cache.counts()) == (set(), {"free": 64})


@pytest.mark.parametrize(("text", "from_block"), [("abc", 3), ("abcd", 3), ("abx", 2), ("x", 0)])
def test_what_is_not_there_is_not_dropped(cache: Cache, text: str, from_block: int) -> None:
    cache.fill("abc")
    assert cache.state.drop(cache.namespace, packed(text), from_block) == DropAnswer([0], 0, [])
    assert cache.texts() == {"abc"}


def test_a_dropped_block_is_held_until_its_last_lease_ends(cache: Cache) -> None:
    one, other = cache.hold("abc"), cache.hold("abcd")
    cache.state.drop(cache.namespace, packed("abc"), 1)
    assert cache.counts() == {"free": 12, "committed": 1, "detached": 3}
    assert freed(cache.release(one)) == []
    pages = other.node.path_pages().tolist()
    assert freed(cache.release(other)) == pages[:0:-1]
    assert (cache.texts(), cache.counts()) == ({"a"}, {"free": 15, "committed": 1})


def test_what_was_dropped_may_be_computed_again_beside_it(cache: Cache) -> None:
    old = cache.hold("abc")
    cache.state.drop(cache.namespace, packed("abc"), 1)
    new = cache.hold("abc")
    assert new.node.path_pages().tolist()[1:] != old.node.path_pages().tolist()[1:]
    cache.release(old)
    assert (cache.texts(), cache.counts()) == ({"abc"}, {"free": 13, "committed": 3})


def test_a_second_drop_above_a_dropped_block_does_no_harm(cache: Cache) -> None:
    lease = cache.hold("abcd")
    pages = lease.node.path_pages().tolist()
    cache.state.drop(cache.namespace, packed("abcd"), 2)
    answer = cache.state.drop(cache.namespace, packed("a"))
    assert (answer.num_blocks, answer.num_detached) == ([2], 2)
    check(cache.state)
    assert freed(cache.release(lease)) == pages[::-1]


@pytest.mark.parametrize("dropped", ["ab", "x", ""])
def test_what_was_computed_before_a_drop_is_not_committed_after_it(
    cache: Cache, dropped: str
) -> None:
    lease = cache.hold("a")
    pages = cache.reserve(lease, 1)
    cache.state.drop(cache.namespace, packed(dropped), 1 if dropped else 0)
    with pytest.raises(Dropped):
        cache.commit(lease, "b", pages)
    assert lease.reserved == set(pages)
    cache.state.abort(lease)
    assert cache.commit(cache.match("a"), "ab"[cache.match("a").num_blocks :])


def test_a_drop_without_tokens_begins_nowhere(cache: Cache) -> None:
    cache.fill("ab")
    with pytest.raises(BadRequest, match="no block to begin from"):
        cache.state.drop(cache.namespace, b"", 1)
    assert cache.texts() == {"ab"}


def test_a_commit_from_before_a_drop_may_be_repeated_after_it(cache: Cache) -> None:
    lease = cache.match("ab")
    pages = cache.commit(lease, "ab")
    cache.state.drop(cache.namespace, b"")
    answer = cache.state.commit(lease, 0, np.array(pages), packed("ab"))
    assert (answer.pages.tolist(), answer.plan) == (pages, [])


def test_a_drop_in_one_namespace_is_none_in_another(cache: Cache) -> None:
    lease = cache.hold("a", salt="other")
    cache.state.drop(cache.namespace, b"")
    assert cache.commit(lease, "b")


def test_the_pins_of_what_is_dropped_end(cache: Cache) -> None:
    cache.fill("abcd")
    cache.pin("a")
    cache.pin("abc")
    answer = cache.state.drop(cache.namespace, packed("ab"), 1)
    assert (answer.num_blocks, answer.num_detached) == ([3], 0)
    assert [pin.num_blocks for pin in cache.state.pins] == [1]
    assert cache.counts() == {"free": 15, "committed": 1}


def test_a_lease_may_keep_a_part_of_what_was_dropped(cache: Cache) -> None:
    lease = cache.hold("abcd")
    pages = lease.node.path_pages().tolist()
    cache.state.drop(cache.namespace, b"")
    assert freed(cache.state.keep(lease, 1)) == pages[:0:-1]
    check(cache.state)
    assert freed(cache.release(lease)) == pages[:1]


def test_a_dropped_tail_is_held_too() -> None:
    cache = Cache(layout=FOURS)
    cache.fill("abcdefgh")
    lease = cache.match("abcdef??", exact_tail=True)
    answer = cache.state.drop(cache.namespace, packed("abcdefgh"), 1)
    assert answer.num_detached == 1
    tail = lease.tail
    assert tail
    assert freed(cache.release(lease)) == [tail.page]


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


def test_every_step_of_a_plan_is_a_note_of_its_arena(cache: Cache) -> None:
    lease = cache.match("ab")
    answer = cache.state.reserve(lease, 0, 2)
    assert isinstance(answer, Granted)
    commit = cache.state.commit(lease, 0, answer.pages, packed("ab"))
    for step in [*answer.plan, *commit.plan]:
        assert isinstance(step, Reserved | Committed)
        assert step.arena == cache.arena.id


def test_leases_of_the_daemon_s_own_are_not_bounded_as_a_session_s() -> None:
    cache = Cache(session_leases=2)
    cache.fill("ab")
    lease = cache.match("ab")
    holds = [cache.state.fork(0, number, lease).lease for number in range(1, 5)]
    cache.release(lease)
    assert [hold.num_blocks for hold in holds] == [2] * 4


def test_what_was_committed_is_not_granted_again(cache: Cache) -> None:
    lease = cache.match("abcd")
    pages = cache.reserve(lease, 4)
    cache.commit(lease, "ab", pages[:2])
    with pytest.raises(BadRequest, match="were committed"):
        cache.state.reserve(lease, 0, 4)
    again = cache.state.reserve(lease, 2, 4)
    assert isinstance(again, Granted)
    assert again.pages.tolist() == pages[2:]


# --- what came up after a match ---


def test_a_lease_is_extended_by_what_became_resident() -> None:
    cache = Cache()
    lease = cache.match("abcd")
    cache.fill("abc")
    answer = cache.state.extend(lease, packed("abcd"))
    check(cache.state)
    assert (lease.num_matched, lease.num_blocks) == (3, 3)
    assert pages_of(answer.lease.runs).tolist() == lease.node.path_pages().tolist()
    assert cache.commit(lease, "d") == lease.node.path_pages().tolist()[3:]
    cache.release(lease)
    assert cache.texts() == {"abcd"}


def test_a_lease_is_extended_behind_what_it_has() -> None:
    cache = Cache()
    cache.fill("a")
    lease = cache.match("abc")
    cache.fill("abx")
    assert cache.state.extend(lease, packed("abc")).lease.num_matched == 2
    assert cache.state.extend(lease, packed("abc")).lease.num_matched == 2
    cache.release(lease)
    check(cache.state)


def test_a_lease_is_extended_by_its_own_tokens_alone() -> None:
    cache = Cache()
    cache.fill("ab")
    lease = cache.match("ab")
    with pytest.raises(BadRequest):
        cache.state.extend(lease, packed("ax"))
    cache.commit(lease, "c")
    with pytest.raises(BadRequest):
        cache.state.extend(lease, packed("abcd"))


def test_an_extended_lease_holds_no_tail_of_what_it_had_before() -> None:
    cache = Cache(num_pages=16, layout=FOURS)
    cache.fill("abcdefgh")
    lease = cache.match("abcdefgx", exact_tail=True)
    cache.fill("abcdefgx")
    cache.state.extend(lease, packed("abcdefgx"))
    assert (lease.num_matched, lease.tail, lease.tail_node) == (2, None, None)
    check(cache.state)


def test_a_lease_of_dropped_blocks_is_not_extended() -> None:
    cache = Cache()
    cache.fill("a")
    lease = cache.match("abc")
    cache.state.drop(cache.namespace, b"")
    cache.fill("abc")
    assert cache.state.extend(lease, packed("abc")).lease.num_matched == 1


# --- pages that were not verified yet ---


def doubt(cache: Cache, text: str) -> int:
    """The page of the last of these blocks, which is not verified from here on."""
    page = cache.namespace.tree.find(packed(text)).node.path_pages().tolist()[len(text) - 1]
    cache.arena.unverified.add(page)
    return int(page)


def test_a_match_ends_before_a_page_that_is_not_verified() -> None:
    cache = Cache()
    cache.fill("abcd")
    page = doubt(cache, "abc")
    assert cache.match("abcd").num_blocks == 2
    lacking = cache.lacking("abcd")
    assert lacking is not None
    assert (lacking.pages.tolist(), lacking.keys) == ([page], [])
    cache.arena.unverified.clear()
    assert cache.match("abcd").num_blocks == 4


def test_nothing_lacks_where_what_is_not_verified_was_not_asked_for() -> None:
    cache = Cache()
    cache.fill("abcd")
    doubt(cache, "abc")
    assert cache.lacking("ab") is None
    assert cache.lacking("abx") is None


def test_a_lease_is_not_extended_over_a_page_that_is_not_verified() -> None:
    cache = Cache()
    cache.fill("abcd")
    doubt(cache, "abc")
    lease = cache.match("a")
    assert cache.state.extend(lease, packed("abcd")).lease.num_matched == 2
    lacking = cache.state.lacking(cache.namespace, packed("cd"), lease.node)
    assert lacking is not None
    assert len(lacking.pages) == 1


def test_a_page_that_is_not_verified_is_no_tail() -> None:
    cache = Cache(layout=FOURS)
    cache.fill("abcd")
    doubt_page = cache.namespace.tree.root.children[0].pages[0]
    cache.arena.unverified.add(doubt_page)
    assert cache.match("abcx", exact_tail=True).tail is None
    cache.arena.unverified.clear()
    assert cache.match("abcx", exact_tail=True).tail is not None


def test_a_page_that_is_free_needs_no_check_any_more() -> None:
    cache = Cache()
    cache.fill("a")
    doubt(cache, "a")
    cache.state.drop(cache.namespace, b"")
    assert cache.arena.unverified == set()


# --- blocks that went bad ---


def test_a_bad_block_goes_with_all_that_follows_it() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abcd")
    cache.fill("abx")
    cache.save(store)
    plan = cache.state.remove(cache.namespace, packed("abc"))
    check(cache.state)
    assert cache.texts() == cache.texts_in(1) == {"abx"}
    assert forgotten(plan) == [Forgotten(1, LAYOUT, chain(b"", packed("abcd"), 4)[:1:-1])]


def test_a_bad_block_that_only_a_store_has_goes_too() -> None:
    cache = Cache(stores=[store := disk()])
    cache.store("abc", store)
    cache.state.remove(cache.namespace, packed("ab"))
    assert cache.texts_in(1) == {"a"}


def test_a_bad_block_that_went_meanwhile_takes_nothing_along() -> None:
    cache = Cache()
    cache.fill("ab")
    assert cache.state.remove(cache.namespace, packed("ax")) == []
    assert cache.state.remove(cache.namespace, packed("abc")) == []
    assert cache.texts() == {"ab"}


def test_what_follows_a_bad_block_is_not_committed() -> None:
    cache = Cache()
    lease = cache.hold("ab")
    cache.state.remove(cache.namespace, packed("ab"))
    with pytest.raises(Dropped):
        cache.commit(lease, "c")
    cache.release(lease)
    assert cache.counts() == {"free": 15, "committed": 1}


def test_the_good_blocks_before_a_bad_one_are_gone_on_from() -> None:
    cache = Cache()
    cache.fill("ab")
    lease = cache.match("a")
    cache.state.remove(cache.namespace, packed("ab"))
    cache.commit(lease, "c")
    assert cache.texts() == {"ac"}
