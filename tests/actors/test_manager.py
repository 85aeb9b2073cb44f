"""Manager: who waits for pages, in which order, and what becomes of them when memory is refused."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group, fail_after

from kvd.actors import manager as manager_module
from kvd.actors.manager import Manager, Match
from kvd.actors.signal import Signal
from kvd.actors.tier import TierActor, backing_pieces
from kvd.arena.header import create_header
from kvd.arena.page_table import table_bytes
from kvd.arena.runs import runs_of
from kvd.cache.audit import check
from kvd.config import CacheConfig, Config
from kvd.protocol.errors import BadRequest, LeaseEnded, OutOfPages, TierFailed
from kvd.protocol.layout import Layout
from kvd.protocol.messages import CommitItem, MatchItem, Run
from kvd_tiers.host import HostConfig, HostTier, HostTierArena
from tests.actors.waiting import until
from tests.actors.wire import packed
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import BLOCK, IDENTITY, LAYOUT, tokens_of

if TYPE_CHECKING:
    from kvd.cache.leases import Lease
    from kvd.cache.state import Namespace

pytestmark = pytest.mark.anyio

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


# --- waiting ---


async def test_reserves_that_wait_are_served_in_their_order(shm: Path) -> None:  # noqa: F811
    order = []

    async def take(number: int, count: int) -> None:
        lease = cache.match(session=10 + number)
        await cache.manager.reserves.in_turn(lease, 0, count, 0, 30)
        order.append(number)
        cache.release(lease)

    async with running(shm / "kvd") as cache:
        most = await cache.hold(120)
        async with create_task_group() as tasks:
            # The second could be served at once, and waits behind the first all the same.
            for number, count in enumerate((128, 1, 100, 8)):
                tasks.start_soon(take, number, count)
                await anyio.wait_all_tasks_blocked()
            assert order == []
            cache.release(most)
        assert order == [0, 1, 2, 3]


async def test_nobody_overtakes_who_waits(shm: Path) -> None:  # noqa: F811
    async with running(shm / "kvd") as cache, create_task_group() as tasks:
        most = await cache.hold(120)
        tasks.start_soon(cache.manager.reserves.in_turn, cache.match(2), 0, 100, 0, 30)
        await anyio.wait_all_tasks_blocked()
        assert cache.manager.reserves.now(cache.match(3), 0, 1, 0) is None
        assert cache.manager.reserves.now(cache.match(3), 0, 0, 1) == ()
        cache.release(most)
        await anyio.wait_all_tasks_blocked()
        assert cache.manager.reserves.now(cache.match(3), 0, 1, 0) is not None


async def test_who_waits_too_long_is_told_how_the_pages_stand(shm: Path) -> None:  # noqa: F811
    async with running(shm / "kvd") as cache:
        await cache.hold(120)
        with pytest.raises(OutOfPages, match=r"9 pages wanted, 8 free; of 128 .* 120 reserved"):
            await cache.manager.reserves.in_turn(cache.match(2), 0, 9, 0, 0.01)
        assert cache.manager.reserves.now(cache.match(3), 0, 8, 0) is not None


async def test_who_gives_up_lets_the_next_one_go_on(shm: Path) -> None:  # noqa: F811
    async with running(shm / "kvd") as cache, create_task_group() as tasks:
        await cache.hold(120)
        with anyio.CancelScope() as scope:
            tasks.start_soon(cache.manager.reserves.in_turn, cache.match(3), 0, 8, 0, 30)
            async with create_task_group() as first:
                first.start_soon(cache.manager.reserves.in_turn, cache.match(2), 0, 100, 0, 30)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
        await until(lambda: cache.counts().get("reserved") == 128)


@pytest.mark.parametrize("place", [0, 1])
async def test_a_waiter_whose_lease_ends_is_told_so_and_the_next_goes_on(
    shm: Path,  # noqa: F811
    place: int,
) -> None:
    """Also where it is not its turn yet."""
    async with running(shm / "kvd") as cache:
        most = await cache.hold(120)
        leases = [cache.match(2 + number) for number in range(3)]
        ended = leases[place]
        answers: dict[int, str] = {}

        async def wait(lease: Lease) -> None:
            try:
                await cache.manager.reserves.in_turn(lease, 0, 100, 0, 30)
                answers[lease.id] = "granted"
            except LeaseEnded:
                answers[lease.id] = "ended"

        async with create_task_group() as tasks:
            for lease in leases:
                tasks.start_soon(wait, lease)
                await anyio.wait_all_tasks_blocked()
            cache.release(ended)
            await anyio.wait_all_tasks_blocked()
            assert answers == {ended.id: "ended"}
            cache.release(most)
            for lease in leases:
                await anyio.wait_all_tasks_blocked()
                cache.release(lease)
        assert sorted(answers.values()) == ["ended", "granted", "granted"]


async def test_an_abort_meets_who_waits_on_its_lease_and_nobody_else(shm: Path) -> None:  # noqa: F811
    async with running(shm / "kvd") as cache, create_task_group() as tasks:
        most, lease = await cache.hold(100), await cache.hold(8, session=2)

        async def wait() -> None:
            with pytest.raises(BadRequest, match="reserve from 8: the lease was granted 0 pages"):
                await cache.manager.reserves.in_turn(lease, 8, 64, 0, 30)

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        cache.manager.abort(2, [lease.id])
        cache.release(most)
        assert cache.manager.reserves.now(cache.match(3), 0, 128, 0) is not None


async def test_the_end_of_a_session_ends_what_it_waits_for(shm: Path) -> None:  # noqa: F811
    async with running(shm / "kvd") as cache:
        await cache.hold(128)
        lease = cache.match(2)

        async def end() -> None:
            await anyio.wait_all_tasks_blocked()
            cache.manager.end_session(2)

        async with create_task_group() as tasks:
            tasks.start_soon(end)
            with pytest.raises(LeaseEnded):
                await cache.manager.reserves.in_turn(lease, 0, 1, 0, 30)


async def test_a_waiter_gets_the_pages_of_a_session_that_is_gone(
    shm: Path,  # noqa: F811
) -> None:
    async with running(shm / "kvd") as cache, create_task_group() as tasks:
        await cache.hold(128, session=7)
        lease = cache.match(2)
        tasks.start_soon(cache.manager.reserves.in_turn, lease, 0, 4, 0, 30)
        await anyio.wait_all_tasks_blocked()
        cache.manager.end_session(7)
        await anyio.wait_all_tasks_blocked()
        assert cache.counts() == {"quarantined": 128}
        cache.manager.session_gone(7)
        await anyio.wait_all_tasks_blocked()
        assert cache.counts() == {"free": 124, "reserved": 4}


async def test_old_blocks_make_room_without_waiting(shm: Path) -> None:  # noqa: F811
    async with running(shm / "kvd") as cache:
        lease = cache.match(num_blocks=128)
        runs = await cache.manager.reserves.in_turn(lease, 0, 128, 0, 30)
        item = CommitItem(lease.id, 0, runs, 128 * BLOCK)
        cache.manager.commit(1, item, packed(tokens_of(1, 128)))
        assert cache.manager.reserves.now(cache.match(2, seed=2), 0, 1, 0) is None
        cache.release(lease)
        assert cache.manager.reserves.now(cache.match(2, seed=2), 0, 5, 0) is not None
        assert cache.counts() == {"committed": 123, "reserved": 5}


async def test_who_waits_for_the_arena_holds_up_other_namespaces_too(
    shm: Path,  # noqa: F811
) -> None:
    async with running(shm / "kvd") as cache, create_task_group() as tasks:
        held = await cache.hold(100)
        first = cache.match(session=2, seed=2)
        tasks.start_soon(cache.manager.reserves.in_turn, first, 0, 60, 0, 30)
        await until(lambda: len(cache.manager.reserves) == 1)
        other = (await cache.manager.open(3, IDENTITY, LAYOUT, "other", extras=False)).namespace
        item = MatchItem(other.id, 1, BLOCK)
        lease = cache.manager.match(3, item, packed(tokens_of(3, 1))).lease
        assert cache.manager.reserves.now(lease, 0, 10, 0) is None
        cache.release(held)
        assert cache.manager.reserves.now(lease, 0, 10, 0) is not None


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
