"""Plans: how steps that end things are put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.cache.plan import Ended, Freed, Plan, merged

if TYPE_CHECKING:
    from kvd.arena.runs import Pages


def pages(*numbers: int) -> Pages:
    return np.array(numbers, np.int64)


def test_what_is_freed_in_an_arena_is_one_step_behind_all_others() -> None:
    plan: Plan = [Freed(0, pages(3)), Ended(1, 2), Freed(1, pages(7)), Freed(0, pages(2, 1))]
    ended, *freed = merged(plan)
    assert ended == Ended(1, 2)
    assert [(step.arena, step.pages.tolist()) for step in freed if isinstance(step, Freed)] == [
        (0, [3, 2, 1]),
        (1, [7]),
    ]
