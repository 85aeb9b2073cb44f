"""Memory in two places: what the first evicts comes back from the second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvd.testing.daemons import DaemonFailed, RunningDaemon, running_daemon
from kvd_client import Layout
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    capacity_of,
    eventually,
    holds,
    settings,
    store,
    tokens_of,
)

if TYPE_CHECKING:
    from kvd_client.client import Client, Namespace

WIDE = Layout(2, 4, 64, "float32", block_size=BLOCK)  # a page has 16 KiB
NUM_BLOCKS = 16
SEEDS = range(12)  # three times as many blocks as the first tier has pages
FIRST_PAGES = len(SEEDS) * NUM_BLOCKS // 3


def three_tiers(second: Path) -> dict[str, Any]:
    tiers = [
        {"type": "host", "capacity_bytes": capacity_of(FIRST_PAGES, WIDE)},
        {"type": "host", "capacity_bytes": "16MiB", "directory": str(second)},
        {"type": "lmdb", "capacity_bytes": "64MiB"},
    ]
    cache = {"high_watermark": 1.0, "low_watermark": 1.0, "demote_watermark": 0.001}
    return settings(tiers=tiers, cache=cache)


@pytest.fixture
def daemon(shm: Path) -> Iterator[RunningDaemon]:
    with running_daemon(three_tiers(shm / "second")) as daemon:
        yield daemon


@pytest.fixture
def namespace(client: Client) -> Namespace:
    """With sequences in it, each of which has its copies before the next one comes."""
    namespace = client.open(IDENTITY, WIDE)
    for seed in SEEDS:
        store(namespace, tokens_of(seed, NUM_BLOCKS))
        wait_for_copies(client, 2 * NUM_BLOCKS * (seed + 1))
    return namespace


def wait_for_copies(client: Client, count: int) -> None:
    eventually(lambda: client.status().counters.get("blocks_demoted") == count)


def origins(namespace: Namespace) -> set[str]:
    """The tiers that the sequences come from, each of them whole and bit by bit."""
    names = set[str]()
    for seed in SEEDS:
        tokens = tokens_of(seed, NUM_BLOCKS)
        with namespace.match(tokens) as lease:
            assert holds(lease, tokens)
            names |= lease.tokens_by_tier.keys()
    return names


def test_what_the_first_evicted_comes_from_the_second(namespace: Namespace) -> None:
    with namespace.match(tokens_of(0, NUM_BLOCKS)) as lease:
        assert lease.tokens_by_tier == {"host-2": NUM_BLOCKS * BLOCK}
    with namespace.match(tokens_of(0, NUM_BLOCKS)) as lease:
        assert lease.tokens_by_tier == {"host": NUM_BLOCKS * BLOCK}
    assert origins(namespace) - {"host"} == {"host-2"}


def test_what_the_second_had_is_served_after_a_kill(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    daemon.restart()
    assert client.wait_attached(30.0)
    eventually(lambda: namespace.match(tokens_of(99, 1)).is_open)
    assert origins(namespace) - {"host"} == {"host-2"}


def test_a_drop_is_of_all_tiers(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    count = len(SEEDS) * NUM_BLOCKS
    dropped = namespace.drop().blocks_by_tier
    assert dropped == {"host": dropped["host"], "host-2": count, "lmdb": count}
    daemon.restart()
    eventually(lambda: namespace.match(tokens_of(99, 1)).is_open)
    assert namespace.match(tokens_of(0, NUM_BLOCKS)).num_tokens == 0


def test_two_tiers_of_one_type_need_two_directories() -> None:
    document = settings(tiers=[{"type": "host", "capacity_bytes": "1MiB"}] * 2)
    with (
        pytest.raises(DaemonFailed, match="host-2 and host have one directory"),
        running_daemon(document),
    ):
        raise AssertionError
