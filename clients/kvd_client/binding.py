"""Binding: a namespace's pages as one session of this process has them, and their faulting in."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvd.arena.host import MappedArena
from kvd.arena.runs import Pages, runs_of
from kvd.protocol.errors import LeaseEnded
from kvd_client.mirror import Mirror

if TYPE_CHECKING:
    import torch

    from kvd.arena.base import Array
    from kvd.arena.device import MappedDevice
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run
    from kvd_client.session import Session

# Runs shorter than this are left to fault: a thread would cost as much.
POPULATE_BYTES = 1 << 20


class Binding:
    """A namespace as one session knows it: its number and its arena, mapped or copied."""

    def __init__(
        self, session: Session, namespace: int, arena: MappedArena | MappedDevice | Mirror
    ) -> None:
        self.session = session
        self.namespace = namespace
        self._arena: MappedArena | MappedDevice | Mirror | None = arena
        self._pid = os.getpid()
        self._tensor: torch.Tensor | None = None
        self._least_pages = max(1, POPULATE_BYTES // arena.layout.page_bytes)
        self._read = np.zeros(arena.num_pages, np.bool_)
        self._written = np.zeros(arena.num_pages, np.bool_)

    @property
    def arena(self) -> MappedArena | MappedDevice | Mirror:
        """The pages; raises LeaseEnded when the session is over."""
        if (arena := self._arena) is None:
            raise LeaseEnded("the lease ended with its session")
        return arena

    def end(self) -> None:
        """Let go of the arena, whoever still has this; views of it that live keep the mapping."""
        self._arena = self._tensor = None

    @property
    def is_own(self) -> bool:
        """Whether this process made it; a forked child has no mapping of its parent's."""
        return os.getpid() == self._pid

    @property
    def mirror(self) -> Mirror | None:
        """The arena, where its bytes are copied."""
        return self.arena if isinstance(self.arena, Mirror) else None

    @property
    def device(self) -> MappedDevice | None:
        """The arena, where its pages lie on a device."""
        return None if isinstance(self.arena, MappedArena | Mirror) else self.arena

    def settle(self) -> None:
        """Wait for what this process has begun on the pages, where that goes on by itself."""
        if self.is_own and (device := self.device) is not None:
            device.settle()

    @property
    def read_tensor(self) -> torch.Tensor:
        """All pages, read-only: `[layers, planes, pages, block_size, heads, head_size]`.

        Raises Unsupported where the order does not allow it.
        """
        if self._tensor is None:
            with warnings.catch_warnings():
                # torch has no read-only tensors and says so: a write to this one would fault.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                self._tensor = as_tensor(self.arena.readable.layers, self.arena.layout)
        return self._tensor

    def populate_read(self, pages: Pages, populating: Populating) -> None:
        """Fault pages in for reading, in the background, those that were not yet."""
        if isinstance(self.arena, MappedArena):
            self._populate(pages, self._read, self.arena.populate_read, populating)

    def populate_write(self, pages: Pages, populating: Populating) -> None:
        """Fault reserved pages in for writing, in the background, those that were not yet."""
        if isinstance(self.arena, MappedArena):
            self._populate(pages, self._written, self.arena.populate_write, populating)

    def _populate(
        self,
        pages: Pages,
        done: NDArray[np.bool_],
        populate: Callable[[Run], Iterator[None]],
        populating: Populating,
    ) -> None:
        if len(pages) < self._least_pages:
            return
        pages = pages[~done[pages]]
        if len(pages) < self._least_pages:
            return
        done[pages] = True
        populating.begin(chain.from_iterable(map(populate, runs_of(pages))))


class Populating:
    """The faulting in of a lease's pages, in threads; no step of it comes after its end.

    A page that was given back, and is touched then, would have memory that nobody counts.
    """

    def __init__(self) -> None:
        # One that the collector may take again, should it end the lease within a step.
        self._step = threading.RLock()
        self._is_over = False

    def begin(self, steps: Iterator[None]) -> None:
        threading.Thread(target=self._run, args=(steps,), name="kvd-populate", daemon=True).start()

    def _run(self, steps: Iterator[None]) -> None:
        while self._take(steps):
            pass

    def _take(self, steps: Iterator[None]) -> bool:
        with self._step:
            return not self._is_over and next(steps, self) is not self

    def end(self) -> None:
        """Wait for the step under way, a few milliseconds at most, and have no other."""
        with self._step:
            self._is_over = True


def as_tensor(view: Array | torch.Tensor, layout: Layout) -> torch.Tensor:
    """A torch tensor over the view's memory, in the layout's dtype."""
    import torch  # only who asks for tensors needs it

    return torch.as_tensor(view).view(getattr(torch, layout.dtype))
