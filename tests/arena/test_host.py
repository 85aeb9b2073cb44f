"""Shared host memory: given and taken by extents, mapped twice."""

from __future__ import annotations

import errno
import gc
import mmap
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvd.arena.files import find_file
from kvd.arena.host import HostArena, MappedArena, huge_page_bytes
from kvd.arena.membership import SessionLock, create_session_file, is_held
from kvd.protocol.errors import KvdError
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run

if TYPE_CHECKING:
    from tests.arena.conftest import Child

LAYOUT = Layout(2, 1, 64, "float16")  # a slice of 2,048 bytes: half a page of the system
EXTENT = LAYOUT.extent_pages(huge_page_bytes(Path("/dev/shm")), 16)
NUM_PAGES = 4 * EXTENT
EXTENT_BYTES = EXTENT * LAYOUT.page_bytes

MAP = f"""
import ctypes, os, sys
from kvd.arena.files import find_file
from kvd.arena.host import MappedArena
from kvd.arena.membership import SessionLock
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run
layout = Layout(2, 1, 64, "float16")
mapped = MappedArena(sys.argv[1], layout, {NUM_PAGES}, SessionLock(sys.argv[2]))
"""


@pytest.fixture
def host(shm: Path) -> HostArena:
    return HostArena(shm / "arena", LAYOUT, NUM_PAGES)


@pytest.fixture
def session(shm: Path) -> Path:
    create_session_file(shm / "session")
    return shm / "session"


@pytest.fixture
def mapped(host: HostArena, session: Path) -> MappedArena:
    return MappedArena(str(host.path), LAYOUT, NUM_PAGES, SessionLock(str(session)))


# --- memory ---


def test_a_new_arena_has_its_length_and_no_memory(host: HostArena) -> None:
    assert host.path.stat().st_size == NUM_PAGES * LAYOUT.page_bytes
    assert host.backed_bytes == 0


def test_backing_gives_exactly_the_memory_of_its_extents(host: HostArena) -> None:
    host.back(Run(EXTENT, 2 * EXTENT))
    assert host.backed_bytes == 2 * EXTENT_BYTES
    host.back(Run(0, EXTENT))
    assert host.backed_bytes == 3 * EXTENT_BYTES


def test_unbacking_gives_back_exactly_that(host: HostArena) -> None:
    host.back(Run(0, 3 * EXTENT))
    host.unback(Run(EXTENT, EXTENT))
    assert host.backed_bytes == 2 * EXTENT_BYTES
    host.unback(Run(EXTENT, EXTENT))
    assert host.backed_bytes == 2 * EXTENT_BYTES


def test_unbacking_leaves_other_pages_as_they_were(host: HostArena, mapped: MappedArena) -> None:
    host.back(Run(0, 3 * EXTENT))
    mapped.writable().run_view(Run(0, 3 * EXTENT))[:] = 1
    host.unback(Run(EXTENT, EXTENT))
    host.back(Run(EXTENT, EXTENT))
    values = mapped.readable.run_view(Run(0, 3 * EXTENT)).reshape(2, 2, 3, -1)
    assert (values[:, :, [0, 2]] == 1).all()
    assert (values[:, :, 1] == 0).all()


def test_a_full_file_system_is_an_error_that_takes_nothing(mount: Callable[..., Path]) -> None:
    room = EXTENT_BYTES * 2 + EXTENT_BYTES // 2
    host = HostArena(mount(f"size={room}") / "arena", LAYOUT, NUM_PAGES)
    host.back(Run(0, EXTENT))
    with pytest.raises(OSError) as caught:  # noqa: PT011
        host.back(Run(EXTENT, 2 * EXTENT))
    assert caught.value.errno == errno.ENOSPC
    assert host.backed_bytes == EXTENT_BYTES
    host.back(Run(2 * EXTENT, EXTENT))
    host.close()


def test_a_path_in_use_is_refused(host: HostArena) -> None:
    with pytest.raises(FileExistsError):
        HostArena(host.path, LAYOUT, NUM_PAGES)


