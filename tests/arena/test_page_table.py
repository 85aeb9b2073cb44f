"""One record a page: what each step writes, and that half a record is seen as such."""

from __future__ import annotations

import errno
import mmap
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvd.arena.files import boot_id
from kvd.arena.page_table import (
    HEADER_BYTES,
    MAGIC,
    NO_PARENT,
    PageState,
    PageTable,
    PageTableFile,
    record_bytes,
    record_dtype,
    table_bytes,
)
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run

if TYPE_CHECKING:
    from tests.arena.conftest import Child

LAYOUT = Layout(1, 1, 8, "float16", block_size=4)
NUM_PAGES = 8
ROW_BYTES = 4
BLOCK_BYTES = 16
EXTENT = 4


@pytest.fixture
def memory() -> bytearray:
    return bytearray(table_bytes(LAYOUT, ROW_BYTES, NUM_PAGES))


@pytest.fixture
def table(memory: bytearray) -> PageTable:
    return PageTable(LAYOUT, ROW_BYTES, NUM_PAGES, memoryview(memory))


def packed(*tokens: int) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def fields(table: PageTable, page: int, *names: str) -> list[Any]:
    return [table.records[name][page].tolist() for name in names]


# --- what each step writes ---


def test_a_new_table_says_that_nothing_is_backed(table: PageTable) -> None:
    assert (table.records["state"] == PageState.UNBACKED).all()
    assert table.sealed(table.records).all()


def test_a_record_is_whole_words() -> None:
    for block_size in (1, 2, 3, 4, 16, 17):
        assert record_dtype(block_size, ROW_BYTES).itemsize % 8 == 0


def test_a_freed_page_is_nobodys(table: PageTable) -> None:
    table.free([2, 3])
    assert fields(table, 3, "state", "session", "generation", "parent") == [
        PageState.FREE,
        0,
        0,
        NO_PARENT,
    ]
    assert fields(table, 4, "state") == [PageState.UNBACKED]


def test_a_reserved_page_has_a_session_and_another_generation(table: PageTable) -> None:
    table.free([2, 3])
    table.reserve([3], session=77)
    assert fields(table, 3, "state", "session", "generation") == [PageState.RESERVED, 77, 1]
    assert fields(table, 2, "state", "session", "generation") == [PageState.FREE, 0, 0]


def test_a_committed_page_has_its_rows_and_no_session(table: PageTable) -> None:
    table.reserve([5], session=77)
    table.commit([5], NO_PARENT, 0, packed(1, 2, 3, 4), namespace=9, group=2)
    names = ("state", "session", "namespace", "group", "block", "num_tokens", "rows")
    assert fields(table, 5, *names) == [PageState.COMMITTED, 0, 9, 2, 0, 4, [*packed(1, 2, 3, 4)]]
    assert fields(table, 5, "parent", "parent_generation", "generation") == [NO_PARENT, 0, 1]


def test_blocks_committed_together_are_each_others_parents(table: PageTable) -> None:
    table.reserve([6, 2, 4], session=1)
    table.reserve([2], session=1)
    table.commit([6, 2, 4], NO_PARENT, 0, packed(*range(12)), namespace=1)
    assert [fields(table, page, "parent", "block") for page in (6, 2, 4)] == [
        [NO_PARENT, 0],
        [6, 1],
        [2, 2],
    ]
    assert [fields(table, page, "parent_generation")[0] for page in (6, 2, 4)] == [0, 1, 2]
    assert fields(table, 4, "rows") == [[*packed(8, 9, 10, 11)]]


def test_a_block_names_its_parent_by_page_and_generation(table: PageTable) -> None:
    for _ in range(3):
        table.reserve([1], session=1)
    table.commit([1], NO_PARENT, 0, packed(1, 1, 1, 1), namespace=1)
    table.reserve([0], session=1)
    table.commit([0], 1, 1, packed(2, 2, 2, 2), namespace=1)
    assert fields(table, 0, "parent", "parent_generation", "block") == [1, 3, 1]


def test_a_freed_block_leaves_nothing_but_its_generation(table: PageTable) -> None:
    table.reserve([5], session=77)
    table.commit([5], NO_PARENT, 0, packed(1, 2, 3, 4), namespace=9, group=2)
    table.free([5])
    assert fields(table, 5, "state", "generation", "parent") == [PageState.FREE, 1, NO_PARENT]
    names = ("session", "namespace", "group", "block", "num_tokens", "checksum")
    assert fields(table, 5, *names) == [0] * len(names)
    assert fields(table, 5, "rows") == [[0] * BLOCK_BYTES]


