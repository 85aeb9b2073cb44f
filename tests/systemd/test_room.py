"""Where there is no room: in shared memory, on the volume of the data, within the slice's limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.support import eventually
from tests.systemd.conftest import ALL, BINARIES, CONFIGURATION, MATCH, STORE, Box

# Limits of memory count where the kernel has them on cgroup v1, too.
BOX_OPTIONS = ("--cgroup", "hybrid", "--shm-size", "512m")
SLICE = "/sys/fs/cgroup/memory/kvd.slice"

DATA = "/var/lib/kvd"
# It leaves nothing of so small a volume to others.
ON_A_SMALL_VOLUME = f"""
endpoint = "ipc:///run/kvd.sock"
directory = "/dev/shm/kvd"
data_directory = "{DATA}"
tiers = [{{type = "host"}}, {{type = "lmdb", free_floor_bytes = 0}}]
"""


@pytest.fixture
def stopped(box: Box) -> Iterator[Box]:
    """A box whose kvd does not run, and has nothing in memory."""
    box.run("systemctl", "stop", "kvd.socket")
    box.run("find", "/dev/shm/kvd", "-mindepth", "1", "-delete")
    yield box
    box.run("systemctl", "stop", "kvd.socket")


@pytest.fixture
def small_volume(stopped: Box) -> Iterator[Box]:
    """A stopped kvd, whose data are on a volume of their own."""
    options = "size=256m,uid=kvd,gid=kvd,mode=700"
    stopped.run("install", "-d", DATA)
    stopped.run("mount", "-t", "tmpfs", "-o", options, "none", DATA)
    text = stopped.run("cat", CONFIGURATION)
    stopped.write(CONFIGURATION, ON_A_SMALL_VOLUME)
    yield stopped
    stopped.run("systemctl", "stop", "kvd.socket")
    stopped.run("umount", DATA)
    stopped.write(CONFIGURATION, text)


def fill(box: Box, directory: str) -> Callable[[], str]:
    """Take all that is left of a file system; what gives it back."""
    filler = f"{directory}/filler"
    box.try_("dd", "if=/dev/zero", f"of={filler}", "bs=4k")
    return lambda: box.run("rm", filler)


def doctor(box: Box) -> str:
    return box.try_(f"{BINARIES}/kvd-ctl", "doctor", "--config", CONFIGURATION).stdout


def checkpoint(box: Box) -> str:
    """Have all saved; why that cannot be."""
    return box.try_(f"{BINARIES}/kvd-ctl", "checkpoint").stderr


def test_where_memory_is_full_its_start_says_so_and_later_it_starts(stopped: Box) -> None:
    make_room = fill(stopped, "/dev/shm")
    assert stopped.try_("systemctl", "start", "kvd.service").returncode != 0
    log = stopped.run("journalctl", "--unit=kvd", "--output=cat")
    assert "kvd: no room for /dev/shm/kvd/header: No space left on device" in log
    assert "others have filled it" in doctor(stopped)
    make_room()
    stopped.run("systemctl", "reset-failed")
    # One that began before there was room may be under way still.
    eventually(lambda: stopped.try_("systemctl", "start", "kvd.service").returncode == 0)
    stopped.engine(STORE)


def test_where_memory_became_full_it_serves_what_it_had(stopped: Box) -> None:
    stopped.run("systemctl", "start", "kvd.service")
    stopped.engine(STORE)
    make_room = fill(stopped, "/dev/shm")
    stopped.run("systemctl", "restart", "kvd.service")
    assert stopped.engine(MATCH) == ALL
    make_room()


def test_where_the_volume_is_full_it_serves_and_later_saves(small_volume: Box) -> None:
    make_room = fill(small_volume, DATA)
    small_volume.run("systemctl", "start", "kvd.service")
    small_volume.engine(STORE)
    assert small_volume.engine(MATCH) == ALL
    assert "No space left on device" in checkpoint(small_volume)
    assert "-> make room" in doctor(small_volume)
    make_room()
    eventually(lambda: not checkpoint(small_volume))


@pytest.fixture
def limit(box: Box) -> str:
    """What the kernel holds the slice to, in bytes, is in this file."""
    box.run("systemctl", "start", "kvd.service")
    if box.try_("test", "-e", f"{SLICE}/memory.limit_in_bytes").returncode:
        pytest.skip("this kernel has no limits of memory on cgroup v1")
    return f"{SLICE}/memory.limit_in_bytes"


def test_its_memory_counts_in_its_slice_also_while_it_is_stopped(stopped: Box, limit: str) -> None:
    stopped.engine(STORE)
    stopped.run("systemctl", "stop", "kvd.socket")
    taken = int(stopped.run("du", "--summarize", "--block-size=1", "/dev/shm/kvd").split()[0])
    assert stopped.run("cat", limit) == stopped.show("MemoryMax", "kvd.slice")
    assert int(stopped.run("cat", f"{SLICE}/memory.usage_in_bytes")) >= taken


@pytest.mark.usefixtures("stopped")
def test_a_limit_that_its_memory_would_pass_is_said(box: Box, limit: str) -> None:
    box.run("systemctl", "set-property", "--runtime", "kvd.slice", "MemoryMax=100M")
    said = doctor(box)
    box.run("systemctl", "revert", "kvd.slice")
    assert "bad  memory limit: 100MiB; memory tiers have 128MiB" in said
    assert f"-> raise {limit}, or lower capacity_bytes" in said
