"""Clients that do not map: copies of what they lease, and the memory of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvd.arena.runs import Pages, pages_of
from kvd.protocol.messages import MAX_PIECE_BYTES
from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import Layout, LeaseEnded
from kvd_client.client import Client
from kvd_client.mirror import Mirror
from tests.actors.wire import Wire
from tests.e2e.support import (
    IDENTITY,
    LAYOUT,
    compute,
    eventually,
    holds,
    settings,
    store,
    tokens_of,
    write,
)

if TYPE_CHECKING:
    from kvd.protocol.layout import Order
    from kvd_client.client import Namespace
    from tests.arena.conftest import Child

TOKENS = tokens_of(1, 4)


@pytest.fixture
def copier(daemon: RunningDaemon, connect: Callable[[], Client]) -> Iterator[Client]:
    """A client that is closed before `connect` looks whether anything is left of it."""
    with Client(daemon.endpoint, timeout=30.0, maps=False, name="copier") as client:
        assert client.wait_attached(30.0)
        yield client


def end_session(daemon: RunningDaemon, client: Client) -> None:
    """What the client learns with its next message at the latest."""
    assert client.connection.core.session is not None
    wire = Wire(daemon.endpoint)
    wire.attach(previous=client.connection.core.session.secret)
    wire.close()


def test_who_maps_and_who_does_not_share_what_they_commit(
    namespace: Namespace, copier: Client
) -> None:
    copies = copier.open(IDENTITY, LAYOUT, salt=namespace.salt)
    store(namespace, TOKENS)
    with copies.match(TOKENS) as lease:
        assert holds(lease, TOKENS)
    longer = TOKENS + tokens_of(2, 40)
    store(copies, longer)
    with namespace.match(longer) as lease:
        assert holds(lease, longer)
    (session,) = [one for one in copier.status().sessions if one.client == "copier"]
    assert not session.maps


def test_of_two_who_compute_the_same_the_second_reads_what_is_kept(
    namespace: Namespace, copier: Client
) -> None:
    lease = copier.open(IDENTITY, LAYOUT, salt=namespace.salt).match([], reserve_tokens=16)
    write(lease, TOKENS, 0, 16)
    store(namespace, TOKENS)
    assert lease.commit(TOKENS) == 16
    lease.abort()
    assert holds(lease, TOKENS)


def test_what_a_lease_is_extended_by_is_copied(namespace: Namespace, copier: Client) -> None:
    store(namespace, TOKENS[:8])
    lease = copier.open(IDENTITY, LAYOUT, salt=namespace.salt).match(TOKENS)
    store(namespace, TOKENS)
    assert lease.extend() == len(TOKENS)
    assert holds(lease, TOKENS)


HIDDEN = """
import ctypes, subprocess
CLONE_NEWNS = 0x20000
run = lambda *command: subprocess.run(command).returncode
if (
    ctypes.CDLL(None).unshare(CLONE_NEWNS)
    or run('mount', '--make-rprivate', '/')
    or run('mount', '-t', 'tmpfs', 'none', sys.argv[2])
):
    sys.exit('cannot hide a directory')
inside = Client(sys.argv[1], timeout=30.0).open(IDENTITY, LAYOUT, salt=sys.argv[3])
with inside.match(tokens_of(1, 4)) as lease:
    print(holds(lease, tokens_of(1, 4)))
store(inside, tokens_of(2, 4))
"""


def test_memory_that_is_not_there_is_copied(
    program: Callable[..., Child], daemon: RunningDaemon, namespace: Namespace
) -> None:
    """As in another container, which has the socket and not the daemon's directory."""
    store(namespace, TOKENS)
    inside = program(HIDDEN, daemon.directory, namespace.salt)
    if not (says := inside.says()):
        pytest.skip("cannot hide a directory")
    assert (says, inside.ended()) == ("True", 0)
    with namespace.match(tokens_of(2, 4)) as lease:
        assert holds(lease, tokens_of(2, 4))


def test_a_copied_lease_ends_with_the_daemon() -> None:
    with (
        running_daemon(settings()) as daemon,
        Client(daemon.endpoint, timeout=30.0, maps=False) as client,
    ):
        namespace = client.open(IDENTITY, LAYOUT)
        lease = namespace.match(TOKENS, reserve_tokens=16)
        daemon.restart()
        eventually(lambda: not lease.is_open)
        with pytest.raises(LeaseEnded):
            lease.check()
        with pytest.raises(LeaseEnded):
            lease.commit(TOKENS)
        eventually(lambda: namespace.match(TOKENS).is_open)


