"""The torch tier: pages in the memory of a GPU, or of the host where there is none."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvd.arena.device import CPU, DeviceArena, check_capacity, find_device, use_plain_segments
from kvd.arena.owner import OwnerLock, private_directory
from kvd.arena.page_table import PageTable, table_bytes
from kvd.protocol.errors import ConfigError, KvdError, TierFailed
from kvd.protocol.layout import MAX_GROUP_PAGES
from kvd.protocol.units import ByteSize
from kvd.tiers.base import Adopted, MemoryTier, TierArena, num_pages_within

if TYPE_CHECKING:
    from torch import device as Device

    from kvd.arena.runs import Pages
    from kvd.protocol.keys import NamespaceInfo
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run

DEVICE = re.compile(r"cpu|cuda:\d+|(cuda:|GPU-)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class TorchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`device`: "cuda:0", "cuda:<uuid>", "GPU-<uuid>" or "cpu".

    The capacity is divided by `layouts`: memory of a GPU comes whole, and each has an equal share.
    """

    capacity_bytes: ByteSize
    device: str = "cuda:0"
    layouts: int = 1
    directory: str = ""


class TorchTierArena(TierArena):
    """One allocation, and its page table in memory that nobody else sees."""

    def __init__(
        self, path: Path, layout: Layout, row_bytes: int, num_pages: int, device: Device
    ) -> None:
        self.path = path
        self.layout = layout
        self.row_bytes = row_bytes
        self.num_pages = num_pages
        self.extent_pages = MAX_GROUP_PAGES
        self._arena = DeviceArena(path, layout, num_pages, device)
        self.device = self._arena.exported
        table = mmap.mmap(-1, table_bytes(layout, row_bytes, num_pages))
        self.table = PageTable(layout, row_bytes, num_pages, memoryview(table))

    @property
    def backed_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes

    @property
    def memory(self) -> DeviceArena:
        return self._arena

    def back(self, run: Run) -> None:
        pass  # all memory is there from the start

    def unback(self, run: Run) -> None:
        pass

    def note_namespace(self, number: int, info: NamespaceInfo) -> None:
        pass  # nothing survives that it would have to tell of

    def forget_namespace(self, number: int) -> None:
        pass

    def copy_out(self, pages: Pages, out: memoryview) -> None:
        self._arena.copy_out(pages, out)

    def copy_in(self, pages: Pages, data: memoryview) -> None:
        self._arena.copy_in(pages, data)

    def close(self) -> None:
        self._arena.close()


class TorchTier(MemoryTier):
    """Arenas in the memory of one device; they end with the daemon."""

    Config = TorchConfig
    survives = False
    name = "torch"
    directory: Path

    def __init__(self, config: TorchConfig, directory: Path) -> None:
        self.directory = Path(config.directory or directory)
        if not self.directory.is_absolute():
            raise ConfigError(f"tiers, type torch: directory {config.directory!r} is not absolute")
        if not DEVICE.fullmatch(config.device):
            raise ConfigError(
                f"tiers, type torch: device {config.device!r} is none of cpu, cuda:<number>, "
                "cuda:<uuid> and GPU-<uuid>"
            )
        if config.layouts < 1:
            raise ConfigError("tiers, type torch: layouts is less than 1")
        self.capacity_bytes = config.capacity_bytes
        self._device_name = config.device
        self._max_arenas = config.layouts
        self._arenas: list[TorchTierArena] = []
        self._num_made = 0
        self._epoch = 0
        self._lock: OwnerLock | None = None

    def check(self) -> None:
        super().check()
        self._find_device()

    def open(self, epoch: int) -> None:
        private_directory(self.directory)
        self._lock = OwnerLock(self.directory / "torch.lock", f"the memory in {self.directory}")
        self._epoch = epoch
        for left in self.directory.glob("*.device"):
            left.unlink(missing_ok=True)
        self._device = self._find_device()

    def _find_device(self) -> Device:
        """Raises ConfigError where there is none, or it is too small."""
        if self._device_name != CPU:
            use_plain_segments()
        try:
            device = find_device(self._device_name)
            check_capacity(device, self.capacity_bytes)
        except KvdError as error:
            raise ConfigError(str(error)) from error
        return device

    def adopt(self) -> list[Adopted]:
        return []

    def create_arena(self, layout: Layout, row_bytes: int) -> TorchTierArena:
        if len(self._arenas) >= self._max_arenas:
            raise TierFailed(
                f"the torch tier has memory for {self._max_arenas} layouts: raise its layouts"
            )
        share = self.capacity_bytes // self._max_arenas
        num_pages = num_pages_within(share, layout, row_bytes, MAX_GROUP_PAGES)
        self._num_made += 1
        path = self.directory / f"{self._epoch:016x}-{self._num_made}.device"
        arena = TorchTierArena(path, layout, row_bytes, num_pages, self._device)
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
