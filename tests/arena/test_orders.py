"""However an arena is stored: its pages are the same, and each has its bytes to itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvd.arena.base import Arena, pieces_of
from kvd.arena.runs import pages_of, runs_of
from kvd.protocol.errors import Unsupported
from kvd.protocol.layout import ITEM_BYTES, Layout
from kvd.protocol.messages import Run

NUM_PAGES = 9
LAYOUT = Layout(3, 2, 5, "float16", block_size=4)
PAGE_FIRST = replace(LAYOUT, order="page_first")
OPAQUE = replace(LAYOUT, order="opaque", layer_bytes=50, packing="a test's")

SMALL = st.integers(1, 4)
TRANSPARENT = st.builds(
    Layout,
    SMALL,
    SMALL,
    SMALL,
    st.sampled_from(sorted(ITEM_BYTES)),
    SMALL,
    st.integers(1, 2),
    st.sampled_from(["layer_first", "page_first"]),
)
PACKED = st.builds(
    lambda layers, size: replace(OPAQUE, num_layers=layers, layer_bytes=size), SMALL, SMALL
)
LAYOUTS = TRANSPARENT | PACKED
PAGES = st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, unique=True).map(np.array)
RUNS = PAGES.map(lambda pages: runs_of(np.sort(pages)))


def zeros(layout: Layout) -> Arena:
    return Arena(layout, NUM_PAGES, memoryview(bytearray(NUM_PAGES * layout.page_bytes)))


def filled(layout: Layout) -> Arena:
    """An arena in which neighbouring bytes differ."""
    arena = zeros(layout)
    arena.root.view(np.uint8)[:] = np.arange(arena.root.nbytes) % 251
    return arena


def same(one: Arena, other: Arena, pages: Any) -> bool:
    return bool(one.pages[pages].tobytes() == other.pages[pages].tobytes())


@given(LAYOUTS, st.integers(0, NUM_PAGES - 1))
def test_a_page_has_its_bytes_to_itself(layout: Layout, page: int) -> None:
    arena, before = filled(layout), filled(layout)
    arena.page_view(page)[...] = 0
    others = np.delete(np.arange(NUM_PAGES), page)
    assert same(arena, before, others)
    assert not arena.page_view(page).any()


@given(LAYOUTS, PAGES, PAGES)
def test_what_is_copied_out_is_copied_in_elsewhere(layout: Layout, some: Any, others: Any) -> None:
    source, target = filled(layout), zeros(layout)
    size = min(len(some), len(others))
    data = memoryview(bytearray(size * layout.page_bytes))
    source.copy_out(some[:size], data)
    target.copy_in(others[:size], data)
    assert target.pages[others[:size]].tobytes() == source.pages[some[:size]].tobytes() == data


@given(TRANSPARENT, PAGES)
def test_pages_go_from_one_order_to_another(layout: Layout, pages: Any) -> None:
    other = "page_first" if layout.order == "layer_first" else "layer_first"
    source, target = filled(layout), zeros(replace(layout, order=other))
    data = memoryview(bytearray(len(pages) * layout.page_bytes))
    source.copy_out(pages, data)
    target.copy_in(pages, data)
    assert same(source, target, pages)


@given(LAYOUTS, RUNS, st.data())
def test_slices_are_all_bytes_of_their_pages(layout: Layout, runs: Any, data: Any) -> None:
    source, target = filled(layout), zeros(layout)
    cut = data.draw(st.integers(0, layout.num_slices))
    for slices in (range(cut), range(cut, layout.num_slices)):
        views = [arena.slice_views(slices, runs) for arena in (source, target)]
        for lying, copy in zip(*views, strict=True):
            copy[:] = lying
    assert same(source, target, pages_of(runs))
    assert not target.pages[np.delete(np.arange(NUM_PAGES), pages_of(runs))].any()


@given(LAYOUTS, RUNS)
def test_a_run_lies_where_its_pieces_say(layout: Layout, runs: Any) -> None:
    arena = zeros(layout)
    memory = arena.root.view(np.uint8)
    for run in runs:
        for piece in pieces_of(layout, NUM_PAGES, run):
            memory[piece.start : piece.stop] += 1
    views = list(arena.slice_views(range(layout.num_slices), runs))
    assert set(b"".join(views)) == {1}
    assert memory.sum() == sum(map(len, views)) == len(pages_of(runs)) * layout.page_bytes


@pytest.mark.parametrize("layout", [PAGE_FIRST, OPAQUE], ids=lambda layout: layout.order)
def test_contiguous_pages_are_one_piece(layout: Layout) -> None:
    arena = filled(layout)
    assert arena.pages_view(Run(2, 3)).flags.c_contiguous
    assert len(list(pieces_of(layout, NUM_PAGES, Run(2, 3)))) == 1
    assert len(list(arena.slice_views(range(layout.num_slices), (Run(2, 3),)))) == 1


@pytest.mark.parametrize("layout", [PAGE_FIRST, OPAQUE], ids=lambda layout: layout.order)
def test_the_tokens_of_contiguous_pages_are_no_array(layout: Layout) -> None:
    with pytest.raises(Unsupported, match=f"{layout.order}.*read_pages"):
        zeros(layout).run_view(Run(0, 2))


def test_pages_have_one_shape_in_both_orders() -> None:
    assert zeros(LAYOUT).pages.shape == zeros(PAGE_FIRST).pages.shape == (NUM_PAGES, 3, 2, 4, 2, 5)
    assert zeros(PAGE_FIRST).page_view(3).shape == (3, 2, 4, 2, 5)


def test_an_opaque_page_is_the_bytes_of_its_layers() -> None:
    page = zeros(OPAQUE).page_view(3)
    assert page.shape == (3, 50)
    assert page.dtype == np.uint8


@pytest.mark.parametrize("slices", [range(-1, 2), range(5, 7), range(3, 2)])
def test_slices_out_of_bounds_are_refused(slices: range) -> None:
    with pytest.raises(IndexError, match="of 6"):
        list(zeros(PAGE_FIRST).slice_views(slices, (Run(0, 1),)))
