"""A client that takes all it can get: it is held back, which is counted, and the others go on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from msgspec.structs import replace

from kvd.protocol.codec import decode_reply, encode
from kvd.protocol.messages import (
    AttachReply,
    AttachRequest,
    HeartbeatRequest,
    MatchItem,
    MatchRequest,
    OpenRequest,
    ReserveItem,
    ReserveRequest,
    Run,
    StatusRequest,
)
from kvd_client import OutOfPages
from tests.actors.wire import Wire, failed, packed, refused
from tests.e2e.support import (
    BLOCK,
    EXTENT_PAGES,
    IDENTITY,
    LAYOUT,
    PATIENCE_SECONDS,
    SESSIONS,
    anonymous_bytes,
    eventually,
    faultless_daemon,
    settings,
    store,
    tokens_of,
)

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client.client import Client, Namespace

NUM_PAGES = 1024 * EXTENT_PAGES
MAX_SESSIONS = 64
NUM_CONNECTIONS = 400  # each takes two file descriptors of 1024
MAX_GROWTH_BYTES = 128 << 20
TOKENS = tokens_of(1, 16)
LONG = packed(tokens_of(2, 128 * 1024 // BLOCK))


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """A daemon that has not grown much when the test is over."""
    limits = {"sessions": MAX_SESSIONS, "request_bytes": "1MiB", "wait_seconds": 0.2}
    limits |= {"session_reserved_fraction": 1.0, "session_leases": 1000}
    sessions = SESSIONS | {"silent_seconds": 1.0}
    with faultless_daemon(settings(NUM_PAGES, limits=limits, sessions=sessions)) as daemon:
        before = anonymous_bytes(daemon.pid)
        yield daemon
        assert anonymous_bytes(daemon.pid) < before + MAX_GROWTH_BYTES


@pytest.fixture
def namespace(client: Client) -> Namespace:
    """The other client's, with something in it."""
    namespace = client.open(IDENTITY, LAYOUT, salt="other")
    store(namespace, TOKENS)
    return namespace


@pytest.fixture
def flood(daemon: RunningDaemon) -> Iterator[Wire]:
    """Where the flood comes from: attached, with a namespace of its own."""
    wire = Wire(daemon.endpoint)
    wire.attach()
    wire.open("flood")
    yield wire
    wire.close()


def is_served(namespace: Namespace) -> bool:
    with namespace.match(TOKENS) as lease:
        return lease.num_tokens == len(TOKENS)


def counted(client: Client, name: str) -> int:
    return client.status().counters.get(name, 0)


# --- requests without end ---


def small_match(wire: Wire, number: int) -> list[bytes]:
    items = (MatchItem(wire.namespace, 1, len(TOKENS)),)
    return [encode(MatchRequest(id=number, epoch=wire.epoch, items=items)), packed(TOKENS)]


