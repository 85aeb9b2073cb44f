"""Which pages there are, which blocks go for them, and whose: over all layouts and namespaces."""

from __future__ import annotations

from kvd.arena.runs import runs_of
from kvd.cache.memory import Quota
from kvd.cache.plan import Back, Freed, Granted, Plan, Reserved, Short, Unback
from kvd.protocol.codec import TOKEN_BYTES
from kvd.protocol.messages import Run
from tests.cache.conftest import EXTENT, LAYOUT, WIDE, Cache, backing, freed, kinds

# --- room ---


def test_a_reserve_asks_for_memory_before_it_evicts() -> None:
    cache = Cache(num_pages=48, backed=False)
    lease = cache.match("abc")
    answer = cache.state.reserve(lease, 0, 17)
    assert isinstance(answer, Short)
    assert backing(answer.plan) == [Run(0, 32)]
    assert cache.counts() == {"unbacked": 48}
    plan = cache.end_backing(0, 32)
    assert freed(plan) == list(range(32))
    assert len(cache.reserve(lease, 17)) == 17


def test_memory_on_its_way_is_not_asked_for_twice() -> None:
    cache = Cache(num_pages=48, backed=False)
    first, second = cache.match("a"), cache.match("b")
    assert isinstance(answer := cache.state.reserve(first, 0, 1), Short)
    assert backing(answer.plan) == [Run(0, 16)]
    assert isinstance(answer := cache.state.reserve(second, 0, 1), Short)
    assert backing(answer.plan) == []


def test_memory_on_its_way_is_waited_for_before_anything_is_evicted() -> None:
    cache = Cache(num_pages=32, backed=False)
    cache.back(EXTENT)
    cache.fill("abcdefghijklmnop")
    cache.begin_backing(16)
    lease = cache.match("x")
    assert isinstance(cache.state.reserve(lease, 0, 4), Short)
    assert cache.texts() == {"abcdefghijklmnop"}
    cache.end_backing(16, 16, backed=False)
    cache.memory.may_back = False
    assert len(cache.reserve(lease, 4)) == 4
    assert cache.texts() == {"abcdefghijkl"}


def test_memory_stops_at_the_capacity_of_the_tier() -> None:
    cache = Cache(num_pages=48, backed=False)
    cache.memory.capacity_bytes = 35 * LAYOUT.page_bytes
    lease = cache.match("abc")
    assert isinstance(answer := cache.state.reserve(lease, 0, 35), Short)
    assert backing(answer.plan) == [Run(0, 32)]
    cache.end_backing(0, 32)
    assert isinstance(answer := cache.state.reserve(lease, 0, 35), Short)
    assert backing(answer.plan) == []


def test_layouts_share_the_capacity_of_the_tier() -> None:
    cache = Cache(num_pages=32, backed=False)
    cache.begin_backing(16)
    other = cache.add_arena(WIDE, 32)
    assert cache.begin_backing(32, other) == []
    cache.memory.capacity_bytes = 16 * LAYOUT.page_bytes + 16 * other.layout.page_bytes
    assert cache.begin_backing(32, other) == [Run(0, 16)]


def test_memory_that_could_not_be_had_is_as_if_never_asked_for() -> None:
    cache = Cache(num_pages=32, backed=False)
    assert cache.begin_backing(32) == [Run(0, 32)]
    assert cache.end_backing(16, 16)
    assert cache.end_backing(0, 16, backed=False) == []
    assert cache.counts() == {"unbacked": 16, "free": 16}
    assert cache.begin_backing(32) == [Run(0, 16)]


def test_a_reserve_evicts_where_no_memory_may_be_asked_for() -> None:
    cache = Cache(num_pages=32, backed=False)
    cache.back(EXTENT)
    cache.fill("abcdefghijklmnop")
    cache.memory.may_back = False
    assert len(cache.reserve(cache.match("x"), 4)) == 4
    assert cache.texts() == {"abcdefghijkl"}


