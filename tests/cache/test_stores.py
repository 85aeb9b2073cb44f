"""Which blocks have copies in the tiers below memory, which go down, and which go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.cache.audit import check
from kvd.cache.plan import Forgotten, Plan, Short
from kvd.protocol.keys import chain
from tests.cache.conftest import FOURS, LAYOUT, WIDE, Cache, disk, forgotten, packed

if TYPE_CHECKING:
    from kvd.cache.stores import StoreState, Write
    from kvd.protocol.keys import BlockKey

BLOCK = LAYOUT.page_bytes


def keys(text: str) -> list[BlockKey]:
    """The keys of these blocks, from the root on."""
    return chain(b"", packed(text), BLOCK)


def letters(write: Write | None) -> str:
    """What is on its way, in its order."""
    assert write
    return "".join(chr(np.frombuffer(rows, "<u4")[0]) for rows in write.rows)


def next_letters(cache: Cache, store: StoreState, num_blocks: int = 64) -> str:
    return letters(cache.begin_write(store, num_blocks))


# --- what goes down ---


def test_what_waited_longest_goes_down_first() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("ab")
    cache.fill("cd")
    assert next_letters(cache, store, 2) == "ab"
    assert next_letters(cache, store, 2) == "cd"
    assert cache.state.stores.next_write(store, 64, []) is None


def test_a_write_says_of_each_block_what_it_is_and_what_it_follows() -> None:
    cache = Cache(stores=[store := disk()])
    lease = cache.hold("abc")
    write = cache.begin_write(store)
    assert write.pages.tolist() == lease.node.path_pages().tolist()
    assert write.keys == keys("abc")
    assert write.parents == [b"", *keys("ab")]
    assert write.rows == [packed("a"), packed("b"), packed("c")]
    assert write.num_bytes == 3 * BLOCK


def test_a_block_goes_down_behind_those_it_follows() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abcd")
    cache.match("ab")  # splits the node: its upper part waits as the later one
    assert next_letters(cache, store) == "abcd"


def test_what_follows_a_copy_goes_down_alone() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("ab")
    cache.save(store)
    cache.fill("abc")
    write = cache.begin_write(store)
    assert (letters(write), write.parents) == ("c", keys("ab")[1:])


def test_what_follows_a_copy_on_its_way_goes_down_behind_it() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("ab")
    first = cache.begin_write(store)
    cache.fill("abc")
    second = cache.begin_write(store)
    assert letters(second) == "c"
    assert [cache.end_write(write) for write in (first, second)] == [2, 1]
    assert cache.texts_in(1) == {"abc"}


def test_a_write_is_as_large_as_may_be() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abcde")
    cache.fill("xyz")
    assert [next_letters(cache, store, 3) for _ in range(3)] == ["abc", "dex", "yz"]
    check(cache.state)


def test_one_block_goes_down_however_little_may_be_written() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("ab")
    assert letters(cache.state.stores.next_write(store, 1, [])) == "a"


def test_layouts_go_down_in_turns() -> None:
    cache = Cache(num_pages=48, backed=False, stores=[store := disk()])
    cache.back(16)
    cache.add_wide(16)
    cache.fill("abcd")
    cache.fill("wxyz", "wide")
    layouts = [cache.begin_write(store, 2).arena.layout for _ in range(4)]
    assert layouts in ([LAYOUT, WIDE, LAYOUT, WIDE], [WIDE, LAYOUT, WIDE, LAYOUT])


def test_layouts_go_down_in_turns_to_each_store() -> None:
    cache = Cache(num_pages=48, backed=False, stores=[near := disk(), far := disk(tier=2)])
    cache.back(16)
    cache.add_wide(16)
    cache.fill("abcd")
    cache.fill("wxyz", "wide")
    writes = [cache.begin_write(store, 2) for store in (near, far, near, far)]
    assert {write.arena.layout for write in writes if write.store is near} == {LAYOUT, WIDE}
    assert {write.arena.layout for write in writes if write.store is far} == {LAYOUT, WIDE}


def test_namespaces_go_down_in_turns() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abcd")
    cache.fill("wxyz", "other")
    assert sorted(next_letters(cache, store, 2) for _ in range(2)) == ["ab", "wx"]


def test_a_layout_without_records_waits() -> None:
    cache = Cache(stores=[store := disk()])
    del store.record_bytes[LAYOUT]
    cache.fill("a")
    assert cache.state.stores.next_write(store, 64, []) is None
    assert cache.state.stores.num_unsaved_bytes(store) == BLOCK


def test_what_goes_down_is_locked_until_it_is_there() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("ab")
    write = cache.begin_write(store)
    assert cache.namespace.lru.coldest() is None
    cache.end_write(write)
    assert cache.namespace.lru.num_blocks == 2


def test_pages_held_by_a_write_are_worth_waiting_for() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abcdefghijklmnop")
    write = cache.begin_write(store)
    lease = cache.match("x")
    short = cache.state.reserve(lease, 0, 1)
    assert isinstance(short, Short)
    assert not short.hopeless
    cache.end_write(write)
    assert len(cache.reserve(lease, 1)) == 1


def test_a_copy_is_no_touch() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("a")
    cache.fill("b")
    cache.end_write(cache.begin_write(store, 1))
    cache.evict(1)
    assert cache.texts_in(0) == {"b"}


def test_a_release_while_a_copy_is_under_way_is_a_touch() -> None:
    cache = Cache(stores=[store := disk()])
    lease = cache.hold("a")
    write = cache.begin_write(store)
    cache.fill("b")
    cache.release(lease)
    cache.end_write(write)
    cache.evict(1)
    assert cache.texts_in(0) == {"a"}


def test_what_made_room_for_later_copies_is_told_of_while_memory_has_it() -> None:
    cache = Cache(stores=[near := disk(2), far := disk(3, tier=2)])
    for letter in "abcd":
        cache.fill(letter)
        cache.save(near)
        cache.save(far)
    assert [cache.state.stores.num_without_room([each]) for each in (near, far)] == [2, 1]
    assert cache.state.stores.num_without_room([near, far]) == 1
    assert cache.state.stores.num_unsaved_bytes(near) == 2 * BLOCK
    cache.evict(1)
    assert cache.state.stores.num_without_room([near, far]) == 0


def test_what_made_room_waits_again_when_it_is_used_again() -> None:
    cache = Cache(stores=[store := disk(1)])
    for letter in "ab":
        cache.fill(letter)
        cache.save(store)
    cache.release(cache.match("a"))
    assert cache.state.stores.num_without_room([store]) == 0
    assert next_letters(cache, store) == "a"


def test_of_a_write_whose_ancestor_went_meanwhile_the_store_keeps_nothing() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("ab")
    cache.save(store)
    cache.fill("abcd")
    write = cache.begin_write(store)
    plan: Plan = []
    cache.state.remove_copy(cache.namespace, packed("a"), store.tier)
    assert cache.state.stores.end_write(write, plan, saved=True) == 0
    assert forgotten(plan) == [Forgotten(1, LAYOUT, keys("abcd")[:1:-1])]
    assert next_letters(cache, store) == "abcd"


# --- admission ---


def test_each_block_gets_a_copy_in_each_store() -> None:
    near, far = disk(), disk(tier=2)
    cache = Cache(stores=[near, far])
    cache.fill("ab")
    cache.save(far)
    assert (cache.texts_in(1), cache.texts_in(2)) == (set(), {"ab"})
    cache.save(near)
    assert cache.texts_in(1) == cache.texts_in(2) == {"ab"}


def test_a_store_for_what_is_reused_takes_what_is_matched_again() -> None:
    cache = Cache(stores=[store := disk(admission="reused")])
    cache.fill("abc")
    cache.fill("xyz")
    assert cache.state.stores.num_unsaved_bytes(store) == 0
    cache.release(cache.match("ab"))
    assert next_letters(cache, store) == "ab"


def test_what_was_not_reused_waits_not_with_what_was() -> None:
    cache = Cache(stores=[store := disk(admission="reused")])
    lease = cache.hold("abcd")
    cache.release(cache.match("ab"))
    cache.release(lease)
    assert next_letters(cache, store) == "ab"


def test_what_follows_a_copy_has_none_by_being_used_with_it() -> None:
    cache = Cache(stores=[store := disk(admission="reused")])
    cache.fill("ab")
    cache.release(cache.match("ab"))
    cache.save(store)
    cache.fill("abc")
    assert (cache.texts_in(0), cache.texts_in(1)) == ({"abc"}, {"ab"})


def test_who_takes_all_from_now_on_takes_what_is_in_memory() -> None:
    cache = Cache(stores=[store := disk(admission="reused")])
    cache.fill("abc")
    cache.state.stores.set_admission("all")
    assert next_letters(cache, store) == "abc"


def test_who_takes_what_is_reused_from_now_on_takes_no_more_that_is_new() -> None:
    cache = Cache(stores=[store := disk()])
    cache.state.stores.set_admission("reused")
    cache.fill("abc")
    assert cache.state.stores.num_unsaved_bytes(store) == 0


def test_the_same_admission_again_brings_nothing_back_that_was_let_go() -> None:
    cache = Cache(16, stores=[store := disk(num_blocks=2)])
    cache.fill("abcd")
    cache.save(store)
    waiting = cache.state.stores.num_unsaved_bytes(store)
    unsaved = dict(cache.namespace.tree.unsaved[store.tier])
    cache.state.stores.set_admission("all")
    assert cache.namespace.tree.unsaved[store.tier] == unsaved
    assert cache.state.stores.num_unsaved_bytes(store) == waiting


# --- how it ends ---


def test_a_copy_that_failed_goes_down_again() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("ab")
    assert cache.end_write(cache.begin_write(store), saved=False) == 0
    assert (cache.texts_in(1), cache.state.stores.used_bytes(store)) == (set(), 0)
    assert cache.end_write(cache.begin_write(store)) == 2
    assert cache.state.counters["blocks_demoted"] == 2


def test_what_follows_a_copy_that_failed_has_none_either() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abcd")
    first, second = cache.begin_write(store, 2), cache.begin_write(store, 2)
    cache.end_write(first, saved=False)
    assert cache.end_write(second) == 0
    assert next_letters(cache, store) == "abcd"


def test_what_waits_still_waits_when_a_match_ends_in_it() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abcd")
    lease = cache.match("ab")
    cache.evict(2)
    assert next_letters(cache, store) == "ab"
    cache.release(lease)


def test_a_match_into_what_is_on_its_way_changes_nothing() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abcd")
    write = cache.begin_write(store)
    lease = cache.match("ab")
    assert cache.state.stores.next_write(store, 64, []) is None
    assert cache.end_write(write) == 4
    check(cache.state)
    cache.release(lease)
    assert cache.texts_in(1) == {"abcd"}


def test_what_is_dropped_on_its_way_is_no_copy() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abc")
    write = cache.begin_write(store)
    answer = cache.state.drop(cache.namespace, packed("abc"), 1)
    assert (answer.num_blocks, answer.num_detached) == ([2, 0], 2)
    assert forgotten(answer.plan) == [Forgotten(1, LAYOUT, keys("abc")[:0:-1])]
    assert cache.end_write(write) == 1
    assert (cache.texts(), cache.texts_in(1)) == ({"a"}, {"a"})
    assert cache.counts() == {"free": 15, "committed": 1}


def test_a_drop_makes_every_store_forget_the_last_ones_first() -> None:
    cache = Cache(stores=[near := disk(), disk(tier=2)])
    cache.store("ab", near)
    plan = cache.state.drop(cache.namespace, b"").plan
    steps = [Forgotten(tier, LAYOUT, keys("ab")[::-1]) for tier in (1, 2)]
    assert forgotten(plan) == steps
    assert cache.texts() == set()


# --- what goes ---


def test_a_full_store_forgets_the_least_recent_leaf_first() -> None:
    cache = Cache(stores=[store := disk(num_blocks=4)])
    cache.fill("ab")
    cache.fill("cd")
    cache.save(store)
    cache.fill("x")
    plan: Plan = []
    cache.state.stores.next_write(store, 64, plan)
    assert plan == [Forgotten(1, LAYOUT, keys("ab")[1:])]
    assert cache.texts_in(1) == {"a", "cd"}
    assert cache.state.counters["blocks_evicted_stored"] == 1


def test_a_store_goes_by_its_own_leaves() -> None:
    """Memory has blocks behind it, so it is no leaf there."""
    cache = Cache(stores=[store := disk(num_blocks=1)])
    cache.fill("a")
    cache.save(store)
    cache.fill("ab")
    cache.fill("x")
    plan: Plan = []
    cache.namespace.tree.unsaved[1].pop(cache.namespace.tree.find(packed("ab")).node)
    cache.state.stores.next_write(store, 64, plan)
    assert plan == [Forgotten(1, LAYOUT, keys("a"))]


def test_what_is_locked_stays_in_a_store() -> None:
    cache = Cache(stores=[store := disk(num_blocks=2)])
    cache.fill("a")
    cache.fill("b")
    cache.save(store)
    lease = cache.match("a")
    cache.fill("xy")
    assert next_letters(cache, store) == "x"
    assert cache.texts_in(1) == {"a"}
    cache.release(lease)


def test_a_store_takes_no_more_than_it_may_hold_with_what_is_on_its_way() -> None:
    cache = Cache(stores=[store := disk(num_blocks=3)])
    cache.fill("ab")
    cache.fill("cd")
    assert next_letters(cache, store, 2) == "ab"
    assert next_letters(cache, store, 2) == "c"
    assert cache.state.stores.used_bytes(store) == store.usable_bytes
    assert cache.state.stores.next_write(store, 64, []) is None


def test_a_layout_whose_room_is_taken_makes_room_among_its_own() -> None:
    cache = Cache(num_pages=48, backed=False, stores=[store := disk(num_blocks=8)])
    cache.back(16)
    cache.add_wide(16)
    cache.fill("ab")
    cache.fill("xy", "wide")
    cache.save(store)
    store.most_bytes[WIDE] = 2 * WIDE.page_bytes
    assert cache.state.stores.cramped(store) == set()
    cache.fill("z", "wide")
    assert cache.state.stores.cramped(store) == {WIDE}
    assert next_letters(cache, store) == "z"
    assert (cache.texts_in(1), cache.texts_in(1, "wide")) == ({"ab"}, {"x"})
    assert cache.state.stores.used_bytes(store, WIDE) == store.most_bytes[WIDE]


def test_a_store_that_gives_up_a_layout_gets_again_what_memory_has_of_it() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("ab")
    cache.fill("abc")
    cache.save(store)
    cache.fill("x")
    cache.state.forget_copies(LAYOUT, 1)
    assert cache.texts_in(1) == set()
    check(cache.state)
    assert next_letters(cache, store) == "xabc"


def test_a_block_whose_parent_left_the_store_brings_it_along() -> None:
    cache = Cache(stores=[store := disk(num_blocks=4)])
    cache.fill("a")
    cache.save(store)
    cache.fill("ab")
    store.usable_bytes = 0
    cache.state.stores.trim(store, [])
    assert cache.texts_in(1) == set()
    store.usable_bytes = 4 * BLOCK
    assert cache.begin_write(store, 1).keys == keys("a")
    assert cache.begin_write(store, 1).keys == keys("ab")[1:]


def test_a_store_does_not_forget_what_the_next_block_follows() -> None:
    """Else a path longer than the store would go down again and again."""
    cache = Cache(stores=[store := disk(num_blocks=2)])
    cache.fill("abc")
    cache.end_write(cache.begin_write(store))
    plan: Plan = []
    assert cache.state.stores.next_write(store, 64, plan) is None
    assert (plan, cache.texts_in(1)) == ([], {"ab"})


def test_two_layouts_do_not_take_a_store_from_each_other_for_ever() -> None:
    cache = Cache(num_pages=48, backed=False, stores=[store := disk(num_blocks=4)])
    cache.back(16)
    cache.add_wide(16)
    cache.fill("abcdef")
    cache.fill("wxyz", "wide")
    num_blocks = 0
    while (write := cache.state.stores.next_write(store, 1, [])) and num_blocks < 10:
        num_blocks += cache.end_write(write)
    assert num_blocks < 10


def test_the_least_recent_copy_of_all_namespaces_goes_first() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("xy", "other")
    cache.fill("ab")
    cache.save(store)
    store.usable_bytes = 3 * BLOCK
    cache.state.stores.trim(store, [])
    assert (cache.texts_in(1), cache.texts_in(1, "other")) == ({"ab"}, {"x"})


def test_a_smaller_store_lets_go_what_is_too_much() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abcd")
    cache.save(store)
    store.usable_bytes = BLOCK
    plan: Plan = []
    cache.state.stores.trim(store, plan)
    assert plan == [Forgotten(1, LAYOUT, keys("abcd")[:0:-1])]
    assert (cache.texts(), cache.texts_in(1)) == ({"abcd"}, {"a"})
    assert cache.state.stores.num_blocks(store) == 1


# --- what memory evicts ---


def test_what_memory_evicts_without_a_copy_is_counted() -> None:
    cache = Cache(stores=[disk()])
    cache.fill("abcdefghijklmnop")
    cache.fill("xyz")
    assert cache.state.counters["pressure_drops"] == 3
    assert cache.texts() == {"abcdefghijklm", "xyz"}


def test_what_memory_evicts_with_a_copy_is_not_lost() -> None:
    cache = Cache(stores=[store := disk()])
    cache.fill("abcdefghijklmnop")
    cache.save(store)
    cache.fill("xyz")
    assert cache.state.counters["pressure_drops"] == 0
    assert cache.texts() == {"abcdefghijklmnop", "xyz"}
    found = cache.namespace.tree.find(packed("abcdefghijklmnop"), anywhere=True)
    assert found.total_blocks == 16
    lacking = cache.lacking("abcdefghijklmnop")
    assert lacking is not None
    assert (lacking.tier, lacking.keys) == (1, keys("abcdefghijklmnop")[13:])


def test_what_no_tier_has_any_more_is_no_more() -> None:
    cache = Cache(stores=[store := disk()])
    cache.store("ab", store)
    store.usable_bytes = 0
    cache.state.stores.trim(store, [])
    assert (cache.texts(), cache.namespace.tree.num_nodes) == (set(), 0)


# --- what comes up ---


def test_nothing_lacks_where_memory_has_all_or_nobody_has_it() -> None:
    cache = Cache(stores=[store := disk()])
    cache.store("ab", store)
    cache.fill("x")
    assert cache.lacking("x") is cache.lacking("xyz") is cache.lacking("y") is None
    assert Cache().lacking("a") is None


def test_what_lacks_is_read_of_the_fastest_store_that_has_it() -> None:
    near, far = disk(), disk(tier=2)
    cache = Cache(stores=[near, far])
    cache.fill("ab")
    cache.save(far)
    cache.fill("abcd")
    cache.save(near)
    cache.save(far)
    near.usable_bytes = 2 * BLOCK
    cache.state.stores.trim(near, [])
    cache.evict(4)
    first = cache.lacking("abcd")
    cache.fill("ab")
    second = cache.lacking("abcx")
    assert first is not None
    assert second is not None
    assert (first.tier, first.keys) == (1, keys("ab"))
    assert (second.tier, second.keys) == (2, keys("abc")[2:])


def test_nothing_is_read_of_a_store_that_fails() -> None:
    cache = Cache(stores=[store := disk()])
    cache.store("ab", store)
    store.may_read = False
    assert cache.lacking("ab") is None


def test_what_lacks_ends_where_the_tokens_do() -> None:
    cache = Cache(stores=[store := disk()])
    cache.store("abcd", store)
    lacking = cache.lacking("abx")
    assert lacking is not None
    assert lacking.keys == keys("ab")


def test_a_tail_is_a_block_in_memory() -> None:
    cache = Cache(layout=FOURS, stores=[store := disk()])
    cache.fill("abcd")
    cache.save(store)
    cache.evict(1)
    cache.fill("abyz")
    tail = cache.match("abcx", exact_tail=True).tail
    assert tail is not None
    assert tail.num_tokens == 2


def test_a_commit_gives_pages_to_what_only_a_store_has() -> None:
    cache = Cache(stores=[store := disk()])
    cache.store("abcd", store)
    lease = cache.match("")
    pages = cache.commit(lease, "abx")
    check(cache.state)
    assert lease.node.path_pages().tolist() == pages
    assert (cache.texts_in(0), cache.texts_in(1)) == ({"abx"}, {"abcd"})
    assert next_letters(cache, store) == "x"


def test_what_came_up_goes_again_when_it_is_the_least_recent() -> None:
    cache = Cache(stores=[store := disk()])
    cache.store("ab", store)
    cache.fill("x")
    cache.fill("ab")
    cache.evict(1)
    assert (cache.texts_in(0), cache.texts_in(1)) == ({"ab"}, {"ab"})


def test_a_namespace_that_is_forgotten_leaves_no_copy() -> None:
    cache = Cache(stores=[store := disk()], namespaces=1)
    cache.store("ab", store)
    cache.state.close_namespace(1, cache.namespace)
    plan = cache.state.make_place(for_arena=False)
    assert forgotten(plan) == [Forgotten(1, LAYOUT, keys("ab")[::-1])]
    assert cache.state.stores.used_bytes(store) == 0