def test_a_match_whose_session_ends_before_its_blocks_came_is_done_again(
    daemon: RunningDaemon, copier: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = copier.open(IDENTITY, LAYOUT, salt="again")
    store(namespace, TOKENS)

    def missing(mirror: Mirror, pages: Pages) -> Pages:
        monkeypatch.undo()
        end_session(daemon, copier)
        return mirror.missing(pages)

    monkeypatch.setattr(Mirror, "missing", missing)
    with namespace.match(TOKENS) as lease:
        assert holds(lease, TOKENS)


def test_pins_end_in_the_next_session_where_one_ended(
    daemon: RunningDaemon, copier: Client
) -> None:
    namespace = copier.open(IDENTITY, LAYOUT, salt="pinned")
    store(namespace, TOKENS)
    namespace.pin(TOKENS, 60.0)
    end_session(daemon, copier)
    assert copier.unpin() == 1


# --- memory ---


def mirror_of(namespace: Namespace) -> Mirror:
    assert namespace._binding is not None
    assert namespace._binding.mirror is not None
    return namespace._binding.mirror


def test_memory_is_given_back_with_the_last_lease(copier: Client) -> None:
    namespace = copier.open(IDENTITY, LAYOUT, salt="given back")
    tokens = tokens_of(1, 64)
    store(namespace, tokens)
    one, two = namespace.match(tokens), namespace.match(tokens)
    pages = mirror_of(namespace).readable.pages
    one.release()
    assert holds(two, tokens)
    two.release()
    assert not pages[two.pages].any()


def test_what_leases_hold_stays_where_others_beside_it_end(copier: Client) -> None:
    """Pages are smaller than those of the system: some share memory with others'."""
    namespace = copier.open(IDENTITY, LAYOUT, salt="beside")
    for seed in range(2, 8):
        store(namespace, tokens_of(seed, 1))
    leases = [namespace.match(tokens_of(seed, 1)) for seed in range(2, 8)]
    for lease in leases[::2]:
        lease.release()
    assert all(holds(leases[place], tokens_of(place + 2, 1)) for place in (1, 3, 5))


def test_pages_that_come_again_are_read_anew(copier: Client) -> None:
    """More is computed than there are pages: most of them come again with other blocks."""
    namespace = copier.open(IDENTITY, LAYOUT, salt="anew")

    def wrong(thread: int) -> int:
        wrong = 0
        for turn in range(40):
            tokens = tokens_of((thread * 7 + turn) % 20, 12)
            with namespace.match(tokens) as lease:
                wrong += not holds(lease, tokens, lease.num_tokens)
                compute(lease, tokens)
                wrong += not holds(lease, tokens)
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(wrong, range(4))) == 0


def test_the_page_of_a_tail_that_comes_again_is_read_anew(
    namespace: Namespace, copier: Client
) -> None:
    copies = copier.open(IDENTITY, LAYOUT, salt=namespace.salt)
    store(namespace, TOKENS)
    tokens = TOKENS[:2] + tokens_of(2, 1)[2:]
    lease = copies.match(tokens, exact_tail=True)
    compute(lease, tokens)  # the tail is the lease's no more
    namespace.drop(TOKENS)
    for seed in range(3, 13):  # all pages but a few
        store(namespace, tokens_of(seed, 12))
        with copies.match(tokens_of(seed, 12)) as other:
            assert holds(other, tokens_of(seed, 12))
    assert holds(lease, tokens)


@pytest.mark.parametrize("order", ["layer_first", "page_first"])
@pytest.mark.parametrize("block_size", [1, 64, 128])
def test_the_pieces_of_pages_are_all_of_them_once(order: Order, block_size: int) -> None:
    layout = Layout(3, 2, 1024, "float32", block_size, order=order)
    mirror = Mirror(layout, 64)
    pages = np.array([5, 6, 7, 20, 21, 3, 63])
    moved = [
        (page, number)
        for piece in mirror.pieces(pages)
        for number in range(piece.first_slice, piece.first_slice + piece.num_slices)
        for page in pages_of(piece.runs).tolist()
    ]
    assert sorted(moved) == sorted((page, number) for page in pages.tolist() for number in range(6))
    sizes = [len(mirror.read(piece)) for piece in mirror.pieces(pages)]
    assert max(sizes) <= MAX_PIECE_BYTES
