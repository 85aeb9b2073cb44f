"""Follower: whoever follows has what the daemon has, whatever was missed in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import zmq

from kvd.protocol.events import hashes_of
from kvd.protocol.keys import chain, namespace_key
from kvd_client.events import AllBlocksCleared, Follower
from tests.actors.wire import packed
from tests.e2e.support import BLOCK, IDENTITY, LAYOUT, eventually, store, tokens_of
from tests.events.conftest import Map, agrees, follow, publishing

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client import Client, Namespace


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[RunningDaemon, Client]]:
    with publishing() as running:
        yield running


@pytest.fixture
def daemon(running: tuple[RunningDaemon, Client]) -> RunningDaemon:
    return running[0]


@pytest.fixture
def client(running: tuple[RunningDaemon, Client]) -> Client:
    return running[1]


@pytest.fixture
def namespace(client: Client) -> Namespace:
    return client.open(IDENTITY, LAYOUT)


def work(namespace: Namespace, seed: int, rounds: int = 30) -> None:
    """More than memory holds: blocks are committed, evicted, read again and dropped."""
    chance = random.Random(seed)
    for _ in range(rounds):
        tokens = tokens_of(chance.randrange(12), 24)[: BLOCK * chance.randrange(1, 25)]
        if chance.random() < 0.1:
            namespace.drop(tokens)
        else:
            store(namespace, tokens)


def restart(daemon: RunningDaemon, client: Client) -> None:
    daemon.restart()
    assert client.wait_attached(30.0)


def test_a_map_has_what_the_tiers_have_after_all_kinds_of_work(
    client: Client, namespace: Namespace
) -> None:
    before, known = client.status().counters, Map()
    with follow(client) as follower:
        for seed in range(4):
            work(namespace, seed)
            eventually(lambda: agrees(known, follower, client))
    after = client.status().counters
    for event in ("blocks_evicted", "blocks_promoted", "blocks_dropped", "blocks_demoted"):
        assert after[event] > before.get(event, 0)


def test_blocks_are_called_by_their_keys(client: Client, namespace: Namespace) -> None:
    store(namespace, tokens := tokens_of(77, 3))
    keys = chain(namespace_key(IDENTITY, LAYOUT, ""), packed(tokens), len(packed(tokens[:BLOCK])))
    ours, known = set(hashes_of(b"".join(keys))), Map()
    with follow(client) as follower:
        eventually(lambda: agrees(known, follower, client))
    assert ours <= known.blocks["CPU"]


def test_one_who_joins_late_has_it_all(client: Client, namespace: Namespace) -> None:
    work(namespace, 5)
    known = Map()
    with follow(client) as follower:
        eventually(lambda: agrees(known, follower, client))


def test_a_batch_that_was_missed_is_asked_for(client: Client, namespace: Namespace) -> None:
    known = Map()
    with follow(client) as follower:
        eventually(lambda: agrees(known, follower, client))
        store(namespace, tokens_of(21, 4))
        follower._live.recv_multipart()  # lost on its way
        store(namespace, tokens_of(22, 4))
        eventually(lambda: agrees(known, follower, client))


def test_the_last_batch_is_asked_for_when_nothing_follows_it(
    client: Client, namespace: Namespace
) -> None:
    known, status = Map(), client.status().events
    assert status
    with Follower("ipc:///nowhere", status.replay_endpoint) as follower:
        eventually(lambda: agrees(known, follower, client))
        store(namespace, tokens_of(23, 4))
        eventually(lambda: agrees(known, follower, client))


def test_without_replay_a_gap_is_told(client: Client, namespace: Namespace) -> None:
    status = client.status().events
    assert status
    with Follower(status.endpoint) as follower:
        batch = eventually(lambda: store(namespace, tokens_of(24, 1)) or follower.next(0.1))
        assert batch.num_missed == batch.seq > 0
        namespace.drop(tokens_of(24, 1))
        assert eventually(lambda: follower.next(0.1)).num_missed == 0


def test_a_restart_clears_the_map_and_tells_what_is_left(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    known = Map()
    with follow(client) as follower:
        eventually(lambda: agrees(known, follower, client))
        for seed in range(3):
            restart(daemon, client)
            work(namespace, seed, rounds=10)
            eventually(lambda: agrees(known, follower, client))


def test_a_restart_is_seen_though_nothing_was_heard_of_it(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    status, known = client.status().events, Map()
    assert status
    with Follower("ipc:///nowhere", status.replay_endpoint) as follower:
        eventually(lambda: agrees(known, follower, client))
        restart(daemon, client)
        namespace.drop(tokens_of(0, 1))
        eventually(lambda: agrees(known, follower, client))


def test_a_number_that_is_asked_for_is_where_it_begins(
    client: Client, namespace: Namespace
) -> None:
    store(namespace, tokens_of(25, 1))
    with follow(client) as follower:
        eventually(lambda: (batch := follower.next(0.1)) and batch.seq > 1)
    with follow(client, since=1) as follower:
        assert eventually(lambda: follower.next(0.1)).seq == 1


def test_one_who_comes_too_late_gets_what_is_there() -> None:
    known = Map()
    with publishing(buffer_batches=2) as (_, client):
        work(client.open(IDENTITY, LAYOUT), 1)
        with follow(client) as follower:
            first = eventually(lambda: follower.next(0.1))
            assert isinstance(first.events[0], AllBlocksCleared)
            assert first.seq > 0
            eventually(lambda: agrees(known, follower, client))


def test_readers_that_stand_still_hold_nobody_up(client: Client, namespace: Namespace) -> None:
    status, known = client.status().events, Map()
    assert status
    with zmq.Context() as context, context.socket(zmq.SUB) as frozen:
        frozen.setsockopt(zmq.RCVHWM, 1)
        frozen.subscribe("")
        frozen.connect(status.endpoint)
        with context.socket(zmq.DEALER) as asking, follow(client) as follower:
            asking.setsockopt(zmq.RCVHWM, 1)
            asking.connect(status.replay_endpoint)
            for _ in range(50):
                asking.send_multipart((b"", bytes(8)))
            work(namespace, 6)
            eventually(lambda: agrees(known, follower, client))
