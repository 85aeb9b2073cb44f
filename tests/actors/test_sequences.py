"""Files of sequences: what is there after a kill, a power loss, and damage."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING

import pytest
import xxhash

from kvd.actors.sequences import SequenceFiles, Sequences
from kvd.config import LimitConfig
from kvd.protocol.errors import TierFailed, UnknownSequence
from tests.actors.saved import CHAT, OTHER, SPACE, sequence
from tests.arena.conftest import child, mount, shm  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from tests.arena.conftest import Child


class Machine:
    """Where sequences are kept, over starts of the daemon and of the machine."""

    def __init__(self, base: Path) -> None:
        self.memory, self.disk = base / "memory", base / "disk"
        self.memory.mkdir()
        self.start()

    def start(self) -> None:
        """A daemon starts, whatever became of the one before."""
        self.files = SequenceFiles(self.memory, self.disk)
        self.found = {info.id: info.generation for info in self.files.begin()}

    def lose_power(self) -> None:
        for path in [*(self.memory / "sequences").iterdir()]:
            path.unlink()
        (self.memory / "sequences").rmdir()
        self.start()

    def save(self, name: str = "chat", generation: int = 1) -> None:
        self.files.write((SPACE.key, name), sequence(name, generation))

    def paths(self, root: Path) -> list[Path]:
        return sorted((root / "sequences").glob("*"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_is_written_is_read_again(machine: Machine) -> None:
    machine.save()
    assert machine.files.read(CHAT) == sequence()
    assert machine.files.read(OTHER) is None


def test_a_start_finds_what_was_written_and_not_what_was_removed(machine: Machine) -> None:
    machine.save(generation=1)
    machine.save(generation=2)
    machine.save("other")
    machine.files.remove(OTHER)
    machine.start()
    assert machine.found == {"chat": 2}


def test_a_power_loss_leaves_what_the_last_checkpoint_kept(machine: Machine) -> None:
    machine.save(generation=1)
    machine.files.checkpoint()
    machine.save(generation=2)
    machine.save("other")
    machine.lose_power()
    assert machine.found == {"chat": 1}


def test_a_checkpoint_forgets_what_was_discarded(machine: Machine) -> None:
    machine.save()
    machine.save("other")
    machine.files.checkpoint()
    machine.files.remove(CHAT)
    machine.files.checkpoint()
    machine.lose_power()
    assert machine.found == {"other": 1}


def test_what_was_discarded_stays_so_over_a_start(machine: Machine) -> None:
    machine.save()
    machine.files.checkpoint()
    machine.files.remove(CHAT)
    machine.start()
    assert machine.found == {}
    machine.files.checkpoint()
    assert machine.paths(machine.disk) == []


def test_a_checkpoint_after_a_start_copies_what_differs_alone(machine: Machine) -> None:
    machine.save()
    machine.files.checkpoint()
    (before,) = machine.paths(machine.disk)
    node = before.stat().st_ino
    machine.start()
    machine.save("other")
    machine.start()
    machine.files.checkpoint()
    assert before.stat().st_ino == node
    assert len(machine.paths(machine.disk)) == 2


def test_without_a_change_a_checkpoint_touches_nothing(machine: Machine) -> None:
    machine.files.checkpoint()
    assert not machine.disk.exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "of another version"])
def test_a_damaged_file_is_set_aside_and_said(
    machine: Machine, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    machine.save()
    (path,) = machine.paths(machine.memory)
    spoil(path, damage)
    machine.start()
    assert machine.found == {}
    assert [path.suffix for path in machine.paths(machine.memory)] == [".damaged"]
    assert "sequence_damaged" in caplog.text


def test_what_cannot_be_read_after_a_power_loss_is_left_out_and_kept(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    unreadable = machine.disk / "sequences" / f"{'0' * 32}.sequence"
    unreadable.mkdir(parents=True)
    machine.save()
    machine.files.checkpoint()
    machine.lose_power()
    assert machine.found == {"chat": 1}
    assert f"reason=sequence_unread path={unreadable} is left out" in caplog.text
    machine.start()
    machine.files.checkpoint()
    assert unreadable in machine.paths(machine.disk)


def test_what_can_be_read_again_is_found_by_the_next_start(machine: Machine) -> None:
    machine.save()
    machine.files.checkpoint()
    (path,) = machine.paths(machine.disk)
    aside = path.rename(path.with_suffix(".aside"))
    path.mkdir()
    machine.lose_power()
    assert machine.found == {}
    path.rmdir()
    aside.rename(path)
    machine.start()
    assert machine.found == {"chat": 1}
    machine.save(generation=2)
    machine.files.checkpoint()
    machine.lose_power()
    assert machine.found == {"chat": 2}


def test_in_the_place_of_a_damaged_file_comes_that_of_the_last_checkpoint(
    machine: Machine,
) -> None:
    machine.save(generation=1)
    machine.files.checkpoint()
    machine.save(generation=2)
    (path,) = machine.paths(machine.memory)
    spoil(path, "cut")
    machine.start()
    assert machine.found == {"chat": 1}
    machine.start()
    assert machine.found == {"chat": 1}


def test_a_start_that_was_cut_short_takes_over_all_the_next_time(machine: Machine) -> None:
    for name in ("a", "b"):
        machine.save(name)
    machine.files.checkpoint()
    (machine.memory / "sequences").rename(machine.memory / "sequences.new")
    Path(f"{machine.paths(machine.disk)[0]}.new").write_bytes(b"half")
    (machine.memory / "sequences.new" / "half.new").write_bytes(b"half")
    machine.start()
    assert machine.found == {"a": 1, "b": 1}
    assert len(machine.paths(machine.memory)) == 2


def test_where_there_is_no_room_nothing_is_lost(
    mount: Callable[..., Path],  # noqa: F811
) -> None:
    machine = Machine(mount("size=64k"))
    machine.save()
    with pytest.raises(TierFailed, match="No space"):
        machine.files.write(CHAT, sequence(generation=2, size=100_000))
    machine.start()
    assert machine.found == {"chat": 1}


def test_a_checkpoint_that_fails_is_made_good_by_the_next(machine: Machine) -> None:
    machine.save()
    (path,) = machine.paths(machine.memory)
    in_the_way = machine.disk / "sequences" / f"{path.name}.new"
    in_the_way.mkdir(parents=True)
    with pytest.raises(TierFailed, match="kept on disk"):
        machine.files.checkpoint()
    in_the_way.rmdir()
    machine.files.checkpoint()
    machine.lose_power()
    assert machine.found == {"chat": 1}


def test_what_was_discarded_makes_room_on_a_full_disk(
    machine: Machine,
    mount: Callable[..., Path],  # noqa: F811
) -> None:
    machine.disk = mount("size=48k")
    machine.start()
    for name in "abcdefgh":
        machine.files.write((SPACE.key, name), sequence(name, size=30_000))
        machine.files.checkpoint()
        machine.files.remove((SPACE.key, name))
    assert machine.paths(machine.disk) != []
    machine.files.checkpoint()
    assert machine.paths(machine.disk) == []


WRITER = """
import itertools
from pathlib import Path
from kvd.actors.sequences import SequenceFiles
from tests.actors.saved import SPACE, sequence
files = SequenceFiles(Path(sys.argv[1]), Path(sys.argv[2]))
files.begin()
for generation in itertools.count(1):
    files.write((SPACE.key, "chat"), sequence(generation=generation, size=400_000))
    print(generation)
    if generation % 3 == 0:
        files.checkpoint()
