"""What every tier must do, as pytest classes: subclass one and give it its fixture.

class TestMyTier(StoreTierSuite):
    @pytest.fixture
    def make_tier(self) -> MakeStoreTier:
        return my_tier  # a function of a module, since a child process is given it too

`my_tier(directory, capacity_bytes)` is a tier that is not open yet.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from kvd.arena.runs import pages_of
from kvd.protocol.errors import AlreadyRunning, BadRequest, TierFull
from kvd.protocol.keys import BlockKey
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run
from kvd.tiers.base import MemoryTier, Record, Store, StoreTier, most_about_bytes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvd.tiers.base import TierArena

try:
    import pytest
except ImportError as error:
    raise ImportError("the suite of a tier is run by pytest: install pytest") from error

MakeStoreTier: TypeAlias = Callable[[Path, int], StoreTier]
MakeMemoryTier: TypeAlias = Callable[[Path, int], MemoryTier]

# 64 KiB a block; the other has a quarter of it.
LAYOUT = Layout(2, 4, 64, "float32")
OTHER = Layout(1, 2, 64, "float32")
HUGE = Layout(64, 64, 1024, "float32")
BATCH = 8
PLACES = 16  # of batches, that a child writes to in turn


# --- stores ---


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(str(number).encode()).digest())


def record_of(number: int, turn: int = 0, layout: Layout = LAYOUT) -> Record:
    """A record whose data and about follow from its number and a turn."""
    key = key_of(number)
    about = turn.to_bytes(4, "little") + key
    return Record(key, about, memoryview(_data_of(about, layout.page_bytes)))


def records_of(numbers: Sequence[int], turn: int = 0, layout: Layout = LAYOUT) -> list[Record]:
    return [record_of(number, turn, layout) for number in numbers]


def _data_of(about: bytes, size: int) -> bytes:
    return hashlib.shake_128(about).digest(size)


def read_all(store: Store, keys: Sequence[BlockKey]) -> dict[BlockKey, bytes]:
    """What a store delivers for these keys; each place once at most."""
    found: dict[int, bytes] = {}

    def deliver(place: int, data: memoryview) -> None:
        assert place not in found
        found[place] = bytes(data)

    store.read(keys, deliver)
    return {keys[place]: data for place, data in found.items()}


def scan_all(store: Store) -> dict[BlockKey, bytes]:
    found = list(itertools.chain.from_iterable(store.scan()))
    assert len(dict(found)) == len(found)
    return dict(found)


def expect(store: Store, records: Sequence[Record]) -> None:
    """A store has these records, whole, and no others."""
    assert scan_all(store) == {record.key: record.about for record in records}
    keys = [record.key for record in records]
    assert read_all(store, keys) == {record.key: bytes(record.data) for record in records}


def fill(store: Store) -> int:
    """Write batches until the tier is full; how many records it kept."""
    for number in itertools.count(0, BATCH):
        try:
            store.write(records_of(range(number, number + BATCH), layout=store.layout))
        except TierFull:
            return number
    raise AssertionError


def bytes_on_disk(directory: Path) -> int:
    paths = [directory, *directory.rglob("*")]
    return sum(path.lstat().st_blocks * 512 for path in paths)


def write_until_killed(
    make_tier: MakeStoreTier, directory: Path, size: int, pipe: Connection
) -> None:
    """What the child does: write a batch over an older one, say so, forget its first record."""
    tier = make_tier(directory, size)
    tier.open(1)
    store = tier.stores()[0] if tier.stores() else tier.create_store(LAYOUT, LAYOUT.page_bytes)
    for turn in itertools.count():
        numbers = numbers_of(turn)
        store.write(records_of(numbers, turn))
        pipe.send(turn)
        store.delete([key_of(numbers[0])])


def numbers_of(turn: int) -> range:
    start = turn % PLACES * BATCH
    return range(start, start + BATCH)


class StoreTierSuite:
    """What a store tier must do. `capacity_bytes` is what the tests give it.

    `writes_whole_batches`: a kill leaves all of a batch or none, and not just whole records.
    """

    capacity_bytes: ClassVar[int] = 16 << 20
    writes_whole_batches: ClassVar[bool] = True

    @pytest.fixture
    def tier(self, make_tier: MakeStoreTier, tmp_path: Path) -> Iterator[StoreTier]:
        tier = make_tier(tmp_path, self.capacity_bytes)
        tier.open(1)
        yield tier
        tier.close()

    @pytest.fixture
    def store(self, tier: StoreTier) -> Store:
        return tier.create_store(LAYOUT, LAYOUT.page_bytes)

    @pytest.fixture
    def _survives(self, make_tier: MakeStoreTier, tmp_path: Path) -> None:
        if not make_tier(tmp_path, self.capacity_bytes).survives:
            pytest.skip("what this tier holds ends with it")

    def reopened(self, tier: StoreTier, make_tier: MakeStoreTier, directory: Path) -> StoreTier:
        tier.close()
        again = make_tier(directory, self.capacity_bytes)
        again.open(2)
        return again

    # --- the tier ---

    def test_nothing_is_touched_before_it_is_opened(
        self, make_tier: MakeStoreTier, tmp_path: Path
    ) -> None:
        make_tier(tmp_path, self.capacity_bytes).close()
        assert list(tmp_path.iterdir()) == []

    def test_it_says_what_it_is(self, tier: StoreTier) -> None:
        assert tier.name
        assert tier.capacity_bytes == self.capacity_bytes
        assert 0 < tier.usable_bytes <= tier.capacity_bytes
        assert tier.stores() == []

    def test_one_tier_owns_a_directory(
        self, tier: StoreTier, make_tier: MakeStoreTier, tmp_path: Path
    ) -> None:
        if not any(tmp_path.iterdir()):
            pytest.skip("this tier keeps nothing there")
        with pytest.raises(AlreadyRunning):
            make_tier(tmp_path, self.capacity_bytes).open(2)

    @pytest.mark.usefixtures("_survives")
    def test_it_is_closed_once_or_twice_and_opened_again(
        self, tier: StoreTier, store: Store
    ) -> None:
        store.write(records_of(range(3)))
        tier.close()
        tier.close()
        tier.open(2)
        (again,) = tier.stores()
        expect(again, records_of(range(3)))

    # --- records ---

    def test_a_store_knows_its_sizes(self, store: Store) -> None:
        assert (store.layout, store.data_bytes) == (LAYOUT, LAYOUT.page_bytes)
        assert store.record_bytes >= store.data_bytes

    def test_what_is_written_is_read(self, store: Store) -> None:
        records = records_of(range(20))
        store.write(records[:1])
        store.write(records[1:])
        expect(store, records)

    def test_keys_are_read_in_any_order_and_only_those_that_are_there(self, store: Store) -> None:
        store.write(records_of(range(10)))
        numbers = [12, 7, 0, 100, 9, 3]
        found = read_all(store, [key_of(number) for number in numbers])
        there = records_of([7, 0, 9, 3])
        assert found == {record.key: bytes(record.data) for record in there}

    def test_a_batch_of_nothing_does_nothing(self, store: Store) -> None:
        store.write([])
        store.delete([])
        assert read_all(store, []) == {}
        assert scan_all(store) == {}

    def test_a_record_takes_the_place_of_one_with_its_key(self, store: Store) -> None:
        store.write(records_of(range(6)))
        store.write(records_of(range(2, 4), turn=1))
        expect(store, [*records_of([0, 1, 4, 5]), *records_of([2, 3], turn=1)])

    def test_what_is_deleted_is_gone_and_nothing_else(self, store: Store) -> None:
        store.write(records_of(range(10)))
        store.delete([key_of(number) for number in (1, 3, 100)])
        expect(store, records_of([0, 2, 4, 5, 6, 7, 8, 9]))

    @pytest.mark.parametrize("size", [0, 1, 300, most_about_bytes(LAYOUT)])
    def test_an_about_of_any_size_comes_back(self, store: Store, size: int) -> None:
        about = os.urandom(size)
        store.write([Record(key_of(1), about, record_of(1).data)])
        assert scan_all(store) == {key_of(1): about}

    def test_many_small_batches_are_all_scanned(self, tier: StoreTier) -> None:
        store = tier.create_store(OTHER, OTHER.page_bytes)
        records = records_of(range(200), layout=OTHER)
        for start in range(0, len(records), 3):
            store.write(records[start : start + 3])
        expect(store, records)

    def test_two_layouts_have_a_store_each(self, tier: StoreTier, store: Store) -> None:
        other = tier.create_store(OTHER, OTHER.page_bytes)
        store.write([record_of(1)])
        other.write([record_of(1, turn=1, layout=OTHER)])
        expect(store, [record_of(1)])
        expect(other, [record_of(1, turn=1, layout=OTHER)])

    def test_an_error_of_whoever_reads_is_theirs(self, store: Store) -> None:
        store.write(records_of(range(3)))

        def deliver(place: int, data: memoryview) -> None:
            raise KeyError(place)

        with pytest.raises(KeyError):
            store.read([key_of(1)], deliver)
        store.write(records_of(range(3, 5)))
        expect(store, records_of(range(5)))

    def test_records_are_read_while_others_are_written(self, store: Store) -> None:
        steady = records_of(range(BATCH))
        store.write(steady)
        done, wrong = threading.Event(), list[str]()

        def read() -> None:
            while not done.is_set():
                found = read_all(store, [record.key for record in steady])
                if found != {record.key: bytes(record.data) for record in steady}:
                    wrong.append("a record that nobody touched was not read as it is")

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for turn in range(10):
            store.write(records_of(range(100, 130), turn))
            store.delete([key_of(number) for number in range(100, 120)])
        done.set()
        for reader in readers:
            reader.join()
        assert wrong == []

    def test_notes_are_kept_beside_the_records(self, store: Store) -> None:
        store.write_note(b"first", b"1")
        store.write_note(b"second", b"")
        store.write_note(b"first", os.urandom(3000))
        store.write_note(b"first", b"3")
        assert store.notes() == {b"first": b"3", b"second": b""}
        assert scan_all(store) == {}

    def test_notes_that_are_deleted_are_gone_and_no_others(self, store: Store) -> None:
        for name in (b"first", b"second", b"third"):
            store.write_note(name, name)
        store.delete_notes([b"first", b"third", b"never there"])
        assert store.notes() == {b"second": b"second"}

    # --- room ---

    def test_a_full_tier_says_so_and_keeps_none_of_a_batch(self, store: Store) -> None:
        num_kept = fill(store)
        assert num_kept >= BATCH
        expect(store, records_of(range(num_kept)))

    def test_a_full_tier_has_room_again_for_what_was_deleted(self, store: Store) -> None:
        num_kept = fill(store)
        store.delete([key_of(number) for number in range(BATCH)])
        store.write(records_of(range(1000, 1000 + BATCH)))
        expect(store, records_of([*range(BATCH, num_kept), *range(1000, 1000 + BATCH)]))

    def test_what_is_usable_can_be_used_and_files_stay_under_the_capacity(
        self, tier: StoreTier, store: Store, tmp_path: Path
    ) -> None:
        rng = random.Random(1)
        live: list[int] = []
        most = tier.usable_bytes // store.record_bytes
        for number in range(0, 5 * most, BATCH):
            if (too_many := len(live) + BATCH - most) > 0:
                rng.shuffle(live)
                store.delete([key_of(one) for one in live[:too_many]])
                del live[:too_many]
            store.write(records_of(range(number, number + BATCH)))
            live += range(number, number + BATCH)
            assert bytes_on_disk(tmp_path) <= self.capacity_bytes
        assert store.used_bytes <= self.capacity_bytes
        expect(store, records_of(live))

    def test_a_removed_store_gives_its_room_back(self, tier: StoreTier, store: Store) -> None:
        num_kept = fill(store)
        tier.remove_store(store)
        assert tier.stores() == []
        again = tier.create_store(LAYOUT, LAYOUT.page_bytes)
        assert scan_all(again) == {}
        assert fill(again) == num_kept

    def test_a_removed_store_is_forgotten_for_good(
        self, tier: StoreTier, store: Store, make_tier: MakeStoreTier, tmp_path: Path
    ) -> None:
        store.write(records_of(range(3)))
        tier.remove_store(store)
        again = self.reopened(tier, make_tier, tmp_path)
        assert again.stores() == []
        again.close()

    # --- what survives ---

    @pytest.mark.usefixtures("_survives")
    def test_a_closed_tier_is_found_as_it_was(
        self, tier: StoreTier, store: Store, make_tier: MakeStoreTier, tmp_path: Path
    ) -> None:
        store.write(records_of(range(10)))
        store.write_note(b"note", b"value")
        store.sync()
        again = self.reopened(tier, make_tier, tmp_path)
        (found,) = again.stores()
        assert (found.layout, found.data_bytes) == (LAYOUT, LAYOUT.page_bytes)
        assert found.notes() == {b"note": b"value"}
        expect(found, records_of(range(10)))
        again.close()

    @pytest.mark.usefixtures("_survives")
    @pytest.mark.parametrize("num_turns", [1, 4, 2 * PLACES])
    def test_a_killed_process_leaves_what_is_whole(
        self, make_tier: MakeStoreTier, tmp_path: Path, num_turns: int
    ) -> None:
        last = self.kill_in_the_middle(make_tier, tmp_path, num_turns)
        tier = make_tier(tmp_path, self.capacity_bytes)
        tier.open(2)
        (store,) = tier.stores()
        abouts = scan_all(store)
        data = read_all(store, list(abouts))
        assert data == {key: _data_of(abouts[key], LAYOUT.page_bytes) for key in abouts}
        for turn in range(PLACES):
            # The first of a batch may be deleted already.
            kept = {abouts.get(key_of(number), b"")[:4] for number in numbers_of(turn)[1:]}
            if self.writes_whole_batches:
                assert len(kept) == 1
            if turn == last % PLACES:
                assert kept == {last.to_bytes(4, "little")}
        store.write(records_of(range(1000, 1000 + BATCH)))
        tier.close()

    def kill_in_the_middle(self, make_tier: MakeStoreTier, directory: Path, num_turns: int) -> int:
        """Kill a process that writes; the last batch of which it said that it was written."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        args = (make_tier, directory, self.capacity_bytes, theirs)
        process = context.Process(target=write_until_killed, args=args)
        process.start()
        theirs.close()
        last = -1
        with ours:
            while last < num_turns:
                last = ours.recv()
            process.kill()
            process.join()
            with suppress(EOFError):
                while True:
                    last = ours.recv()
        process.close()
        return last


