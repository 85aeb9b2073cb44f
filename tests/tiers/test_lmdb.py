"""The LMDB tier: its cap, its growth, and what of an earlier start it trusts."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import random
import resource
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvd.protocol.errors import ConfigError, TierFailed, TierFull
from kvd.protocol.units import ByteSize
from kvd.testing.tier_suite import (
    BATCH,
    LAYOUT,
    OTHER,
    MakeStoreTier,
    StoreTierSuite,
    bytes_on_disk,
    expect,
    fill,
    key_of,
    read_all,
    record_of,
    records_of,
    scan_all,
)
from kvd.tiers.base import Record
from kvd_tiers import lmdb_check
from kvd_tiers.lmdb import DEFAULT_CAPACITY, LmdbConfig, LmdbTier
from kvd_tiers.lmdb_check import damage
from kvd_tiers.lmdb_files import ASIDE, DESCRIPTION, MARK, allows_mapped_writes, read_mark
from tests.arena.conftest import child, mount, shm  # noqa: F401 - fixtures
from tests.e2e.conftest import tmpfs  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from kvd_tiers.lmdb_store import LmdbStore
    from tests.arena.conftest import Child

FS_IOC_SETFLAGS, FS_IMMUTABLE_FL = 0x40086602, 0x10  # linux/fs.h

Mount = Callable[..., Path]
MIB = 1 << 20
NO_FLOOR = ByteSize(0)
# Writes ten records and ends as a crash would; the store stays as it was then.
CRASH = """
import os, sys
from pathlib import Path
from kvd.testing.tier_suite import LAYOUT, records_of
from tests.tiers.test_lmdb import make, make_plain
tier = (make_plain if sys.argv[2] == 'plain' else make)(Path(sys.argv[1]), 16 << 20)
tier.open(1)
store = tier.create_store(LAYOUT, LAYOUT.page_bytes)
store.write(records_of(range(10)))
os._exit(0)
"""


def make(directory: Path, capacity_bytes: int) -> LmdbTier:
    return LmdbTier(LmdbConfig(ByteSize(capacity_bytes), free_floor_bytes=NO_FLOOR), directory)


def make_plain(directory: Path, capacity_bytes: int) -> LmdbTier:
    """Without syncs, and without writing through the map."""
    config = LmdbConfig(
        ByteSize(capacity_bytes), free_floor_bytes=NO_FLOOR, nosync=True, writemap=False
    )
    return LmdbTier(config, directory)


class TestTheSuite(StoreTierSuite):
    @pytest.fixture(params=[make, make_plain], ids=["synced", "plain"])
    def make_tier(self, request: pytest.FixtureRequest) -> MakeStoreTier:
        make_tier: MakeStoreTier = request.param
        return make_tier


@pytest.fixture
def tier(shm: Path) -> Iterator[LmdbTier]:  # noqa: F811
    with closing(make(shm, 16 * MIB)) as tier:
        tier.open(1)
        yield tier


@pytest.fixture
def store(tier: LmdbTier) -> LmdbStore:
    return tier.create_store(LAYOUT, LAYOUT.page_bytes)


@pytest.fixture
def crash(shm: Path, child: Callable[..., Child]) -> Callable[..., Path]:  # noqa: F811
    """A process writes ten records into a store and ends; the store's folder."""

    def crash(kind: str = "synced") -> Path:
        assert child(CRASH, shm, kind).ended() == 0
        (description,) = shm.glob(f"lmdb/*/{DESCRIPTION}")
        return description.parent

    return crash


def reopened(directory: Path, capacity_bytes: int = 16 * MIB) -> LmdbTier:
    tier = make(directory, capacity_bytes)
    tier.open(2)
    return tier


# --- configuration ---


def test_the_default_is_a_quarter_of_what_is_free(tmpfs: Mount) -> None:  # noqa: F811
    small = tmpfs("size=64m")
    assert LmdbTier(LmdbConfig(), small).capacity_bytes == 16 * MIB