"""


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_writer_leaves_its_last_save(
    machine: Machine,
    child: Callable[..., Child],  # noqa: F811
    seed: int,
) -> None:
    writer = child(WRITER, machine.memory, machine.disk)
    for _ in range(random.Random(seed).randrange(1, 30)):
        said = int(writer.says())
    writer.send(SIGKILL)
    writer.ended()
    said = max([said, *map(int, writer.rest())])
    machine.start()
    assert machine.found["chat"] in (said, said + 1)
    machine.lose_power()
    assert said - 3 <= machine.found.get("chat", 0) <= said + 1


async def test_what_is_damaged_when_it_is_resumed_is_unknown(machine: Machine) -> None:
    machine.save()
    sequences = Sequences(machine.files, LimitConfig())
    await sequences.begin()
    (path,) = machine.paths(machine.memory)
    spoil(path, "flipped")
    with pytest.raises(UnknownSequence, match="damaged"):
        await sequences.resume(CHAT)
    assert sequences.listed(None, None) == []


async def test_a_checkpoint_of_what_is_served_is_one_of_its_files(machine: Machine) -> None:
    machine.save()
    await Sequences(machine.files, LimitConfig()).checkpoint()
    machine.lose_power()
    assert machine.found == {"chat": 1}


def spoil(path: Path, damage: str) -> None:
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[:-9])
        case "flipped":
            path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
        case "emptied":
            path.write_bytes(b"")
        case _:
            whole = data[:-8].replace(b"kvd.sequence.1", b"kvd.sequence.2")
            path.write_bytes(whole + xxhash.xxh3_64_digest(whole))
