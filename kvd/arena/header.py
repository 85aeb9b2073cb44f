"""The shared header: the daemon's epoch and a generation per lease slot, for checking after use.

The daemon alone writes it; clients map it read-only. It is one file for the life of a directory, so
that a client of an earlier daemon sees the next one's epoch in the mapping it already has.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

from kvd.protocol.errors import KvdError

MAGIC = 0x3144_4545_4844_564B  # "KVDHEED1"
NUM_SLOTS = 1 << 16

_MAGIC, _EPOCH, _SLOTS = 0, 1, 2
_SIZE = (_SLOTS + NUM_SLOTS) * 8
# Behind the words, which clients map, stands which header this is.
_IDENTITY_BYTES = 16


class SharedHeader:
    """Words of 8 aligned bytes, which the machine never tears: no lock is needed to read one."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @property
    def epoch(self) -> int:
        return int(self._words[_EPOCH])

    def generation(self, slot: int) -> int:
        return int(self._words[_SLOTS + slot])

    def begin_epoch(self, epoch: int) -> None:
        """From here on every client of an earlier epoch finds its leases void.

        The epoch first: whoever still reads the old one did so before any page was handed out anew,
        and may believe whatever generation it then reads.
        """
        self._words[_EPOCH] = epoch
        self._words[_SLOTS:] = memoryview(bytes(NUM_SLOTS * 8)).cast("Q")

    def set_generation(self, slot: int, generation: int) -> None:
        """Void the lease that had this slot: whoever checks it afterwards finds another value."""
        self._words[_SLOTS + slot] = generation


def header_identity(path: Path) -> bytes:
    """Which header lies there, nothing where there is none.

    Arenas belong to one: clients that map them see by it that a lease is over. Under another header
    they would not, so an arena of another is not adopted.
    """
    try:
        with path.open("rb") as file:
            file.seek(_SIZE)
            return file.read(_IDENTITY_BYTES)
    except OSError:
        return b""


def create_header(path: Path) -> SharedHeader:
    """The daemon's end: the directory's header, kept where there is one already."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        os.fchmod(fd, 0o640)
        os.posix_fallocate(fd, 0, _SIZE)
        if os.fstat(fd).st_size < _SIZE + _IDENTITY_BYTES:
            os.pwrite(fd, secrets.token_bytes(_IDENTITY_BYTES), _SIZE)
        words = memoryview(mmap.mmap(fd, _SIZE)).cast("Q")
    finally:
        os.close(fd)
    words[_MAGIC] = MAGIC
    return SharedHeader(words)


def map_header(path: str) -> SharedHeader:
    """The client's end, read-only."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < _SIZE:
            raise KvdError(f"{path} is too short for a header of {NUM_SLOTS} slots")
        words = memoryview(mmap.mmap(fd, _SIZE, prot=mmap.PROT_READ)).cast("Q")
    finally:
        os.close(fd)
    if words[_MAGIC] != MAGIC:
        raise KvdError(f"{path} is not the header of a kvd that this client knows")
    return SharedHeader(words)
