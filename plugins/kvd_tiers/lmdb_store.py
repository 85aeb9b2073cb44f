"""LmdbStore: the records of one layout in one LMDB environment."""

from __future__ import annotations

import functools
import itertools
import mmap
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from kvd.arena.files import boot_id
from kvd.protocol.errors import TierFailed, TierFull
from kvd.protocol.keys import KEY_BYTES, BlockKey
from kvd.tiers.base import Store, most_about_bytes
from kvd.tiers.gate import Gate
from kvd_tiers.lmdb_files import (
    DATA,
    DESCRIPTION,
    MARK,
    STEP_BYTES,
    VERSION,
    Damaged,
    Description,
    Mark,
    allows_mapped_writes,
    lock_in_memory,
    reserve,
    usable_of,
    volume_error,
    write_durably,
)

if TYPE_CHECKING:
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Deliver, Record
    from kvd_tiers.lmdb_files import Volume

PAGE_BYTES = min(mmap.PAGESIZE, 32 << 10)  # LMDB's, which has no larger ones
LEAST_BYTES = 64 * PAGE_BYTES  # of an environment
# Keys that one transaction forgets: it copies every page of the index that it touches.
DELETE_KEYS = 64
SCAN_KEYS = 1024
READ_BYTES = 64 << 20  # of one read transaction: what it can see, nobody writes over
SPARE_PAGES = 32

# How LMDB lays a value: within a leaf if node and key have less than half a page, else on pages of
# its own behind a header, and the leaf keeps their number.
PAGE_HEADER_BYTES = 16
NODE_BYTES = 8 + 2
NODE_MAX = (PAGE_BYTES - PAGE_HEADER_BYTES) // 2

# What an environment is told to be that is not whole.
DAMAGE = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)


