"""What `kvd-ctl purge` removes: what a dead daemon left, and nothing that somebody uses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.arena.membership import lock_unheld
from kvd.arena.owner import lock_of
from kvd.config import Config
from kvd.protocol.units import format_bytes
from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_ctl.purge import find_leftovers
from tests.ctl.conftest import run_here, run_on_terminal
from tests.e2e.support import IDENTITY, LAYOUT, store, tokens_of, with_store

if TYPE_CHECKING:
    from kvd_client import Client

TOKENS = tokens_of(1, 4)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(with_store()) as daemon:
        yield daemon


@pytest.fixture
def dead(daemon: RunningDaemon) -> RunningDaemon:
    daemon.kill()
    return daemon


def purge(daemon: RunningDaemon, *args: str) -> list[str]:
    """The kinds of what was found, of this daemon's places alone."""
    done = run_here("purge", "--config", daemon.config_path, *args)
    assert (done.exit_code, done.stderr) == (0, "")
    words = [line.split()[0] for line in done.stdout.splitlines()]
    return [word for word in words if word in ("memory", "disk", "socket")]


def places(daemon: RunningDaemon) -> list[Path]:
    socket = Path(daemon.endpoint.removeprefix("ipc://"))
    return [daemon.directory, daemon.data_directory, socket]


def test_of_a_daemon_that_runs_nothing_is_found(daemon: RunningDaemon, client: Client) -> None:
    assert purge(daemon, "--yes") == []
    assert all(place.exists() for place in places(daemon))
    assert client.status().pid == daemon.pid


def test_what_a_dead_daemon_left_is_shown_and_stays_in_a_dry_run(dead: RunningDaemon) -> None:
    assert purge(dead, "--dry-run") == ["memory", "disk", "socket"]
    assert all(place.exists() for place in places(dead))


def test_the_total_is_told(dead: RunningDaemon) -> None:
    asked = ["purge", "--config", dead.config_path, "--dry-run"]
    found = json.loads(run_here(*asked, "--json").stdout)["leftovers"]
    size = format_bytes(sum(one["num_bytes"] for one in found))
    assert f"\nin all: 3, {size}\n" in run_here(*asked).stdout


def test_without_a_file_the_daemon_that_answers_says_its_places(daemon: RunningDaemon) -> None:
    said = run_here("purge", "--endpoint", daemon.endpoint, "--dry-run").stdout
    assert said.startswith(f"places: what kvd, pid {daemon.pid}, says; this user's defaults\n")
    assert str(daemon.directory) not in said


def test_what_a_dead_daemon_left_is_removed(dead: RunningDaemon) -> None:
    assert purge(dead, "--yes") == ["memory", "disk", "socket"]
    assert not any(place.exists() for place in places(dead))
    dead.start()
    assert purge(dead, "--yes") == []


def test_memory_that_a_client_maps_stays(daemon: RunningDaemon, client: Client) -> None:
    namespace = client.open(IDENTITY, LAYOUT)
    store(namespace, TOKENS)
    with namespace.match(TOKENS) as lease:
        daemon.kill()
        arrays = lease.read_arrays(0, len(TOKENS))
        assert purge(daemon, "--yes") == ["disk", "socket"]
        assert daemon.directory.exists()
        del arrays
    client.close()
    assert purge(daemon, "--yes") == ["memory"]


@pytest.mark.parametrize(("answer", "status", "is_left"), [("y\n", 0, False), ("n\n", 1, True)])
def test_on_a_terminal_it_asks(
    dead: RunningDaemon, answer: str, status: int, is_left: bool
) -> None:
    ended, said = run_on_terminal("purge", "--config", dead.config_path, answer=answer)
    assert "Remove all of these?" in said
    assert (ended, dead.directory.exists()) == (status, is_left)


def test_an_interrupt_of_the_question_removes_nothing(dead: RunningDaemon) -> None:
    ours, its = os.openpty()
    command = [sys.executable, "-m", "kvd_ctl", "purge", "--config", str(dead.config_path)]
    with subprocess.Popen(command, stdin=its, stdout=-1, stderr=-1) as asking:
        assert asking.stderr
        assert asking.stderr.read(1) == b"R"  # of the question
        asking.send_signal(signal.SIGINT)
        assert b"Traceback" not in asking.communicate()[1]
        assert asking.returncode == 130
    os.close(ours)
    os.close(its)
    assert dead.directory.exists()


def test_a_socket_whose_lock_is_held_stays(dead: RunningDaemon) -> None:
    held = lock_unheld(lock_of(Path(dead.endpoint.removeprefix("ipc://"))))
    assert held is not None
    assert purge(dead, "--yes") == ["memory", "disk"]
    os.close(held)


def test_without_a_terminal_it_wants_to_be_told(dead: RunningDaemon) -> None:
    done = run_here("purge", "--config", dead.config_path)
    assert (done.exit_code, dead.directory.exists()) == (2, True)


def test_directories_of_all_endpoints_are_found_by_their_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("dead", "alive"):
        path = tmp_path / "kvd" / name
        path.mkdir(parents=True)
        (path / "daemon.lock").touch()
    (tmp_path / "kvd" / "not ours").mkdir()
    held = lock_unheld(tmp_path / "kvd/alive/daemon.lock")
    assert held is not None
    config = Config(endpoint=f"ipc://{tmp_path}/kvd.sock", directory=f"{tmp_path}/memory")
    assert [one.path.name for one in find_leftovers([config])] == ["dead"]
    os.close(held)


def test_a_configuration_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text("nonesuch = 1\n")
    done = run_here("purge", "--config", path)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "nonesuch" in done.stderr
