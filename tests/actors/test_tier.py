"""TierActor: one tier, its thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from anyio import create_task_group

from kvd.actors.tier import TierActor
from kvd.protocol.errors import AlreadyRunning, BadRequest, TierFailed
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run
from kvd_tiers.host import HostConfig, HostTier
from tests.arena.conftest import mount, shm  # noqa: F401 - fixtures
from tests.e2e.conftest import tmpfs  # noqa: F401 - a fixture
from tests.e2e.support import LAYOUT

pytestmark = pytest.mark.anyio


async def test_a_tier_is_used_through_its_actor(shm: Path) -> None:  # noqa: F811
    tier = HostTier(HostConfig(1 << 20), shm)  # type: ignore[arg-type]
    actor = TierActor(tier)
    async with create_task_group() as tasks:
        await tasks.start(actor.run)
        await actor.open(7)
        arena = await actor.create_arena(LAYOUT, 4)
        await actor.back(arena, Run(32, 32))
        assert arena.backed_bytes == 32 * LAYOUT.page_bytes
        with pytest.raises(BadRequest):
            await actor.create_arena(Layout(64, 8, 128, "float32"), 4)
        actor.close()
    tier.close()


async def test_a_tiers_errors_are_its_callers(shm: Path) -> None:  # noqa: F811
    owner = HostTier(HostConfig(1 << 20), shm)  # type: ignore[arg-type]
    owner.open(1)
    actor = TierActor(HostTier(HostConfig(1 << 20), shm))  # type: ignore[arg-type]
    async with create_task_group() as tasks:
        await tasks.start(actor.run)
        with pytest.raises(AlreadyRunning):
            await actor.open(2)
        owner.close()
        await actor.open(2)
        actor.close()
    actor.tier.close()


class OddTier(HostTier):
    def open(self, epoch: int) -> None:
        raise ValueError("odd")


async def test_whatever_a_plugin_raises_is_its_failure(shm: Path) -> None:  # noqa: F811
    actor = TierActor(OddTier(HostConfig(1 << 20), shm))  # type: ignore[arg-type]
    async with create_task_group() as tasks:
        await tasks.start(actor.run)
        with pytest.raises(TierFailed, match="ValueError: odd"):
            await actor.open(1)
        actor.close()


async def test_memory_that_is_not_there_is_a_tier_failure(
    tmpfs: Callable[..., Path],  # noqa: F811
) -> None:
    small = tmpfs("size=256k")
    tier = HostTier(HostConfig(256 << 10), small)  # type: ignore[arg-type]
    actor = TierActor(tier)
    async with create_task_group() as tasks:
        await tasks.start(actor.run)
        await actor.open(1)
        arena = await actor.create_arena(LAYOUT, 4)
        (small / "another's").write_bytes(bytes(64 << 10))
        with pytest.raises(TierFailed, match="No space left"):
            await actor.back(arena, Run(0, arena.num_pages))
        assert arena.backed_bytes == 0
        await actor.back(arena, Run(0, 32))
        actor.close()
    tier.close()
