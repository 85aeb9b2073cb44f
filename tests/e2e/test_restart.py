"""A daemon that dies, comes back or stands still, under clients that work (design, section 6)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import DaemonUnavailable, DeadlineExceeded, LeaseEnded
from kvd_client.client import Client
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    NUM_PAGES,
    SESSIONS,
    compute,
    eventually,
    held,
    holds,
    kv_of,
    pages,
    settings,
    store,
    tokens_of,
    write,
)

if TYPE_CHECKING:
    from kvd_client.client import Lease, Namespace
    from tests.arena.conftest import Child


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[RunningDaemon]:
    with running_daemon(settings()) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared_daemon: RunningDaemon) -> RunningDaemon:
    """The daemon of all these tests, which runs and has no session when each of them begins."""
    if not shared_daemon.is_running:
        shared_daemon.start()
    with Client(shared_daemon.endpoint, timeout=30.0) as observer:
        assert observer.wait_attached(30.0)
        eventually(lambda: len(observer.status().sessions) == 1)
    return shared_daemon


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def namespace(client: Client, salt: str) -> Namespace:
    return client.open(IDENTITY, LAYOUT, salt=salt)


def matched_again(namespace: Namespace) -> Lease:
    """The first lease of the daemon that is there now."""
    return eventually(lambda: (lease := namespace.match(tokens_of(99, 1))).is_open and lease)


# --- killed and started again ---


def test_a_lease_ends_with_the_daemon(daemon: RunningDaemon, namespace: Namespace) -> None:
    lease = namespace.match(tokens_of(1, 4))
    daemon.restart()
    assert not lease.is_open
    with pytest.raises(LeaseEnded):
        lease.check()


def test_a_client_attaches_again_by_itself(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, tokens_of(1, 4))
    daemon.restart()
    assert matched_again(namespace).num_tokens == 0
    store(namespace, tokens_of(1, 4))
    with namespace.match(tokens_of(1, 4)) as lease:
        assert holds(lease, tokens_of(1, 4))
    assert len(client.status().sessions) == 1


def test_a_client_attaches_again_and_again(daemon: RunningDaemon, namespace: Namespace) -> None:
    for seed in range(3):
        daemon.restart()
        matched_again(namespace)
        store(namespace, tokens_of(seed, 4))
        with namespace.match(tokens_of(seed, 4)) as lease:
            assert holds(lease, tokens_of(seed, 4))


@pytest.mark.parametrize("again", [False, True], ids=["at once", "after it attached again"])
def test_a_lease_of_before_cannot_be_used(
    daemon: RunningDaemon, namespace: Namespace, again: bool
) -> None:
    lease = namespace.match(tokens_of(1, 4), reserve_tokens=4 * BLOCK)
    write(lease, tokens_of(1, 4), 0, 4 * BLOCK)
    daemon.restart()
    if again:
        matched_again(namespace)
    for use in (lambda: lease.commit(tokens_of(1, 4)), lambda: lease.reserve(40 * BLOCK)):
        with pytest.raises((LeaseEnded, DaemonUnavailable)):
            use()
    lease.abort()
    lease.release()
    assert matched_again(namespace).is_open
    assert namespace.match(tokens_of(1, 4)).num_tokens == 0


def test_a_late_write_into_pages_of_before_changes_no_new_one(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    old = namespace.match(tokens_of(1, 4), reserve_tokens=16 * BLOCK)
    views = old.write_arrays(0, 16 * BLOCK)
    daemon.restart()
    matched_again(namespace)
    for seed in range(2, 10):
        store(namespace, tokens_of(seed, 16))
    for view in views:
        view[:] = -1
    for seed in range(2, 10):
        with namespace.match(tokens_of(seed, 16)) as lease:
            assert holds(lease, tokens_of(seed, 16), lease.num_tokens)


def test_memory_in_a_place_of_its_own_is_not_taken_from_clients_of_another_directory(
    shm: Path,  # noqa: F811
) -> None:
    document = settings()
    document["tiers"][0]["directory"] = str(shm)
    with running_daemon(document) as one, Client(one.endpoint, timeout=30.0) as client:
        old = client.open(IDENTITY, LAYOUT).match([], reserve_tokens=16 * BLOCK)
        views = old.write_arrays(0, 16 * BLOCK)
        one.kill()
        with running_daemon(document) as other, Client(other.endpoint, timeout=30.0) as second:
            namespace = second.open(IDENTITY, LAYOUT)
            store(namespace, tokens_of(1, 128))
            for view in views:
                view[:] = -1
            assert holds(namespace.match(tokens_of(1, 128)), tokens_of(1, 128))


def test_what_is_read_from_pages_of_before_stays_readable_and_void(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    store(namespace, tokens_of(1, 4))
    old = namespace.match(tokens_of(1, 4))
    (view,) = old.read_arrays(0, 4 * BLOCK)
    daemon.restart()
    matched_again(namespace)
    store(namespace, tokens_of(2, 32))
    assert (view == kv_of(tokens_of(1, 4))).all()
    with pytest.raises(LeaseEnded):
        old.check()


def test_a_restart_shorter_than_a_heartbeat_is_noticed() -> None:
    sessions = SESSIONS | {"heartbeat_seconds": 3600.0}
    with (
        running_daemon(settings(sessions=sessions)) as daemon,
        Client(daemon.endpoint, timeout=30.0) as client,
    ):
        namespace = client.open(IDENTITY, LAYOUT)
        lease = namespace.match(tokens_of(1, 4))
        daemon.restart()
        assert not lease.is_open
        assert matched_again(namespace).is_open


def test_a_killed_daemon_leaves_nothing_that_hinders_the_next() -> None:
    with running_daemon(settings()) as daemon, Client(daemon.endpoint, timeout=30.0) as client:
        namespace = client.open(IDENTITY, LAYOUT)
        lease = namespace.match(tokens_of(1, 4), reserve_tokens=64 * BLOCK)
        view = lease.write_arrays(lease.num_tokens, lease.num_tokens + BLOCK)
        daemon.restart()
        matched_again(namespace)
        # What this process could still write through its old mapping waits for that to be gone.
        assert held(client)["quarantined"] > 0
        del view
        eventually(lambda: held(client).keys() <= {"committed"})
        # One arena, its table, what both are, and the file of the one session that is left.
        eventually(
            lambda: (
                sorted(path.suffix for path in daemon.directory.iterdir() if path.suffix)
                == [".about", ".arena", ".lock", ".lock", ".pages", ".session"]
            )
        )


@pytest.mark.parametrize("name", ["notes.session", "x.arena", "0.pages"])
def test_a_strangers_file_does_not_hinder_the_start(daemon: RunningDaemon, name: str) -> None:
    daemon.stop()
    (daemon.directory / name).write_text("what is this")
    daemon.start()
    assert "is ready" in daemon.ready_line


# --- not there ---


def test_without_a_daemon_a_match_is_a_miss(tmp_path: Path) -> None:
    with Client(f"ipc://{tmp_path}/kvd.sock", timeout=0.2) as client:
        lease = client.open(IDENTITY, LAYOUT).match(tokens_of(1, 4), reserve_tokens=BLOCK)
        assert (lease.num_tokens, lease.is_open, len(lease.pages)) == (0, False, 0)
        assert not client.attached
        with pytest.raises((DaemonUnavailable, DeadlineExceeded)):
            client.status()
        lease.release()


def test_a_client_that_was_there_first_attaches_to_the_daemon(daemon: RunningDaemon) -> None:
    daemon.stop()
    with Client(daemon.endpoint, timeout=0.2) as client:
        namespace = client.open(IDENTITY, LAYOUT)
        assert not namespace.match(tokens_of(1, 4)).is_open
        daemon.start()
        assert client.wait_attached(30.0)
        assert namespace.match(tokens_of(1, 4), timeout=30.0).is_open


def test_a_call_under_way_ends_when_the_daemon_dies(
    daemon: RunningDaemon, client: Client, namespace: Namespace, program: Callable[..., Child]
) -> None:
    code = """
