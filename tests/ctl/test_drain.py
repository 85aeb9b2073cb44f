"""How `kvd-ctl drain` waits for leases, has all saved, and stops kvd."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import BadRequest, Client, DaemonUnavailable, Namespace
from kvd_ctl.drain import begin_drain
from tests.ctl.conftest import run_here
from tests.e2e.support import eventually, store, tokens_of, with_store

TOKENS = tokens_of(1, 4)

Ctl: TypeAlias = Callable[..., str]
Ask: TypeAlias = Callable[..., Any]


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(with_store(cache={"demote_watermark": 1.0})) as daemon:
        yield daemon


def test_a_drained_kvd_has_all_saved_and_takes_no_new_sessions(
    daemon: RunningDaemon, namespace: Namespace, ask: Ask
) -> None:
    store(namespace, TOKENS)
    assert ask("drain") == {"is_draining": True, "num_blocks": 4, "is_stopped": False}
    done = run_here("pins", "--endpoint", daemon.endpoint)
    assert done.exit_code == 0
    done = run_here("unpin", "--endpoint", daemon.endpoint)
    assert (done.exit_code, "draining" in done.stderr) == (1, True)
    assert namespace.match(TOKENS).num_tokens == len(TOKENS)


def test_it_says_that_it_drains_until_that_is_undone(ctl: Ctl) -> None:
    ctl("drain")
    assert "draining" in ctl("status")
    assert ctl("drain", "--undo") == "draining is over: kvd takes new sessions\n"
    assert "draining" not in ctl("status")


def test_who_was_refused_is_attached_when_that_is_undone(daemon: RunningDaemon, ctl: Ctl) -> None:
    ctl("drain")
    with Client(daemon.endpoint, timeout=30.0) as refused:
        with pytest.raises(DaemonUnavailable, match="draining"):
            refused.unpin()
        ctl("drain", "--undo")
        assert refused.wait_attached(30.0)


def test_leases_that_do_not_end_in_time_are_counted(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    with namespace.match(TOKENS), namespace.match(TOKENS):
        done = run_here("drain", "--timeout", 2, "--endpoint", daemon.endpoint)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "2 leases did not end in time" in done.stderr


def test_it_ends_when_the_last_lease_does(daemon: RunningDaemon, namespace: Namespace) -> None:
    store(namespace, TOKENS)
    command = [sys.executable, "-m", "kvd_ctl", "drain", "--endpoint", daemon.endpoint]
    with namespace.match(TOKENS), subprocess.Popen(command, text=True) as draining:
        eventually(lambda: namespace.client.status().is_draining)
        assert draining.poll() is None
        namespace.client.close()
        assert draining.wait(60) == 0


def test_a_drain_that_is_over_before_the_leases_is_no_drain(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    command = [sys.executable, "-m", "kvd_ctl", "drain", "--endpoint", daemon.endpoint]
    with (
        namespace.match([]),
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as draining,
    ):
        eventually(lambda: namespace.client.status().is_draining)
        namespace.client.drain(undo=True)
        _, complaint = draining.communicate()
    assert (draining.returncode, "drain it again" in complaint) == (1, True)


def test_a_drained_kvd_stops_and_finds_all_again(
    daemon: RunningDaemon, namespace: Namespace, ctl: Ctl
) -> None:
    store(namespace, TOKENS)
    assert "kvd has stopped" in ctl("drain", "--stop")
    eventually(lambda: not daemon.is_running)
    daemon.start()
    assert namespace.client.wait_attached(30.0)
    assert namespace.match(TOKENS, timeout=30.0).num_tokens == len(TOKENS)


def test_a_daemon_behind_somebody_elses_socket_is_not_stopped(
    daemon: RunningDaemon, client: Client, tmp_path: Path
) -> None:
    """As with systemd, which would start it again."""
    path = tmp_path / "kvd.sock"
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(path))
        ours.listen()
        client.endpoint = f"ipc://{path}"
        with pytest.raises(BadRequest, match="stop it there"):
            begin_drain(client, stop=True, as_json=False)
    assert not client.status().is_draining


def test_an_interrupt_leaves_it_draining(daemon: RunningDaemon, namespace: Namespace) -> None:
    command = [sys.executable, "-m", "kvd_ctl", "drain", "--endpoint", daemon.endpoint]
    with namespace.match([]), subprocess.Popen(command, stderr=subprocess.DEVNULL) as draining:
        eventually(lambda: namespace.client.status().is_draining)
        os.kill(draining.pid, signal.SIGINT)
        assert draining.wait(60) != 0
    assert namespace.client.status().is_draining
