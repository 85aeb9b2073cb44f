"""Tier, the contract of a plugin: blocking and batch-wise; its actor owns the threads.

There are two kinds. A memory tier has arenas, whose pages clients map and attend over. A store
tier keeps copies of blocks as records by key; so does a memory tier behind the first (`Shelf`).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from kvd.arena.owner import check_private
from kvd.arena.page_table import record_bytes
from kvd.config import choosing
from kvd.protocol.codec import TOKEN_BYTES
from kvd.protocol.errors import BadRequest
from kvd.protocol.messages import EXTRA_BYTES
from kvd.protocol.units import format_bytes

if TYPE_CHECKING:
    import msgspec

    from kvd.arena.base import Arena
    from kvd.arena.device import DeviceArena
    from kvd.arena.page_table import FoundRecords, PageTable
    from kvd.arena.runs import Pages
    from kvd.protocol.keys import BlockKey, NamespaceInfo
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import DeviceMemory, Run

# What the rows of a block have at most, a token: its id and a digest of what lies beside it.
MAX_ROW_BYTES = TOKEN_BYTES + EXTRA_BYTES
# What is kept of a page may be this large beside it.
MAX_RECORD_FRACTION = 0.5

# Told of each record that is found: its place among the keys that were asked for, and its data,
# which are good until it returns.
Deliver: TypeAlias = Callable[[int, memoryview], None]


class Tier(ABC):
    """What every tier has. `survives`: what it holds is there when the daemon starts again.

    `directory` is what it has for itself, if it has one: no other of its kind may have the same.
    """

    Config: ClassVar[type[msgspec.Struct]]

    name: str
    survives: bool
    capacity_bytes: int
    directory: Path | None = None

    @abstractmethod
    def __init__(self, config: Any, directory: Path) -> None:
        """`config` is this class's own Config, made from its section of the configuration.

        `directory` is the daemon's: for a memory tier on shared memory, for a store tier where data
        outlive the machine's memory. Raises ConfigError where the configuration cannot be used.
        Touches nothing yet.
        """

    def check(self) -> None:
        """Refuse what this machine cannot give; before `open`, or without it (ConfigError).

        It changes nothing.
        """
        if self.directory is not None:
            with choosing("directory"):
                check_private(self.directory)

    @abstractmethod
    def open(self, epoch: int) -> None:
        """Make ready. Raises AlreadyRunning, TierFailed, ConfigError for a place that cannot be."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; what survives stays where it is. Idempotent."""


# --- memory ---