def test_a_detached_block_leaves_nothing_but_its_generation(table: PageTable) -> None:
    table.reserve([5], session=77)
    table.commit([5], NO_PARENT, 0, packed(1, 2, 3, 4), namespace=9, group=2)
    table.detach([5])
    assert fields(table, 5, "state", "generation", "parent") == [PageState.DETACHED, 1, NO_PARENT]
    names = ("session", "namespace", "group", "block", "num_tokens", "checksum")
    assert fields(table, 5, *names) == [0] * len(names)
    assert fields(table, 5, "rows") == [[0] * BLOCK_BYTES]


def test_a_quarantined_page_keeps_its_session(table: PageTable) -> None:
    table.reserve([5], session=77)
    table.quarantine([5])
    assert fields(table, 5, "state", "session", "generation") == [PageState.QUARANTINED, 77, 1]


def test_each_turn_of_a_page_has_its_own_generation(table: PageTable) -> None:
    generations = []
    for _ in range(3):
        table.reserve([0], session=1)
        generations += fields(table, 0, "generation")
        table.free([0])
        generations += fields(table, 0, "generation")
    assert generations == [1, 1, 2, 2, 3, 3]


def test_an_unbacked_page_is_as_new(table: PageTable, memory: bytearray) -> None:
    table.reserve([0, 1], session=1)
    table.unback([0, 1])
    assert memory == bytes(len(memory))


def test_every_step_takes_pages_as_an_array_too(table: PageTable) -> None:
    pages = np.array([3, 1], np.int64)
    for step in (
        table.free,
        lambda p: table.reserve(p, 1),
        table.detach,
        table.quarantine,
        table.unback,
    ):
        step(pages)
        assert table.sealed(table.records).all()


# --- the head ---


def test_a_new_table_has_not_begun(table: PageTable) -> None:
    assert not table.has_begun(EXTENT)


def test_the_head_says_whose_table_it_is(table: PageTable, memory: bytearray) -> None:
    table.begin(5, EXTENT)
    assert bytes(memory[:8]) == MAGIC
    assert np.frombuffer(memory, "<u8", 4, offset=8).tolist() == [5, NUM_PAGES, EXTENT, ROW_BYTES]
    assert bytes(memory[40:56]) == boot_id()
    assert bytes(memory[88:HEADER_BYTES]) == bytes(HEADER_BYTES - 88)


def test_a_table_goes_on_in_another_epoch(table: PageTable, memory: bytearray) -> None:
    table.begin(5, EXTENT)
    table.begin_epoch(6)
    assert table.has_begun(EXTENT)
    assert np.frombuffer(memory, "<u8", 1, offset=8) == 6


def test_every_byte_of_the_head_but_the_epoch_counts(table: PageTable, memory: bytearray) -> None:
    table.begin(5, EXTENT)
    for byte in (*range(8), *range(16, 88)):
        memory[byte] ^= 1
        assert not table.has_begun(EXTENT), byte
        memory[byte] ^= 1
    assert table.has_begun(EXTENT)


def test_the_head_knows_layout_rows_and_extents(table: PageTable, memory: bytearray) -> None:
    table.begin(5, EXTENT)
    other = Layout(1, 2, 4, "float16", block_size=4)
    assert not PageTable(other, ROW_BYTES, NUM_PAGES, memoryview(memory)).has_begun(EXTENT)
    assert not PageTable(LAYOUT, 3, NUM_PAGES, memoryview(memory)).has_begun(EXTENT)
    assert not PageTable(LAYOUT, ROW_BYTES, NUM_PAGES - 1, memoryview(memory)).has_begun(EXTENT)
    assert not table.has_begun(2 * EXTENT)


# --- checksums ---


def test_a_block_has_no_checksum_until_it_is_noted(table: PageTable) -> None:
    table.reserve([2, 3], 7)
    table.commit([2, 3], NO_PARENT, 0, bytes(2 * BLOCK_BYTES), 1)
    assert table.checksums([2, 3]).tolist() == [0, 0]
    sums = np.array([5, (1 << 64) - 1], np.uint64)
    assert table.add_checksums([2, 3], table.generations([2, 3]), sums).tolist() == [True, True]
    assert table.checksums([3, 2]).tolist() == [(1 << 64) - 1, 5]
    assert table.sealed(table.records).all()


