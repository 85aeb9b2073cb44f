"""A daemon whose memory, on a device, ends with it, and a store below it that does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    LAYOUTS,
    SESSIONS,
    capacity_of,
    eventually,
    faultless_daemon,
    tokens_of,
)
from tests.e2e.test_device import compute_pages, holds_pages

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client import Layout
    from kvd_client.client import Client, Namespace

NUM_PAGES = 64
SEQUENCES = [tokens_of(seed, 16) for seed in range(12)]
NUM_BLOCKS = 12 * 16  # three times what memory has room for

# What copies a block down as soon as it is there: that memory is in use, or the time.
DEMOTE = {"demote_watermark": 0.001}
CHECKPOINT = {"demote_watermark": 1.0, "checkpoint_seconds": 0.05}


@pytest.fixture
def layout() -> Layout:
    return LAYOUT


@pytest.fixture
def cache() -> dict[str, float]:
    return DEMOTE


@pytest.fixture
def daemon(layout: Layout, cache: dict[str, float]) -> Iterator[RunningDaemon]:
    memory = {"type": "torch", "device": "cpu", "capacity_bytes": capacity_of(NUM_PAGES, layout)}
    store = {"type": "lmdb", "capacity_bytes": "64MiB"}
    document = {"tiers": [memory, store], "sessions": SESSIONS, "cache": cache}
    with faultless_daemon(document) as daemon:
        yield daemon


@pytest.fixture
def namespace(client: Client, layout: Layout) -> Namespace:
    return client.open(IDENTITY, layout)


def store(namespace: Namespace, tokens: list[int]) -> None:
    """Compute a sequence, and wait until it is in the store."""
    goal = counter(namespace, "blocks_demoted") + len(tokens) // BLOCK
    with namespace.match(tokens) as lease:
        compute_pages(lease, tokens)
    eventually(lambda: counter(namespace, "blocks_demoted") == goal)


def counter(namespace: Namespace, name: str) -> int:
    return namespace.client.status().counters.get(name, 0)


def has_whole(namespace: Namespace, tokens: list[int]) -> bool:
    with namespace.match(tokens) as lease:
        return lease.num_tokens == len(tokens) and holds_pages(lease, tokens)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.order)
def test_more_than_memory_has_room_for_is_served(namespace: Namespace) -> None:
    for tokens in SEQUENCES:
        store(namespace, tokens)
    assert all(has_whole(namespace, tokens) for tokens in SEQUENCES)
    assert counter(namespace, "blocks_promoted") >= NUM_BLOCKS - NUM_PAGES
    assert counter(namespace, "pressure_drops") == 0


@pytest.mark.parametrize("cache", [DEMOTE, CHECKPOINT], ids=["demoted", "checkpointed"])
def test_what_was_copied_down_comes_back_after_a_kill(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    for tokens in SEQUENCES:
        store(namespace, tokens)
    daemon.restart()
    assert client.wait_attached(30.0)
    assert all(has_whole(namespace, tokens) for tokens in SEQUENCES)
    assert counter(namespace, "blocks_recovered") == NUM_BLOCKS