def test_the_default_does_not_shrink_by_what_the_tier_has_taken(tmpfs: Mount) -> None:  # noqa: F811
    small = tmpfs("size=64m")
    config = LmdbConfig(free_floor_bytes=NO_FLOOR)
    with closing(LmdbTier(config, small)) as tier:
        tier.open(1)
        fill(tier.create_store(LAYOUT, LAYOUT.page_bytes))
    assert LmdbTier(config, small).capacity_bytes == tier.capacity_bytes


def test_the_default_on_a_full_volume_is_a_little(tmpfs: Mount) -> None:  # noqa: F811
    full = tmpfs("size=256m")
    with (full / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, 256 * MIB)
    assert LmdbTier(LmdbConfig(), full).capacity_bytes == 4 * MIB


def test_the_default_has_a_bound(tmp_path: Path) -> None:
    assert LmdbTier(LmdbConfig(), tmp_path).capacity_bytes <= DEFAULT_CAPACITY


@pytest.mark.parametrize("capacity", [MIB, 65 * MIB])
def test_a_capacity_that_cannot_be_had_is_refused(tmpfs: Mount, capacity: int) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="set capacity_bytes or directory"):
        make(tmpfs("size=64m"), capacity)


def test_a_directory_that_is_not_absolute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'here' is not absolute"):
        LmdbTier(LmdbConfig(directory="here"), tmp_path)


def test_files_are_for_nobody_else(tier: LmdbTier, store: LmdbStore) -> None:
    assert tier.directory.stat().st_mode & 0o777 == 0o700
    assert store.folder.stat().st_mode & 0o777 == 0o700


# --- room ---


def test_thirty_turnovers_at_the_brim_never_find_it_full(tier: LmdbTier, store: LmdbStore) -> None:
    rng = random.Random(1)
    data = record_of(0).data
    live: list[int] = []
    most = tier.usable_bytes // store.record_bytes
    for number in range(0, 30 * most, BATCH):
        if (too_many := len(live) + BATCH - most) > 0:
            rng.shuffle(live)
            store.delete([key_of(one) for one in live[:too_many]])
            del live[:too_many]
        store.write([Record(key_of(one), b"", data) for one in range(number, number + BATCH)])
        live += range(number, number + BATCH)
    assert bytes_on_disk(tier.directory) <= tier.capacity_bytes
    assert scan_all(store).keys() == {key_of(one) for one in live}


def test_a_file_is_reserved_as_far_as_it_is_mapped(store: LmdbStore) -> None:
    store.write(records_of(range(40)))
    found = (store.folder / "data.mdb").stat()
    assert found.st_blocks * 512 >= found.st_size > 40 * LAYOUT.page_bytes


def test_a_file_grows_after_its_last_reader(store: LmdbStore) -> None:
    store.write(records_of(range(BATCH)))
    writer = threading.Thread(target=fill, args=[store])

    def deliver(place: int, data: memoryview) -> None:
        if place == 0:
            writer.start()
        assert bytes(data) == bytes(record_of(place).data)

    store.read([key_of(number) for number in range(BATCH)], deliver)
    writer.join()
    assert len(scan_all(store)) > BATCH


def test_what_was_delivered_cannot_be_looked_at_later(store: LmdbStore) -> None:
    store.write(records_of(range(1)))
    kept: list[memoryview] = []
    store.read([key_of(0)], lambda place, data: kept.append(data))
    with pytest.raises(ValueError, match="released"):
        bytes(kept[0])


def test_a_full_volume_is_a_full_tier_until_it_has_room(tmpfs: Mount) -> None:  # noqa: F811
    small = tmpfs("size=64m")
    with closing(make(small, 60 * MIB)) as tier:
        tier.open(1)
        store = tier.create_store(LAYOUT, LAYOUT.page_bytes)
        (small / "filler").write_bytes(bytes(40 * MIB))
        num_kept = fill(store)
        with pytest.raises(TierFull, match="free on the volume"):
            store.write(records_of(range(1000, 1100)))
        expect(store, records_of(range(num_kept)))
        (small / "filler").unlink()
        assert fill(store) > 2 * num_kept