def test_a_checksum_comes_too_late_for_a_block_that_is_gone(table: PageTable) -> None:
    table.reserve([1, 2, 3], 7)
    table.commit([1, 2, 3], NO_PARENT, 0, bytes(3 * BLOCK_BYTES), 1)
    generations = table.generations([1, 2, 3])
    table.detach([1])
    table.free([2])
    table.reserve([2], 7)
    table.commit([2], NO_PARENT, 0, bytes(BLOCK_BYTES), 1)
    sums = np.array([4, 5, 6], np.uint64)
    assert table.add_checksums([1, 2, 3], generations, sums).tolist() == [False, False, True]
    assert table.checksums([1, 2, 3]).tolist() == [0, 0, 6]
    assert table.sealed(table.records).all()


def test_a_checksum_goes_with_its_block(table: PageTable) -> None:
    table.reserve([2], 7)
    table.commit([2], NO_PARENT, 0, bytes(BLOCK_BYTES), 1)
    table.add_checksums([2], table.generations([2]), np.array([5], np.uint64))
    table.free([2])
    assert table.checksums([2]).tolist() == [0]


# --- half a record ---

Step = Callable[[PageTable], None]


def free(table: PageTable) -> None:
    table.free([3])


def reserve(table: PageTable) -> None:
    table.reserve([3], (1 << 40) + 7)


def commit(table: PageTable) -> None:
    table.reserve([1], 7)
    table.commit([1], NO_PARENT, 0, packed(9, 8, 7, 6), namespace=4)
    table.commit([3], 1, 1, packed(1, 2, 3, 4), namespace=4, group=1)


def add_sum(table: PageTable) -> None:
    table.add_checksums([3], table.generations([3]), np.array([77], np.uint64))


def detach(table: PageTable) -> None:
    table.detach([3])


def quarantine(table: PageTable) -> None:
    table.quarantine([3])


def unback(table: PageTable) -> None:
    table.unback([3])


LIVES: list[list[Step]] = [
    [free],
    [free, reserve],
    [free, reserve, commit],
    [free, reserve, commit, add_sum],
    [free, reserve, commit, add_sum, detach],
    [free, reserve, commit, free],
    [free, reserve, commit, free, reserve],
    [free, reserve, commit, detach],
    [free, reserve, commit, detach, free],
    [free, reserve, free],
    [free, reserve, quarantine],
    [free, reserve, quarantine, free],
    [free, reserve, commit, free, unback],
]


def name(life: object) -> str:
    assert isinstance(life, list)
    return ", ".join(step.__name__ for step in life)


