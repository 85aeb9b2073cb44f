"""Scrubber: compares blocks with their checksums, all of them again and again, or once when asked.

Concurrency: while a piece is read, blocks are evicted, dropped and moved, and nodes split and
merge. So a round goes by the pages and keys that are there when it comes to them, holds none of
them, and of what is wrong only that counts which is there still.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import numpy as np
from msgspec.structs import replace

from kvd.actors.signal import Signal
from kvd.arena.page_table import PageState
from kvd.cache.radix import MEMORY
from kvd.protocol.errors import KvdError
from kvd.protocol.keys import KEY_BYTES
from kvd.protocol.messages import TierCheck
from kvd.tiers import copying
from kvd.tiers.copying import Copy

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from kvd.actors.manager import Manager
    from kvd.actors.mover import Mover
    from kvd.actors.store import StoreActor
    from kvd.arena.runs import Pages
    from kvd.cache.memory import ArenaState, Namespace
    from kvd.cache.radix import Node, Tree
    from kvd.config import CacheConfig, Config
    from kvd.protocol.codec import Tokens
    from kvd.protocol.keys import BlockKey

logger = logging.getLogger(__name__)

# What is looked at at once: a millisecond of the thread that gives memory.
PIECE_BYTES = 8 << 20
# And no more small blocks of a store, which are come by one by one.
PIECE_BLOCKS = 1024
# A small cache is gone round no more often than this.
ROUND_SECONDS = 60.0


@dataclass(slots=True)
class Round:
    """How far a round over all blocks has come, tier by tier. A slow one keeps to `scrub_bytes`."""

    tiers: list[TierCheck]
    is_slow: bool = False
    is_done: bool = False

    def count(self, tier: int, num_checked: int, num_bad: int, num_missing: int = 0) -> None:
        check = self.tiers[tier]
        self.tiers[tier] = replace(
            check,
            num_checked=check.num_checked + num_checked,
            num_bad=check.num_bad + num_bad,
            num_missing=check.num_missing + num_missing,
        )


class Scrubber:
    """Finds damage before anybody asks for the block; what is bad goes with all that follows it."""

    def __init__(
        self, config: CacheConfig, manager: Manager, mover: Mover, stores: Sequence[StoreActor]
    ) -> None:
        self._config = config
        self._configured = Signal()
        self._manager = manager
        self._state = manager.state
        self._mover = mover
        self._stores = stores
        # What was asked for last.
        self._asked = Round([], is_done=True)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """What an earlier epoch left is looked at first and at once: matches wait for it."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            for arena in list(self._state.memory.arenas.values()):
                adopted = np.array(sorted(arena.unverified), np.int64)
                try:
                    await self._check_pages(self._new_round(), arena, adopted)
                except Exception:  # matches verify what they need
                    logger.exception("reason=not_verified blocks of an earlier epoch")
            while True:
                began = anyio.current_time()
                if self._config.scrub_bytes:
                    await self._go_round(self._new_round(is_slow=True))
                await anyio.sleep_until(began + ROUND_SECONDS)

    def configure(self, config: Config) -> None:
        """Go by another configuration, also in a round under way."""
        self._config = config.cache
        self._configured.set()

    def close(self) -> None:
        self._tasks.cancel_scope.cancel()

    def verify(self, *, start: bool) -> Round:
        """How far the last round that was asked for has come; to `start`, begin one if it ended."""
        if start and self._asked.is_done:
            self._asked = self._new_round()
            self._tasks.start_soon(self._go_round, self._asked)
        return self._asked

    def _new_round(self, *, is_slow: bool = False) -> Round:
        tiers = self._manager.tier_status()
        return Round([TierCheck(tier.name, tier.num_blocks) for tier in tiers], is_slow)

    async def _go_round(self, round: Round) -> None:
        for tier in range(len(round.tiers)):
            try:
                if tier == MEMORY:
                    await self._check_memory(round)
                else:
                    await self._check_store(round, self._stores[tier - 1])
            except Exception as error:
                fault = None if isinstance(error, KvdError) else error
                name = round.tiers[tier].name
                logger.warning("reason=not_verified tier=%s %s", name, error, exc_info=fault)
                round.tiers[tier] = replace(round.tiers[tier], trouble=str(error))
        round.is_done = True

    async def _rest(self, round: Round, num_bytes: int) -> None:
        """Of a slow round, keep to `scrub_bytes` a second, as it is now, or wait while it is 0."""
        if not round.is_slow:
            return
        while not self._config.scrub_bytes:
            await self._configured.wait()
        with anyio.move_on_after(num_bytes / self._config.scrub_bytes):
            await self._configured.wait()

    # --- memory ---

    async def _check_memory(self, round: Round) -> None:
        for arena in list(self._state.memory.arenas.values()):
            pages = np.flatnonzero(arena.pool.states == PageState.COMMITTED)
            await self._check_pages(round, arena, pages)

    async def _check_pages(self, round: Round, arena: ArenaState, pages: Pages) -> None:
        page_bytes = arena.layout.page_bytes
        size = max(1, PIECE_BYTES // page_bytes)
        for at in range(0, len(pages), size):
            piece = pages[at : at + size]
            num_checked, num_bad = await self._manager.queue.call(self._mover.verify, arena, piece)
            round.count(MEMORY, num_checked, num_bad)
            await self._rest(round, num_checked * page_bytes)

    # --- stores ---

    async def _check_store(self, round: Round, actor: StoreActor) -> None:
        for space in list(self._state.namespaces.values()):
            if not space.tree.counts[actor.state.tier]:
                continue
            page_bytes = space.arena.layout.page_bytes
            size = min(max(1, PIECE_BYTES // page_bytes), PIECE_BLOCKS)
            blocks = _blocks_in(space, actor.state.tier)
            while piece := list(itertools.islice(blocks, size)):
                if (store := actor.store(space.arena.layout)) is None:
                    break
                copies = await actor.read(copying.check, store, [key for _, key in piece])
                self._judge(round, actor.state.tier, space, piece, copies)
                await self._rest(round, len(piece) * page_bytes)

    def _judge(
        self,
        round: Round,
        tier: int,
        space: Namespace,
        piece: Sequence[tuple[Node, BlockKey]],
        copies: Sequence[Copy],
    ) -> None:
        wrong = [
            (tokens, copy)
            for (node, key), copy in zip(piece, copies, strict=True)
            if copy is not Copy.GOOD and (tokens := _tokens_to(space, tier, node, key))
        ]
        found = Counter(copy for _, copy in wrong)
        round.count(tier, len(piece), found[Copy.BAD], found[Copy.MISSING])
        self._state.counters["blocks_verified"] += len(piece)
        for tokens, copy in wrong:
            self._mover.remove(space, tokens, copy, tier)


def _blocks_in(space: Namespace, tier: int) -> Iterator[tuple[Node, BlockKey]]:
    """The blocks that a tier has, as they are come by."""
    for node in _nodes_of(space.tree):
        if node.is_in(tier):
            for key in node.block_keys():
                yield node, key


def _nodes_of(tree: Tree) -> Iterator[Node]:
    """All nodes, also those that a split puts above others before they are come by."""
    seen = {tree.root}
    for node in tree.nodes():
        at: Node | None = node
        while at is not None and at not in seen:
            seen.add(at)
            above = at.parent  # what comes between them from here on, has been come by
            yield at
            at = above


def _tokens_to(space: Namespace, tier: int, node: Node, key: BlockKey) -> Tokens:
    """The tokens up to a block that was in this node; none where the tier has it no more.

    A split puts it above the node; and one that left the tree still knows where it was.
    """
    place = b"".join(each.keys for each in node.path()).find(key)
    if place < 0:
        return b""
    width = space.tree.block_bytes
    tokens = bytes(node.path_tokens()[: (place // KEY_BYTES + 1) * width])
    found = space.tree.find(tokens, anywhere=True)
    is_there = found.total_blocks * width == len(tokens) and found.node.is_in(tier)
    return tokens if is_there else b""
