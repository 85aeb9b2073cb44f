"""Pages and runs of pages as arrays over one buffer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from kvd.arena.base import NUMPY_DTYPES, Arena
from kvd.protocol.layout import ITEM_BYTES, Layout
from kvd.protocol.messages import Run

LAYOUT = Layout(3, 2, 5, "float16", block_size=4)
NUM_PAGES = 6


@pytest.fixture
def memory() -> bytearray:
    return bytearray(NUM_PAGES * LAYOUT.page_bytes)


@pytest.fixture
def arena(memory: bytearray) -> Arena:
    arena = Arena(LAYOUT, NUM_PAGES, memoryview(memory))
    arena.pages[...] = np.arange(arena.pages.size).reshape(arena.pages.shape) % 2039
    return arena


def test_a_page_has_the_shape_of_its_block(arena: Arena) -> None:
    assert arena.page_view(0).shape == (3, 2, 4, 2, 5)


def test_a_run_has_the_tokens_of_its_pages_in_order(arena: Arena) -> None:
    run = arena.run_view(Run(2, 3))
    assert run.shape == (3, 2, 12, 2, 5)
    for place in range(3):
        tokens = run[:, :, place * 4 : place * 4 + 4]
        assert np.array_equal(tokens, arena.page_view(2 + place))


def test_a_run_of_one_layer_and_plane_is_consecutive_memory(arena: Arena) -> None:
    keys = arena.run_view(Run(1, 4))[2, 0]
    assert keys.flags.c_contiguous
    assert keys.strides == (2 * 5 * 2, 5 * 2, 2)


def test_views_write_to_the_same_pages(arena: Arena, memory: bytearray) -> None:
    arena.page_view(3)[:] = 7
    assert (arena.run_view(Run(2, 2))[:, :, 4:] == 7).all()
    arena.run_view(Run(3, 1))[1, 0, 0] = 9
    assert (arena.page_view(3)[1, 0, 0] == 9).all()
    assert np.array_equal(np.frombuffer(memory, np.float16), arena.root)


def test_a_view_writes_to_no_other_page(arena: Arena) -> None:
    others = [page for page in range(NUM_PAGES) if page not in (2, 3)]
    before = arena.pages[others].copy()
    arena.run_view(Run(2, 2))[:] = -1
    assert np.array_equal(arena.pages[others], before)


@pytest.mark.parametrize("page", [-1, NUM_PAGES, NUM_PAGES + 1])
def test_a_page_out_of_bounds_is_refused(arena: Arena, page: int) -> None:
    with pytest.raises(IndexError, match=str(NUM_PAGES)):
        arena.page_view(page)


@pytest.mark.parametrize("run", [(-1, 2), (0, 0), (0, -1), (5, 2), (6, 1), (0, 7), (-6, 6)])
def test_a_run_out_of_bounds_is_refused(arena: Arena, run: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match=str(NUM_PAGES)):
        arena.run_view(Run(*run))


def test_all_pages_are_one_run(arena: Arena) -> None:
    assert arena.run_view(Run(0, NUM_PAGES)).size == arena.root.size


def test_what_is_read_only_cannot_be_written(memory: bytearray) -> None:
    arena = Arena(LAYOUT, NUM_PAGES, memoryview(memory).toreadonly())
    for view in (arena.page_view(0), arena.run_view(Run(0, 2))):
        with pytest.raises(ValueError, match="read-only"):
            view[:] = 1


@pytest.mark.parametrize("size", [-1, 1])
def test_a_buffer_of_another_size_is_refused(size: int) -> None:
    buffer = memoryview(bytearray(NUM_PAGES * LAYOUT.page_bytes + 2 * size))
    with pytest.raises(ValueError, match="reshape"):
        Arena(LAYOUT, NUM_PAGES, buffer).page_view(0)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_has_items_of_its_size(dtype: Any) -> None:
    assert NUMPY_DTYPES[dtype].itemsize == ITEM_BYTES[dtype]
    layout = Layout(1, 1, 3, dtype, block_size=2)
    arena = Arena(layout, 2, memoryview(bytearray(2 * layout.page_bytes)))
    assert arena.page_view(1).nbytes == layout.page_bytes


def test_the_root_lives_as_long_as_any_view(memory: bytearray) -> None:
    arena = Arena(LAYOUT, NUM_PAGES, memoryview(memory))
    root, view = weakref.ref(arena.root), arena.run_view(Run(0, 2))[0, 1, 3:]
    del arena
    gc.collect()
    assert root() is not None
    del view
    gc.collect()
    assert root() is None
