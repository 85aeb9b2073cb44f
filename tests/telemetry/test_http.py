"""Health by HTTP: what is answered, and that nobody who asks holds anything."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from kvd.actors.http import MAX_CONNECTIONS, MAX_REQUEST_BYTES
from kvd.testing.daemons import DaemonFailed, running_daemon
from kvd.testing.faults import Faults, set_faults
from kvd_client import Client
from tests.e2e.support import (
    IDENTITY,
    LAYOUT,
    PATIENCE_SECONDS,
    eventually,
    settings,
    store,
    tokens_of,
    with_store,
)
from tests.telemetry.support import get, scrape, value, watched_daemon

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[RunningDaemon, int]]:
    with watched_daemon(settings()) as watched:
        yield watched


@pytest.fixture
def port(watched: tuple[RunningDaemon, int]) -> int:
    return watched[1]


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
    connection.sendall(sent)
    return connection


def answer(port: int, sent: bytes) -> bytes:
    """All that comes until the other end closes."""
    with connect(port, sent) as connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ready(port: int) -> tuple[int, Any]:
    status, text = get(port, "/readyz")
    return status, json.loads(text)


def test_a_daemon_that_serves_is_healthy_and_ready(port: int) -> None:
    assert get(port, "/healthz") == (200, "OK\n")
    assert ready(port) == (200, {"phase": "ready", "degraded": {}})


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /nonesuch HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/.. HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /healthz HTTP/1.1\r\nContent-Length: 9\r\n\r\nsomething", b"405"),
        (b"\r\n\r\n", b"405"),
        (b"\x16\x03\x01\xff\x00 \r\n\r\n", b"405"),
        (b"GET /healthz?probe=1 HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * MAX_REQUEST_BYTES, b"431"),
    ],
)
def test_whatever_is_asked_is_answered(port: int, sent: bytes, status: bytes) -> None:
    assert answer(port, sent).split()[1] == status


def test_who_leaves_before_the_end_is_forgotten(port: int) -> None:
    connect(port, b"GET /heal").close()
    connect(port, b"GET /metrics HTTP/1.1\r\n\r\n").close()
    assert get(port, "/healthz")[0] == 200


def test_silent_clients_keep_nobody_out(port: int) -> None:
    with ExitStack() as silent:
        oldest = silent.enter_context(connect(port))
        for _ in range(3 * MAX_CONNECTIONS):
            silent.enter_context(connect(port, b"GET /healthz"))
        assert get(port, "/healthz")[0] == 200
        assert oldest.recv(1) == b""


def test_who_says_nothing_is_left_in_the_end(port: int) -> None:
    assert answer(port, b"GET /healthz") == b""


def test_scrapes_at_once_are_all_whole(port: int) -> None:
    asked = [connect(port, b"GET /metrics HTTP/1.1\r\n\r\n") for _ in range(4)]
    for connection in asked:
        with connection, connection.makefile("rb") as file:
            assert b"\nkvd_ready 1.0\n" in file.read()


def test_a_tier_in_trouble_is_told_and_the_daemon_is_ready_still() -> None:
    with watched_daemon(with_store()) as (daemon, port), Client(daemon.endpoint) as client:
        assert client.wait_attached(PATIENCE_SECONDS)
        set_faults(daemon.data_directory, Faults.GONE)
        store(client.open(IDENTITY, LAYOUT), tokens_of(1, 4))
        eventually(lambda: ready(port)[1]["degraded"])
        status, told = ready(port)
        assert (status, told["phase"], list(told["degraded"])) == (200, "ready", ["faulty"])
        assert value(scrape(port), "kvd_tier_degraded", tier="faulty") == 1
        set_faults(daemon.data_directory, Faults.NONE)


def test_a_daemon_to_which_nobody_can_attach_is_not_ready() -> None:
    with watched_daemon(settings()) as (daemon, port):
        (daemon.directory / "header").unlink()
        eventually(lambda: ready(port)[0] == 503)
        assert value(scrape(port), "kvd_ready") == 0


def test_a_daemon_that_starts_or_stops_is_healthy_and_not_ready() -> None:
    with watched_daemon(with_store()) as (daemon, port):
        with Client(daemon.endpoint, timeout=PATIENCE_SECONDS) as client:
            store(client.open(IDENTITY, LAYOUT), tokens_of(1, 4))
        set_faults(daemon.data_directory, Faults.STUCK)  # what is to be saved waits
        os.kill(daemon.pid, signal.SIGTERM)
        eventually(lambda: ready(port) == (503, {"phase": "stopping", "degraded": {}}))
        daemon.kill()
        starting = threading.Thread(target=daemon.start)
        starting.start()
        eventually(lambda: is_listening(port))
        assert ready(port) == (503, {"phase": "starting", "degraded": {}})
        assert get(port, "/healthz")[0] == 200
        set_faults(daemon.data_directory, Faults.NONE)
        starting.join()
        assert ready(port)[0] == 200


def test_a_port_that_is_taken_is_one_line() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(
            DaemonFailed, match=r"127\.0\.0\.1:\d+ cannot be bound: .*: set http\.endpoint"
        ),
        running_daemon({"http": {"endpoint": f"127.0.0.1:{server.getsockname()[1]}"}}),
    ):
        pass
