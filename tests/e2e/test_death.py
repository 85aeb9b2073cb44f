"""A page is handed to another only when no process can still write it (design, section 6)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.e2e.support import (
    BLOCK,
    compute,
    eventually,
    held,
    holds,
    pages_in,
    store,
    tokens_of,
)

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client.client import Client, Namespace
    from tests.arena.conftest import Child

Program = Callable[..., "Child"]

# Holds 16 reserved pages with writable views; writes -1 all over them when told.
HOLD = """
lease = namespace.match(tokens_of(1, 8), reserve_tokens=16 * BLOCK)
views = lease.write_arrays(0, 16 * BLOCK)
print('holds', len(lease.pages))
input()
for view in views:
    view[:] = -1
del view, views
print('wrote')
"""


def freeze(child: Child) -> None:
    child.send(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(child.process.pid, os.WUNTRACED)[1])


def fill_many_times(namespace: Namespace, client: Client) -> list[list[int]]:
    """Store twelve times what the pool holds; the sequences, the last ones still resident."""
    sequences = [tokens_of(seed, 16) for seed in range(100, 200)]
    for tokens in sequences:
        store(namespace, tokens)
    assert client.status().counters["blocks_evicted"] > 10 * 128
    return sequences


def check_every_block(namespace: Namespace, sequences: list[list[int]]) -> None:
    """What is matched is right; and the last sequences are matched."""
    found = 0
    for tokens in sequences:
        with namespace.match(tokens) as lease:
            assert holds(lease, tokens, lease.num_tokens)
            lease.check()
            found += lease.num_tokens == len(tokens)
    assert found >= 5


# --- frozen ---


def test_a_frozen_client_that_writes_when_it_wakes_changes_no_committed_byte(
    program: Program, client: Client, namespace: Namespace
) -> None:
    frozen = program(HOLD)
    assert frozen.says() == "holds 16"
    freeze(frozen)
    sequences = fill_many_times(namespace, client)
    frozen.send(signal.SIGCONT)
    frozen.tell()
    assert frozen.says() == "wrote"
    check_every_block(namespace, sequences)


def test_a_frozen_client_is_not_dead_and_its_lease_is_good_when_it_wakes(
    program: Program, client: Client, namespace: Namespace
) -> None:
    code = HOLD + "lease.check()\ncompute(lease, tokens_of(1, 8))\nprint(lease.num_committed)"
    frozen = program(code)
    assert frozen.says() == "holds 16"
    freeze(frozen)
    fill_many_times(namespace, client)
    frozen.send(signal.SIGCONT)
    frozen.tell()
    assert (frozen.says(), frozen.says()) == ("wrote", str(8 * BLOCK))
    with namespace.match(tokens_of(1, 8)) as lease:
        assert holds(lease, tokens_of(1, 8))


def test_a_frozen_client_keeps_what_it_has_matched(
    program: Program, client: Client, namespace: Namespace
) -> None:
    code = """
store(namespace, tokens_of(1, 16))
lease = namespace.match(tokens_of(1, 16))
print(lease.num_tokens)
input()
lease.check()
print(holds(lease, tokens_of(1, 16)))
"""
    reader = program(code)
    assert reader.says() == str(16 * BLOCK)
    freeze(reader)
    fill_many_times(namespace, client)
    reader.send(signal.SIGCONT)
    reader.tell()
    assert reader.says() == "True"


def test_a_frozen_client_is_shown_as_stale(program: Program, client: Client) -> None:
    frozen = program(HOLD)
    assert frozen.says() == "holds 16"
    freeze(frozen)

    def stale() -> bool:
        session = next(one for one in client.status().sessions if one.client == "program")
        return session.stale_seconds > 0.3 and session.num_reserved == 16

    eventually(stale)


# --- killed ---


def test_a_killed_client_gives_its_reserved_pages_back(program: Program, client: Client) -> None:
    killed = program(HOLD)
    assert killed.says() == "holds 16"
    assert pages_in(client, "reserved") == 16
    killed.send(signal.SIGKILL)
    eventually(lambda: held(client) == {})
    assert [one.client for one in client.status().sessions] == ["test"]


def test_a_client_killed_before_its_commit_leaves_no_block(
    program: Program, client: Client, namespace: Namespace
) -> None:
    killed = program(HOLD)
    assert killed.says() == "holds 16"
    killed.tell()
    assert killed.says() == "wrote"
    killed.send(signal.SIGKILL)
    eventually(lambda: pages_in(client, "reserved") + pages_in(client, "quarantined") == 0)
    assert namespace.match(tokens_of(1, 8)).num_tokens == 0


def test_what_a_killed_client_committed_stays(
    program: Program, client: Client, namespace: Namespace
) -> None:
    killed = program("store(namespace, tokens_of(1, 8))\nprint('stored')\ninput()")
    assert killed.says() == "stored"
    killed.send(signal.SIGKILL)
    eventually(lambda: len(client.status().sessions) == 1)
    with namespace.match(tokens_of(1, 8)) as lease:
        assert lease.num_tokens == 8 * BLOCK
        assert holds(lease, tokens_of(1, 8))


def test_a_killed_client_that_was_frozen_gives_its_pages_back(
    program: Program, client: Client
) -> None:
    killed = program(HOLD)
    assert killed.says() == "holds 16"
    freeze(killed)
    killed.send(signal.SIGKILL)
    eventually(lambda: held(client) == {})


# --- more than one process in a session ---

WORKER = """
from kvd.arena.host import MappedArena
from kvd.arena.membership import SessionLock
lock = SessionLock(sys.argv[2])
arena = MappedArena(sys.argv[3], LAYOUT, 128, lock)
print('maps')
for page in range(int(input())):
    arena.writable().page_view(page)[:] = -1
