"""Blocks on their way between an arena and a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvd.arena.checksum import block_checksums
from kvd.protocol.errors import TierFull
from kvd.protocol.messages import Run
from kvd.protocol.units import ByteSize
from kvd.testing.tier_suite import LAYOUT, key_of, read_all, scan_all
from kvd.tiers import copying
from kvd.tiers.base import Record
from kvd.tiers.copying import Copy, Writer, check, data_bytes, read
from kvd_tiers.host import HostConfig, HostTier
from kvd_tiers.lmdb import LmdbConfig, LmdbTier
from tests.arena.conftest import shm  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.protocol.keys import BlockKey
    from kvd.tiers.base import Store, TierArena

NUM_BLOCKS = 50
KEYS = [key_of(number) for number in range(NUM_BLOCKS)]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BATCH_BYTES", 7 * data_bytes(LAYOUT))
    monkeypatch.setattr(copying, "READ_BYTES", 3 * data_bytes(LAYOUT))


@pytest.fixture
def arena(shm: Path) -> Iterator[TierArena]:  # noqa: F811
    """Twice as many pages as there are blocks; each is filled with its number."""
    with closing(HostTier(HostConfig(ByteSize(16 << 20)), shm)) as tier:
        tier.open(1)
        arena = tier.create_arena(LAYOUT, 4)
        arena.back(Run(0, arena.num_pages))
        arena.memory.pages[:] = np.arange(arena.num_pages).reshape(-1, 1, 1, 1, 1, 1)
        yield arena


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:  # noqa: F811
    config = LmdbConfig(ByteSize(8 << 20), free_floor_bytes=ByteSize(0))
    with closing(LmdbTier(config, shm)) as tier:
        tier.open(1)
        yield tier.create_store(LAYOUT, data_bytes(LAYOUT))


def shuffled_pages(seed: int) -> Pages:
    return np.random.default_rng(seed).permutation(2 * NUM_BLOCKS)[:NUM_BLOCKS]


def write(store: Store, arena: TierArena, pages: Pages, sums: list[int] | None = None) -> list[int]:
    count = len(pages)
    keys = [key_of(number) for number in range(count)]
    return Writer().write(store, arena, pages, keys, [b"about"] * count, sums or [0] * count)


def values_of(arena: TierArena, pages: Pages) -> list[float]:
    return [float(arena.memory.page_view(page).mean()) for page in pages.tolist()]


def test_blocks_come_back_into_other_pages(arena: TierArena, store: Store) -> None:
    source, target = shuffled_pages(1), shuffled_pages(2)
    assert write(store, arena, source) == []
    assert read(store, arena, target, KEYS) == [Copy.GOOD] * NUM_BLOCKS
    assert values_of(arena, target) == source.tolist()


def test_pages_that_are_copied_one_by_one_are_the_same(
    arena: TierArena,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, scanned = shuffled_pages(1), []
    for large in (0, 1 << 30):
        monkeypatch.setattr(copying, "LARGE_BYTES", large)
        write(store, arena, pages)
        scanned.append(data_of(store))
    assert scanned[0] == scanned[1]


def test_only_good_blocks_that_are_there_are_copied(arena: TierArena, store: Store) -> None:
    pages = shuffled_pages(1)
    write(store, arena, pages)
    store.delete(KEYS[:10])
    spoil(store, KEYS[20])
    arena.memory.pages[:] = -1
    expected = [Copy.MISSING] * 10 + [Copy.GOOD] * (NUM_BLOCKS - 10)
    expected[20] = Copy.BAD
    assert check(store, KEYS) == expected
    assert read(store, arena, pages, KEYS) == expected
    assert values_of(arena, pages) == [
        page if copy is Copy.GOOD else -1
        for page, copy in zip(pages.tolist(), expected, strict=True)
    ]


@pytest.mark.parametrize("place", [0, 1, 100, -17, -16, -9, -8, -1])
def test_a_flipped_bit_anywhere_in_a_record_is_seen(
    arena: TierArena, store: Store, place: int
) -> None:
    write(store, arena, shuffled_pages(1))
    spoil(store, KEYS[3], place)
    assert check(store, KEYS[:5])[3] is Copy.BAD


def test_a_record_of_another_block_is_seen(arena: TierArena, store: Store) -> None:
    write(store, arena, shuffled_pages(1))
    store.write([Record(KEYS[1], b"about", memoryview(data_of(store)[KEYS[0]]))])
    assert check(store, KEYS[:3]) == [Copy.GOOD, Copy.BAD, Copy.GOOD]


def test_a_page_that_is_not_what_its_checksum_says_is_not_written(
    arena: TierArena, store: Store
) -> None:
    pages = shuffled_pages(1)
    sums = block_checksums(arena, pages).tolist()
    arena.memory.page_view(int(pages[17]))[0, 0, 0, 0, 0] += 1
    assert write(store, arena, pages, sums) == [17]
    assert data_of(store).keys() == set(KEYS[:17])


def test_nothing_is_written_and_read_without_more_ado(arena: TierArena, store: Store) -> None:
    none = np.empty(0, np.int64)
    assert write(store, arena, none) == []
    assert read(store, arena, none, []) == []


def test_a_full_store_keeps_whole_batches(arena: TierArena, store: Store) -> None:
    with pytest.raises(TierFull):
        write(store, arena, np.tile(np.arange(NUM_BLOCKS), 4))  # more than there is room for
    kept = len(scan_all(store))
    assert kept % 7 == 0
    assert scan_all(store).keys() == {key_of(number) for number in range(kept)}


def data_of(store: Store) -> dict[BlockKey, bytes]:
    return read_all(store, KEYS)


def spoil(store: Store, key: BlockKey, place: int = 0) -> None:
    """Flip a bit of a record."""
    data = bytearray(data_of(store)[key])
    data[place] ^= 1
    store.write([Record(key, b"about", memoryview(data))])
