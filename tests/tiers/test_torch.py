"""The torch tier, on the device "cpu"; on a GPU it is in tests/gpu."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvd.arena.page_table import record_bytes
from kvd.protocol.errors import AlreadyRunning, BadRequest, ConfigError, TierFailed
from kvd.protocol.layout import MAX_GROUP_PAGES, Layout
from kvd.protocol.messages import DeviceMemory, Run
from kvd.protocol.units import ByteSize
from kvd.testing.tier_suite import MakeMemoryTier, MemoryTierSuite
from kvd.tiers.registry import load_tier
from kvd_tiers.torch import TorchConfig, TorchTier
from tests.arena.conftest import mount, shm  # noqa: F401 - fixtures
from tests.e2e.support import LAYOUT, capacity_of

OTHER = Layout(1, 2, 8, "float32", block_size=4)
GPU = "GPU-00000000-0000-0000-0000-000000000000"


def make(place: Path, capacity: int = 1 << 20, **config: Any) -> TorchTier:
    config = {"device": "cpu", "capacity_bytes": ByteSize(capacity)} | config
    return TorchTier(TorchConfig(**config), place)


class TestTheSuite(MemoryTierSuite):
    by_extents = False

    @pytest.fixture
    def make_tier(self) -> MakeMemoryTier:
        return partial(make, layouts=2)


@pytest.fixture
def tier(shm: Path) -> Iterator[TorchTier]:  # noqa: F811
    tier = make(shm / "kvd", layouts=2)
    tier.open(7)
    yield tier
    tier.close()


WITH_HOST = """
import sys
from kvd.config import parse
from kvd.daemon import Daemon
Daemon(parse({"endpoint": "ipc:///tmp/kvd-test-none/kvd.sock"}))
print("torch" in sys.modules)
"""


def test_who_has_no_such_tier_never_imports_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_HOST], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


# --- configuration ---


def test_it_is_found_by_its_name(shm: Path) -> None:  # noqa: F811
    section = {"type": "torch", "device": "cpu", "capacity_bytes": "1MiB"}
    tier = load_tier(section, shm, shm / "data")
    assert isinstance(tier, TorchTier)
    assert (tier.capacity_bytes, tier.directory) == (1 << 20, shm)


def test_a_capacity_is_asked_for(shm: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="capacity_bytes"):
        load_tier({"type": "torch"}, shm, shm)


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:12", GPU, GPU.replace("GPU-", "cuda:")])
def test_a_device_has_a_number_or_a_uuid(shm: Path, device: str) -> None:  # noqa: F811
    make(shm, device=device)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"device": "cuda"}, "none of cpu, cuda"),
        ({"device": "GPU-0"}, "none of cpu, cuda"),
        ({"layouts": 0}, "layouts"),
        ({"directory": "here"}, "not absolute"),
    ],
)
def test_what_cannot_be_is_refused(shm: Path, config: Any, reason: str) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=reason):
        make(shm, **config)


def test_a_tier_touches_nothing_before_it_is_opened(shm: Path) -> None:  # noqa: F811
    make(shm / "kvd").close()
    assert not (shm / "kvd").exists()


# --- open and close ---


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_made(
    shm: Path,  # noqa: F811
) -> None:
    with pytest.raises(ConfigError, match="none of the"):
        make(shm / "kvd", device=GPU).check()
    assert not (shm / "kvd").exists()


def test_one_tier_owns_a_directory(tier: TorchTier) -> None:
    with pytest.raises(AlreadyRunning, match=str(tier.directory)):
        make(tier.directory).open(8)


def test_nothing_is_left_of_a_closed_tier(shm: Path) -> None:  # noqa: F811
    for epoch in (1, 2, 3):
        tier = make(shm / "kvd")
        tier.open(epoch)
        tier.create_arena(LAYOUT, 4)
        tier.close()
        tier.close()
    assert [path.name for path in (shm / "kvd").iterdir()] == ["torch.lock"]


def test_nothing_of_an_earlier_epoch_is_adopted(tier: TorchTier) -> None:
    left = tier.create_arena(LAYOUT, 4).path
    assert tier._lock is not None
    tier._lock.close()  # as if killed
    again = make(tier.directory)
    again.open(8)
    assert again.adopt() == []
    assert not left.exists()
    again.close()


# --- arenas ---


def test_an_arena_has_its_memory_from_the_start(shm: Path) -> None:  # noqa: F811
    tier = make(shm / "kvd", capacity_of(8 * MAX_GROUP_PAGES))
    tier.open(1)
    arena = tier.create_arena(LAYOUT, 4)
    assert (arena.num_pages, arena.extent_pages) == (8 * MAX_GROUP_PAGES, MAX_GROUP_PAGES)
    assert arena.backed_bytes == arena.num_pages * LAYOUT.page_bytes
    assert arena.path.stat().st_blocks * 512 == arena.backed_bytes
    arena.back(Run(0, MAX_GROUP_PAGES))
    arena.unback(Run(0, MAX_GROUP_PAGES))
    assert arena.backed_bytes == arena.num_pages * LAYOUT.page_bytes
    tier.close()


def test_layouts_have_equal_shares_of_the_capacity(tier: TorchTier) -> None:
    arenas = [tier.create_arena(layout, 4) for layout in (LAYOUT, OTHER)]
    half = tier.capacity_bytes // 2
    for arena in arenas:
        page_bytes = arena.layout.page_bytes + record_bytes(arena.layout, 4)
        assert arena.num_pages * page_bytes <= half
        assert (arena.num_pages + MAX_GROUP_PAGES) * page_bytes > half


def test_one_layout_more_waits_for_the_memory_of_another(tier: TorchTier) -> None:
    arenas = [tier.create_arena(layout, 4) for layout in (LAYOUT, OTHER)]
    third = Layout(4, 1, 8, "float32", block_size=4)
    with pytest.raises(TierFailed, match="raise its layouts"):
        tier.create_arena(third, 4)
    tier.remove_arena(arenas[0])
    assert not arenas[0].path.exists()
    assert tier.create_arena(third, 4).path != arenas[0].path


def test_a_layout_of_which_no_extent_fits_is_refused(tier: TorchTier) -> None:
    with pytest.raises(BadRequest, match="raise its capacity_bytes"):
        tier.create_arena(Layout(32, 8, 128, "bfloat16"), 4)


def test_pages_that_are_smaller_than_what_is_kept_of_them_are_refused(tier: TorchTier) -> None:
    with pytest.raises(BadRequest, match="raise block_size"):
        tier.create_arena(Layout(1, 1, 1, "float16"), 4)


def test_memory_that_is_not_there_is_a_failure(mount: Callable[..., Path]) -> None:  # noqa: F811
    tier = make(mount("size=64k"))
    tier.open(1)
    with pytest.raises(TierFailed, match="on cpu"):
        tier.create_arena(LAYOUT, 4)
    assert [path.name for path in tier.directory.iterdir()] == ["torch.lock"]
    tier.close()


def test_clients_are_told_where_the_memory_lies(tier: TorchTier) -> None:
    assert tier.create_arena(LAYOUT, 4).device == DeviceMemory("cpu")
