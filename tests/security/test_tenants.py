"""What a client may do with its key: its own verbs, in its own namespaces, nothing in others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from anyio import to_thread

from kvd.config import parse
from kvd.daemon import Daemon
from kvd.protocol.codec import encode
from kvd.protocol.keys import namespace_key
from kvd.protocol.messages import (
    AnyReply,
    CheckpointRequest,
    DiscardReply,
    DiscardRequest,
    DropItem,
    DropRequest,
    HeartbeatRequest,
    LeasesRequest,
    OpenRequest,
    ResumeRequest,
    SequencesReply,
    SequencesRequest,
    StatusRequest,
    VerifyRequest,
)
from kvd.testing.daemons import running_daemon
from kvd_client import Client, DaemonUnavailable, Forbidden, OutOfPages
from tests.actors.wire import Wire, failed, refused
from tests.e2e.support import (
    BLOCK,
    EXTENT_PAGES,
    IDENTITY,
    LAYOUT,
    eventually,
    store,
    tokens_of,
)

if TYPE_CHECKING:
    from tests.security.conftest import Connect, Keys

TOKENS = tokens_of(1, 4)
ALICES = namespace_key(IDENTITY, LAYOUT, "alice")


@pytest.fixture
def bob(wire: Callable[..., Wire]) -> Wire:
    """Attached, with a namespace of his own."""
    bob = wire("bob")
    bob.attach(maps=False)
    bob.open("bob", maps=False)
    return bob


@pytest.fixture
def alices(connect: Connect, observer: Client) -> int:
    """The number of a namespace of alice, which has TOKENS and a saved sequence."""
    alice = connect("alice").open(IDENTITY, LAYOUT, salt="alice")
    store(alice, TOKENS)
    alice.discard("secret")
    with alice.match(TOKENS) as lease:
        lease.save("secret", TOKENS)
    listed = observer.status().namespaces
    return next(each.namespace for each in listed if each.salt == "alice")


# --- namespaces ---


def test_a_namespace_of_another_salt_is_not_opened(bob: Wire) -> None:
    for salt in ("alice", "", "bo", "bobby"):
        request = OpenRequest(
            **bob.envelope(), identity=IDENTITY, layout=LAYOUT, salt=salt, maps=False
        )
        assert "not for bob" in refused(bob.ask(request), "forbidden")


def test_by_tcp_nobody_maps(bob: Wire) -> None:
    request = OpenRequest(**bob.envelope(), identity=IDENTITY, layout=LAYOUT, salt="bob")
    assert request.maps
    refused(bob.ask(request), "session_lock_missing")


@pytest.mark.usefixtures("alices")
def test_what_another_has_is_a_miss(bob: Wire) -> None:
    assert bob.matched(1, TOKENS).num_tokens == 0


def test_a_number_that_is_anothers_is_as_unknown_as_any(bob: Wire, alices: int) -> None:
    bob.namespace = alices
    said = [failed(bob.pin(TOKENS, 60.0), "unknown_namespace")]
    bob.namespace = 999_999
    said.append(failed(bob.pin(TOKENS, 60.0), "unknown_namespace"))
    assert said == [f"there is no namespace {number}" for number in (alices, 999_999)]


@pytest.mark.usefixtures("alices")
def test_anothers_sequences_are_not_told_of(bob: Wire) -> None:
    reply = bob.ask(SequencesRequest(**bob.envelope()))
    assert isinstance(reply, SequencesReply)
    assert (reply.sequences, reply.num_sequences) == ((), 0)


@pytest.mark.usefixtures("alices")
def test_anothers_sequence_is_neither_resumed_nor_discarded(bob: Wire) -> None:
    named = {"namespace_key": ALICES, "sequence": "secret"}
    refused(bob.ask(ResumeRequest(**bob.envelope(), **named)), "unknown_sequence")
    reply = bob.ask(DiscardRequest(**bob.envelope(), **named))
    assert isinstance(reply, DiscardReply)
    assert not reply.was_there


def test_ones_own_sequence_is_resumed(connect: Connect, alices: int) -> None:
    alice = connect("alice").open(IDENTITY, LAYOUT, salt="alice")
    with alice.resume("secret").lease as lease:
        assert lease.num_tokens == len(TOKENS)


async def test_a_match_visits_no_node_of_another(keys: Keys, tmp_path: Path) -> None:
    """What a visit leaves, a lock and then a touch, is on no node of the other's tree."""
    places = {name: f"{tmp_path}/{name}" for name in ("directory", "data_directory")}
    document = keys.settings(endpoint=f"ipc://{tmp_path}/kvd.sock", **places)
    endpoint, files = document["tcp"]["endpoint"], {"server_key": keys.shown("server")}

    def use(name: str) -> None:
        with Client(endpoint, timeout=30.0, key=keys.secret(name), **files) as client:
            store(client.open(IDENTITY, LAYOUT, salt=name), TOKENS)

    async with Daemon(parse(document)) as daemon:
        await to_thread.run_sync(use, "alice")
        (space,) = daemon._manager.state.namespaces.values()
        before = [(node, node.stamp) for node in space.tree.nodes()]
        await to_thread.run_sync(use, "bob")
        assert before == [(node, node.stamp) for node in space.tree.nodes()]


