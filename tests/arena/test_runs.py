"""Runs and pages are the same thing, said in two ways."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvd.arena.runs import pages_of, runs_of
from kvd.protocol.messages import Run

page_lists = st.lists(st.integers(0, 12))


def test_consecutive_pages_are_one_run() -> None:
    assert runs_of([4, 5, 6, 9, 10, 2]) == (Run(4, 3), Run(9, 2), Run(2, 1))


def test_pages_keep_their_order_and_a_descent_is_no_run() -> None:
    assert runs_of([3, 2, 1, 1]) == (Run(3, 1), Run(2, 1), Run(1, 1), Run(1, 1))


def test_no_pages_are_no_runs() -> None:
    assert runs_of([]) == runs_of(np.empty(0, np.int64)) == ()
    assert pages_of(()).tolist() == []
    assert pages_of(()).dtype == np.int64


@given(page_lists)
def test_pages_come_back_from_their_runs(pages: list[int]) -> None:
    assert pages_of(runs_of(pages)).tolist() == pages


@given(page_lists)
def test_no_two_runs_could_be_one(pages: list[int]) -> None:
    runs = runs_of(pages)
    assert all(run.count >= 1 for run in runs)
    for one, following in pairwise(runs):
        assert one.first + one.count != following.first


def test_runs_hold_plain_numbers_that_can_be_sent() -> None:
    (run,) = runs_of(np.array([4, 5], np.int64))
    assert (type(run.first), type(run.count)) == (int, int)
