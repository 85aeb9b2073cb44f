"""What systemd gives kvd and is told by it; a socket of the test's stands for systemd's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from kvd import systemd
from kvd.testing.daemons import running_daemon
from kvd.testing.faults import Faults, set_faults
from tests.e2e.support import PATIENCE_SECONDS, with_store

Told = dict[str, str]


class Manager:
    """Where systemd would listen to what it is told."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.settimeout(PATIENCE_SECONDS)
        self.socket.bind(address)

    def hears(self) -> Told:
        """The next that it is told."""
        lines = self.socket.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def hears_of(self, name: str) -> list[Told]:
        """All that it is told up to this."""
        told = [self.hears()]
        while name not in told[-1]:
            told.append(self.hears())
        return told


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    manager = Manager(f"{tmp_path}/notify")
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/notify")
    with manager.socket:
        yield manager


# --- what it is told ---


def test_without_systemd_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.notify(READY=1)


def test_a_status_is_one_line(manager: Manager) -> None:
    systemd.notify(READY=1, STATUS="one\nSTOPPING=1")
    assert manager.hears() == {"READY": "1", "STATUS": "one STOPPING=1"}


def test_an_abstract_socket_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"kvd-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    manager = Manager(f"\0{name}")
    with manager.socket:
        systemd.notify(READY=1)
        assert manager.hears() == {"READY": "1"}


def test_a_systemd_that_is_gone_hinders_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/nowhere")
    systemd.notify(READY=1)
    assert "reason=not_told" in caplog.text


def test_a_reload_is_told_from_its_begin_to_its_end(manager: Manager) -> None:
    with systemd.reloading():
        assert manager.hears().keys() == {"RELOADING", "MONOTONIC_USEC"}
    assert manager.hears() == {"READY": "1"}


def test_a_life_is_told_in_order(manager: Manager) -> None:
    with running_daemon(with_store()) as daemon:
        starting = manager.hears_of("READY")
        assert starting[0] == {"STATUS": "recovering"}
        assert min(int(told["EXTEND_TIMEOUT_USEC"]) for told in starting[1:-1]) > 60e6
        assert starting[-1]["STATUS"].startswith("0 blocks in host, 0 blocks in ")
        assert manager.hears()["WATCHDOG"] == "1"
        daemon.stop()
        assert manager.hears_of("STOPPING")[-1] == {"STOPPING": "1", "STATUS": "saving"}


def test_a_stop_does_not_wait_for_a_start_to_end(manager: Manager) -> None:
    """The disk does not answer until the stop is told."""
    with running_daemon(with_store()) as daemon:
        daemon.stop()
        set_faults(daemon.data_directory, Faults.STUCK)
        manager.hears_of("STOPPING")
        command = [sys.executable, "-m", "kvd", "--config", str(daemon.config_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as starting:
            assert manager.hears_of("STATUS")[-1] == {"STATUS": "recovering"}
            starting.terminate()
            manager.hears_of("STOPPING")
            set_faults(daemon.data_directory, Faults.NONE)
            assert starting.communicate() == (b"", None)
        assert starting.returncode == 0


# --- the watchdog ---


async def test_the_watchdog_is_fed_as_often_as_requests_are_read(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    monkeypatch.setenv("WATCHDOG_USEC", "3000")
    pulses = iter(range(2))
    manager.socket.setblocking(False)

    async def pulse() -> None:
        if next(pulses, None) is None:  # stands still
            reports.cancel_scope.cancel()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as reports:
        reports.start_soon(systemd.report, pulse, lambda: "well")
    assert [manager.hears(), manager.hears()] == 2 * [{"WATCHDOG": "1", "STATUS": "well"}]
    with pytest.raises(BlockingIOError):
        manager.hears()


# --- sockets ---

LISTENING = """
import os, socket, sys
from kvd import systemd
listener = socket.socket(getattr(socket, sys.argv[1]))
listener.bind(eval(sys.argv[2]))
os.dup2(listener.fileno(), systemd.FIRST_LISTENER)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "kvd"}
(endpoint, descriptor), = systemd.take_listeners().items()
assert not os.get_inheritable(descriptor)
assert not [name for name in os.environ if name.startswith("LISTEN_")]
print(endpoint)
"""


def test_a_socket_is_known_by_its_endpoint(tmp_path: Path) -> None:
    assert taken("AF_UNIX", f"{tmp_path}/kvd.sock") == f"ipc://{tmp_path}/kvd.sock"
    assert taken("AF_INET", ("127.0.0.1", 0)).startswith("tcp://127.0.0.1:")


def taken(family: str, address: object) -> str:
    command = [sys.executable, "-c", LISTENING, family, repr(address)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_sockets_of_another_process_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert systemd.take_listeners() == {}
    assert "LISTEN_FDS" not in os.environ
