"""Memory of a GPU: one allocation per layout, exported once, imported by clients.

With the device "cpu" the same lies in a file in shared memory. Nothing else in kvd imports torch,
and this only who has such a tier, or is a client of one.
"""

from __future__ import annotations

import logging
import queue
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvd.arena.base import check_layers
from kvd.arena.host import HostArena, MappedArena
from kvd.protocol.errors import KvdError, TierFailed
from kvd.protocol.messages import DeviceMemory, Run, Runs
from kvd.protocol.units import format_bytes

if TYPE_CHECKING:
    from kvd.arena.membership import SessionLock
    from kvd.arena.runs import Pages
    from kvd.protocol.layout import Layout

logger = logging.getLogger(__name__)

CPU = "cpu"
# Copies go through buffers of this size, of which each arena has a few: one for each copy at once.
STAGE_BYTES = 16 << 20
NUM_STAGES = 2


class DevicePages:
    """Equal pages of one layout in one tensor: what `Arena` is for memory of the host.

    The tensors are views. `root` is what every one of them holds: while any lives, it does.
    """

    def __init__(self, layout: Layout, num_pages: int, memory: Tensor, root: object) -> None:
        """`memory` are `num_pages * layout.page_bytes` bytes, which hold `root`."""
        self.layout = layout
        self.num_pages = num_pages
        self.root = root
        self._memory = memory

    @property
    def pages(self) -> Tensor:
        """All pages: `[pages, *layout.page_shape]`, whatever the order."""
        if self.layout.is_contiguous:
            return self._typed.view(self.num_pages, *self.layout.page_shape)
        return self.layers.movedim(2, 0)

    @property
    def layers(self) -> Tensor:
        """All pages by layer: `[layers, planes, pages, block_size, heads, head_size]`.

        Raises Unsupported where they do not lie so.
        """
        check_layers(self.layout)
        layers, planes, *block = self.layout.page_shape
        return self._typed.view(layers, planes, self.num_pages, *block)

    @property
    def _typed(self) -> Tensor:
        dtype = torch.uint8 if self.layout.is_opaque else getattr(torch, self.layout.dtype)
        return self._memory.view(dtype)

    def pages_view(self, run: Run) -> Tensor:
        """A run of pages: `[pages, *layout.page_shape]`."""
        return self.pages[self._places(run)]

    def run_view(self, run: Run) -> Tensor:
        """A run of pages: `[layers, planes, tokens, heads, head_size]`.

        Raises Unsupported where the order does not allow it.
        """
        return self.layers[:, :, self._places(run)].flatten(2, 3)

    def rows(self, page: int, num_rows: int) -> Tensor:
        """The first rows of a page, in every layer and plane."""
        return self.pages_view(Run(page, 1))[0, :, :, :num_rows]

    def write_rows(self, page: int, num_rows: int, data: memoryview) -> None:
        """Write what `DeviceArena.rows` gave."""
        _fill(self.rows(page, num_rows), _bytes_of(data).to(self._memory.device))

    def pieces(self, slices: range, runs: Runs) -> list[Tensor]:
        """Some slices of pages, as `Arena.slice_views` has them."""
        num_slices = self.layout.num_slices
        if not 0 <= slices.start <= slices.stop <= num_slices:
            raise IndexError(f"slices {slices.start} to {slices.stop - 1} of {num_slices}")
        places = [self._places(run) for run in runs]
        if self.layout.is_contiguous:
            by_page = self._memory.view(self.num_pages, num_slices, -1)
            lying = [by_page[place, slices.start : slices.stop] for place in places]
        else:
            by_slice = self._memory.view(num_slices, self.num_pages, -1)
            lying = [by_slice[number, place] for number in slices for place in places]
        return [piece for one in lying for piece in ([one] if one.is_contiguous() else one)]

    def _places(self, run: Run) -> slice:
        # torch would cut a run that is too long.
        if not (run.first >= 0 and run.count >= 1 and run.first + run.count <= self.num_pages):
            raise IndexError(f"{run} of {self.num_pages} pages")
        return slice(run.first, run.first + run.count)


