"""One owner per endpoint and per directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.arena.owner import OwnerLock, private_directory
from kvd.protocol.errors import AlreadyRunning, ConfigError
from tests.arena.conftest import FORK

if TYPE_CHECKING:
    from tests.arena.conftest import Child

OWN = """
import os, sys
from pathlib import Path
from kvd.arena.owner import OwnerLock
lock = OwnerLock(Path(sys.argv[1]), "it")
print(os.getpid())
input()
"""


def test_the_second_owner_is_told_who_the_first_is(shm: Path) -> None:
    with_lock = OwnerLock(shm / "lock", "the directory")
    with pytest.raises(AlreadyRunning, match=rf"pid {os.getpid()}\) owns the directory"):
        OwnerLock(shm / "lock", "the directory")
    with_lock.close()


def test_a_closed_lock_may_be_taken_again(shm: Path) -> None:
    for _ in range(2):
        lock = OwnerLock(shm / "lock", "it")
        lock.close()
        lock.close()


def test_a_killed_owner_owns_nothing(shm: Path, child: Callable[..., Child]) -> None:
    owner = child(OWN, shm / "lock")
    pid = owner.says()
    with pytest.raises(AlreadyRunning, match=pid):
        OwnerLock(shm / "lock", "it")
    owner.send(signal.SIGKILL)
    owner.ended()
    OwnerLock(shm / "lock", "it").close()


def test_a_stopped_owner_is_still_the_owner(shm: Path, child: Callable[..., Child]) -> None:
    owner = child(OWN, shm / "lock")
    owner.says()
    owner.send(signal.SIGSTOP)
    os.waitpid(owner.process.pid, os.WUNTRACED)
    with pytest.raises(AlreadyRunning):
        OwnerLock(shm / "lock", "it")


def test_a_forked_child_does_not_own_what_its_parent_did(
    shm: Path, child: Callable[..., Child]
) -> None:
    program = OWN.replace("input()", FORK)
    owner = child(program, shm / "lock")
    owner.says()
    assert owner.says() == "forked"
    owner.send(signal.SIGKILL)
    owner.ended()
    OwnerLock(shm / "lock", "it").close()


def test_a_refused_owner_leaves_no_descriptor(shm: Path) -> None:
    lock = OwnerLock(shm / "lock", "it")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AlreadyRunning):
        OwnerLock(shm / "lock", "it")
    assert len(os.listdir("/proc/self/fd")) == before
    lock.close()


def test_on_a_full_volume_a_lock_is_one_that_does_not_tell_whose(
    mount: Callable[..., Path],
) -> None:
    volume = mount("size=16k,nr_inodes=100")
    with open(volume / "all of it", "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with closing(OwnerLock(volume / "lock", "it")), pytest.raises(AlreadyRunning, match=r"pid \?"):
        OwnerLock(volume / "lock", "it")


def test_a_private_directory_is_made_with_its_parents(shm: Path) -> None:
    private_directory(shm / "a/b", 0o700)
    private_directory(shm / "a/b", 0o700)
    assert (shm / "a/b").stat().st_mode & 0o777 == 0o700


def test_a_directory_behind_a_link_is_refused(shm: Path) -> None:
    (shm / "real").mkdir()
    (shm / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="link"):
        private_directory(shm / "link")


def test_a_file_in_its_place_is_refused(shm: Path) -> None:
    (shm / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        private_directory(shm / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(shm: Path) -> None:
    (shm / "theirs").mkdir()
    os.chown(shm / "theirs", 65534, 65534)
    with pytest.raises(ConfigError, match="theirs"):
        private_directory(shm / "theirs")
