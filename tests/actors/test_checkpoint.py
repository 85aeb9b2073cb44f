"""A checkpoint: what it waits for, and what it says where that does not come."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from anyio import create_task_group

from kvd.protocol.errors import TierFailed
from kvd.testing.faults import Faults, set_faults
from tests.actors.stored import FAULTY, ON_DEMAND, TOKENS
from tests.actors.waiting import until
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import PAGE_FIRST, PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


async def test_checkpoints_at_once_are_all_answered(start: Any) -> None:
    async with start() as cache, create_task_group() as tasks:
        await cache.store(TOKENS)
        for _ in range(3):
            tasks.start_soon(cache.mover.checkpoint)
    assert cache.counters["blocks_demoted"] == 4


async def test_a_checkpoint_waits_for_a_store_that_is_being_made(start: Any) -> None:
    async with start() as cache, create_task_group() as tasks:
        go = threading.Event()
        cache.actor.submit(go.wait, PATIENCE_SECONDS)
        await cache.open(PAGE_FIRST)
        await cache.store(TOKENS)
        tasks.start_soon(cache.mover.checkpoint)
        await until(lambda: cache.actor.num_waiting == 2)
        go.set()
    assert cache.counters["blocks_demoted"] == 4


async def test_a_checkpoint_that_finds_no_room_says_so(start: Any, shm: Path) -> None:  # noqa: F811
    async with start(ON_DEMAND, FAULTY) as cache:
        await cache.actor.settle()
        set_faults(shm, Faults.FULL)
        await cache.store(TOKENS)
        with pytest.raises(TierFailed, match="the tier is full"):
            await cache.mover.checkpoint()