@pytest.mark.parametrize("reverse", [False, True], ids=["from the start", "from the end"])
@pytest.mark.parametrize("life", LIVES, ids=name)
def test_a_record_of_which_some_words_were_written_is_seen(
    table: PageTable, memory: bytearray, life: list[Step], reverse: bool
) -> None:
    """The last step of a page's life was cut off between two words."""
    size = record_dtype(LAYOUT.block_size, ROW_BYTES).itemsize
    place = slice(HEADER_BYTES + 3 * size, HEADER_BYTES + 4 * size)
    for step in life[:-1]:
        step(table)
    old = bytes(memory[place])
    life[-1](table)
    new = bytes(memory[place])
    assert old != new
    if reverse:
        old, new = new, old
    for words in range(size // 8 + 1):
        torn = new[: words * 8] + old[words * 8 :]
        memory[place] = torn
        assert table.sealed(table.records)[3] == (torn in (old, new)), f"the first {words} words"
        assert np.delete(table.sealed(table.records), 3).all()


@pytest.mark.parametrize(("block_size", "row_bytes"), [(1, 4), (3, 4), (4, 4), (16, 4), (3, 36)])
def test_every_bit_of_a_record_counts(block_size: int, row_bytes: int) -> None:
    layout = Layout(1, 1, 8, "float16", block_size=block_size)
    memory = bytearray(table_bytes(layout, row_bytes, 1))
    table = PageTable(layout, row_bytes, 1, memoryview(memory))
    table.reserve([0], 7)
    table.commit([0], NO_PARENT, 0, bytes(block_size * row_bytes), namespace=4)
    for byte in range(HEADER_BYTES, len(memory)):
        for bit in range(8):
            memory[byte] ^= 1 << bit
            assert not table.sealed(table.records)[0], (byte - HEADER_BYTES, bit)
            memory[byte] ^= 1 << bit
    assert table.sealed(table.records)[0]


def test_two_records_that_changed_places_in_their_words_are_seen(
    table: PageTable, memory: bytearray
) -> None:
    """The seal is no plain sum: it knows which word stands where."""
    table.reserve([3], 7)
    words = np.frombuffer(memory, "<u8", offset=HEADER_BYTES).reshape(NUM_PAGES, -1)
    words[3, [1, 2]] = words[3, [2, 1]]
    assert not table.sealed(table.records)[3]


# --- on a file ---


def test_a_table_has_its_length_and_belongs_to_the_daemon_alone(shm: Path) -> None:
    PageTableFile(shm / "table", LAYOUT, ROW_BYTES, NUM_PAGES)
    found = (shm / "table").stat()
    assert found.st_size == table_bytes(LAYOUT, ROW_BYTES, NUM_PAGES)
    assert found.st_mode & 0o777 == 0o600


def test_records_have_memory_as_their_pages_have(shm: Path) -> None:
    file = PageTableFile(shm / "table", LAYOUT, ROW_BYTES, 4096)
    head = (shm / "table").stat().st_blocks
    file.back(Run(0, 1024))
    backed = (shm / "table").stat().st_blocks
    assert (backed - head) * 512 >= 1024 * record_bytes(LAYOUT, ROW_BYTES)
    file.table.free(range(1024))
    file.table.unback(range(1024))
    file.unback(Run(0, 1024))
    assert (shm / "table").stat().st_blocks - head < (backed - head) // 8
    assert not file.table.records["state"][:1024].any()


def test_a_note_touches_no_record_that_has_no_memory(shm: Path) -> None:
    file = PageTableFile(shm / "table", LAYOUT, ROW_BYTES, 4096)
    file.back(Run(0, 64))
    before = (shm / "table").stat().st_blocks
    file.table.free(range(64))
    file.table.reserve(range(8), 7)
    file.table.commit(range(8), NO_PARENT, 0, bytes(8 * BLOCK_BYTES), 1)
    assert (shm / "table").stat().st_blocks == before


def test_taking_memory_back_leaves_the_records_beside_it(shm: Path) -> None:
    file = PageTableFile(shm / "table", LAYOUT, ROW_BYTES, 4096)
    file.back(Run(0, 4096))
    file.table.free(range(4096))
    file.table.unback(range(1000, 2000))
    file.unback(Run(1000, 1000))
    states = file.table.records["state"]
    assert (states[:1000] == PageState.FREE).all()
    assert (states[2000:] == PageState.FREE).all()


def test_what_is_read_is_extents_of_which_a_record_says_something(shm: Path) -> None:
    file = PageTableFile(shm / "table", LAYOUT, ROW_BYTES, 4096)
    file.back(Run(0, 4096))
    file.table.free([5, 4001])
    before = (shm / "table").stat().st_blocks
    pages, records = file.read(EXTENT)
    assert pages.tolist() == [4, 5, 6, 7, 4000, 4001, 4002, 4003]
    assert records["state"].tolist() == [0, PageState.FREE, 0, 0] * 2
    assert (shm / "table").stat().st_blocks == before


def test_a_table_of_which_nothing_was_written_has_nothing_to_read(shm: Path) -> None:
    file = PageTableFile(shm / "table", LAYOUT, ROW_BYTES, 4096)
    pages, records = file.read(EXTENT)
    assert len(pages) == len(records) == 0


def test_a_table_that_is_there_is_not_made_again(shm: Path) -> None:
    PageTableFile(shm / "table", LAYOUT, ROW_BYTES, NUM_PAGES)
    with pytest.raises(FileExistsError):
        PageTableFile(shm / "table", LAYOUT, ROW_BYTES, NUM_PAGES)


def test_a_table_outlives_its_daemon(shm: Path, child: Callable[..., Child]) -> None:
    program = """
import sys
from pathlib import Path
from kvd.arena.page_table import *
from kvd.protocol.layout import Layout
layout = Layout(1, 1, 8, "float16", block_size=4)
table = PageTableFile(Path(sys.argv[1]), layout, 4, 8).table
table.free(range(8))
table.reserve([1, 2], 7)
table.commit([1], -1, 0, bytes(range(16)), 4)
print("noted")
input()
"""
    daemon = child(program, shm / "table")
    assert daemon.says() == "noted"
    daemon.send(signal.SIGKILL)
    daemon.ended()
    with (shm / "table").open("rb") as file:
        found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    table = PageTable(LAYOUT, ROW_BYTES, NUM_PAGES, memoryview(found))
    assert table.sealed(table.records).all()
    assert table.records["state"].tolist() == [
        PageState.FREE,
        PageState.COMMITTED,
        PageState.RESERVED,
        *[PageState.FREE] * 5,
    ]


def test_a_table_without_room_is_an_error_and_leaves_no_file(mount: Callable[..., Path]) -> None:
    path = mount("size=64k") / "table"
    (path.parent / "another's").write_bytes(bytes(64 << 10))
    with pytest.raises(OSError) as caught:  # noqa: PT011
        PageTableFile(path, LAYOUT, ROW_BYTES, 4096)
    assert caught.value.errno == errno.ENOSPC
    assert not path.exists()
