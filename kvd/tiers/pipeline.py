"""Blocks on their way between an arena's pages and a store's records, two threads at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from kvd.tiers.base import Record

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.protocol.keys import BlockKey
    from kvd.tiers.base import Store, TierArena

# Data of one transaction: enough that its sync is shared by many blocks.
BATCH_BYTES = 32 << 20
# What a thread reads before it looks for more: little, so that both end together.
READ_BYTES = 8 << 20

# Given a block's place among those that are written, and its bytes: what its record is about.
Describe: TypeAlias = Callable[[int, memoryview], bytes]
# Given a block's place among those that are read, and its bytes: whether they are good.
Accept: TypeAlias = Callable[[int, memoryview], bool]


class Pipeline:
    """Two buffers and what is done with them, by one caller at a time."""

    def __init__(self) -> None:
        self._buffers = [bytearray(), bytearray()]

    def write(
        self,
        store: Store,
        arena: TierArena,
        pages: Pages,
        keys: Sequence[BlockKey],
        describe: Describe,
    ) -> None:
        """Keep pages as records, in batches; the next is gathered while one is written.

        Where the store raises, the batches before are kept and none after.
        """
        batches = _batches(len(pages), store.data_bytes, BATCH_BYTES)

        def gather(number: int) -> list[Record]:
            batch = batches[number]
            data = self._buffer(number % 2, len(batch) * store.data_bytes)
            arena.copy_out(pages[batch.start : batch.stop], data)
            blocks = _split(data, store.data_bytes)
            return [
                Record(keys[place], describe(place, block), block)
                for place, block in zip(batch, blocks, strict=True)
            ]

        if not batches:
            return
        with ThreadPoolExecutor(1, "kvd-gather") as gatherer:
            gathering = gatherer.submit(gather, 0)
            for number in range(1, len(batches)):
                records = gathering.result()
                gathering = gatherer.submit(gather, number)
                store.write(records)
            store.write(gathering.result())

    def read(
        self,
        store: Store,
        arena: TierArena,
        pages: Pages,
        keys: Sequence[BlockKey],
        accept: Accept,
    ) -> list[bool]:
        """Copy records into pages, in two threads; which ones came and are good."""
        found = [False] * len(keys)
        batches = iter(_batches(len(keys), store.data_bytes, READ_BYTES))

        def read_batches() -> None:
            for batch in batches:
                store.read(keys[batch.start : batch.stop], functools.partial(deliver, batch))

        def deliver(batch: range, index: int, data: memoryview) -> None:
            place = batch[index]
            if len(data) == store.data_bytes and accept(place, data):
                arena.copy_in(pages[place : place + 1], data)
                found[place] = True

        with ThreadPoolExecutor(1, "kvd-read") as other:
            others = other.submit(read_batches)
            read_batches()
            others.result()
        return found

    def _buffer(self, number: int, size: int) -> memoryview:
        if len(self._buffers[number]) < size:
            self._buffers[number] = bytearray(size)
        return memoryview(self._buffers[number])[:size]


def _batches(num_blocks: int, block_bytes: int, batch_bytes: int) -> list[range]:
    size = max(batch_bytes // block_bytes, 1)
    return [range(num_blocks)[start : start + size] for start in range(0, num_blocks, size)]


def _split(data: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
