"""Tier, the contract of a plugin: blocking and batch-wise; its actor owns the threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import msgspec

    from kvd.arena.base import Arena
    from kvd.arena.page_table import PageTable
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run


class TierArena(ABC):
    """The memory of one layout in a memory tier, with its page table.

    `back`, `unback` and `close` are called from one thread at a time and never on the event loop.
    The table is written by the event loop alone.
    """

    path: Path
    layout: Layout
    num_pages: int
    extent_pages: int
    table: PageTable

    @property
    @abstractmethod
    def backed_bytes(self) -> int:
        """Bytes of memory that the pages really have."""

    @property
    @abstractmethod
    def memory(self) -> Arena:
        """The pages in the daemon's own mapping; which of them may be touched, leases say."""

    @abstractmethod
    def back(self, run: Run) -> None:
        """Give memory to whole extents; raises TierFailed, all undone, if it is not there."""

    @abstractmethod
    def unback(self, run: Run) -> None:
        """Take the memory of whole extents back; nobody holds these pages."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Who still maps the arena keeps its memory until it lets go."""


class MemoryTier(ABC):
    """A tier whose pages clients map: one arena per layout, all within one capacity."""

    Config: ClassVar[type[msgspec.Struct]]

    name: str
    capacity_bytes: int

    @abstractmethod
    def __init__(self, config: Any, directory: Path) -> None:
        """`config` is this class's own Config; `directory` is the daemon's, on shared memory.

        Raises ConfigError where the configuration cannot be used. Touches nothing yet.
        """

    @abstractmethod
    def open(self, epoch: int) -> None:
        """Make ready; what an earlier epoch left is removed. Raises AlreadyRunning, TierFailed."""

    @abstractmethod
    def create_arena(self, layout: Layout, fingerprint: bytes) -> TierArena:
        """An arena whose length allows the whole capacity, without memory yet.

        Raises BadRequest for a layout of which not even one extent fits into the capacity, or whose
        pages are so small that their table would take much of it.
        """

    @abstractmethod
    def remove_arena(self, arena: TierArena) -> None:
        """Close one arena, of which nobody holds a page, and forget it."""

    @abstractmethod
    def close(self) -> None:
        """Close every arena and let go of the directory."""