print('wrote')
input()
"""


CLOSE = "views = lease.write_arrays(0, 16 * BLOCK)\nclient.close()"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("end", [CLOSE, KILL], ids=["closed", "killed"])
def test_pages_are_quarantined_while_another_process_of_their_session_lives(
    program: Program, client: Client, namespace: Namespace, daemon: RunningDaemon, end: str
) -> None:
    # Alone on the daemon, the scheduler gets pages 0 to 15, and its session's file is the one left.
    others = set(daemon.directory.glob("*.session"))
    scheduler = program(HOLD + f"input()\n{end}")
    assert scheduler.says() == "holds 16"
    (lock_path,) = set(daemon.directory.glob("*.session")) - others
    worker = program(WORKER, lock_path, *daemon.directory.glob("*.arena"))
    assert worker.says() == "maps"
    scheduler.tell()
    scheduler.tell()
    scheduler.ended()
    if end == CLOSE:
        eventually(lambda: pages_in(client, "quarantined") == 16)
    sequences = fill_many_times(namespace, client)
    worker.tell("16")
    assert worker.says() == "wrote"
    check_every_block(namespace, sequences)
    assert pages_in(client, "reserved") + pages_in(client, "quarantined") == 16
    worker.tell()
    worker.ended()
    eventually(lambda: pages_in(client, "reserved") + pages_in(client, "quarantined") == 0)


def test_a_closed_clients_pages_are_quarantined_while_it_has_a_view(
    program: Program, client: Client
) -> None:
    closed = program(
        "lease = namespace.match(tokens_of(1, 8), reserve_tokens=16 * BLOCK)\n"
        "views = lease.write_arrays(0, 16 * BLOCK)\n"
        "client.close()\nprint('closed')\ninput()\n"
        "del views, lease, namespace, client\nprint('let go')\ninput()"
    )
    assert closed.says() == "closed"
    assert pages_in(client, "quarantined") == 16
    closed.tell()
    assert closed.says() == "let go"
    eventually(lambda: held(client) == {})


@pytest.mark.parametrize(
    "end",
    [
        "client.close()\ndel views, lease",
        "client.close()\ndel lease, views",
        "del lease\nclient.close()\ndel views",
    ],
)
def test_a_closed_clients_pages_are_free_when_no_view_is_left(
    program: Program, client: Client, end: str
) -> None:
    closed = program(
        "import gc; gc.disable()\n"
        "lease = namespace.match(tokens_of(1, 8), reserve_tokens=16 * BLOCK)\n"
        "views = lease.write_arrays(0, 16 * BLOCK)\n"
        f"{end}\nprint('closed')\ninput()"
    )
    assert closed.says() == "closed"
    eventually(lambda: held(client) == {}, patience=10)


# --- forked ---


def test_a_forked_child_does_not_keep_the_session_alive(program: Program, client: Client) -> None:
    code = HOLD.partition("print")[0]
    parent = program(
        code
        + "if os.fork() == 0:\n    print('forked')\n    os.read(0, 1)\n    os._exit(0)\nos.wait()"
    )
    assert parent.says() == "forked"
    assert pages_in(client, "reserved") == 16
    parent.send(signal.SIGKILL)
    eventually(lambda: held(client) == {})
    assert len(client.status().sessions) == 1


FORKED = """
store(namespace, tokens_of(1, 8))
lease = namespace.match(tokens_of(1, 8))
if os.fork() == 0:
    signal.alarm(60)  # whatever becomes of it
    {}
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
print(holds(lease, tokens_of(1, 8)), lease.is_open)
store(namespace, tokens_of(3, 8))
print('goes on')
"""


@pytest.mark.parametrize(
    "start",
    [
        "other = Client(sys.argv[1], timeout=30.0).open(IDENTITY, LAYOUT)",
        "other = client.open(IDENTITY, LAYOUT)",
        "other = namespace",
    ],
    ids=["a client of its own", "the client it inherited", "the namespace it inherited"],
)
def test_a_forked_child_can_use(program: Program, start: str) -> None:
    use = f"""
    {start}
    store(other, tokens_of(2, 8))
    with other.match(tokens_of(2, 8)) as its:
        print(its.num_tokens, holds(its, tokens_of(2, 8)))
    with other.match(tokens_of(1, 8)) as its:
        print(its.num_tokens, holds(its, tokens_of(1, 8)))
"""
    parent = program(FORKED.format(use.strip()))
    assert [parent.says(), parent.says()] == [f"{8 * BLOCK} True"] * 2
    assert [parent.says() for _ in range(3)] == ["0", "True True", "goes on"]


def test_a_forked_child_finds_its_parents_lease_ended(program: Program) -> None:
    parent = program(FORKED.format("print(lease.is_open)"))
    assert parent.says() == "False"


@pytest.mark.parametrize("end", ["sys.exit()", "os._exit(0)", "del lease, namespace, client"])
def test_a_forked_child_that_ends_does_not_disturb_its_parent(program: Program, end: str) -> None:
    parent = program(FORKED.format(end))
    assert [parent.says() for _ in range(3)] == ["0", "True True", "goes on"]


# --- both sides of a dead client's work ---


def test_another_client_finishes_what_a_killed_one_began(
    program: Program, client: Client, namespace: Namespace
) -> None:
    tokens = tokens_of(1, 8)
    code = """
lease = namespace.match(tokens_of(1, 8))
compute(lease, tokens_of(1, 4))
lease.reserve(8 * BLOCK)
print('began')
input()
"""
    killed = program(code)
    assert killed.says() == "began"
    killed.send(signal.SIGKILL)
    with namespace.match(tokens) as lease:
        assert lease.num_tokens == 4 * BLOCK
        compute(lease, tokens)
        assert holds(lease, tokens)
    eventually(lambda: held(client) == {"committed": 8})
