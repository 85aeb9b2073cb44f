"""The page table: what survives the daemon, one record per page, beside the arena.

The daemon alone writes it, in this order: *reserved* before the page number leaves the daemon;
data before *committed*; *committed* before the reply and before the block can be matched;
descendants cleared before their parents. A kill between two of these writes leaves a table that
says at most that a page is more taken than it is.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvd.arena.base import punch
from kvd.arena.files import boot_id, data_ranges, make_file
from kvd.arena.runs import runs_of

if TYPE_CHECKING:
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run, Runs

Pages: TypeAlias = NDArray[np.int64] | Sequence[int]

HEADER_BYTES = 4096
MAGIC = b"KVDPAGE2"
SEAL_OF_ZEROS = np.uint64(0x9E3779B97F4A7C15)  # any but zero

NO_PARENT = -1


class PageState(IntEnum):
    """What a page is, in the daemon's memory and in the table alike.

    A record of zeros is a page without memory. A detached page is a committed one that has left the
    index; its record is cleared, since no later daemon may trust it.
    """

    UNBACKED = 0
    FREE = 1
    RESERVED = 2
    COMMITTED = 3
    DETACHED = 4
    QUARANTINED = 5


_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("epoch", "<u8"),
        ("num_pages", "<u8"),
        ("extent_pages", "<u8"),
        ("row_bytes", "<u8"),
        ("boot", "V16"),
        ("layout", "V32"),
    ]
)


def record_dtype(block_size: int, row_bytes: int) -> np.dtype[Any]:
    """One record; its words are of 8 bytes, so that the seal can run over them."""
    padded = -(-block_size * row_bytes // 8) * 8
    return np.dtype(
        [
            ("seal", "<u8"),
            ("generation", "<u8"),
            ("session", "<u8"),
            ("parent_generation", "<u8"),
            ("checksum", "<u8"),
            ("parent", "<i8"),
            ("namespace", "<u4"),
            ("block", "<u4"),
            ("group", "<u2"),
            ("state", "<u2"),
            ("num_tokens", "<u4"),
            ("rows", "u1", (padded,)),
        ]
    )


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """What a page table said when it was opened.

    `records` are those of `pages`, all that have memory; `sealed` says which of them are whole.
    """

    pages: NDArray[np.int64]
    records: NDArray[Any]
    sealed: NDArray[np.bool_]

    @property
    def are_committed(self) -> NDArray[np.bool_]:
        """Which of the pages are blocks."""
        are_committed: NDArray[np.bool_] = self.records["state"] == PageState.COMMITTED
        return self.sealed & are_committed


class PageTable:
    """The records of one arena's pages, over any buffer of the right size."""

    def __init__(self, layout: Layout, row_bytes: int, num_pages: int, buffer: memoryview) -> None:
        dtype = record_dtype(layout.block_size, row_bytes)
        self.layout = layout
        self.row_bytes = row_bytes
        self.num_pages = num_pages
        self.records: NDArray[Any] = np.frombuffer(
            buffer, dtype, count=num_pages, offset=HEADER_BYTES
        )
        self._header: NDArray[Any] = np.frombuffer(buffer, _HEADER, count=1)
        # Odd factors from a fixed seed: a sum of words times these is wrong for a record of which
        # only some words were written, but for one case in 2**64 (multilinear hashing).
        words = dtype.itemsize // 8 - 1
        rng = np.random.Generator(np.random.PCG64(0))
        self._factors = rng.integers(0, 1 << 63, words, dtype=np.uint64) * 2 + 1

    def begin(self, epoch: int, extent_pages: int) -> None:
        """Write the head; what reads the table later can tell whose it is."""
        self._header[0] = self._head(b"", epoch, extent_pages)
        self._header["magic"] = MAGIC

    def has_begun(self, extent_pages: int) -> bool:
        """Whether the head says that this table was begun on this boot, in whatever epoch."""
        epoch = int(self._header["epoch"][0])
        expected = np.array(self._head(MAGIC, epoch, extent_pages), _HEADER)
        return self._header.tobytes() == expected.tobytes()

    def begin_epoch(self, epoch: int) -> None:
        """The table goes on in another epoch."""
        self._header["epoch"] = epoch

    def _head(self, magic: bytes, epoch: int, extent_pages: int) -> tuple[Any, ...]:
        layout = hashlib.sha256(msgspec.msgpack.encode(self.layout)).digest()
        return magic, epoch, self.num_pages, extent_pages, self.row_bytes, boot_id(), layout

    def reserve(self, pages: Pages, session: int) -> None:
        """Note that a session may write these pages, before it learns their numbers."""
        self._note(pages, PageState.RESERVED, session=session)

    def detach(self, pages: Pages) -> None:
        """Note that these blocks left the index; descendants stand before their parents."""
        self._note(pages, PageState.DETACHED)

    def free(self, pages: Pages) -> None:
        """Note that nobody holds these pages; descendants stand before their parents."""
        self._note(pages, PageState.FREE)

    def quarantine(self, pages: Pages, session: int | None = None) -> None:
        """Note that a session that is over could still write these pages.

        It is the one that reserved them, unless another is named; 0 where that is not known.
        """
        is_known = session is None
        self._note(pages, PageState.QUARANTINED, session or 0, keep_session=is_known)

    def unback(self, pages: Pages) -> None:
        """Forget pages whose memory went back; their generations start anew with it."""
        self.records[pages] = np.zeros((), self.records.dtype)

    def commit(
        self,
        pages: Pages,
        parent: int,
        first_block: int,
        rows: bytes,
        namespace: int,
        group: int = 0,
    ) -> None:
        """Note consecutive blocks, the first of which follows the block in page `parent`."""
        index = np.asarray(pages, np.int64)
        records = self.records[index]
        parents = np.concatenate(([parent], index[:-1]))
        # Where there is none its own record stands in: any other might have no memory to read.
        known = np.where(parents == NO_PARENT, index, parents)
        records["state"] = PageState.COMMITTED
        records["session"] = 0
        records["parent"] = parents
        records["parent_generation"] = np.where(
            parents == NO_PARENT, 0, self.records["generation"][known]
        )
        records["namespace"] = namespace
        records["group"] = group
        records["block"] = np.arange(first_block, first_block + len(index))
        records["num_tokens"] = self.layout.block_size
        block_bytes = self.layout.block_size * self.row_bytes
        records["rows"][:, :block_bytes] = np.frombuffer(rows, np.uint8).reshape(-1, block_bytes)
        self._write(index, records)

    def add_checksums(
        self, pages: Pages, generations: NDArray[np.uint64], checksums: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Note checksums of blocks that are still those of these generations; says which are.

        The pages have memory: to look at the record of one that has none would give it some.
        """
        index = np.asarray(pages, np.int64)
        records = self.records[index]
        is_same = records["state"] == PageState.COMMITTED
        is_same &= records["generation"] == generations
        records = records[is_same]
        records["checksum"] = checksums[is_same]
        self._write(index[is_same], records)
        return np.asarray(is_same, np.bool_)

    def generations(self, pages: Pages) -> NDArray[np.uint64]:
        """Which turn of each page this is."""
        return np.asarray(self.records["generation"][pages], np.uint64)

    def checksums(self, pages: Pages) -> NDArray[np.uint64]:
        """The checksums of blocks; 0 for one that has none yet."""
        return np.asarray(self.records["checksum"][pages], np.uint64)

    def sealed(self, records: NDArray[Any]) -> NDArray[np.bool_]:
        """Which records are whole: sealed, or never written."""
        is_sealed = records["seal"] == self._seals(records)
        return np.asarray(is_sealed | ~self.written(records), np.bool_)

    def written(self, records: NDArray[Any]) -> NDArray[np.bool_]:
        """Which records say anything at all, be it only in part."""
        return np.asarray(self._words(records).any(axis=1), np.bool_)

    def _note(
        self, pages: Pages, state: int, session: int = 0, *, keep_session: bool = False
    ) -> None:
        index = np.asarray(pages, np.int64)
        old = self.records[index]
        records = np.zeros_like(old)
        records["state"] = state
        records["session"] = old["session"] if keep_session else session
        # Each turn of a page has its own generation, by which its children name it.
        records["generation"] = old["generation"] + np.uint64(state == PageState.RESERVED)
        records["parent"] = NO_PARENT
        self._write(index, records)

    def _write(self, index: NDArray[np.int64], records: NDArray[Any]) -> None:
        records["seal"] = self._seals(records)
        self.records[index] = records

    def _seals(self, records: NDArray[Any]) -> NDArray[np.uint64]:
        words = self._words(records)[:, 1:]
        sums: NDArray[np.uint64] = (words * self._factors).sum(axis=1, dtype=np.uint64)
        return sums ^ SEAL_OF_ZEROS

    def _words(self, records: NDArray[Any]) -> NDArray[np.uint64]:
        return np.ascontiguousarray(records).view("<u8").reshape(-1, records.itemsize // 8)


def record_bytes(layout: Layout, row_bytes: int) -> int:
    return record_dtype(layout.block_size, row_bytes).itemsize


def table_bytes(layout: Layout, row_bytes: int, num_pages: int) -> int:
    return HEADER_BYTES + num_pages * record_bytes(layout, row_bytes)


class PageTableFile:
    """The file of a table, whose records get memory with their pages and give it back with them.

    So a full file system never faults a write to a record, and the tables of many layouts, each as
    long as the whole capacity, take little of it.
    """

    def __init__(
        self, path: Path, layout: Layout, row_bytes: int, num_pages: int, fd: int | None = None
    ) -> None:
        """Over `fd`, a file that is there, else over a new one.

        Raises OSError where there is no memory for its head.
        """
        self.path = path
        size = table_bytes(layout, row_bytes, num_pages)
        self._record_bytes = record_bytes(layout, row_bytes)
        self._fd = make_file(path, size, 0o600, HEADER_BYTES) if fd is None else fd
        try:
            buffer = mmap.mmap(self._fd, size)
        except OSError:
            self.close()
            raise
        self.table = PageTable(layout, row_bytes, num_pages, memoryview(buffer))

    def back(self, run: Run) -> None:
        """Give memory to the records of these pages; raises OSError."""
        start = HEADER_BYTES + run.first * self._record_bytes
        os.posix_fallocate(self._fd, start, run.count * self._record_bytes)

    def unback(self, run: Run) -> None:
        """Take back what memory belongs to records of these pages alone."""
        start = HEADER_BYTES + run.first * self._record_bytes
        stop = start + run.count * self._record_bytes
        start, stop = (
            -(-start // mmap.PAGESIZE) * mmap.PAGESIZE,
            stop // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        if start < stop:
            punch(self._fd, start, stop - start)

    def read(self, extent_pages: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The pages of every extent of which any record says something, and their records.

        They are read from the file: a record without memory would get some by being looked at.
        """
        pages = self._pages_with_data(extent_pages)
        records = np.concatenate([self.table.records[:0], *self._read(runs_of(pages))])
        is_written = self.table.written(records).reshape(-1, extent_pages).any(axis=1)
        is_backed = np.repeat(is_written, extent_pages)
        return pages[is_backed], records[is_backed]

    def _pages_with_data(self, extent_pages: int) -> NDArray[np.int64]:
        size = extent_pages * self._record_bytes
        has_data = np.zeros(self.table.num_pages // extent_pages, np.bool_)
        for start, stop in data_ranges(self._fd, HEADER_BYTES):
            first, last = (start - HEADER_BYTES) // size, (stop - 1 - HEADER_BYTES) // size
            has_data[first : last + 1] = True
        return np.repeat(has_data, extent_pages).nonzero()[0]

    def _read(self, runs: Runs) -> Iterator[NDArray[Any]]:
        with self.path.open("rb") as file:
            for run in runs:
                file.seek(HEADER_BYTES + run.first * self._record_bytes)
                yield np.fromfile(file, self.table.records.dtype, run.count)

    def close(self) -> None:
        """Leave the file as it is. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
