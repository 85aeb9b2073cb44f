"""Runs: consecutive pages, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.protocol.messages import Run, Runs

Pages: TypeAlias = NDArray[np.int64]


def runs_of(pages: Pages | Sequence[int]) -> Runs:
    """Pages in order, as runs of consecutive ones."""
    index = np.asarray(pages, np.int64)
    if len(index) == 0:
        return ()
    starts = np.concatenate(([0], np.flatnonzero(np.diff(index) != 1) + 1, [len(index)]))
    return tuple(
        Run(first, count)
        for first, count in zip(index[starts[:-1]].tolist(), np.diff(starts).tolist(), strict=True)
    )


def pages_of(runs: Iterable[Run]) -> Pages:
    """Runs as their pages, in order."""
    pieces = [np.arange(run.first, run.first + run.count) for run in runs]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