def big_match(wire: Wire, number: int) -> list[bytes]:
    items = (MatchItem(wire.namespace, number % 8, len(LONG) // 4),)
    return [encode(MatchRequest(id=number, epoch=wire.epoch, items=items)), LONG]


def heartbeat(wire: Wire, number: int) -> list[bytes]:
    return [encode(HeartbeatRequest(id=number, epoch=wire.epoch, leases=()))]


def status(wire: Wire, number: int) -> list[bytes]:
    return [encode(StatusRequest(id=number))]


RequestOf = Callable[[Wire, int], list[bytes]]
each_request = pytest.mark.parametrize("request_of", [status, heartbeat, small_match, big_match])


@each_request
def test_who_reads_no_reply_loses_them(
    flood: Wire, client: Client, namespace: Namespace, request_of: RequestOf
) -> None:
    for number in itertools.count(1):
        flood.offer(*request_of(flood, number))
        if number % 500 == 0:
            assert is_served(namespace)
            if counted(client, "replies_undeliverable"):
                break


@each_request
def test_who_sends_without_end_has_to_wait(
    flood: Wire, namespace: Namespace, request_of: RequestOf
) -> None:
    num_refused = 0
    for number in itertools.count(1):
        num_refused += not flood.offer(*request_of(flood, number))
        for _ in flood.pending(0):
            pass
        if number % 100 == 0:
            assert is_served(namespace)
            if num_refused > 100:
                break


def test_few_reserves_of_one_client_wait(flood: Wire, client: Client, namespace: Namespace) -> None:
    flood.matched(1, TOKENS)
    flood.reserved(1, 0, NUM_PAGES - 100)
    flood.matched(2, TOKENS)
    for _ in range(1000):
        items = (ReserveItem(2, 0, 200),)
        flood.send(encode(ReserveRequest(**flood.envelope(), items=items)))
    assert is_served(namespace)
    eventually(lambda: counted(client, "errors_limit_exceeded") > 0)


# --- one request that is too much ---


def test_a_heartbeat_names_no_more_leases_than_there_may_be(flood: Wire) -> None:
    request = HeartbeatRequest(**flood.envelope(), leases=(1,) * 1001)
    refused(flood.ask(request), "limit_exceeded")


def test_a_commit_names_no_more_runs_than_it_has_blocks(flood: Wire) -> None:
    flood.matched(1, TOKENS)
    failed(flood.commit(1, 0, (Run(0, 0),) * 10_000, []), "bad_request")


def test_a_message_is_bounded_beside_its_tokens(flood: Wire) -> None:
    request = HeartbeatRequest(**flood.envelope(), leases=(1,) * 500_000)
    refused(flood.ask(request), "limit_exceeded")


# --- sessions without end ---


def test_nobody_ends_the_session_of_another(
    flood: Wire, client: Client, namespace: Namespace
) -> None:
    (name,) = [one.session for one in client.status().sessions if one.client == client.name]
    with namespace.match(TOKENS) as lease:
        flood.attach(previous=name)
        lease.check()


def test_who_attaches_again_and_again_has_one_session(
    daemon: RunningDaemon, flood: Wire, client: Client, namespace: Namespace
) -> None:
    for _ in range(1000):
        flood.attach(maps=False)
    assert is_served(namespace)
    assert len(client.status().sessions) == 2
    eventually(lambda: len(list(daemon.directory.glob("*.session"))) == 2)


def test_many_connections_get_the_sessions_that_there_are(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    with zmq.Context() as context:
        context.rcvtimeo = int(PATIENCE_SECONDS * 1000)
        sockets = [context.socket(zmq.DEALER) for _ in range(NUM_CONNECTIONS)]
        for socket in sockets:
            socket.connect(daemon.endpoint)
            socket.send(encode(AttachRequest(id=1, version=1, min_version=1)))
        replies = [decode_reply(socket.recv()) for socket in sockets]
        assert is_served(namespace)
        context.destroy(linger=0)
    granted = sum(isinstance(reply, AttachReply) for reply in replies)
    assert granted == MAX_SESSIONS - 1
    assert counted(client, "errors_limit_exceeded") == NUM_CONNECTIONS - granted
    eventually(lambda: len(client.status().sessions) == 1)


# --- namespaces without end ---


NamespaceOf = Callable[[int], dict[str, Any]]


def another_identity(number: int) -> dict[str, Any]:
    return {"identity": replace(IDENTITY, revision=str(number)), "layout": LAYOUT}


def another_layout(number: int) -> dict[str, Any]:
    layout = replace(LAYOUT, num_layers=1 + number % 100, block_size=4 + number // 100)
    return {"identity": IDENTITY, "layout": layout}


@pytest.mark.parametrize("namespace_of", [another_identity, another_layout])
def test_namespaces_are_bounded(
    flood: Wire, client: Client, namespace: Namespace, namespace_of: NamespaceOf
) -> None:
    for number in range(300):
        flood.ask(OpenRequest(**flood.envelope(), **namespace_of(number)))
    assert is_served(namespace)
    assert counted(client, "errors_limit_exceeded") > 0


# --- all the pages ---


def test_who_holds_every_page_keeps_nobody_from_what_is_cached(
    flood: Wire, client: Client, namespace: Namespace
) -> None:
    num_left = NUM_PAGES - len(TOKENS) // BLOCK
    with namespace.match(TOKENS):
        flood.matched(1, TOKENS)
        assert flood.reserved(1, 0, num_left)
        failed(flood.reserve(1, num_left, num_left + 1), "out_of_pages")
        with namespace.match(tokens_of(3, 1)) as lease, pytest.raises(OutOfPages):
            lease.reserve(BLOCK, timeout=1.0)
        assert is_served(namespace)
    flood.release(1)
    store(namespace, tokens_of(3, 1))
