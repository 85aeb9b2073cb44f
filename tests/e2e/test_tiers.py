"""Stores below memory: what is on disk is served right, and never at the cost of who computes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvd.protocol.keys import NamespaceInfo
from kvd.testing.daemons import DaemonFailed, RunningDaemon, running_daemon
from kvd.testing.faults import Faults, set_faults
from kvd.tiers.base import StoreTier
from kvd.tiers.registry import load_tier
from kvd_client import Layout
from kvd_client.client import Client
from kvd_tiers.lmdb_files import disk_bytes
from tests.e2e.support import (
    IDENTITY,
    LAYOUT,
    capacity_of,
    eventually,
    faultless_daemon,
    holds,
    settings,
    store,
    tokens_of,
    with_store,
)
from tests.e2e.test_memory import fill as fill_up
from tests.stress.content import Domain, fill, verify

if TYPE_CHECKING:
    from kvd_client.client import Namespace
    from tests.stress.content import Tokens

    Mount = Callable[..., Path]

# Pages of 8 KiB: a few megabytes of them are enough to turn a small disk over.
WIDE = Domain("wide", Layout(2, 4, 32, "float32", block_size=4))
NUM_PAGES = 128
# Three times what memory has.
SEQUENCES = [tuple(tokens_of(seed, 16)) for seed in range(1, 25)]


@contextmanager
def tiers(document: dict[str, Any]) -> Iterator[tuple[RunningDaemon, Client]]:
    with faultless_daemon(document) as daemon, Client(daemon.endpoint, timeout=30.0) as client:
        yield daemon, client


def small(disk_capacity: str = "16MiB", **cache: object) -> dict[str, Any]:
    """Memory for NUM_PAGES of WIDE, and a disk below it."""
    document = with_store(NUM_PAGES, cache=with_store()["cache"] | cache)
    document["tiers"][0]["capacity_bytes"] = capacity_of(NUM_PAGES, WIDE.layout)
    document["tiers"][1]["tier"]["capacity_bytes"] = disk_capacity
    return document


def use(namespace: Namespace, tokens: Tokens) -> int:
    """Compute what is not found, as an engine does; how many tokens were found, all right."""
    with namespace.match(tokens) as lease:
        verify(lease, WIDE, tokens)
        found = lease.num_tokens
        lease.reserve(len(tokens))
        fill(lease, WIDE, tokens, found, len(tokens))
        lease.commit(tokens[found:])
        verify(lease, WIDE, tokens, len(tokens))
    return found


def use_all(namespace: Namespace) -> int:
    return sum(use(namespace, tokens) for tokens in SEQUENCES)


def count(client: Client, name: str) -> int:
    return client.status().counters.get(name, 0)


def save_all(client: Client, namespace: Namespace) -> None:
    """Have every sequence on the disk."""
    for number, tokens in enumerate(SEQUENCES, 1):
        use(namespace, tokens)
        eventually(lambda at=number * 16: count(client, "blocks_demoted") == at)


def forget_memory(daemon: RunningDaemon) -> None:
    """As when the machine starts anew: what lay in shared memory is gone."""
    shutil.rmtree(daemon.directory)


@contextmanager
def watched(directory: Path) -> Iterator[list[int]]:
    """What the files in a directory take, looked at again and again meanwhile."""
    sizes: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            sizes.append(disk_bytes(directory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join()


# --- a disk that works ---


def test_a_working_set_of_three_times_the_memory_is_all_served_and_nobody_waits() -> None:
    with tiers(small()) as (_, client):
        namespace = WIDE.open(client)
        save_all(client, namespace)
        waited = count(client, "reserves_waited")
        for _ in range(3):
            assert use_all(namespace) == sum(map(len, SEQUENCES))
        assert count(client, "reserves_waited") == waited
        assert count(client, "reserves_short") == count(client, "pressure_drops") == 0


def test_who_computes_does_not_wait_for_what_goes_down() -> None:
    with tiers(small()) as (_, client):
        namespace = WIDE.open(client)
        use_all(namespace)  # memory is full, and given
        waited, saved = count(client, "reserves_waited"), count(client, "blocks_demoted")
        for seed in range(100, 150):
            use(namespace, tuple(tokens_of(seed, 16)))
        assert count(client, "blocks_demoted") > saved
        assert count(client, "reserves_waited") == waited
        assert count(client, "reserves_short") == 0


def test_the_files_never_take_more_than_the_capacity() -> None:
    with (
        tiers(small("4MiB")) as (daemon, client),
        watched(daemon.data_directory) as sizes,
    ):
        namespace = WIDE.open(client)
        for _ in range(4):
            use_all(namespace)
        assert count(client, "blocks_evicted_stored") > 0
        assert count(client, "blocks_promoted") > 0
        assert 0 < max(sizes) <= 4 << 20


def test_what_the_disk_has_is_served_after_the_machine_starts_anew() -> None:
    with tiers(small()) as (daemon, client):
        save_all(client, WIDE.open(client))
        daemon.kill()
        forget_memory(daemon)
        daemon.start()
        eventually(lambda: client.attached)
        assert use_all(WIDE.open(client)) == sum(map(len, SEQUENCES))


def test_a_clean_stop_saves_what_memory_has() -> None:
    document = small(demote_watermark=1.0)
    with tiers(document) as (daemon, client):
        use(WIDE.open(client), SEQUENCES[0])
        assert count(client, "blocks_demoted") == 0
        daemon.stop()
        forget_memory(daemon)
        daemon.start()
        eventually(lambda: client.attached)
        assert use(WIDE.open(client), SEQUENCES[0]) == len(SEQUENCES[0])


def test_where_only_what_is_reused_is_admitted_the_rest_stays_in_memory() -> None:
    with tiers(small(admission="reused")) as (daemon, client):
        namespace = WIDE.open(client)
        for tokens in (*SEQUENCES[:4], SEQUENCES[0]):
            use(namespace, tokens)
        eventually(lambda: count(client, "blocks_demoted"))
        daemon.stop()
        forget_memory(daemon)
        daemon.start()
        eventually(lambda: client.attached)
        found = [use(WIDE.open(client), tokens) for tokens in SEQUENCES[:4]]
        assert found == [len(SEQUENCES[0]), 0, 0, 0]


@pytest.mark.parametrize("maps", [True, False], ids=["mapped", "copied"])
def test_a_lease_is_extended_by_what_was_on_its_way(maps: bool) -> None:
    tokens = SEQUENCES[0]
    with (
        tiers(small()) as (daemon, first),
        Client(daemon.endpoint, timeout=30.0, maps=maps) as client,
    ):
        save_all(first, WIDE.open(first))
        set_faults(daemon.data_directory, Faults.STUCK)
        lease = WIDE.open(client).match(tokens, reserve_tokens=4, timeout=0.5)
        assert (lease.num_tokens, lease.pending_tokens) == (0, len(tokens))
        reserved = lease.pages.tolist()
        set_faults(daemon.data_directory, Faults.NONE)
        assert lease.extend() == lease.num_committed == len(tokens)
        assert (lease.pending_tokens, lease.pages[16:].tolist()) == (0, reserved)
        verify(lease, WIDE, tokens)


def test_what_was_prefetched_is_there_at_once() -> None:
    with tiers(small()) as (_, client):
        namespace = WIDE.open(client)
        save_all(client, namespace)
        namespace.prefetch(SEQUENCES[0])
        eventually(lambda: count(client, "blocks_promoted") == 16)
        with namespace.match(SEQUENCES[0]) as lease:
            assert lease.tokens_by_tier == {"host": len(SEQUENCES[0])}


# --- a disk that does not ---


def test_who_computes_does_not_wait_for_a_disk_that_is_stuck() -> None:
    with tiers(small()) as (daemon, client):
        namespace = WIDE.open(client)
        save_all(client, namespace)
        set_faults(daemon.data_directory, Faults.STUCK)
        waited = count(client, "reserves_waited")
        for seed in range(100, 124):
            use(namespace, tuple(tokens_of(seed, 16)))
        assert count(client, "reserves_waited") == waited
        assert count(client, "pressure_drops") > 0
        set_faults(daemon.data_directory, Faults.NONE)
        eventually(lambda: use(namespace, SEQUENCES[0]) == len(SEQUENCES[0]))


def test_what_a_failing_disk_has_is_a_miss_until_it_works_again() -> None:
    with tiers(small()) as (daemon, client):
        namespace = WIDE.open(client)
        save_all(client, namespace)
        set_faults(daemon.data_directory, Faults.GONE)
        assert namespace.match(SEQUENCES[0]).num_tokens == 0
        assert use(namespace, tuple(tokens_of(100, 16))) == 0
        assert "reason=tier_failed tier=faulty" in daemon.log
        set_faults(daemon.data_directory, Faults.NONE)
        eventually(lambda: namespace.match(SEQUENCES[0]).num_tokens == len(SEQUENCES[0]))
        saved = count(client, "blocks_demoted")
        use(namespace, tuple(tokens_of(101, 16)))
        eventually(lambda: count(client, "blocks_demoted") > saved)


def test_what_a_bad_disk_reads_wrong_is_not_served() -> None:
    document = small()
    document["tiers"][1] |= {"fraction": 0.2, "delay_seconds": 0.0}
    with tiers(document) as (daemon, client):
        namespace = WIDE.open(client)
        save_all(client, namespace)
        set_faults(daemon.data_directory, Faults.SOME)
        eventually(lambda: use_all(namespace) and count(client, "checksum_failures") > 2)
        set_faults(daemon.data_directory, Faults.NONE)
        assert "reason=checksum" in daemon.log


def test_a_volume_that_is_full_is_no_outage_and_later_it_is_used_again(tmpfs: Mount) -> None:
    volume = tmpfs("size=16m")
    document = small("12MiB")
    document["tiers"][1]["tier"]["directory"] = str(volume / "lmdb")
    with tiers(document) as (_, client):
        namespace = WIDE.open(client)
        use(namespace, SEQUENCES[0])
        eventually(lambda: count(client, "blocks_demoted") == 16)
        filler = fill_up(volume)
        for _ in range(2):
            use_all(namespace)
        filler.unlink()
        saved = count(client, "blocks_demoted")
        eventually(lambda: use_all(namespace) and count(client, "blocks_demoted") > saved + 16)


def test_a_start_on_a_volume_that_is_full_serves_and_later_uses_it(tmpfs: Mount) -> None:
    volume = tmpfs("size=16m")
    document = small("12MiB")
    document["tiers"][1]["tier"]["directory"] = str(volume)
    filler = fill_up(volume)
    with tiers(document) as (_, client):
        namespace = WIDE.open(client)
        assert use(namespace, SEQUENCES[0]) == 0
        eventually(lambda: "No space left on device" in client.status().tiers[1].trouble)
        filler.unlink()
        eventually(lambda: use_all(namespace) and count(client, "blocks_demoted") >= 16)


def test_what_a_start_has_no_room_to_serve_is_there_for_the_next(tmpfs: Mount) -> None:
    volume = tmpfs("size=16m")
    document = small()
    document["tiers"][0]["directory"] = str(volume / "memory")
    with tiers(document) as (daemon, client):
        save_all(client, WIDE.open(client))
        daemon.kill()
        for path in (volume / "memory").glob("*-*.*"):
            path.unlink()
        filler = fill_up(volume)
        daemon.start()
        assert "reason=not_recovered" in daemon.log
        daemon.kill()
        filler.unlink()
        daemon.start()
        eventually(lambda: client.attached)
        assert use_all(WIDE.open(client)) == sum(map(len, SEQUENCES))


def test_a_start_forgets_namespaces_of_which_nothing_is_left() -> None:
    with running_daemon(with_store()) as daemon:
        with Client(daemon.endpoint, timeout=30.0) as client:
            store(client.open(IDENTITY, LAYOUT, salt="kept"), tokens_of(1, 4))
            client.open(IDENTITY, LAYOUT, salt="empty")
            eventually(lambda: count(client, "blocks_demoted") == 4)
        daemon.stop()
        forget_memory(daemon)
        daemon.start()
        daemon.stop()
        disk = load_tier(with_store()["tiers"][1]["tier"], daemon.directory, daemon.data_directory)
        assert isinstance(disk, StoreTier)
        disk.open(3)
        ((_, note),) = disk.stores()[0].notes().items()
        disk.close()
        assert msgspec.msgpack.decode(note, type=NamespaceInfo).salt == "kept"


# --- more tiers ---


def test_of_two_stores_each_has_all_of_it(tmp_path: Path) -> None:
    document = with_store()
    second = {"type": "lmdb", "capacity_bytes": "8MiB", "free_floor_bytes": 0}
    document["tiers"].append(second | {"directory": str(tmp_path / "second")})
    with tiers(document) as (daemon, client):
        store(client.open(IDENTITY, LAYOUT), tokens_of(1, 16))
        eventually(lambda: count(client, "blocks_demoted") == 2 * 16)
        daemon.kill()
        forget_memory(daemon)
        shutil.rmtree(daemon.data_directory)
        daemon.start()
        eventually(lambda: client.attached)
        with client.open(IDENTITY, LAYOUT).match(tokens_of(1, 16)) as lease:
            assert lease.tokens_by_tier == {"lmdb": 64}
            assert holds(lease, tokens_of(1, 16))


def test_a_store_in_the_first_place_is_refused() -> None:
    wrong = [{"type": "lmdb", "capacity_bytes": "4MiB"}, settings()["tiers"][0]]
    why = "tiers: the first one has what clients map; lmdb has none"
    with pytest.raises(DaemonFailed, match=why), running_daemon({"tiers": wrong}):
        pass
