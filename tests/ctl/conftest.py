"""One daemon for the tests of a module, and `kvd-ctl` here or in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from typer.testing import CliRunner

from kvd_client import Client
from kvd_ctl.__main__ import app
from tests.e2e.support import IDENTITY, LAYOUT, faultless_daemon, settings

if TYPE_CHECKING:
    from click.testing import Result

    from kvd.testing.daemons import RunningDaemon
    from kvd_client import Namespace

Done: TypeAlias = subprocess.CompletedProcess[str]


def run(*args: object, stdin: str = "", **environment: str) -> Done:
    """`kvd-ctl` without a terminal; it hangs if it does not end within a minute."""
    return subprocess.run(
        [sys.executable, "-m", "kvd_ctl", *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


def run_here(*args: object, stdin: str = "", **environment: str) -> Result:
    """`kvd-ctl` in this process, which need not import it again."""
    return CliRunner().invoke(app, [*map(str, args)], input=stdin, env=environment)


def run_on_terminal(*args: object, answer: str = "", **environment: str) -> tuple[int, str]:
    """`kvd-ctl` on a terminal of 80 columns, where somebody types: its exit status and output."""
    ours, its = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvd_ctl", *map(str, args)],
        stdin=its,
        stdout=its,
        stderr=its,
        env=os.environ | {"TERM": "dumb", "COLUMNS": "80", "LINES": "24"} | environment,
    )
    os.close(its)
    os.write(ours, answer.encode())
    output = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    return process.wait(), output.decode().replace("\r\n", "\n")


def complaint(done: Done) -> str:
    """The one line of a command that failed."""
    assert (done.returncode, done.stdout) == (1, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvd-ctl: ")
    return line


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # so ends a terminal that nobody has open any more
        return b""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with faultless_daemon(settings()) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout=30.0, name="engine") as client:
        assert client.wait_attached(30.0)
        yield client


@pytest.fixture
def namespace(client: Client, request: pytest.FixtureRequest) -> Namespace:
    """This test's own, with the name of the test as its salt."""
    return client.open(IDENTITY, LAYOUT, salt=request.node.name)


@pytest.fixture
def ctl(daemon: RunningDaemon) -> Callable[..., str]:
    """`kvd-ctl` on this daemon, which succeeds: what it prints."""

    def ctl(*args: object, stdin: str = "") -> str:
        done = run_here(*args, "--timeout", 30, stdin=stdin, KVD_ENDPOINT=daemon.endpoint)
        assert (done.exit_code, done.stderr) == (0, ""), done
        return done.stdout

    return ctl


@pytest.fixture
def ask(ctl: Callable[..., str]) -> Callable[..., Any]:
    """The same with --json, as values."""
    return lambda *args, **options: json.loads(ctl(*args, "--json", **options))
