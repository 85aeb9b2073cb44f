"""What cannot be is refused by its name, where it enters, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvd_client import BadRequest, Identity, Layout
from kvd_client.client import Client
from tests.e2e.support import IDENTITY, LAYOUT, compute, tokens_of, write

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client.client import Lease, Namespace

TOKENS = tokens_of(1, 4)
SURROGATE = "\ud800"

NO_TIMES: list[Any] = [float("inf"), -float("inf"), float("nan"), 1e300, "1", b"1", [1]]
NO_NUMBERS: list[Any] = [-1, 1 << 41, 1 << 70, 0.5, "1", None, [1]]
NO_TOKENS: list[Any] = [[-1], [1 << 32], [0.5], ["a"], "text", b"123", None, 7, {1: 2}, [[1], [2]]]
NO_TOKENS += [np.ones((2, 2), np.int64), np.ones(4), np.array([True]), [None], [1 << 70], [[1], 2]]


def refuses(ask: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(BadRequest):
        ask(value)


@pytest.mark.parametrize("timeout", NO_TIMES)
def test_what_is_no_time_is_refused(
    namespace: Namespace, lease: Lease, client: Client, timeout: Any
) -> None:
    refuses(lambda t: namespace.match(TOKENS, timeout=t), timeout)
    refuses(lambda t: namespace.pin(TOKENS, 1.0, timeout=t), timeout)
    refuses(lambda t: lease.reserve(1000, timeout=t), timeout)
    refuses(lambda t: lease.commit(TOKENS, timeout=t), timeout)
    refuses(lambda t: lease.fork(timeout=t), timeout)
    refuses(lambda t: lease.extend(timeout=t), timeout)
    refuses(lambda t: namespace.prefetch(TOKENS, timeout=t), timeout)
    refuses(client.wait_attached, timeout)
    compute(lease, TOKENS)


def test_a_year_is_a_time(namespace: Namespace) -> None:
    with namespace.match(TOKENS, reserve_tokens=16, timeout=365 * 86_400) as lease:
        assert lease.is_open


@pytest.mark.parametrize("timeout", [*NO_TIMES, None])
def test_a_client_needs_a_time(daemon: RunningDaemon, timeout: Any) -> None:
    refuses(lambda t: Client(daemon.endpoint, timeout=t), timeout)


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_what_is_no_number_of_tokens_is_refused(
    namespace: Namespace, lease: Lease, number: Any
) -> None:
    refuses(lambda n: namespace.match(TOKENS, reserve_tokens=n), number)
    refuses(lambda n: lease.fork(reserve_tokens=n), number)
    refuses(lease.reserve, number)
    refuses(lambda n: lease.release(keep_tokens=n), number)
    refuses(lambda n: namespace.drop(TOKENS, from_token=n), number)
    compute(lease, TOKENS)


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_what_is_no_place_is_refused(lease: Lease, namespace: Namespace, number: Any) -> None:
    other = namespace.match([], reserve_tokens=64)
    for view in (lease.read_arrays, lease.write_arrays, lease.read_tensors, lease.write_tensors):
        refuses(lambda n, view=view: view(n, 64), number)
        refuses(lambda n, view=view: view(0, n), number)
    refuses(lambda n: lease.copy_rows(other, n, 64), number)
    compute(lease, TOKENS)


@pytest.mark.parametrize("tokens", NO_TOKENS)
def test_what_are_no_tokens_is_refused(namespace: Namespace, lease: Lease, tokens: Any) -> None:
    refuses(namespace.match, tokens)
    refuses(lease.replace, tokens)
    refuses(lease.commit, tokens)
    refuses(namespace.drop, tokens)
    refuses(namespace.prefetch, tokens)
    refuses(lambda t: namespace.pin(t, 1.0), tokens)
    write(lease, TOKENS, 0, 16)
    assert lease.commit(TOKENS) == 16


@pytest.mark.parametrize(
    "arguments",
    [
        (IDENTITY, LAYOUT, SURROGATE),
        (IDENTITY, LAYOUT, 7),
        (IDENTITY, LAYOUT, "x" * 2000),
        (IDENTITY, LAYOUT, None),
        (Identity(SURROGATE, "r"), LAYOUT),
        (Identity(7, "r"), LAYOUT),  # type: ignore[arg-type]
        (Identity("m", "r", shard_rank=-1), LAYOUT),
        (Identity("m", "r", shard_size="2"), LAYOUT),  # type: ignore[arg-type]
        ("model", LAYOUT),
        (IDENTITY, None),
        (IDENTITY, IDENTITY),
        (IDENTITY, Layout(2, 1, 8, "int8")),  # type: ignore[arg-type]
        (IDENTITY, Layout(0, 1, 8, "float32")),
        (IDENTITY, Layout(2, 1, 8.5, "float32")),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_namespace_is_refused(client: Client, arguments: Any) -> None:
    refuses(lambda given: client.open(*given), arguments)


def test_what_is_no_number_of_leases_or_pins_is_refused(client: Client) -> None:
    for limit in (0, -1, 1 << 30, "1", None):
        refuses(client.leases, limit)
    for pins in ([-1], ["a"], [1 << 70], 7):
        refuses(lambda p: client.unpin(pins=p), pins)
    for owner in (7, "x" * 65, SURROGATE):
        refuses(lambda o: client.unpin(owner=o), owner)
    for number in (-1, "1", None, 1 << 70):
        refuses(client.drop, number)
