"""Copies of blocks between an arena and a store, checked both ways, in two threads each.

A record's data are the block's bytes, as its layout has them, and behind them their checksum and
the beginning of the block's key: so a record that was damaged, or that is another's, is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from kvd.arena.checksum import SUM_BYTES, checksum_of
from kvd.tiers.base import Record

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.protocol.keys import BlockKey
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Store, TierArena

# Data of one transaction: enough that its sync is shared by many blocks.
BATCH_BYTES = 32 << 20
# What a thread reads before it looks for more: little, so that both end together.
READ_BYTES = 8 << 20
# A call for each page costs less than copying it once more.
LARGE_BYTES = 64 << 10

_TRAILER_BYTES = 2 * SUM_BYTES


class Copy(Enum):
    """What became of a block that was to be read."""

    GOOD = "good"
    MISSING = "missing"
    BAD = "bad"


def data_bytes(layout: Layout) -> int:
    """How long the data of a block's record are."""
    return layout.page_bytes + _TRAILER_BYTES


class Writer:
    """Copies pages to a store: the next batch is gathered while one is written.

    It keeps two buffers. For one caller at a time, whose pages hold still meanwhile.
    """

    def __init__(self) -> None:
        self._buffers = [bytearray(), bytearray()]

    def write(
        self,
        store: Store,
        arena: TierArena,
        pages: Pages,
        keys: Sequence[BlockKey],
        abouts: Sequence[bytes],
        sums: Sequence[int],
    ) -> list[int]:
        """Copy blocks; the places of those that are not what their checksum (0: none) says.

        Of a batch with such blocks those before the first are written, and nothing behind. Where
        the store raises, the batches before are kept and none after.
        """
        batches = _batches(len(pages), data_bytes(arena.layout), BATCH_BYTES)

        def gather(number: int) -> tuple[list[Record], list[int]]:
            batch = batches[number]
            size = data_bytes(arena.layout)
            buffer = self._buffer(number % 2, len(batch) * size)
            _gather(arena, pages[batch.start : batch.stop], buffer)
            records, bad = [], []
            for at, place in enumerate(batch):
                data = buffer[at * size : (at + 1) * size]
                found = checksum_of(data[:-_TRAILER_BYTES])
                if sums[place] not in (0, found):
                    bad.append(place)
                data[-_TRAILER_BYTES:] = _trailer(found, keys[place])
                records.append(Record(keys[place], abouts[place], data))
            return records, bad

        with ThreadPoolExecutor(1, "kvd-gather") as gatherer:
            following = gatherer.submit(gather, 0) if batches else None
            for number, batch in enumerate(batches):
                assert following is not None
                records, bad = following.result()
                if bad:
                    store.write(records[: bad[0] - batch.start])
                    return bad
                if number + 1 < len(batches):
                    following = gatherer.submit(gather, number + 1)
                store.write(records)
        return []

    def _buffer(self, number: int, size: int) -> memoryview:
        if len(self._buffers[number]) < size:
            self._buffers[number] = bytearray(size)
        return memoryview(self._buffers[number])[:size]


def _gather(arena: TierArena, pages: Pages, buffer: memoryview) -> None:
    """Copy pages to where their records' data begin."""
    page_bytes, size = arena.layout.page_bytes, data_bytes(arena.layout)
    if page_bytes >= LARGE_BYTES:
        for at in range(len(pages)):
            arena.copy_out(pages[at : at + 1], buffer[at * size : at * size + page_bytes])
        return
    together = np.empty((len(pages), page_bytes), np.uint8)
    arena.copy_out(pages, together.reshape(-1).data)
    np.frombuffer(buffer, np.uint8).reshape(-1, size)[:, :page_bytes] = together


def read(store: Store, arena: TierArena, pages: Pages, keys: Sequence[BlockKey]) -> list[Copy]:
    """Copy blocks into pages that the caller reserved. Raises as `Store.read`."""
    copies = [Copy.MISSING] * len(keys)
    batches = iter(_batches(len(keys), store.data_bytes, READ_BYTES))

    def read_batches() -> None:
        for batch in batches:
            store.read(keys[batch.start : batch.stop], functools.partial(deliver, batch))

    def deliver(batch: range, number: int, data: memoryview) -> None:
        place = batch[number]
        copies[place] = _judge(arena.layout, keys[place], data)
        if copies[place] is Copy.GOOD:
            arena.copy_in(pages[place : place + 1], data[:-_TRAILER_BYTES])

    with ThreadPoolExecutor(1, "kvd-read") as other:
        others = other.submit(read_batches)
        read_batches()
        others.result()
    return copies


def check(store: Store, keys: Sequence[BlockKey]) -> list[Copy]:
    """Read blocks and look whether they are what they should be. Raises as `Store.read`."""
    copies = [Copy.MISSING] * len(keys)

    def deliver(place: int, data: memoryview) -> None:
        copies[place] = _judge(store.layout, keys[place], data)

    store.read(keys, deliver)
    return copies


def _judge(layout: Layout, key: BlockKey, data: memoryview) -> Copy:
    if len(data) != data_bytes(layout):
        return Copy.BAD
    expected = _trailer(checksum_of(data[:-_TRAILER_BYTES]), key)
    return Copy.GOOD if data[-_TRAILER_BYTES:] == expected else Copy.BAD


def _trailer(checksum: int, key: BlockKey) -> bytes:
    return checksum.to_bytes(SUM_BYTES, "little") + key[:SUM_BYTES]


def _batches(num_blocks: int, block_bytes: int, batch_bytes: int) -> list[range]:
    size = max(batch_bytes // block_bytes, 1)
    return [range(num_blocks)[start : start + size] for start in range(0, num_blocks, size)]