def test_closing_leaves_the_file_and_may_be_repeated(host: HostArena) -> None:
    host.back(Run(0, EXTENT))
    host.close()
    host.close()
    assert host.path.stat().st_blocks * 512 == EXTENT_BYTES


def test_nobody_reaches_the_pages_of_a_closed_arena(host: HostArena) -> None:
    assert host.memory.num_pages == NUM_PAGES
    host.close()
    with pytest.raises(KvdError, match="closed"):
        host.memory  # noqa: B018


def test_an_arena_is_found_as_it_was_left(host: HostArena, mapped: MappedArena) -> None:
    host.back(Run(0, EXTENT))
    mapped.writable().page_view(3)[:] = 5
    host.close()
    fd = find_file(host.path, NUM_PAGES * LAYOUT.page_bytes)
    found = HostArena(host.path, LAYOUT, NUM_PAGES, fd)
    assert found.backed_bytes == EXTENT_BYTES
    found.memory.page_view(4)[:] = 6
    assert [mapped.readable.page_view(page).max() for page in (3, 4)] == [5, 6]


def test_who_maps_an_arena_keeps_its_memory(host: HostArena, mapped: MappedArena) -> None:
    host.back(Run(0, EXTENT))
    mapped.writable().page_view(0)[:] = 5
    host.close()
    host.path.unlink()
    assert (mapped.readable.page_view(0) == 5).all()


def test_the_group_may_write_and_others_may_not_read(host: HostArena) -> None:
    assert host.path.stat().st_mode & 0o007 == 0


# --- mapping ---


def test_what_is_written_through_one_view_is_read_through_the_other(
    host: HostArena, mapped: MappedArena
) -> None:
    host.back(Run(0, EXTENT))
    mapped.writable().page_view(3)[:] = np.arange(64)
    assert (mapped.readable.page_view(3) == np.arange(64)).all()


def test_what_one_process_writes_another_reads(
    host: HostArena, session: Path, mapped: MappedArena, child: Callable[..., Child]
) -> None:
    host.back(Run(0, EXTENT))
    writer = child(MAP + "mapped.writable().page_view(3)[:] = 7", host.path, session)
    assert writer.ended() == 0
    assert (mapped.readable.page_view(3) == 7).all()


def test_another_size_than_the_layout_says_is_refused(host: HostArena, session: Path) -> None:
    with pytest.raises(KvdError, match="size"):
        MappedArena(str(host.path), LAYOUT, NUM_PAGES + 1, SessionLock(str(session)))
    gc.collect()
    assert not is_held(session)


def test_a_read_view_cannot_be_written(mapped: MappedArena) -> None:
    with pytest.raises(ValueError, match="read-only"):
        mapped.readable.page_view(0)[:] = 1


def test_a_stray_write_through_a_read_view_kills_who_does_it(
    host: HostArena, session: Path, child: Callable[..., Child]
) -> None:
    host.back(Run(0, EXTENT))
    stray = "ctypes.memset(mapped.readable.page_view(0).ctypes.data, 1, 1)"
    assert child(MAP + stray, host.path, session).ended() == -signal.SIGSEGV


@pytest.mark.parametrize("name", ["readable", "writable"])
def test_closing_a_mapping_under_a_live_view_is_an_error(mapped: MappedArena, name: str) -> None:
    arena = mapped.readable if name == "readable" else mapped.writable()
    view = arena.run_view(Run(0, 1))
    root: Any = view.base
    mapping = root.base.obj  # of the memoryview between
    assert isinstance(mapping, mmap.mmap)
    with pytest.raises(BufferError):
        mapping.close()
    assert (view == 0).all()


def test_a_process_is_a_member_as_long_as_a_view_lives(host: HostArena, session: Path) -> None:
    mapped = MappedArena(str(host.path), LAYOUT, NUM_PAGES, SessionLock(str(session)))
    read, written = mapped.readable.page_view(0), mapped.writable().run_view(Run(1, 2))
    del mapped
    gc.collect()
    assert is_held(session)
    del read
    gc.collect()
    assert is_held(session)
    del written
    gc.collect()
    assert not is_held(session)


