"""Stored: a manager, a mover and a scrubber over memory and a store, in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import create_task_group

from kvd.actors.manager import Manager
from kvd.actors.mover import Mover
from kvd.actors.scrubber import Round, Scrubber
from kvd.actors.sequences import SequenceFiles, Sequences
from kvd.actors.signal import Signal
from kvd.actors.store import NAMESPACE_NOTE, StoreActor
from kvd.actors.tier import TierActor
from kvd.arena.header import create_header
from kvd.arena.runs import pages_of
from kvd.cache.audit import check
from kvd.cache.stores import StoreState
from kvd.config import CacheConfig, Config, LimitConfig
from kvd.protocol.messages import CommitItem, MatchItem, TierCheck
from kvd.testing.faults import Faults, set_faults
from kvd.tiers.base import MemoryTier, Record, StoreTier
from kvd.tiers.copying import data_bytes
from kvd.tiers.registry import load_tier
from tests.actors.waiting import until
from tests.actors.wire import packed
from tests.e2e.support import BLOCK, FAULTY, IDENTITY, LAYOUT, LMDB, capacity_of, tokens_of

if TYPE_CHECKING:
    from kvd.protocol.keys import BlockKey
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Store

STORE = 1
TOKENS = tokens_of(1, 4)
# What SOME of its calls have is told by the seed.
FLAKY = FAULTY | {"fraction": 0.5, "delay_seconds": 0.0}
# Rounds that nobody asked for would find what the tests look for.
ON_DEMAND = CacheConfig(scrub_bytes=0, back_ahead_bytes=0)
IN_THE_BACKGROUND = CacheConfig(back_ahead_bytes=0)


class Cache:
    """A manager and a mover over memory and a store, and a scrubber that is run when told to."""

    def __init__(self, manager: Manager, mover: Mover, actor: StoreActor, config: CacheConfig):
        self.manager = manager
        self.mover = mover
        self.actor = actor
        self.scrubber = Scrubber(config, manager, mover, [actor])
        self.counters = manager.state.counters
        self._last_lease = 0

    async def open(self, layout: Layout = LAYOUT, salt: str = "") -> None:
        opened = await self.manager.open(1, IDENTITY, layout, salt, extras=False)
        self.space, self.arena = opened.namespace, opened.arena

    @contextmanager
    def matching(self, tokens: list[int]) -> Iterator[int]:
        """A lease on what there is of these tokens: its number."""
        self._last_lease += 1
        item = MatchItem(self.space.id, self._last_lease, len(tokens))
        self.manager.match(1, item, packed(tokens))
        yield self._last_lease
        self.manager.release(1, [self._last_lease])

    async def store(self, tokens: list[int], *, on_disk: bool = False) -> None:
        """Have these blocks in memory, with their checksums, and in the store."""
        num_blocks = len(tokens) // BLOCK
        with self.matching(tokens) as number:
            lease = self.manager.lease(1, number)
            runs = await self.manager.reserves.in_turn(lease, 0, num_blocks, 0, 30)
            for page in pages_of(runs).tolist():
                self.arena.memory.page_view(page)[...] = page
            item = CommitItem(number, 0, runs, len(tokens))
            self.manager.commit(1, item, packed(tokens))
        await until(lambda: bool(self.arena.table.checksums(pages_of(runs)).all()))
        if on_disk:
            await self.mover.checkpoint()

    def num_blocks(self, tokens: list[int] = TOKENS) -> int:
        """How many of these tokens' blocks some tier has."""
        return self.space.tree.find(packed(tokens), anywhere=True).total_blocks

    @property
    def num_on_disk(self) -> int:
        return self.space.tree.counts[STORE]

    def spoil_page(self, number: int) -> None:
        page = self.page_of(number)
        self.arena.memory.page_view(page)[...] = -1.0

    def page_of(self, number: int) -> int:
        """The page of a block of TOKENS."""
        return int(self.space.tree.find(packed(TOKENS)).node.path_pages()[number])

    @property
    def records(self) -> Store:
        """The store's records."""
        store = self.actor.store(LAYOUT)
        assert store is not None
        return store

    def keys_on_disk(self) -> list[BlockKey]:
        """What the next start would find."""
        return [key for batch in self.records.scan() for key, _ in batch]

    def key(self, number: int) -> BlockKey:
        nodes = self.space.tree.find(packed(TOKENS), anywhere=True).node.path()
        return [key for node in nodes for key in node.block_keys()][number]

    async def open_in_place(self, salt: str) -> None:
        """Open another namespace, for which this one makes place."""
        self.manager.close_namespace(1, self.space.id)
        await self.open(salt=salt)

    async def namespaces_on_disk(self) -> set[bytes]:
        """The keys of those that the store has a note of."""
        await self.actor.settle()
        return {name.removeprefix(NAMESPACE_NOTE) for name in self.records.notes()}

    def drop(self) -> None:
        """Drop all there is."""
        self.manager.carry_out(self.manager.state.drop(self.space, b"").plan)

    async def spoil_record(self, number: int) -> None:
        record = Record(self.key(number), b"", memoryview(bytes(data_bytes(LAYOUT))))
        await self.actor.finish(self.actor.submit(self.records.write, [record]))

    async def delete_record(self, number: int) -> None:
        await self.actor.finish(self.actor.submit(self.records.delete, [self.key(number)]))

    def forget_memory(self) -> None:
        """Evict all that memory has."""
        plan: list[Any] = []
        while leaf := self.space.lru.coldest():
            pages = self.space.tree.cut(leaf, leaf.num_blocks).pages
            self.manager.state.memory.free(self.space, pages, plan)
        self.manager.carry_out(plan)

    @asynccontextmanager
    async def scrubbing(self) -> AsyncGenerator[None]:
        async with create_task_group() as tasks:
            await tasks.start(self.scrubber.run)
            yield
            self.scrubber.close()

    async def verify(self) -> tuple[TierCheck, TierCheck]:
        """What a whole round finds in memory and in the store."""
        async with self.scrubbing():
            round = self.scrubber.verify(start=True)
            await ended(round)
        memory, store = round.tiers
        return memory, store

    @asynccontextmanager
    async def reading_held_up(self) -> AsyncGenerator[Round]:
        """A round that cannot read from the store before this is left."""
        async with self.scrubbing():
            with self.records._gate.alone():  # type: ignore[attr-defined]
                round = self.scrubber.verify(start=True)
                await until(lambda: self.actor._readers.borrowed_tokens == 1)
                yield round
            await ended(round)