class DeviceArena:
    """The daemon's end: the allocation, and copies between it and memory of the host.

    Copies are done when they return, so that whoever is told of a page afterwards finds them there.
    """

    def __init__(self, path: Path, layout: Layout, num_pages: int, device: torch.device) -> None:
        """`path` is where the file lies, with the device "cpu". Raises TierFailed."""
        self.layout = layout
        self.num_pages = num_pages
        self._device = device
        self._file: HostArena | None = None
        size = num_pages * layout.page_bytes
        try:
            if device.type == CPU:
                self._file = HostArena(path, layout, num_pages)
                self._file.back(Run(0, num_pages))
                memory = _tensor_of(self._file.memory.root)
            else:
                memory = torch.empty(size, dtype=torch.uint8, device=device)
            self.exported = export(memory)
            self._copies = _Copies() if device.type == CPU else _StagedCopies(layout, device)
        except (OSError, RuntimeError) as error:
            self.close()
            raise TierFailed(f"no {format_bytes(size)} on {device}: {error}") from error
        self._pages: DevicePages | None = DevicePages(layout, num_pages, memory, memory)

    @property
    def num_unpinned(self) -> int:
        """Buffers for copies that could not be pinned: copies through them are slower."""
        return self._copies.num_unpinned

    @property
    def pages(self) -> DevicePages:
        assert self._pages is not None, "the arena is closed"
        return self._pages

    def copy_out(self, pages: Pages, out: memoryview) -> None:
        """Copy pages into `out`, one after the other, each as `Arena.page_view` has it.

        As every copy, it raises TierFailed where the GPU does.
        """
        for index, piece in self._pieces(pages, out):
            self._copies.to_host(partial(self.pages.pages.index_select, 0, index), piece)

    def copy_in(self, pages: Pages, data: memoryview) -> None:
        """Copy what `copy_out` gave into pages."""
        for index, piece in self._pieces(pages, data):
            self._copies.to_device(piece, partial(self._take, index))

    def slice_views(self, slices: range, runs: Runs) -> Iterator[memoryview]:
        """Copies of what `Arena.slice_views` shows."""
        for piece in self.pages.pieces(slices, runs):
            out = memoryview(bytearray(piece.numel()))
            self._copies.to_host(partial(_itself, piece), _bytes_of(out))
            yield out

    def write_slices(self, slices: range, runs: Runs, data: memoryview) -> None:
        """Write what `slice_views` gave, piece behind piece."""
        start = 0
        for piece in self.pages.pieces(slices, runs):
            stop = start + piece.numel()
            self._copies.to_device(_bytes_of(data[start:stop]), partial(_fill, piece))
            start = stop

    def rows(self, page: int, num_rows: int) -> bytes:
        """The first rows of a page, in every layer and plane."""
        there = self.pages.rows(page, num_rows)
        out = memoryview(bytearray(there.numel() * there.element_size()))
        self._copies.to_host(partial(_itself, there), _bytes_of(out))
        return bytes(out)

    def close(self) -> None:
        """Give the memory back; who imported it keeps it until it lets go. Idempotent.

        It is long work where others had it: never on the event loop.
        """
        self._pages = None
        if self._file is not None:
            self._file.close()
            self._file.path.unlink(missing_ok=True)
        elif self._device.type != CPU:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def _take(self, index: Tensor, data: Tensor) -> None:
        by_page = self.pages.pages
        by_page[index] = data.view(by_page.dtype).view(len(index), *by_page.shape[1:])

    def _pieces(self, pages: Pages, data: memoryview) -> Iterator[tuple[Tensor, Tensor]]:
        """Some pages at a time, as many as a buffer has room for, with their part of `data`."""
        if not len(pages):
            return iter(())
        if pages.min() < 0 or pages.max() >= self.num_pages:
            raise IndexError(f"pages {pages.min()} to {pages.max()} of {self.num_pages}")
        index = torch.tensor(pages, device=self._device)
        size = self.layout.page_bytes
        step = max(1, STAGE_BYTES // size)
        return zip(index.split(step), _bytes_of(data).split(step * size), strict=True)


class _Copies:
    """Copies between the pages and memory of the host, where both are that."""

    num_unpinned = 0

    def to_host(self, read: Callable[[], Tensor], out: Tensor) -> None:
        """Fill `out` with the bytes of what `read` gives."""
        out.copy_(_flat(read()))

    def to_device(self, data: Tensor, take: Callable[[Tensor], object]) -> None:
        """Give the bytes, on the device, to `take`."""
        take(data)


class _StagedCopies(_Copies):
    """Copies to and from a GPU, on streams of their own, through pinned memory of the host."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._device = device
        self._stages: queue.SimpleQueue[tuple[Tensor, torch.cuda.Stream]] = queue.SimpleQueue()
        for _ in range(NUM_STAGES):
            buffer = self._buffer(max(STAGE_BYTES, layout.page_bytes))
            self._stages.put((buffer, torch.cuda.Stream(device)))

    def to_host(self, read: Callable[[], Tensor], out: Tensor) -> None:
        with self._stage() as (buffer, stream):
            staged = buffer[: len(out)]
            with torch.cuda.stream(stream):
                staged.copy_(_flat(read()), non_blocking=True)
            stream.record_event().synchronize()
            out.copy_(staged)

    def to_device(self, data: Tensor, take: Callable[[Tensor], object]) -> None:
        with self._stage() as (buffer, stream):
            staged = buffer[: len(data)]
            staged.copy_(data)
            with torch.cuda.stream(stream):
                take(staged.to(self._device, non_blocking=True))
            stream.record_event().synchronize()

    @contextmanager
    def _stage(self) -> Iterator[tuple[Tensor, torch.cuda.Stream]]:
        stage = self._stages.get()
        try:
            yield stage
        except RuntimeError as error:
            raise TierFailed(f"a copy from or to {self._device} failed: {error}") from error
        finally:
            self._stages.put(stage)

    def _buffer(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # the machine has no more to pin
            logger.warning(
                "reason=unpinned device=%s has no pinned memory for copies, which are slower: %s",
                self._device,
                error,
            )
            self.num_unpinned += 1
            return torch.empty(size, dtype=torch.uint8)


# --- the client's end ---


class MappedDevice:
    """The client's end: the arena's pages as tensors on their device.

    A GPU has no read-only mapping: there, not to write what is matched is the client's discipline.
    """

    def __init__(
        self, memory: DeviceMemory, path: str, layout: Layout, num_pages: int, lock: SessionLock
    ) -> None:
        """Raises OSError or KvdError where this process cannot reach the memory."""
        self.layout = layout
        self.num_pages = num_pages
        self._file: MappedArena | None = None
        if memory.device == CPU:
            self._file = MappedArena(path, layout, num_pages, lock)
            self.device = torch.device(CPU)
        else:
            self.device = find_device(memory.device)
            self._storage = _import(memory, self.device)
            self._lock = lock
        self.readable = self._pages(for_writing=False)

    def writable(self) -> DevicePages:
        """The pages once more, with a root of its own to tell its views by."""
        return self._pages(for_writing=True)

    def settle(self) -> None:
        """Wait until all that this process has begun on the device is done.

        On every stream: whoever lets go of pages need not be who launched the work on them.
        """
        if self.device.type != CPU:
            torch.cuda.synchronize(self.device)

    def _pages(self, *, for_writing: bool) -> DevicePages:
        if self._file is not None:
            arena = self._file.writable() if for_writing else self._file.readable
            return DevicePages(self.layout, self.num_pages, _tensor_of(arena.root), arena.root)
        root = _Imported(self._storage, self._lock)
        return DevicePages(self.layout, self.num_pages, torch.as_tensor(root), root)


class _Imported:
    """What tensors over imported memory hold: the memory, and the lock that makes one a member."""

    def __init__(self, storage: torch.UntypedStorage, lock: SessionLock) -> None:
        self._storage = storage
        self._lock = lock
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 2,
        }


def export(memory: Tensor) -> DeviceMemory:
    """What other processes, any number of them, import the memory by."""
    if memory.device.type == CPU:
        return DeviceMemory(CPU)
    _, *fields = memory.untyped_storage()._share_cuda_()
    exported = DeviceMemory(uuid_of(memory.device), *fields)
    # torch would keep the memory until one importer has come and gone. Leases say who uses it.
    release: Any = torch.UntypedStorage._release_ipc_counter_cuda
    release(exported.counter_handle, exported.counter_offset)
    return exported


def _import(memory: DeviceMemory, device: torch.device) -> torch.UntypedStorage:
    try:
        torch.cuda.init()
        new: Any = torch.UntypedStorage._new_shared_cuda
        storage: torch.UntypedStorage = new(
            device.index,
            memory.handle,
            memory.size_bytes,
            memory.offset_bytes,
            memory.counter_handle,
            memory.counter_offset,
            memory.event_handle,
            memory.event_sync_required,
        )
    except (RuntimeError, TypeError) as error:
        raise KvdError(f"memory of {memory.device} cannot be imported: {error}") from error
    return storage


# --- devices ---


def find_device(name: str) -> torch.device:
    """The device "cpu", "cuda:0", "cuda:<uuid>" or "GPU-<uuid>", as this process counts them.

    Two processes may count differently (CUDA_VISIBLE_DEVICES); a UUID means the same to both.
    Raises KvdError where there is none.
    """
    if name == CPU:
        return torch.device(CPU)
    wanted = name.removeprefix("cuda:")
    count = torch.cuda.device_count()
    for device in (torch.device("cuda", index) for index in range(count)):
        if wanted == str(device.index) or uuid_of(device) == wanted.removeprefix("GPU-"):
            return device
    raise KvdError(
        f"{name} is none of the {count} GPUs that this process sees: name another device, or see "
        "what hides it (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    )


def uuid_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")


def check_capacity(device: torch.device, size: int) -> None:
    """Refuse what a GPU does not have (TierFailed)."""
    if device.type != CPU:
        total = torch.cuda.get_device_properties(device).total_memory
        if size > total:
            raise TierFailed(
                f"a capacity of {format_bytes(size)} does not fit onto {device}, which has "
                f"{format_bytes(total)}: lower capacity_bytes"
            )


def use_plain_segments() -> None:
    """Have torch allocate what CUDA IPC can export; before the first CUDA call.

    Expandable segments are exported by file descriptors, which containers forbid.
    """
    private: Any = torch._C
    setting = getattr(private, "_accelerator_setAllocatorSettings", None)
    if setting is None:  # older than 2.9
        setting = private._cuda_cudaCachingAllocator_set_allocator_settings
    setting("expandable_segments:False")


def _tensor_of(root: np.ndarray[Any, Any]) -> Tensor:
    """The bytes of an array, which they hold."""
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so: a write to this one would fault.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(root.view(np.uint8))


def _bytes_of(data: memoryview) -> Tensor:
    return _tensor_of(np.frombuffer(data, np.uint8))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _fill(tensor: Tensor, data: Tensor) -> None:
    tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
