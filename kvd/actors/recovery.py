"""Recovery: takes over what an earlier epoch left, before anything is served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec
import numpy as np

from kvd.actors.store import NAMESPACE_NOTE
from kvd.arena.page_table import PageState
from kvd.cache.radix import MEMORY
from kvd.cache.recovery import plant, read_store, read_table
from kvd.protocol.errors import KvdError, TierFailed
from kvd.protocol.keys import KEY_BYTES, BlockKey, NamespaceInfo

if TYPE_CHECKING:
    from kvd.actors.manager import Manager
    from kvd.actors.store import StoreActor
    from kvd.actors.tier import TierActor
    from kvd.cache.memory import Namespace
    from kvd.cache.plan import Plan
    from kvd.tiers.base import Adopted, Store

logger = logging.getLogger(__name__)

# So often, and after such a pause, a store is read that fails.
NUM_ATTEMPTS = 3
PAUSE_SECONDS = 0.5


async def recover(manager: Manager, tier: TierActor, stores: Sequence[StoreActor]) -> None:
    """Adopt arenas, read the stores, and keep of both what today's limits allow."""
    for adopted in await tier.adopt():
        try:
            await _adopt(manager, tier, adopted)
        except Exception as error:  # whatever lies there: it hinders no start
            level = logging.WARNING if isinstance(error, KvdError) else logging.ERROR
            logger.log(
                level, "reason=not_adopted path=%s is removed", adopted.arena.path, exc_info=error
            )
            manager.give_up(adopted.arena)
            await tier.remove_arena(adopted.arena)
    for actor in stores:
        try:
            for store in actor.stores:
                await _recover(manager, actor, store)
        except TierFailed as error:
            actor.switch_off(error)
    manager.state.stores.admit_all()
    plan: Plan = []
    manager.state.memory.shrink(plan)
    for actor in stores:
        manager.state.stores.trim(actor.state, plan)
    manager.carry_out(plan)


# --- memory ---


async def _adopt(manager: Manager, tier: TierActor, adopted: Adopted) -> None:
    started = time.monotonic()
    arena, table = manager.add_arena(adopted.arena), adopted.arena.table
    is_block = adopted.found.are_committed
    used = set(np.unique(adopted.found.records["namespace"][is_block]).tolist())
    spaces = {
        number: manager.restore_namespace(number, info, arena)
        for number, info in adopted.namespaces.items()
        if number in used
    }
    for number in adopted.namespaces.keys() - used:
        await tier.forget_namespace(adopted.arena, number)
    found = read_table(adopted.found, table.layout.block_size * table.row_bytes, spaces)
    planted = await anyio.to_thread.run_sync(plant, found.forest, MEMORY)
    kept = adopted.found.pages[planted]
    for space in spaces.values():
        space.num_pages = space.tree.num_blocks
    arena.pool.restore(adopted.found.pages, kept, list(found.quarantined.values()))
    # The table says what they are before anybody gets one of them.
    table.free(np.flatnonzero(arena.pool.states == PageState.FREE))
    for session, pages in found.quarantined.items():
        table.quarantine(pages, session)
        manager.quarantine(arena, session, pages)
    checksums = table.checksums(kept)
    arena.unverified.update(kept[checksums != 0].tolist())
    manager.unsummed.append((arena.id, kept[checksums == 0]))
    manager.state.counters["blocks_adopted"] += len(kept)
    manager.state.counters["blocks_rootless"] += int(is_block.sum()) - len(kept)
    logger.info(
        "path=%s: %d blocks adopted, %d pages in doubt, in %.2f s",
        adopted.arena.path,
        len(kept),
        sum(map(len, found.quarantined.values())),
        time.monotonic() - started,
    )


# --- stores ---


async def _recover(manager: Manager, actor: StoreActor, store: Store) -> None:
    started = time.monotonic()
    records, infos = await _read(actor, store)
    parents = {about[:KEY_BYTES] for _, about in records}
    spaces: dict[bytes, Namespace] = {}
    all_known = len(infos) > 0 or not records
    for key in infos.keys() & parents:
        try:
            spaces[key] = await manager.known_namespace(infos[key])
        except KvdError as error:
            all_known = False
            logger.warning(
                "reason=not_recovered namespace=%s is left out: %s",
                infos[key].identity.model,
                error,
            )
    forest = read_store(records, spaces)
    planted = await anyio.to_thread.run_sync(plant, forest, actor.state.tier)
    lost = [key for (key, _), is_there in zip(records, planted, strict=True) if not is_there]
    idle = [key for key in infos.keys() - parents if manager.state.find_namespace(key) is None]
    actor.forget_namespaces(store.layout, idle)
    if all_known:
        actor.forget(store.layout, lost)
    else:  # the next start may know more of them; until then they take their room
        actor.state.unknown_bytes[store.layout] = len(lost) * store.record_bytes
    manager.state.counters["blocks_recovered"] += len(records) - len(lost)
    manager.state.counters["blocks_rootless"] += len(lost)
    seconds = time.monotonic() - started
    logger.info(
        "tier=%s: %d blocks recovered, %d without a root, in %.2f s",
        actor.name,
        len(records) - len(lost),
        len(lost),
        seconds,
    )


async def _read(
    actor: StoreActor, store: Store
) -> tuple[list[tuple[BlockKey, bytes]], dict[bytes, NamespaceInfo]]:
    """All that a store has, tried some times; raises TierFailed."""
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            still = actor.hang_seconds
            records = await actor.read(_scanned, store, actor.moved, still_seconds=still)
            return records, await actor.read(_namespaces, store, still_seconds=still)
        except TierFailed:
            if attempt == NUM_ATTEMPTS:
                raise
            await anyio.sleep(PAUSE_SECONDS)
    raise AssertionError


def _scanned(store: Store, moved: Callable[[], None]) -> list[tuple[BlockKey, bytes]]:
    records: list[tuple[BlockKey, bytes]] = []
    for batch in store.scan():
        moved()
        records += batch
    return records


def _namespaces(store: Store) -> dict[bytes, NamespaceInfo]:
    """What is known of the namespaces in a store, by their keys; what cannot be read is not."""
    infos = {}
    for name, value in store.notes().items():
        if name.startswith(NAMESPACE_NOTE):
            try:
                info = msgspec.msgpack.decode(value, type=NamespaceInfo)
            except msgspec.MsgspecError as error:
                logger.warning("reason=not_recovered a namespace's note: %s", error)
                continue
            infos[info.key] = info
    return infos
