"""Scrubber: what it finds in memory and in a store, and what it leaves alone."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from anyio import create_task_group

from kvd.actors.manager import Manager
from kvd.actors.mover import Mover
from kvd.actors.scrubber import Round, Scrubber
from kvd.actors.signal import Signal
from kvd.actors.store import StoreActor
from kvd.actors.tier import TierActor
from kvd.arena.header import create_header
from kvd.arena.runs import pages_of
from kvd.cache.audit import check
from kvd.cache.radix import MEMORY
from kvd.cache.stores import StoreState
from kvd.config import CacheConfig, Config
from kvd.protocol.errors import TierFailed
from kvd.protocol.messages import CommitItem, MatchItem, TierCheck
from kvd.testing.faults import Faults, set_faults
from kvd.tiers.base import MemoryTier, Record, StoreTier
from kvd.tiers.copying import data_bytes
from kvd.tiers.registry import load_tier
from tests.actors.waiting import until
from tests.actors.wire import packed
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    PAGE_FIRST,
    PATIENCE_SECONDS,
    capacity_of,
    tokens_of,
)

if TYPE_CHECKING:
    from kvd.protocol.keys import BlockKey
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Store

pytestmark = pytest.mark.anyio

STORE = 1
TOKENS = tokens_of(1, 4)
LMDB = {"type": "lmdb", "capacity_bytes": "16MiB", "free_floor_bytes": 0}
FAULTY = {"type": "faulty", "tier": LMDB}
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

    async def open(self, layout: Layout = LAYOUT) -> None:
        opened = await self.manager.open(1, IDENTITY, layout, "", extras=False)
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
            runs = await self.manager.reserve(lease, 0, num_blocks, 0, 30)
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

    def key(self, number: int) -> BlockKey:
        nodes = self.space.tree.find(packed(TOKENS), anywhere=True).node.path()
        return [key for node in nodes for key in node.block_keys()][number]

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
    directory: Path, config: CacheConfig = ON_DEMAND, section: dict[str, Any] = LMDB
) -> AsyncGenerator[Cache]:
    memory = load_tier({"type": "host", "capacity_bytes": capacity_of(128)}, directory, directory)
    below = load_tier(section, directory, directory)
    assert isinstance(memory, MemoryTier)
    assert isinstance(below, StoreTier)
    changed = Signal()
    tier = TierActor(memory)
    actor = StoreActor(below, StoreState(STORE, below.name, below.usable_bytes), changed)
    async with create_task_group() as tasks:
        for each in (tier, actor):
            await tasks.start(each.run)
            await each.open(1)
        header = create_header(directory / "header")
        manager = Manager(Config(cache=config), tier, header, [actor], changed)
        mover = Mover(config, manager, [actor])
        await tasks.start(manager.run)
        await tasks.start(mover.run)
        cache = Cache(manager, mover, actor, config)
        await cache.open()
        try:
            yield cache
            check(manager.state)
        finally:
            with anyio.CancelScope(shield=True):
                await mover.close()
                manager.close()
                actor.close()
                tier.close()
    memory.close()
    below.close()


@pytest.fixture
def start(shm: Path) -> Callable[..., Any]:  # noqa: F811
    return lambda *args: running(shm, *args)


# --- memory ---


async def test_good_blocks_are_all_looked_at_and_stay(start: Any) -> None:
    async with start() as cache:
        await cache.store(TOKENS, on_disk=True)
        assert await cache.verify() == (TierCheck("host", 4, 4), TierCheck("lmdb", 4, 4))
        assert cache.num_blocks() == 4
        assert cache.counters["blocks_verified"] == 8


async def test_a_bad_page_goes_with_what_follows_it_in_every_tier(start: Any) -> None:
    async with start() as cache:
        await cache.store(TOKENS, on_disk=True)
        cache.spoil_page(1)
        memory, store = await cache.verify()
        assert (memory.num_bad, cache.counters["checksum_failures"]) == (1, 1)
        assert cache.num_blocks() == 1
        assert (store.num_checked, store.num_bad, store.num_missing) == (1, 0, 0)


async def test_a_bad_page_that_is_leased_is_found_no_more(start: Any) -> None:
    async with start() as cache:
        await cache.store(TOKENS)
        with cache.matching(TOKENS):
            cache.spoil_page(0)
            await cache.verify()
            assert cache.num_blocks() == 0
            assert cache.manager.tier_status()[MEMORY].pages["detached"] == 4


async def test_a_page_without_a_checksum_is_not_looked_at(start: Any) -> None:
    async with start() as cache:
        await cache.store(TOKENS)
        pages = np.array([cache.page_of(3)])
        cache.arena.table.add_checksums(pages, cache.arena.table.generations(pages), np.uint64([0]))
        memory, _ = await cache.verify()
        assert (memory.num_blocks, memory.num_checked) == (4, 3)


async def test_blocks_of_an_earlier_epoch_are_looked_at_first(start: Any) -> None:
    async with start() as cache:
        await cache.store(TOKENS)
        arena = cache.space.arena
        arena.unverified.update(cache.page_of(number) for number in range(4))
        cache.spoil_page(2)
        async with cache.scrubbing():
            await until(lambda: not arena.unverified)
        assert cache.num_blocks() == 2


# --- the store ---


async def test_a_bad_record_goes_with_what_follows_it(start: Any) -> None:
    async with start() as cache:
        await cache.store(TOKENS, on_disk=True)
        await cache.spoil_record(2)
        memory, store = await cache.verify()
        assert (memory.num_bad, store.num_bad) == (0, 1)
        assert cache.num_blocks() == 2
        assert cache.counters["checksum_failures"] == 1


async def test_a_record_that_is_not_there_goes_with_what_follows_it(start: Any) -> None:
    async with start() as cache:
        await cache.store(TOKENS, on_disk=True)
        cache.forget_memory()
        await cache.delete_record(1)
        _, store = await cache.verify()
        assert (store.num_bad, store.num_missing) == (0, 1)
        assert cache.num_blocks() == 1
        assert cache.counters["blocks_missing"] == 1


async def test_what_was_dropped_while_it_was_read_is_not_missed(start: Any) -> None:
    async with start() as cache:
        await cache.store(TOKENS, on_disk=True)
        async with cache.reading_held_up() as round:
            cache.manager.carry_out(cache.manager.state.drop(cache.space, b"").plan)
            await cache.actor.sync()
        assert round.tiers[STORE].num_missing == 0
        assert cache.counters["blocks_missing"] == 0


async def test_a_bad_record_is_found_where_its_node_was_split_meanwhile(start: Any) -> None:
    async with start() as cache:
        await cache.store(TOKENS, on_disk=True)
        await cache.spoil_record(1)
        async with cache.reading_held_up() as round:
            with cache.matching(TOKENS[: 3 * BLOCK]):
                assert len(cache.space.tree.find(packed(TOKENS)).node.path()) == 2
        assert round.tiers[STORE].num_bad == 1
        assert cache.num_blocks() == 1


async def test_blocks_above_a_split_that_comes_first_are_not_left_out(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.actors.scrubber.PIECE_BYTES", LAYOUT.page_bytes)
    async with start() as cache:
        await cache.store(TOKENS)
        await cache.store(tokens_of(2, 4), on_disk=True)
        async with cache.reading_held_up() as round:
            for tokens in (TOKENS, tokens_of(2, 4)):
                with cache.matching(tokens[:BLOCK]):
                    pass
        assert round.tiers[STORE].num_checked == 8


async def test_a_store_that_fails_is_left_and_says_why(start: Any, shm: Path) -> None:  # noqa: F811
    async with start(ON_DEMAND, FAULTY) as cache:
        await cache.store(TOKENS, on_disk=True)
        set_faults(shm, Faults.GONE)
        memory, store = await cache.verify()
        assert (memory.num_checked, store.num_checked) == (4, 0)
        assert "the tier is gone" in store.trouble
        assert cache.num_blocks() == 4


# --- rounds ---


async def test_a_round_nobody_asked_for_finds_what_is_bad(start: Any) -> None:
    async with start(IN_THE_BACKGROUND) as cache:
        await cache.store(TOKENS, on_disk=True)
        await cache.spoil_record(3)
        async with cache.scrubbing():
            await until(lambda: cache.counters["checksum_failures"] == 1)
        assert cache.num_blocks() == 3


async def test_who_asks_while_a_round_goes_on_joins_it(start: Any) -> None:
    async with start() as cache:
        await cache.store(TOKENS, on_disk=True)
        async with cache.reading_held_up() as round:
            assert cache.scrubber.verify(start=True) is round
            assert (round.tiers[MEMORY].num_checked, round.tiers[STORE].num_checked) == (4, 0)
            assert not round.is_done


async def test_without_a_round_there_is_nothing_to_tell(start: Any) -> None:
    async with start() as cache:
        assert cache.scrubber.verify(start=False) == Round([], is_done=True)


# --- checkpoints ---


async def test_checkpoints_at_once_are_all_answered(start: Any) -> None:
    async with start() as cache, create_task_group() as tasks:
        await cache.store(TOKENS)
        for _ in range(3):
            tasks.start_soon(cache.mover.checkpoint)
    assert cache.counters["blocks_demoted"] == 4


async def test_a_checkpoint_waits_for_a_store_that_is_being_made(start: Any) -> None:
    async with start() as cache, create_task_group() as tasks:
        go = threading.Event()
        cache.actor.submit(go.wait, PATIENCE_SECONDS)
        await cache.open(PAGE_FIRST)
        await cache.store(TOKENS)
        tasks.start_soon(cache.mover.checkpoint)
        await until(lambda: cache.actor.num_waiting == 2)
        go.set()
    assert cache.counters["blocks_demoted"] == 4


async def test_a_checkpoint_that_finds_no_room_says_so(start: Any, shm: Path) -> None:  # noqa: F811
    async with start(ON_DEMAND, FAULTY) as cache:
        await cache.actor.settle()
        set_faults(shm, Faults.FULL)
        await cache.store(TOKENS)
        with pytest.raises(TierFailed, match="the tier is full"):
            await cache.mover.checkpoint()