def test_growth_that_fails_fails_the_write_and_no_later_one(store: LmdbStore) -> None:
    with largest_file(MIB), pytest.raises(TierFailed, match=r"more for .*: File too large"):
        fill(store)
    num_kept = len(scan_all(store))
    assert fill(store) > num_kept


def test_a_commit_that_fails_fails_the_write_and_no_later_one(shm: Path) -> None:  # noqa: F811
    with closing(make_plain(shm, 16 * MIB)) as tier:
        tier.open(1)
        store = tier.create_store(LAYOUT, LAYOUT.page_bytes)
        num_kept = fill(store)
        store.delete([key_of(number) for number in range(BATCH)])
        with largest_file(16 << 10), pytest.raises(TierFailed, match="mdb_txn_commit"):
            store.write(records_of(range(1000, 1000 + BATCH)))
        expect(store, records_of(range(BATCH, num_kept)))
        store.write(records_of(range(1000, 1000 + BATCH)))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may be written beyond this size: a disk that fails, as far as it can be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_floor_of_a_volume_is_left_to_others(tmpfs: Mount) -> None:  # noqa: F811
    small = tmpfs("size=64m")
    config = LmdbConfig(ByteSize(60 * MIB), free_floor_bytes=ByteSize(32 * MIB))
    with closing(LmdbTier(config, small)) as tier:
        tier.open(1)
        fill(tier.create_store(LAYOUT, LAYOUT.page_bytes))
        found = os.statvfs(small)
        assert found.f_bavail * found.f_frsize >= 32 * MIB


def test_a_second_layout_has_little_room_until_the_first_is_removed(
    tier: LmdbTier, store: LmdbStore
) -> None:
    fill(store)
    assert tier.crowding(store) is None
    other = tier.create_store(OTHER, OTHER.page_bytes)
    num_kept = fill(other)
    assert tier.crowding(other) is store
    assert tier.crowding(store) is None
    tier.remove_store(store)
    assert tier.crowding(other) is None
    assert other.most_bytes > 10 * num_kept * other.record_bytes


def test_each_layout_is_left_half_of_its_equal_share(tier: LmdbTier, store: LmdbStore) -> None:
    other = tier.create_store(OTHER, OTHER.page_bytes)
    fill(store)
    fill(other)
    assert 2 * other.used_bytes < store.used_bytes < 3 * other.used_bytes
    assert tier.crowding(other) is tier.crowding(store) is None
    assert bytes_on_disk(tier.directory) <= tier.capacity_bytes


def test_there_is_room_to_make_one_more_environment_and_no_more(
    tier: LmdbTier, store: LmdbStore
) -> None:
    fill(store)
    fill(tier.create_store(OTHER, OTHER.page_bytes))
    third, fourth = (msgspec.structs.replace(OTHER, num_layers=number) for number in (3, 4))
    tier.create_store(third, third.page_bytes)
    with pytest.raises(TierFull, match="capacity_bytes"):
        tier.create_store(fourth, fourth.page_bytes)
    assert bytes_on_disk(tier.directory) <= tier.capacity_bytes


