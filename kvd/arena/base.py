"""Arena: the pages of one layout as arrays over a buffer, whoever owns the buffer."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.arena.runs import runs_of

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run

Array: TypeAlias = NDArray[Any]

# Pages are handed out by aligned groups of this many, and clients reserve as many ahead: the runs
# of interleaved sequences then have 16 pages and not one. Fused attention pays off from there.
GROUP_PAGES = 16

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
        self.root: Array = np.frombuffer(buffer, NUMPY_DTYPES[layout.dtype])

    @property
    def pages(self) -> Array:
        """All pages: `[layers, planes, pages, block_size, heads, head_size]`."""
        layout = self.layout
        return self.root.reshape(
            layout.num_layers,
            layout.num_planes,
            self.num_pages,
            layout.block_size,
            layout.num_kv_heads,
            layout.head_size,
        )

    def page_view(self, page: int) -> Array:
        """One page: `[layers, planes, block_size, heads, head_size]`."""
        self._check(page, 1)
        return self.pages[:, :, page]

    def run_view(self, run: Run) -> Array:
        """A run of pages: `[layers, planes, tokens, heads, head_size]`.

        Of one layer and plane it is one strided array over consecutive memory.
        """
        self._check(run.first, run.count)
        layout = self.layout
        return self.pages[:, :, run.first : run.first + run.count].reshape(
            layout.num_layers,
            layout.num_planes,
            run.count * layout.block_size,
            layout.num_kv_heads,
            layout.head_size,
            copy=False,
        )

    def slice_view(self, number: int, run: Run) -> memoryview:
        """The bytes of a run of pages in one slice: one layer and plane, counted layer by layer."""
        self._check(run.first, run.count)
        if not 0 <= number < self.layout.num_slices:
            raise IndexError(f"slice {number} of {self.layout.num_slices}")
        slices = self.root.reshape(self.layout.num_slices, self.num_pages, -1)
        pages = slices[number, run.first : run.first + run.count].reshape(-1, copy=False)
        return pages.view(np.uint8).data

    def write_slice(self, number: int, run: Run, data: memoryview) -> None:
        """Write what `slice_view` shows."""
        self.slice_view(number, run)[:] = data

    def copy_out(self, pages: Pages, out: memoryview) -> None:
        """Copy pages into `out`, one after the other, each as `page_view` has it."""
        for run, piece in self._by_runs(pages, out):
            piece[...] = run

    def copy_in(self, pages: Pages, data: memoryview) -> None:
        """Copy what `copy_out` gave into pages."""
        for run, piece in self._by_runs(pages, data):
            run[...] = piece

    def _by_runs(self, pages: Pages, data: memoryview) -> Iterator[tuple[Array, Array]]:
        """Run by run, the pages and what of `data` is theirs: `[pages, layers, planes, ...]`."""
        blocks = np.frombuffer(data, self.root.dtype)
        blocks = blocks.reshape(len(pages), *self.page_view(0).shape)
        start = 0
        for run in runs_of(pages):
            self._check(run.first, run.count)
            there = np.moveaxis(self.pages[:, :, run.first : run.first + run.count], 2, 0)
            yield there, blocks[start : start + run.count]
            start += run.count

    def _check(self, first: int, count: int) -> None:
        # numpy would take a negative page from the end, and cut a run that is too long.
        if not (first >= 0 and count >= 1 and first + count <= self.num_pages):
            raise IndexError(f"pages {first} to {first + count - 1} of {self.num_pages}")


def punch(fd: int, start: int, size: int) -> None:
    """Take memory of a file on a tmpfs back; what is read there from then on is zeros."""
    with mmap.mmap(fd, size, offset=start) as piece:
        piece.madvise(mmap.MADV_REMOVE)


def slice_offsets(layout: Layout, num_pages: int, first: int) -> range:
    """Where page `first` begins in the file, once per layer and plane."""
    stride = num_pages * layout.slice_bytes
    start = first * layout.slice_bytes
    return range(start, start + layout.num_slices * stride, stride)