def test_a_reserve_evicts_the_least_recent_blocks_from_their_end(cache: Cache) -> None:
    cache.fill("abcdefgh")
    cache.fill("rstuvwxy")
    cache.release(cache.match("abc"))
    answer = cache.state.reserve(cache.match("?"), 0, 9)
    assert isinstance(answer, Granted)
    assert kinds(answer.plan) == [Freed, Freed, Reserved]
    assert cache.texts() == {"abc", "rstu"}
    assert cache.state.counters["blocks_evicted"] == cache.state.counters["evictions_room"] == 9


def test_cold_blocks_go_for_pages_ahead_once_all_memory_is_taken(cache: Cache) -> None:
    cache.fill("abcdefghijkl")
    answer = cache.state.reserve(cache.match("?"), 0, 4, ahead=4)
    assert isinstance(answer, Granted)
    assert len(answer.pages) == 8
    assert cache.texts() == {"abcdefgh"}


def test_a_few_more_blocks_go_for_a_long_run() -> None:
    """Twelve would do, but four of them are in the way of a whole group."""
    cache = Cache(48)
    for text in ("a" * 16, "b" * 16, "c" * 12):
        cache.fill(text)
    pages = cache.reserve(cache.match("?"), 16)
    assert runs_of(pages) == (Run(0, 16),)
    assert cache.texts() == {"b" * 16, "c" * 12}


def test_a_bound_of_blocks_go_for_a_long_run() -> None:
    """A held page in each group: no eviction makes one whole."""
    cache = Cache(48)
    for letter in "abc":
        cache.fill(letter * 16)
    for letter in "abc":
        cache.match(letter)
    assert len(cache.reserve(cache.match("?"), 16)) == 16
    assert cache.state.counters["blocks_evicted"] == 16 + 16


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
    assert (answer.plan, short.num_wanted, short.num_free) == ([], 8, 5)
    assert (short.num_locked, short.num_reserved, short.num_quarantined) == (3, 4, 2)
    assert short.num_pages == 16
    assert cache.texts() == {"abc", "xy"}


def test_a_reserve_of_more_pages_than_there_are_takes_no_memory() -> None:
    cache = Cache(num_pages=32, backed=False)
    cache.memory.capacity_bytes *= 2
    answer = cache.state.reserve(cache.match("?"), 0, 33)
    assert isinstance(answer, Short)
    assert backing(answer.plan) == []
    assert cache.arena.pool.num_backed == 0


# --- memory ahead ---


def ahead_of(cache: Cache) -> list[Run]:
    """What is backed ahead: of 512 pages 32, which are two groups."""
    runs = backing(cache.memory.back_ahead())
    for run in runs:
        cache.end_backing(run.first, run.count)
    return runs


def short_prompts(cache: Cache, letters: str) -> None:
    """Each leaves fifteen pages over of the group that it began."""
    for letter in letters:
        lease = cache.match(letter)
        answer = cache.state.reserve(lease, 0, 1, ahead=15)
        assert isinstance(answer, Granted)
        cache.commit(lease, letter, answer.pages[:1])
        cache.release(lease)


def test_no_memory_is_backed_ahead_of_the_first_reserve() -> None:
    assert ahead_of(Cache(512, backed=False)) == []


def test_free_pages_of_broken_groups_are_no_memory_ahead() -> None:
    cache = Cache(512, backed=False)
    cache.back(EXTENT)
    assert ahead_of(cache) == [Run(16, 16)]
    short_prompts(cache, "ab")
    assert ahead_of(cache) == [Run(32, 32)]
    assert ahead_of(cache) == []


def test_once_much_lies_in_broken_groups_no_memory_is_backed_ahead() -> None:
    cache = Cache(512, backed=False)
    cache.back(4 * EXTENT)
    short_prompts(cache, "abcd")
    assert ahead_of(cache) == []


# --- watermarks ---


def test_nothing_is_trimmed_up_to_the_high_watermark() -> None:
    cache = Cache(watermarks=(0.75, 0.5))
    cache.fill("abcdefghijkl")
    assert cache.memory.trim() == []
    cache.fill("x")
    assert len(freed(cache.memory.trim())) == 5
    assert cache.counts() == {"free": 8, "committed": 8}
    assert cache.memory.trim() == []


