"""Exact tails, forks, replaced and kept leases, extras, pins and drops: mapped and copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvd.protocol.layout import MAX_GROUP_PAGES
from kvd_client import BadRequest, Dropped, LeaseEnded, PagesInUse
from kvd_client.client import Client
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    compute,
    eventually,
    holds,
    kv_of,
    pages_in,
    read,
    store,
    tokens_of,
    write,
)

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client.client import Namespace

TOKENS = tokens_of(1, 4)
IMAGE, OTHER_IMAGE = b"i" * 32, b"o" * 32


@pytest.fixture(params=[True, False], ids=["mapped", "copied"])
def client(
    daemon: RunningDaemon, connect: Callable[[], Client], request: pytest.FixtureRequest
) -> Iterator[Client]:
    """A client that is closed before `connect` looks whether anything is left of it."""
    with Client(daemon.endpoint, timeout=30.0, maps=request.param, name="test") as client:
        assert client.wait_attached(30.0)
        yield client


@pytest.fixture
def images(client: Client, request: pytest.FixtureRequest) -> Namespace:
    return client.open(IDENTITY, LAYOUT, salt=request.node.name, extras=True)


# --- exact tails ---


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 15])
def test_an_exact_tail_is_exact_to_the_token(namespace: Namespace, num_tokens: int) -> None:
    store(namespace, TOKENS)
    tokens = TOKENS[:num_tokens] + tokens_of(2, 4)
    lease = namespace.match(tokens, exact_tail=True)
    assert (lease.num_tokens, lease.num_committed) == (num_tokens, num_tokens // BLOCK * BLOCK)
    assert holds(lease, TOKENS, num_tokens)


def test_what_follows_an_exact_tail_is_written_behind_it(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    tokens = TOKENS[:6] + tokens_of(2, 2)[:6]
    with namespace.match(tokens, reserve_tokens=12, exact_tail=True) as lease:
        write(lease, tokens, lease.num_tokens, 12)
        assert lease.commit(tokens[lease.num_committed :]) == 12
    with namespace.match(tokens) as lease:
        assert lease.num_tokens == 12
        assert holds(lease, tokens)
    assert namespace.match(TOKENS).num_tokens == 16


def test_without_an_agreeing_token_there_is_no_tail(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    assert namespace.match(TOKENS[:4] + tokens_of(2, 1), exact_tail=True).num_tokens == 4
    assert namespace.match(tokens_of(2, 1), exact_tail=True).num_tokens == 0


def test_with_the_page_of_an_exact_tail_come_others_of_its_group(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    pages = namespace.match(TOKENS[:1], exact_tail=True).pages
    assert len(pages) > 1
    assert len(set(pages // MAX_GROUP_PAGES)) == 1


# --- forks ---


def test_a_fork_has_the_committed_blocks_and_pages_of_its_own(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    lease = namespace.match(TOKENS, reserve_tokens=16)
    fork = lease.fork(reserve_tokens=16)
    assert (fork.num_tokens, fork.num_committed) == (16, 16)
    assert fork.pages[:4].tolist() == lease.pages[:4].tolist()
    assert not set(fork.pages[4:].tolist()) & set(lease.pages[4:].tolist())
    for branch, seed in ((lease, 2), (fork, 3)):
        compute(branch, TOKENS + tokens_of(seed, 4))
    lease.release()
    assert holds(fork, TOKENS + tokens_of(3, 4))
    assert namespace.match(TOKENS + tokens_of(2, 4)).num_tokens == 32


def test_a_fork_takes_over_the_rows_of_a_block_that_is_not_full(namespace: Namespace) -> None:
    lease = namespace.match(TOKENS, reserve_tokens=16)
    write(lease, TOKENS, 0, 7)
    lease.commit(TOKENS[:4])
    fork = lease.fork(reserve_tokens=12)
    fork.copy_rows(lease, 4, 7)
    lease.release()
    write(fork, TOKENS, 7, 16)
    assert fork.commit(TOKENS[4:]) == 16
    assert holds(namespace.match(TOKENS), TOKENS)


@pytest.mark.parametrize(("start", "stop"), [(0, 200), (3, 190), (63, 65), (100, 100)])
def test_rows_are_copied_across_runs(namespace: Namespace, start: int, stop: int) -> None:
    """Two leases that reserve in turn have a run after every sixteenth page."""
    one, two = namespace.match([]), namespace.match([])
    for step in (64, 128, 200):
        one.reserve(step)
        two.reserve(step)
    tokens = tokens_of(1, 50)
    write(one, tokens, 0, 200)
    two.copy_rows(one, start, stop)
    assert np.array_equal(read(two, start, stop), kv_of(tokens)[:, :, start:stop])
    assert pages_in(namespace.client, "reserved") > 0


def test_rows_are_copied_into_own_pages_alone(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    lease, other = namespace.match(TOKENS), namespace.match([], reserve_tokens=16)
    with pytest.raises(BadRequest, match="committed"):
        lease.copy_rows(other, 0, 4)
    with pytest.raises(BadRequest):
        other.copy_rows(lease, 0, 17)


def test_a_released_lease_has_no_fork(namespace: Namespace) -> None:
    lease = namespace.match(TOKENS)
    lease.release()
    with pytest.raises(LeaseEnded):
        lease.fork()


# --- replaced and kept ---


def test_a_replaced_lease_stands_for_the_new_match(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    lease = namespace.match(tokens_of(2, 4), reserve_tokens=16)
    lease.replace(TOKENS, reserve_tokens=16)
    assert lease.num_tokens == 16
    assert holds(lease, TOKENS)
    compute(lease, TOKENS + tokens_of(3, 4))
    lease.replace(TOKENS + tokens_of(3, 4))
    assert lease.num_tokens == 32
    assert [one.num_leases for one in namespace.client.status().sessions] == [1]


def test_a_lease_is_not_replaced_under_a_view(namespace: Namespace) -> None:
    lease = namespace.match(TOKENS, reserve_tokens=16)
    views = lease.write_arrays(0, 16)
    with pytest.raises(PagesInUse):
        lease.replace(TOKENS)
    assert lease.is_open
    del views


def test_what_cannot_be_matched_replaces_nothing(namespace: Namespace) -> None:
    lease = namespace.match(TOKENS, reserve_tokens=16)
    capacity = lease.capacity_tokens
    with pytest.raises(BadRequest):
        lease.replace([-1])
    assert lease.is_open
    assert lease.capacity_tokens == capacity


@pytest.mark.parametrize(("keep", "kept"), [(4, 4), (7, 4), (16, 16)])
def test_a_lease_keeps_its_first_blocks(namespace: Namespace, keep: int, kept: int) -> None:
    lease = namespace.match(TOKENS, reserve_tokens=64)
    compute(lease, TOKENS)
    lease.release(keep_tokens=keep)
    assert (lease.num_committed, lease.capacity_tokens) == (kept, kept)
    assert holds(lease, TOKENS, kept)
    eventually(lambda: pages_in(namespace.client, "reserved") == 0)
    compute(lease, TOKENS[:kept] + tokens_of(2, 4))
    assert namespace.match(TOKENS[:kept] + tokens_of(2, 4)).num_tokens == kept + 16


@pytest.mark.parametrize("num_tokens", [3, 17, -1])
def test_a_lease_keeps_a_block_at_least_and_no_more_than_is_committed(
    namespace: Namespace, num_tokens: int
) -> None:
    store(namespace, TOKENS)
    lease = namespace.match(TOKENS)
    with pytest.raises(BadRequest):
        lease.release(keep_tokens=num_tokens)
    assert lease.is_open


# --- extras ---


def test_equal_tokens_with_other_extras_never_meet(images: Namespace) -> None:
    with images.match(TOKENS, reserve_tokens=16, extras=[(5, IMAGE)]) as lease:
        write(lease, TOKENS, 0, 16)
        assert lease.commit(TOKENS[:6], extras=[(5, IMAGE)]) == 4
        assert lease.commit(TOKENS[4:], extras=[(5, IMAGE)]) == 16
    assert images.match(TOKENS, extras=[(5, IMAGE)]).num_tokens == 16
    assert images.match(TOKENS, extras=[(5, OTHER_IMAGE)]).num_tokens == 4
    assert images.match(TOKENS).num_tokens == 4


@pytest.mark.parametrize(
    "extras",
    [
        [(16, IMAGE)],
        [(-1, IMAGE)],
        [(0, b"short")],
        [(0, 5)],
        [("a", IMAGE)],
        [3],
        7,
        [(0.5, IMAGE)],
    ],
)
def test_what_is_no_extra_is_refused(images: Namespace, extras: Any) -> None:
    with pytest.raises(BadRequest):
        images.match(TOKENS, extras=extras)
    with images.match(TOKENS, reserve_tokens=16) as lease:
        write(lease, TOKENS, 0, 16)
        with pytest.raises(BadRequest):
            lease.commit(TOKENS, extras=extras)
        assert lease.commit(TOKENS) == 16


def test_extras_are_for_namespaces_that_have_them(namespace: Namespace) -> None:
    with pytest.raises(BadRequest, match="extras"):
        namespace.match(TOKENS, extras=[(0, IMAGE)])


# --- pins and drops ---


def test_a_pin_is_listed_until_it_is_ended(namespace: Namespace, client: Client) -> None:
    store(namespace, TOKENS)
    pin = namespace.pin(TOKENS + tokens_of(2, 1), 60.0)
    assert (pin.num_tokens, pin.num_bytes) == (16, 4 * LAYOUT.page_bytes)
    (listed,) = client.leases().pins
    assert (listed.pin, listed.owner) == (pin.pin, client.name)
    assert client.unpin(pins=(pin.pin,)) == 1
    assert client.leases().num_pins == 0


def test_an_operator_pins_and_drops_by_number(namespace: Namespace, client: Client) -> None:
    store(namespace, TOKENS)
    number = max(one.namespace for one in client.status().namespaces)
    assert client.pin(number, TOKENS, 60.0, owner="operator").num_tokens == 16
    assert client.drop(number, TOKENS, from_token=9).blocks_by_tier == {"host": 2}
    assert namespace.match(TOKENS).num_tokens == 8
    assert client.drop(number).blocks_by_tier == {"host": 2}
    assert client.unpin(owner="operator") == 0


def test_without_a_store_nothing_is_copied_and_memory_is_verified(
    namespace: Namespace, client: Client
) -> None:
    store(namespace, TOKENS)
    assert client.checkpoint() == 0
    (memory,) = eventually(lambda: (tiers := client.verify().tiers)[0].num_checked and tiers)
    assert (memory.name, memory.num_bad, memory.num_missing) == ("host", 0, 0)


def test_leases_are_listed(namespace: Namespace, client: Client) -> None:
    lease = namespace.match(TOKENS, reserve_tokens=16)
    reply = client.leases(limit=1)
    told = [(one.client, one.num_reserved) for one in reply.leases]
    assert told == [(client.name, len(lease.pages))]
    lease.release()


def test_what_a_drop_overtook_is_not_committed_and_stays_the_readers(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    longer = TOKENS + tokens_of(2, 4)
    lease = namespace.match(TOKENS, reserve_tokens=16)
    write(lease, longer, 16, 32)
    namespace.drop(TOKENS, from_token=8)
    with pytest.raises(Dropped):
        lease.commit(longer[16:])
    lease.check()
    assert holds(lease, longer)
    assert namespace.match(longer).num_tokens == 8


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "long", None])
def test_a_pin_for_no_time_is_refused(namespace: Namespace, seconds: Any) -> None:
    with pytest.raises(BadRequest):
        namespace.pin(TOKENS, seconds)
