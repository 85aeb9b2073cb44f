"""Epoch and generations, seen through whatever mapping one has."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.arena.header import NUM_SLOTS, create_header, map_header
from kvd.protocol.errors import KvdError

if TYPE_CHECKING:
    from tests.arena.conftest import Child


@pytest.fixture
def path(shm: Path) -> Path:
    return shm / "header"


def test_a_new_header_has_no_epoch_and_no_generation(path: Path) -> None:
    header = create_header(path)
    assert (header.epoch, header.generation(0), header.generation(NUM_SLOTS - 1)) == (0, 0, 0)


def test_a_client_sees_the_epoch_of_the_next_daemon_in_its_old_mapping(path: Path) -> None:
    create_header(path).begin_epoch(1)
    client = map_header(str(path))
    assert client.epoch == 1
    create_header(path).begin_epoch((1 << 62) | 1)
    assert client.epoch == (1 << 62) | 1


def test_a_client_sees_that_its_lease_has_ended(path: Path) -> None:
    daemon = create_header(path)
    client = map_header(str(path))
    daemon.set_generation(7, 5)
    assert [client.generation(slot) for slot in (6, 7, 8)] == [0, 5, 0]


def test_the_first_and_last_slot_are_apart_from_the_epoch(path: Path) -> None:
    daemon = create_header(path)
    daemon.begin_epoch(5)
    daemon.set_generation(0, 1)
    daemon.set_generation(NUM_SLOTS - 1, 2)
    client = map_header(str(path))
    assert (client.epoch, client.generation(0), client.generation(NUM_SLOTS - 1)) == (5, 1, 2)


@pytest.mark.parametrize("slot", [NUM_SLOTS, NUM_SLOTS + 1])
def test_a_slot_that_does_not_exist_is_refused(path: Path, slot: int) -> None:
    header = create_header(path)
    with pytest.raises(IndexError):
        header.generation(slot)
    with pytest.raises(IndexError):
        header.set_generation(slot, 1)


def test_a_header_outlives_the_daemon(path: Path, child: Callable[..., Child]) -> None:
    program = """
import sys
from pathlib import Path
from kvd.arena.header import create_header
header = create_header(Path(sys.argv[1]))
header.begin_epoch(3)
header.set_generation(2, 9)
print("done")
input()
"""
    daemon = child(program, path)
    assert daemon.says() == "done"
    client = map_header(str(path))
    daemon.send(signal.SIGKILL)
    daemon.ended()
    assert (client.epoch, client.generation(2)) == (3, 9)
    assert (create_header(path).epoch, create_header(path).generation(2)) == (3, 9)


def test_an_epoch_begins_with_no_generation(path: Path) -> None:
    header = create_header(path)
    for slot in (0, 7, NUM_SLOTS - 1):
        header.set_generation(slot, 9)
    header.begin_epoch(2)
    assert header.epoch == 2
    assert {header.generation(slot) for slot in range(NUM_SLOTS)} == {0}


def test_a_client_cannot_write(path: Path) -> None:
    create_header(path)
    client = map_header(str(path))
    with pytest.raises(TypeError, match="read-only"):
        client.set_generation(0, 1)
    with pytest.raises(TypeError, match="read-only"):
        client.begin_epoch(1)


def test_a_file_of_something_else_is_refused(path: Path) -> None:
    create_header(path)
    with path.open("r+b") as file:
        file.write(b"KVDHEED9")
    with pytest.raises(KvdError, match=str(path)):
        map_header(str(path))


@pytest.mark.parametrize("length", [0, 8, 4096, (2 + NUM_SLOTS) * 8 - 1])
def test_a_short_file_is_refused(path: Path, length: int) -> None:
    path.write_bytes(bytes(length))
    with pytest.raises(KvdError, match="short"):
        map_header(str(path))


def test_a_short_file_is_made_whole_by_the_daemon(path: Path) -> None:
    path.write_bytes(bytes(100))
    create_header(path)
    assert map_header(str(path)).generation(NUM_SLOTS - 1) == 0


def test_the_file_has_its_memory_from_the_start(path: Path) -> None:
    create_header(path)
    assert path.stat().st_blocks * 512 >= (2 + NUM_SLOTS) * 8