async def ended(round: Round) -> None:
    await until(lambda: round.is_done)


@asynccontextmanager
async def running(
    directory: Path,
    config: CacheConfig = ON_DEMAND,
    section: dict[str, Any] = LMDB,
    memory_bytes: int = capacity_of(128),
) -> AsyncGenerator[Cache]:
    memory = load_tier({"type": "host", "capacity_bytes": memory_bytes}, directory, directory)
    below = load_tier(section, directory, directory)
    assert isinstance(memory, MemoryTier)
    assert isinstance(below, StoreTier)
    changed = Signal()
    tier = TierActor(memory)
    state = StoreState(STORE, below.name, below.usable_bytes)
    actor = StoreActor(below, state, changed, Config().hang_seconds)
    async with create_task_group() as tasks:
        for each in (tier, actor):
            await tasks.start(each.run)
            await each.open(1)
        header = create_header(directory / "header")
        manager = Manager(Config(cache=config), tier, header, [actor], changed)
        sequences = Sequences(SequenceFiles(directory, directory / "data"), LimitConfig())
        await sequences.begin()
        mover = Mover(config, manager, sequences, [actor])
        await tasks.start(manager.run)
        await tasks.start(mover.run)
        cache = Cache(manager, mover, actor, config)
        await cache.open()
        try:
            yield cache
            check(manager.state)
        finally:
            set_faults(directory, Faults.NONE)  # a stuck one would keep a test that failed
            with anyio.CancelScope(shield=True):
                await mover.close()
                manager.close()
                actor.close()
                tier.close()
    memory.close()