class LmdbStore(Store):
    """An environment with three databases: data and index by key, and notes.

    Its file is reserved, as long as the map, and grows by steps. It is never filled: in a full map
    not even a delete finds the pages that it copies.
    """

    def __init__(
        self, folder: Path, description: Description, volume: Volume, *, sync: bool, writemap: bool
    ) -> None:
        """Open an environment that `make_environment` made and that is whole. Raises TierFailed."""
        self.folder = folder
        self.layout = description.layout
        self.data_bytes = description.data_bytes
        about_bytes = most_about_bytes(self.layout)
        self.record_bytes = value_bytes(self.data_bytes) + value_bytes(about_bytes)
        self._volume = volume
        self._sync = sync
        self._writemap = writemap and allows_mapped_writes(folder)
        self._gate = Gate()
        self._growing: Future[int] | None = None
        self._freed_pages = 0  # by the last delete: not yet free
        self._is_dirty = False
        self._is_closed = False
        with _told_as_ours(folder):
            self._open()

    def _open(self) -> None:
        size = reserve(self.folder / DATA)
        with lock_in_memory(self.folder):
            self._env = lmdb.open(
                str(self.folder),
                map_size=size,
                max_dbs=3,
                # The commit itself is not synced apart from the data: a power loss undoes the last
                # transaction at most, and costs half as much.
                metasync=False,
                sync=self._sync,
                writemap=self._writemap,
                # The kernel reads ahead, also where the file is larger than memory: without it, a
                # record of 2 MiB is read by pieces of 4 KiB, nine times slower.
                readahead=True,
            )
        self._databases = [self._env.open_db(name) for name in (b"data", b"about", b"notes")]
        self._data, self._about, self._notes = self._databases
        self._num_pages = size // PAGE_BYTES

    def _reopen(self) -> None:
        with self._gate.alone():
            self._env.close()
            self._open()

    @property
    def used_bytes(self) -> int:
        return self._volume.size_of(self.folder)

    @property
    def most_bytes(self) -> int:
        return usable_of(self.used_bytes + self._volume.room_of(self.folder))

    # --- records ---

    def write(self, records: Sequence[Record]) -> None:
        with self._writing():
            while (shortage := self._shortage(records)) > 0:
                self._grow(shortage)
            if shortage + self._freed_pages > 0:
                self._settle()
            while not self._commit(functools.partial(self._put, records)):
                # There are pages enough, but not enough of them in a row.
                self._grow(self.record_bytes // PAGE_BYTES + 1)
            if self._growing is None and self._shortage(records) > -self._step_pages:
                self._growing = self._start_growing(0)

    def read(self, keys: Sequence[BlockKey], deliver: Deliver) -> None:
        size = max(READ_BYTES // self.data_bytes, 1)
        for start in range(0, len(keys), size):
            with self._transaction() as txn:
                for place, key in enumerate(keys[start : start + size], start):
                    data = txn.get(key, db=self._data)
                    if data is not None:
                        # Released, so that nobody reads what is no longer mapped.
                        with data:
                            deliver(place, data)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._writing():
            for start in range(0, len(keys), DELETE_KEYS):
                some = keys[start : start + DELETE_KEYS]
                if not self._commit(functools.partial(self._forget, some)):
                    raise TierFull(f"no room in {self.folder} to forget blocks in")
                self._freed_pages = len(some) * self.record_bytes // PAGE_BYTES

    def scan(self) -> Iterator[Sequence[tuple[BlockKey, bytes]]]:
        last = b""
        while batch := self._scan_after(last):
            yield batch
            last = batch[-1][0]

    def _scan_after(self, last: bytes) -> list[tuple[BlockKey, bytes]]:
        with self._transaction() as txn, txn.cursor(self._about) as cursor:
            if not cursor.set_range(last + b"\0" if last else last):
                return []
            items = itertools.islice(cursor.iternext(), SCAN_KEYS)
            return [(BlockKey(bytes(key)), bytes(about)) for key, about in items]

    def _put(self, records: Sequence[Record], txn: lmdb.Transaction[bytes]) -> None:
        for record in records:
            txn.put(record.key, record.data, db=self._data)
            txn.put(record.key, record.about, db=self._about)

    def _forget(self, keys: Sequence[BlockKey], txn: lmdb.Transaction[bytes]) -> None:
        for key in keys:
            txn.delete(key, db=self._data)
            txn.delete(key, db=self._about)

    # --- notes ---

    def write_note(self, name: bytes, value: bytes) -> None:
        with self._writing():
            if not self._commit(lambda txn: txn.put(name, value, db=self._notes)):
                raise TierFull(f"no room in {self.folder} for a note")

    def delete_notes(self, names: Sequence[bytes]) -> None:
        with self._writing():
            if not self._commit(functools.partial(self._forget_notes, names)):
                raise TierFull(f"no room in {self.folder} to forget notes in")

    def notes(self) -> dict[bytes, bytes]:
        with self._transaction() as txn, txn.cursor(self._notes) as cursor:
            return {bytes(name): bytes(value) for name, value in cursor.iternext()}

    def _forget_notes(self, names: Sequence[bytes], txn: lmdb.Transaction[bytes]) -> None:
        for name in names:
            txn.delete(name, db=self._notes)

    # --- whole or not ---

    def sync(self) -> None:
        with _told_as_ours(self.folder):
            self._env.sync(True)

    def close(self) -> None:
        """Close after the last reader, whole and synced. Idempotent; raises TierFailed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end_growth()
        with self._gate.alone(), _told_as_ours(self.folder), closing(self._env):
            if self._is_dirty:
                self._env.sync(True)
        if self._is_dirty:
            self._mark(clean=True)

    def remove(self) -> None:
        """Close it and remove its files."""
        self._is_dirty = False  # nothing of it need be whole
        self.close()
        # First, so that nobody takes what may be left of the rest for an environment.
        (self.folder / DESCRIPTION).unlink()
        shutil.rmtree(self.folder)
        self._volume.changed()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Around every change: before the first one, it is known for good that there are some."""
        if self._is_closed:
            raise TierFailed(f"{self.folder} is closed")
        if not self._is_dirty:
            self._mark(clean=False)
            self._is_dirty = True
        with _told_as_ours(self.folder):
            try:
                yield
            except lmdb.MapFullError:
                raise
            except lmdb.Error:
                # What could not be written may leave LMDB refusing everything until it is reopened.
                self._end_growth()
                self._reopen()
                raise

    def _mark(self, *, clean: bool) -> None:
        write_durably(self.folder / MARK, Mark(clean, boot_id().hex(), self._sync))

    # --- transactions ---

    @contextmanager
    def _transaction(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """A short look at the records; its buffers are good as long as it lasts."""
        with (
            self._gate.reading(),
            _told_as_ours(self.folder),
            self._env.begin(buffers=True) as txn,
        ):
            yield txn

    def _commit(self, change: Callable[[lmdb.Transaction[bytes]], object]) -> bool:
        """Whether there was room for a change; if not, nothing is changed."""
        try:
            self._change(change)
        except lmdb.MapFullError:
            self._settle()
            try:
                self._change(change)
            except lmdb.MapFullError:
                return False
        return True

    def _settle(self) -> None:
        """Make pages free that the last transaction freed: by another one, with no reader left."""
        with self._gate.alone():
            self._change(lambda txn: txn.put(b"turn", txn.id().to_bytes(8, "little")))
        self._freed_pages = 0

    def _change(self, change: Callable[[lmdb.Transaction[bytes]], object]) -> None:
        with self._env.begin(write=True) as txn:
            change(txn)

    # --- room ---

    def _shortage(self, records: Sequence[Record]) -> int:
        """Pages that the map lacks for these records; 0 or less where there are enough.

        Counted with them: the copies of the index that writing them makes, or else forgetting some
        does, and the list of free pages.
        """
        with self._env.begin() as txn:
            stats = [txn.stat(), *(txn.stat(db) for db in self._databases)]
        taken = sum(
            stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats
        )
        num_keys = max(len(records), DELETE_KEYS)
        copies = sum(stat["branch_pages"] + min(stat["leaf_pages"], num_keys) for stat in stats)
        free_list = self._num_pages // 256
        needed = _pages_of(records) + copies + free_list + SPARE_PAGES
        return taken + needed - self._num_pages

    def _grow(self, num_pages: int) -> None:
        """Go on with a longer file. Raises TierFull."""
        growing = self._growing or self._start_growing(num_pages)
        self._growing = None
        growing.result()
        # Not by `set_mapsize`, which may wait for the disk while it holds Python's own lock.
        self._reopen()

    def _start_growing(self, num_pages: int) -> Future[int]:
        most = max(num_pages, self._step_pages) * PAGE_BYTES
        return self._volume.grow(self.folder / DATA, num_pages * PAGE_BYTES, most)

    def _end_growth(self) -> None:
        if self._growing:
            wait([self._growing])
            self._growing = None

    @property
    def _step_pages(self) -> int:
        """By how much the file grows at once: a quarter, so that small ones stay small."""
        most = self._volume.capacity_bytes // 64
        return max(min(self._num_pages // 4, most // PAGE_BYTES), STEP_BYTES // PAGE_BYTES)


def make_environment(folder: Path, layout: Layout, data_bytes: int, volume: Volume) -> Description:
    """Make an environment without records, to be opened by LmdbStore. Raises TierFailed."""
    description = Description(VERSION, layout, data_bytes)
    try:
        folder.mkdir(mode=0o700)
        with _told_as_ours(folder):
            # Not yet by a writable map: its file has no room before it grows.
            lmdb.open(str(folder), mode=0o600, lib_version=0, lock=False).close()
        volume.begin(folder / DATA, LEAST_BYTES)
        write_durably(folder / MARK, Mark(clean=True, boot=boot_id().hex(), synced=True))
        write_durably(folder / DESCRIPTION, description)
    except OSError as error:
        raise volume_error(error, f"{folder} cannot be made") from error
    except TierFailed:
        shutil.rmtree(folder)
        raise
    return description


def value_bytes(size: int) -> int:
    """What a value of this size takes with its key.

    What lies in a leaf counts three times: leaves are about two thirds full, and one transaction
    may copy all of them.
    """
    node = NODE_BYTES + KEY_BYTES
    if node + size < NODE_MAX:
        return 3 * (node + size)
    pages = -(-(PAGE_HEADER_BYTES + size) // PAGE_BYTES)
    return pages * PAGE_BYTES + 3 * (node + 8)


def _pages_of(records: Sequence[Record]) -> int:
    size = sum(value_bytes(len(one.data)) + value_bytes(len(one.about)) for one in records)
    return -(-size // PAGE_BYTES)


@contextmanager
def _told_as_ours(folder: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.MapFullError, lmdb.DiskError) as error:
        raise TierFull(f"{folder} is full: {error}") from error
    except DAMAGE as error:
        raise Damaged(f"{folder}: {error}") from error
    except lmdb.Error as error:
        raise TierFailed(f"{folder}: {error}") from error
