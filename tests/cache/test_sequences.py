"""Sequences in the books: who may save, and how many."""

from __future__ import annotations

import pytest

from kvd.cache.sequences import SequenceInfo, SequenceTable, check_generation
from kvd.config import LimitConfig
from kvd.protocol.errors import LimitExceeded, SequenceTaken, UnknownSequence
from kvd.protocol.keys import NamespaceInfo
from kvd.protocol.units import ByteSize
from tests.e2e.support import IDENTITY, LAYOUT

SPACE = NamespaceInfo(IDENTITY, LAYOUT)
OTHER_SPACE = NamespaceInfo(IDENTITY, LAYOUT, salt="tenant")


@pytest.fixture
def table() -> SequenceTable:
    return SequenceTable(LimitConfig(sequences=3, sequence_bytes=ByteSize(1000)))


def info(
    name: str = "chat",
    *,
    generation: int = 0,
    saver: int = 1,
    num_bytes: int = 100,
    space: NamespaceInfo = SPACE,
) -> SequenceInfo:
    return SequenceInfo(space, name, 25, num_bytes, saver, generation, 0.0)


def save(table: SequenceTable, asked: SequenceInfo) -> int:
    saved = table.saved(asked.key, asked)
    table.put(asked.key, saved)
    return saved.generation


def resume(table: SequenceTable, name: str = "chat") -> int:
    found = table.get((SPACE.key, name))
    table.put(found.key, table.resumed(found))
    return table.get(found.key).generation


def test_a_sequence_keeps_its_generation_until_it_is_resumed(table: SequenceTable) -> None:
    generation = save(table, info())
    assert save(table, info(generation=generation)) == generation
    assert resume(table) > generation


def test_who_saved_before_a_resume_saves_no_more(table: SequenceTable) -> None:
    before = save(table, info())
    after = resume(table)
    for generation in (before, 0, after + 1):
        with pytest.raises(SequenceTaken, match=f"generation {after}"):
            save(table, info(generation=generation))
    assert save(table, info(generation=after, saver=2)) == after


def test_a_first_save_said_again_by_its_saver_is_the_same(table: SequenceTable) -> None:
    generation = save(table, info(saver=7))
    assert save(table, info(saver=7)) == generation
    with pytest.raises(SequenceTaken):
        save(table, info(saver=8))
    assert save(table, info(generation=generation, saver=8)) == generation
    assert save(table, info(saver=7)) == generation


def test_what_was_discarded_is_not_saved_on(table: SequenceTable) -> None:
    generation = save(table, info())
    table.remove(info().key)
    with pytest.raises(UnknownSequence, match="chat"):
        save(table, info(generation=generation))
    assert save(table, info()) > generation


def test_one_that_is_saved_anew_is_not_its_owners_of_before(table: SequenceTable) -> None:
    before = save(table, info())
    table.remove(info().key)
    save(table, info(saver=2))
    with pytest.raises(SequenceTaken):
        save(table, info(generation=before))


def test_a_name_is_known_in_its_namespace_alone(table: SequenceTable) -> None:
    save(table, info())
    save(table, info(space=OTHER_SPACE, saver=2))
    assert [key for key, _ in table] == [(SPACE.key, "chat"), (OTHER_SPACE.key, "chat")]


def test_generations_go_on_after_those_that_were_there(table: SequenceTable) -> None:
    table.put(info().key, info(generation=41))
    assert save(table, info("other")) == 42


def test_generations_go_on_behind_where_a_start_begins(table: SequenceTable) -> None:
    table.begin(1000)
    assert save(table, info()) > 1000
    table.begin(0)
    assert save(table, info("other")) > 1001


def test_only_so_many_are_saved(table: SequenceTable) -> None:
    for name in ("a", "b", "c"):
        save(table, info(name))
    with pytest.raises(LimitExceeded, match="all 3 sequences"):
        save(table, info("d"))
    save(table, info("c"))
    table.remove(info("a").key)
    save(table, info("d"))


def test_all_together_have_so_many_bytes(table: SequenceTable) -> None:
    save(table, info("a", num_bytes=900))
    with pytest.raises(LimitExceeded, match="together"):
        save(table, info("b", num_bytes=101))
    save(table, info("a", num_bytes=1000))
    assert table.get(info("a").key).num_bytes == 1000


def test_a_refused_save_changes_nothing(table: SequenceTable) -> None:
    before = save(table, info("a", num_bytes=900))
    with pytest.raises(LimitExceeded):
        save(table, info("a", generation=before, num_bytes=1001))
    assert table.get(info("a").key) == info("a", generation=before, num_bytes=900)


def test_another_generation_is_told(table: SequenceTable) -> None:
    check_generation(info(generation=3), 3)
    with pytest.raises(SequenceTaken, match="generation 3, not 2"):
        check_generation(info(generation=3), 2)
