"""Real files on a tmpfs, and real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.testing.places import own_place

if TYPE_CHECKING:
    from signal import Signals

ROOT = Path(__file__).parents[2]
# Printed lines leave the process at once and whole, also where it forks.
WHOLE_LINES = "import sys; sys.stdout.reconfigure(line_buffering=True)\n"
# What a program does that forks instead of waiting: its child waits.
FORK = """
if os.fork() == 0:
    print('forked')
    input()
    os._exit(0)
os.waitpid(-1, 0)"""


@pytest.fixture
def shm() -> Iterator[Path]:
    """A private directory on /dev/shm."""
    with own_place() as directory:
        yield directory


@pytest.fixture
def mount(shm: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a tmpfs of its own: `mount("size=1m")` is its directory."""
    mounted: list[Path] = []

    def mount(options: str, name: str = "mounted") -> Path:
        directory = shm / name
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(directory)]
        if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
            pytest.skip(f"cannot mount a tmpfs with {options}: {done.stderr.strip()}")
        mounted.append(directory)
        return directory

    yield mount
    for directory in reversed(mounted):
        subprocess.run(["umount", str(directory)], check=True)


class Child:
    """A process that runs a Python program until it is told to end.

    The program says what it has to say by print, and waits in input().
    """

    def __init__(self, program: str, *args: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WHOLE_LINES + program, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )

    def says(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def rest(self) -> list[str]:
        """All whole lines that it still says, once it has ended."""
        assert self.process.stdout
        lines = self.process.stdout.readlines()
        return [line for line in lines if line.endswith("\n")]

    def tell(self, line: str = "") -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")

    def send(self, number: Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """How it ended, once it has: an exit code, or minus the signal that killed it."""
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts children: `child(program, *args)`; none outlives the test."""
    children: list[Child] = []

    def start(program: str, *args: object) -> Child:
        children.append(Child(program, *args))
        return children[-1]

    yield start
    for one in children:
        one.close()
