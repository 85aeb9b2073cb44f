"""LeaseViews: a lease's pages by tokens, as numpy arrays or torch tensors."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvd.arena.runs import Pages, runs_of
from kvd.protocol.errors import BadRequest, LeaseEnded, PagesInUse, Unsupported
from kvd.protocol.layout import check_rows
from kvd_client.asked import whole
from kvd_client.binding import as_tensor

if TYPE_CHECKING:
    import torch

    from kvd.arena.base import Arena, Array
    from kvd.arena.device import DevicePages
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run
    from kvd_client.binding import Binding


class LeaseViews:
    """The views of a lease: read-only ones of what is matched, writable ones of what is reserved.

    Which pages they are of is for the lease to say: by its block table, and by how many tokens
    were matched or named in a commit, which are never written again.
    """

    layout: Layout
    pages: Pages
    _binding: Binding | None
    _num_named: int

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._exports: list[_Export] = []

    @property
    def capacity_tokens(self) -> int:
        """Tokens for which the block table has pages."""
        return len(self.pages) * self.layout.block_size

    def read_arrays(self, start: int, stop: int) -> list[Array]:
        """The KV of tokens `start` to `stop - 1`, one read-only array per run of pages.

        Each is `[layers, planes, tokens, heads, head_size]`; of one layer and plane it is one
        strided array. bfloat16 comes as its bits, in uint16. Raises Unsupported for layouts in
        another order than `layer_first`, which have `read_pages`, and where the pages lie on a
        device, of which there are tensors alone.
        """
        self._check_arrays()
        return self._read_views(start, stop)

    def read_tensors(self, start: int, stop: int) -> list[torch.Tensor]:
        """As `read_arrays`, as torch tensors, on the device where the pages lie.

        torch knows no read-only: writing to one faults, or on a GPU damages what others read.
        """
        pages = self._bound().read_tensor
        return [
            pages[:, :, run.first : run.first + run.count].flatten(2, 3)[:, :, part]
            for run, part in self._pieces(start, stop)
        ]

    def write_arrays(self, start: int, stop: int) -> list[Array]:
        """Writable arrays over reserved pages, shaped as those of `read_arrays`.

        Let go of them before commit, abort or release, which refuse while any of them lives.
        Raises BadRequest for tokens that are matched or committed: those are never written again.
        Raises Unsupported as `read_arrays` does.
        """
        self._check_arrays()
        return self._write_views(start, stop)

    def write_tensors(self, start: int, stop: int) -> list[torch.Tensor]:
        """As `write_arrays`, as torch tensors, on the device where the pages lie."""
        return [as_tensor(view, self.layout) for view in self._write_views(start, stop)]

    def _check_arrays(self) -> None:
        if (device := self._bound().device) is not None:
            raise Unsupported(
                f"the pages lie on {device.device}: use read_tensors and write_tensors"
            )

    def _read_views(self, start: int, stop: int) -> list[Any]:
        """Arrays, or tensors where the pages lie on a device."""
        arena = self._bound().arena.readable
        return [arena.run_view(run)[:, :, part] for run, part in self._pieces(start, stop)]

    def _write_views(self, start: int, stop: int) -> list[Any]:
        pieces = self._pieces(start, stop)
        arena = self._writable(start, stop)
        return [arena.run_view(run)[:, :, part] for run, part in pieces]

    def read_pages(self, start: int, stop: int) -> list[Any]:
        """The whole pages of tokens `start` to `stop - 1`, one read-only array per run of pages.

        In every order each is `[pages, layers, planes, block_size, heads, head_size]`; of an opaque
        layout `[pages, layers, bytes]` in uint8. Where they lie on a device, they are tensors.
        """
        arena = self._bound().arena.readable
        return [arena.pages_view(run) for run, _ in self._pieces(start, stop)]

    def write_pages(self, start: int, stop: int) -> list[Any]:
        """Writable arrays shaped as those of `read_pages`, on the terms of `write_arrays`."""
        pieces = self._pieces(start, stop)
        arena = self._writable(start, stop)
        return [arena.pages_view(run) for run, _ in pieces]

    def _writable(self, start: int, stop: int) -> Arena | DevicePages:
        """An arena of which every view counts as one of these tokens."""
        if start < self._num_named:
            raise BadRequest(f"token {start} is committed; writable from {self._num_named} on")
        arena = self._bound().arena.writable()
        self._exports.append(_Export(start, stop, weakref.ref(arena.root)))
        return arena

    def _pieces(self, start: int, stop: int) -> list[tuple[Run, slice]]:
        """The runs of pages that hold these tokens, and which tokens of each run."""
        if not 0 <= whole(start) <= whole(stop) <= self.capacity_tokens:
            raise BadRequest(
                f"tokens {start} to {stop} of {self.capacity_tokens} for which there are pages"
            )
        block_size = self.layout.block_size
        first = start // block_size
        at = first * block_size
        pieces = []
        for run in runs_of(self.pages[first : -(-stop // block_size)]):
            size = run.count * block_size
            pieces.append((run, slice(max(start - at, 0), min(stop - at, size))))
            at += size
        return pieces

    def copy_rows(self, source: LeaseViews, start: int, stop: int) -> None:
        """Copy the KV of tokens `start` to `stop - 1` of another lease into own pages.

        Raises BadRequest where the layouts differ, one of them has no pages for these tokens, or
        they are matched or committed here; Unsupported where the layout is opaque.
        """
        if source.layout != self.layout:
            raise BadRequest(f"another layout: {self.layout.difference(source.layout)}")
        check_rows(self.layout)
        sources = chain.from_iterable(source.read_pages(start, stop))
        targets = chain.from_iterable(self.write_pages(start, stop))
        at = start - start % self.layout.block_size
        for theirs, own in zip(sources, targets, strict=True):
            rows = slice(max(start - at, 0), stop - at)
            own[:, :, rows] = theirs[:, :, rows]
            at += self.layout.block_size

    def _check_unused(self, stop: int) -> None:
        """Refuse while a writable view of tokens up to `stop` lives; wait for work on a device.

        So what is committed is whole, and what is given back is neither read nor written any more.
        """
        self._exports = [export for export in self._exports if export.root() is not None]
        held = [export for export in self._exports if export.start < stop]
        if held:
            raise PagesInUse(
                f"a writable view of tokens {held[0].start} to {held[0].stop} is still in use: "
                "let go of the arrays and tensors first"
            )
        if (binding := self._binding) is not None:
            binding.settle()

    def _bound(self) -> Binding:
        binding = self._binding
        if binding is None:
            raise LeaseEnded(
                "the lease was released, ended with its session, or never had pages (no daemon "
                "answered)"
            )
        if not binding.is_own:
            raise LeaseEnded("a forked child has no leases of its parent: match anew")
        return binding


@dataclass(frozen=True, slots=True)
class _Export:
    """Writable views of these tokens, alive while `root` is: every view of an arena holds it."""

    start: int
    stop: int
    root: weakref.ref[object]
