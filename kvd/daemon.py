"""Daemon: builds, starts, drains and stops all the rest. Read this first.

From the bottom up: tiers behind their actors, the manager that owns the cache's state, the
router that owns the socket. Calls go down that line and results come back as return values.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from typing import TYPE_CHECKING, Self

from anyio import AsyncContextManagerMixin, CancelScope, create_task_group, current_time, to_thread

from kvd.actors.feed import Feed
from kvd.actors.manager import Manager
from kvd.actors.mover import Mover
from kvd.actors.patience import Patience
from kvd.actors.publisher import Publisher
from kvd.actors.recovery import recover
from kvd.actors.router import Router
from kvd.actors.scrubber import Scrubber
from kvd.actors.sequences import SequenceFiles, Sequences
from kvd.actors.sessions import SessionTable
from kvd.actors.signal import Signal
from kvd.actors.store import StoreActor
from kvd.actors.tier import TierActor
from kvd.arena.header import create_header
from kvd.arena.owner import OwnerLock, make_directory, private_directory
from kvd.cache.stores import StoreState
from kvd.config import Config
from kvd.protocol.endpoint import is_default, socket_path
from kvd.protocol.errors import ConfigError, TierFailed
from kvd.tiers.base import MemoryTier, StoreTier, Tier
from kvd.tiers.registry import load_tier
from kvd.tiers.shelf import Shelf

if TYPE_CHECKING:
    from kvd.protocol.messages import TierStatus

logger = logging.getLogger(__name__)

# Of the time that a stop may take: for the tiers to end what they do and to be left whole.
CLOSING_SHARE = 0.2


class Daemon(AsyncContextManagerMixin):
    """kvd inside any program: `async with Daemon(config) as daemon: ...`.

    Inside the block the endpoint is bound and serves; leaving it stops within `grace_seconds`. The
    thread of a call that hangs in a disk is left then, with all that its tier has open.
    Needs an asyncio event loop. Entering raises ConfigError, AlreadyRunning or TierFailed.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self.endpoint = self.config.resolved_endpoint
        self.directory = self.config.resolved_directory
        self.data_directory = self.config.resolved_data_directory
        # Random and never 0: the epoch of another start is another one, whatever the clock says.
        self.epoch = secrets.randbits(62) | 1
        places = self.directory, self.data_directory
        first, *below = tiers = [load_tier(section, *places) for section in self.config.tiers]
        if not isinstance(first, MemoryTier):
            raise ConfigError(f"tiers: the first one has what clients map; {first.name} has none")
        self.tier = first
        _tell_apart(tiers)
        self.stores = [_as_store(tier) for tier in below]

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
        with (
            closing(await to_thread.run_sync(self._own_endpoint)),
            closing(self._own_directory()),
            closing(
                await Patience(str(self.data_directory)).call(
                    self._own_data_directory, still_seconds=self.config.hang_seconds
                )
            ),
        ):
            header_path = self.directory / "header"
            try:
                header = create_header(header_path)
            except OSError as error:
                raise TierFailed(f"no room for {header_path}: {error.strerror}") from error
            tier, changed = TierActor(self.tier), Signal()
            stores = [
                StoreActor(store, self._state_of(store, number), changed, self.config.hang_seconds)
                for number, store in enumerate(self.stores, 1)
            ]
            actors: list[TierActor | StoreActor] = [tier, *stores]
            self._manager = Manager(self.config, tier, header, stores, changed)
            files = SequenceFiles(self.directory, self.config.resolved_data_directory)
            sequences = Sequences(files, self.config.limits)
            mover = Mover(self.config.cache, self._manager, sequences, stores)
            scrubber = Scrubber(self.config.cache, self._manager, mover, stores)
            sessions = SessionTable(self.directory, self.config.sessions, self.config.limits)
            publisher = self._publisher()
            router = Router(
                self.config,
                self._manager,
                mover,
                sequences,
                scrubber,
                sessions,
                self.epoch,
                header_path,
                publisher,
            )
            end = math.inf
            try:
                async with create_task_group() as below:
                    for actor in actors:
                        await below.start(actor.run)
                    try:
                        for actor in actors:
                            await actor.open(self.epoch)
                        await recover(self._manager, tier, stores)
                        sessions.begin()
                        self._manager.expect_earlier(sessions.earlier)
                        await sequences.begin(self.config.hang_seconds)
                        # Before anything is bound: whoever holds a lease of an earlier start finds
                        # it void before this start can hand out a page.
                        header.begin_epoch(self.epoch)
                        async with create_task_group() as above:
                            if publisher:  # before anything changes
                                await above.start(publisher.run)
                            await above.start(self._manager.run)
                            await above.start(mover.run)
                            await above.start(scrubber.run)
                            await above.start(router.run)
                            try:
                                yield
                            finally:
                                end = current_time() + self.config.grace_seconds
                                saved_by = end - CLOSING_SHARE * self.config.grace_seconds
                                above.cancel_scope.deadline = saved_by
                                sequences.end_checkpoints(saved_by)
                                for store in stores:
                                    store.end_reads(saved_by)
                                router.close()
                                scrubber.close()
                                await mover.close()
                                self._manager.close()
                                if publisher:
                                    publisher.close()
                    finally:
                        tier.close()
                        for store in stores:
                            store.close(min(end, current_time() + self.config.grace_seconds))
            finally:
                # When nothing works on it any more; each store's actor closes its own.
                with CancelScope(shield=True):
                    await to_thread.run_sync(self.tier.close)

    def _state_of(self, store: StoreTier, number: int) -> StoreState:
        return StoreState(number, store.name, store.usable_bytes, self.config.cache.admission)

    def _publisher(self) -> Publisher | None:
        config = self.config.events
        if not config.endpoint:
            return None
        return Publisher(config, Feed(config, self._manager.state, self._media(), self.epoch))

    def _media(self) -> list[str]:
        """How events call the tiers, the fastest first."""
        known = {"host": "CPU", "torch": "GPU"} | self.config.events.media
        media = [known.get(self.tier.name, "CPU")]
        media += [known.get(store.name, "DISK") for store in self.stores]
        if len(set(media)) < len(media):
            raise ConfigError(f"events: tiers are called alike, {', '.join(media)}: set media")
        return media

    def tier_status(self) -> tuple[TierStatus, ...]:
        """All tiers, the fastest first."""
        return self._manager.tier_status()

    def _own_endpoint(self) -> OwnerLock:
        path = socket_path(self.endpoint)
        with _naming("endpoint"):
            # A place that we chose must be ours alone; one that we were given is the giver's
            # business.
            if is_default(self.endpoint):
                private_directory(path.parent, 0o700)
            else:
                make_directory(path.parent, 0o750)
            return OwnerLock(path.with_name(path.name + ".lock"), self.endpoint)

    def _own_data_directory(self) -> OwnerLock:
        directory = self.config.resolved_data_directory
        with _naming("data_directory"):
            private_directory(directory, 0o700)
            return OwnerLock(directory / "daemon.lock", str(directory))

    def _own_directory(self) -> OwnerLock:
        with _naming("directory"):
            if not self.config.directory:
                private_directory(self.directory.parent)
            private_directory(self.directory)
            return OwnerLock(self.directory / "daemon.lock", str(self.directory))


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Of a place that cannot be used, the key is told that chooses it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}: set {key}") from error


def _tell_apart(tiers: Sequence[Tier]) -> None:
    """Number the tiers of one name: host, host-2."""
    counts: Counter[str] = Counter()
    for tier in tiers:
        counts[tier.name] += 1
        if (number := counts[tier.name]) > 1:
            tier.name += f"-{number}"


def _as_store(tier: Tier) -> StoreTier:
    if isinstance(tier, MemoryTier):
        return Shelf(tier)
    assert isinstance(tier, StoreTier)
    return tier


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
