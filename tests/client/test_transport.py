"""One socket and many threads: whoever asks reads, and no answer is lost between them.

The daemon asks for no heartbeats, which would make good what is lost.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import pytest
import zmq

from kvd.protocol.messages import StatusRequest
from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import DaemonUnavailable, KvdError
from kvd_client.client import Client
from kvd_client.session import Call
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    SESSIONS,
    compute,
    eventually,
    holds,
    settings,
    store,
    tokens_of,
)

if TYPE_CHECKING:
    from kvd_client.client import Lease, Namespace

TOKENS = tokens_of(1, 4)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(settings(sessions=SESSIONS | {"heartbeat_seconds": 3600.0})) as daemon:
        yield daemon


@pytest.fixture
def maps() -> bool:
    return True


@pytest.fixture
def client(daemon: RunningDaemon, maps: bool) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout=30.0, maps=maps) as client:
        assert client.wait_attached(30.0)
        yield client


@pytest.fixture
def namespace(client: Client) -> Namespace:
    return client.open(IDENTITY, LAYOUT)


@pytest.fixture
def fast_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(number: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(work, range(number)))


@pytest.mark.usefixtures("fast_switching")
def test_every_thread_gets_its_own_answers(client: Client, namespace: Namespace) -> None:
    sequences = [tokens_of(seed, 1 + seed % 4) for seed in range(8)]
    for tokens in sequences:
        store(namespace, tokens)

    def wrong(seed: int) -> int:
        matches = (namespace.match(sequences[seed]) for _ in range(300))
        return sum(lease.num_tokens != len(sequences[seed]) for lease in matches)

    assert in_threads(8, wrong) == [0] * 8


@pytest.mark.usefixtures("fast_switching")
def test_fast_calls_go_on_beside_slow_ones(client: Client, namespace: Namespace) -> None:
    """The slow ones read for all, and leave one after the other."""
    all_of_it = namespace.match([], reserve_tokens=128 * BLOCK)

    def work(seed: int) -> int:
        if seed % 2:
            return sum(namespace.match(tokens_of(seed, 1)).is_open for _ in range(200))
        seconds = 0.02 * seed
        match = namespace.match(TOKENS, reserve_tokens=BLOCK, timeout=seconds)
        return len(match.pages)

    assert in_threads(10, work) == [0, 200] * 5
    all_of_it.release()


def test_a_thread_that_waits_reads_on_when_the_one_that_read_has_its_answer(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    with Client(daemon.endpoint, timeout=30.0) as other, ThreadPoolExecutor() as threads:
        theirs = other.open(IDENTITY, LAYOUT)
        first = theirs.match([], reserve_tokens=64 * BLOCK)
        second = theirs.match([], reserve_tokens=64 * BLOCK)
        waiting = [
            threads.submit(namespace.match([]).reserve, 64 * BLOCK, timeout=30.0) for _ in range(2)
        ]
        eventually(lambda: len(client.connection.core._pending) == 2)
        first.release()
        eventually(lambda: any(one.done() for one in waiting))
        second.release()
        for one in waiting:
            one.result()


@pytest.mark.usefixtures("fast_switching")
def test_leases_may_end_wherever_the_collector_runs(client: Client, namespace: Namespace) -> None:
    def forget(seed: int) -> None:
        for _ in range(100):
            cycle: list[Any] = [namespace.match(TOKENS)]
            cycle.append(cycle)

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        in_threads(4, forget)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    eventually(lambda: [one.num_leases for one in client.status().sessions] == [0])


class _Frames(list[bytes]):
    """Frames that are looked at when the socket was asked, and the daemon is gone since."""

    def __init__(self, frames: list[bytes], daemon: RunningDaemon, client: Client) -> None:
        super().__init__(frames)
        self.taken = threading.Event()
        self._daemon = daemon
        self._socket = client.connection._socket

    def __iter__(self) -> Iterator[bytes]:
        self._daemon.kill()
        eventually(lambda: not self._socket.get(zmq.EVENTS) & zmq.POLLOUT)
        self.taken.set()
        return super().__iter__()


@pytest.fixture
def last_call(daemon: RunningDaemon, client: Client) -> Call:
    """A call under whose sending the daemon dies."""
    call = Call(StatusRequest(id=client.connection.core.next_id()))
    call.frames = _Frames(call.frames, daemon, client)
    return call


def test_a_daemon_that_dies_under_a_send_is_one_that_is_gone(
    daemon: RunningDaemon, client: Client, last_call: Call
) -> None:
    client.connection.send(last_call)
    assert client.connection.wait(last_call, client.deadline(30.0))
    assert isinstance(last_call.error, DaemonUnavailable)
    daemon.start()
    assert client.wait_attached(30.0)


def test_a_daemon_that_dies_under_a_send_of_the_keeper_is_found_again(
    daemon: RunningDaemon, client: Client, last_call: Call
) -> None:
    with client.connection._mutex:  # where the collector would leave it to the keeper
        client.connection.post(last_call)
    assert cast("_Frames", last_call.frames).taken.wait(30.0)
    daemon.start()
    assert client.wait_attached(30.0)


def test_every_call_under_way_ends_when_the_daemon_dies(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    all_of_it = namespace.match([], reserve_tokens=128 * BLOCK)
    leases = [namespace.match([]) for _ in range(4)]

    def wait(lease: Lease) -> str:
        with pytest.raises(DaemonUnavailable):
            lease.reserve(BLOCK, timeout=3600.0)
        return "told"

    with ThreadPoolExecutor() as threads:
        waiting = threads.map(wait, leases)
        eventually(lambda: len(client.connection.core._pending) == 4)
        daemon.kill()
        assert list(waiting) == ["told"] * 4
    all_of_it.release()


@pytest.mark.parametrize("maps", [True, False], ids=["mapped", "copied"])
def test_threads_that_work_survive_kills_and_stops(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    is_over: list[bool] = []

    def work(seed: int) -> int:
        wrong = 0
        while not is_over:
            tokens = tokens_of(seed % 3, 4)
            with contextlib.suppress(KvdError), namespace.match(tokens, timeout=0.3) as lease:
                right = holds(lease, tokens, lease.num_tokens)
                lease.check()
                wrong += not right
                compute(lease, tokens)
        return wrong

    def served() -> bool:
        return client.wait_attached(30.0) and namespace.match(TOKENS).is_open

    with ThreadPoolExecutor(6) as threads:
        counts = threads.map(work, range(6))
        for disturb in (daemon.restart, daemon.pause, daemon.resume) * 2:
            disturb()
            if disturb != daemon.pause:
                eventually(served)
        is_over.append(True)
        assert list(counts) == [0] * 6
