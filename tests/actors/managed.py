"""Managed: a manager over a memory tier that has moods, in this process."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio import create_task_group

from kvd.actors.manager import Manager
from kvd.actors.signal import Signal
from kvd.actors.tier import TierActor
from kvd.arena.header import create_header
from kvd.arena.page_table import table_bytes
from kvd.cache.audit import check
from kvd.config import CacheConfig, Config
from kvd.protocol.errors import TierFailed
from kvd.protocol.messages import MatchItem, Run
from kvd_tiers.host import HostConfig, HostTier, HostTierArena
from tests.actors.wire import packed
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import BLOCK, IDENTITY, LAYOUT, tokens_of

if TYPE_CHECKING:
    from kvd.cache.leases import Lease
    from kvd.cache.state import Namespace
    from kvd.protocol.layout import Layout


NO_AHEAD = CacheConfig(high_watermark=1.0, low_watermark=1.0, back_ahead_bytes=0)


class MoodyArena(HostTierArena):
    """A host arena that refuses memory, or takes its time, when it is told to."""

    full = False
    ready = threading.Event()
    backed: list[Run]

    def back(self, run: Run) -> None:
        self.ready.wait(30)
        self.backed.append(run)
        if self.full:
            raise TierFailed("no memory today")
        super().back(run)


class MoodyTier(HostTier):
    """A host tier whose arenas are moody."""

    def create_arena(self, layout: Layout, row_bytes: int) -> HostTierArena:
        arena = super().create_arena(layout, row_bytes)
        arena.__class__ = MoodyArena
        assert isinstance(arena, MoodyArena)
        arena.ready, arena.backed = threading.Event(), []
        arena.ready.set()
        self.arena = arena
        return arena


class Cache:
    """A running manager over a moody tier, with one namespace."""

    def __init__(self, manager: Manager, tier: MoodyTier, namespace: Namespace) -> None:
        self.manager = manager
        self.arena = tier.arena
        self.namespace = namespace
        self.last = 0

    def match(self, session: int = 1, seed: int = 1, num_blocks: int = 4) -> Lease:
        self.last += 1
        self.namespace.sessions.add(session)
        tokens = packed(tokens_of(seed, num_blocks))
        item = MatchItem(self.namespace.id, self.last, num_blocks * BLOCK)
        return self.manager.match(session, item, tokens).lease

    async def hold(self, count: int, session: int = 1) -> Lease:
        """A lease with so many reserved pages."""
        lease = self.match(session, seed=self.last + 1000)
        await self.manager.reserves.in_turn(lease, 0, count, 0, 30)
        return lease

    def release(self, lease: Lease) -> None:
        self.manager.release(lease.session, [lease.id])

    def counts(self) -> dict[str, int]:
        return {k: v for k, v in self.manager.tier_status()[0].pages.items() if v}


@asynccontextmanager
async def running(
    directory: Path, num_pages: int = 128, config: CacheConfig = NO_AHEAD
) -> AsyncGenerator[Cache]:
    tier = MoodyTier(
        HostConfig(num_pages * LAYOUT.page_bytes + table_bytes(LAYOUT, 4, num_pages)), directory
    )  # type: ignore[arg-type]
    actor = TierActor(tier)
    async with create_task_group() as tasks:
        await tasks.start(actor.run)
        await actor.open(1)
        manager = Manager(
            Config(cache=config), actor, create_header(directory / "header"), (), Signal()
        )
        await tasks.start(manager.run)
        opened = await manager.open(1, IDENTITY, LAYOUT, "", extras=False)
        cache = Cache(manager, tier, opened.namespace)
        try:
            yield cache
            check(manager.state)
        finally:
            tier.arena.ready.set()
            manager.close()
            actor.close()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(tier.close)
