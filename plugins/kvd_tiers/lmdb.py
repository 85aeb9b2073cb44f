"""The LMDB tier: blocks on disk, one environment per layout."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvd.arena.files import boot_id, existing, sync_directory
from kvd.arena.host import file_system_bytes
from kvd.arena.owner import OwnerLock, private_directory
from kvd.protocol.errors import ConfigError, TierFailed
from kvd.protocol.units import ByteSize, format_bytes
from kvd.tiers.base import StoreTier
from kvd_tiers.lmdb_check import damage
from kvd_tiers.lmdb_files import (
    DATA,
    DESCRIPTION,
    NEW_BYTES,
    SMALL_FILES_BYTES,
    SPARE_SHARE,
    Damaged,
    Description,
    Mark,
    Volume,
    disk_bytes,
    environments,
    free_bytes,
    read_description,
    read_mark,
    set_aside,
    usable_of,
    volume_error,
)
from kvd_tiers.lmdb_store import LmdbStore, make_environment

if TYPE_CHECKING:
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Store

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY = 8 << 30
LEAST_CAPACITY = 4 << 20


class LmdbConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults: a quarter of what the volume has free, but a 64th of its size at least, and at
    most 8 GiB, in the data directory.

    `free_floor_bytes` of the volume are left to others. `nosync`: transactions are not synced, and
    a power loss empties the tier. `writemap`: write through the map where the file system allows.
    """

    capacity_bytes: ByteSize = ByteSize(0)
    directory: str = ""
    free_floor_bytes: ByteSize = ByteSize(1 << 30)
    nosync: bool = False
    writemap: bool = True


class LmdbTier(StoreTier):
    """Environments in one directory, within one capacity, which its files never exceed."""

    Config = LmdbConfig
    survives = True
    name = "lmdb"
    directory: Path

    def __init__(self, config: LmdbConfig, directory: Path) -> None:
        self.directory = Path(config.directory or directory / "lmdb")
        if not self.directory.is_absolute():
            raise ConfigError(f"tiers, type lmdb: directory {config.directory!r} is not absolute")
        self.capacity_bytes = config.capacity_bytes or _default_capacity(self.directory)
        self._check_capacity()
        self._config = config
        self._stores: list[LmdbStore] = []
        self._lock: OwnerLock | None = None

    def _check_capacity(self) -> None:
        size = file_system_bytes(self.directory)
        if not LEAST_CAPACITY <= self.capacity_bytes <= size:
            raise ConfigError(
                f"tiers, type lmdb: a capacity of {format_bytes(self.capacity_bytes)} cannot be "
                f"used: it may be from {format_bytes(LEAST_CAPACITY)} to what the volume of "
                f"{self.directory} has, {format_bytes(size)}; set capacity_bytes or directory"
            )

    def open(self, epoch: int) -> None:
        private_directory(self.directory, 0o700)
        self._lock = OwnerLock(self.directory / "lmdb.lock", f"the data in {self.directory}")
        self._volume = Volume(self.directory, self.capacity_bytes, self._config.free_floor_bytes)
        try:
            for folder in sorted(environments(self.directory), key=_last_written, reverse=True):
                self.moved()
                self._adopt(folder)
            self.moved()
            self._volume.changed()
            self._shrink()
        except OSError as error:
            raise volume_error(error, f"{self.directory} cannot be used") from error

    def close(self) -> None:
        for store in self._stores:
            try:
                store.close()
            except TierFailed as error:  # it is looked through at the next start
                logger.error(
                    "reason=not_closed path=%s was not left whole: %s", store.folder, error
                )
        self._stores = []
        if self._lock:
            self._volume.close()
            self._lock.close()
            self._lock = None

    @property
    def usable_bytes(self) -> int:
        kept = self.capacity_bytes // SPARE_SHARE + NEW_BYTES + SMALL_FILES_BYTES
        return usable_of(self.capacity_bytes - kept, max(len(self._stores), 1))

    def stores(self) -> list[Store]:
        return list(self._stores)

    def create_store(self, layout: Layout, data_bytes: int) -> LmdbStore:
        folder = self.directory / _folder_name(layout)
        description = make_environment(folder, layout, data_bytes, self._volume)
        store = self._open_store(folder, description)
        self._stores.append(store)
        return store

    def remove_store(self, store: Store) -> None:
        assert isinstance(store, LmdbStore)
        self._stores.remove(store)
        store.remove()
        sync_directory(self.directory)

    def crowding(self, store: Store) -> LmdbStore | None:
        """The largest other one, where files that never shrink have what is due to this one."""
        assert isinstance(store, LmdbStore)
        others = [other for other in self._stores if other is not store]
        if not (others and self._volume.is_crowded(store.folder)):
            return None
        return max(others, key=lambda other: other.used_bytes)

    def _open_store(self, folder: Path, description: Description) -> LmdbStore:
        return LmdbStore(
            folder,
            description,
            self._volume,
            sync=not self._config.nosync,
            writemap=self._config.writemap,
        )

    # --- what an earlier epoch left ---

    def _adopt(self, folder: Path) -> None:
        """Open what can be trusted; remove what is of no use, set aside what is damaged."""
        if not (folder / DESCRIPTION).exists():
            shutil.rmtree(folder)  # its making was cut short
            return
        try:
            description, mark = read_description(folder), read_mark(folder)
            if not (folder / DATA).is_file():
                raise Damaged(f"its {DATA} is no file")
            if _lost_power(mark):
                logger.warning(
                    "reason=power_lost path=%s is emptied: the machine ended and it was not synced",
                    folder,
                )
                shutil.rmtree(folder)
                return
            if not mark.clean and (why := damage(folder, self.moved)):
                raise Damaged(why)
            store = self._open_store(folder, description)
            if not mark.clean:
                self.moved()
                store.sync()  # whoever wrote it may not have
            self._stores.append(store)
        except Damaged as error:
            set_aside(folder, str(error))

    def _shrink(self) -> None:
        """Under a capacity that was larger, what was written least recently goes first."""
        self._volume.make_room()
        while self._stores and self._volume.size_of(self.directory) > self.capacity_bytes:
            logger.warning(
                "reason=capacity_lowered path=%s is removed: the capacity was larger",
                self._stores[-1].folder,
            )
            self.remove_store(self._stores[-1])


def _lost_power(mark: Mark) -> bool:
    return not mark.clean and not mark.synced and mark.boot != boot_id().hex()


def _last_written(folder: Path) -> float:
    """To be asked before it is opened, which counts as a write."""
    data = folder / DATA
    return data.stat().st_mtime if data.exists() else 0.0


def _folder_name(layout: Layout) -> str:
    return f"layout-{hashlib.sha256(msgspec.json.encode(layout)).hexdigest()[:16]}"


def _default_capacity(directory: Path) -> int:
    """By what was free at the first start: what the tier has since then taken counts as free.

    Of a volume that is full it is a little, to be had when there is room again.
    """
    free = free_bytes(existing(directory)) + disk_bytes(directory)
    return min(max(free // 4, file_system_bytes(directory) // 64), DEFAULT_CAPACITY)
