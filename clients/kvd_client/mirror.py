"""Mirror: private memory in the place of the arena, for clients that cannot map it, or will not.

It has the arena's length and page numbers, so that whatever reads or writes pages need not know of
it. The bytes are copied over the socket: a block's when a lease has it, those of the client's own
pages before the commit that names them.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvd.arena.base import Arena, pieces_of
from kvd.arena.runs import Pages, runs_of
from kvd.protocol.messages import MAX_PIECE_BYTES, Run, Runs

if TYPE_CHECKING:
    from kvd.protocol.layout import Layout

MAP_NORESERVE = 0x4000


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message carries: of some pages, some of their slices."""

    runs: Runs
    first_slice: int
    num_slices: int


class Mirror:
    """The arena's pages, as far as this client has them; of memory only what is used.

    Concurrency: any thread may hold pages and let go of them. The collector ends leases wherever
    it runs, also under the mutex: what they let go there is left to whoever takes it next.
    """

    def __init__(self, layout: Layout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self._memory = mmap.mmap(
            -1,
            num_pages * layout.page_bytes,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE,
        )
        self.readable = Arena(layout, num_pages, memoryview(self._memory).toreadonly())
        # So many pages together fill whole pages of the system, which alone can be given back.
        self._extent_pages = layout.extent_pages(mmap.PAGESIZE, 1)
        self._num_holders = np.zeros(num_pages, np.int64)
        self._is_loaded = np.zeros(num_pages, np.bool_)
        self._left: deque[Pages] = deque()
        self._mutex = threading.RLock()

    def writable(self) -> Arena:
        """As `MappedArena.writable`."""
        return Arena(self.layout, self.num_pages, memoryview(self._memory))

    def hold(self, pages: Pages) -> None:
        """A lease has these pages: their memory stays."""
        with self._mutex:
            # First of all: pages that come again have other bytes than they had.
            self._clear_left()
            np.add.at(self._num_holders, pages, 1)

    def let_go(self, pages: Pages) -> None:
        """A lease is done with these pages: memory that no other has is given back."""
        self._left.append(pages)
        if not self._mutex._is_owned():  # type: ignore[attr-defined]
            with self._mutex:
                self._clear_left()

    def missing(self, pages: Pages) -> Pages:
        """Those of these pages that are not loaded."""
        return pages[~self._is_loaded[pages]]

    def loaded(self, pages: Pages) -> None:
        """These pages hold what the daemon's do."""
        self._is_loaded[pages] = True

    def pieces(self, pages: Pages) -> Iterator[Piece]:
        """All of these pages, in pieces that a message can carry."""
        total = self.layout.num_slices
        size = max(1, MAX_PIECE_BYTES // self.layout.slice_bytes)
        # Few pieces of memory in each: whole pages, or as many as can be in one slice.
        most = max(1, size // total) if self.layout.is_contiguous else size
        for start in range(0, len(pages), most):
            some = pages[start : start + most]
            step = size // len(some)
            for first in range(0, total, step):
                yield Piece(runs_of(some), first, min(step, total - first))

    def read(self, piece: Piece) -> bytes:
        """A piece's bytes, as they are stored."""
        return b"".join(self._views(self.readable, piece))

    def write(self, piece: Piece, frames: Sequence[memoryview]) -> None:
        """Take a piece's bytes as they were loaded: one frame per piece of memory."""
        for view, frame in zip(self._views(self.writable(), piece), frames, strict=True):
            view[:] = frame

    def _views(self, arena: Arena, piece: Piece) -> Iterator[memoryview]:
        slices = range(piece.first_slice, piece.first_slice + piece.num_slices)
        return arena.slice_views(slices, piece.runs)

    def _clear_left(self) -> None:
        while self._left:
            pages = self._left.popleft()
            np.subtract.at(self._num_holders, pages, 1)
            self._give_back(pages)

    def _give_back(self, pages: Pages) -> None:
        """Give back the memory of the extents of these pages in which nobody has a page."""
        self._is_loaded[pages[self._num_holders[pages] == 0]] = False
        size = self._extent_pages
        for extent in np.unique(pages // size).tolist():
            run = Run(extent * size, size)
            if self._num_holders[run.first : run.first + size].any():
                continue
            for piece in pieces_of(self.layout, self.num_pages, run):
                # What shares memory with other pages stays.
                start = -(-piece.start // mmap.PAGESIZE) * mmap.PAGESIZE
                stop = piece.stop // mmap.PAGESIZE * mmap.PAGESIZE
                if start < stop:
                    self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
