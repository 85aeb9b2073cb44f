"""Sessions: who is attached, and who is gone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvd.actors.access import EVERYTHING
from kvd.actors.sessions import SessionTable, remove_swept, sweep
from kvd.arena.membership import SessionLock
from kvd.config import LimitConfig, SessionConfig
from kvd.protocol.errors import LimitExceeded, NotAttached


@pytest.fixture
def table(tmp_path: Path) -> SessionTable:
    table = SessionTable(tmp_path, SessionConfig(silent_seconds=10), LimitConfig(sessions=3))
    table.begin()
    return table


def test_a_connection_has_a_session_from_attach_to_end(table: SessionTable) -> None:
    session = table.attach(b"a", "engine", 7, EVERYTHING)
    assert table.get(b"a") is table.find(b"a") is table.known_as(session.secret) is session
    assert list(table) == [session]
    table.end(session)
    assert len(table) == 0
    assert table.known_as(session.secret) is None
    with pytest.raises(NotAttached):
        table.get(b"a")


def test_ids_are_random_and_never_zero(table: SessionTable) -> None:
    ids = {table.attach(bytes([number]), "", 0, EVERYTHING).id for number in range(3)}
    assert len(ids) == 3
    assert all(ids)


def test_sessions_are_bounded(table: SessionTable) -> None:
    sessions = [table.attach(bytes([one]), "", 0, EVERYTHING) for one in range(3)]
    with pytest.raises(LimitExceeded, match="all 3 sessions"):
        table.attach(b"x", "", 0, EVERYTHING)
    table.end(sessions[0])
    table.attach(b"x", "", 0, EVERYTHING)


def test_silent_are_those_without_a_mapping_that_were_not_heard(table: SessionTable) -> None:
    silent, mapping, heard = (table.attach(bytes([one]), "", 0, EVERYTHING) for one in range(3))
    mapping.maps = True
    now = time.monotonic()
    silent.last_seen = mapping.last_seen = now - 11
    heard.last_seen = now - 9
    assert table.silent(now) == [silent]
    table.get(silent.identity)
    assert table.silent(now) == []


def test_watched_are_those_that_map_and_those_that_ended(table: SessionTable) -> None:
    plain, mapping, ended = (table.attach(bytes([one]), "", 0, EVERYTHING) for one in range(3))
    mapping.maps = True
    table.end(ended)
    assert table.watched().keys() == {mapping.id, ended.id}
    assert plain.id not in table.watched()


def swept(table: SessionTable) -> list[int]:
    """The sessions that a sweep finds gone, their files removed."""
    watched = table.watched()
    found = sweep(watched)
    remove_swept(watched, found)
    return list(found)


def test_a_sweep_finds_those_of_whom_no_process_is_left(table: SessionTable) -> None:
    held, left = (table.attach(bytes([number]), "", 0, EVERYTHING) for number in range(2))
    held.maps = left.maps = True
    lock = SessionLock(str(table.path(held.id)))
    assert swept(table) == [left.id]
    assert table.gone(left.id) is left
    assert not table.path(left.id).exists()
    lock.close()
    assert swept(table) == [held.id]
    table.gone(held.id)
    assert table.watched() == {}


def test_a_session_is_found_gone_again_until_its_file_is_removed(table: SessionTable) -> None:
    """What it held may not have been freed when the daemon was killed."""
    left = table.attach(b"a", "", 0, EVERYTHING)
    fds = sweep({left.id: table.path(left.id)})
    again = SessionTable(table.directory, SessionConfig(), LimitConfig())
    again.begin()
    assert again.earlier == {left.id}
    assert swept(again) == []  # it is locked by who found it first
    os.close(fds[left.id])  # as its end does
    assert swept(again) == [left.id]


def test_what_an_earlier_epoch_left_is_watched_until_its_processes_are_gone(
    table: SessionTable,
) -> None:
    old = table.attach(b"a", "", 0, EVERYTHING)
    lock = SessionLock(str(table.path(old.id)))
    again = SessionTable(table.directory, SessionConfig(), LimitConfig())
    again.begin()
    assert again.watched().keys() == {old.id}
    assert swept(again) == []
    lock.close()
    assert swept(again) == [old.id]
    assert again.gone(old.id) is None
    assert again.watched() == {}


def test_a_strangers_file_is_left_alone(table: SessionTable) -> None:
    stranger = table.directory / "notes.session"
    stranger.touch()
    SessionTable(table.directory, SessionConfig(), LimitConfig()).begin()
    assert stranger.exists()
