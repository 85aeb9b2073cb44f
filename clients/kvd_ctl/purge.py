"""`kvd-ctl purge`: what daemons that run no more have left on this machine."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.arena.membership import lock_unheld
from kvd.arena.owner import OWNER_LOCK, lock_of
from kvd.protocol.endpoint import connected, socket_path
from kvd_client import format_bytes, to_json
from kvd_ctl import render
from kvd_ctl.notation import format_duration

if TYPE_CHECKING:
    from kvd.config import Config


@dataclass(frozen=True)
class Leftover:
    """A directory in memory or on disk, or a socket, that no process uses.

    It was last changed `age_seconds` ago. What memory and disk have, the next start would find.
    """

    kind: str
    path: Path
    num_bytes: int
    age_seconds: float


def find_leftovers(configs: Iterable[Config]) -> list[Leftover]:
    """What there is beside the places of configurations; of a place that one names, that alone."""
    places: dict[Path, str] = {}
    for config in configs:
        memory, disk = config.resolved_directory, config.resolved_data_directory
        places |= dict.fromkeys([memory] if config.directory else _ours_in(memory.parent), "memory")
        places |= dict.fromkeys([disk] if config.data_directory else _ours_in(disk.parent), "disk")
        endpoints = config.endpoints.values()
        sockets = [socket_path(each) for each in endpoints if each.startswith("ipc://")]
        places |= dict.fromkeys(sockets, "socket")
    return [
        Leftover(kind, path, *_size(path))
        for path, kind in places.items()
        if _is_unused(kind, path)
    ]


def tell_leftovers(source: str, found: Sequence[Leftover]) -> None:
    render.console.print(f"places: {source}")
    rows = [
        {
            "kind": one.kind,
            "path": str(one.path),
            "bytes": format_bytes(one.num_bytes),
            "age": format_duration(one.age_seconds),
        }
        for one in found
    ]
    render.table("nobody uses", rows)
    if found:
        render.console.print(f"in all: {len(found)}, {_total(found)}")


def remove_leftovers(found: Sequence[Leftover], *, dry_run: bool, as_json: bool) -> bool:
    """Remove them, in a `dry_run` none; whether all that were to go are gone.

    Those stay that somebody uses by now, or that cannot be removed.
    """
    removed = [one for one in found if not dry_run and _remove(one)]
    if as_json:
        listed = [_plain(one) | {"is_removed": one in removed} for one in found]
        print(to_json({"leftovers": listed}))
    elif removed:
        render.console.print(f"removed: {len(removed)} of {len(found)}, {_total(removed)}")
    return dry_run or removed == list(found)


def _total(leftovers: Iterable[Leftover]) -> str:
    return format_bytes(sum(one.num_bytes for one in leftovers))


def _plain(leftover: Leftover) -> dict[str, object]:
    return asdict(leftover) | {"path": str(leftover.path)}


def _remove(leftover: Leftover) -> bool:
    path = leftover.path
    with _guarded(leftover.kind, path) as is_unused, suppress(OSError):
        if is_unused and leftover.kind == "socket":
            path.unlink()
            return True
        if is_unused:
            # Whoever starts meanwhile finds nothing there, and no half of it.
            gone = path.with_name(f"{path.name}.purged-{os.getpid()}")
            path.rename(gone)
            shutil.rmtree(gone)
            return True
    return False


def _ours_in(parent: Path) -> list[Path]:
    """Directories of daemons, in a place where there is nothing else."""
    if not parent.is_dir() or parent.stat().st_uid != os.geteuid():
        return []
    return sorted(path.parent for path in parent.glob(f"*/{OWNER_LOCK}"))


def _is_unused(kind: str, path: Path) -> bool:
    with _guarded(kind, path) as is_unused:
        return is_unused


def _guarded(kind: str, path: Path) -> AbstractContextManager[bool]:
    """Have no daemon begin to use it; False where one does already, or somebody else."""
    return _guarded_socket(path) if kind == "socket" else _guarded_directory(path)


@contextmanager
def _guarded_directory(path: Path) -> Iterator[bool]:
    with ExitStack() as locks:
        yield _lock_all((path / OWNER_LOCK, *path.glob("*.session")), locks)


@contextmanager
def _guarded_socket(path: Path) -> Iterator[bool]:
    there = [lock for lock in [lock_of(path)] if lock.exists()]
    with ExitStack() as locks:
        yield path.is_socket() and _lock_all(there, locks) and _refuses(path)


def _lock_all(paths: Iterable[Path], locks: ExitStack) -> bool:
    """Lock them against who owns or maps; False where somebody does."""
    for path in paths:
        if (fd := lock_unheld(path)) is None:
            return False
        locks.callback(os.close, fd)
    return True


def _refuses(path: Path) -> bool:
    try:
        with connected(f"ipc://{path}"):
            return False
    except OSError as error:
        return error.errno == errno.ECONNREFUSED


def _size(directory: Path) -> tuple[int, float]:
    """The bytes that it really takes, and the seconds since anything there was changed."""
    stats = [path.lstat() for path in (directory, *directory.rglob("*"))]
    num_bytes = sum(stat.st_blocks for stat in stats) * 512
    return num_bytes, time.time() - max(stat.st_mtime for stat in stats)