def test_trimming_takes_the_least_recent_first() -> None:
    cache = Cache(watermarks=(0.75, 0.5))
    for text in ("abcd", "mnop", "wxyz", "!"):
        cache.fill(text)
    cache.release(cache.match("abcd"))
    cache.memory.trim()
    assert cache.texts() == {"abcd", "wxy", "!"}
    assert cache.state.counters["evictions_watermark"] == 5


def test_trimming_stops_at_what_is_locked() -> None:
    cache = Cache(watermarks=(0.5, 0.0))
    cache.hold("abcdefgh")
    cache.fill("abcdefghij")
    assert len(freed(cache.memory.trim())) == 2
    assert cache.texts() == {"abcdefgh"}


def test_trimming_goes_by_age_over_all_layouts() -> None:
    cache = Cache(48, backed=False, watermarks=(0.5, 0.25))  # 192 bytes
    cache.back(16)
    wide = cache.add_wide(16)
    for text in ("abcde", "vwxyz"):  # 120 bytes
        cache.fill(text)
        cache.fill(text, salt="wide")
    plan = cache.memory.trim()
    gone = [(step.arena, len(step.pages)) for step in plan if isinstance(step, Freed)]
    assert gone == [(cache.arena.id, 5), (wide.id, 5), (cache.arena.id, 3)]


def test_memory_on_its_way_is_not_used() -> None:
    """What is only being backed holds nothing: blocks need not go for it."""
    cache = Cache(num_pages=64, backed=False, watermarks=(0.75, 0.5))
    cache.back(EXTENT)
    cache.fill("abcdefghijklmnop")
    cache.begin_backing(48)
    assert cache.memory.trim() == []


# --- quotas ---


def test_what_is_guaranteed_is_not_taken_for_others(cache: Cache) -> None:
    cache.tenant("mine", guaranteed_bytes=6 * LAYOUT.page_bytes)
    cache.fill("abcdefgh", salt="mine")
    cache.fill("rstuvwxy")
    assert isinstance(cache.state.reserve(cache.match("?"), 0, 11), Short)
    cache.reserve(cache.match("?"), 10)
    assert (cache.texts("mine"), cache.texts()) == ({"abcdef"}, set())


def test_what_is_guaranteed_goes_for_its_own_namespace(cache: Cache) -> None:
    cache.tenant("mine", guaranteed_bytes=16 * LAYOUT.page_bytes)
    cache.fill("abcdefgh", salt="mine")
    cache.reserve(cache.match("?", salt="mine"), 12)
    assert cache.texts("mine") == {"abcd"}


def test_a_guarantee_that_is_not_used_hinders_nobody(cache: Cache) -> None:
    cache.tenant("mine", guaranteed_bytes=8 * LAYOUT.page_bytes)
    cache.fill("abcdefgh")
    cache.fill("rstuvwxy", salt="other")
    cache.reserve(cache.match("?"), 12)
    assert (cache.texts(), cache.texts("other")) == (set(), {"rstu"})


def test_trimming_leaves_what_is_guaranteed() -> None:
    cache = Cache(watermarks=(0.5, 0.25))
    cache.tenant("mine", guaranteed_bytes=6 * LAYOUT.page_bytes)
    cache.fill("abcdefghijkl", salt="mine")
    cache.memory.trim()
    assert cache.texts("mine") == {"abcdef"}


def test_a_namespace_at_its_most_makes_room_for_itself(cache: Cache) -> None:
    cache.tenant("small", max_bytes=4 * LAYOUT.page_bytes)
    cache.fill("xy")
    cache.fill("abcd", salt="small")
    answer = cache.state.reserve(cache.match("?", salt="small"), 0, 3)
    assert isinstance(answer, Granted)
    assert len(freed(answer.plan)) == 3
    assert (cache.texts("small"), cache.texts()) == ({"a"}, {"xy"})


def test_a_namespace_at_its_most_with_all_of_it_held_falls_short(cache: Cache) -> None:
    cache.tenant("small", max_bytes=4 * LAYOUT.page_bytes)
    cache.hold("abc", salt="small")
    answer = cache.state.reserve(cache.match("?", salt="small"), 0, 2)
    assert isinstance(answer, Short)
    assert (answer.shortage.num_free, answer.shortage.max_pages) == (13, 4)
    assert answer.plan == []


