"""TierActor: one memory tier, its thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from kvd.actors.actor import Actor
from kvd.arena.checksum import block_checksums
from kvd.protocol.errors import KvdError, TierFailed
from kvd.protocol.messages import Run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvd.arena.runs import Pages
    from kvd.protocol.keys import NamespaceInfo
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Adopted, MemoryTier, TierArena

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Memory is given at about 3 GB/s; a call of this size keeps the mailbox busy for 20 ms.
BACKING_STEP_BYTES = 64 << 20


class TierActor(Actor):
    """One tier behind a mailbox."""

    def __init__(self, tier: MemoryTier) -> None:
        super().__init__()
        self.tier = tier

    async def open(self, epoch: int) -> None:
        await self._ask(self.tier.open, epoch)

    async def adopt(self) -> list[Adopted]:
        return await self._ask(self.tier.adopt)

    async def create_arena(self, layout: Layout, row_bytes: int) -> TierArena:
        return await self._ask(self.tier.create_arena, layout, row_bytes)

    async def back(self, arena: TierArena, run: Run) -> None:
        """Give memory to one piece of at most what `backing_pieces` makes; raises TierFailed."""
        await self._ask(arena.back, run)

    async def unback(self, arena: TierArena, run: Run) -> None:
        """Take the memory of whole extents back."""
        await self._ask(arena.unback, run)

    async def checksums(self, arena: TierArena, pages: Pages) -> NDArray[np.uint64]:
        """The checksum of each page as it is now."""
        return await self._ask(block_checksums, arena, pages)

    async def note_namespace(self, arena: TierArena, number: int, info: NamespaceInfo) -> None:
        await self._ask(arena.note_namespace, number, info)

    async def forget_namespace(self, arena: TierArena, number: int) -> None:
        await self._ask(arena.forget_namespace, number)

    async def remove_arena(self, arena: TierArena) -> None:
        """Close an arena that nobody uses."""
        await self._ask(self.tier.remove_arena, arena)

    async def _ask(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        try:
            return await super()._ask(function, *args)
        except KvdError:
            raise
        except Exception as error:
            raise as_failed(self.tier.name, error) from error


def as_failed(tier: str, error: Exception) -> TierFailed:
    """Whatever a plugin raises is its failure, and nobody else's."""
    if isinstance(error, TierFailed):
        return error
    logger.error("reason=internal tier=%s failed", tier, exc_info=error)
    return TierFailed(f"{type(error).__name__}: {error}")


def close_tier(tier: MemoryTier) -> None:
    """Close it, when nothing works on it any more; a failure is told of, and holds up no stop."""
    try:
        tier.close()
    except Exception as error:
        failed = as_failed(tier.name, error)
        logger.error("reason=not_closed tier=%s at the stop: %s", tier.name, failed)


def backing_pieces(arena: TierArena, run: Run) -> list[Run]:
    """A run of extents in pieces, each of them short work for the tier's thread."""
    extents = max(1, BACKING_STEP_BYTES // (arena.extent_pages * arena.layout.page_bytes))
    step = extents * arena.extent_pages
    end = run.first + run.count
    return [Run(first, min(step, end - first)) for first in range(run.first, end, step)]
