"""Reserves: who waits for pages, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group

from kvd.protocol.errors import BadRequest, LeaseEnded, OutOfPages
from kvd.protocol.messages import CommitItem, MatchItem
from tests.actors.managed import running
from tests.actors.waiting import until
from tests.actors.wire import packed
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import BLOCK, IDENTITY, LAYOUT, tokens_of

if TYPE_CHECKING:
    from kvd.cache.leases import Lease

pytestmark = pytest.mark.anyio


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
