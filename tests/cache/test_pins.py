"""Pins by owner, namespace and tokens; quotas and times."""

from __future__ import annotations

import pytest

from kvd.cache.pins import Pin, PinTable
from kvd.protocol.errors import LimitExceeded
from tests.cache.conftest import LAYOUT, Cache

CACHE = Cache()
ONE, OTHER = CACHE.namespace, CACHE.tenant("other")


@pytest.fixture
def table() -> PinTable:
    """Three pins at most, of ten pages together and six for one owner."""
    return PinTable(3, 10 * LAYOUT.page_bytes, 6 * LAYOUT.page_bytes)


def add(table: PinTable, owner: str = "me", num_blocks: int = 1, expires: float = 10) -> Pin:
    pin = Pin(table.next_id(), owner, ONE, b"asked", ONE.tree.root, num_blocks, expires)
    table.add(pin)
    return pin


def check_room(
    table: PinTable, num_blocks: int, owner: str = "me", renewed: Pin | None = None
) -> None:
    table.check_room(owner, num_blocks * LAYOUT.page_bytes, renewed)


def test_a_pin_is_found_by_owner_namespace_and_tokens(table: PinTable) -> None:
    pin = add(table)
    assert table.find("me", ONE, b"asked") is pin
    assert table.find("you", ONE, b"asked") is None
    assert table.find("me", OTHER, b"asked") is None
    assert table.find("me", ONE, b"else") is None


def test_every_pin_has_a_number_of_its_own(table: PinTable) -> None:
    first = add(table)
    table.remove(first)
    assert 0 < first.id < add(table).id


def test_an_owner_has_its_pins_and_no_others(table: PinTable) -> None:
    mine, yours = [add(table), add(table)], add(table, "you")
    assert table.of_owner("me") == mine
    assert table.of_owner("you") == [yours]
    assert (list(table), len(table)) == ([*mine, yours], 3)


def test_pins_may_be_removed_while_they_are_gone_through(table: PinTable) -> None:
    for _ in range(3):
        add(table)
    for pin in table:
        table.remove(pin)
    assert len(table) == 0


def test_a_pin_has_the_bytes_of_its_pages(table: PinTable) -> None:
    assert add(table, num_blocks=3).num_bytes == 3 * LAYOUT.page_bytes


def test_an_owner_has_a_bound_of_bytes(table: PinTable) -> None:
    add(table, num_blocks=4)
    add(table, "you", num_blocks=4)
    check_room(table, 2)
    with pytest.raises(LimitExceeded, match="'me' would pin"):
        check_room(table, 3)


def test_all_owners_have_a_bound_of_bytes_together(table: PinTable) -> None:
    add(table, "one", num_blocks=6)
    add(table, "other", num_blocks=3)
    check_room(table, 1)
    with pytest.raises(LimitExceeded, match="all owners"):
        check_room(table, 2)


def test_there_is_a_bound_of_pins(table: PinTable) -> None:
    for _ in range(3):
        add(table)
    with pytest.raises(LimitExceeded, match="all 3 pins"):
        check_room(table, 1)


def test_a_renewed_pin_makes_room_for_itself(table: PinTable) -> None:
    pin = add(table, num_blocks=4)
    add(table, num_blocks=1)
    add(table, "you", num_blocks=4)
    check_room(table, 5, renewed=pin)
    with pytest.raises(LimitExceeded):
        check_room(table, 6, renewed=pin)


def test_a_pin_is_expired_from_its_time_on(table: PinTable) -> None:
    assert table.next_expiry() is None
    late, early = add(table, expires=20), add(table, expires=10)
    assert table.next_expiry() == 10
    assert table.expired(9.9) == []
    assert table.expired(10) == [early]
    assert table.expired(20) == [late, early]
