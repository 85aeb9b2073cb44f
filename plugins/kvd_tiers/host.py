"""The host tier: pages in shared host memory."""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from kvd.arena.about import VERSION, About, read_about, write_about
from kvd.arena.files import boot_id, find_file
from kvd.arena.header import header_identity
from kvd.arena.host import (
    HostArena,
    default_capacity,
    file_system_bytes,
    huge_page_bytes,
)
from kvd.arena.owner import OwnerLock, private_directory
from kvd.arena.page_table import FoundRecords, PageTableFile, record_bytes, table_bytes
from kvd.arena.runs import runs_of
from kvd.protocol.errors import ConfigError, TierFailed
from kvd.protocol.layout import MAX_GROUP_PAGES
from kvd.protocol.units import ByteSize, format_bytes
from kvd.tiers.base import Adopted, MemoryTier, TierArena, num_pages_within

if TYPE_CHECKING:
    from kvd.arena.base import Arena
    from kvd.arena.runs import Pages
    from kvd.protocol.keys import NamespaceInfo
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run

logger = logging.getLogger(__name__)

LEAST_CAPACITY = 64 << 10
SMALL_BYTES = 1 << 30
SUFFIXES = (".arena", ".pages", ".about", ".shelf")
# Other people's files may have such suffixes, too.
OURS = re.compile(r"[0-9a-f]{16}-\d+\.(arena|pages|about|shelf)(\.new)?")


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults: a quarter of the file system, at most 4 GiB, in the daemon's directory."""

    capacity_bytes: ByteSize = ByteSize(0)
    directory: str = ""


class HostTierArena(TierArena):
    """Three files: the pages, their table, and what both are."""

    def __init__(self, path: Path, about: About, arena: HostArena, records: PageTableFile) -> None:
        self.path = path
        self.layout = about.layout
        self.row_bytes = about.row_bytes
        self.num_pages = about.num_pages
        self.extent_pages = about.extent_pages
        self.table = records.table
        self._about = about
        self._arena = arena
        self._records = records

    @property
    def backed_bytes(self) -> int:
        return self._arena.backed_bytes

    @property
    def memory(self) -> Arena:
        return self._arena.memory

    def back(self, run: Run) -> None:
        try:
            self._records.back(run)
            self._arena.back(run)
        except OSError as error:
            self.unback(run)
            size = format_bytes(run.count * self.layout.page_bytes)
            raise TierFailed(f"{size} more for {self.path}: {error.strerror}") from error

    def unback(self, run: Run) -> None:
        try:
            self._arena.unback(run)
            self._records.unback(run)
        except OSError as error:
            raise TierFailed(f"memory of {self.path} cannot be taken back: {error}") from error

    def note_namespace(self, number: int, info: NamespaceInfo) -> None:
        about = replace(self._about, namespaces={**self._about.namespaces, number: info})
        try:
            write_about(_about_path(self.path), about)
        except OSError as error:
            raise TierFailed(f"no note beside {self.path}: {error.strerror}") from error
        self._about = about

    def forget_namespace(self, number: int) -> None:
        others = {one: info for one, info in self._about.namespaces.items() if one != number}
        self._about = replace(self._about, namespaces=others)

    def copy_out(self, pages: Pages, out: memoryview) -> None:
        self.memory.copy_out(pages, out)

    def copy_in(self, pages: Pages, data: memoryview) -> None:
        self.memory.copy_in(pages, data)

    def close(self) -> None:
        self._arena.close()
        self._records.close()


