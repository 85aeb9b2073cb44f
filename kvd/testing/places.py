"""own_place(): a folder in shared memory that a test has for itself, for as long as it lives.

It is held by a kernel lock on the folder, so that what a killed run left is known by nobody
holding it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "kvd-testing-"


def shared_memory() -> Path:
    """Where the places are."""
    return Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())


@contextmanager
def own_place() -> Iterator[Path]:
    """A folder that nobody else uses; everything in it is removed at the end."""
    new = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}", dir=shared_memory()))
    with held(new):
        place = new.rename(new.with_name(new.name.removeprefix("new-")))  # never seen unheld
        try:
            yield place
        finally:
            shutil.rmtree(place)


@contextmanager
def held(place: Path) -> Iterator[None]:
    """Holds a place; raises BlockingIOError where somebody else does."""
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(folder)
