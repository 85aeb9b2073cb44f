"""Each metric is what a script did, and what `kvd-ctl status` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kvd.testing.faults import Faults, set_faults
from kvd_client import Client, TierFailed
from tests.e2e.support import (
    IDENTITY,
    LAYOUT,
    PATIENCE_SECONDS,
    eventually,
    store,
    tokens_of,
    with_store,
)
from tests.telemetry import workload
from tests.telemetry.support import (
    Series,
    named,
    scrape,
    value,
    watched_daemon,
)
from tests.telemetry.workload import NUM_BLOCKS, NUM_SEQUENCES, TOKENS

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client import Namespace, StatusReply

NUM_MATCHES = 2 + NUM_SEQUENCES + 3


class Told(NamedTuple):
    series: Series
    status: StatusReply


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    with (
        watched_daemon(workload.document()) as (daemon, port),
        Client(daemon.endpoint, timeout=30.0) as client,
        workload.run(client),
    ):
        yield Told(scrape(port), client.status())


def test_requests_are_counted_by_verb(told: Told) -> None:
    counts = named(told.series, "kvd_requests_total", "verb")
    asked = {verb: counts[verb] for verb in ("attach", "open", "match", "commit", "checkpoint")}
    commits = 2 + NUM_SEQUENCES
    assert asked == {
        "attach": 1,
        "open": 1,
        "match": NUM_MATCHES,
        "commit": commits,
        "checkpoint": 1,
    }
    timed = named(told.series, "kvd_request_duration_seconds_count", "verb")
    assert counts["match"] == timed["match"]


def test_tokens_by_source_add_up_to_those_asked_for(told: Told) -> None:
    sources = named(told.series, "kvd_tokens_total", "source")
    missed = (NUM_MATCHES - 2) * TOKENS
    assert sources == {"host": TOKENS, "lmdb": TOKENS, "missed": missed}
    assert sum(sources.values()) == told.status.counters["tokens_requested"]


def test_missed_tokens_tell_what_a_cache_of_endless_size_would_have_had(told: Told) -> None:
    reasons = named(told.series, "kvd_tokens_missed_total", "reason")
    assert reasons == {"new": (NUM_MATCHES - 3) * TOKENS, "evicted": TOKENS}


def test_matches_are_hits_and_misses(told: Told) -> None:
    matches = named(told.series, "kvd_matches_total", "result")
    assert matches == {"hit": 2, "miss": NUM_MATCHES - 2}


def test_blocks_are_counted_on_every_way(told: Told) -> None:
    series = told.series
    assert value(series, "kvd_blocks_committed_total") == workload.NUM_COMMITTED
    assert value(series, "kvd_blocks_duplicate_total") == NUM_BLOCKS
    assert value(series, "kvd_blocks_dropped_total") == NUM_BLOCKS
    assert value(series, "kvd_pressure_drops_total") == NUM_BLOCKS
    ways = {"demoted": "checkpoint", "promoted": "match"}
    for way, reason in ways.items():
        assert named(series, f"kvd_blocks_{way}_total", "reason") == {reason: NUM_BLOCKS}
    evicted = {"room": 2 * NUM_BLOCKS}
    assert named(series, "kvd_blocks_evicted_total", "reason") == evicted


def test_what_a_tier_has_is_told_as_in_the_status(told: Told) -> None:
    for tier in told.status.tiers:
        assert value(told.series, "kvd_blocks", tier=tier.name) == tier.num_blocks
        assert value(told.series, "kvd_tier_used_bytes", tier=tier.name) == tier.used_bytes
        assert value(told.series, "kvd_tier_waiting_bytes", tier=tier.name) == tier.waiting_bytes
        assert value(told.series, "kvd_tier_degraded", tier=tier.name) == 0
    pages = told.status.tiers[0].pages
    assert named(told.series, "kvd_pages", "state") == {name: n for name, n in pages.items() if n}


def test_bytes_of_a_disk_are_those_of_its_blocks(told: Told) -> None:
    size = NUM_BLOCKS * LAYOUT.page_bytes
    assert value(told.series, "kvd_tier_read_bytes_total", tier="lmdb") == size
    assert value(told.series, "kvd_tier_written_bytes_total", tier="lmdb") >= size
    # What moves at once is a sixteenth of the memory.
    calls = named(told.series, "kvd_tier_duration_seconds_count", "operation")
    assert calls == {"read": 2, "write": 2}


def test_who_holds_something_is_counted(told: Told) -> None:
    names = ("sessions", "leases", "pins", "sequences", "ready")
    held = {name: value(told.series, f"kvd_{name}") for name in names}
    assert held == {"sessions": 1, "leases": 1, "pins": 1, "sequences": 1, "ready": 1}


def test_errors_are_counted_by_code(told: Told) -> None:
    assert named(told.series, "kvd_errors_total", "code") == {"unknown_sequence": 1}


def test_checkpoints_are_counted_by_result(told: Told) -> None:
    assert named(told.series, "kvd_checkpoints_total", "result") == {"done": 1}
    assert value(told.series, "kvd_request_wait_seconds_count", verb="checkpoint") == 1


def test_nothing_waits_where_all_is_done(told: Told) -> None:
    assert named(told.series, "kvd_queue", "queue") == {}


@pytest.mark.parametrize(
    ("metric", "counter"),
    [
        ("kvd_pages_reserved", "pages_reserved"),
        ("kvd_pages_quarantined", "pages_quarantined"),
        ("kvd_blocks_committed", "blocks_committed"),
        ("kvd_blocks_duplicate", "blocks_duplicate"),
        ("kvd_blocks_verified", "blocks_verified"),
        ("kvd_checksum_failures", "checksum_failures"),
        ("kvd_pressure_drops", "pressure_drops"),
        ("kvd_replies_undeliverable", "replies_undeliverable"),
    ],
)
def test_the_status_tells_the_same(told: Told, metric: str, counter: str) -> None:
    assert value(told.series, f"{metric}_total") == told.status.counters.get(counter, 0)


def test_no_label_is_of_a_client(told: Told) -> None:
    labels = {key for name, pairs in told.series for key, _ in pairs if name.startswith("kvd_")}
    bounded = {"verb", "code", "tier", "state", "reason", "source", "result", "queue", "operation"}
    assert labels == bounded | {"le"}


# --- where a disk has what memory has not ---


@contextmanager
def put_away(tokens: list[int]) -> Iterator[tuple[RunningDaemon, int, Namespace]]:
    """A daemon whose disk, and not its memory, has these blocks."""
    with watched_daemon(with_store()) as (daemon, port), Client(daemon.endpoint) as client:
        assert client.wait_attached(PATIENCE_SECONDS)
        namespace = client.open(IDENTITY, LAYOUT)
        store(namespace, tokens)
        eventually(lambda: client.status().tiers[1].num_blocks == NUM_BLOCKS)
        for seed in range(NUM_SEQUENCES):
            store(namespace, tokens_of(100 + seed, NUM_BLOCKS))
        yield daemon, port, namespace


def test_what_was_prefetched_is_counted_as_such() -> None:
    with put_away(tokens := tokens_of(1, NUM_BLOCKS)) as (_, port, namespace):
        namespace.prefetch(tokens)
        reasons = eventually(lambda: named(scrape(port), "kvd_blocks_promoted_total", "reason"))
        assert reasons.keys() == {"prefetch"}


def test_what_a_disk_could_not_bring_in_time_is_late() -> None:
    with put_away(tokens := tokens_of(1, NUM_BLOCKS)) as (daemon, port, namespace):
        set_faults(daemon.data_directory, Faults.STUCK)
        assert namespace.match(tokens, timeout=0.1).num_tokens == 0
        missed = named(scrape(port), "kvd_tokens_missed_total", "reason")
        set_faults(daemon.data_directory, Faults.NONE)
        assert missed["late"] == TOKENS


def test_a_checkpoint_that_fails_is_counted() -> None:
    with watched_daemon(with_store()) as (daemon, port), Client(daemon.endpoint) as client:
        assert client.wait_attached(PATIENCE_SECONDS)
        set_faults(daemon.data_directory, Faults.GONE)
        store(client.open(IDENTITY, LAYOUT), tokens_of(1, NUM_BLOCKS))
        with pytest.raises(TierFailed):
            client.checkpoint()
        assert named(scrape(port), "kvd_checkpoints_total", "result") == {"failed": 1}
        set_faults(daemon.data_directory, Faults.NONE)