# --- fork ---


def test_a_forked_child_has_no_mapping(
    host: HostArena, session: Path, child: Callable[..., Child]
) -> None:
    host.back(Run(0, EXTENT))
    program = (
        MAP
        + """
view = mapped.readable.page_view(0)
if (forked := os.fork()) == 0:
    int(view[0, 0, 0, 0, 0])
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
print(int(view[0, 0, 0, 0, 0]))
"""
    )
    parent = child(program, host.path, session)
    assert parent.says() == str(-signal.SIGSEGV)
    assert parent.says() == "0"


def test_a_forked_child_is_no_member(
    host: HostArena, session: Path, child: Callable[..., Child]
) -> None:
    program = (
        MAP
        + """
if os.fork() == 0:
    print("forked")
    input()  # lives on when its parent is dead
    print("still alive")
    os._exit(0)
os.waitpid(-1, 0)
"""
    )
    parent = child(program, host.path, session)
    assert parent.says() == "forked"
    assert is_held(session)
    parent.send(signal.SIGKILL)
    parent.ended()
    assert not is_held(session)
    parent.tell()
    assert parent.says() == "still alive"


def test_mappings_stay_out_of_children_and_core_dumps(mapped: MappedArena, host: HostArena) -> None:
    mappings = [flags for _, flags in in_memory(host.path)]
    assert len(mappings) == 2
    for flags in mappings:
        assert {"dc", "dd"} <= set(flags)


# --- first touch ---


def in_memory(path: Path) -> list[tuple[int, list[str]]]:
    """Bytes faulted in, and flags, of each mapping of a file in this process."""
    smaps = Path("/proc/self/smaps").read_text()
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)
    ours = [
        dict(re.findall(r"^(\w+): +(.*)$", one, re.M)) for one in mappings if f"{path}\n" in one
    ]
    return [(int(one["Rss"].split()[0]) * 1024, one["VmFlags"].split()) for one in ours]


@pytest.mark.parametrize("run", [Run(0, 2 * EXTENT), Run(1, 1), Run(3, 2 * EXTENT - 3)])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_populated_run_is_in_memory(
    host: HostArena, mapped: MappedArena, run: Run, kind: str
) -> None:
    host.back(Run(0, 2 * EXTENT))
    assert sum(size for size, _ in in_memory(host.path)) == 0
    populate = mapped.populate_read if kind == "read" else mapped.populate_write
    assert list(populate(run))
    faulted = [size for size, _ in in_memory(host.path) if size]
    assert len(faulted) == 1
    most = run.count * LAYOUT.page_bytes + 2 * LAYOUT.num_slices * huge_page_bytes(host.path.parent)
    assert run.count * LAYOUT.page_bytes <= faulted[0] <= most
    assert host.backed_bytes == 2 * EXTENT_BYTES


# --- the granule of memory ---


@pytest.mark.parametrize(
    ("options", "is_huge"),
    [("huge=always", True), ("huge=within_size", True), ("huge=never", False), ("size=1m", False)],
)
def test_the_granule_is_what_the_mount_gives(
    mount: Callable[..., Path], options: str, is_huge: bool
) -> None:
    (inside := mount(options) / "deep/inside").mkdir(parents=True)
    size = huge_page_bytes(inside)
    assert (size > mmap.PAGESIZE) == is_huge
    assert size % mmap.PAGESIZE == 0


def test_a_neighbour_of_the_mount_has_its_own_granule(mount: Callable[..., Path]) -> None:
    mounted = mount("huge=always")
    (neighbour := mounted.with_name(mounted.name + "-not")).mkdir()
    assert huge_page_bytes(neighbour) == huge_page_bytes(mounted.parent)


def test_the_innermost_mount_counts(mount: Callable[..., Path]) -> None:
    mount("huge=always", "outer")
    assert huge_page_bytes(mount("huge=never", "outer/inner")) == mmap.PAGESIZE


def test_a_mount_point_may_have_a_space(mount: Callable[..., Path]) -> None:
    assert huge_page_bytes(mount("huge=always", "with a space")) > mmap.PAGESIZE
