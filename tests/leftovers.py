"""Leftovers: what a run of the tests that was killed could not remove itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvd.testing.places import PREFIX, held, shared_memory


def remove_leftovers() -> None:
    """End the processes of places that nobody holds, unmount what is in them and remove them."""
    for place in shared_memory().glob(f"{PREFIX}*"):
        with suppress(OSError), held(place):  # else somebody uses it, or it is another user's
            for pid in _processes_of(place):
                os.kill(pid, signal.SIGKILL)
            for mounted in _mounted_in(place):
                subprocess.run(["umount", "--lazy", mounted])
            shutil.rmtree(place)


def _processes_of(place: Path) -> Iterator[int]:
    """Which were started with a path in there."""
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            if os.fsencode(f"{place}/") in arguments.read_bytes():
                yield int(arguments.parent.name)


def _mounted_in(place: Path) -> list[str]:
    """The last first."""
    paths = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [path for path in reversed(paths) if path.startswith(f"{place}/")]
