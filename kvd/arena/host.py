"""Shared host memory: a sparse file on a tmpfs, backed by extents, mapped by clients.

Never `multiprocessing.shared_memory`: its resource tracker deletes other people's memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.arena.base import Arena, pieces_of, punch
from kvd.arena.files import existing, make_file
from kvd.protocol.errors import KvdError

if TYPE_CHECKING:
    from kvd.arena.membership import SessionLock
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
# madvise holds the GIL: a step of this size keeps other threads waiting for about a millisecond.
POPULATE_STEP = 4 << 20
DEFAULT_CAPACITY = 4 << 30


class HostArena:
    """The daemon's end: the file, its memory given and taken by extents.

    The file has its full length from the start and no memory: posix_fallocate gives it, so that a
    full file system is an error here and never a SIGBUS in a client.
    """

    def __init__(self, path: Path, layout: Layout, num_pages: int, fd: int | None = None) -> None:
        """Over `fd`, a file that is there, else over a new one: for the group, who are clients."""
        self.path = path
        self.layout = layout
        self.num_pages = num_pages
        self._fd = make_file(path, num_pages * layout.page_bytes, 0o660) if fd is None else fd

    @cached_property
    def memory(self) -> Arena:
        """The pages as the daemon itself has them mapped, once it is asked for copies of them."""
        if self._fd < 0:  # whoever comes late would write over what is another's
            raise KvdError("this arena is closed")
        size = self.num_pages * self.layout.page_bytes
        mapping = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED)
        mapping.madvise(mmap.MADV_DONTDUMP)
        return Arena(self.layout, self.num_pages, memoryview(mapping))

    @property
    def backed_bytes(self) -> int:
        """Memory that the file really has."""
        return os.fstat(self._fd).st_blocks * 512

    def back(self, run: Run) -> None:
        """Give memory to whole extents of pages; blocking, about 3 GB/s.

        Raises OSError (ENOSPC) when the file system is full; what was given is taken back then.
        """
        try:
            for piece in pieces_of(self.layout, self.num_pages, run):
                os.posix_fallocate(self._fd, piece.start, len(piece))
        except OSError:
            self.unback(run)
            raise

    def unback(self, run: Run) -> None:
        """Take the memory of whole extents back; nobody may hold these pages."""
        for piece in pieces_of(self.layout, self.num_pages, run):
            punch(self._fd, piece.start, len(piece))

    def close(self) -> None:
        """Leave the file as it is. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.__dict__.pop("memory", None)


class _Mapping(mmap.mmap):
    """A mapping that keeps its process a member: the lock lives as long as any view does.

    A forked child has the object but not the mapping (MADV_DONTFORK): where that was, the child may
    soon have its heap. There the object must never be freed, for it would unmap what it finds.
    """

    lock: SessionLock


_mappings: weakref.WeakSet[_Mapping] = weakref.WeakSet()


def _keep_for_ever() -> None:
    for mapping in list(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_for_ever)


class MappedArena:
    """The client's end: the arena twice, read-only and writable.

    What is matched is read through the one, what is reserved is written through the other, so that
    a stray write through a read view faults instead of damaging a block that others read.
    """

    def __init__(self, path: str, layout: Layout, num_pages: int, lock: SessionLock) -> None:
        size = num_pages * layout.page_bytes
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != size:
                raise KvdError(f"{path} has another size than {num_pages} pages of {layout}")
            self._readable = _map(fd, size, mmap.PROT_READ, lock)
            self._writable = _map(fd, size, mmap.PROT_READ | mmap.PROT_WRITE, lock)
        finally:
            os.close(fd)
        self.layout = layout
        self.num_pages = num_pages
        # A memoryview between: closing the map under a live array is then an error, not a crash.
        self.readable = Arena(layout, num_pages, memoryview(self._readable))

    def writable(self) -> Arena:
        """An arena over the writable mapping, with a root of its own to tell its views by."""
        return Arena(self.layout, self.num_pages, memoryview(self._writable))

    def populate_read(self, run: Run) -> Iterator[None]:
        """Fault pages in, some at each step, so that their first reader does not pay for it."""
        return self._populate(self._readable, run, MADV_POPULATE_READ)

    def populate_write(self, run: Run) -> Iterator[None]:
        """Fault pages in for writing, step by step; only pages that this client reserved."""
        return self._populate(self._writable, run, MADV_POPULATE_WRITE)

    def _populate(self, mapping: mmap.mmap, run: Run, advice: int) -> Iterator[None]:
        for piece in pieces_of(self.layout, self.num_pages, run):
            start = piece.start - piece.start % mmap.PAGESIZE
            for step in range(start, piece.stop, POPULATE_STEP):
                mapping.madvise(advice, step, min(POPULATE_STEP, piece.stop - step))
                yield


def _map(fd: int, size: int, prot: int, lock: SessionLock) -> mmap.mmap:
    mapping = _Mapping(fd, size, flags=mmap.MAP_SHARED, prot=prot)
    mapping.lock = lock
    _mappings.add(mapping)
    mapping.madvise(mmap.MADV_DONTFORK)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def default_capacity(size: int) -> int:
    """What memory takes of a file system of this size where nobody says how much."""
    return min(size // 4, DEFAULT_CAPACITY)


def file_system_bytes(directory: Path) -> int:
    """The size of the file system where a directory is, or will be made."""
    found = os.statvfs(existing(directory))
    return found.f_blocks * found.f_frsize


def huge_page_bytes(directory: Path) -> int:
    """The granule of memory in a directory: a huge page where its tmpfs gives them, else 4 KiB."""
    options = _mount_options(directory)
    if "huge=always" in options or "huge=within_size" in options:
        size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
        if size.exists():
            return int(size.read_text())
    return mmap.PAGESIZE


def _mount_options(directory: Path) -> str:
    """The options of the mount that holds a directory, from /proc/self/mountinfo."""
    best, options = "", ""
    path = str(directory.resolve())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        point = fields[4].encode().decode("unicode_escape")  # a space is written \\040
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, options = point, fields[-1]
    return options