# --- verbs ---


@pytest.mark.parametrize("verb", [StatusRequest, LeasesRequest, CheckpointRequest, VerifyRequest])
def test_what_is_for_operators_is_refused_with_or_without_session(
    bob: Wire, wire: Callable[..., Wire], verb: type
) -> None:
    for client in (bob, wire("bob")):
        assert "is not for client bob" in refused(
            client.ask(verb(**client.envelope())), "forbidden"
        )


def test_a_drop_is_for_operators(bob: Wire, alices: int) -> None:
    for number in (bob.namespace, alices):
        request = DropRequest(**bob.envelope(), items=(DropItem(number),))
        refused(bob.ask(request), "forbidden")


def test_an_operator_may_all(connect: Connect, alices: int) -> None:
    root = connect("root")
    assert root.pin(alices, TOKENS, 60.0, owner="alice").num_tokens == len(TOKENS)
    assert root.unpin(owner="alice") == 1
    assert root.drop(alices).blocks_by_tier == {"host": 4}


def test_the_pins_of_others_are_not_touched(bob: Wire, connect: Connect, alices: int) -> None:
    connect("root").pin(alices, TOKENS, 60.0, owner="alice")
    failed(bob.pin([], 60.0, owner="alice"), "forbidden")
    with pytest.raises(Forbidden):
        connect("bob").unpin(owner="alice")
    assert connect("alice").unpin() == 1


def test_refusals_are_counted(bob: Wire, observer: Client) -> None:
    before = observer.status().counters.get("errors_forbidden", 0)
    bob.ask(StatusRequest(**bob.envelope()))
    assert observer.status().counters["errors_forbidden"] == before + 1


# --- connections and quotas ---


def test_the_name_of_a_connection_gives_no_session(wire: Callable[..., Wire]) -> None:
    alice = wire("alice", routing_id=b"mine")
    alice.attach(maps=False)
    epoch = alice.epoch
    alice.vanish()

    def knock() -> list[AnyReply]:
        """As alice's connection is called; in vain as long as that is there."""
        bob = wire("bob", routing_id=b"mine")
        bob.send(encode(HeartbeatRequest(id=1, epoch=epoch, leases=())))
        return list(bob.pending(500))

    (reply,) = eventually(knock)
    refused(reply, "not_attached")


@pytest.fixture
def alice(keys: Keys) -> Iterator[Callable[[], Client]]:
    """Makes clients with alice's key, who may have one session, and a tenth of 128 pages."""
    document = keys.settings()
    document["clients"][0] |= {"sessions": 1, "reserved_fraction": 0.1}
    with running_daemon(document):
        yield lambda: Client(
            document["tcp"]["endpoint"],
            timeout=30.0,
            key=keys.secret("alice"),
            server_key=keys.shown("server"),
        )


def test_a_session_may_hold_what_its_client_may(alice: Callable[[], Client]) -> None:
    with alice() as client:
        namespace = client.open(IDENTITY, LAYOUT, salt="alice")
        with (
            namespace.match(TOKENS) as lease,
            pytest.raises(OutOfPages, match="a session may hold"),
        ):
            lease.reserve(EXTENT_PAGES * BLOCK)


def test_a_client_has_so_many_sessions(alice: Callable[[], Client]) -> None:
    with alice() as first:
        assert first.wait_attached(30.0)
        with alice() as second:
            eventually(lambda: second.connection.core.refusal)
            with pytest.raises(DaemonUnavailable, match="all 1 sessions of alice are in use"):
                second.unpin()
