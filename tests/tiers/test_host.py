"""The host tier: pages in shared host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvd.arena.host import DEFAULT_CAPACITY
from kvd.arena.page_table import record_bytes, table_bytes
from kvd.protocol.errors import AlreadyRunning, BadRequest, ConfigError, TierFailed
from kvd.protocol.keys import Identity, NamespaceInfo
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run
from kvd.protocol.units import ByteSize
from kvd.testing.tier_suite import MakeMemoryTier, MemoryTierSuite
from kvd_tiers.host import HostConfig, HostTier
from tests.arena.conftest import mount, shm  # noqa: F401 - fixtures
from tests.e2e.conftest import tmpfs  # noqa: F401 - a fixture
from tests.e2e.support import EXTENT_PAGES, LAYOUT, LAYOUTS

Mount = Callable[..., Path]


def make(directory: Path, capacity: int = 1 << 20) -> HostTier:
    return HostTier(HostConfig(ByteSize(capacity)), directory)


@pytest.fixture
def tier(shm: Path) -> Iterator[HostTier]:  # noqa: F811
    tier = make(shm / "kvd")
    tier.open(7)
    yield tier
    tier.close()


class TestTheSuite(MemoryTierSuite):
    @pytest.fixture
    def make_tier(self) -> MakeMemoryTier:
        return make


# --- capacity ---


def test_the_default_is_a_quarter_of_the_file_system(tmpfs: Mount) -> None:  # noqa: F811
    small = tmpfs("size=64m")
    assert HostTier(HostConfig(), small).capacity_bytes == 16 << 20


def test_the_default_has_a_bound(shm: Path) -> None:  # noqa: F811
    size = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
    assert HostTier(HostConfig(), shm).capacity_bytes == min(size // 4, DEFAULT_CAPACITY)


def test_a_capacity_larger_than_the_file_system_is_refused_with_both_sizes(
    tmpfs: Mount,  # noqa: F811
) -> None:
    small = tmpfs("size=64m")
    assert make(small, 64 << 20).capacity_bytes == 64 << 20
    with pytest.raises(ConfigError, match=r"65MiB does not fit into .* 64MiB: lower"):
        make(small, 65 << 20)
    with pytest.raises(ConfigError):
        make(small / "not" / "there" / "yet", 65 << 20)


def test_a_tier_touches_nothing_before_it_is_opened(shm: Path) -> None:  # noqa: F811
    make(shm / "kvd").close()
    assert not (shm / "kvd").exists()


# --- open and close ---


def test_one_tier_owns_a_directory(tier: HostTier) -> None:
    with pytest.raises(AlreadyRunning, match=str(tier.directory)):
        make(tier.directory).open(8)


def test_a_closed_tier_lets_go_of_its_directory(shm: Path) -> None:  # noqa: F811
    for epoch in (1, 2, 3):
        tier = make(shm / "kvd")
        tier.open(epoch)
        tier.close()


def test_a_closed_tier_leaves_its_arenas(shm: Path) -> None:  # noqa: F811
    for epoch in (1, 2):
        with closing(make(shm / "kvd")) as tier:
            tier.open(epoch)
            tier.create_arena(LAYOUT, 4)
    names = [f"{epoch:016x}-1.{kind}" for epoch in (1, 2) for kind in ("about", "arena", "pages")]
    assert sorted(path.name for path in (shm / "kvd").iterdir()) == [*names, "host.lock"]


def test_a_directory_of_another_user_is_refused(shm: Path) -> None:  # noqa: F811
    if os.getuid() != 0:
        pytest.skip("only root can make a directory of another user")
    directory = shm / "theirs"
    directory.mkdir()
    os.chown(directory, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to"):
        make(directory).open(1)


# --- arenas ---


def test_an_arena_has_the_whole_capacity_and_no_memory_yet(tier: HostTier) -> None:
    arena = tier.create_arena(LAYOUT, 4)
    assert arena.extent_pages == EXTENT_PAGES
    assert arena.path.stat().st_size == arena.num_pages * LAYOUT.page_bytes
    assert arena.backed_bytes == 0
    assert arena.table.num_pages == arena.num_pages
    size = arena.num_pages * LAYOUT.page_bytes + table_bytes(LAYOUT, 4, arena.num_pages)
    extent = EXTENT_PAGES * (LAYOUT.page_bytes + record_bytes(LAYOUT, 4))
    assert 0 <= (1 << 20) - size < extent


def test_two_layouts_have_an_arena_each(tier: HostTier) -> None:
    one = tier.create_arena(LAYOUT, 4)
    two = tier.create_arena(Layout(1, 2, 8, "float32", block_size=4), 4)
    assert one.path != two.path
    one.back(Run(0, EXTENT_PAGES))
    assert (one.backed_bytes, two.backed_bytes) == (EXTENT_PAGES * LAYOUT.page_bytes, 0)


def test_memory_is_given_and_taken_by_extents(tier: HostTier) -> None:
    arena = tier.create_arena(LAYOUT, 4)
    arena.back(Run(0, 3 * EXTENT_PAGES))
    arena.unback(Run(EXTENT_PAGES, EXTENT_PAGES))
    assert arena.backed_bytes == 2 * EXTENT_PAGES * LAYOUT.page_bytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.order)
def test_an_extent_that_goes_takes_no_byte_of_others(tier: HostTier, layout: Layout) -> None:
    arena = tier.create_arena(layout, 4)
    size = arena.extent_pages
    arena.back(Run(0, 3 * size))
    memory = arena.memory.pages.view(np.uint8)
    memory[: 3 * size] = 1
    arena.unback(Run(size, size))
    assert arena.backed_bytes == 2 * size * layout.page_bytes
    assert memory[:size].all()
    assert memory[2 * size : 3 * size].all()
    assert not arena.memory.pages_view(Run(size, size)).any()


def test_a_layout_of_which_no_extent_fits_is_refused(tier: HostTier) -> None:
    with pytest.raises(BadRequest, match="raise its capacity_bytes"):
        tier.create_arena(Layout(32, 8, 128, "bfloat16"), 4)


def test_a_full_file_system_is_a_failure_that_leaves_no_file(tmpfs: Mount) -> None:  # noqa: F811
    small = tmpfs("size=64k")
    tier = make(small, 64 << 10)
    tier.open(1)
    (small / "filler").write_bytes(bytes(60 << 10))
    before = set(small.iterdir())
    with pytest.raises(TierFailed, match="page table"):
        tier.create_arena(LAYOUT, 4)
    assert set(small.iterdir()) == before
    (small / "filler").unlink()
    tier.create_arena(LAYOUT, 4)
    tier.close()


def test_a_file_system_without_inodes_is_a_failure(tmpfs: Mount) -> None:  # noqa: F811
    small = tmpfs("size=1m,nr_inodes=2")  # its root, and the lock
    with closing(make(small)) as tier:
        tier.open(1)
        with pytest.raises(TierFailed):
            tier.create_arena(LAYOUT, 4)


def test_files_are_not_for_everybody(tier: HostTier) -> None:
    arena = tier.create_arena(LAYOUT, 4)
    assert tier.directory.stat().st_mode & 0o777 == 0o750
    assert arena.path.stat().st_mode & 0o007 == 0
    for suffix in (".pages", ".about"):
        assert arena.path.with_suffix(suffix).stat().st_mode & 0o777 == 0o600


def test_an_arena_that_is_removed_leaves_no_file(tier: HostTier) -> None:
    arena = tier.create_arena(LAYOUT, 4)
    arena.note_namespace(1, NamespaceInfo(Identity("model", "main"), LAYOUT))
    tier.remove_arena(arena)
    assert [path.name for path in tier.directory.iterdir()] == ["host.lock"]
