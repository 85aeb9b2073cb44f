"""Scrubber: what it finds in memory and in a store, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvd.actors.scrubber import Round
from kvd.cache.radix import MEMORY
from kvd.config import Config
from kvd.protocol.messages import TierCheck
from kvd.testing.faults import Faults, set_faults
from tests.actors.stored import IN_THE_BACKGROUND, ON_DEMAND, STORE, TOKENS
from tests.actors.waiting import until
from tests.actors.wire import packed
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import BLOCK, FAULTY, LAYOUT, tokens_of

pytestmark = pytest.mark.anyio


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
        assert cache.counters["checksum_failures"] == 1
        # What is good in memory stays, and is copied anew.
        assert (cache.num_blocks(), cache.num_on_disk) == (4, 2)
        assert await cache.mover.checkpoint() == 2
        assert await cache.verify() == (memory, replace(store, num_bad=0))


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
            cache.drop()
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
        assert (cache.num_blocks(), cache.num_on_disk) == (4, 1)


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
        assert (cache.num_blocks(), cache.num_on_disk) == (4, 3)


async def test_a_round_under_way_goes_on_as_fast_as_it_may_now(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.actors.scrubber.PIECE_BYTES", LAYOUT.page_bytes)
    slowest = replace(IN_THE_BACKGROUND, scrub_bytes=1)
    async with start(slowest) as cache:
        await cache.store(TOKENS)
        async with cache.scrubbing():
            await until(lambda: cache.counters["blocks_verified"] == 1)
            cache.scrubber.configure(Config(cache=replace(slowest, scrub_bytes=0)))
            cache.scrubber.configure(Config(cache=replace(slowest, scrub_bytes=1 << 30)))
            await until(lambda: cache.counters["blocks_verified"] == 4)


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
