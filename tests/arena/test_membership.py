"""Who may still hold an arena: told by a lock of the kernel, in real processes."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.arena.membership import (
    SessionLock,
    create_session_file,
    is_held,
    lock_unheld,
    remove_locked,
)
from kvd.protocol.errors import LeaseEnded
from tests.arena.conftest import FORK

if TYPE_CHECKING:
    from tests.arena.conftest import Child

HOLD = """
import os, sys
from pathlib import Path
from kvd.arena.membership import SessionLock, lock_unheld, remove_locked
from kvd.protocol.errors import LeaseEnded
path = sys.argv[1]
"""
TAKE = HOLD + "lock = SessionLock(path)\nprint('held')\ninput()\n"


def remove_if_unheld(path: Path) -> bool:
    if (fd := lock_unheld(path)) is not None:
        remove_locked(path, fd)
    return fd is not None


@pytest.fixture
def session(shm: Path) -> Path:
    create_session_file(shm / "session")
    return shm / "session"


def test_a_new_session_is_held_by_nobody(session: Path) -> None:
    assert not is_held(session)


def test_a_session_has_one_file(session: Path) -> None:
    with pytest.raises(FileExistsError):
        create_session_file(session)


def test_a_lock_is_held_until_it_is_closed(session: Path) -> None:
    lock = SessionLock(str(session))
    assert is_held(session)
    lock.close()
    lock.close()
    assert not is_held(session)


def test_a_lock_ends_with_its_last_reference(session: Path) -> None:
    lock = SessionLock(str(session))
    assert is_held(session)
    del lock
    assert not is_held(session)


def test_a_stopped_process_still_holds(session: Path, child: Callable[..., Child]) -> None:
    member = child(TAKE, session)
    assert member.says() == "held"
    member.send(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(member.process.pid, os.WUNTRACED)[1])
    assert is_held(session)
    assert not remove_if_unheld(session)
    assert session.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_killed_process_holds_nothing(
    session: Path, child: Callable[..., Child], number: signal.Signals
) -> None:
    member = child(TAKE, session)
    assert member.says() == "held"
    member.send(number)
    assert member.ended() == -number
    assert not is_held(session)


def test_a_process_that_ends_by_itself_holds_nothing(
    session: Path, child: Callable[..., Child]
) -> None:
    member = child(TAKE, session)
    assert member.says() == "held"
    member.tell()
    assert member.ended() == 0
    assert not is_held(session)


def test_a_session_is_held_until_its_last_process_is_gone(
    session: Path, child: Callable[..., Child]
) -> None:
    scheduler, worker = child(TAKE, session), child(TAKE, session)
    assert (scheduler.says(), worker.says()) == ("held", "held")
    scheduler.send(signal.SIGKILL)
    scheduler.ended()
    assert is_held(session)
    worker.send(signal.SIGKILL)
    worker.ended()
    assert remove_if_unheld(session)


def test_a_forked_child_does_not_keep_the_lock(session: Path, child: Callable[..., Child]) -> None:
    program = TAKE.replace("input()", FORK)
    parent = child(program, session)
    assert (parent.says(), parent.says()) == ("held", "forked")
    parent.send(signal.SIGKILL)
    parent.ended()
    assert not is_held(session)


def test_a_program_that_a_member_starts_does_not_keep_the_lock(
    session: Path, child: Callable[..., Child]
) -> None:
    program = TAKE.replace(
        "input()",
        """
import subprocess
subprocess.Popen(['sh', '-c', 'echo started; read line'])
os.kill(os.getpid(), 9)""",
    )
    parent = child(program, session)
    assert (parent.says(), parent.says()) == ("held", "started")
    parent.ended()
    assert not is_held(session)


def test_a_removed_session_cannot_be_joined(session: Path) -> None:
    assert remove_if_unheld(session)
    assert not session.exists()
    with pytest.raises(LeaseEnded, match="over"):
        SessionLock(str(session))


def test_a_file_that_somebody_else_removed_tells_nothing_and_counts_as_held(session: Path) -> None:
    session.unlink()
    assert is_held(session)
    assert not remove_if_unheld(session)


def test_who_opened_the_file_before_it_was_removed_is_refused(
    session: Path, child: Callable[..., Child]
) -> None:
    """The session ends at the worst moment: between the open and the lock."""
    program = (
        HOLD
        + """
def at_the_lock(event, args):
    if event == "fcntl.flock" and Path(path).exists() and not at_work:
        at_work.append(True)
        remove_locked(Path(path), lock_unheld(Path(path)))
        print("removed")
at_work = []
sys.addaudithook(at_the_lock)
try:
    SessionLock(path)
except LeaseEnded:
    print("refused")
"""
    )
    joining = child(program, session)
    assert (joining.says(), joining.says()) == ("removed", "refused")


def test_a_lock_of_the_daemon_that_does_not_end_is_a_refusal_and_no_wait(session: Path) -> None:
    """A daemon stopped in the middle of its look must not stop its clients."""
    fd = os.open(session, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(LeaseEnded):
        SessionLock(str(session))
    os.close(fd)
    SessionLock(str(session)).close()


def test_a_refused_process_keeps_no_descriptor(session: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = os.open(session, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(LeaseEnded):
        SessionLock(str(session))
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_looking_does_not_take_the_lock_away(session: Path) -> None:
    lock = SessionLock(str(session))
    assert [is_held(session) for _ in range(3)] == [True] * 3
    assert not remove_if_unheld(session)
    lock.close()
    assert remove_if_unheld(session)
