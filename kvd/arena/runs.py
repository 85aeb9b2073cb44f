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
    (breaks,) = (index[1:] - index[:-1] != 1).nonzero()
    ends = breaks.tolist()
    runs, start = [], 0
    for end in (*ends, len(index) - 1):
        runs.append(Run(int(index[start]), end + 1 - start))
        start = end + 1
    return tuple(runs)


def pages_of(runs: Iterable[Run]) -> Pages:
    """Runs as their pages, in order."""
    pieces = [np.arange(run.first, run.first + run.count) for run in runs]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
