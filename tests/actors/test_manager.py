"""Manager: what a match says, and what becomes of memory that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group, fail_after

from kvd.actors import manager as manager_module
from kvd.actors.manager import Match
from kvd.actors.tier import backing_pieces
from kvd.arena.runs import runs_of
from kvd.config import CacheConfig
from kvd.protocol.errors import OutOfPages
from kvd.protocol.layout import Layout
from kvd.protocol.messages import CommitItem, Run
from kvd_tiers.host import HostConfig, HostTier
from tests.actors.managed import Cache, running
from tests.actors.waiting import until
from tests.actors.wire import packed
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import BLOCK, LAYOUT, tokens_of

if TYPE_CHECKING:
    from kvd.cache.leases import Lease

pytestmark = pytest.mark.anyio


# --- match ---


async def test_a_match_says_of_what_came_only_what_it_leased(shm: Path) -> None:  # noqa: F811
    """Between a promotion and the answer blocks may go again."""
    async with running(shm / "kvd") as cache:
        lease = await cache.hold(2)
        tokens = packed(tokens_of(1, 2))
        runs = runs_of(lease.granted)
        cache.manager.commit(1, CommitItem(lease.id, 0, runs, 2 * BLOCK), tokens)
        match = Match(cache.match(num_blocks=2), tokens, lacks_more=False)
        assert cache.manager.matched(match).tokens_by_tier == {"host": 8}
        assert cache.manager.matched(match, {"disk": 1}).tokens_by_tier == {"disk": 4, "host": 4}
        assert cache.manager.matched(match, {"disk": 9}).tokens_by_tier == {"disk": 8}


# --- memory ---


async def test_memory_is_given_in_pieces_when_it_is_needed(shm: Path) -> None:  # noqa: F811
    async with running(shm / "kvd") as cache:
        assert cache.counts() == {"unbacked": 128}
        await cache.hold(33)
        assert cache.counts() == {"unbacked": 64, "free": 31, "reserved": 33}
        assert cache.arena.backed_bytes == 64 * LAYOUT.page_bytes


async def test_some_memory_is_ready_ahead(shm: Path) -> None:  # noqa: F811
    ahead = CacheConfig(back_ahead_bytes=8 * LAYOUT.page_bytes)  # type: ignore[arg-type]
    async with running(shm / "kvd", config=ahead) as cache:
        size = cache.manager.state.memory.arenas[0].pool.extent_pages
        count = size - 7
        assert cache.counts() == {"unbacked": 128}  # nothing before the first reserve
        await cache.manager.reserves.in_turn(cache.match(), 0, count, 0, 30)
        left = {"unbacked": 128 - 2 * size, "free": 2 * size - count, "reserved": count}
        await until(lambda: cache.counts() == left)


async def test_refused_memory_is_asked_for_again_later(
    shm: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(manager_module, "BACKING_PAUSE_SECONDS", 0.05)
    async with running(shm / "kvd") as cache:
        cache.arena.full = True
        with pytest.raises(OutOfPages, match="1 pages wanted, 0 free"):
            await cache.manager.reserves.in_turn(cache.match(), 0, 1, 0, 0.2)
        assert "reason=no_memory no memory today" in caplog.text
        cache.arena.full = False
        with fail_after(30):
            await cache.manager.reserves.in_turn(cache.match(), 0, 1, 0, 30)


async def test_while_memory_is_refused_old_blocks_make_room(shm: Path) -> None:  # noqa: F811
    async with running(shm / "kvd") as cache:
        lease = cache.match(num_blocks=32)
        runs = await cache.manager.reserves.in_turn(lease, 0, 32, 0, 30)
        cache.manager.commit(1, CommitItem(lease.id, 0, runs, 32 * BLOCK), packed(tokens_of(1, 32)))
        cache.release(lease)
        cache.arena.full = True
        with fail_after(30):
            await cache.manager.reserves.in_turn(cache.match(2, seed=2), 0, 10, 0, 30)
        assert cache.counts() == {"unbacked": 96, "committed": 22, "reserved": 10}


async def test_a_refusal_is_said_once(
    shm: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(shm / "kvd") as cache:
        cache.arena.full = True
        for _ in range(5):
            with pytest.raises(OutOfPages):
                await cache.manager.reserves.in_turn(cache.match(), 0, 1, 0, 0.01)
        assert caplog.text.count("reason=no_memory") == 1


async def test_who_waits_for_memory_gets_it_though_pages_were_freed_meanwhile(
    shm: Path,  # noqa: F811
) -> None:
    async with running(shm / "kvd") as cache, create_task_group() as tasks:
        first = await cache.hold(32)
        cache.arena.ready.clear()
        tasks.start_soon(cache.manager.reserves.in_turn, cache.match(2), 0, 1, 0, 30)
        await anyio.wait_all_tasks_blocked()
        cache.release(first)
        await anyio.wait_all_tasks_blocked()
        assert cache.counts()["reserved"] == 1
        cache.arena.ready.set()
        await until(lambda: cache.counts() == {"unbacked": 64, "free": 63, "reserved": 1})


async def test_close_gives_up_memory_that_nobody_waits_for_any_more(
    shm: Path,  # noqa: F811
) -> None:
    """What lies in the tier's mailbox would keep a stop waiting, 64 MiB by 64 MiB."""
    async with running(shm / "kvd", num_pages=4096) as cache:
        cache.arena.ready.clear()
        async with create_task_group() as tasks:
            for session in range(2, 6):
                tasks.start_soon(wait_in_vain, cache, cache.match(session))
                await anyio.wait_all_tasks_blocked()
            asked = len(cache.arena.backed)
            cache.manager.close()
            tasks.cancel_scope.cancel()
        cache.arena.ready.set()
    assert len(cache.arena.backed) <= asked + 1


async def wait_in_vain(cache: Cache, lease: Lease) -> None:
    await cache.manager.reserves.in_turn(lease, 0, 64, 0, 30)


def test_a_run_is_backed_in_pieces_of_whole_extents(shm: Path) -> None:  # noqa: F811
    layout = Layout(32, 8, 128, "bfloat16")  # 2 MiB a page
    tier = HostTier(HostConfig(1 << 30), shm)  # type: ignore[arg-type]
    tier.open(1)
    arena = tier.create_arena(layout, 4)
    pieces = backing_pieces(arena, Run(16, 112))
    assert pieces == [Run(first, 32) for first in (16, 48, 80)] + [Run(112, 16)]
    tier.close()
