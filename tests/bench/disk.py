"""disk: the LMDB tier against a bare loop over LMDB with the same flags and sizes of records.

Both copy from and to the same arena, and their files are reserved and written before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from kvd.arena.checksum import block_checksums
from kvd.protocol.keys import BlockKey
from kvd.protocol.messages import Run
from kvd.protocol.units import ByteSize, format_bytes
from kvd.tiers.copying import BATCH_BYTES, Writer, data_bytes, read
from kvd_tiers.host import HostConfig, HostTier
from kvd_tiers.lmdb import LmdbConfig, LmdbTier
from kvd_tiers.lmdb_files import allows_mapped_writes
from tests.bench.common import LAYOUT_8B, SHARED_MEMORY, Bench, Pairs, Row, pairs, row, timed

if TYPE_CHECKING:
    from kvd.tiers.base import Store, TierArena

NUM_PAGES = 128
PAGE_BYTES = LAYOUT_8B.page_bytes
BATCH = BATCH_BYTES // PAGE_BYTES
ABOUT = bytes(200)


class Ours:
    """The pages of an arena into the store of a tier and back, with their checksums."""

    def __init__(self, store: Store, arena: TierArena, num_pages: int) -> None:
        self.store, self.arena = store, arena
        self.pages = np.arange(num_pages)
        self.keys: list[BlockKey] = []
        self.abouts = [ABOUT] * num_pages
        self.sums = block_checksums(arena, self.pages).tolist()
        self.writer = Writer()

    def write(self) -> float:
        """Seconds for all pages; those of the last time are forgotten before."""
        self.store.delete(self.keys)
        self.keys = [BlockKey(os.urandom(32)) for _ in self.pages]
        return timed(
            lambda: self.writer.write(
                self.store, self.arena, self.pages, self.keys, self.abouts, self.sums
            )
        )

    def read(self) -> float:
        return timed(lambda: read(self.store, self.arena, self.pages, self.keys))


class Bare:
    """The same in one loop of one thread, which knows nothing but LMDB and the arena."""

    def __init__(self, folder: Path, arena: TierArena, num_pages: int) -> None:
        size = 4 * num_pages * PAGE_BYTES
        lmdb.open(str(folder), lib_version=0).close()
        with (folder / "data.mdb").open("r+b") as file:
            file.seek(0, os.SEEK_END)
            for _ in range(size // PAGE_BYTES):
                file.write(bytes(PAGE_BYTES))
            os.fsync(file.fileno())
            size = file.tell()
        writemap = allows_mapped_writes(folder)
        self.env = lmdb.open(
            str(folder), map_size=size, max_dbs=2, metasync=False, writemap=writemap
        )
        self.data, self.about = self.env.open_db(b"data"), self.env.open_db(b"about")
        self.arena = arena
        self.pages = np.arange(num_pages)
        self.keys: list[bytes] = []
        self.buffer = memoryview(bytearray(BATCH * PAGE_BYTES))

    def write(self) -> float:
        with self.env.begin(write=True) as txn:
            for key in self.keys:
                txn.delete(key, db=self.data)
                txn.delete(key, db=self.about)
        self.keys = [os.urandom(32) for _ in self.pages]
        return timed(self._write)

    def read(self) -> float:
        return timed(self._read)

    def _write(self) -> None:
        for start in range(0, len(self.keys), BATCH):
            pages = self.pages[start : start + BATCH]
            self.arena.copy_out(pages, self.buffer[: len(pages) * PAGE_BYTES])
            with self.env.begin(write=True) as txn:
                for place, key in enumerate(self.keys[start : start + BATCH]):
                    data = self.buffer[place * PAGE_BYTES : (place + 1) * PAGE_BYTES]
                    txn.put(key, data, db=self.data)
                    txn.put(key, ABOUT, db=self.about)

    def _read(self) -> None:
        for start in range(0, len(self.keys), BATCH):
            with self.env.begin(buffers=True) as txn:
                for place, key in enumerate(self.keys[start : start + BATCH], start):
                    data = txn.get(key, db=self.data)
                    self.arena.copy_in(self.pages[place : place + 1], data)


def disk(bench: Bench) -> Iterator[Row]:
    num_pages = bench.pick(NUM_PAGES, 2)
    size = num_pages * PAGE_BYTES
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=SHARED_MEMORY) as memory,
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder,
        closing(_host_tier(Path(memory), size)) as host,
        closing(_lmdb_tier(Path(folder), 4 * size)) as tier,
    ):
        arena = host.create_arena(LAYOUT_8B, 4)
        arena.back(Run(0, arena.num_pages))
        arena.memory.pages[:] = 1
        bench.say(f"writing {format_bytes(4 * size)} of zeros")
        bare = Bare(Path(folder), arena, num_pages)
        ours = Ours(tier.create_store(LAYOUT_8B, data_bytes(LAYOUT_8B)), arena, num_pages)
        for _ in range(2):  # until the tier's file has grown
            ours.write()
            bare.write()
        with closing(bare.env):
            bench.say(f"writing {format_bytes(size)} in turn")
            written = pairs(ours.write, bare.write, bench.pick(9, 2))
            bench.say(f"reading {format_bytes(size)} in turn")
            read = pairs(ours.read, bare.read, bench.pick(9, 2))
    yield _row("disk_write", written, size)
    yield _row("disk_read", read, size)


def _host_tier(directory: Path, size: int) -> HostTier:
    tier = HostTier(HostConfig(ByteSize(size + (64 << 20))), directory)
    tier.open(1)
    return tier


def _lmdb_tier(directory: Path, capacity_bytes: int) -> LmdbTier:
    config = LmdbConfig(ByteSize(capacity_bytes), free_floor_bytes=ByteSize(0))
    tier = LmdbTier(config, directory)
    tier.open(1)
    return tier


def _row(name: str, found: Pairs, size: int) -> Row:
    detail = (
        f"{format_bytes(size)} between an arena in memory and LMDB, {format_bytes(PAGE_BYTES)} a "
        f"record, {BATCH} a transaction, data synced: {found}; read from the page cache"
    )
    return row(name, found.ratio, "x", detail)
