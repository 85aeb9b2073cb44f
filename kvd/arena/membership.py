"""Membership: which processes may still hold an arena, told by a lock and not by a pid.

Each process that maps an arena first takes a shared lock on its session's file and keeps it for as
long as any of its mappings lives. The daemon ends what the session held only once it gets the lock
exclusively. The kernel gives it up when the last holder is gone, whether by exit, SIGKILL or a
crash, and keeps it while a process is merely stopped; it needs no pid namespace in common.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import Protocol

from kvd.protocol.errors import LeaseEnded


class SessionLock:
    """A process's shared lock on its session's file; freed with the last reference.

    A forked child does not inherit the mappings (MADV_DONTFORK), so it must not keep the lock
    either: its descriptors are closed at fork.
    """

    def __init__(self, path: str) -> None:
        """Raises LeaseEnded where the session is over."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise LeaseEnded(f"the session of {path} is over") from error
        if not _lock_shared(self._fd) or os.fstat(self._fd).st_nlink == 0:
            self.close()
            raise LeaseEnded(f"the session of {path} is over")
        close_in_child(self)

    @property
    def is_held(self) -> bool:
        return self._fd >= 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


def _lock_shared(fd: int) -> bool:
    """Take the lock. The daemon holds it for an instant when it looks: then try again, but never
    wait, for a daemon stopped at that instant must not stop its clients."""
    for _ in range(50):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
        else:
            return True
    return False


class _Closing(Protocol):
    def close(self) -> None: ...


_held: weakref.WeakSet[_Closing] = weakref.WeakSet()


def close_in_child(lock: _Closing) -> None:
    """Close a lock in every forked child: it shares the descriptor, and would hold the lock on."""
    _held.add(lock)


def _close_all() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_all)


def create_session_file(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    os.fchmod(fd, 0o640)
    os.close(fd)


def is_held(path: Path) -> bool:
    """Whether any process still holds the session's lock."""
    if (fd := lock_unheld(path)) is not None:
        os.close(fd)
    return fd is None


def lock_unheld(path: Path) -> int | None:
    """Lock the session's file against everybody: a descriptor for `remove_locked`.

    None while a process holds it. Until it is removed a session can be found over again: what it
    held must be freed before, or a daemon killed between would never learn that it may.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # Somebody else removed it, or it cannot be opened now: the processes may live.
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def remove_locked(path: Path, fd: int) -> None:
    """Remove a locked session's file, and unlock it.

    It is unlinked while the lock is held, and a process that opened it before finds it without a
    link afterwards: nobody joins a session that is over.
    """
    path.unlink(missing_ok=True)
    os.close(fd)
