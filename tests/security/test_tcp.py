"""By TCP: who has a key may use kvd, who has none learns nothing and holds nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.protocol.messages import StatusReply, StatusRequest
from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import Client, ConfigError, DaemonUnavailable
from kvd_client.aio import AsyncClient
from tests.actors.wire import Wire
from tests.e2e.support import IDENTITY, LAYOUT, eventually, holds, store, tokens_of
from tests.security.conftest import Connect, Keys, address_of

TOKENS = tokens_of(1, 4)
# What ZeroMQ says first: version 3.1, and that it would be encrypted.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def count(observer: Client, counter: str) -> int:
    return observer.status().counters.get(counter, 0)


def closed_by_peer(connection: socket.socket) -> bool:
    """Read until the other end closes the connection."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


# --- with a key ---


def test_a_client_with_its_key_stores_and_loads_blocks(connect: Connect) -> None:
    alice = connect("alice").open(IDENTITY, LAYOUT, salt="alice")
    store(alice, TOKENS)
    with alice.match(TOKENS) as lease:
        assert lease.num_tokens == len(TOKENS)
        assert holds(lease, TOKENS)


def test_blocks_stored_by_tcp_are_mapped_by_ipc(connect: Connect, observer: Client) -> None:
    tokens = tokens_of(2, 4)
    store(connect("alice").open(IDENTITY, LAYOUT, salt="alice"), tokens)
    with observer.open(IDENTITY, LAYOUT, salt="alice").match(tokens) as lease:
        assert holds(lease, tokens)


def test_a_client_is_called_as_its_key(connect: Connect, observer: Client) -> None:
    assert connect("alice", name="somebody").wait_attached(30.0)
    assert "alice" in [session.client for session in observer.status().sessions]
    (alice, *_) = observer.status().clients
    assert (alice.name, alice.verbs, alice.num_sessions) == ("alice", ("inference",), 1)


def test_a_deadline_counts_from_the_receipt(wire: Callable[..., Wire]) -> None:
    second = 10**9  # which by the clock of this machine was over soon after its start
    root = wire("root")
    assert isinstance(root.ask(StatusRequest(id=1, deadline_ns=60 * second)), StatusReply)


def test_keys_come_from_the_environment(
    daemon: RunningDaemon, keys: Keys, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVD_ENDPOINT", endpoint)
    monkeypatch.setenv("KVD_KEY", keys.secret("root"))
    monkeypatch.setenv("KVD_SERVER_KEY", keys.shown("server"))
    with Client(timeout=30.0) as client:
        assert client.status().pid == daemon.pid


def test_without_keys_there_is_no_client(keys: Keys) -> None:
    with pytest.raises(ConfigError, match="KVD_KEY"):
        Client("tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="KVD_SERVER_KEY"):
        Client("tcp://127.0.0.1:1", key=keys.secret("alice"))


async def test_tasks_come_as_threads_do(daemon: RunningDaemon, endpoint: str, keys: Keys) -> None:
    files = {"key": keys.secret("root"), "server_key": keys.shown("server")}
    async with AsyncClient(endpoint, timeout=30.0, **files) as client:
        assert (await client.status()).pid == daemon.pid


# --- without one ---


def test_a_key_that_is_not_known_is_refused_and_counted(connect: Connect, observer: Client) -> None:
    before = count(observer, "handshakes_refused")
    stranger = connect("stranger")
    with pytest.raises(DaemonUnavailable, match="does not know this client's key"):
        stranger.status()
    assert count(observer, "handshakes_refused") > before
    assert not stranger.open(IDENTITY, LAYOUT, salt="alice").match(TOKENS).is_open


def test_a_refused_client_comes_in_when_its_key_is_known(keys: Keys) -> None:
    document = keys.settings(clients=[{"name": "alice", "key": "x" * 40, "salts": ["alice"]}])
    files = {"key": keys.secret("alice"), "server_key": keys.shown("server")}
    with (
        running_daemon(document) as daemon,
        Client(document["tcp"]["endpoint"], timeout=30.0, **files) as alice,
    ):
        eventually(lambda: alice.connection.core.refusal)
        daemon.stop()
        configured = daemon.config_path.read_text()
        daemon.config_path.write_text(configured.replace("x" * 40, keys.pairs["alice"].public))
        daemon.start()
        assert alice.wait_attached(30.0)


def test_a_client_that_expects_another_server_says_nothing(
    keys: Keys, connect: Connect, observer: Client
) -> None:
    client = connect("alice", server_key=keys.shown("bob"))
    with pytest.raises(DaemonUnavailable, match="is server_key that of this kvd"):
        client.status()
    with pytest.raises(DaemonUnavailable, match="is server_key that of this kvd"):
        client.unpin()  # at once, between two handshakes
    assert "alice" not in [session.client for session in observer.status().sessions]


def test_a_client_without_encryption_is_not_answered(endpoint: str, observer: Client) -> None:
    before = count(observer, "handshakes_failed")
    plain = Wire(endpoint)
    plain.offer(b"\x80")
    eventually(lambda: count(observer, "handshakes_failed") > before)
    assert list(plain.pending(0)) == []
    plain.close()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prefix=st.sampled_from([b"", b"GET / HTTP/1.1\r\n", GREETING]), noise=st.binary(max_size=512)
)
def test_noise_is_closed_and_serves_nothing(
    endpoint: str, observer: Client, prefix: bytes, noise: bytes
) -> None:
    before = count(observer, "errors")
    with socket.create_connection(address_of(endpoint)) as scanner:
        scanner.sendall(prefix + noise)
        with contextlib.suppress(OSError):  # it is closed already
            scanner.shutdown(socket.SHUT_WR)
        assert closed_by_peer(scanner)
    assert count(observer, "errors") == before


def test_who_says_nothing_or_stops_half_way_is_closed_and_holds_up_nobody(
    connect: Connect, endpoint: str, observer: Client
) -> None:
    silent = [socket.create_connection(address_of(endpoint)) for _ in range(100)]
    for each in silent[50:]:
        each.sendall(GREETING)
    assert connect("alice").wait_attached(30.0)
    assert "alice" in [session.client for session in observer.status().sessions]
    assert all(map(closed_by_peer, silent))
    for each in silent:
        each.close()