def test_under_a_lower_capacity_what_was_written_last_stays(
    tier: LmdbTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd_tiers.lmdb.LEAST_CAPACITY", 0)
    layouts = [msgspec.structs.replace(LAYOUT, num_layers=count) for count in (1, 2, 3)]
    folders = [tier.create_store(layout, layout.page_bytes).folder for layout in layouts]
    tier.close()
    ages = dict(zip(sorted(folders), (10, 0, 20), strict=True))
    for folder, age in ages.items():
        os.utime(folder / "data.mdb", (time.time() - age,) * 2)
    less = bytes_on_disk(tier.directory) - MIB // 16
    with closing(reopened(tier.directory.parent, less)) as again:
        assert [store.folder for store in again.stores()] == sorted(folders, key=ages.get)[:2]


def test_a_lower_capacity_holds_for_what_was_left(tier: LmdbTier, store: LmdbStore) -> None:
    other = tier.create_store(OTHER, OTHER.page_bytes)
    fill(store)
    other.write([record_of(1, layout=OTHER)])
    tier.close()
    with closing(reopened(tier.directory.parent, 4 * MIB)) as smaller:
        assert [found.layout for found in smaller.stores()] == [OTHER]
        assert bytes_on_disk(tier.directory) <= 4 * MIB


def test_writes_go_through_the_map_only_where_that_is_safe(shm: Path) -> None:  # noqa: F811
    assert allows_mapped_writes(shm)
    assert not allows_mapped_writes(Path("/proc"))


# --- what an earlier start left ---


def test_it_is_known_to_be_written_before_it_is_and_whole_when_it_is_closed(
    tier: LmdbTier, store: LmdbStore
) -> None:
    assert read_mark(store.folder).clean
    store.write(records_of(range(1)))
    assert not read_mark(store.folder).clean
    tier.close()
    assert read_mark(store.folder).clean


def test_what_a_crash_left_is_checked_and_used(crash: Callable[..., Path], shm: Path) -> None:  # noqa: F811
    folder = crash()
    assert damage(folder) == ""
    with closing(reopened(shm)) as tier:
        (store,) = tier.stores()
        expect(store, records_of(range(10)))


@pytest.mark.parametrize("kind", ["synced", "plain"])
def test_after_a_power_loss_only_what_was_synced_is_used(
    crash: Callable[..., Path],
    shm: Path,  # noqa: F811
    kind: str,
) -> None:
    folder = crash(kind)
    mark = json.loads((folder / MARK).read_text())
    (folder / MARK).write_text(json.dumps(mark | {"boot": "another"}))
    with closing(reopened(shm)) as tier:
        assert len(tier.stores()) == (kind == "synced")
        assert folder.exists() == (kind == "synced")


def cut(folder: Path) -> None:
    os.truncate(folder / "data.mdb", 64 << 10)


def scribble(folder: Path) -> None:
    """Damage every page after the first two, which tell where the trees are."""
    with (folder / "data.mdb").open("r+b") as file:
        for page in range(2, file.seek(0, os.SEEK_END) // 4096):
            file.seek(page * 4096)
            file.write(os.urandom(64))


def lose_the_mark(folder: Path) -> None:
    (folder / MARK).write_bytes(b"\0\0")


def change_the_version(folder: Path) -> None:
    text = (folder / DESCRIPTION).read_text()
    (folder / DESCRIPTION).write_text(text.replace('"version":1', '"version":99,"more":1'))


def lose_the_description(folder: Path) -> None:
    (folder / DESCRIPTION).write_text("{")


def lose_the_data(folder: Path) -> None:
    (folder / "data.mdb").unlink()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (cut, "beyond EOF"),
        (scribble, "page"),
        (lose_the_mark, "mark.json cannot be read"),
        (change_the_version, "version 99, not 1"),
        (lose_the_description, "layout.json cannot be read"),
        (lose_the_data, "data.mdb is no file"),
    ],
)
def test_what_is_damaged_is_set_aside_and_said(
    crash: Callable[..., Path],
    shm: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    reason: str,
) -> None:
    folder = crash()
    harm(folder)
    with closing(reopened(shm)) as tier, caplog.at_level(logging.ERROR):
        assert tier.stores() == []
        assert reason in caplog.text
        assert folder.with_name(folder.name + ASIDE).exists()
        expect(tier.create_store(LAYOUT, LAYOUT.page_bytes), [])


