"""The files of the LMDB tier: what they take of its volume, what is said beside an environment."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

import msgspec

from kvd.arena.files import replace_file, sync_directory
from kvd.protocol.errors import TierFailed, TierFull
from kvd.protocol.layout import Layout
from kvd.protocol.units import format_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

VERSION = 1
DATA = "data.mdb"
DESCRIPTION = "layout.json"
MARK = "mark.json"
LOCK = "lock.mdb"
FOLDER = "layout-" + "[0-9a-f]" * 16  # what is called otherwise is not ours
ASIDE = ".aside"
# Of the capacity: for the small files beside the data, and what the file system adds to them.
SMALL_FILES_BYTES = 256 << 10
STEP_BYTES = 1 << 20  # by which files grow at least
# One part in so many is headroom; besides, each environment needs some however small it is.
HEADROOM_SHARE = 16
ENVIRONMENT_BYTES = 1 << 20
SCARCE_SHARE = 8  # room is scarce when less than one part in so many of the capacity is left
SPARE_SHARE = 64  # of the capacity, one part in so many is left for an environment that may come
NEW_BYTES = 384 << 10  # and so much that it can be made at all
ZEROS = bytes(4 << 20)
MEMORY = Path("/dev/shm")
# Their reserved and written blocks stay theirs. Elsewhere (btrfs, network file systems) a write to
# a mapped page may still need room, and a full volume is then SIGBUS.
MAPPED_WRITES = {"ext4", "xfs", "tmpfs"}


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an environment holds; written last when one is made."""

    version: int
    layout: Layout
    data_bytes: int


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether an environment was left whole; else since which start of the machine it is written.

    `synced` says whether its transactions survive the machine's end.
    """

    clean: bool
    boot: str  # in hexadecimal
    synced: bool


class Damaged(TierFailed):
    """What lies there is not what was written: it will be of no use at any other start either."""


# --- small files ---


def write_durably(path: Path, value: msgspec.Struct) -> None:
    """Replace a file; when it returns, the new one is there after a power loss. Raises TierFailed.

    Until then the old one is: it is never read torn.
    """
    try:
        replace_file(path, msgspec.json.encode(value), lasting=True)
        sync_directory(path.parent)
    except OSError as error:
        raise volume_error(error, f"{path} cannot be written") from error


def read_description(folder: Path) -> Description:
    """Raises Damaged, saying why what lies there is of no use, and TierFailed."""
    version = _read(folder / DESCRIPTION, _Versioned).version
    if version != VERSION:
        raise Damaged(f"its format has version {version}, not {VERSION}")
    return _read(folder / DESCRIPTION, Description)


def read_mark(folder: Path) -> Mark:
    """Raises Damaged and TierFailed."""
    return _read(folder / MARK, Mark)


class _Versioned(msgspec.Struct, frozen=True):
    version: int


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.MsgspecError) as error:
        raise Damaged(f"its {path.name} cannot be read: {error}") from error
    except OSError as error:
        raise volume_error(error, f"{path} cannot be read") from error


def environments(directory: Path) -> list[Path]:
    """The folders of environments; what else lies there, be it called alike, is not ours."""
    return sorted(
        path for path in directory.glob(FOLDER) if path.is_dir() and not path.is_symlink()
    )


def set_aside(folder: Path, why: str) -> None:
    """Move an environment that cannot be used out of the way, until its room is needed."""
    place = folder.with_name(folder.name + ASIDE)
    shutil.rmtree(place, ignore_errors=True)
    folder.rename(place)
    logger.error(
        "reason=store_damaged path=%s is not used and its blocks are forgotten: %s; now %s",
        folder,
        why,
        place,
    )


# --- room ---


class Volume:
    """A directory whose files together never take more than a capacity.

    Of the volume it leaves `floor_bytes` to others. Files grow one after the other, in a thread.
    They never shrink: so each environment is left half of its equal share, and some is left for
    those that may come.
    """

    def __init__(self, directory: Path, capacity_bytes: int, floor_bytes: int) -> None:
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self.floor_bytes = floor_bytes
        self._sizes: dict[Path, int] | None = None
        self._measuring = threading.Lock()
        self._executor = ThreadPoolExecutor(1, "kvd-lmdb-grow")

    def size_of(self, folder: Path) -> int:
        """What a folder takes; 0 for one that is not there."""
        return self._measured().get(folder, 0)

    def changed(self) -> None:
        """Files came, grew or went: they are measured again when it is asked for."""
        with self._measuring:
            self._sizes = None

    def _measured(self) -> dict[Path, int]:
        """What the directory takes, and each folder in it: by a walk, which takes a millisecond.

        The lock: what is measured while a file grows is not what is known after `changed`.
        """
        with self._measuring:
            if self._sizes is None:
                folders = [*environments(self.directory), *self._aside()]
                self._sizes = {path: disk_bytes(path) for path in (self.directory, *folders)}
            return self._sizes

    def _aside(self) -> list[Path]:
        return list(self.directory.glob(FOLDER + ASIDE))

    def begin(self, path: Path, size: int) -> None:
        """Have the file of a new environment grow by what is kept for it. Raises TierFull."""
        self.changed()
        self._executor.submit(self._grow, path, size, size, is_new=True).result()

    def grow(self, path: Path, least: int, most: int) -> Future[int]:
        """Have a file grow by whole pages: while there is much room by `most`; its size then.

        What it has is reserved, so that no write to it needs room any more, and written once, since
        a synced write to blocks that never were takes ten times as long. Raises TierFull where not
        even `least` bytes may be had, TierFailed; the file is as before then.
        """
        return self._executor.submit(self._grow, path, least, most)

    def make_room(self) -> None:
        """Bring what an earlier start left under the capacity, as far as what is set aside does."""
        if self.size_of(self.directory) > self.capacity_bytes:
            self._remove_what_is_aside()

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)

    def _grow(self, path: Path, least: int, most: int, *, is_new: bool = False) -> int:
        much = most + self.capacity_bytes // SCARCE_SHARE
        if self._room < much:
            self._remove_what_is_aside()
        room = self._room if is_new else self.room_of(path.parent)
        if room < much and not is_new:  # others may need it as well
            most = max(least, STEP_BYTES) if least else 0
        size = max(min(room, most), 0)
        size -= size % mmap.PAGESIZE
        if size < least:
            raise TierFull(self._fullness())
        try:
            return _extend(path, size) if size else path.stat().st_size
        except OSError as error:
            raise volume_error(error, f"{format_bytes(size)} more for {path}") from error
        finally:
            self.changed()

    def room_of(self, folder: Path) -> int:
        """How much more an environment may take, since what is set aside may go."""
        share = self._half_share
        others = [size for other, size in self._environments.items() if other != folder]
        kept = NEW_BYTES + sum(max(share - size, 0) for size in others)
        if self.size_of(folder) > (spare := self.capacity_bytes // SPARE_SHARE):
            kept += spare
        aside = sum(map(self.size_of, self._aside()))
        return max(self._room + aside - kept, 0)

    def is_crowded(self, folder: Path) -> bool:
        """Whether an environment lacks room that others have, and not others of the volume."""
        is_small = self.size_of(folder) < self._half_share
        lacks = is_small and self.room_of(folder) < STEP_BYTES
        return lacks and self._room == self._own_room

    @property
    def _environments(self) -> dict[Path, int]:
        sizes = self._measured().items()
        return {path: size for path, size in sizes if fnmatch(path.name, FOLDER)}

    @property
    def _half_share(self) -> int:
        """Half of what each environment had if all had the same."""
        everything = self.size_of(self.directory) + max(self._room, 0)
        return everything // (2 * max(len(self._environments), 1))

    @property
    def _room(self) -> int:
        return min(self._own_room, free_bytes(self.directory) - self.floor_bytes)

    @property
    def _own_room(self) -> int:
        return self.capacity_bytes - SMALL_FILES_BYTES - self.size_of(self.directory)

    def _remove_what_is_aside(self) -> None:
        for folder in self._aside():
            logger.warning("reason=aside_removed path=%s is removed: its room is needed", folder)
            shutil.rmtree(folder, ignore_errors=True)
        self.changed()

    def _fullness(self) -> str:
        taken, free = self.size_of(self.directory), free_bytes(self.directory)
        return (
            f"no room in {self.directory}: its files take {format_bytes(taken)} of "
            f"{format_bytes(self.capacity_bytes)} (capacity_bytes), and {format_bytes(free)} are "
            f"free on the volume, {format_bytes(self.floor_bytes)} of them for others "
            "(free_floor_bytes)"
        )


def usable_of(num_bytes: int, num_environments: int = 1) -> int:
    """What records may take of what environments have: the rest is their headroom.

    It is for what lies broken between records, copies of the index and the list of free pages.
    """
    headroom = num_bytes // HEADROOM_SHARE + num_environments * ENVIRONMENT_BYTES
    return max(num_bytes - headroom, 0)


def _extend(path: Path, size: int) -> int:
    with path.open("r+b", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            os.posix_fallocate(file.fileno(), start, size)
            for offset in range(0, size, len(ZEROS)):
                os.pwrite(file.fileno(), ZEROS[: size - offset], start + offset)
            os.fdatasync(file.fileno())
        except OSError:
            file.truncate(start)
            raise
    return start + size


def reserve(path: Path) -> int:
    """Give a file what it lacks of its own length, as a sparse copy does; its length.

    Raises TierFailed.
    """
    try:
        with path.open("r+b") as file:
            found = os.fstat(file.fileno())
            if found.st_blocks * 512 < found.st_size:
                os.posix_fallocate(file.fileno(), 0, found.st_size)
            return found.st_size
    except OSError as error:
        raise volume_error(error, f"{path} cannot be reserved") from error


def disk_bytes(directory: Path) -> int:
    """What everything in a directory takes on its volume."""
    total = 0
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with suppress(FileNotFoundError):
                total += os.lstat(path).st_blocks * 512
    return total


def free_bytes(directory: Path) -> int:
    """Raises TierFailed."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise volume_error(error, f"{directory} cannot be used") from error
    return found.f_bavail * found.f_frsize


@contextmanager
def lock_in_memory(folder: Path) -> Iterator[None]:
    """Have the lock file that LMDB opens now, and nobody else ever, lie in memory.

    Each read transaction writes there while its thread holds Python's own lock: on a disk that
    hangs, no other thread would go on.
    """
    link = folder / LOCK
    link.unlink(missing_ok=True)
    with NamedTemporaryFile(prefix="kvd-", dir=MEMORY if MEMORY.is_dir() else None) as file:
        link.symlink_to(file.name)
        try:
            yield
        finally:
            link.unlink(missing_ok=True)


def allows_mapped_writes(directory: Path) -> bool:
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2] == number:
            return file_system.split()[0] in MAPPED_WRITES
    return False


def volume_error(error: OSError, what: str) -> TierFailed:
    kind = TierFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else TierFailed
    return kind(f"{what}: {error.strerror or error}")