lease, other = namespace.match([]), namespace.match([])
lease.reserve(NUM_PAGES * BLOCK)
print(len(lease.pages))
try:
    other.reserve(BLOCK, timeout=3600)
except KvdError as error:
    print(type(error).__name__)
"""
    waiting = program(code)
    assert waiting.says() == str(NUM_PAGES)
    before = client.status().counters["requests"]
    eventually(lambda: client.status().counters["requests"] >= before + 5)
    daemon.kill()
    assert waiting.says() == "DaemonUnavailable"


# --- standing still ---


@pytest.fixture
def quick(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout=1.0) as client:
        assert client.wait_attached(30.0)
        yield client


def test_a_daemon_that_stands_still_costs_one_deadline_and_then_nothing(
    daemon: RunningDaemon, quick: Client, salt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = quick.open(IDENTITY, LAYOUT, salt=salt)
    assert namespace.match(tokens_of(1, 4), timeout=30.0).is_open
    daemon.pause()
    assert not namespace.match(tokens_of(1, 4)).is_open
    with monkeypatch.context() as patched:
        patched.setattr(quick, "_wait", lambda wish: pytest.fail(f"it waits for {wish}"))
        assert not namespace.match(tokens_of(1, 4)).is_open
    daemon.resume()
    assert quick.wait_attached(30.0)


def test_leases_are_good_when_the_daemon_goes_on(
    daemon: RunningDaemon, quick: Client, salt: str
) -> None:
    namespace = quick.open(IDENTITY, LAYOUT, salt=salt)
    store(namespace, tokens_of(1, 4))
    reader = namespace.match(tokens_of(1, 4), timeout=30.0)
    writer = namespace.match(tokens_of(2, 4), reserve_tokens=4 * BLOCK, timeout=30.0)
    daemon.pause()
    assert not namespace.match(tokens_of(1, 4)).is_open
    assert reader.is_open
    assert holds(reader, tokens_of(1, 4))
    daemon.resume()
    assert quick.wait_attached(30.0)
    reader.check()
    writer.check()
    compute(writer, tokens_of(2, 4))
    assert namespace.match(tokens_of(2, 4), timeout=30.0).num_tokens == 4 * BLOCK
    assert len(quick.status().sessions) == 1


def test_a_match_that_nobody_waited_for_leaves_no_lease(
    daemon: RunningDaemon, quick: Client, salt: str
) -> None:
    namespace = quick.open(IDENTITY, LAYOUT, salt=salt)
    assert namespace.match(tokens_of(1, 4), timeout=30.0).is_open
    daemon.pause()
    for seed in range(5):
        namespace.match(tokens_of(seed, 4), reserve_tokens=BLOCK, timeout=0.05)
    daemon.resume()
    assert quick.wait_attached(30.0)
    eventually(lambda: [one.num_leases for one in quick.status().sessions] == [0])
    assert "reserved" not in pages(quick)


def test_a_commit_that_timed_out_can_be_made_again(
    daemon: RunningDaemon, quick: Client, salt: str
) -> None:
    namespace = quick.open(IDENTITY, LAYOUT, salt=salt)
    lease = namespace.match(tokens_of(1, 4), reserve_tokens=4 * BLOCK, timeout=30.0)
    write(lease, tokens_of(1, 4), 0, 4 * BLOCK)
    daemon.pause()
    with pytest.raises(DeadlineExceeded):
        lease.commit(tokens_of(1, 4))
    daemon.resume()
    assert quick.wait_attached(30.0)
    assert lease.commit(tokens_of(1, 4), timeout=30.0) == 4 * BLOCK
    assert holds(namespace.match(tokens_of(1, 4), timeout=30.0), tokens_of(1, 4))


def test_a_release_is_not_lost_on_a_daemon_that_stands_still(
    daemon: RunningDaemon, quick: Client, salt: str
) -> None:
    namespace = quick.open(IDENTITY, LAYOUT, salt=salt)
    leases = [namespace.match(tokens_of(seed, 1), timeout=30.0) for seed in range(5)]
    assert all(lease.is_open for lease in leases)
    daemon.pause()
    namespace.match(tokens_of(1, 1), timeout=0.05)
    for lease in leases:
        lease.release()
    daemon.resume()
    eventually(lambda: [one.num_leases for one in _sessions(quick)] == [0])


def _sessions(client: Client) -> tuple[object, ...]:
    assert client.wait_attached(30.0)
    return client.status().sessions


# --- all of it, under work ---


def test_a_working_client_survives_kills_and_never_reads_a_wrong_byte(
    daemon: RunningDaemon, program: Callable[..., Child]
) -> None:
    code = """
import itertools, random
rng = random.Random(1)
good = bad = 0
for turn in itertools.count():
    tokens = tokens_of(rng.randrange(20), 8)
    lease = namespace.match(tokens, timeout=0.5)
    try:
        with lease:
            right = holds(lease, tokens, lease.num_tokens)
            lease.check()
            good += right and lease.num_tokens > 0
            bad += not right
            compute(lease, tokens)
    except KvdError:
        pass
    if turn % 50 == 0:
        print(good, bad)
"""
    workers = [program(code), program(code)]
    for _ in range(3):
        for worker in workers:
            before = int(worker.says().split()[0])
            counts = (worker.says().split() for _ in itertools.count())
            good, bad = next(one for one in counts if int(one[0]) > before)
            assert bad == "0", good
        daemon.restart()
