"""Blocks on their way between an arena and a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvd.protocol.errors import TierFull
from kvd.protocol.messages import Run
from kvd.protocol.units import ByteSize
from kvd.testing.tier_suite import LAYOUT, key_of, scan_all
from kvd.tiers import pipeline
from kvd.tiers.pipeline import Pipeline
from kvd_tiers.host import HostConfig, HostTier
from kvd_tiers.lmdb import LmdbConfig, LmdbTier
from tests.arena.conftest import shm  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.tiers.base import Store, TierArena

NUM_BLOCKS = 50
KEYS = [key_of(number) for number in range(NUM_BLOCKS)]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "BATCH_BYTES", 7 * LAYOUT.page_bytes)
    monkeypatch.setattr(pipeline, "READ_BYTES", 3 * LAYOUT.page_bytes)


@pytest.fixture
def arena(shm: Path) -> Iterator[TierArena]:  # noqa: F811
    """Twice as many pages as there are blocks; each is filled with its number."""
    with closing(HostTier(HostConfig(ByteSize(16 << 20)), shm)) as tier:
        tier.open(1)
        arena = tier.create_arena(LAYOUT, 4)
        arena.back(Run(0, arena.num_pages))
        arena.memory.pages[:] = np.arange(arena.num_pages).reshape(1, 1, -1, 1, 1, 1)
        yield arena


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:  # noqa: F811
    config = LmdbConfig(ByteSize(8 << 20), free_floor_bytes=ByteSize(0))
    with closing(LmdbTier(config, shm)) as tier:
        tier.open(1)
        yield tier.create_store(LAYOUT, LAYOUT.page_bytes)


def shuffled_pages(seed: int) -> Pages:
    return np.random.default_rng(seed).permutation(2 * NUM_BLOCKS)[:NUM_BLOCKS]


def describe(place: int, data: memoryview) -> bytes:
    return np.frombuffer(data, np.float32)[:1].tobytes()


def accept(place: int, data: memoryview) -> bool:
    return True


def values_of(arena: TierArena, pages: Pages) -> list[float]:
    return [float(arena.memory.page_view(page).mean()) for page in pages.tolist()]


def test_blocks_come_back_into_other_pages(arena: TierArena, store: Store) -> None:
    source, target = shuffled_pages(1), shuffled_pages(2)
    Pipeline().write(store, arena, source, KEYS, describe)
    assert Pipeline().read(store, arena, target, KEYS, accept) == [True] * NUM_BLOCKS
    assert values_of(arena, target) == source.tolist()


def test_what_a_record_is_about_is_told_of_its_own_bytes(arena: TierArena, store: Store) -> None:
    pages = shuffled_pages(1)
    Pipeline().write(store, arena, pages, KEYS, describe)
    expected = {key: np.float32(page).tobytes() for key, page in zip(KEYS, pages, strict=True)}
    assert scan_all(store) == expected


def test_only_good_blocks_that_are_there_are_copied(arena: TierArena, store: Store) -> None:
    pages = shuffled_pages(1)
    Pipeline().write(store, arena, pages, KEYS, describe)
    store.delete(KEYS[:10])
    arena.memory.pages[:] = -1
    found = Pipeline().read(store, arena, pages, KEYS, lambda place, data: place != 20)
    assert [place for place, good in enumerate(found) if not good] == [*range(10), 20]
    assert values_of(arena, pages) == [
        page if good else -1 for page, good in zip(pages.tolist(), found, strict=True)
    ]


def test_nothing_is_written_and_read_without_more_ado(arena: TierArena, store: Store) -> None:
    none = np.empty(0, np.int64)
    Pipeline().write(store, arena, none, [], describe)
    assert Pipeline().read(store, arena, none, [], accept) == []


def test_a_full_store_keeps_whole_batches(arena: TierArena, store: Store) -> None:
    pages = np.tile(np.arange(NUM_BLOCKS), 4)  # more than the store has room for
    keys = [key_of(number) for number in range(len(pages))]
    with pytest.raises(TierFull):
        Pipeline().write(store, arena, pages, keys, describe)
    kept = len(scan_all(store))
    assert kept % 7 == 0
    assert scan_all(store).keys() == set(keys[:kept])