def test_what_is_set_aside_goes_when_its_room_is_needed(
    crash: Callable[..., Path],
    shm: Path,  # noqa: F811
) -> None:
    folder = crash()
    cut(folder)
    with closing(reopened(shm)) as tier:
        fill(tier.create_store(LAYOUT, LAYOUT.page_bytes))
        assert not folder.with_name(folder.name + ASIDE).exists()
        assert bytes_on_disk(tier.directory) <= tier.capacity_bytes


def test_a_store_whose_making_was_cut_short_is_removed(tier: LmdbTier, store: LmdbStore) -> None:
    (store.folder / DESCRIPTION).unlink()
    tier.close()
    with closing(reopened(tier.directory.parent)) as again:
        assert again.stores() == []
        assert not store.folder.exists()


def test_what_is_not_ours_is_left_alone(tier: LmdbTier, store: LmdbStore) -> None:
    theirs = [tier.directory / name for name in ("photos", "photos.aside", "layout-of-gardens")]
    for folder in theirs:
        folder.mkdir()
    tier.close()
    with closing(reopened(tier.directory.parent)) as again:
        fill(again.create_store(OTHER, OTHER.page_bytes))
    assert all(folder.exists() for folder in theirs)


def make_a_file(path: Path) -> None:
    path.write_bytes(b"theirs")


def make_a_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [make_a_file, make_a_link, os.mkfifo])
def test_what_is_no_folder_is_not_ours_whatever_its_name(
    tier: LmdbTier, store: LmdbStore, make: Callable[[Path], None]
) -> None:
    make(theirs := tier.directory / f"layout-{'1' * 16}")
    tier.close()
    with closing(reopened(tier.directory.parent)) as again:
        assert [each.layout for each in again.stores()] == [store.layout]
        assert theirs.lstat()


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    """A file that not even root may open for writing."""
    with path.open("rb") as file:
        try:
            fcntl.ioctl(file, FS_IOC_SETFLAGS, struct.pack("l", FS_IMMUTABLE_FL))
        except OSError as error:
            pytest.skip(f"no file can be made immutable: {error}")
        try:
            yield
        finally:
            fcntl.ioctl(file, FS_IOC_SETFLAGS, struct.pack("l", 0))


def test_what_cannot_be_opened_now_is_not_forgotten(
    crash: Callable[..., Path],
    shm: Path,  # noqa: F811
) -> None:
    folder = crash()
    refused = pytest.raises(TierFailed, match="not permitted")
    with immutable(folder / "data.mdb"), closing(make(shm, 16 * MIB)) as tier, refused:
        tier.open(2)
    with closing(reopened(shm)) as tier:
        (store,) = tier.stores()
        assert sum(map(len, store.scan())) > 0


def test_nothing_but_the_data_is_mapped_from_disk(store: LmdbStore) -> None:
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in lines if str(store.folder) in line}
    assert mapped == {str(store.folder / "data.mdb")}
    assert not (store.folder / "lock.mdb").is_symlink()


def test_a_check_that_dies_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.mdb").write_bytes(bytes(8192))
    assert "not an LMDB data file" in damage(tmp_path)
    monkeypatch.setenv("PYTHONMALLOC", "nonesuch")
    assert "its check ended with status" in damage(tmp_path)


def test_a_check_that_takes_long_tells_that_it_goes_on(
    crash: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_check, "LOOK_SECONDS", 0.001)
    told: list[None] = []
    assert damage(crash(), lambda: told.append(None)) == ""
    assert told


def test_a_check_without_end_is_damage(
    crash: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = crash()
    monkeypatch.setattr(lmdb_check, "BASE_SECONDS", 0.0)
    assert "did not end" in damage(folder)


def test_a_closed_store_fails_and_does_not_crash(tier: LmdbTier, store: LmdbStore) -> None:
    tier.close()
    with pytest.raises(TierFailed):
        read_all(store, [key_of(1)])
    with pytest.raises(TierFailed):
        store.write(records_of(range(1)))
