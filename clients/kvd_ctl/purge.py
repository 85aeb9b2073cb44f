"""`kvd-ctl purge`: what daemons that run no more have left on this machine."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.arena.membership import is_held, lock_unheld
from kvd.protocol.endpoint import socket_path
from kvd_client import format_bytes, to_json
from kvd_ctl import render
from kvd_ctl.notation import format_duration

if TYPE_CHECKING:
    from kvd.config import Config

OWNER_LOCK = "daemon.lock"


@dataclass(frozen=True)
class Leftover:
    """A directory in memory or on disk, or a socket, that no process uses.

    It was last changed `age_seconds` ago. What memory and disk have, the next start would find.
    """

    kind: str
    path: Path
    num_bytes: int
    age_seconds: float


def find_leftovers(config: Config) -> list[Leftover]:
    """What there is beside the places of a configuration; of a place that it names, that alone."""
    memory, disk = config.resolved_directory, config.resolved_data_directory
    found = [
        Leftover("memory", path, *_size(path))
        for path in ([memory] if config.directory else _ours_in(memory.parent))
        if _is_unused(path)
    ]
    found += [
        Leftover("disk", path, *_size(path))
        for path in ([disk] if config.data_directory else _ours_in(disk.parent))
        if _is_unused(path)
    ]
    endpoint = socket_path(config.resolved_endpoint)
    if _is_stale(endpoint):
        found.append(Leftover("socket", endpoint, 0, time.time() - endpoint.stat().st_mtime))
    return found


def tell_leftovers(found: Sequence[Leftover]) -> None:
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


def remove_leftovers(found: Sequence[Leftover], *, dry_run: bool, as_json: bool) -> bool:
    """Remove them, in a `dry_run` none; whether all that were to go are gone.

    Those stay that somebody uses by now, or that cannot be removed.
    """
    removed = [one for one in found if not dry_run and _remove(one)]
    if as_json:
        listed = [_plain(one) | {"is_removed": one in removed} for one in found]
        print(to_json({"leftovers": listed}))
    elif removed:
        size = format_bytes(sum(one.num_bytes for one in removed))
        render.console.print(f"removed: {len(removed)} of {len(found)}, {size}")
    return dry_run or removed == list(found)


def _plain(leftover: Leftover) -> dict[str, object]:
    return asdict(leftover) | {"path": str(leftover.path)}


def _remove(leftover: Leftover) -> bool:
    if leftover.kind == "socket":
        if is_stale := _is_stale(leftover.path):
            leftover.path.unlink(missing_ok=True)
        return is_stale
    with _locked(leftover.path) as is_unused, suppress(OSError):
        if is_unused:
            # Whoever starts meanwhile finds nothing there, and no half of it.
            gone = leftover.path.with_name(f"{leftover.path.name}.purged-{os.getpid()}")
            leftover.path.rename(gone)
            shutil.rmtree(gone)
            return True
    return False


def _ours_in(parent: Path) -> list[Path]:
    """Directories of daemons, in a place where there is nothing else."""
    if not parent.is_dir() or parent.stat().st_uid != os.geteuid():
        return []
    return sorted(path.parent for path in parent.glob(f"*/{OWNER_LOCK}"))


def _is_unused(directory: Path) -> bool:
    with _locked(directory) as is_unused:
        return is_unused


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Have no daemon start with a directory and no client map it; False where one has already."""
    with ExitStack() as locks:
        for path in (directory / OWNER_LOCK, *directory.glob("*.session")):
            if (fd := lock_unheld(path)) is None:
                yield False
                return
            locks.callback(os.close, fd)
        yield True


def _is_stale(path: Path) -> bool:
    """Whether a socket has neither a daemon nor anything else that listens."""
    lock = path.with_name(f"{path.name}.lock")
    if not path.is_socket() or (lock.exists() and is_held(lock)):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def _size(directory: Path) -> tuple[int, float]:
    """The bytes that it really takes, and the seconds since anything there was changed."""
    stats = [path.lstat() for path in (directory, *directory.rglob("*"))]
    num_bytes = sum(stat.st_blocks for stat in stats) * 512
    return num_bytes, time.time() - max(stat.st_mtime for stat in stats)
