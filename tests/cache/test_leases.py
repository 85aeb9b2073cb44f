"""Slots, generations and what is remembered of leases that are over."""

from __future__ import annotations

import pytest

from kvd.cache.leases import MAX_TOMBSTONES, Lease, LeaseTable
from kvd.protocol.errors import LeaseEnded, LimitExceeded
from tests.cache.conftest import Cache

NAMESPACE = Cache().namespace


def grant(table: LeaseTable, session: int, lease_id: int) -> Lease:
    slot, generation = table.take_slot()
    root = NAMESPACE.tree.root
    lease = Lease(
        session, lease_id, NAMESPACE, b"", root, 0, 0, slot, generation, drops=0, since=0.0
    )
    table.add(lease)
    return lease


def test_a_lease_is_found_by_session_and_id() -> None:
    table = LeaseTable(4)
    lease = grant(table, 1, 7)
    assert table.get(1, 7) is table.find(1, 7) is lease
    assert table.find(2, 7) is None
    assert table.of_session(1) == [lease]
    assert list(table) == [lease]
    assert len(table) == 1


@pytest.mark.parametrize(("session", "lease_id"), [(1, 8), (2, 7)])
def test_a_lease_that_is_not_there_has_ended(session: int, lease_id: int) -> None:
    table = LeaseTable(4)
    grant(table, 1, 7)
    with pytest.raises(LeaseEnded, match=str(lease_id)):
        table.get(session, lease_id)


def test_every_lease_has_a_slot_of_its_own() -> None:
    table = LeaseTable(8)
    assert sorted(grant(table, 1, lease_id).slot for lease_id in range(8)) == list(range(8))


def test_more_leases_than_slots_are_refused_with_their_number() -> None:
    table = LeaseTable(2)
    lease = grant(table, 1, 1)
    grant(table, 2, 1)
    with pytest.raises(LimitExceeded, match="2") as caught:
        table.take_slot()
    assert caught.value.details == {"num_leases": 2}
    table.remove(lease)
    assert table.take_slot()[0] == lease.slot


def test_a_slot_has_another_generation_for_each_lease() -> None:
    table = LeaseTable(2)
    seen = []
    for _ in range(4):
        lease = grant(table, 1, 1)
        seen.append((lease.slot, lease.generation))
        table.remove(lease)
    assert len(set(seen)) == 4


def test_a_removed_lease_is_gone_and_its_neighbours_stay() -> None:
    table = LeaseTable(4)
    one, other = grant(table, 1, 1), grant(table, 1, 2)
    table.remove(one)
    assert table.find(1, 1) is None
    assert table.of_session(1) == list(table) == [other]
    assert len(table) == 1


def test_a_buried_id_is_remembered_for_its_session() -> None:
    table = LeaseTable(4)
    table.bury(1, 7)
    assert table.is_buried(1, 7)
    assert not table.is_buried(1, 8)
    assert not table.is_buried(2, 7)


def test_only_the_latest_tombstones_are_kept() -> None:
    table = LeaseTable(4)
    for lease_id in range(MAX_TOMBSTONES + 2):
        table.bury(1, lease_id)
    table.bury(2, 0)
    buried = [lease_id for lease_id in range(MAX_TOMBSTONES + 2) if table.is_buried(1, lease_id)]
    assert buried == list(range(2, MAX_TOMBSTONES + 2))
    assert table.is_buried(2, 0)


def test_an_id_buried_again_is_among_the_latest() -> None:
    table = LeaseTable(4)
    for lease_id in (*range(MAX_TOMBSTONES), 0, MAX_TOMBSTONES):
        table.bury(1, lease_id)
    assert table.is_buried(1, 0)
    assert not table.is_buried(1, 1)


def test_a_forgotten_session_leaves_no_tombstones() -> None:
    table = LeaseTable(4)
    table.bury(1, 7)
    table.forget_session(1)
    table.forget_session(2)
    assert not table.is_buried(1, 7)


def test_a_session_with_leases_is_not_forgotten() -> None:
    table = LeaseTable(4)
    grant(table, 1, 7)
    with pytest.raises(AssertionError):
        table.forget_session(1)
