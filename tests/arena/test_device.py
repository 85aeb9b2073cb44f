"""Memory of a device, as far as the device "cpu" shows it; a GPU's is in tests/gpu."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kvd.arena import device
from kvd.arena.device import DeviceArena, MappedDevice, find_device
from kvd.arena.membership import SessionLock, create_session_file, is_held
from kvd.protocol.errors import KvdError, TierFailed
from kvd.protocol.layout import Layout
from kvd.protocol.messages import DeviceMemory, Run

if TYPE_CHECKING:
    from kvd.arena.base import Arena
    from tests.arena.conftest import Child

LAYOUT = Layout(2, 3, 8, "float16", block_size=4)
NUM_PAGES = 24
CPU = torch.device("cpu")
PAGES = np.array([20, 3, 4, 5, 0, 23])
SIZE = len(PAGES) * LAYOUT.page_bytes


@pytest.fixture
def arena(shm: Path) -> Iterator[DeviceArena]:
    with closing(DeviceArena(shm / "arena", LAYOUT, NUM_PAGES, CPU)) as arena:
        yield arena


@pytest.fixture
def host(arena: DeviceArena) -> Arena:
    """The same memory, filled, as an arena of the host."""
    assert arena._file is not None
    memory = arena._file.memory
    memory.root.view(np.uint8)[:] = np.random.default_rng(0).integers(0, 255, memory.root.nbytes)
    return memory


@pytest.fixture
def session(shm: Path) -> Path:
    create_session_file(shm / "session")
    return shm / "session"


@pytest.fixture
def mapped(arena: DeviceArena, shm: Path, session: Path) -> MappedDevice:
    lock = SessionLock(str(session))
    return MappedDevice(arena.exported, str(shm / "arena"), LAYOUT, NUM_PAGES, lock)


# --- pages and copies ---


def test_pages_lie_as_in_memory_of_the_host(arena: DeviceArena, host: Arena) -> None:
    assert np.array_equal(arena.pages.pages.view(torch.uint16), host.pages.view(np.uint16))
    run = arena.pages.run_view(Run(3, 5)).view(torch.uint16)
    assert np.array_equal(run, host.run_view(Run(3, 5)).view(np.uint16))


@pytest.mark.parametrize("pages_at_once", [1, 4, 100])
def test_pages_are_copied_out_as_from_memory_of_the_host(
    arena: DeviceArena, host: Arena, pages_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "STAGE_BYTES", pages_at_once * LAYOUT.page_bytes)
    out, wanted = bytearray(SIZE), bytearray(SIZE)
    arena.copy_out(PAGES, memoryview(out))
    host.copy_out(PAGES, memoryview(wanted))
    assert out == wanted


@pytest.mark.parametrize("pages_at_once", [1, 4, 100])
def test_what_was_copied_out_is_copied_in_elsewhere(
    arena: DeviceArena, host: Arena, pages_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "STAGE_BYTES", pages_at_once * LAYOUT.page_bytes)
    data, others = bytearray(SIZE), host.page_view(6).copy()
    host.copy_out(PAGES, memoryview(data))
    arena.copy_in(PAGES[::-1].copy(), memoryview(data).toreadonly())
    assert np.array_equal(host.page_view(23).view(np.uint16), as_page(data, 0))
    assert np.array_equal(host.page_view(3).view(np.uint16), as_page(data, 4))
    assert np.array_equal(host.page_view(6).view(np.uint16), others.view(np.uint16))


def as_page(data: bytearray, place: int) -> np.ndarray:
    start = place * LAYOUT.page_bytes
    bits = np.frombuffer(data[start : start + LAYOUT.page_bytes], np.uint16)
    return bits.reshape(2, 2, 4, 3, 8)


def test_no_pages_are_no_copies(arena: DeviceArena) -> None:
    arena.copy_out(PAGES[:0], memoryview(b""))
    arena.copy_in(PAGES[:0], memoryview(b""))


@pytest.mark.parametrize("number", range(LAYOUT.num_slices))
def test_slices_are_those_of_memory_of_the_host(
    arena: DeviceArena, host: Arena, number: int
) -> None:
    run = Run(3, 5)
    assert arena.slice_view(number, run) == host.slice_view(number, run)
    data = bytes(range(64)) * (run.count * LAYOUT.slice_bytes // 64)
    arena.write_slice(number, run, memoryview(data))
    assert host.slice_view(number, run) == data


@pytest.mark.parametrize("pages", [[-1], [NUM_PAGES], [0, NUM_PAGES]])
def test_pages_that_do_not_exist_are_refused(arena: DeviceArena, pages: list[int]) -> None:
    data = memoryview(bytearray(len(pages) * LAYOUT.page_bytes))
    with pytest.raises(IndexError):
        arena.copy_out(np.array(pages), data)
    with pytest.raises(IndexError):
        arena.slice_view(0, Run(NUM_PAGES - 1, 2))
    with pytest.raises(IndexError):
        arena.slice_view(LAYOUT.num_slices, Run(0, 1))


# --- the allocation ---


def test_memory_that_is_not_there_is_a_failure_that_leaves_nothing(
    mount: Callable[..., Path],
) -> None:
    small = mount("size=4k")
    with pytest.raises(TierFailed, match="no 18KiB on cpu"):
        DeviceArena(small / "arena", LAYOUT, NUM_PAGES, CPU)
    assert list(small.iterdir()) == []


def test_who_mapped_a_closed_arena_keeps_its_memory(
    arena: DeviceArena, mapped: MappedDevice, shm: Path
) -> None:
    mapped.writable().pages[:] = 5
    arena.close()
    assert not (shm / "arena").exists()
    assert (mapped.readable.pages == 5).all()


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(KvdError, match="none of the"):
        find_device("GPU-00000000-0000-0000-0000-000000000000")
    with pytest.raises(KvdError, match="none of the"):
        find_device("cuda:1000")


# --- the client's end ---


def test_what_is_written_through_one_view_is_read_through_the_other(
    mapped: MappedDevice, arena: DeviceArena
) -> None:
    mapped.writable().run_view(Run(3, 2))[:] = 7
    assert (mapped.readable.run_view(Run(3, 2)) == 7).all()
    assert (arena.pages.run_view(Run(3, 2)) == 7).all()
    assert (arena.pages.run_view(Run(5, 19)) == 0).all()


WRITE = """
import sys
from kvd.arena.device import MappedDevice
from kvd.arena.membership import SessionLock
from kvd.protocol.messages import DeviceMemory
from tests.arena.test_device import LAYOUT, NUM_PAGES
mapped = MappedDevice(DeviceMemory("cpu"), sys.argv[1], LAYOUT, NUM_PAGES, SessionLock(sys.argv[2]))
mapped.writable().pages[:, :, 3] = 7
mapped.settle()
"""


def test_what_one_process_writes_another_reads(
    mapped: MappedDevice, shm: Path, session: Path, child: Callable[..., Child]
) -> None:
    assert child(WRITE, shm / "arena", session).ended() == 0
    assert (mapped.readable.pages[:, :, 3] == 7).all()
    assert (mapped.readable.pages[:, :, 4] == 0).all()


def test_the_root_of_writable_pages_lives_as_long_as_a_tensor_over_them(
    mapped: MappedDevice,
) -> None:
    pages = mapped.writable()
    root, view = weakref.ref(pages.root), pages.run_view(Run(0, 2))[0, 0]
    del pages
    assert root() is not None
    del view
    assert root() is None


def test_a_process_is_a_member_as_long_as_a_tensor_lives(
    arena: DeviceArena, shm: Path, session: Path
) -> None:
    lock = SessionLock(str(session))
    mapped = MappedDevice(arena.exported, str(shm / "arena"), LAYOUT, NUM_PAGES, lock)
    view = mapped.writable().run_view(Run(0, 2))
    del mapped, lock
    gc.collect()
    assert is_held(session)
    del view
    gc.collect()
    assert not is_held(session)


def test_memory_of_a_gpu_that_is_not_there_cannot_be_mapped(session: Path) -> None:
    gpu = DeviceMemory("00000000-0000-0000-0000-000000000000", b"handle", 1)
    with pytest.raises(KvdError, match="none of the"):
        MappedDevice(gpu, "", LAYOUT, NUM_PAGES, SessionLock(str(session)))
