"""A store tier with the faults of a bad disk, around a real one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvd.protocol.errors import ConfigError, TierFailed, TierFull
from kvd.testing.faults import Faults, FaultyStoreTier, set_faults
from kvd.testing.tier_suite import (
    LAYOUT,
    MakeStoreTier,
    StoreTierSuite,
    expect,
    read_all,
    records_of,
    scan_all,
)
from kvd.tiers.registry import load_tier
from tests.arena.conftest import shm  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from kvd.tiers.base import Store

RECORDS = records_of(range(20))
KEYS = [record.key for record in RECORDS]


def make(directory: Path, capacity_bytes: int, **keys: Any) -> FaultyStoreTier:
    inner = {"type": "lmdb", "capacity_bytes": capacity_bytes, "free_floor_bytes": 0}
    section = {"type": "faulty", "tier": inner | {"nosync": True}, "delay_seconds": 0.0} | keys
    tier = load_tier(section, directory, directory)
    assert isinstance(tier, FaultyStoreTier)
    return tier


class TestWithoutFaultsItIsWhatItWraps(StoreTierSuite):
    @pytest.fixture
    def make_tier(self) -> MakeStoreTier:
        return make


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:  # noqa: F811
    with closing(make(shm, 16 << 20, fraction=0.3)) as tier:
        tier.open(1)
        store = tier.create_store(LAYOUT, LAYOUT.page_bytes)
        store.write(RECORDS)
        yield store


def outcomes(store: Store) -> list[str]:
    """What a number of reads of one record came to."""
    right = bytes(RECORDS[0].data)
    found = []
    for _ in range(100):
        try:
            (data,) = read_all(store, KEYS[:1]).values()
        except TierFailed:
            found.append("failed")
        else:
            short = len(data) < len(right)
            found.append("right" if data == right else "short" if short else "flipped")
    return found


def test_some_calls_fail_and_some_data_are_wrong(store: Store, shm: Path) -> None:  # noqa: F811
    set_faults(shm, Faults.SOME)
    assert set(outcomes(store)) == {"right", "failed", "short", "flipped"}


def test_what_goes_wrong_is_told_by_the_seed(shm: Path) -> None:  # noqa: F811
    found = []
    for seed in (1, 1, 2):
        directory = shm / str(len(found))
        with closing(make(directory, 16 << 20, seed=seed)) as tier:
            tier.open(1)
            store = tier.create_store(LAYOUT, LAYOUT.page_bytes)
            store.write(RECORDS)
            set_faults(directory, Faults.SOME)
            found.append(outcomes(store))
    assert found[0] == found[1] != found[2]


def test_what_is_said_of_records_is_spoilt_too(store: Store, shm: Path) -> None:  # noqa: F811
    abouts = scan_all(store)
    set_faults(shm, Faults.SOME)
    spoilt = []
    while len(spoilt) < 5:
        try:
            spoilt.append(scan_all(store))
        except TierFailed:
            continue
    assert all(found.keys() == abouts.keys() for found in spoilt)
    assert any(found != abouts for found in spoilt)


def test_a_full_tier_is_read_and_not_written(store: Store, shm: Path) -> None:  # noqa: F811
    set_faults(shm, Faults.FULL)
    with pytest.raises(TierFull):
        store.write(records_of([100]))
    expect(store, RECORDS)


def test_what_a_stuck_tier_is_asked_is_answered_when_it_is_not(
    store: Store,
    shm: Path,  # noqa: F811
) -> None:
    set_faults(shm, Faults.STUCK)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_all, store, KEYS)
        store.used_bytes  # noqa: B018 - what is known without the disk is said
        assert not reading.done()
        set_faults(shm, Faults.NONE)
        assert len(reading.result()) == len(KEYS)


def test_a_tier_that_is_gone_comes_back_as_it_was(store: Store, shm: Path) -> None:  # noqa: F811
    set_faults(shm, Faults.GONE)
    for call in (store.sync, store.notes, lambda: store.delete(KEYS), lambda: scan_all(store)):
        with pytest.raises(TierFailed, match="gone"):
            call()
    set_faults(shm, Faults.NONE)
    expect(store, RECORDS)


def test_a_memory_tier_has_no_such_faults(shm: Path) -> None:  # noqa: F811
    section = {"type": "faulty", "tier": {"type": "host", "capacity_bytes": "1MiB"}}
    with pytest.raises(ConfigError, match="host is not a store tier"):
        load_tier(section, shm, shm)
