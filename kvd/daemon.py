"""Daemon: builds, starts, drains and stops all the rest. Read this first.

From the bottom up: tiers behind their actors, the manager that owns the cache's state, the
router that owns the socket. Calls go down that line and results come back as return values.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from anyio import AsyncContextManagerMixin, CancelScope, create_task_group, current_time, to_thread

from kvd.actors.feed import Feed
from kvd.actors.http import Http, prometheus
from kvd.actors.manager import Manager
from kvd.actors.mover import Mover
from kvd.actors.patience import Patience
from kvd.actors.places import Places
from kvd.actors.publisher import Publisher
from kvd.actors.recovery import recover
from kvd.actors.reload import Reloaded, Reloader
from kvd.actors.router import Router
from kvd.actors.scrubber import Scrubber
from kvd.actors.sequences import SequenceFiles, Sequences
from kvd.actors.sessions import SessionTable
from kvd.actors.signal import Signal
from kvd.actors.status import summary
from kvd.actors.store import StoreActor
from kvd.actors.tier import TierActor, close_tier
from kvd.arena.header import SharedHeader, create_header
from kvd.cache.stores import StoreState
from kvd.config import Config, naming
from kvd.loading import Loaded
from kvd.metrics import Metrics
from kvd.protocol.errors import ConfigError, KvdError, TierFailed
from kvd.tiers.base import MemoryTier, StoreTier, Tier
from kvd.tiers.registry import load_tier
from kvd.tiers.shelf import Shelf

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.protocol.messages import ConfigValue, TierStatus

# Of the time that a stop may take: for the tiers to end what they do and to be left whole.
CLOSING_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class _Parts:
    """What runs in a daemon."""

    watchers: Sequence[Metrics | Http]
    tier: TierActor
    stores: Sequence[StoreActor]
    header: SharedHeader
    manager: Manager
    mover: Mover
    scrubber: Scrubber
    sequences: Sequences
    sessions: SessionTable
    router: Router
    publisher: Publisher | None

    @property
    def tiers(self) -> list[TierActor | StoreActor]:
        """All of them, the fastest first."""
        return [self.tier, *self.stores]


class Daemon(AsyncContextManagerMixin):
    """kvd inside any program: `async with Daemon(config) as daemon: ...`.

    Inside the block the endpoint is bound and serves; leaving it stops within `grace_seconds`. The
    thread of a call that hangs in a disk is left then, with all that its tier has open.
    Needs an asyncio event loop. Entering raises ConfigError, AlreadyRunning or TierFailed.
    """

    def __init__(
        self,
        config: Config | Loaded | None = None,
        *,
        on_reload: Callable[[Config], None] | None = None,
        listeners: Mapping[str, int] | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """Of what was loaded, `reload` loads it anew; `on_reload` is given what it is then.

        `listeners` are descriptors of sockets that others listen on for it, by their endpoints.
        Leaving closes the one that it served, and lets its file be. `moved` is told, in any thread,
        that entering goes on.
        """
        loaded = config if isinstance(config, Loaded) else Loaded(config or Config())
        self._reloader = Reloader(loaded, check=self._check_another)
        self._on_reload = [on_reload] if on_reload else []
        self._moved = moved
        # Random and never 0: the epoch of another start is another one, whatever the clock says.
        self.epoch = secrets.randbits(62) | 1
        with loaded.naming_source():
            self.endpoint = self.config.resolved_endpoint
            self._listeners = listeners or {}
            self.places = Places(self.config, self._listeners)
            self.directory = self.places.directory
            self.data_directory = self.places.data_directory
            self._tiers = [
                load_tier(section, self.directory, self.data_directory)
                for section in self.config.tiers
            ]
            first, *below = self._tiers
            if not isinstance(first, MemoryTier):
                raise ConfigError(
                    f"tiers: the first one has what clients map; {first.name} has none: put "
                    "another one before it"
                )
        self.tier = first
        _tell_apart(self._tiers)
        self.stores = [_as_store(tier) for tier in below]

    @property
    def config(self) -> Config:
        """What it goes by now."""
        return self._reloader.config

    def check(self) -> None:
        """Refuse what entering would, as far as that shows while nothing is changed.

        Raises ConfigError.
        """
        self.places.check()
        _check_tiers(self._tiers)
        if self.config.events.endpoint:
            self._media()
        if self.config.http.endpoint:
            prometheus()

    def listed(self) -> tuple[ConfigValue, ...]:
        """Every key of its configuration, with its value and where that comes from."""
        return self._reloader.listed()

    async def reload(self) -> Reloaded:
        """Load the configuration anew and go by it, as far as no new start is needed for it.

        Nobody's request fails for it. Raises ConfigError, and changes nothing, where it is not
        good; Unsupported where it was not loaded.
        """
        return await self._reloader.reload()

    def _check_another(self, loaded: Loaded) -> None:
        Daemon(loaded, listeners=self._listeners).check()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        with one_error():
            async with self._running():
                yield self

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[None]:
        disk = Patience(str(self.data_directory))
        await disk.call(self.check, still_seconds=self.config.hang_seconds)
        with (
            closing(await to_thread.run_sync(self.places.own_endpoints)),
            closing(self.places.own_directory()),
            closing(
                await disk.call(
                    self.places.own_data_directory, still_seconds=self.config.hang_seconds
                )
            ),
        ):
            parts = self._made()
            try:
                async with self._tiers_at_work(parts), self._serving(parts):
                    yield
            finally:
                # When nothing works on it any more; each store's actor closes its own.
                with CancelScope(shield=True):
                    await to_thread.run_sync(close_tier, self.tier)

    def _made(self) -> _Parts:
        """All parts; none of them is at work yet."""
        header_path = self.directory / "header"
        try:
            header = create_header(header_path)
        except OSError as error:
            raise TierFailed(f"no room for {header_path}: {error.strerror}") from error
        tier, changed = TierActor(self.tier), Signal()
        stores = [
            StoreActor(
                store,
                self._state_of(store, number),
                changed,
                self.config.hang_seconds,
                self._moved,
            )
            for number, store in enumerate(self.stores, 1)
        ]
        self._manager = manager = Manager(self.config, tier, header, stores, changed)
        files = SequenceFiles(self.directory, self.data_directory)
        sequences = Sequences(files, self.config.limits)
        mover = Mover(self.config.cache, manager, sequences, stores)
        scrubber = Scrubber(self.config.cache, manager, mover, stores)
        sessions = SessionTable(self.directory, self.config.sessions, self.config.limits)
        publisher = self._publisher()
        self._router = router = Router(
            self.config,
            manager,
            mover,
            sequences,
            scrubber,
            sessions,
            self._reloader,
            self.epoch,
            header_path,
            self._listeners,
            publisher,
        )
        configured = manager, mover, scrubber, sequences, sessions, router
        self._reloader.parts = [*(part.configure for part in configured), *self._on_reload]
        metrics = Metrics(manager, mover, router, sequences, sessions, stores)
        watchers: list[Metrics | Http] = [metrics]
        if self.config.http.endpoint:
            watchers.append(Http(self.config.http.endpoint, router, manager, metrics.read))
        return _Parts(
            watchers,
            tier,
            stores,
            header,
            manager,
            mover,
            scrubber,
            sequences,
            sessions,
            router,
            publisher,
        )

    @asynccontextmanager
    async def _tiers_at_work(self, parts: _Parts) -> AsyncGenerator[None]:
        """The tiers answer, and who watches tells of them, until nobody asks them any more."""
        self._stop_by = math.inf
        async with create_task_group() as tasks:
            for part in (*parts.watchers, *parts.tiers):
                await tasks.start(part.run)
            try:
                yield
            finally:
                parts.tier.close()
                for store in parts.stores:
                    store.close(min(self._stop_by, current_time() + self.config.grace_seconds))
                for watcher in parts.watchers:
                    watcher.close()

    @asynccontextmanager
    async def _serving(self, parts: _Parts) -> AsyncGenerator[None]:
        """What tiers have from before is known, and the endpoint is bound."""
        for tier in parts.tiers:
            await tier.open(self.epoch)
            self._moved()
        await recover(parts.manager, parts.tier, parts.stores)
        parts.sessions.begin()
        parts.manager.expect_earlier(parts.sessions.earlier)
        await parts.sequences.begin(self.config.hang_seconds)
        # Before anything is bound: whoever holds a lease of an earlier start finds it void before
        # this start can hand out a page.
        parts.header.begin_epoch(self.epoch)
        async with create_task_group() as tasks:
            if parts.publisher:  # before anything changes
                await tasks.start(parts.publisher.run)
            for part in (parts.manager, parts.mover, parts.scrubber, parts.router):
                await tasks.start(part.run)
            try:
                yield
            finally:
                self._stop_by = current_time() + self.config.grace_seconds
                saved_by = self._stop_by - CLOSING_SHARE * self.config.grace_seconds
                tasks.cancel_scope.deadline = saved_by
                parts.sequences.end_checkpoints(saved_by)
                for store in parts.stores:
                    store.end_reads(saved_by)
                parts.router.close()
                parts.scrubber.close()
                await parts.mover.close()
                parts.manager.close()
                if parts.publisher:
                    parts.publisher.close()

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
            raise ConfigError(
                f"events: tiers are called alike, {', '.join(media)}: set events.media"
            )
        return media

    def tier_status(self) -> tuple[TierStatus, ...]:
        """All tiers, the fastest first."""
        return self._manager.tier_status()

    def summary(self) -> str:
        """How it is, in a line."""
        return summary(self.tier_status(), self._manager.state.counters)

    async def pulse(self) -> None:
        """Return when requests have been looked for once more; never, where they are not."""
        await self._router.pulse()


@contextmanager
def one_error() -> Iterator[None]:
    """The task groups inside are our own affair: who raised one error gets that one."""
    try:
        yield
    except BaseExceptionGroup as group:
        if len(leaves := _leaves(group)) == 1:
            raise leaves[0] from leaves[0].__cause__
        raise


def _check_tiers(tiers: Sequence[Tier]) -> None:
    owners: dict[tuple[type[Tier], Path], Tier] = {}
    for tier in tiers:
        with naming(f"tiers, {tier.name}"):
            _check_tier(tier)
        if tier.directory is None:
            continue
        if (other := owners.setdefault((type(tier), tier.directory), tier)) is not tier:
            raise ConfigError(
                f"tiers: {tier.name} and {other.name} have one directory, {tier.directory}: set "
                "that of one of them"
            )


def _check_tier(tier: Tier) -> None:
    try:
        tier.check()
    except KvdError:
        raise
    except Exception as error:  # whatever a plugin does
        raise ConfigError(f"cannot be checked: {type(error).__name__}: {error}") from error


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