# --- memory ---


class MemoryTierSuite:
    """What a memory tier must do, for two layouts. `capacity_bytes` is what the tests give it."""

    capacity_bytes: ClassVar[int] = 16 << 20
    # False where an arena has all of its memory from the start.
    by_extents: ClassVar[bool] = True

    @pytest.fixture
    def tier(self, make_tier: MakeMemoryTier, tmp_path: Path) -> Iterator[MemoryTier]:
        tier = make_tier(tmp_path, self.capacity_bytes)
        tier.open(1)
        yield tier
        tier.close()

    def backed_bytes(self, arena: TierArena, num_backed: int) -> int:
        """What an arena has where so many of its pages are backed."""
        return (num_backed if self.by_extents else arena.num_pages) * arena.layout.page_bytes

    def test_nothing_is_touched_before_it_is_opened(
        self, make_tier: MakeMemoryTier, tmp_path: Path
    ) -> None:
        make_tier(tmp_path, self.capacity_bytes).close()
        assert list(tmp_path.iterdir()) == []

    def test_one_tier_owns_a_directory(
        self, tier: MemoryTier, make_tier: MakeMemoryTier, tmp_path: Path
    ) -> None:
        with pytest.raises(AlreadyRunning):
            make_tier(tmp_path, self.capacity_bytes).open(2)

    def test_a_new_tier_has_nothing_to_adopt(self, tier: MemoryTier) -> None:
        assert tier.adopt() == []

    def test_it_is_closed_once_or_twice(self, tier: MemoryTier) -> None:
        tier.create_arena(LAYOUT, 4)
        tier.close()
        tier.close()

    def test_an_arena_has_whole_extents_within_the_capacity(self, tier: MemoryTier) -> None:
        arena = tier.create_arena(LAYOUT, 4)
        assert arena.layout == LAYOUT
        assert arena.row_bytes == 4
        assert arena.num_pages % arena.extent_pages == 0
        assert 0 < arena.num_pages * LAYOUT.page_bytes <= self.capacity_bytes
        assert arena.table.num_pages == arena.num_pages
        assert arena.backed_bytes == self.backed_bytes(arena, 0)

    def test_a_layout_that_does_not_fit_is_refused(self, tier: MemoryTier) -> None:
        with pytest.raises(BadRequest):
            tier.create_arena(HUGE, 4)

    def test_memory_is_given_and_taken_by_extents(self, tier: MemoryTier) -> None:
        arena = tier.create_arena(LAYOUT, 4)
        size = arena.extent_pages
        arena.back(Run(0, 2 * size))
        arena.unback(Run(size, size))
        assert arena.backed_bytes == self.backed_bytes(arena, size)

    def test_copies_go_in_and_come_out(self, tier: MemoryTier) -> None:
        arena = tier.create_arena(LAYOUT, 4)
        arena.back(Run(0, arena.extent_pages))
        pages = pages_of([Run(5, 1), Run(1, 2)])
        data = os.urandom(len(pages) * LAYOUT.page_bytes)
        arena.copy_in(pages, memoryview(data))
        out = bytearray(LAYOUT.page_bytes)
        for place, page in enumerate(pages):
            arena.copy_out(pages_of([Run(int(page), 1)]), memoryview(out))
            assert out == data[place * LAYOUT.page_bytes :][: LAYOUT.page_bytes]

    def test_two_layouts_have_an_arena_each(self, tier: MemoryTier) -> None:
        one, other = tier.create_arena(LAYOUT, 4), tier.create_arena(OTHER, 4)
        one.back(Run(0, one.extent_pages))
        assert one.path != other.path
        assert other.backed_bytes == self.backed_bytes(other, 0)

    def test_a_removed_arena_gives_its_memory_back(self, tier: MemoryTier) -> None:
        for _ in range(3):
            arena = tier.create_arena(LAYOUT, 4)
            arena.back(Run(0, arena.num_pages))
            tier.remove_arena(arena)
        arena = tier.create_arena(LAYOUT, 4)
        assert arena.backed_bytes == self.backed_bytes(arena, 0)
