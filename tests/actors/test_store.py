"""StoreActor: what a store may hold, and what is left of a write or a delete that fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio import create_task_group
from msgspec.structs import replace

from kvd.arena.about import read_about
from kvd.config import CacheConfig, LimitConfig
from kvd.protocol.errors import BadRequest, LimitExceeded, TierFailed
from kvd.testing.faults import Faults, FaultyStoreTier, set_faults
from kvd.tiers.base import Store, StoreTier
from kvd.tiers.registry import load_tier
from tests.actors.stored import FLAKY, ON_DEMAND, STORE, TOKENS
from tests.actors.waiting import until
from tests.actors.wire import packed
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import FAULTY, LAYOUT, LMDB, PAGE_FIRST, PATIENCE_SECONDS, tokens_of

if TYPE_CHECKING:
    from kvd.protocol.layout import Layout

pytestmark = pytest.mark.anyio

AT_ONCE = CacheConfig(scrub_bytes=0, back_ahead_bytes=0, demote_watermark=1e-6)
SECOND_CALL_FAILS = FLAKY | {"seed": 0}
FIRST_CALL_FAILS = FLAKY | {"seed": 9}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again soon."""
    monkeypatch.setattr("kvd.actors.store.FIRST_PAUSE_SECONDS", 0.001)


async def test_a_store_holds_what_its_tier_allows_with_each_new_layout(start: Any) -> None:
    async with start() as cache:
        await cache.actor.settle()
        before = cache.actor.state.usable_bytes
        await cache.open(PAGE_FIRST)
        await cache.actor.settle()
        assert cache.actor.state.usable_bytes == cache.actor.tier.usable_bytes < before


async def test_the_tier_is_closed_when_all_that_was_submitted_is_done(
    start: Any,
    shm: Path,  # noqa: F811
) -> None:
    async with start() as cache:
        await cache.store(TOKENS, on_disk=True)
        for number in (3, 2):
            cache.actor.forget(LAYOUT, [cache.key(number)])
    tier = load_tier(LMDB, shm, shm)
    assert isinstance(tier, StoreTier)
    tier.open(2)  # nobody else has it any more
    (store,) = tier.stores()
    assert sum(map(len, store.scan())) == 2
    tier.close()


def fail_in_its_own_way(*args: Any) -> None:
    raise OSError("no way to the machine that has it")


async def test_a_tier_that_cannot_be_opened_is_done_without_whatever_it_raises(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyStoreTier, "open", fail_in_its_own_way)
    async with start(ON_DEMAND, FAULTY) as cache:
        assert cache.actor.is_off
        assert cache.actor.trouble == "OSError: no way to the machine that has it"


async def test_a_tier_that_cannot_be_closed_keeps_nothing_from_its_end(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FaultyStoreTier, "close", fail_in_its_own_way)
    async with start(ON_DEMAND, FAULTY) as cache:
        await cache.actor.settle()
    assert "reason=not_closed tier=faulty" in caplog.text


def stems(directory: Path) -> set[str]:
    """What arenas there are."""
    return {path.stem for path in directory.glob("*.arena")}


def scanned(store: Store) -> list[Any]:
    return list(store.scan())