def test_pages_ahead_stop_at_the_most_of_a_namespace(cache: Cache) -> None:
    space = cache.tenant("small", max_bytes=4 * LAYOUT.page_bytes)
    answer = cache.state.reserve(cache.match("?", salt="small"), 0, 2, ahead=10)
    assert isinstance(answer, Granted)
    assert len(answer.pages) == space.num_pages == 4


def test_a_namespace_that_falls_short_at_its_most_evicts_nothing(cache: Cache) -> None:
    cache.tenant("small", max_bytes=8 * LAYOUT.page_bytes)
    cache.fill("abcdef", salt="small")
    cache.hold("qrstuvwxyz")
    cache.match("ab", salt="small")
    answer = cache.state.reserve(cache.match("?", salt="small"), 0, 5)
    assert isinstance(answer, Short)
    assert (answer.plan, cache.texts("small")) == ([], {"abcdef"})


def test_a_lowered_quota_takes_what_may_go_at_once(cache: Cache) -> None:
    space = cache.tenant("small")
    cache.fill("abcdef", salt="small")
    held = cache.match("abcd", salt="small")
    plan: Plan = []
    cache.memory.set_quota(space, Quota(max_bytes=3 * LAYOUT.page_bytes), plan)
    assert (cache.texts("small"), len(freed(plan))) == ({"abcd"}, 2)
    cache.release(held)


def test_a_raised_quota_takes_nothing(cache: Cache) -> None:
    space = cache.tenant("small", max_bytes=3 * LAYOUT.page_bytes)
    cache.fill("abc", salt="small")
    plan: Plan = []
    cache.memory.set_quota(space, Quota(max_bytes=5 * LAYOUT.page_bytes), plan)
    assert (cache.texts("small"), plan) == ({"abc"}, [])
    cache.fill("abcde", salt="small")
    assert cache.texts("small") == {"abcde"}


# --- between layouts ---


def test_idle_memory_moves_to_the_layout_that_needs_it() -> None:
    cache = Cache(32)
    wide = cache.add_wide(16, backed=False)
    answer = cache.state.reserve(cache.match("?", salt="wide"), 0, 4)
    assert isinstance(answer, Short)
    assert answer.plan == [Unback(cache.arena.id, Run(0, 32)), Back(wide.id, Run(0, 16))]
    assert cache.counts() == {"unbacked": 32}


def test_the_coldest_blocks_of_other_layouts_go_where_one_has_nothing() -> None:
    cache = Cache(32)
    wide = cache.add_wide(16, backed=False)
    cache.fill("abcdefghijklmnop")
    answer = cache.state.reserve(cache.match("?", salt="wide"), 0, 4)
    assert kinds(answer.plan) == [Unback, Freed, Unback, Back]
    assert backing(answer.plan) == [Run(0, 16)]
    assert cache.state.counters["evictions_layout"] == 16
    assert (cache.texts(), wide.pool.num_backing) == (set(), 16)


def test_blocks_that_are_about_as_old_stay_in_their_layout() -> None:
    cache = Cache(64)
    cache.add_wide(32, backed=False)
    cache.fill("a" * 16 + "b" * 16)
    cache.fill_wide_extent()
    cache.let_time_pass()
    answer = cache.state.reserve(cache.match("?", salt="wide"), 0, 4)
    assert isinstance(answer, Granted)
    assert cache.texts() == {"a" * 16 + "b" * 16}


def test_blocks_that_are_much_older_make_way_for_another_layout() -> None:
    cache = Cache(64)
    wide = cache.add_wide(32, backed=False)
    cache.fill("a" * 16 + "b" * 16)
    cache.fill_wide_extent()
    cache.let_time_pass()
    cache.release(cache.match("w" * 16, salt="wide"))
    answer = cache.state.reserve(cache.match("?", salt="wide"), 0, 4)
    assert isinstance(answer, Short)
    assert (cache.texts(), wide.pool.num_backing) == (set(), 16)


