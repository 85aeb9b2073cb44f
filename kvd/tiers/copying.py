"""Copies of blocks between an arena and a store, checked on both ways. Blocking, for threads.

A record's data are the block's bytes, as its layout has them, and behind them their checksum and
the beginning of the block's key: so a record that was damaged, or that is another's, is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvd.tiers.base import Record

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.protocol.keys import BlockKey
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Store, TierArena

_SUM_BYTES = 8
_TRAILER_BYTES = 2 * _SUM_BYTES
# One transaction's worth, and what a thread copies while another one writes the piece before.
PIECE_BYTES = 32 << 20
# A call for each page costs less than copying it once more.
_LARGE_BYTES = 64 << 10


class Copy(Enum):
    """What became of a block that was to be read."""

    GOOD = "good"
    MISSING = "missing"
    BAD = "bad"


def data_bytes(layout: Layout) -> int:
    """How long the data of a block's record are."""
    return layout.page_bytes + _TRAILER_BYTES


def checksum(data: memoryview) -> int:
    """The checksum of a block's bytes, never 0, which stands for none."""
    return xxhash.xxh3_64_intdigest(data) or 1


class Writer:
    """Copies pages to a store: one thread gathers a piece while the store writes the one before.

    For one caller at a time, whose pages hold still meanwhile.
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

        Those are not written, nor is anything behind the first of them. Raises as `Store.write`.
        """
        size = data_bytes(arena.layout)
        step = max(1, PIECE_BYTES // size)
        pieces = [range(at, min(at + step, len(pages))) for at in range(0, len(pages), step)]

        def gather(number: int) -> tuple[list[Record], list[int]]:
            piece = pieces[number]
            buffer = self._buffer(number % 2, len(piece) * size)
            _gather(arena, pages[piece.start : piece.stop], buffer)
            records, bad = [], []
            for at, place in enumerate(piece):
                data = buffer[at * size : (at + 1) * size]
                found = checksum(data[:-_TRAILER_BYTES])
                if sums[place] not in (0, found):
                    bad.append(place)
                data[-_TRAILER_BYTES:] = found.to_bytes(_SUM_BYTES, "little") + keys[place][:8]
                records.append(Record(keys[place], abouts[place], data))
            return records, bad

        with ThreadPoolExecutor(1, "kvd-gather") as gathering:
            following = gathering.submit(gather, 0)
            for number in range(len(pieces)):
                records, bad = following.result()
                if bad:
                    store.write(records[: bad[0] - pieces[number].start])
                    return bad
                if number + 1 < len(pieces):
                    following = gathering.submit(gather, number + 1)
                store.write(records)
        return []

    def _buffer(self, number: int, size: int) -> memoryview:
        if len(self._buffers[number]) < size:
            self._buffers[number] = bytearray(size)
        return memoryview(self._buffers[number])[:size]


def _gather(arena: TierArena, pages: Pages, buffer: memoryview) -> None:
    """Copy pages to where their records' data begin."""
    page_bytes, size = arena.layout.page_bytes, data_bytes(arena.layout)
    if page_bytes >= _LARGE_BYTES:
        for at in range(len(pages)):
            arena.copy_out(pages[at : at + 1], buffer[at * size : at * size + page_bytes])
        return
    together = np.empty((len(pages), page_bytes), np.uint8)
    arena.copy_out(pages, together.reshape(-1).data)
    np.frombuffer(buffer, np.uint8).reshape(-1, size)[:, :page_bytes] = together


def read(store: Store, arena: TierArena, pages: Pages, keys: Sequence[BlockKey]) -> list[Copy]:
    """Copy blocks into pages that the caller reserved, half of them in a thread beside this one.

    Raises as `Store.read`.
    """
    copies = [Copy.MISSING] * len(keys)

    def read_some(start: int, stop: int) -> None:
        def deliver(number: int, data: memoryview) -> None:
            place = start + number
            copies[place] = Copy.BAD
            if is_good(arena.layout, keys[place], data):
                arena.copy_in(pages[place : place + 1], data[:-_TRAILER_BYTES])
                copies[place] = Copy.GOOD

        store.read(keys[start:stop], deliver)

    middle = len(keys) // 2
    with ThreadPoolExecutor(1, "kvd-read") as other:
        first = other.submit(read_some, 0, middle)
        read_some(middle, len(keys))
        first.result()
    return copies


def check(store: Store, keys: Sequence[BlockKey]) -> list[Copy]:
    """Read blocks and look whether they are what they should be."""
    copies = [Copy.MISSING] * len(keys)

    def deliver(place: int, data: memoryview) -> None:
        is_right = is_good(store.layout, keys[place], data)
        copies[place] = Copy.GOOD if is_right else Copy.BAD

    store.read(keys, deliver)
    return copies


def is_good(layout: Layout, key: BlockKey, data: memoryview) -> bool:
    if len(data) != data_bytes(layout):
        return False
    sum_and_key = bytes(data[-_TRAILER_BYTES:])
    block = data[:-_TRAILER_BYTES]
    return sum_and_key == checksum(block).to_bytes(_SUM_BYTES, "little") + key[:8]
