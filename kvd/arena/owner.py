"""One owner per endpoint and per directory, held by a lock on a file.

ZeroMQ lets a second process bind the same ipc path silently; this does not.
"""

from __future__ import annotations

import fcntl
import grp
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from kvd.arena.files import existing
from kvd.arena.membership import close_in_child
from kvd.protocol.errors import AlreadyRunning, ConfigError

# Of a directory; a socket's stands beside it.
OWNER_LOCK = "daemon.lock"


def lock_of(socket: Path) -> Path:
    return socket.with_name(f"{socket.name}.lock")


class OwnerLock:
    """An exclusive lock for as long as its owner lives; the kernel frees it with the process."""

    def __init__(self, path: Path, what: str) -> None:
        """Raises AlreadyRunning where somebody else owns `what`, ConfigError."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(f"{path} cannot be used as a lock: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            if owner == str(os.getpid()):
                why = f"this kvd (pid {owner}) owns {what} already: each of two needs its own"
            else:
                why = f"another kvd (pid {owner or '?'}) owns {what}"
            raise AlreadyRunning(why) from error
        close_in_child(self)
        with suppress(OSError):  # where a volume is full: the lock counts, this only tells of it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def make_directory(path: Path, mode: int) -> bool:
    """Make a directory where there is nothing yet, and say so; raises ConfigError."""
    try:
        path.mkdir(mode=mode, parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}") from error
    return True


def private_directory(path: Path, mode: int = 0o750) -> None:
    """Make a directory of our own; refuses one that somebody else made (ConfigError)."""
    make_directory(path, mode)
    _check_ours(path)


def check_private(path: Path) -> None:
    """Refuse where no directory of our own is or can be, as far as that shows (ConfigError)."""
    if os.path.lexists(path):
        _check_ours(path)
    check_place(path)


def _check_ours(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is no directory")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to user {found.st_uid}, and this is {os.geteuid()}")


def check_place(path: Path) -> None:
    """Refuse what can be neither written nor made, as far as that shows (ConfigError)."""
    try:
        found = existing(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}") from error
    if found != path and not found.is_dir():
        raise ConfigError(f"{path} cannot be made: {found} is no directory")
    if not os.access(found, os.W_OK):
        raise ConfigError(f"{path} cannot be used: user {os.geteuid()} may not write to {found}")


def check_group(group: str) -> None:
    """Refuse one that there is not, or to which we may give nothing (ConfigError)."""
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ConfigError(f"there is no group {group!r}: set ipc.group") from error
    if os.geteuid() and number not in (os.getegid(), *os.getgroups()):
        raise ConfigError(f"user {os.geteuid()} is not in group {group!r}: set ipc.group")


def give(path: Path, group: str) -> None:
    """Give a path of ours to a group that there is; raises ConfigError."""
    try:
        shutil.chown(path, group=group)
    except OSError as error:
        raise ConfigError(f"{path} cannot be given to group {group!r}: {error.strerror}") from error


def share(path: Path, group: str, mode: int) -> None:
    """Give a path of ours to a group, unless that is empty, and set its mode."""
    if group:
        give(path, group)
    path.chmod(mode)
