"""Files that outlive the daemon: made anew, or found as an earlier one left them."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from kvd.protocol.errors import TierFailed


def boot_id() -> bytes:
    """Which start of the machine this is: what was in its memory before, is not now. 16 bytes."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def existing(path: Path) -> Path:
    """The path, or the nearest above it that is there; raises OSError where that is not told."""
    return next(one for one in (path, *path.parents) if one.exists())


def make_file(path: Path, size: int, mode: int, backed_bytes: int = 0) -> int:
    """A descriptor of a new, sparse file with memory for its head; raises OSError.

    `mode` holds whatever the umask.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
        if backed_bytes:
            os.posix_fallocate(fd, 0, backed_bytes)
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        path.unlink()
        raise
    return fd


def replace_file(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """Whoever reads the file finds what it says now or what it said before.

    Of a `lasting` one that is so after a power loss, too; which of both, `sync_directory` settles.
    Raises OSError, which names a file.
    """
    new = path.with_name(path.name + ".new")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        new.rename(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # of a full disk it has none
        raise


def sync_directory(path: Path) -> None:
    """Have what was renamed and removed there survive a power loss; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_ours(path: Path) -> int:
    """A descriptor of a file that belongs to us; raises OSError, TierFailed."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise TierFailed(f"{path} is not a file that belongs to user {os.geteuid()}")


def find_file(path: Path, size: int) -> int:
    """A descriptor of a file of ours that has this size; raises OSError, TierFailed."""
    fd = open_ours(path)
    if (found := os.fstat(fd).st_size) == size:
        return fd
    os.close(fd)
    raise TierFailed(f"{path} has {found} bytes and not {size}")


def data_ranges(fd: int, start: int) -> Iterator[tuple[int, int]]:
    """Where a file has data, from a place on; what lies between reads as zeros."""
    stop = start
    while True:
        try:
            start = os.lseek(fd, stop, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        stop = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, stop
