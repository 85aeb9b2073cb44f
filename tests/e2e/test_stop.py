"""Starting where another is, and stopping cleanly."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvd.testing.daemons import DaemonFailed, RunningDaemon, running_daemon, to_toml
from tests.e2e.support import BLOCK, eventually, settings, store, tokens_of

if TYPE_CHECKING:
    from kvd_client.client import Client, Namespace
    from tests.arena.conftest import Child


def files(daemon: RunningDaemon) -> list[str]:
    """What is left of a daemon, but for the helper's own files."""
    left = {path.name for path in daemon.directory.iterdir()}
    beside = {path.name for path in daemon.directory.parent.iterdir()}
    return sorted(left | beside - {"kvd", "kvd.toml", "kvd.log"})


CLEAN = ["daemon.lock", "data", "header", "host.lock", "kvd.sock.lock", "sequences"]


# --- stopping ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(daemon: RunningDaemon, number: signal.Signals) -> None:
    assert daemon.stop(number) == 0
    assert files(daemon) == CLEAN
    assert "Traceback" not in daemon.log
    assert f"{number.name}: stopping" in daemon.log


def test_a_stop_leaves_no_file_but_those_of_arenas_and_sessions(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, tokens_of(1, 4))
    client.close()
    del client, namespace
    assert daemon.stop() == 0
    left = (".about", ".arena", ".pages", ".session")
    assert [name for name in files(daemon) if not name.endswith(left)] == CLEAN


def test_a_stop_does_not_wait_for_a_reserve_that_waits(
    daemon: RunningDaemon, client: Client, program: Callable[..., Child]
) -> None:
    code = """
lease = namespace.match(tokens_of(1, 4), reserve_tokens=128 * BLOCK)
try:
    print('waits')
    namespace.match(tokens_of(2, 4)).reserve(BLOCK, timeout=3600)
except KvdError as error:
    print(type(error).__name__)
"""
    waiting = program(code)
    assert waiting.says() == "waits"
    eventually(lambda: client.status().counters["requests"] >= 6)
    assert daemon.stop() == 0
    assert waiting.says() == "DaemonUnavailable"
    assert "Traceback" not in daemon.log


def test_it_starts_again_after_a_stop(daemon: RunningDaemon, namespace: Namespace) -> None:
    store(namespace, tokens_of(1, 4))
    daemon.stop()
    daemon.start()
    with namespace.match(tokens_of(1, 4)) as lease:
        assert lease.num_tokens in (0, 4 * BLOCK)


def test_work_under_way_does_not_hinder_a_stop(
    daemon: RunningDaemon, program: Callable[..., Child]
) -> None:
    code = """
import itertools
for seed in itertools.count():
    try:
        store(namespace, tokens_of(seed, 16))
    except KvdError as error:
        print(type(error).__name__)
        break
    print('stored')
"""
    workers = [program(code) for _ in range(3)]
    for worker in workers:
        assert worker.says() == "stored"
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log


# --- starting where another is ---


def start(tmp_path: Path, **document: Any) -> subprocess.CompletedProcess[str]:
    """Start a daemon that will not be ready, and wait for its end."""
    config = tmp_path / "other.toml"
    config.write_text(to_toml({"data_directory": f"{tmp_path}/data"} | document))
    command = [sys.executable, "-m", "kvd", "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("what", ["endpoint", "directory", "memory"])
def test_a_second_daemon_is_refused(daemon: RunningDaemon, tmp_path: Path, what: str) -> None:
    endpoint, directory = f"ipc://{tmp_path}/kvd.sock", tmp_path / "kvd"
    tier: dict[str, Any] = {"type": "host", "capacity_bytes": "64KiB"}
    match what:
        case "endpoint":
            endpoint = daemon.endpoint
        case "directory":
            directory = daemon.directory
        case _:
            tier["directory"] = str(daemon.directory)
    second = start(tmp_path, endpoint=endpoint, directory=str(directory), tiers=[tier])
    owned = endpoint if what == "endpoint" else str(daemon.directory)
    assert (second.returncode, second.stdout) == (1, "")
    (line,) = second.stderr.splitlines()
    assert line.startswith(f"kvd: another kvd (pid {daemon.pid}) owns ")
    assert owned in line


def test_the_first_daemon_goes_on_when_a_second_was_refused(
    daemon: RunningDaemon, tmp_path: Path, namespace: Namespace
) -> None:
    store(namespace, tokens_of(1, 4))
    start(tmp_path, endpoint=daemon.endpoint, directory=str(daemon.directory))
    start(tmp_path, endpoint=f"ipc://{tmp_path}/kvd.sock", directory=str(daemon.directory))
    with namespace.match(tokens_of(1, 4)) as lease:
        assert lease.num_tokens == 4 * BLOCK


def test_two_daemons_beside_each_other(daemon: RunningDaemon, namespace: Namespace) -> None:
    store(namespace, tokens_of(1, 4))
    with running_daemon(settings()) as other:
        assert other.endpoint != daemon.endpoint
    assert namespace.match(tokens_of(1, 4)).num_tokens == 4 * BLOCK


# --- the helper ---


def test_a_daemon_that_does_not_start_is_an_error_that_says_why() -> None:
    with (
        pytest.raises(DaemonFailed, match="unknown type 'nonesuch'"),
        running_daemon({"tiers": [{"type": "nonesuch"}]}),
    ):
        pass


def test_nothing_is_left_of_a_daemon_that_ran() -> None:
    with running_daemon(settings()) as daemon:
        assert daemon.is_running
        assert daemon.directory.exists()
    assert not daemon.is_running
    assert not daemon.directory.parent.exists()


def test_nothing_is_left_when_the_test_fails() -> None:
    with contextlib.suppress(KeyError), running_daemon(settings()) as daemon:
        daemon.pause()
        raise KeyError
    assert not daemon.is_running
    assert not daemon.directory.parent.exists()
