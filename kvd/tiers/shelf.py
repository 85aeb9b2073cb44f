"""Shelf: a memory tier in a lower place, as a store that keeps copies by key.

A page has as much of a record's data as goes into it. The rest stands with the key and the about
in the page's record of the page table, in place of rows; what else that says of blocks, of parents
and of namespaces means nothing here. A record counts when its page is committed, which is noted
when all of it is there: so a kill leaves whole records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from kvd.arena.files import open_ours, replace_file
from kvd.arena.page_table import NO_PARENT, PageState, record_bytes
from kvd.protocol.errors import TierFailed, TierFull
from kvd.protocol.keys import KEY_BYTES, BlockKey
from kvd.protocol.messages import Run
from kvd.protocol.units import format_bytes
from kvd.tiers.base import Record, Store, StoreTier, most_about_bytes
from kvd.tiers.gate import Gate

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Adopted, Deliver, MemoryTier, TierArena

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4  # of an about
NAMESPACE = 1
# One part in so many of the capacity is for extents that several layouts have in use only partly.
HEADROOM_SHARE = 16


class Label(msgspec.Struct, frozen=True):
    """What stands in a file beside an arena that is a store's; without it, the arena is not."""

    data_bytes: int
    notes: dict[bytes, bytes] = {}
    version: Literal[1] = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """The page that has a record, as long as it has: each turn of a page is another place."""

    page: int


class _Slip(NamedTuple):
    """What the page table has of a record; `rest`: of its data, what does not go into the page."""

    key: BlockKey
    about: bytes
    rest: bytes


