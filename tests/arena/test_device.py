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
from msgspec.structs import replace

from kvd.arena import device
from kvd.arena.device import DeviceArena, MappedDevice, find_device
from kvd.arena.membership import SessionLock, create_session_file, is_held
from kvd.protocol.errors import KvdError, TierFailed, Unsupported
from kvd.protocol.layout import Layout
from kvd.protocol.messages import DeviceMemory, Run

if TYPE_CHECKING:
    from kvd.arena.base import Arena
    from tests.arena.conftest import Child

LAYOUT = Layout(2, 3, 8, "float16", block_size=4)
PAGE_FIRST = replace(LAYOUT, order="page_first")
OPAQUE = replace(LAYOUT, order="opaque", layer_bytes=384, packing="a test's")
NUM_PAGES = 24
CPU = torch.device("cpu")
PAGES = np.array([20, 3, 4, 5, 0, 23])
SIZE = len(PAGES) * LAYOUT.page_bytes

each_layout = pytest.mark.parametrize(
    "layout", [LAYOUT, PAGE_FIRST, OPAQUE], ids=lambda layout: layout.order
)


@pytest.fixture
def layout() -> Layout:
    return LAYOUT


@pytest.fixture
def arena(shm: Path, layout: Layout) -> Iterator[DeviceArena]:
    with closing(DeviceArena(shm / "arena", layout, NUM_PAGES, CPU)) as arena:
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
    return MappedDevice(arena.exported, str(shm / "arena"), arena.layout, NUM_PAGES, lock)


# --- pages and copies ---


@each_layout
def test_pages_lie_as_in_memory_of_the_host(arena: DeviceArena, host: Arena) -> None:
    for tensor, array in (
        (arena.pages.pages, host.pages),
        (arena.pages.pages_view(Run(3, 5)), host.pages_view(Run(3, 5))),
    ):
        assert tensor.shape == array.shape
        assert bits_of(tensor) == array.tobytes()


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def test_runs_lie_as_in_memory_of_the_host(arena: DeviceArena, host: Arena) -> None:
    run = arena.pages.run_view(Run(3, 5))
    assert run.shape == host.run_view(Run(3, 5)).shape
    assert bits_of(run) == host.run_view(Run(3, 5)).tobytes()


@pytest.mark.parametrize("layout", [PAGE_FIRST, OPAQUE], ids=lambda layout: layout.order)
def test_contiguous_pages_have_no_views_by_layer(arena: DeviceArena) -> None:
    with pytest.raises(Unsupported, match="take whole pages"):
        arena.pages.run_view(Run(3, 5))


@each_layout
@pytest.mark.parametrize("pages_at_once", [1, 4, 100])
def test_pages_are_copied_out_as_from_memory_of_the_host(
    arena: DeviceArena, host: Arena, pages_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "STAGE_BYTES", pages_at_once * LAYOUT.page_bytes)
    out, wanted = bytearray(SIZE), bytearray(SIZE)
    arena.copy_out(PAGES, memoryview(out))
    host.copy_out(PAGES, memoryview(wanted))
    assert out == wanted


@each_layout
@pytest.mark.parametrize("pages_at_once", [1, 4, 100])
def test_what_was_copied_out_is_copied_in_elsewhere(
    arena: DeviceArena, host: Arena, pages_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "STAGE_BYTES", pages_at_once * LAYOUT.page_bytes)
    before = host.pages.copy()
    data = before[PAGES].tobytes()
    arena.copy_in(PAGES[::-1].copy(), memoryview(data))
    before[PAGES[::-1]] = before[PAGES]
    assert host.pages.tobytes() == before.tobytes()


def test_no_pages_are_no_copies(arena: DeviceArena) -> None:
    arena.copy_out(PAGES[:0], memoryview(b""))
    arena.copy_in(PAGES[:0], memoryview(b""))


@each_layout
@pytest.mark.parametrize("slices", [range(2), range(1, 2), range(1)])
def test_slices_are_those_of_memory_of_the_host(
    arena: DeviceArena, host: Arena, slices: range
) -> None:
    runs = (Run(3, 5), Run(0, 1))
    assert list(arena.slice_views(slices, runs)) == list(host.slice_views(slices, runs))
    size = len(slices) * 6 * arena.layout.slice_bytes
    data = np.random.default_rng(1).bytes(size)
    arena.write_slices(slices, runs, memoryview(data))
    assert b"".join(host.slice_views(slices, runs)) == data


@pytest.mark.parametrize("layout", [LAYOUT, PAGE_FIRST], ids=lambda layout: layout.order)
def test_rows_are_those_of_memory_of_the_host(
    arena: DeviceArena, host: Arena, mapped: MappedDevice
) -> None:
    rows, last = arena.rows(7, 3), host.page_view(9)[:, :, 3].tobytes()
    assert rows == host.rows(7, 3)
    mapped.writable().write_rows(9, 3, memoryview(rows))
    assert host.rows(9, 3) == rows
    assert host.page_view(9)[:, :, 3].tobytes() == last


@pytest.mark.parametrize("pages", [[-1], [NUM_PAGES], [0, NUM_PAGES]])
def test_pages_that_do_not_exist_are_refused(arena: DeviceArena, pages: list[int]) -> None:
    data = memoryview(bytearray(len(pages) * LAYOUT.page_bytes))
    with pytest.raises(IndexError):
        arena.copy_out(np.array(pages), data)
    with pytest.raises(IndexError):
        next(arena.slice_views(range(1), [Run(NUM_PAGES - 1, 2)]))
    with pytest.raises(IndexError):
        next(arena.slice_views(range(LAYOUT.num_slices + 1), [Run(0, 1)]))


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
mapped.writable().pages[3] = 7
mapped.settle()
"""


def test_what_one_process_writes_another_reads(
    mapped: MappedDevice, shm: Path, session: Path, child: Callable[..., Child]
) -> None:
    assert child(WRITE, shm / "arena", session).ended() == 0
    assert (mapped.readable.pages[3] == 7).all()
    assert (mapped.readable.pages[4] == 0).all()


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
