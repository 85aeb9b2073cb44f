"""The container's recipe, followed in a box whose /dev/shm is as small as a container's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.support import eventually
from tests.systemd.conftest import ALL, BINARIES, MATCH, PROLOGUE, PYTHON, ROOT, STORE, Box

if TYPE_CHECKING:
    import subprocess

BOX_OPTIONS = ("--shm-size", "64m")
UNIT = "container.service"
# As OPERATING.md has it made before; and where an image has what pip installed.
PREPARE = f"""
install -d -o 1000 -g 1000 -m 0750 /dev/shm/kvd
ln -sf {BINARIES}/kvd* /usr/local/bin
"""

RECIPE = (ROOT / "config/Dockerfile").read_text()
(MAKE_PLACES,) = re.findall(r"^RUN (install .*)$", RECIPE, re.MULTILINE)
(USER,) = re.findall(r"^USER (\d+):\d+$", RECIPE, re.MULTILINE)
ENVIRONMENT = re.findall(r"^ENV (.*)$", RECIPE, re.MULTILINE)
(CHECK,) = map(json.loads, re.findall(r"^HEALTHCHECK .*CMD (.*)$", RECIPE, re.MULTILINE))
(COMMAND,) = map(json.loads, re.findall(r"^CMD (.*)$", RECIPE, re.MULTILINE))


def inside(*command: str) -> list[str]:
    """How root has a command run as the container's user, in its environment."""
    options = [f"--setenv={each}" for each in ENVIRONMENT]
    return ["systemd-run", "--quiet", f"--uid={USER}", f"--gid={USER}", *options, *command]


def run(box: Box, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command beside the daemon, as `docker exec` does."""
    return box.try_(*inside("--pipe", "--wait", *command))


@pytest.fixture
def container(box: Box) -> Iterator[Box]:
    """What the recipe makes, while it runs."""
    box.run("sh", "-c", f"{PREPARE}\n{MAKE_PLACES}")
    box.run(*inside(f"--unit={UNIT}", *COMMAND))
    eventually(lambda: run(box, *CHECK).returncode == 0)
    yield box
    box.run("systemctl", "stop", UNIT)


def test_a_container_keeps_what_is_cached_for_the_next(container: Box) -> None:
    assert run(container, PYTHON, "-c", PROLOGUE + STORE).returncode == 0
    container.run("systemctl", "stop", UNIT)
    assert run(container, *CHECK).returncode == 1
    container.run(*inside(f"--unit={UNIT}", *COMMAND))
    assert run(container, PYTHON, "-c", PROLOGUE + MATCH).stdout.strip() == ALL


def test_it_says_that_its_memory_is_small(container: Box) -> None:
    assert "gives only 16MiB: enlarge its file system (containers: --shm-size)" in container.run(
        "journalctl", "--unit", UNIT
    )
    done = run(container, "kvd-ctl", "doctor")
    assert "-> it is small: --shm-size=8g in a container" in done.stdout
    assert done.returncode == 0


def test_it_runs_as_the_user_of_its_directories_alone(container: Box) -> None:
    places = ["/dev/shm/kvd", "/run/kvd", "/var/lib/kvd"]
    assert set(container.run("find", *places, "-printf", "%U:%G\n").split()) == {f"{USER}:{USER}"}
    assert container.run("find", *places, "-perm", "/o=rwx") == ""