class ShelfStore(Store):
    """The records of one layout in one arena. Where each lies is also kept in memory."""

    def __init__(self, shelf: Shelf, arena: TierArena, label: Label) -> None:
        self.layout = arena.layout
        self.arena = arena
        self.data_bytes = label.data_bytes
        self._shelf = shelf
        self._label = label
        self._page_bytes = arena.layout.page_bytes
        self._kept_bytes = self._page_bytes + record_bytes(arena.layout, arena.row_bytes)
        # Memory comes by extents: where few of them fit, a part of the capacity is of no use.
        num_extents = shelf.capacity_bytes // (arena.extent_pages * self._kept_bytes)
        num_pages = min(max(num_extents, 1) * arena.extent_pages, arena.num_pages)
        self.record_bytes = max(self._kept_bytes, -(-shelf.usable_bytes // num_pages))
        self._states = np.full(arena.num_pages, PageState.UNBACKED, np.uint8)
        self._places: dict[BlockKey, _Place] = {}
        self._gate = Gate()

    def adopt(self, adopted: Adopted) -> None:
        """Find the records that an earlier epoch left.

        Of two with one key, the second of which a kill kept from taking the place of the first,
        either is good.
        """
        found = adopted.found
        is_record = found.are_committed
        keys = found.records["rows"][is_record, :KEY_BYTES]
        for page, key in zip(found.pages[is_record].tolist(), keys, strict=True):
            self._places[BlockKey(key.tobytes())] = _Place(page)
        self._states[found.pages] = PageState.FREE
        self._states[[place.page for place in self._places.values()]] = PageState.COMMITTED
        self.arena.table.free(np.flatnonzero(self._states == PageState.FREE))

    @property
    def used_bytes(self) -> int:
        return int((self._states != PageState.UNBACKED).sum()) * self._kept_bytes

    # --- records ---

    def write(self, records: Sequence[Record]) -> None:
        if records:
            self._put(self._take(len(records)), records)

    def read(self, keys: Sequence[BlockKey], deliver: Deliver) -> None:
        data = memoryview(bytearray(self.data_bytes))
        for at, key in enumerate(keys):
            if self._copy(key, data):
                deliver(at, data)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._free([place.page for key in keys if (place := self._places.pop(key, None))])
        with suppress(TierFull):  # the capacity was larger at an earlier start, and is still full
            self._shelf.make_room(0)

    def scan(self) -> Iterator[Sequence[tuple[BlockKey, bytes]]]:
        yield [(key, self._slip(place.page).about) for key, place in self._places.items()]

    def _put(self, pages: Pages, records: Sequence[Record]) -> None:
        """Write records to free pages, then forget those whose places they take."""
        for at, record in enumerate(records):
            self.arena.copy_in(pages[at : at + 1], record.data[: self._page_bytes])
        slips = b"".join(self._slip_of(record) for record in records)
        self.arena.table.commit(pages, NO_PARENT, 0, slips, NAMESPACE)
        self._states[pages] = PageState.COMMITTED
        replaced = []
        for page, record in zip(pages.tolist(), records, strict=True):
            if (place := self._places.get(record.key)) is not None:
                replaced.append(place.page)
            self._places[record.key] = _Place(page)
        self._free(replaced)

    def _copy(self, key: BlockKey, data: memoryview) -> bool:
        """Copy a record's data; False where there is none.

        A page may be another record's before it is copied: then this one is gone, or elsewhere.
        """
        with self._gate.reading():
            while (place := self._places.get(key)) is not None:
                self._read(place.page, data)
                if self._places.get(key) is place:
                    return True
        return False

    def _read(self, page: int, data: memoryview) -> None:
        self.arena.copy_out(np.array([page]), data[: self._page_bytes])
        data[self._page_bytes :] = self._slip(page).rest

    def _free(self, pages: list[int]) -> None:
        """Nobody finds these pages any more: they may be written from now on."""
        self.arena.table.free(pages)
        self._states[pages] = PageState.FREE

    # --- what stands in the page table ---

    def _slip_of(self, record: Record) -> bytes:
        length = len(record.about).to_bytes(LENGTH_BYTES, "little")
        slip = record.key + length + record.data[self._page_bytes :] + record.about
        return slip.ljust(self.layout.block_size * self.arena.row_bytes, b"\0")

    def _slip(self, page: int) -> _Slip:
        slip = self.arena.table.records["rows"][page].tobytes()
        start = KEY_BYTES + LENGTH_BYTES
        length = int.from_bytes(slip[KEY_BYTES:start], "little")
        stop = start + self.data_bytes - self._page_bytes
        return _Slip(BlockKey(slip[:KEY_BYTES]), slip[stop : stop + length], slip[start:stop])

    # --- room ---

    def _take(self, num_pages: int) -> Pages:
        """So many free pages; raises TierFull."""
        while len(free := np.flatnonzero(self._states == PageState.FREE)) < num_pages:
            self._grow()
        return free[:num_pages]

    def _grow(self) -> None:
        """Have memory for one extent more. Raises TierFull."""
        unbacked = np.flatnonzero(self._states == PageState.UNBACKED)
        if not len(unbacked):
            raise TierFull(f"no room in {self.arena.path}: all its pages are in use")
        run = Run(int(unbacked[0]), self.arena.extent_pages)
        self._shelf.make_room(run.count * self._kept_bytes, self)
        self.arena.back(run)
        self._states[run.first : run.first + run.count] = PageState.FREE

    def spare(self) -> bool:
        """Give the memory of the least used extent back; False where its records have no place."""
        size = self.arena.extent_pages
        states = self._states.reshape(-1, size)
        if (self._states == PageState.FREE).sum() < size:
            return False
        num_used = (states == PageState.COMMITTED).sum(axis=1)
        num_used[states[:, 0] == PageState.UNBACKED] = size + 1
        run = Run(int(num_used.argmin()) * size, size)
        self._move_out(run)
        pages = np.arange(run.first, run.first + size)
        self._states[pages] = PageState.UNBACKED
        with self._gate.alone():  # who still reads there would give it memory again
            self.arena.table.unback(pages)
            self.arena.unback(run)
        return True

    def _move_out(self, run: Run) -> None:
        pages = np.arange(run.first, run.first + run.count)
        used = pages[self._states[pages] == PageState.COMMITTED]
        free = np.setdiff1d(np.flatnonzero(self._states == PageState.FREE), pages)
        data = memoryview(bytearray(self.data_bytes))
        for at, page in enumerate(used.tolist()):
            slip = self._slip(page)
            self._read(page, data)
            self._put(free[at : at + 1], [Record(slip.key, slip.about, data)])

    # --- notes ---

    def write_note(self, name: bytes, value: bytes) -> None:
        self._keep_notes({**self._label.notes, name: value})

    def delete_notes(self, names: Sequence[bytes]) -> None:
        self._keep_notes({n: value for n, value in self._label.notes.items() if n not in names})

    def _keep_notes(self, notes: dict[bytes, bytes]) -> None:
        label = Label(self.data_bytes, notes)
        self._shelf.write_label(self.arena, label)
        self._label = label

    def notes(self) -> dict[bytes, bytes]:
        return dict(self._label.notes)

    def sync(self) -> None:
        """Memory has no more to give: a power loss empties it."""


class Shelf(StoreTier):
    """A store tier over any memory tier, whose arenas no client maps. It survives where that does.

    The page tables of its arenas are written by the thread that writes to its stores.
    """

    def __init__(self, memory: MemoryTier) -> None:
        self.name = memory.name
        self.survives = memory.survives
        self.capacity_bytes = memory.capacity_bytes
        self._memory = memory
        self._stores: list[ShelfStore] = []

    def open(self, epoch: int) -> None:
        self._memory.open(epoch)
        for adopted in self._memory.adopt():
            try:
                label = _read_label(adopted.arena)
            except (OSError, TierFailed) as error:
                logger.warning(
                    "reason=not_adopted path=%s is removed: %s", adopted.arena.path, error
                )
                self._memory.remove_arena(adopted.arena)
            else:
                store = ShelfStore(self, adopted.arena, label)
                store.adopt(adopted)
                self._stores.append(store)

    def close(self) -> None:
        self._stores = []
        self._memory.close()

    @property
    def usable_bytes(self) -> int:
        return self.capacity_bytes - self.capacity_bytes // HEADROOM_SHARE

    def stores(self) -> list[Store]:
        return list(self._stores)

    def create_store(self, layout: Layout, data_bytes: int) -> ShelfStore:
        """`data_bytes` are those of a page at least."""
        slip_bytes = KEY_BYTES + LENGTH_BYTES + most_about_bytes(layout)
        slip_bytes += data_bytes - layout.page_bytes
        arena = self._memory.create_arena(layout, -(-slip_bytes // layout.block_size))
        label = Label(data_bytes)
        try:
            self.write_label(arena, label)
        except TierFailed:
            self._memory.remove_arena(arena)
            raise
        store = ShelfStore(self, arena, label)
        self._stores.append(store)
        return store

    def remove_store(self, store: Store) -> None:
        assert isinstance(store, ShelfStore)
        self._stores.remove(store)
        self._memory.remove_arena(store.arena)

    def make_room(self, size: int, owner: ShelfStore | None = None) -> None:
        """See that so many bytes may be taken, not from their owner; raises TierFull."""
        while sum(store.used_bytes for store in self._stores) + size > self.capacity_bytes:
            if not any(store.spare() for store in self._stores if store is not owner):
                raise TierFull(
                    f"no room for {format_bytes(size)} in the {format_bytes(self.capacity_bytes)} "
                    f"of tier {self.name} (capacity_bytes)"
                )

    def write_label(self, arena: TierArena, label: Label) -> None:
        """Raises TierFailed. What does not survive needs no label."""
        if self.survives:
            try:
                replace_file(_label_path(arena), msgspec.msgpack.encode(label))
            except OSError as error:
                raise TierFailed(f"no note beside {arena.path}: {error.strerror}") from error


def _read_label(arena: TierArena) -> Label:
    """Raises OSError, and TierFailed for what this version cannot read."""
    path = _label_path(arena)
    with open(open_ours(path), "rb") as file:
        written = file.read()
    try:
        return msgspec.msgpack.decode(written, type=Label)
    except msgspec.MsgspecError as error:
        raise TierFailed(f"{path} cannot be read: {error}") from error


def _label_path(arena: TierArena) -> Path:
    return arena.path.with_suffix(".shelf")