class TierArena(ABC):
    """The memory of one layout in a memory tier, with its page table.

    Its namespaces have rows of `row_bytes` a token. `back`, `unback`, `note_namespace`,
    `forget_namespace` and `close` are called from one thread at a time and never on the event loop,
    copies from several at once; those may raise TierFailed. The table is written by the event loop
    alone; where the tier is in a lower place (`Shelf`), by the thread that writes there.

    Where it survives, what is kept beside `path` in a file with the suffix `.shelf` goes with it.
    """

    path: Path
    layout: Layout
    row_bytes: int
    num_pages: int
    extent_pages: int
    table: PageTable
    # By what clients import the pages, where these are not the file at `path`.
    device: DeviceMemory | None = None

    @property
    @abstractmethod
    def backed_bytes(self) -> int:
        """Bytes of memory that the pages really have."""

    @property
    @abstractmethod
    def memory(self) -> Arena | DeviceArena:
        """The pages as the daemon itself reaches them; which may be touched, leases say."""

    @abstractmethod
    def note_namespace(self, number: int, info: NamespaceInfo) -> None:
        """Keep what a number in the table's records stands for, before the first has it.

        Raises TierFailed.
        """

    @abstractmethod
    def forget_namespace(self, number: int) -> None:
        """No record has this number any more."""

    @abstractmethod
    def back(self, run: Run) -> None:
        """Give memory to whole extents; raises TierFailed, all undone, if it is not there."""

    @abstractmethod
    def unback(self, run: Run) -> None:
        """Take the memory of whole extents back; nobody holds these pages."""

    @abstractmethod
    def copy_out(self, pages: Pages, out: memoryview) -> None:
        """Copy pages into `out`, one after the other, each as its layout has a block in bytes.

        What is read of a page that is written meanwhile is of no use; the caller finds out.
        """

    @abstractmethod
    def copy_in(self, pages: Pages, data: memoryview) -> None:
        """Copy what `copy_out` gave into pages that the caller reserved."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; what survives stays. Who still maps the arena keeps its memory."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """An arena that an earlier epoch left, with what its page table said when it was opened."""

    arena: TierArena
    namespaces: dict[int, NamespaceInfo]
    found: FoundRecords


class MemoryTier(Tier):
    """A tier whose pages clients map: one arena per layout and row width, within one capacity."""

    @abstractmethod
    def adopt(self) -> list[Adopted]:
        """The arenas that an earlier epoch of this boot left whole; everything else is removed.

        Called once, after `open`. Their pages keep their memory and their records.
        """

    @abstractmethod
    def create_arena(self, layout: Layout, row_bytes: int) -> TierArena:
        """An arena whose length allows the whole capacity, without memory yet.

        Where memory cannot come by extents, an arena has its share of the capacity from the start,
        and TierFailed is raised where there is none. Raises BadRequest for a layout of which not
        even one extent fits into the capacity, or whose pages are so small that their table would
        take much of it.
        """

    @abstractmethod
    def remove_arena(self, arena: TierArena) -> None:
        """Close one arena, of which nobody holds a page, and forget it for good."""


def num_pages_within(capacity_bytes: int, layout: Layout, row_bytes: int, extent_pages: int) -> int:
    """How many pages there is room for, with their table, by whole extents.

    Raises BadRequest where `create_arena` does.
    """
    kept_bytes = record_bytes(layout, row_bytes)
    if kept_bytes > layout.page_bytes * MAX_RECORD_FRACTION:
        raise BadRequest(
            f"a page of this layout has {layout.page_bytes} bytes, and {kept_bytes} are kept to "
            "know of it: raise block_size"
        )
    extent_bytes = extent_pages * (layout.page_bytes + kept_bytes)
    if extent_bytes > capacity_bytes:
        raise BadRequest(
            f"an extent of this layout takes {format_bytes(extent_bytes)} of the memory tier, "
            f"where {format_bytes(capacity_bytes)} are for it: raise its capacity_bytes"
        )
    return capacity_bytes // extent_bytes * extent_pages


# --- stores ---


def most_about_bytes(layout: Layout) -> int:
    """What a record's `about` has at most: the block's rows, and 256 bytes beside them."""
    return layout.block_size * MAX_ROW_BYTES + 256


@dataclass(frozen=True, slots=True)
class Record:
    """What a store keeps of a block: its data, all of one size in a store, and what it is.

    The store gives both back as they are and looks into neither.
    """

    key: BlockKey
    about: bytes
    data: memoryview


class Store(ABC):
    """The records of one layout in a store tier; their data have `data_bytes` each.

    `write`, `delete`, `sync`, `write_note` and `delete_notes` are called from one thread at a time,
    which is one for all stores of a tier; `read` from several, also while one of those goes on.
    Every method but `used_bytes` may raise TierFailed.
    """

    layout: Layout
    data_bytes: int
    # What a record takes of the tier's capacity, everything included.
    record_bytes: int

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Of the tier's capacity: what is really taken where the records are kept."""

    @property
    def most_bytes(self) -> int:
        """What its records may take at most as things are: what it has, and what it would get.

        Above the tier's usable bytes where nothing but those limits it.
        """
        return sys.maxsize

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Keep these records, all of them or none; one whose key is there takes its place.

        When it returns, they are read and survive the daemon; a power loss only after `sync`. A
        kill meanwhile may leave some of them, each whole. Raises TierFull where there is no room:
        delete some.
        """

    @abstractmethod
    def read(self, keys: Sequence[BlockKey], deliver: Deliver) -> None:
        """Deliver the data of those keys that are there, in any order."""

    @abstractmethod
    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget records; a key that is not there is none of them."""

    @abstractmethod
    def scan(self) -> Iterator[Sequence[tuple[BlockKey, bytes]]]:
        """Every record's key and what it is, in batches and in any order, at the daemon's start."""

    @abstractmethod
    def write_note(self, name: bytes, value: bytes) -> None:
        """Keep a short value of the daemon's own beside the records."""

    @abstractmethod
    def delete_notes(self, names: Sequence[bytes]) -> None:
        """Forget notes; a name that is not there is none of them."""

    @abstractmethod
    def notes(self) -> dict[bytes, bytes]:
        """All notes."""

    @abstractmethod
    def sync(self) -> None:
        """When it returns, all that was written and deleted before survives a power loss.

        Memory keeps nothing then, and has nothing to do here.
        """


class StoreTier(Tier):
    """A tier that keeps records of blocks: one store per layout, all within one capacity.

    `capacity_bytes` is a cap that what is kept never exceeds; `usable_bytes` of it may be taken by
    records, the rest is headroom. `open` finds what an earlier epoch left and trusts only what is
    whole; where that takes long it calls `moved` again and again, or is taken for one that hangs.
    """

    # Set by whoever opens the tier and waits for it.
    moved: Callable[[], None] = staticmethod(lambda: None)

    @property
    @abstractmethod
    def usable_bytes(self) -> int:
        """What all records together may take."""

    @abstractmethod
    def stores(self) -> list[Store]:
        """Those that are open: after `open`, of each layout that an earlier epoch left."""

    @abstractmethod
    def create_store(self, layout: Layout, data_bytes: int) -> Store:
        """A store without records, of a layout that has none.

        Raises BadRequest for a layout of which it cannot keep a block, TierFailed.
        """

    @abstractmethod
    def remove_store(self, store: Store) -> None:
        """Forget a store and all in it, for good."""

    def crowding(self, store: Store) -> Store | None:
        """Another store that has the room of which this one lacks some, and cannot give it back.

        When this one needs it, the other is removed and made anew. None where room moves between
        stores, or is shared fairly.
        """
        return None
