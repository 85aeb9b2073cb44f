"""Arena: the pages of one layout as arrays over a buffer, whoever owns the buffer."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.arena.runs import runs_of
from kvd.protocol.errors import Unsupported

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run, Runs

Array: TypeAlias = NDArray[Any]

# numpy has no bfloat16: its bits are uint16 there, and torch views them as what they are.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


class Arena:
    """Equal pages of one layout over one buffer; nobody else knows the storage order.

    The arrays are views: they hold the buffer, and writing to them writes to the pages. Which pages
    one may touch is said by leases, not here. `root` is what every view is made of: while any of
    them lives, it does.
    """

    def __init__(self, layout: Layout, num_pages: int, buffer: memoryview) -> None:
        """`buffer` holds `num_pages * layout.page_bytes` bytes; it may be read-only."""
        self.layout = layout
        self.num_pages = num_pages
        dtype = np.dtype(np.uint8) if layout.is_opaque else NUMPY_DTYPES[layout.dtype]
        self.root: Array = np.frombuffer(buffer, dtype)

    @property
    def pages(self) -> Array:
        """All pages: `[pages, *layout.page_shape]`, whatever the order."""
        if self.layout.is_contiguous:
            return self.root.reshape(self.num_pages, *self.layout.page_shape)
        return self.layers.transpose(2, 0, 1, 3, 4, 5)

    @property
    def layers(self) -> Array:
        """All pages by layer: `[layers, planes, pages, block_size, heads, head_size]`.

        Raises Unsupported where they do not lie so.
        """
        check_layers(self.layout)
        layers, planes, *block = self.layout.page_shape
        return self.root.reshape(layers, planes, self.num_pages, *block)

    def page_view(self, page: int) -> Array:
        """One page: `layout.page_shape`."""
        self._check(page, 1)
        return self.pages[page, ...]

    def pages_view(self, run: Run) -> Array:
        """A run of pages: `[pages, *layout.page_shape]`."""
        self._check(run.first, run.count)
        return self.pages[run.first : run.first + run.count]

    def run_view(self, run: Run) -> Array:
        """A run of pages: `[layers, planes, tokens, heads, head_size]`.

        Of one layer and plane it is one strided array over consecutive memory. Raises Unsupported
        where the order does not allow it.
        """
        self._check(run.first, run.count)
        pages = self.layers[:, :, run.first : run.first + run.count]
        layers, planes, count, block_size, *row = pages.shape
        return pages.reshape(layers, planes, count * block_size, *row, copy=False)

    def slice_views(self, slices: range, runs: Runs) -> Iterator[memoryview]:
        """The bytes of some slices of pages, each piece of consecutive memory for itself.

        A slice is one layer and plane, counted layer by layer; where pages are opaque, one layer.
        They come slice by slice, or page by page where those are contiguous.
        """
        num_slices = self.layout.num_slices
        if not 0 <= slices.start <= slices.stop <= num_slices:
            raise IndexError(f"slices {slices.start} to {slices.stop - 1} of {num_slices}")
        for run in runs:
            self._check(run.first, run.count)
        for array in self._lying(slices, [slice(run.first, run.first + run.count) for run in runs]):
            for piece in [array] if array.flags.c_contiguous else array:
                yield piece.reshape(-1, copy=False).data

    def _lying(self, slices: range, runs: list[slice]) -> list[Array]:
        """The bytes of these slices as they lie: those of a run, or of a run in one slice."""
        memory, num_slices = self.root.view(np.uint8), self.layout.num_slices
        if self.layout.is_contiguous:
            by_page = memory.reshape(self.num_pages, num_slices, -1)
            return [by_page[pages, slices.start : slices.stop] for pages in runs]
        by_slice = memory.reshape(num_slices, self.num_pages, -1)
        return [by_slice[number, pages] for number in slices for pages in runs]

    def write_slices(self, slices: range, runs: Runs, data: memoryview) -> None:
        """Write what `slice_views` shows, piece behind piece."""
        start = 0
        for piece in self.slice_views(slices, runs):
            piece[:] = data[start : start + len(piece)]
            start += len(piece)

    def rows(self, page: int, num_rows: int) -> bytes:
        """The first rows of a page, in every layer and plane."""
        return self._rows(page, num_rows).tobytes()

    def write_rows(self, page: int, num_rows: int, data: memoryview) -> None:
        """Write what `rows` gave."""
        there = self._rows(page, num_rows)
        there[...] = np.frombuffer(data, there.dtype).reshape(there.shape)

    def _rows(self, page: int, num_rows: int) -> Array:
        return self.page_view(page)[:, :, :num_rows]

    def copy_out(self, pages: Pages, out: memoryview) -> None:
        """Copy pages into `out`, one after the other, each as `page_view` has it."""
        for run, piece in self._by_runs(pages, out):
            piece[...] = run

    def copy_in(self, pages: Pages, data: memoryview) -> None:
        """Copy what `copy_out` gave into pages."""
        for run, piece in self._by_runs(pages, data):
            run[...] = piece

    def _by_runs(self, pages: Pages, data: memoryview) -> Iterator[tuple[Array, Array]]:
        """Run by run, the pages and what of `data` is theirs."""
        blocks = np.frombuffer(data, self.root.dtype)
        blocks = blocks.reshape(len(pages), *self.layout.page_shape)
        start = 0
        for run in runs_of(pages):
            yield self.pages_view(run), blocks[start : start + run.count]
            start += run.count

    def _check(self, first: int, count: int) -> None:
        # numpy would take a negative page from the end, and cut a run that is too long.
        if not (first >= 0 and count >= 1 and first + count <= self.num_pages):
            raise IndexError(f"pages {first} to {first + count - 1} of {self.num_pages}")


def check_layers(layout: Layout) -> None:
    """Refuse to see pages by layer where they do not lie so (Unsupported)."""
    if layout.is_contiguous:
        raise Unsupported(
            f"in the order {layout.order} the tokens of consecutive pages are not one array: take "
            "whole pages (read_pages and write_pages of a lease)"
        )


def punch(fd: int, start: int, size: int) -> None:
    """Take memory of a file on a tmpfs back; what is read there from then on is zeros."""
    with mmap.mmap(fd, size, offset=start) as piece:
        piece.madvise(mmap.MADV_REMOVE)


def pieces_of(layout: Layout, num_pages: int, run: Run) -> Iterator[range]:
    """Where a run of pages lies in an arena of so many: each piece of consecutive bytes."""
    num_pieces = 1 if layout.is_contiguous else layout.num_slices
    piece_bytes = layout.page_bytes // num_pieces
    for number in range(num_pieces):
        start = (number * num_pages + run.first) * piece_bytes
        yield range(start, start + run.count * piece_bytes)