def test_memory_of_a_fragmented_layout_is_not_given_up() -> None:
    """At one reserve half of each extent goes; another makes some whole."""
    cache = Cache(128)
    cache.add_wide(64, backed=False)
    letters = [chr(letter) for letter in range(200, 328)]
    for letter in letters:
        cache.fill(letter)
    for letter in letters[::2] + letters[1::2]:
        cache.release(cache.match(letter))
    answers = [cache.state.reserve(cache.match("?", lease=7, salt="wide"), 0, 4) for _ in range(2)]
    assert [isinstance(one, Short) and one.hopeless for one in answers] == [False, False]
    assert [backing(one.plan) for one in answers] == [[], [Run(0, 16)]]


def test_what_is_guaranteed_does_not_move() -> None:
    cache = Cache(32)
    cache.tenant("mine", guaranteed_bytes=32 * LAYOUT.page_bytes)
    cache.add_wide(16, backed=False)
    cache.fill("a" * 32, salt="mine")
    answer = cache.state.reserve(cache.match("?", salt="wide"), 0, 4)
    assert isinstance(answer, Short)
    assert answer.plan == []


def test_what_is_kept_of_a_page_counts_as_taken() -> None:
    cache = Cache(32)
    other = cache.state.add_arena(WIDE, TOKEN_BYTES, 32, EXTENT, record_bytes=WIDE.page_bytes)
    cache.memory.capacity_bytes += 2 * EXTENT * WIDE.page_bytes
    plan: Plan = []
    cache.memory.begin_backing(other, 32, plan)
    assert [step.run for step in plan if isinstance(step, Back)] == [Run(0, EXTENT)]
    assert cache.memory.taken_bytes == cache.memory.capacity_bytes


def test_short_prompts_use_the_whole_memory() -> None:
    """What each leaves over of its group is used before whole groups are made for the next."""
    cache = Cache(512)
    short_prompts(cache, "".join(map(chr, range(3 * 512))))
    assert cache.namespace.tree.num_blocks > 512 * 15 // 16 - EXTENT


# --- the counts ---


def test_pages_are_counted_over_all_layouts() -> None:
    cache = Cache(32)
    cache.add_wide(16, backed=False)
    cache.hold("abc")
    pages = {name: count for name, count in cache.memory.pages_by_state().items() if count}
    assert pages == {"unbacked": 16, "free": 29, "committed": 3}


def test_every_touch_is_later_than_all_before(cache: Cache) -> None:
    touches = [cache.memory.touch() for _ in range(3)]
    assert touches == sorted(set(touches))


# --- a smaller capacity ---


def test_what_is_more_than_the_capacity_goes_back() -> None:
    cache = Cache(num_pages=48)
    cache.fill("abc")
    cache.memory.capacity_bytes //= 3
    cache.memory.shrink(plan := [])
    assert [(step.run.first, step.run.count) for step in plan if isinstance(step, Unback)] == [
        (16, 32)
    ]
    assert cache.texts() == {"abc"}


def test_blocks_go_where_free_memory_is_not_enough() -> None:
    cache = Cache(num_pages=32)
    cache.fill("abcdefghijklmnop")
    cache.fill("ABCDEFGHIJKLMNOP")
    cache.memory.capacity_bytes //= 2
    cache.memory.shrink(plan := [])
    assert cache.texts() == {"ABCDEFGHIJKLMNOP"}
    assert len(freed(plan)) == cache.state.counters["evictions_capacity"] == 16
    assert cache.memory.taken_bytes == cache.memory.capacity_bytes


def test_what_is_locked_or_guaranteed_stays_whatever_the_capacity() -> None:
    cache = Cache(num_pages=32)
    cache.tenant("mine", guaranteed_bytes=64)
    cache.fill("abcdefghijklmnop", "mine")
    lease = cache.hold("ABCDEFGHIJKLMNOP")
    cache.memory.capacity_bytes = 0
    cache.memory.shrink(plan := [])
    assert plan == []
    cache.release(lease)
    cache.memory.shrink(plan)
    assert (cache.texts(), cache.texts("mine")) == (set(), {"abcdefghijklmnop"})


def test_within_the_capacity_nothing_goes() -> None:
    cache = Cache()
    cache.fill("abc")
    cache.memory.shrink(plan := [])
    assert plan == []
