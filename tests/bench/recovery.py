"""recovery: how soon a daemon that starts has taken over what an earlier one left, by size.

From the page table of an arena in shared memory, as after kill -9; and from LMDB alone, as after
the machine was off. In both it learns what the blocks are and reads none of their bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from kvd.actors.store import NAMESPACE_NOTE
from kvd.cache.recovery import about
from kvd.protocol.codec import TOKEN_BYTES
from kvd.protocol.keys import NamespaceInfo, chain
from kvd.protocol.messages import Run
from kvd.protocol.units import ByteSize, format_bytes
from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd.tiers.base import Record
from kvd.tiers.copying import data_bytes
from kvd_client import Client, Layout
from kvd_tiers.host import HostConfig, HostTier
from kvd_tiers.lmdb import LmdbConfig, LmdbTier
from tests.bench.common import IDENTITY, Bench, Row, row

# A million pages are 4 GiB in memory, and 512 MiB on disk.
IN_MEMORY = Layout(2, 2, 16, "bfloat16")
ON_DISK = Layout(1, 1, 16, "bfloat16", num_planes=1)
# Sequences of so many blocks, each with tokens of its own.
CHAIN = 64
SESSION = 1
# Starts differ by so many seconds among themselves: less is told as this.
NOISE = 0.005

Fill: TypeAlias = Callable[[Path, ByteSize, int], None]


def recovery(bench: Bench) -> Iterator[Row]:
    sizes = [256, 512] if bench.tiny else [1 << place for place in (18, 19, 20)]
    for name, layout, fill in (("memory", IN_MEMORY, _to_memory), ("disk", ON_DISK, _to_disk)):
        capacity = ByteSize(4 * sizes[-1] * layout.page_bytes + (64 << 20))
        found = []
        for size in sizes:
            bench.say(f"{size:,} blocks of {format_bytes(layout.page_bytes)} in {name}")
            found.append(_seconds(fill, capacity, size))
        told = ", ".join(f"{n:,} in {s:.2f} s" for n, s in zip(sizes, found, strict=True))
        yield row(
            f"recovery_{name}_per_second",
            sizes[-1] / found[-1],
            "blocks/s",
            f"{format_bytes(sizes[-1] * layout.page_bytes)} of KV; how much longer the daemon "
            f"takes to be ready than an empty one: {told}",
        )
        yield row(
            f"recovery_{name}_growth",
            found[-1] / sizes[-1] * sizes[0] / found[0],
            "x",
            f"seconds a block at {sizes[-1]:,} blocks against those at {sizes[0]:,}",
        )


def _seconds(fill: Fill, capacity: ByteSize, size: int) -> float:
    tiers = [
        {"type": "host", "capacity_bytes": capacity},
        {"type": "lmdb", "capacity_bytes": capacity, "free_floor_bytes": 0},
    ]
    with running_daemon({"tiers": tiers}) as daemon:
        empty = _start_seconds(daemon)
        daemon.kill()
        fill(daemon.base, capacity, size)
        filled = _start_seconds(daemon)
        with Client(daemon.endpoint, timeout=30) as client:
            counters = client.status().counters
    recovered = counters.get("blocks_adopted", 0) + counters.get("blocks_recovered", 0)
    assert recovered == size, f"{recovered} blocks of {size} were recovered"
    return max(filled - empty, NOISE)


def _start_seconds(daemon: RunningDaemon) -> float:
    daemon.kill()
    start = time.perf_counter()
    daemon.start()
    return time.perf_counter() - start


def _rows(layout: Layout, size: int) -> list[bytes]:
    """The tokens of all sequences, none of which begins as another does."""
    width = CHAIN * layout.block_size
    tokens = np.arange(size * layout.block_size, dtype=np.uint32).tobytes()
    step = width * TOKEN_BYTES
    return [tokens[start : start + step] for start in range(0, len(tokens), step)]


def _to_memory(base: Path, capacity: ByteSize, size: int) -> None:
    tier = HostTier(HostConfig(capacity), base / "kvd")
    with closing(tier):
        tier.open(1)
        arena = tier.create_arena(IN_MEMORY, TOKEN_BYTES)
        arena.note_namespace(1, NamespaceInfo(IDENTITY, IN_MEMORY))
        arena.back(Run(0, -(-size // arena.extent_pages) * arena.extent_pages))
        for number, rows in enumerate(_rows(IN_MEMORY, size)):
            pages = np.arange(number * CHAIN, (number + 1) * CHAIN)
            arena.table.reserve(pages, SESSION)
            arena.table.commit(pages, -1, 0, rows, 1)


def _to_disk(base: Path, capacity: ByteSize, size: int) -> None:
    info = NamespaceInfo(IDENTITY, ON_DISK)
    tier = LmdbTier(LmdbConfig(capacity, free_floor_bytes=ByteSize(0)), base / "data")
    data = memoryview(bytes(data_bytes(ON_DISK)))
    with closing(tier):
        tier.open(1)
        store = tier.create_store(ON_DISK, data_bytes(ON_DISK))
        store.write_note(NAMESPACE_NOTE + info.key, msgspec.msgpack.encode(info))
        sequences = _rows(ON_DISK, size)
        for start in range(0, len(sequences), 256):
            store.write(
                [
                    record
                    for rows in sequences[start : start + 256]
                    for record in _records(info.key, rows, data)
                ]
            )


def _records(parent: bytes, rows: bytes, data: memoryview) -> list[Record]:
    width = ON_DISK.block_size * TOKEN_BYTES
    keys = chain(parent, rows, width)
    parents = [parent, *keys[:-1]]
    return [
        Record(key, about(before, rows[place * width : (place + 1) * width]), data)
        for place, (key, before) in enumerate(zip(keys, parents, strict=True))
    ]
