"""Daemon: builds, starts, drains and stops all the rest. Read this first.

From the bottom up: a memory tier behind its actor, the manager that owns the cache's state, the
router that owns the socket. Calls go down that line and results come back as return values.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Self

from anyio import AsyncContextManagerMixin, CancelScope, create_task_group, current_time, to_thread

from kvd.actors.manager import Manager
from kvd.actors.router import Router
from kvd.actors.sequences import SequenceFiles, Sequences
from kvd.actors.sessions import SessionTable
from kvd.actors.tier import TierActor
from kvd.arena.header import create_header
from kvd.arena.owner import OwnerLock, make_directory, private_directory
from kvd.config import Config
from kvd.protocol.endpoint import is_default, socket_path
from kvd.protocol.errors import ConfigError, TierFailed
from kvd.tiers.base import MemoryTier
from kvd.tiers.registry import load_tier

if TYPE_CHECKING:
    from kvd.protocol.messages import TierStatus

logger = logging.getLogger(__name__)


class Daemon(AsyncContextManagerMixin):
    """kvd inside any program: `async with Daemon(config) as daemon: ...`.

    Inside the block the endpoint is bound and serves; leaving it stops within `grace_seconds`.
    Needs an asyncio event loop. Entering raises ConfigError, AlreadyRunning or TierFailed.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self.endpoint = self.config.resolved_endpoint
        self.directory = self.config.resolved_directory
        # Random and never 0: the epoch of another start is another one, whatever the clock says.
        self.epoch = secrets.randbits(62) | 1
        places = self.directory, self.config.resolved_data_directory
        first, *_ = (load_tier(section, *places) for section in self.config.tiers)
        if not isinstance(first, MemoryTier):
            raise ConfigError(f"tiers: the first one has what clients map; {first.name} has none")
        self.tier = first

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        try:
            async with self._running():
                yield self
        except BaseExceptionGroup as group:
            # The task groups below are our own affair: who raised one error gets that one.
            if len(leaves := _leaves(group)) == 1:
                raise leaves[0] from leaves[0].__cause__
            raise

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[None]:
        with closing(await to_thread.run_sync(self._own_endpoint)), closing(self._own_directory()):
            header_path = self.directory / "header"
            try:
                header = create_header(header_path)
            except OSError as error:
                raise TierFailed(f"no room for {header_path}: {error.strerror}") from error
            tier = TierActor(self.tier)
            self._manager = Manager(self.config, tier, header)
            sessions = SessionTable(self.directory, self.config.sessions, self.config.limits)
            files = SequenceFiles(self.directory, self.config.resolved_data_directory)
            sequences = Sequences(files, self.config.limits)
            router = Router(
                self.config, self._manager, sequences, sessions, self.epoch, header_path
            )
            async with create_task_group() as below:
                await below.start(tier.run)
                try:
                    await tier.open(self.epoch)
                    sessions.begin()
                    await sequences.begin()
                    # Before anything is bound: whoever holds a lease of an earlier start finds it
                    # void before this start can hand out a page.
                    header.begin_epoch(self.epoch)
                    async with create_task_group() as above:
                        await above.start(self._manager.run)
                        await above.start(router.run)
                        try:
                            yield
                        finally:
                            router.close()
                            self._manager.close()
                            above.cancel_scope.deadline = current_time() + self.config.grace_seconds
                finally:
                    tier.close()
                    with CancelScope(shield=True):
                        await sequences.close()
                        await to_thread.run_sync(self.tier.close)

    def tier_status(self) -> TierStatus:
        return self._manager.tier_status()

    def _own_endpoint(self) -> OwnerLock:
        path = socket_path(self.endpoint)
        # A place that we chose must be ours alone; one that we were given is the giver's business.
        if is_default(self.endpoint):
            private_directory(path.parent, 0o700)
        else:
            make_directory(path.parent, 0o750)
        return OwnerLock(path.with_name(path.name + ".lock"), self.endpoint)

    def _own_directory(self) -> OwnerLock:
        if not self.config.directory:
            private_directory(self.directory.parent)
        private_directory(self.directory)
        return OwnerLock(self.directory / "daemon.lock", str(self.directory))


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
