"""Trees from what an earlier epoch left: what is whole comes back, nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.arena.page_table import NO_PARENT, FoundRecords, PageState
from kvd.cache.audit import check
from kvd.cache.radix import MEMORY
from kvd.cache.recovery import about, plant, read_store, read_table
from kvd.protocol.keys import BlockKey, chain
from tests.cache.conftest import LAYOUT, Cache, disk, packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.cache.memory import Namespace

RED, BLUE = "r" * 32, "b" * 32  # salts, which are the keys of their namespaces
DISK = 1
EXTRA = bytes(32)

Records = list[tuple[BlockKey, bytes]]
some_texts = st.lists(st.text("abc", min_size=1, max_size=6), max_size=6)


def found_in(records: NDArray[Any], sealed: list[bool] | None = None) -> FoundRecords:
    whole = np.array(sealed if sealed else [True] * len(records), np.bool_)
    return FoundRecords(np.arange(len(records), dtype=np.int64), records, whole)


def records_of(*blocks: tuple[int, int, str], num_words: int = 2) -> NDArray[Any]:
    """One committed record a page, of namespace 7: (parent's page, place in its path, letters)."""
    fields = [("generation", "<u8"), ("parent_generation", "<u8"), ("session", "<u8")]
    fields += [("parent", "<i8"), ("namespace", "<u4"), ("block", "<u4"), ("state", "<u2")]
    records = np.zeros(len(blocks), [*fields, ("rows", "<u4", (num_words,))])
    records["namespace"], records["state"] = 7, PageState.COMMITTED
    for page, (parent, block, letter) in enumerate(blocks):
        records[page]["parent"], records[page]["block"] = parent, block
        records[page]["rows"][: len(letter)] = [ord(one) for one in letter]
    return records


def stored(space: Namespace, tier: int) -> Records:
    """What a store has of a tree, as it says so."""
    records: Records = []
    for node in space.tree.nodes():
        rows, parent = bytes(node.tokens), node.parent
        assert parent is not None
        before = parent.last_key
        for place, key in enumerate(node.block_keys()):
            width = space.tree.block_bytes
            if node.is_in(tier):
                records.append((key, about(before, rows[place * width : (place + 1) * width])))
            before = key
    return records


def records_for(text: str, key: str = RED) -> Records:
    """The records of one path."""
    keys = chain(key.encode(), packed(text), LAYOUT.page_bytes)
    befores = [key.encode(), *keys]
    return [(own, about(befores[at], packed(text[at]))) for at, own in enumerate(keys)]


def fresh(*salts: str) -> tuple[Cache, dict[bytes, Namespace]]:
    cache = Cache(stores=[disk()])
    spaces = [cache.tenant(salt) for salt in salts or (RED,)]
    return cache, {space.key: space for space in spaces}


def planted(records: Records) -> tuple[set[str], list[bool]]:
    """What comes of the records of a store, and which of them count."""
    cache, spaces = fresh()
    added = plant(read_store(records, spaces), DISK)
    tree = spaces[RED.encode()].tree
    assert tree.counts[DISK] == tree.lrus[DISK].num_blocks == sum(added)
    return cache.texts(RED), added.tolist()


# --- stores ---


@settings(deadline=None, max_examples=50)
@given(red=some_texts, blue=some_texts, order=st.randoms(use_true_random=False))
def test_what_a_store_has_comes_back_in_whatever_order(
    red: list[str], blue: list[str], order: Any
) -> None:
    before = Cache(num_pages=80, stores=[store := disk()])
    for salt, texts in ((RED, red), (BLUE, blue)):
        before.tenant(salt)
        for text in texts:
            before.fill(text, salt)
    before.save(store)
    records = [one for space in before.state.namespaces.values() for one in stored(space, DISK)]
    order.shuffle(records)
    after, spaces = fresh(RED, BLUE)
    assert plant(read_store(records, spaces), DISK).all()
    assert (after.texts(RED), after.texts(BLUE)) == (before.texts(RED), before.texts(BLUE))
    assert sorted(one for space in spaces.values() for one in stored(space, DISK)) == sorted(
        records
    )


def test_an_empty_store_gives_nothing() -> None:
    assert planted([]) == (set(), [])


def test_what_follows_a_lost_record_is_left_out() -> None:
    a, _, c, d = records_for("abcd")
    assert planted([d, a, c]) == ({"a"}, [False, True, False])


def test_a_record_that_is_not_what_its_key_says_ends_the_chain() -> None:
    a, b, c = records_for("abc")
    forged = (b[0], about(a[0], packed("x")))
    assert planted([a, forged, c]) == ({"a"}, [True, False, False])


def test_a_record_too_short_or_too_long_is_left_out() -> None:
    a, b = records_for("ab")
    for rows in (b"", packed("b")[:3], packed("bb"), packed("b") + EXTRA):
        assert planted([a, (b[0], about(a[0], rows))]) == ({"a"}, [True, False])
    assert planted([(a[0], b"short")]) == (set(), [False])


def test_records_in_a_cycle_are_left_out() -> None:
    a, b = (BlockKey(bytes([number]) * 32) for number in (1, 2))
    cycle = [(a, about(b, packed("a"))), (b, about(a, packed("b")))]
    itself = [(a, about(a, packed("a")))]
    assert planted(cycle) == (set(), [False, False])
    assert planted(itself) == (set(), [False])


def test_records_of_an_unknown_namespace_are_left_out() -> None:
    assert planted([*records_for("ab", BLUE), *records_for("c")]) == ({"c"}, [False, False, True])


def test_a_record_told_twice_counts_once() -> None:
    texts, added = planted(records_for("ab") + records_for("ab")[1:])
    assert (texts, sum(added)) == ({"ab"}, 2)


def test_rows_with_extras_come_back() -> None:
    cache = Cache(stores=[disk()], row_bytes=36)
    space = cache.tenant(RED)
    rows = [packed("a") + EXTRA, packed("a") + bytes([1]) * 32]
    keys = [chain(RED.encode(), row, len(row))[0] for row in rows]
    forest = read_store(
        [(key, about(RED.encode(), row)) for key, row in zip(keys, rows, strict=True)],
        {RED.encode(): space},
    )
    assert plant(forest, DISK).all()
    assert [bytes(child.tokens) for child in space.tree.root.children] == rows


def test_a_store_adds_its_copies_to_what_memory_has() -> None:
    cache, spaces = fresh()
    space = spaces[RED.encode()]
    plant(read_table(found_in(records_of((-1, 0, "a"), (0, 1, "b"))), 4, {7: space}).forest, 0)
    assert plant(read_store(records_for("acd"), spaces), DISK).all()
    assert plant(read_store(records_for("abc"), spaces), DISK).tolist() == [False] * 3
    assert (cache.texts_in(MEMORY, RED), cache.texts_in(DISK, RED)) == ({"ab"}, {"acd"})
    assert [space.tree.lrus[tier].num_blocks for tier in (MEMORY, DISK)] == [2, 3]


# --- page tables ---


def test_a_table_of_no_pages_gives_nothing() -> None:
    found = read_table(found_in(records_of()), 4, {})
    assert plant(found.forest, MEMORY).tolist() == []
    assert found.quarantined == {}


@settings(deadline=None, max_examples=50)
@given(texts=some_texts)
def test_what_a_table_says_comes_back(texts: list[str]) -> None:
    names = sorted({text[:end] for text in texts for end in range(1, len(text) + 1)}, key=len)[::-1]
    pages = {name: page for page, name in enumerate(names)}
    blocks = [(pages.get(name[:-1], NO_PARENT), len(name) - 1, name[-1]) for name in names]
    cache, spaces = fresh()
    space = spaces[RED.encode()]
    found = read_table(found_in(records_of(*blocks)), 4, {7: space})
    assert plant(found.forest, MEMORY).all()
    ends = {name for name in names if not any(other[:-1] == name for other in names)}
    assert cache.texts(RED) == ends
    for name in names:
        place = space.tree.find(packed(name))
        assert place.total_blocks == len(name)
        assert space.tree.lock(place).path_pages()[-1] == pages[name]


@pytest.mark.parametrize(
    ("field", "value"),
    [("parent", 2), ("parent", 99), ("parent_generation", 5), ("block", 2), ("namespace", 8)],
)
def test_a_record_that_does_not_follow_its_parent_is_left_out(field: str, value: int) -> None:
    cache, spaces = fresh()
    space = spaces[RED.encode()]
    records = records_of((-1, 0, "a"), (0, 1, "b"), (1, 2, "c"))
    records[1][field] = value
    found = read_table(found_in(records), 4, {7: space, 8: space})
    assert plant(found.forest, MEMORY).tolist() == [True, False, False]
    assert cache.texts(RED) == {"a"}


def test_a_torn_record_is_in_doubt_and_what_follows_it_is_left_out() -> None:
    _, spaces = fresh()
    records = records_of((-1, 0, "a"), (0, 1, "b"), (1, 2, "c"))
    records["session"] = 3
    table = found_in(records, sealed=[True, False, True])
    found = read_table(table, 4, {7: spaces[RED.encode()]})
    assert plant(found.forest, MEMORY).tolist() == [True, False, False]
    assert {owner: pages.tolist() for owner, pages in found.quarantined.items()} == {0: [1]}


def test_what_a_session_may_still_write_is_quarantined_by_it() -> None:
    records = records_of(*[(-1, 0, "a")] * 5)
    records["state"] = [
        PageState.FREE,
        PageState.RESERVED,
        PageState.QUARANTINED,
        PageState.DETACHED,
        PageState.UNBACKED,
    ]
    records["session"] = [0, 4, 5, 0, 0]
    found = read_table(found_in(records), 4, {})
    assert not plant(found.forest, MEMORY).any()
    pages = {owner: pages.tolist() for owner, pages in found.quarantined.items()}
    assert pages == {0: [3], 4: [1], 5: [2]}


def test_blocks_of_a_namespace_that_is_not_known_are_nobodys() -> None:
    found = read_table(found_in(records_of((-1, 0, "a"))), 4, {})
    assert found.quarantined == {}
    assert plant(found.forest, MEMORY).tolist() == [False]


def test_a_table_has_rows_with_extras() -> None:
    cache = Cache(row_bytes=36)
    space = cache.tenant(RED)
    records = records_of((-1, 0, ""), num_words=10)
    records["rows"] = np.arange(10)
    found = read_table(found_in(records), 36, {7: space})
    assert plant(found.forest, MEMORY).all()
    assert bytes(space.tree.root.children[0].tokens) == np.arange(9, dtype="<u4").tobytes()


def test_what_only_a_store_has_is_not_copied_to_another() -> None:
    near, far = disk(), disk(tier=2)
    cache = Cache(stores=[near, far])
    space = cache.tenant(RED)
    assert plant(read_store(records_for("abc"), {RED.encode(): space}), 1).all()
    cache.state.stores.admit_all()
    check(cache.state)
    assert cache.state.stores.next_write(far, 1 << 20, []) is None
