"""A memory tier in a lower place."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from kvd.arena.page_table import PageState
from kvd.arena.runs import pages_of
from kvd.protocol.errors import BadRequest, TierFailed, TierFull
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run
from kvd.protocol.units import ByteSize
from kvd.testing.tier_suite import (
    LAYOUT,
    OTHER,
    MakeStoreTier,
    StoreTierSuite,
    expect,
    fill,
    key_of,
    read_all,
    record_of,
    records_of,
    scan_all,
)
from kvd.tiers.shelf import Shelf, ShelfStore
from kvd_tiers.host import HostConfig, HostTier
from kvd_tiers.torch import TorchConfig, TorchTier
from tests.arena.conftest import mount, shm  # noqa: F401 - fixtures
from tests.e2e.conftest import tmpfs  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from kvd.tiers.base import Record

CAPACITY = 24 << 20
TRAILER = b"sixteen bytes of"


def make(directory: Path, capacity: int = CAPACITY) -> Shelf:
    return Shelf(HostTier(HostConfig(ByteSize(capacity)), directory))


def make_over_torch(directory: Path, capacity: int = CAPACITY) -> Shelf:
    config = TorchConfig(capacity_bytes=ByteSize(capacity), device="cpu", layouts=2)
    return Shelf(TorchTier(config, directory))


@pytest.fixture
def shelf(shm: Path) -> Iterator[Shelf]:  # noqa: F811
    shelf = make(shm / "shelf")
    shelf.open(1)
    yield shelf
    shelf.close()


@pytest.fixture
def store(shelf: Shelf) -> ShelfStore:
    return shelf.create_store(LAYOUT, LAYOUT.page_bytes + len(TRAILER))


def long_record(number: int, turn: int = 0) -> Record:
    """One whose data do not go into a page, as those of the daemon."""
    record = record_of(number, turn)
    return replace(record, data=memoryview(bytes(record.data) + TRAILER))


def long_records(numbers: range, turn: int = 0) -> list[Record]:
    return [long_record(number, turn) for number in numbers]


def reopened(shelf: Shelf, directory: Path, capacity: int = CAPACITY) -> Shelf:
    shelf.close()
    again = make(directory, capacity)
    again.open(2)
    return again


class TestTheSuite(StoreTierSuite):
    writes_whole_batches: ClassVar[bool] = False

    @pytest.fixture
    def make_tier(self) -> MakeStoreTier:
        return make


class TestTheSuiteOverTorch(StoreTierSuite):
    @pytest.fixture
    def make_tier(self) -> MakeStoreTier:
        return make_over_torch


# --- records ---


def test_data_longer_than_a_page_come_back(
    shelf: Shelf,
    store: ShelfStore,
    shm: Path,  # noqa: F811
) -> None:
    store.write(long_records(range(20)))
    expect(store, long_records(range(20)))
    with closing(reopened(shelf, shm / "shelf")) as again:
        (found,) = again.stores()
        assert found.data_bytes == store.data_bytes
        expect(found, long_records(range(20)))


def test_a_key_twice_in_a_batch_has_the_last_record(store: ShelfStore) -> None:
    store.write([long_record(1), long_record(2), long_record(1, turn=1)])
    expect(store, [long_record(2), long_record(1, turn=1)])


def test_a_record_that_is_replaced_all_the_time_is_read_whole(store: ShelfStore) -> None:
    turns = [long_record(1, turn) for turn in range(4)]
    store.write(turns[:1])
    done = threading.Event()

    def replace_it() -> None:
        for turn in range(2000):
            store.write([turns[turn % len(turns)]])
        done.set()

    writer = threading.Thread(target=replace_it)
    writer.start()
    seen = list[bytes]()
    while not done.is_set():
        seen += read_all(store, [key_of(1)] * 4).values()
    writer.join()
    assert seen
    assert set(seen) <= {bytes(turn.data) for turn in turns}


# --- what survives ---


def test_a_torn_record_is_none(shelf: Shelf, store: ShelfStore, shm: Path) -> None:  # noqa: F811
    store.write(long_records(range(3)))
    store.arena.table.records["rows"][1, :8] ^= 1
    with closing(reopened(shelf, shm / "shelf")) as again:
        (found,) = again.stores()
        expect(found, [long_record(0), long_record(2)])
        found.write([long_record(1)])
        expect(found, long_records(range(3)))


def test_of_two_records_with_a_key_one_is_kept(
    shelf: Shelf,
    store: ShelfStore,
    shm: Path,  # noqa: F811
) -> None:
    store.write(long_records(range(2)))
    table = store.arena.table
    table.commit([2], 0, 0, table.records["rows"][1].tobytes(), 1)  # as a kill may leave it
    store.arena.copy_in(pages_of([Run(2, 1)]), record_of(1).data)
    with closing(reopened(shelf, shm / "shelf")) as again:
        (found,) = again.stores()
        expect(found, long_records(range(2)))
        assert isinstance(found, ShelfStore)
        states = found.arena.table.records["state"][:3].tolist()
        assert sorted(states) == [PageState.FREE, PageState.COMMITTED, PageState.COMMITTED]


def test_arenas_that_clients_mapped_are_no_stores(shm: Path) -> None:  # noqa: F811
    with closing(HostTier(HostConfig(ByteSize(CAPACITY)), shm / "shelf")) as memory:
        memory.open(1)
        arena = memory.create_arena(LAYOUT, 4)
        arena.back(Run(0, arena.extent_pages))
        arena.table.reserve([0], 1)
    with closing(make(shm / "shelf")) as shelf:
        shelf.open(2)
        assert shelf.stores() == []
        assert [path.name for path in (shm / "shelf").iterdir()] == ["host.lock"]


def test_a_smaller_capacity_is_kept_to_as_records_go(
    shelf: Shelf,
    store: ShelfStore,
    shm: Path,  # noqa: F811
) -> None:
    num_kept = fill_long(store)
    with closing(reopened(shelf, shm / "shelf", CAPACITY // 2)) as again:
        (found,) = again.stores()
        assert found.used_bytes > again.capacity_bytes
        num_usable = again.usable_bytes // found.record_bytes
        found.delete([key_of(number) for number in range(num_usable, num_kept)])
        assert found.used_bytes <= again.capacity_bytes
        expect(found, long_records(range(num_usable)))


# --- room ---


def fill_long(store: ShelfStore) -> int:
    for number in itertools.count():
        try:
            store.write([long_record(number)])
        except TierFull:
            return number
    raise AssertionError


def test_what_one_layout_lets_go_another_has(shelf: Shelf, store: ShelfStore) -> None:
    num_kept = fill_long(store)
    store.delete([key_of(number) for number in range(0, num_kept, 2)])  # a hole beside each
    other = shelf.create_store(OTHER, OTHER.page_bytes)
    most = (shelf.usable_bytes - len(scan_all(store)) * store.record_bytes) // other.record_bytes
    other.write(records_of(range(most), layout=OTHER))
    expect(other, records_of(range(most), layout=OTHER))
    expect(store, [long_record(number) for number in range(1, num_kept, 2)])
    assert store.arena.backed_bytes + other.arena.backed_bytes <= shelf.capacity_bytes


def test_what_moves_is_found_where_it_is(shelf: Shelf, store: ShelfStore) -> None:
    num_kept = fill_long(store)
    kept = [long_record(number) for number in range(1, num_kept, 2)]
    store.delete([key_of(number) for number in range(0, num_kept, 2)])
    other = shelf.create_store(OTHER, OTHER.page_bytes)
    done = threading.Event()

    def take_room() -> None:
        fill(other)
        done.set()

    writer = threading.Thread(target=take_room)
    writer.start()
    while not done.is_set():
        found = read_all(store, [record.key for record in kept])
        assert found == {record.key: bytes(record.data) for record in kept}
    writer.join()


def test_few_large_extents_are_not_promised_to_more_records_than_fit(shm: Path) -> None:  # noqa: F811
    layout = Layout(2, 4, 256, "float32")  # an extent has 4 MiB, and three go into 15 MiB
    with closing(make(shm / "shelf", 15 << 20)) as shelf:
        shelf.open(1)
        store = shelf.create_store(layout, layout.page_bytes)
        most = shelf.usable_bytes // store.record_bytes
        store.write(records_of(range(most), layout=layout))
        assert most == store.arena.num_pages


def test_pages_too_small_for_what_is_kept_of_them_are_refused(shelf: Shelf) -> None:
    with pytest.raises(BadRequest, match="raise block_size"):
        shelf.create_store(Layout(1, 1, 8, "float16"), 512)
    assert shelf.stores() == []


def test_a_full_file_system_is_a_failure_that_leaves_no_file(
    tmpfs: Callable[..., Path],  # noqa: F811
) -> None:
    small = tmpfs("size=1m,nr_inodes=5")  # no label any more beside root, lock and arena
    with closing(make(small, 1 << 20)) as shelf:
        shelf.open(1)
        with pytest.raises(TierFailed, match="no note"):
            shelf.create_store(OTHER, OTHER.page_bytes)
        assert [path.name for path in small.iterdir()] == ["host.lock"]