async def test_a_read_at_the_start_that_stands_still_fails_and_the_tier_is_left(
    start: Any,
    shm: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with start(ON_DEMAND, FAULTY) as cache:
        await cache.store(TOKENS, on_disk=True)
        set_faults(shm, Faults.STUCK)
        with pytest.raises(TierFailed, match="does not answer"):
            await cache.actor.read(scanned, cache.records, still_seconds=0.01)
        set_faults(shm, Faults.NONE)
    assert "reason=not_closed tier=faulty" in caplog.text


@pytest.mark.usefixtures("soon")
async def test_of_a_write_that_failed_in_the_middle_nothing_is_left(
    start: Any,
    shm: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.tiers.copying.BATCH_BYTES", 2 * LAYOUT.page_bytes)
    async with start(ON_DEMAND, SECOND_CALL_FAILS) as cache:
        await cache.store(TOKENS)
        await cache.actor.settle()
        set_faults(shm, Faults.SOME)
        with pytest.raises(TierFailed):
            await cache.mover.checkpoint()
        cache.forget_memory()
        set_faults(shm, Faults.NONE)
        await until(lambda: not cache.actor.trouble)
        assert (cache.num_blocks(), cache.keys_on_disk()) == (0, [])


@pytest.mark.usefixtures("soon")
async def test_a_delete_that_is_tried_again_takes_nothing_that_was_written_meanwhile(
    start: Any,
    shm: Path,  # noqa: F811
) -> None:
    async with start(AT_ONCE, FIRST_CALL_FAILS) as cache:
        await cache.store(TOKENS)
        await until(lambda: cache.num_on_disk == 4)
        set_faults(shm, Faults.STUCK)
        cache.drop()
        await cache.store(TOKENS)
        await until(lambda: cache.actor.num_waiting == 1)
        set_faults(shm, Faults.SOME)
        await until(lambda: cache.num_on_disk == 4)
        set_faults(shm, Faults.NONE)
        await until(lambda: not cache.actor.trouble)
        assert len(cache.keys_on_disk()) == 4


@pytest.mark.usefixtures("soon")
async def test_what_could_not_be_deleted_of_a_layout_goes_with_its_store(
    start: Any,
    shm: Path,  # noqa: F811
) -> None:
    async with start(ON_DEMAND, FIRST_CALL_FAILS) as cache:
        await cache.store(TOKENS, on_disk=True)
        set_faults(shm, Faults.STUCK)
        cache.drop()
        cache.actor.remove_store(LAYOUT)
        set_faults(shm, Faults.SOME)
        await until(lambda: cache.actor.counters["write_failures"] > 0)
        set_faults(shm, Faults.NONE)
        await until(lambda: not cache.actor.trouble)
        await cache.actor.settle()
        assert cache.actor.tier.stores() == []
        await cache.actor.sync()


@pytest.mark.usefixtures("soon")
async def test_a_store_that_could_not_be_removed_goes_before_another_is_made(
    start: Any,
    shm: Path,  # noqa: F811
) -> None:
    async with start(ON_DEMAND, FAULTY) as cache:
        await cache.store(TOKENS, on_disk=True)
        old = cache.records
        set_faults(shm, Faults.GONE)
        cache.actor.remove_store(LAYOUT)
        cache.actor.prepare(cache.space.info)
        await cache.actor.settle()
        with pytest.raises(TierFailed):
            await cache.actor.sync()
        set_faults(shm, Faults.NONE)
        await until(lambda: not cache.actor.trouble)
        assert cache.actor.tier.stores() == [cache.records] != [old]
        assert cache.keys_on_disk() == []


async def test_of_namespaces_that_made_place_no_notes_are_left(start: Any) -> None:
    async with start() as cache:
        cache.manager.state.limits = LimitConfig(namespaces=1)
        await cache.store(TOKENS, on_disk=True)
        first = cache.space
        for salt in ("second", "third"):
            await cache.open_in_place(salt)
        assert await cache.namespaces_on_disk() == {cache.space.key}
        noted = read_about(cache.arena.path.with_suffix(".about")).namespaces
        assert first.id not in noted
        assert cache.space.id in noted


@pytest.mark.usefixtures("soon")
async def test_of_blocks_that_could_not_be_deleted_the_note_stays(
    start: Any,
    shm: Path,  # noqa: F811
) -> None:
    async with start(ON_DEMAND, FIRST_CALL_FAILS) as cache:
        cache.manager.state.limits = LimitConfig(namespaces=1)
        await cache.store(TOKENS, on_disk=True)
        first = cache.space
        set_faults(shm, Faults.SOME)
        await cache.open_in_place("second")
        assert await cache.namespaces_on_disk() >= {first.key}


async def test_a_namespace_that_is_refused_leaves_no_note(start: Any) -> None:
    async with start() as cache:
        cache.manager.state.limits = LimitConfig(session_namespaces=1)
        with pytest.raises(LimitExceeded):
            await cache.open(salt="one too many")
        assert await cache.namespaces_on_disk() == {cache.space.key}


async def test_a_namespace_that_is_refused_takes_no_others_place(start: Any) -> None:
    async with start() as cache:
        first, state = cache.space, cache.manager.state
        await cache.open_in_place("second")
        state.limits = LimitConfig(namespaces=2, session_namespaces=1)
        with pytest.raises(LimitExceeded):
            await cache.open(salt="one too many")
        assert state.find_namespace(first.key) is first


async def test_where_unknown_records_have_all_the_room_nothing_known_makes_room_in_vain(
    start: Any,
) -> None:
    async with start() as cache:
        await cache.store(TOKENS, on_disk=True)
        cache.forget_memory()
        state = cache.actor.state
        state.unknown_bytes[PAGE_FIRST] = state.usable_bytes
        await cache.store(tokens_of(2, 1))
        with pytest.raises(TierFailed):
            await cache.mover.checkpoint()
        assert cache.num_on_disk == 4


@pytest.mark.parametrize(
    "layout", [replace(LAYOUT, num_layers=1 << 15), replace(LAYOUT, num_planes=1, head_size=1)]
)
async def test_a_layout_that_cannot_be_takes_no_others_place(start: Any, layout: Layout) -> None:
    async with start() as cache:
        cache.manager.state.limits = LimitConfig(layouts=1)
        await cache.store(TOKENS, on_disk=True)
        cache.manager.close_namespace(1, cache.space.id)
        with pytest.raises(BadRequest):
            await cache.open(layout)
        assert (cache.num_blocks(), cache.num_on_disk, len(cache.keys_on_disk())) == (4, 4, 4)


@pytest.mark.parametrize(("layout", "arena"), [(LAYOUT, 1), (PAGE_FIRST, 2)])
async def test_a_namespace_of_which_no_note_can_be_takes_no_others_place(
    start: Any,
    shm: Path,  # noqa: F811
    layout: Layout,
    arena: int,
) -> None:
    async with start() as cache:
        cache.manager.state.limits = LimitConfig(layouts=1, namespaces=1)
        await cache.store(TOKENS, on_disk=True)
        cache.manager.close_namespace(1, cache.space.id)
        (shm / f"{1:016x}-{arena}.about.new").mkdir()
        with pytest.raises(TierFailed):
            await cache.open(layout, salt="second")
        assert (cache.num_blocks(), cache.num_on_disk, len(cache.keys_on_disk())) == (4, 4, 4)
        assert stems(shm) == {f"{1:016x}-1"}


async def test_what_took_a_place_is_known_to_the_next_start(
    start: Any,
    shm: Path,  # noqa: F811
) -> None:
    async with start() as cache:
        cache.manager.state.limits = LimitConfig(layouts=1)
        await cache.store(TOKENS)
        cache.manager.close_namespace(1, cache.space.id)
        await cache.open(PAGE_FIRST)
        await cache.manager.queue.call(anyio.sleep, 0)
        (stem,) = stems(shm)
        about = read_about(shm / f"{stem}.about")
        assert about.namespaces == {cache.space.id: cache.space.info}


@pytest.mark.usefixtures("soon")
async def test_a_tier_whose_reads_hang_is_a_miss_and_in_trouble_until_they_return(
    start: Any,
    shm: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with start(ON_DEMAND, FAULTY) as cache, create_task_group() as tasks:
        await cache.store(TOKENS, on_disk=True)
        cache.forget_memory()
        set_faults(shm, Faults.STUCK)
        tasks.start_soon(cache.mover.prepare, cache.space, packed(TOKENS), PATIENCE_SECONDS)
        with monkeypatch.context() as hasty:
            hasty.setattr("kvd.actors.store.SILENT_SECONDS", 0.01)
            await until(lambda: "has not answered" in cache.manager.tier_status()[STORE].trouble)
        assert cache.manager.state.lacking(cache.space, packed(TOKENS)) is None
        set_faults(shm, Faults.NONE)
        await until(lambda: cache.counters["blocks_promoted"] == 4)
        await until(lambda: not cache.actor.trouble)
        assert cache.actor.state.may_read


@pytest.mark.usefixtures("soon")
async def test_a_tier_whose_writes_hang_is_read_still_and_written_when_they_return(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as cache:
        await cache.store(TOKENS, on_disk=True)
        go = threading.Event()
        cache.actor.submit(go.wait, PATIENCE_SECONDS)
        with monkeypatch.context() as hasty:
            hasty.setattr("kvd.actors.store.SILENT_SECONDS", 0.01)
            await until(lambda: "has not answered" in cache.actor.trouble)
        assert (cache.actor.state.may_write, cache.actor.state.may_read) == (False, True)
        go.set()
        await until(lambda: not cache.actor.trouble)
        assert cache.actor.state.may_write


@pytest.mark.usefixtures("soon")
async def test_a_layout_that_could_not_be_kept_is_no_trouble_once_nobody_uses_it(
    start: Any,
    shm: Path,  # noqa: F811
) -> None:
    async with start(ON_DEMAND, FAULTY) as cache:
        await cache.actor.settle()
        set_faults(shm, Faults.FULL)
        await cache.open(PAGE_FIRST)
        await until(lambda: bool(cache.actor.trouble))
        cache.manager.state.limits = LimitConfig(namespaces=2)
        cache.manager.close_namespace(1, cache.space.id)
        await cache.open(salt="in its place")
        set_faults(shm, Faults.NONE)
        await until(lambda: not cache.actor.trouble)
        assert await cache.mover.checkpoint() == 0


async def test_of_a_layout_that_goes_while_its_store_is_made_no_store_is_left(start: Any) -> None:
    async with start() as cache:
        go = threading.Event()
        cache.actor.submit(go.wait, PATIENCE_SECONDS)
        await cache.open(PAGE_FIRST)
        cache.manager.close_namespace(1, cache.space.id)
        cache.manager.state.limits = LimitConfig(layouts=2)
        await cache.open(replace(LAYOUT, num_layers=3))
        go.set()
        await cache.actor.settle()
        layouts = {arena.layout for arena in cache.manager.arenas.values()}
        assert PAGE_FIRST not in layouts
        assert {store.layout for store in cache.actor.tier.stores()} == layouts
        assert {store.layout for store in cache.actor.stores} == layouts
