"""The pages of one arena: one state each, handed out in long runs."""

from __future__ import annotations

import numpy as np

from kvd.arena.page_table import PageState
from kvd.arena.runs import Pages, pages_of, runs_of
from kvd.protocol.messages import Run


class PagePool:
    """One state per page, from which every count is derived.

    `num_free` is kept beside it because each reserve asks; `check` compares the two. `num_backing`
    pages are between begin_backing and end_backing.
    """

    def __init__(self, num_pages: int, extent_pages: int, group_pages: int) -> None:
        """Pages are handed out by groups of `group_pages` and backed by extents of whole groups."""
        assert num_pages % extent_pages == 0
        assert extent_pages % group_pages == 0
        self.group_pages = group_pages
        self.num_pages = num_pages
        self.extent_pages = extent_pages
        self.num_free = 0
        self.num_backing = 0
        self.states = np.zeros(num_pages, np.uint8)
        self._free_in_group = np.zeros(num_pages // self.group_pages, np.int64)
        self._backed = np.zeros(num_pages // extent_pages, np.bool_)

    # --- memory by extents ---

    @property
    def num_backed(self) -> int:
        """Pages that have memory or are just getting it."""
        return int(self._backed.sum()) * self.extent_pages

    @property
    def num_held(self) -> int:
        """Pages that are neither free nor without memory: somebody has them, or had."""
        return self.num_backed - self.num_backing - self.num_free

    @property
    def num_unbacked(self) -> int:
        return self.num_pages - self.num_backed

    def begin_backing(self, num_extents: int) -> list[Run]:
        """Choose up to `num_extents` extents for backing; they count as backed from here on."""
        chosen = np.flatnonzero(~self._backed)[:num_extents]
        self._backed[chosen] = True
        self.num_backing += len(chosen) * self.extent_pages
        return self._pages_of_extents(chosen)

    def end_backing(self, run: Run, *, backed: bool) -> None:
        """The memory of these extents is there, or could not be had."""
        self.num_backing -= run.count
        if backed:
            self.free(np.arange(run.first, run.first + run.count))
        else:
            first, count = run.first // self.extent_pages, run.count // self.extent_pages
            self._backed[first : first + count] = False

    def unback(self, max_extents: int) -> list[Run]:
        """Take up to so many extents, all of whose pages are free, out of use: the last ones."""
        free = (self.states == PageState.FREE).reshape(-1, self.extent_pages).all(axis=1)
        chosen = np.flatnonzero(free)[-max_extents:]
        runs = self._pages_of_extents(chosen)
        pages = pages_of(runs)
        self.states[pages] = PageState.UNBACKED
        self._free_in_group[np.unique(pages // self.group_pages)] = 0
        self._backed[chosen] = False
        self.num_free -= len(pages)
        return runs

    def restore(self, pages: Pages, committed: Pages, quarantined: list[Pages]) -> None:
        """Begin with memory: these whole extents have it, and what is not held is free."""
        self._backed[np.unique(pages // self.extent_pages)] = True
        self.states[pages] = PageState.RESERVED
        self.move(committed, PageState.RESERVED, PageState.COMMITTED)
        for some in quarantined:
            self.move(some, PageState.RESERVED, PageState.QUARANTINED)
        self.free(pages[self.states[pages] == PageState.RESERVED])

    # --- pages ---

    @property
    def num_whole_groups(self) -> int:
        return int(np.count_nonzero(self._free_in_group == self.group_pages))

    @property
    def num_broken(self) -> int:
        """Free pages in groups of which others are not free."""
        return self.num_free - self.num_whole_groups * self.group_pages

    def take(self, count: int, ahead: int = 0) -> Pages:
        """Reserve `count` free pages, in runs as long as can be had, in ascending order.

        Up to `ahead` more come with them: whole groups, and what one more has beside the rest.
        """
        assert count <= self.num_free
        pages = np.sort(self._choose(count, ahead))
        self.move(pages, PageState.FREE, PageState.RESERVED)
        return pages

    def free(self, pages: Pages) -> None:
        assert (self.states[pages] != PageState.FREE).all()
        self.states[pages] = PageState.FREE
        np.add.at(self._free_in_group, pages // self.group_pages, 1)
        self.num_free += len(pages)

    def move(self, pages: Pages, old: PageState, new: PageState) -> None:
        """Change the state of pages that are all in `old`; free() is the way to FREE."""
        assert new is not PageState.FREE
        assert (self.states[pages] == old).all()
        self.states[pages] = new
        if old is PageState.FREE:
            np.subtract.at(self._free_in_group, pages // self.group_pages, 1)
            self.num_free -= len(pages)

    def counts(self) -> dict[str, int]:
        counted = np.bincount(self.states, minlength=len(PageState))
        return {state.name.lower(): int(counted[state]) for state in PageState}

    def check(self) -> None:
        free = self.states == PageState.FREE
        assert self.num_free == int(free.sum())
        assert (self._free_in_group == free.reshape(-1, self.group_pages).sum(axis=1)).all()
        unbacked = np.repeat(~self._backed, self.extent_pages)
        assert (self.states[unbacked] == PageState.UNBACKED).all()

    def _pages_of_extents(self, extents: Pages) -> list[Run]:
        size = self.extent_pages
        return [Run(run.first * size, run.count * size) for run in runs_of(extents)]

    def _choose(self, count: int, ahead: int) -> Pages:
        # There are three sources: whole groups for what fills them; one group for the rest, be it
        # broken already; and where none has what is needed, those that have the most.
        whole = np.flatnonzero(self._free_in_group == self.group_pages)
        groups = _longest_runs(whole, (count + ahead) // self.group_pages)
        pages = (groups[:, None] * self.group_pages + np.arange(self.group_pages)).ravel()
        needed, rest = count - len(pages), count + ahead - len(pages)
        if rest == 0:
            return pages
        left = self._free_in_group.copy()
        left[groups] = 0
        source = _fitting(left, rest)
        if left[source] >= needed:
            return np.concatenate((pages, self._free_pages_in(source)[: min(rest, left[source])]))
        is_free = self.states == PageState.FREE
        is_free[pages] = False
        free = np.flatnonzero(is_free)
        fullest_first = np.argsort(-left[free // self.group_pages], kind="stable")
        return np.concatenate((pages, free[fullest_first[:needed]]))

    def _free_pages_in(self, group: int) -> Pages:
        first, stop = group * self.group_pages, (group + 1) * self.group_pages
        return first + np.flatnonzero(self.states[first:stop] == PageState.FREE)


def _fitting(free_in_group: Pages, count: int) -> int:
    """The group of which the least is left over, or that has the most where none has so many."""
    fitting = np.flatnonzero(free_in_group >= count)
    if len(fitting):
        return int(fitting[free_in_group[fitting].argmin()])
    return int(free_in_group.argmax())


def _longest_runs(groups: Pages, count: int) -> Pages:
    """`count` of these ascending group numbers: of one run that suffices, else of the longest."""
    if count == 0 or len(groups) <= count:
        return groups[:count]
    runs = runs_of(groups)
    fitting = [run for run in runs if run.count >= count]
    if fitting:
        runs = (min(fitting, key=lambda run: run.count),)
    return pages_of(sorted(runs, key=lambda run: -run.count))[:count]
