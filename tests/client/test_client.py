"""Clients: threads, several in one process, interrupts, bounds, and their ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import (
    BadRequest,
    DaemonUnavailable,
    DeadlineExceeded,
    Identity,
    KvdError,
    Layout,
    LeaseEnded,
    LimitExceeded,
    OutOfPages,
)
from kvd_client.client import Client
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    SESSIONS,
    compute,
    eventually,
    holds,
    pages,
    settings,
    store,
    tokens_of,
    write,
)

if TYPE_CHECKING:
    from kvd_client.client import Lease, Namespace
    from tests.arena.conftest import Child

Connect = Callable[[], Client]
Open = Callable[[Client], "Namespace"]
TOKENS = tokens_of(1, 4)


def num_leases(client: Client) -> int:
    return sum(one.num_leases for one in client.status().sessions)


# --- attach ---


def test_a_client_attaches_by_itself_and_once(client: Client) -> None:
    assert client.wait_attached(30.0)
    assert client.attached
    (session,) = client.status().sessions
    assert session.pid == os.getpid()


def test_a_clients_name_is_shown(daemon: RunningDaemon) -> None:
    with Client(daemon.endpoint, timeout=30.0, name="an engine") as client:
        assert client.wait_attached(30.0)
        assert [one.client for one in client.status().sessions] == ["an engine"]


def test_a_client_finds_the_daemon_by_the_environment(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVD_ENDPOINT", daemon.endpoint)
    with Client(timeout=30.0) as client:
        assert client.wait_attached(30.0)
        assert client.status().pid == daemon.pid


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "ipc://relative", "ipc:///" + "x" * 107])
def test_an_endpoint_that_cannot_be_is_refused(endpoint: str) -> None:
    with pytest.raises(KvdError, match=r"tcp://|path"):
        Client(endpoint)


def test_a_client_that_was_refused_attaches_when_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        running_daemon(settings(limits={"sessions": 1})) as daemon,
        Client(daemon.endpoint, timeout=30.0) as first,
    ):
        assert first.wait_attached(30.0)
        with Client(daemon.endpoint, timeout=30.0) as second:
            namespace = second.open(IDENTITY, LAYOUT)
            assert not namespace.match(TOKENS).is_open
            assert caplog.text.count("all 1 sessions are in use") == 1
            first.close()
            assert second.wait_attached(30.0)
            assert namespace.match(TOKENS).is_open


# --- namespaces ---


@pytest.mark.parametrize(
    ("identity", "salt"),
    [
        (Identity("model", "other"), ""),
        (Identity("other", "main"), ""),
        (Identity("model", "main", adapter="lora"), ""),
        (Identity("model", "main", positions="yarn"), ""),
        (Identity("model", "main", shard_size=2), ""),
        (Identity("model", "main", shard_rank=1, shard_size=2), ""),
        (IDENTITY, "tenant"),
    ],
)
def test_equal_tokens_of_another_identity_never_meet(
    client: Client, identity: Identity, salt: str
) -> None:
    store(client.open(IDENTITY, LAYOUT), TOKENS)
    other = client.open(identity, LAYOUT, salt=salt)
    assert other.match(TOKENS).num_tokens == 0
    assert client.open(IDENTITY, LAYOUT).match(TOKENS).num_tokens == len(TOKENS)


@pytest.mark.parametrize(
    "identity", [Identity("", "r"), Identity("m", ""), Identity("m", "r", shard_rank=1)]
)
def test_an_identity_that_says_too_little_is_refused(client: Client, identity: Identity) -> None:
    with pytest.raises(BadRequest):
        client.open(identity, LAYOUT)


def test_a_layout_out_of_bounds_is_refused(client: Client) -> None:
    with pytest.raises(BadRequest, match="block_size"):
        client.open(IDENTITY, Layout(1024, 1024, 1024, "float64"))


def test_two_clients_share_what_one_committed(
    connect: Connect, open_namespace: Open, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    other = open_namespace(connect())
    with other.match(TOKENS) as lease:
        assert holds(lease, TOKENS)
    assert len(client.status().sessions) == 2


def test_two_clients_in_one_process_end_apart(
    connect: Connect, open_namespace: Open, namespace: Namespace
) -> None:
    mine = namespace.match(TOKENS, reserve_tokens=len(TOKENS))
    other = connect()
    theirs = open_namespace(other).match(TOKENS, reserve_tokens=len(TOKENS))
    other.close()
    assert not theirs.is_open
    mine.check()
    compute(mine, TOKENS)


# --- reserve between clients ---


def test_reserve_gets_pages_when_another_client_releases(
    connect: Connect, open_namespace: Open, namespace: Namespace
) -> None:
    all_of_it = namespace.match([], reserve_tokens=128 * BLOCK)
    waiting = open_namespace(connect()).match(TOKENS)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(waiting.reserve, 4 * BLOCK)
        with pytest.raises(TimeoutError):
            answer.result(0.05)
        all_of_it.release()
        answer.result()
    compute(waiting, TOKENS)


def test_reserves_that_wait_are_served_in_their_order(
    connect: Connect, open_namespace: Open, client: Client, namespace: Namespace
) -> None:
    all_of_it = namespace.match([], reserve_tokens=128 * BLOCK)
    order: list[int] = []

    def take(number: int, lease: Lease) -> None:
        lease.reserve(128 * BLOCK)
        order.append(number)
        lease.release()

    leases = [open_namespace(connect()).match([]) for _ in range(4)]
    with ThreadPoolExecutor() as threads:
        for number, lease in enumerate(leases):
            before = client.status().counters["requests"]
            threads.submit(take, number, lease)
            # It is the only request beside heartbeats; two more rounds and it surely waits.
            eventually(lambda before=before: client.status().counters["requests"] > before + 12)
        all_of_it.release()
    assert order == [0, 1, 2, 3]


def test_a_reserve_that_gave_up_does_not_hinder_the_next(
    namespace: Namespace, connect: Connect, open_namespace: Open
) -> None:
    most = namespace.match([], reserve_tokens=96 * BLOCK)
    greedy = open_namespace(connect()).match([])
    with pytest.raises(OutOfPages):
        greedy.reserve(128 * BLOCK, timeout=1.0)
    modest = open_namespace(connect()).match([])
    modest.reserve(BLOCK)
    most.release()


# --- threads ---


def test_many_threads_on_one_client(client: Client, namespace: Namespace) -> None:
    def work(seed: int) -> int:
        wrong = 0
        for turn in range(10):
            tokens = tokens_of(seed % 4 * 10 + turn % 5, 4)
            with namespace.match(tokens) as lease:
                wrong += not holds(lease, tokens, lease.num_tokens)
                compute(lease, tokens)
                wrong += not holds(lease, tokens)
                lease.check()
        return wrong

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(work, range(16))) == 0
    assert num_leases(client) == 0


def test_a_slow_match_blocks_no_other_thread(client: Client, namespace: Namespace) -> None:
    all_of_it = namespace.match([], reserve_tokens=128 * BLOCK)
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(namespace.match, TOKENS, reserve_tokens=BLOCK)
        for seed in range(20):
            assert namespace.match(tokens_of(seed, 1)).is_open
        assert not slow.done()
        all_of_it.release()
        assert len(slow.result().pages) > 0


def test_no_heartbeat_ends_a_lease_that_is_just_granted() -> None:
    """Heartbeats list the living leases: one made beside a match must not overtake it."""
    sessions = SESSIONS | {"heartbeat_seconds": 0.0001}
    with (
        running_daemon(settings(sessions=sessions)) as daemon,
        Client(daemon.endpoint, timeout=30.0) as client,
    ):
        namespace = client.open(IDENTITY, LAYOUT)

        def ended(seed: int) -> int:
            return sum(not namespace.match(TOKENS).is_open for _ in range(150))

        with fast_switching(), ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(ended, range(4))) == 0


@pytest.mark.parametrize("timeout", [0.0001, 0.0002])
def test_a_call_that_gives_up_while_it_is_sent_takes_no_other_with_it(
    daemon: RunningDaemon, timeout: float
) -> None:
    with Client(daemon.endpoint, timeout=timeout) as client:

        def hurry(_: int) -> None:
            for _ in range(1500):
                with contextlib.suppress(DeadlineExceeded):
                    client.status()

        assert client.wait_attached(30.0)
        with fast_switching(), ThreadPoolExecutor(8) as threads:
            list(threads.map(hurry, range(8)))
        client.timeout = 30.0
        assert client.wait_attached(10.0)
        assert client.status().pid == daemon.pid


@contextlib.contextmanager
def fast_switching() -> Any:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# --- interrupts ---


@contextlib.contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Any:
    """KeyboardInterrupt in the main thread once something is so, and not before."""

    def interrupt() -> None:
        eventually(condition)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()


def test_an_interrupted_match_leaves_no_lease(
    client: Client, connect: Connect, namespace: Namespace, open_namespace: Open
) -> None:
    all_of_it = open_namespace(connect()).match([], reserve_tokens=128 * BLOCK)
    with interrupted_when(lambda: num_leases(client) == 2):
        namespace.match(TOKENS, reserve_tokens=BLOCK)
    eventually(lambda: num_leases(client) == 1)
    all_of_it.release()
    eventually(lambda: pages(client).get("reserved") is None)
    assert namespace.match(TOKENS).is_open


@pytest.mark.parametrize("aborts", [False, True])
def test_a_lease_goes_on_after_an_interrupted_reserve(
    aborts: bool, client: Client, connect: Connect, namespace: Namespace, open_namespace: Open
) -> None:
    all_of_it = open_namespace(connect()).match([], reserve_tokens=128 * BLOCK)
    lease = namespace.match(TOKENS)
    before = client.status().counters["requests"]
    with interrupted_when(lambda: client.status().counters["requests"] > before + 12):
        lease.reserve(len(TOKENS))
    all_of_it.release()
    eventually(lambda: pages(client).get("reserved") == 16)
    if aborts:
        lease.abort()
    compute(lease, TOKENS)
    with namespace.match(TOKENS) as found:
        assert holds(found, TOKENS)


def test_pages_named_in_a_commit_are_never_written_again() -> None:
    """The commit was sent and done, but nobody waited for the answer."""
    with (
        running_daemon(settings()) as daemon,
        Client(daemon.endpoint, timeout=30.0) as client,
        Client(daemon.endpoint, timeout=30.0) as other,
    ):
        namespace = client.open(IDENTITY, LAYOUT)
        lease = namespace.match(TOKENS, reserve_tokens=len(TOKENS))
        write(lease, TOKENS, 0, len(TOKENS))
        daemon.pause()
        beside = client.connection.core
        with interrupted_when(lambda: bool(beside._pending)):
            lease.commit(TOKENS)
        daemon.resume()
        eventually(lambda: other.open(IDENTITY, LAYOUT).match(TOKENS).num_tokens == len(TOKENS))
        with pytest.raises(BadRequest):
            lease.write_arrays(0, len(TOKENS))
        assert lease.commit(TOKENS) == len(TOKENS)


# --- bounds ---


def test_too_many_leases_are_refused(namespace: Namespace) -> None:
    leases = [namespace.match(TOKENS) for _ in range(64)]
    with pytest.raises(LimitExceeded, match="64 leases"):
        namespace.match(TOKENS)
    leases.pop().release()
    assert namespace.match(TOKENS).is_open


def test_a_request_larger_than_the_daemon_takes_is_refused_and_ends_nothing(
    namespace: Namespace, lease: Lease
) -> None:
    with pytest.raises(LimitExceeded, match="1048576"):
        namespace.match(bytes(2 << 20))
    lease.check()
    assert namespace.match(bytes(1 << 19)).is_open


def test_more_pages_than_there_are_are_refused_at_once(namespace: Namespace) -> None:
    with pytest.raises(OutOfPages, match="of 128"):
        namespace.match([]).reserve(129 * BLOCK, timeout=3600)


def test_what_no_release_of_others_can_give_is_refused_at_once(lease: Lease) -> None:
    """It has 16 pages and wants 113 more, of 128."""
    with pytest.raises(OutOfPages, match="of 128"):
        lease.reserve(129 * BLOCK, timeout=3600)


def test_a_tiny_timeout_is_nobody_elses_outage(client: Client, namespace: Namespace) -> None:
    assert client.wait_attached(30.0)
    for _ in range(20):
        namespace.match(TOKENS, timeout=1e-6)
        with namespace.match(TOKENS, timeout=30.0) as lease:
            assert lease.is_open


@pytest.mark.parametrize("name", ["x" * 300, "\\ud800"])
def test_every_name_will_do(daemon: RunningDaemon, name: str) -> None:
    with Client(daemon.endpoint, timeout=30.0, name=name) as client:
        assert client.wait_attached(30.0)


def test_a_deadline_that_is_already_over_is_a_miss(client: Client, namespace: Namespace) -> None:
    assert client.wait_attached(30.0)
    for timeout in (0.0, -1.0, 1e-6):
        assert not namespace.match(TOKENS, timeout=timeout).is_open
    assert client.wait_attached(30.0)
    assert namespace.match(TOKENS).is_open
    eventually(lambda: num_leases(client) == 0)


# --- ends ---


def test_close_twice_is_as_once(client: Client) -> None:
    assert client.wait_attached(30.0)
    client.close()
    client.close()
    assert not client.attached


def test_a_closed_client_detaches(connect: Connect, client: Client) -> None:
    other = connect()
    assert other.wait_attached(30.0)
    other.close()
    eventually(lambda: len(client.status().sessions) == 1)


def test_a_with_block_closes_also_after_an_exception(daemon: RunningDaemon, client: Client) -> None:
    with contextlib.suppress(KeyError), Client(daemon.endpoint, timeout=30.0) as other:
        assert other.wait_attached(30.0)
        raise KeyError
    eventually(lambda: len(client.status().sessions) == 1)


def test_after_close_a_match_is_a_miss_and_all_else_is_refused(
    client: Client, namespace: Namespace
) -> None:
    lease = namespace.match(TOKENS)
    client.close()
    assert not namespace.match(TOKENS).is_open
    assert not lease.is_open
    with pytest.raises(DaemonUnavailable):
        client.status()
    with pytest.raises((LeaseEnded, DaemonUnavailable)):
        lease.reserve(1000)
    assert client.wait_attached(0.0) is False
    lease.abort()
    lease.release()


def test_nothing_writes_to_a_file_that_was_opened_after_close(
    client: Client, namespace: Namespace, tmp_path: Path
) -> None:
    """The number of a descriptor that the client closed soon belongs to somebody else."""
    leases = [namespace.match(TOKENS) for _ in range(3)]
    client.close()
    files = [(tmp_path / str(number)).open("w+b", buffering=0) for number in range(64)]
    leases.pop().release()
    leases.pop().abort()
    leases.clear()
    namespace.match(TOKENS)
    with contextlib.suppress(KvdError):
        client.status()
    assert [file.seek(0, os.SEEK_END) for file in files] == [0] * 64
    for file in files:
        file.close()


def test_a_client_that_is_forgotten_detaches(daemon: RunningDaemon, client: Client) -> None:
    other = Client(daemon.endpoint, timeout=30.0)
    assert other.wait_attached(30.0)
    del other
    eventually(lambda: len(client.status().sessions) == 1)


def test_a_client_that_is_forgotten_with_a_view_in_use_ends_without_noise(
    program: Callable[..., Child], client: Client
) -> None:
    """The last reference to it goes in its own thread, which cannot wait for itself."""
    code = """
