"""The host tier: pages in shared host memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvd.arena.base import GROUP_PAGES
from kvd.arena.host import HostArena, huge_page_bytes
from kvd.arena.owner import OwnerLock, private_directory
from kvd.arena.page_table import PageTableFile, record_bytes
from kvd.protocol.errors import BadRequest, ConfigError, TierFailed
from kvd.protocol.units import ByteSize, format_bytes
from kvd.tiers.base import Adopted, MemoryTier, TierArena

if TYPE_CHECKING:
    from kvd.arena.base import Arena
    from kvd.arena.runs import Pages
    from kvd.protocol.keys import NamespaceInfo
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY = 4 << 30
SMALL_BYTES = 1 << 30
# What is kept of a page may be this large beside it.
MAX_RECORD_FRACTION = 0.5


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults: a quarter of the file system, at most 4 GiB, in the daemon's directory."""

    capacity_bytes: ByteSize = ByteSize(0)
    directory: str = ""


class HostTierArena(TierArena):
    """One arena file and its page table file."""

    def __init__(
        self, path: Path, layout: Layout, row_bytes: int, num_pages: int, extent_pages: int
    ) -> None:
        self.path = path
        self.layout = layout
        self.row_bytes = row_bytes
        self.num_pages = num_pages
        self.extent_pages = extent_pages
        table_path = path.with_suffix(".pages")
        try:
            self._arena = HostArena(path, layout, num_pages)
        except OSError as error:
            raise TierFailed(f"{path} cannot be made: {error.strerror}") from error
        try:
            self._records = PageTableFile(table_path, layout, num_pages)
        except OSError as error:
            self._arena.close()
            raise TierFailed(f"no memory for the page table {table_path}: {error}") from error
        self.table = self._records.table

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
        pass

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

    def __init__(self, config: HostConfig, directory: Path) -> None:
        self.directory = Path(config.directory or directory)
        if not self.directory.is_absolute():
            raise ConfigError(f"tiers, type host: directory {config.directory!r} is not absolute")
        size = _file_system_bytes(self.directory)
        self.capacity_bytes = config.capacity_bytes or min(size // 4, DEFAULT_CAPACITY)
        if self.capacity_bytes > size:
            raise ConfigError(
                f"tiers, type host: a capacity of {format_bytes(self.capacity_bytes)} does not fit "
                f"into {self.directory}, whose file system has {format_bytes(size)}: "
                "lower capacity_bytes or enlarge the file system (/dev/shm of a container: "
                "--shm-size)"
            )
        self._is_small = not config.capacity_bytes and size < SMALL_BYTES
        self._arenas: list[HostTierArena] = []
        self._num_made = 0
        self._epoch = 0
        self._lock: OwnerLock | None = None

    def open(self, epoch: int) -> None:
        private_directory(self.directory)
        self._lock = OwnerLock(self.directory / "host.lock", f"the memory in {self.directory}")
        self._epoch = epoch
        for left in [*self.directory.glob("*.arena"), *self.directory.glob("*.pages")]:
            left.unlink(missing_ok=True)
        self._granule = huge_page_bytes(self.directory)
        if self._is_small:
            logger.warning(
                "%s gives only %s: enlarge its file system (containers: --shm-size) or set "
                "capacity_bytes",
                self.directory,
                format_bytes(self.capacity_bytes),
            )

    def adopt(self) -> list[Adopted]:
        return []

    def create_arena(self, layout: Layout, row_bytes: int) -> HostTierArena:
        extent_pages = layout.extent_pages(self._granule, GROUP_PAGES)
        if record_bytes(layout) > layout.page_bytes * MAX_RECORD_FRACTION:
            raise BadRequest(
                f"a page of this layout has {layout.page_bytes} bytes, and {record_bytes(layout)} "
                "are kept to know of it: raise block_size"
            )
        page_bytes = layout.page_bytes + record_bytes(layout)
        num_extents = self.capacity_bytes // (extent_pages * page_bytes)
        if num_extents == 0:
            raise BadRequest(
                f"an extent of this layout has {format_bytes(extent_pages * layout.page_bytes)}; "
                f"the host tier has {format_bytes(self.capacity_bytes)}: raise its capacity_bytes"
            )
        num_pages = num_extents * extent_pages
        self._num_made += 1
        path = self.directory / f"{self._epoch:016x}-{self._num_made}.arena"
        arena = HostTierArena(path, layout, row_bytes, num_pages, extent_pages)
        arena.table.begin(self._epoch, bytes(32))
        self._arenas.append(arena)
        return arena

    def remove_arena(self, arena: TierArena) -> None:
        arena.close()
        self._arenas = [other for other in self._arenas if other is not arena]

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
        if self._lock:
            self._lock.close()


def _file_system_bytes(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize
