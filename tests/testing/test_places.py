"""A place of one's own, and what becomes of those of runs that were killed."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.testing.places import held, own_place
from tests.arena.conftest import child  # noqa: F401 - a fixture
from tests.e2e.support import PATIENCE_SECONDS
from tests.leftovers import remove_leftovers

if TYPE_CHECKING:
    from tests.arena.conftest import Child

DAEMON = """
from kvd.testing.daemons import running_daemon
with running_daemon() as daemon:
    print(daemon.base)
    print(daemon.pid)
    input()
"""
MOUNT = """
import subprocess
from kvd.testing.places import own_place
with own_place() as place:
    (place / "mounted").mkdir()
    print(place)
    print(subprocess.call(["mount", "-t", "tmpfs", "none", place / "mounted"]))
    input()
"""


def test_a_place_is_there_for_as_long_as_it_is_used() -> None:
    with own_place() as place:
        (place / "full").mkdir()
    assert not place.exists()


def test_a_place_that_is_held_is_left_alone() -> None:
    with own_place() as place:
        with pytest.raises(BlockingIOError), held(place):
            pass
        remove_leftovers()
        assert place.is_dir()


def test_the_place_of_a_run_that_was_killed_goes_with_its_daemon(
    child: Callable[..., Child],  # noqa: F811
) -> None:
    run = child(DAEMON)
    place, daemon = Path(run.says()), os.pidfd_open(int(run.says()))
    run.send(signal.SIGKILL)
    run.ended()
    remove_leftovers()
    assert not place.exists()
    assert select.select([daemon], [], [], PATIENCE_SECONDS) == ([daemon], [], [])
    os.close(daemon)


def test_what_a_killed_run_mounted_goes_too(child: Callable[..., Child]) -> None:  # noqa: F811
    run = child(MOUNT)
    place, status = Path(run.says()), int(run.says())
    if status:
        pytest.skip("cannot mount a tmpfs")
    run.send(signal.SIGKILL)
    run.ended()
    remove_leftovers()
    assert not place.exists()