import threading
def noise(args):
    print('noise:', args)
threading.excepthook = sys.unraisablehook = noise
views = namespace.match(tokens_of(1, 4), reserve_tokens=64).write_arrays(0, 64)
del namespace, client
views.clear()
eventually(lambda: not [t for t in threading.enumerate() if t.name == 'kvd-client'])
print('quiet')
"""
    forgetful = program(code)
    assert forgetful.says() == "quiet"
    eventually(lambda: len(client.status().sessions) == 1)


def test_a_program_that_does_not_close_its_client_ends(
    program: Callable[..., Child], client: Client
) -> None:
    careless = program("lease = namespace.match(tokens_of(1, 4), reserve_tokens=64)\nprint('done')")
    assert careless.says() == "done"
    assert careless.ended() == 0
    eventually(lambda: len(client.status().sessions) == 1)


def test_no_descriptor_is_left_of_a_closed_client(daemon: RunningDaemon) -> None:
    def used() -> int:
        with Client(daemon.endpoint, timeout=30.0) as client:
            store(client.open(IDENTITY, LAYOUT), TOKENS)
        del client
        import gc

        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = used()
    assert [used() for _ in range(5)] == [before] * 5


def test_status_raises_where_nobody_answers(tmp_path: Path) -> None:
    with (
        Client(f"ipc://{tmp_path}/nobody.sock", timeout=0.1) as client,
        pytest.raises((DaemonUnavailable, DeadlineExceeded)),
    ):
        client.status()


def test_a_closed_namespace_is_opened_anew_at_its_next_use(
    client: Client, namespace: Namespace
) -> None:
    lease = namespace.match(range(8), reserve_tokens=8)
    number = next(n.namespace for n in client.status().namespaces if n.salt == namespace.salt)
    namespace.close()
    assert not lease.is_open
    (status,) = (n for n in client.status().namespaces if n.namespace == number)
    assert (status.num_sessions, status.num_leases) == (0, 0)
    assert namespace.match(range(8)).is_open


def test_a_prefetch_without_a_daemon_comes_to_nothing(tmp_path: Path) -> None:
    with Client(f"ipc://{tmp_path}/nobody.sock", timeout=0.1) as client:
        client.open(IDENTITY, LAYOUT).prefetch(tokens_of(1, 4))
