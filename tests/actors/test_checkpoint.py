"""A checkpoint: what it waits for, and what it says where that does not come."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from anyio import create_task_group
from msgspec.structs import replace

from kvd.actors.sequences import SequenceFiles
from kvd.config import Config
from kvd.protocol.errors import ConfigError, TierFailed
from kvd.protocol.layout import Layout
from kvd.testing.faults import Faults, set_faults
from tests.actors.saved import CHAT, sequence
from tests.actors.stored import ON_DEMAND, STORE, TOKENS, Cache
from tests.actors.waiting import until
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import BLOCK, FAULTY, LAYOUT, LMDB, PAGE_FIRST, PATIENCE_SECONDS, tokens_of

WIDE, WIDER = (Layout(2, heads, 64, "float32", block_size=BLOCK) for heads in (4, 8))

pytestmark = pytest.mark.anyio


async def store_as_room_allows(cache: Cache, tokens: list[int]) -> None:
    """Have these blocks in memory and in the store, though others in memory make room there."""
    await cache.store(tokens)
    with contextlib.suppress(TierFailed):
        await cache.mover.checkpoint()


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


async def test_a_checkpoint_without_its_store_says_so(start: Any) -> None:
    async with start() as cache:
        await cache.actor.settle()
        cache.actor.switch_off(TierFailed("its index cannot be read"))
        await cache.store(TOKENS)
        for _ in range(2):
            with pytest.raises(TierFailed, match="is off: its index cannot be read"):
                await cache.mover.checkpoint()


async def test_where_one_layout_has_no_room_the_others_are_saved_and_it_is_said(
    start: Any,
    shm: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.actors.store.FIRST_PAUSE_SECONDS", PATIENCE_SECONDS)
    async with start(ON_DEMAND, FAULTY) as cache:
        await cache.store(TOKENS)
        await cache.actor.settle()
        set_faults(shm, Faults.FULL)
        await cache.open(PAGE_FIRST)
        await cache.actor.settle()
        set_faults(shm, Faults.NONE)
        with pytest.raises(TierFailed, match="has no store of a layout"):
            await cache.mover.checkpoint()
        assert cache.counters["blocks_demoted"] == 4


async def test_where_sequences_cannot_be_saved_blocks_are_and_it_is_said(
    start: Any,
    shm: Path,  # noqa: F811
) -> None:
    files = SequenceFiles(shm, shm / "data")
    files.begin()
    files.write(CHAT, sequence())
    async with start() as cache:
        await cache.store(TOKENS)
        (shm / "data").mkdir(mode=0o700, exist_ok=True)
        (shm / "data" / "sequences").touch()  # where a directory should be
        with pytest.raises(ConfigError, match="sequences"):
            await cache.mover.checkpoint()
        assert cache.counters["blocks_demoted"] == 4


async def test_a_checkpoint_by_time_that_fails_is_said_and_tried_again(
    start: Any,
    shm: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = SequenceFiles(shm, shm / "data")
    files.begin()
    files.write(CHAT, sequence())
    (shm / "data").mkdir()
    (shm / "data" / "sequences").touch()  # where a directory should be
    async with start(replace(ON_DEMAND, checkpoint_seconds=0.01)):
        await until(lambda: caplog.text.count("reason=not_saved") > 1)


async def test_another_time_between_checkpoints_counts_at_once(start: Any) -> None:
    async with start(replace(ON_DEMAND, checkpoint_seconds=86_400.0)) as cache:
        await cache.store(TOKENS)
        cache.mover.configure(Config(cache=replace(ON_DEMAND, checkpoint_seconds=0.01)))
        await until(lambda: cache.num_on_disk == 4)


async def test_a_layout_that_has_the_room_of_another_begins_anew(start: Any) -> None:
    async with start(ON_DEMAND, LMDB | {"capacity_bytes": "8MiB"}, 4 << 20) as cache:
        number = 0
        await cache.open(WIDE)
        while not cache.counters["blocks_evicted_stored"]:
            number += 1
            await store_as_room_allows(cache, tokens_of(number, 64))
        num_before, old = cache.num_on_disk, cache.space
        await cache.open(WIDER)
        while not cache.counters["blocks_crowded_out"]:
            number += 1
            await store_as_room_allows(cache, tokens_of(number, 32))
        assert cache.actor.trouble == ""
        assert cache.counters["blocks_crowded_out"] <= num_before
        assert cache.num_on_disk >= 32
        assert old.tree.counts[STORE] >= 64  # saved again, as far as there is room now
        num_saved = cache.counters["blocks_demoted"]
        with pytest.raises(TierFailed, match="have no room"):
            await cache.mover.checkpoint()
        assert cache.counters["blocks_demoted"] == num_saved


async def test_a_checkpoint_says_how_much_has_no_copy_since_more_came_than_there_is_room_for(
    start: Any,
) -> None:
    async with start(ON_DEMAND, LMDB | {"capacity_bytes": "4MiB"}, 8 << 20) as cache:
        number = 0
        while not cache.counters["blocks_evicted_stored"]:
            number += 1
            await store_as_room_allows(cache, tokens_of(number, 64))
        count = cache.space.tree.num_blocks - cache.num_on_disk
        with pytest.raises(TierFailed, match=f"{count} blocks have no room"):
            await cache.mover.checkpoint()
        disk = cache.manager.tier_status()[STORE]
        assert disk.waiting_bytes == count * LAYOUT.page_bytes
        cache.forget_memory()
        assert await cache.mover.checkpoint() == 0