class HostTier(MemoryTier):
    """Arenas as files on a tmpfs, by default beside the daemon's other files."""

    Config = HostConfig
    survives = True
    name = "host"
    directory: Path

    def __init__(self, config: HostConfig, directory: Path) -> None:
        self.directory = Path(config.directory or directory)
        self._header = directory / "header"
        if not self.directory.is_absolute():
            raise ConfigError(f"tiers, type host: directory {config.directory!r} is not absolute")
        size = file_system_bytes(self.directory)
        self.capacity_bytes = config.capacity_bytes or default_capacity(size)
        if 0 < config.capacity_bytes < LEAST_CAPACITY:
            raise ConfigError(
                f"tiers, type host: a capacity of {format_bytes(config.capacity_bytes)} has room "
                f"for nothing: set capacity_bytes to {format_bytes(LEAST_CAPACITY)} at least"
            )
        if self.capacity_bytes > size:
            raise ConfigError(
                f"tiers, type host: a capacity of {format_bytes(self.capacity_bytes)} does not fit "
                f"into {self.directory}, whose file system has {format_bytes(size)}: "
                "lower capacity_bytes or enlarge the file system (/dev/shm of a container: "
                "--shm-size)"
            )
        self._is_small = not config.capacity_bytes and size < SMALL_BYTES
        self._arenas: list[TierArena] = []
        self._num_made = 0
        self._epoch = 0
        self._lock: OwnerLock | None = None

    def open(self, epoch: int) -> None:
        private_directory(self.directory)
        self._lock = OwnerLock(self.directory / "host.lock", f"the memory in {self.directory}")
        self._epoch = epoch
        self._granule = huge_page_bytes(self.directory)
        if self._is_small:
            logger.warning(
                "reason=small path=%s gives only %s: enlarge its file system (containers: "
                "--shm-size) or set capacity_bytes",
                self.directory,
                format_bytes(self.capacity_bytes),
            )

    def adopt(self) -> list[Adopted]:
        adopted = []
        arenas = (path for path in self.directory.glob("*.arena") if OURS.fullmatch(path.name))
        for path in sorted(arenas):
            try:
                adopted.append(_adopt(path, self._epoch, header_identity(self._header)))
                self._tell_if_short(adopted[-1].arena)
            except (OSError, TierFailed) as error:
                logger.warning("reason=not_adopted path=%s is removed: %s", path, error)
        self._arenas = [each.arena for each in adopted]
        kept = {arena.path.stem for arena in self._arenas}
        for path in self.directory.iterdir():
            if OURS.fullmatch(path.name) and path.stem not in kept and path.is_file():
                path.unlink()
        return adopted

    def _tell_if_short(self, arena: TierArena) -> None:
        """An arena keeps its length; tell of one where the capacity has room for an extent more."""
        layout = arena.layout
        page_bytes = layout.page_bytes + record_bytes(layout, arena.row_bytes)
        if (arena.num_pages + arena.extent_pages) * page_bytes <= self.capacity_bytes:
            logger.warning(
                "reason=arena_short path=%s was made for a smaller capacity: its layout has %s of "
                "%s at most; for more, stop kvd, remove that file and start kvd: blocks on disk "
                "come back",
                arena.path,
                format_bytes(arena.num_pages * page_bytes),
                format_bytes(self.capacity_bytes),
            )

    def create_arena(self, layout: Layout, row_bytes: int) -> HostTierArena:
        extent_pages = layout.extent_pages(self._granule, MAX_GROUP_PAGES)
        num_pages = num_pages_within(self.capacity_bytes, layout, row_bytes, extent_pages)
        self._num_made += 1
        path = self.directory / f"{self._epoch:016x}-{self._num_made}.arena"
        header = header_identity(self._header)
        about = About(VERSION, boot_id(), layout, row_bytes, num_pages, extent_pages, header)
        arena = _create(path, about, self._epoch)
        self._arenas.append(arena)
        return arena

    def remove_arena(self, arena: TierArena) -> None:
        arena.close()
        _unlink(arena.path)
        self._arenas = [other for other in self._arenas if other is not arena]

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
        if self._lock:
            self._lock.close()


def _create(path: Path, about: About, epoch: int) -> HostTierArena:
    layout, row_bytes, num_pages = about.layout, about.row_bytes, about.num_pages
    with ExitStack() as undo:
        try:
            arena = undo.enter_context(closing(HostArena(path, layout, num_pages)))
            undo.callback(_unlink, path)
            records = PageTableFile(_table_path(path), layout, row_bytes, num_pages)
            undo.enter_context(closing(records))
            records.table.begin(epoch, about.extent_pages)
            write_about(_about_path(path), about)
        except OSError as error:
            raise TierFailed(f"{path} and its page table cannot be made: {error}") from error
        undo.pop_all()
    return HostTierArena(path, about, arena, records)


def _adopt(path: Path, epoch: int, header: bytes) -> Adopted:
    """Raises OSError, and TierFailed where its files do not say the same."""
    about = read_about(_about_path(path))
    if about.boot != boot_id():
        raise TierFailed("it was made before the machine started")
    if about.header != header:
        raise TierFailed("its clients know its leases by another directory's header")
    layout, row_bytes, num_pages = about.layout, about.row_bytes, about.num_pages
    with ExitStack() as undo:
        fd = find_file(path, num_pages * layout.page_bytes)
        arena = undo.enter_context(closing(HostArena(path, layout, num_pages, fd)))
        fd = find_file(_table_path(path), table_bytes(layout, row_bytes, num_pages))
        records = PageTableFile(_table_path(path), layout, row_bytes, num_pages, fd)
        undo.enter_context(closing(records))
        if not records.table.has_begun(about.extent_pages):
            raise TierFailed("its page table is another's")
        pages, found = records.read(about.extent_pages)
        _unback_others(arena, records, pages)
        records.table.begin_epoch(epoch)
        undo.pop_all()
    read = FoundRecords(pages, found, records.table.sealed(found))
    return Adopted(HostTierArena(path, about, arena, records), about.namespaces, read)


def _unback_others(arena: HostArena, records: PageTableFile, pages: Pages) -> None:
    """Take the memory of all other pages back: it was on its way to them, or away from them."""
    others = np.ones(arena.num_pages, np.bool_)
    others[pages] = False
    expected = len(pages) * arena.layout.page_bytes
    for run in runs_of(others.nonzero()[0]):
        records.unback(run)
        # Mostly there is none to take, and to try takes a call for each layer and plane.
        if arena.backed_bytes > expected:
            arena.unback(run)
    if arena.backed_bytes < expected:
        raise TierFailed(f"{arena.backed_bytes} bytes are left of the {expected} that it had")


def _table_path(path: Path) -> Path:
    return path.with_suffix(".pages")


def _about_path(path: Path) -> Path:
    return path.with_suffix(".about")


def _unlink(path: Path) -> None:
    for suffix in SUFFIXES:
        path.with_suffix(suffix).unlink(missing_ok=True)
