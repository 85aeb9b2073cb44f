"""The checksum of a block is that of its bytes in page order, however it is stored."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvd.arena import checksum
from kvd.arena.base import Arena
from kvd.arena.checksum import block_checksums
from kvd.protocol.layout import Layout

LAYOUT = Layout(3, 2, 4, "float16", block_size=4)
NUM_PAGES = 8


@pytest.fixture
def arena() -> Arena:
    data = np.random.default_rng(0).bytes(NUM_PAGES * LAYOUT.page_bytes)
    return Arena(LAYOUT, NUM_PAGES, memoryview(bytearray(data)))


def expected(arena: Arena, *pages: int) -> list[int]:
    return [xxhash.xxh3_64_intdigest(arena.page_view(page).tobytes()) for page in pages]


def test_a_checksum_is_of_the_bytes_in_page_order(arena: Arena) -> None:
    assert block_checksums(arena, np.array([5, 0, 1])).tolist() == expected(arena, 5, 0, 1)


@pytest.mark.parametrize("pages_at_once", [0, 1, 3, 8])
def test_more_pages_than_scratch_memory_go_one_piece_after_another(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, pages_at_once: int
) -> None:
    monkeypatch.setattr(checksum, "SCRATCH_BYTES", pages_at_once * LAYOUT.page_bytes)
    sums = block_checksums(arena, np.arange(NUM_PAGES))
    assert sums.tolist() == expected(arena, *range(NUM_PAGES))


def test_every_bit_of_a_block_counts(arena: Arena) -> None:
    (before,) = block_checksums(arena, np.array([3]))
    view = arena.page_view(3).view(np.uint16)
    for place in np.ndindex(view.shape):
        view[place] ^= 1
        assert block_checksums(arena, np.array([3])) != before
        view[place] ^= 1
    assert block_checksums(arena, np.array([3])) == before


def test_no_pages_have_no_checksums(arena: Arena) -> None:
    assert block_checksums(arena, np.empty(0, np.int64)).tolist() == []


def test_zero_stands_for_none_and_is_no_checksum(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data: 0)
    assert block_checksums(arena, np.arange(2)).tolist() == [1, 1]
