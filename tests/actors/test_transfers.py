"""Transfers: what is being sent is held, whatever becomes of the lease that asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvd.actors.transfers import Transfers
from kvd.protocol.messages import CommitItem, DropItem
from tests.actors.managed import Cache, running
from tests.actors.wire import packed
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import BLOCK, tokens_of

pytestmark = pytest.mark.anyio


@dataclass
class Message:
    """A message on its way, until it is `done`."""

    done: bool = False


async def committed(cache: Cache) -> int:
    """A lease with two blocks; its number."""
    lease = cache.match()
    runs = await cache.manager.reserves.in_turn(lease, 0, 2, 0, 30)
    tokens = packed(tokens_of(1, 2))
    cache.manager.commit(lease.session, CommitItem(lease.id, 0, runs, 2 * BLOCK), tokens)
    return lease.id


async def test_pages_on_their_way_outlive_their_lease_and_a_drop(shm: Path) -> None:  # noqa: F811
    async with running(shm / "kvd") as cache:
        lease = cache.manager.lease(1, await committed(cache))
        transfers, message = Transfers(cache.manager), Message()
        hold = transfers.hold(lease)
        cache.release(lease)
        cache.manager.drop(DropItem(cache.namespace.id), b"")
        transfers.sent(hold, message)
        transfers.end_done()
        assert cache.counts()["detached"] == 2
        message.done = True
        transfers.end_done()
        assert "detached" not in cache.counts()


async def test_what_was_not_sent_is_held_no_longer(shm: Path) -> None:  # noqa: F811
    async with running(shm / "kvd") as cache:
        lease = cache.manager.lease(1, await committed(cache))
        transfers = Transfers(cache.manager)
        hold = transfers.hold(lease)
        cache.release(lease)
        transfers.let_go(hold)
        assert len(cache.manager.state.leases) == 0
