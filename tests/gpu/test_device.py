"""Memory of a GPU: exported to another process, and copied from and to memory of the host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from kvd.arena import device
from kvd.arena.device import DeviceArena, find_device, uuid_of
from kvd.arena.membership import is_held
from kvd.protocol.errors import TierFailed
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run

if TYPE_CHECKING:
    from tests.arena.conftest import Child

LAYOUT = Layout(4, 2, 64, "bfloat16")
NUM_PAGES = 512
PAGES = np.random.default_rng(0).permutation(NUM_PAGES)[:100]


@pytest.fixture
def arena(gpu: torch.device, tmp_path: Path) -> Iterator[DeviceArena]:
    with closing(DeviceArena(tmp_path, LAYOUT, NUM_PAGES, gpu)) as arena:
        yield arena


def filled(arena: DeviceArena) -> np.ndarray:
    """All pages filled with random bits, and these bits: `[pages, bytes of a page]`."""
    bits = np.random.default_rng(1).integers(0, 255, (NUM_PAGES, LAYOUT.page_bytes), np.uint8)
    arena.copy_in(np.arange(NUM_PAGES), memoryview(bits).cast("B"))
    return bits


# --- copies ---


@pytest.mark.parametrize("pages_at_once", [1, 7, NUM_PAGES])
def test_what_is_copied_in_is_copied_out(
    arena: DeviceArena, pages_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "STAGE_BYTES", pages_at_once * LAYOUT.page_bytes)
    bits, out = filled(arena), bytearray(len(PAGES) * LAYOUT.page_bytes)
    arena.copy_out(PAGES, memoryview(out))
    assert out == bits[PAGES].tobytes()


def test_a_page_lies_as_its_layout_says(arena: DeviceArena) -> None:
    bits = filled(arena)
    page = arena.pages.pages[37].cpu().contiguous()
    assert page.view(torch.uint8).numpy().tobytes() == bits[37].tobytes()


def test_slices_are_read_and_written(arena: DeviceArena) -> None:
    filled(arena)
    data = bytes(range(256)) * (5 * LAYOUT.slice_bytes // 256)
    arena.write_slices(range(3, 4), [Run(20, 5)], memoryview(data))
    assert list(arena.slice_views(range(3, 4), [Run(20, 5)])) == [data]
    written = arena.pages.layers[1, 1, 20:25].cpu().contiguous()
    assert written.view(torch.uint8).numpy().tobytes() == data


def test_copies_from_several_threads_do_not_mix(arena: DeviceArena) -> None:
    bits = filled(arena)

    def is_right(seed: int) -> bool:
        pages = np.random.default_rng(seed).permutation(NUM_PAGES)[:64]
        out = bytearray(len(pages) * LAYOUT.page_bytes)
        arena.copy_out(pages, memoryview(out))
        return out == bits[pages].tobytes()

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, range(40)))


def test_buffers_of_copies_are_pinned(arena: DeviceArena) -> None:
    assert arena.num_unpinned == 0
    assert arena._copies._stages.get()[0].is_pinned()  # type: ignore[attr-defined]


def test_memory_of_a_closed_arena_is_given_back(gpu: torch.device, tmp_path: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(gpu)
    arena = DeviceArena(tmp_path, LAYOUT, 64 * NUM_PAGES, gpu)
    size = arena.num_pages * LAYOUT.page_bytes
    assert torch.cuda.mem_get_info(gpu)[0] <= before - size
    arena.close()
    assert torch.cuda.mem_get_info(gpu)[0] > before - size


def test_a_capacity_that_the_gpu_does_not_have_is_refused(gpu: torch.device) -> None:
    total = torch.cuda.get_device_properties(gpu).total_memory
    device.check_capacity(gpu, total)
    with pytest.raises(TierFailed, match="lower capacity_bytes"):
        device.check_capacity(gpu, total + 1)


# --- another process ---

IMPORT = """
import json, sys, weakref, msgspec, torch
from kvd.arena.device import MappedDevice
from kvd.arena.membership import SessionLock
from kvd.protocol.messages import DeviceMemory
from tests.gpu.test_device import LAYOUT, NUM_PAGES
memory = msgspec.json.decode(sys.argv[1], type=DeviceMemory)
mapped = MappedDevice(memory, "", LAYOUT, NUM_PAGES, SessionLock(sys.argv[2]))
"""


def exported(arena: DeviceArena) -> str:
    return msgspec.json.encode(arena.exported).decode()


def test_one_process_reads_what_another_wrote(
    arena: DeviceArena, session: Path, child: Callable[..., Child]
) -> None:
    arena.pages.pages.fill_(0)
    arena.pages.pages[3] = 5
    torch.cuda.synchronize()
    code = "print(bool((mapped.readable.pages[3] == 5).all()))\n"
    code += "mapped.writable().run_view(Run(7, 2))[:] = 9\nmapped.settle()\nprint('written')"
    other = child(
        IMPORT + "from kvd.protocol.messages import Run\n" + code, exported(arena), session
    )
    assert (other.says(), other.says()) == ("True", "written")
    assert (arena.pages.run_view(Run(7, 2)) == 9).all()
    assert (arena.pages.pages[[6, 9]] == 0).all()


def test_a_process_that_counts_gpus_otherwise_imports_the_same(
    arena: DeviceArena, session: Path, child: Callable[..., Child], gpu: torch.device
) -> None:
    arena.pages.pages.fill_(3)
    torch.cuda.synchronize()
    hidden = f"import os\nos.environ['CUDA_VISIBLE_DEVICES'] = 'GPU-{uuid_of(gpu)}'\n"
    code = "print(bool((mapped.readable.pages == 3).all()))"
    assert child(hidden + IMPORT + code, exported(arena), session).says() == "True"


def test_many_come_and_go(arena: DeviceArena, session: Path, child: Callable[..., Child]) -> None:
    for number in range(3):
        code = f"mapped.writable().pages[{number}] = {number + 1}\nmapped.settle()"
        assert child(IMPORT + code, exported(arena), session).ended() == 0
    assert [int(arena.pages.pages[page].flatten()[0]) for page in range(3)] == [1, 2, 3]


def test_who_imported_is_a_member_until_killed(
    arena: DeviceArena, session: Path, child: Callable[..., Child]
) -> None:
    other = child(IMPORT + "print('mapped')\ninput()", exported(arena), session)
    assert other.says() == "mapped"
    assert is_held(session)
    other.process.kill()
    other.ended()
    assert not is_held(session)
    arena.pages.pages.fill_(1)
    torch.cuda.synchronize()


def test_the_root_of_writable_pages_lives_as_long_as_a_tensor(
    arena: DeviceArena, session: Path, child: Callable[..., Child]
) -> None:
    code = """
pages = mapped.writable()
root, view = weakref.ref(pages.root), pages.pages[0, 0].flatten()
del pages
print(root() is not None)
del view
print(root() is None)
"""
    other = child(IMPORT + code, exported(arena), session)
    assert (other.says(), other.says()) == ("True", "True")


def test_a_device_is_found_by_number_and_by_uuid(gpu: torch.device) -> None:
    uuid = uuid_of(gpu)
    assert {find_device(name) for name in ("cuda:0", f"cuda:{uuid}", f"GPU-{uuid}")} == {gpu}
