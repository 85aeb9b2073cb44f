"""Mover: what goes on in the background, whatever becomes of one turn of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio import create_task_group

from kvd.arena.checksum import block_checksums
from kvd.testing.faults import Faults, set_faults
from tests.actors.stored import ON_DEMAND, TOKENS
from tests.actors.waiting import until
from tests.actors.wire import packed
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import BLOCK, FAULTY, LAYOUT, PATIENCE_SECONDS, tokens_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvd.arena.runs import Pages
    from kvd.tiers.base import TierArena

pytestmark = pytest.mark.anyio


async def test_blocks_that_cannot_be_summed_are_tried_again_behind_the_others(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: list[int] = []

    def fail_first(arena: TierArena, pages: Pages) -> NDArray[np.uint64]:
        bad.extend([] if bad else pages.tolist())
        if pages[0] in bad:
            raise OSError("no descriptors are left")
        return block_checksums(arena, pages)

    monkeypatch.setattr("kvd.actors.turns.FAULT_PAUSE_SECONDS", 0.001)
    async with start() as cache, create_task_group() as tasks:
        with monkeypatch.context() as broken:
            broken.setattr("kvd.actors.tier.block_checksums", fail_first)
            tasks.start_soon(cache.store, TOKENS)
            await until(lambda: bool(bad))
            await cache.store(tokens_of(2, 4))
        # Before the group is left, the first have their checksums.


async def test_a_promotion_waits_for_memory_that_is_on_its_way(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.actors.mover.PROMOTE_SECONDS", 0.001)
    async with start() as cache, create_task_group() as tasks:
        await cache.store(TOKENS, on_disk=True)
        cache.forget_memory()
        with cache.matching(tokens_of(2, 4)) as number:
            lease, pool = cache.manager.lease(1, number), cache.space.arena.pool
            await cache.manager.reserves.in_turn(lease, 0, pool.num_free, 0, PATIENCE_SECONDS)
            may_go_on = anyio.Event()
            cache.manager.queue.put(may_go_on.wait)
            tasks.start_soon(cache.mover.prepare, cache.space, packed(TOKENS), PATIENCE_SECONDS)
            await until(lambda: cache.counters["reserves_short"] == 3)
            may_go_on.set()
            await until(lambda: cache.counters["blocks_promoted"] == len(TOKENS) // BLOCK)


async def test_of_what_waits_for_a_store_that_hangs_no_more_is_kept_than_is_allowed(
    start: Any,
    shm: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.actors.mover.MAX_WORKS", 3)
    async with start(ON_DEMAND, FAULTY) as cache, create_task_group() as tasks:
        prompts = [tokens_of(seed, 1) for seed in range(1, 6)]
        for tokens in prompts:
            await cache.store(tokens)
        await cache.mover.checkpoint()
        cache.forget_memory()
        set_faults(shm, Faults.STUCK)
        for tokens in prompts[:3]:
            tasks.start_soon(cache.mover.prepare, cache.space, packed(tokens), PATIENCE_SECONDS)
        await until(lambda: len(cache.mover._works) == 3)
        for tokens in prompts[3:]:
            assert await cache.mover.prepare(cache.space, packed(tokens), math.inf) == {}
        set_faults(shm, Faults.NONE)
    assert cache.counters["blocks_promoted"] == 3


async def test_a_promotion_that_waits_for_pages_holds_no_client_up(start: Any) -> None:
    async with start() as cache, create_task_group() as tasks:
        await cache.store(TOKENS, on_disk=True)
        cache.forget_memory()
        with cache.matching(tokens_of(2, 4)) as first, cache.matching(tokens_of(3, 4)) as second:
            greedy, modest = (cache.manager.lease(1, number) for number in (first, second))
            num_pages = cache.space.arena.pool.num_pages
            await cache.manager.reserves.in_turn(greedy, 0, num_pages - 3, 0, PATIENCE_SECONDS)
            num_waited = cache.counters["reserves_waited"]
            tasks.start_soon(cache.mover.prepare, cache.space, packed(TOKENS), PATIENCE_SECONDS)
            await until(lambda: cache.counters["reserves_waited"] > num_waited)
            assert cache.manager.reserves.now(modest, 0, 1, 0)


async def test_a_promotion_whose_store_went_before_its_turn_looks_again(
    start: Any,
    shm: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with start(ON_DEMAND, FAULTY) as cache, create_task_group() as tasks:
        prompts = [tokens_of(seed, 1) for seed in range(1, 4)]
        for tokens in prompts:
            await cache.store(tokens)
        await cache.mover.checkpoint()
        cache.forget_memory()
        set_faults(shm, Faults.STUCK)
        for tokens in prompts:
            tasks.start_soon(cache.mover.prepare, cache.space, packed(tokens), PATIENCE_SECONDS)
        await until(lambda: len(cache.mover._works) == 3)
        cache.manager.begin_anew(cache.actor, LAYOUT)
        set_faults(shm, Faults.NONE)
        await until(lambda: not cache.mover._works)
        assert "reason=internal" not in caplog.text


async def test_of_what_is_prefetched_at_once_what_is_too_much_is_left_out(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.actors.mover.MAX_PREFETCHES", 2)
    async with start() as cache:
        prompts = [tokens_of(seed, 1) for seed in range(1, 6)]
        for tokens in prompts:
            await cache.store(tokens)
        await cache.mover.checkpoint()
        cache.forget_memory()
        for tokens in prompts:
            cache.mover.prefetch(cache.space, packed(tokens))
        await until(lambda: not cache.mover._num_prefetching)
        assert cache.counters["blocks_promoted"] == 2
