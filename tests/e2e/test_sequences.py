"""Sequences that outlive who saved them, and the daemon (design, section 8)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import TYPE_CHECKING

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import LimitExceeded, SequenceTaken, UnknownSequence
from kvd_client.client import Client
from tests.e2e.support import (
    EXTENT_PAGES,
    IDENTITY,
    LAYOUT,
    eventually,
    faultless_daemon,
    holds,
    settings,
    tokens_of,
    write,
)

if TYPE_CHECKING:
    from kvd_client import Lease, Namespace
    from tests.arena.conftest import Child

TOKENS = tokens_of(1, 100)
# Ten sequences of that length have room, with what is reserved ahead.
NUM_PAGES = 48 * EXTENT_PAGES

# Generates three tokens at a time, and saves each time.
WORKER = """
name, tokens = sys.argv[2], tokens_of(int(sys.argv[3]), 100)
lease, generation = namespace.match([]), 0
try:
    for stop in range(3, len(tokens), 3):
        lease.reserve(stop)
        write(lease, tokens, stop - 3, stop)
        lease.commit(tokens[lease.num_committed : stop])
        generation = lease.save(name, tokens[:stop], b'at %d' % stop, generation=generation)
        print(stop)
except KvdError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with faultless_daemon(settings(NUM_PAGES)) as daemon:
        yield daemon


def last_saved(worker: Child, num_saves: int) -> int:
    """How far a worker had come when it was killed, as far as it said so."""
    said = [int(worker.says()) for _ in range(num_saves)]
    worker.send(SIGKILL)
    worker.ended()
    return max([*said, *map(int, worker.rest())])


def go_on(lease: Lease, tokens: list[int]) -> None:
    """Compute what has no KV here."""
    lease.reserve(len(tokens))
    write(lease, tokens, lease.num_tokens, len(tokens))
    lease.commit(tokens[lease.num_committed :])


def reopened(namespace: Namespace) -> Lease:
    """The first lease of the daemon that was started again."""
    return eventually(lambda: (lease := namespace.match([])).is_open and lease)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_worker_s_sequence_goes_on_as_if_nothing_had_happened(
    namespace: Namespace, program: Callable[..., Child], seed: int
) -> None:
    worker = program(WORKER, "chat", 1)
    saved = last_saved(worker, random.Random(seed).randrange(1, 100))
    resumed = namespace.resume("chat")
    stop = len(resumed.tokens)
    assert stop in (saved, saved + 3)
    assert (resumed.tokens.tolist(), resumed.state) == (TOKENS[:stop], b"at %d" % stop)
    with resumed.lease as lease:
        assert lease.num_tokens == stop
        assert holds(lease, TOKENS, stop)
        go_on(lease, TOKENS)
        assert holds(lease, TOKENS)


@pytest.mark.parametrize("seed", range(2))
def test_a_sequence_outlives_worker_and_daemon(
    daemon: RunningDaemon, program: Callable[..., Child], seed: int
) -> None:
    worker = program(WORKER, "chat", 1)
    said = [int(worker.says()) for _ in range(random.Random(seed).randrange(1, 100))]
    daemon.kill()
    said += [int(line) for line in worker.rest() if line.strip().isdigit()]
    daemon.start()
    with Client(daemon.endpoint, timeout=30.0) as client:
        resumed = client.open(IDENTITY, LAYOUT).resume("chat")
        assert len(resumed.tokens) >= max(said)
        with resumed.lease as lease:
            assert holds(lease, TOKENS, lease.num_tokens)
            go_on(lease, TOKENS)
            assert holds(lease, TOKENS)


# Saves, and saves again when it is told.
TWICE = """
lease = namespace.match([])
generation = lease.save('chat', [])
print('saved')
input()
try:
    lease.save('chat', [], b'late', generation=generation)
except SequenceTaken:
    print('taken')
"""


def test_a_worker_that_was_frozen_finds_its_sequence_taken(
    namespace: Namespace, program: Callable[..., Child]
) -> None:
    worker = program(TWICE)
    assert worker.says() == "saved"
    worker.send(SIGSTOP)
    resumed = namespace.resume("chat")
    worker.tell()
    worker.send(SIGCONT)
    assert worker.says() == "taken"
    resumed.lease.save("chat", [], b"new", generation=resumed.generation)
    assert namespace.resume("chat").state == b"new"


def test_ten_workers_are_killed_and_all_are_resumed(
    namespace: Namespace, program: Callable[..., Child]
) -> None:
    workers = {seed: program(WORKER, f"chat {seed}", seed) for seed in range(10)}
    saved = {seed: last_saved(worker, 3) for seed, worker in workers.items()}
    assert namespace.sequences().num_sequences == 10
    for seed, stop in saved.items():
        resumed = namespace.resume(f"chat {seed}")
        assert len(resumed.tokens) >= stop
        assert resumed.tokens.tolist() == tokens_of(seed, 100)[: len(resumed.tokens)]
        with resumed.lease as lease:
            assert holds(lease, tokens_of(seed, 100), lease.num_tokens)


# Takes a sequence over, when all are there to do so, and saves what it knows.
RIVAL = """
client.wait_attached(30.0)
print('ready')
input()
resumed = namespace.resume('chat')
state = b'%d' % resumed.generation
try:
    resumed.lease.save('chat', [], state, generation=resumed.generation)
except SequenceTaken:
    pass
print(resumed.generation)
"""


def test_of_ten_rivals_the_last_to_resume_has_it(
    namespace: Namespace, program: Callable[..., Child]
) -> None:
    namespace.match([]).save("chat", [])
    rivals = [program(RIVAL) for _ in range(10)]
    for rival in rivals:
        assert rival.says() == "ready"
    for rival in rivals:
        rival.tell()
    generations = [int(rival.says()) for rival in rivals]
    assert len(set(generations)) == 10
    assert namespace.resume("chat").state == b"%d" % max(generations)


def test_a_resume_that_is_refused_leaves_a_sequence_to_its_owner() -> None:
    with (
        running_daemon(settings(limits={"session_namespaces": 1})) as daemon,
        Client(daemon.endpoint, timeout=30.0) as owner,
        Client(daemon.endpoint, timeout=30.0) as other,
    ):
        lease = owner.open(IDENTITY, LAYOUT).match([])
        generation = lease.save("chat", [])
        other.open(IDENTITY, LAYOUT, salt="its own").match([])
        with pytest.raises(LimitExceeded, match="namespaces open"):
            other.open(IDENTITY, LAYOUT).resume("chat")
        lease.save("chat", [], generation=generation)


def test_a_save_is_refused_rather_than_that_another_is_lost() -> None:
    limits = {"sequences": 2, "sequence_bytes": "1KiB"}
    with (
        running_daemon(settings(limits=limits)) as daemon,
        Client(daemon.endpoint, timeout=30.0) as client,
    ):
        namespace = client.open(IDENTITY, LAYOUT)
        lease = namespace.match([])
        generation = lease.save("first", [], bytes(600))
        with pytest.raises(LimitExceeded, match="1KiB together"):
            lease.save("second", [], bytes(600))
        lease.save("second", [])
        with pytest.raises(LimitExceeded, match="all 2 sequences"):
            lease.save("third", [])
        lease.save("first", [], bytes(700), generation=generation)
        assert len(namespace.resume("first").state) == 700
        assert client.discard(namespace.sequences().sequences[0].namespace_key, "second")
        lease.save("third", [])


def test_a_sequence_is_there_before_anybody_opened_its_namespace(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    namespace.match([]).save("chat", TOKENS[:8], b"state")
    daemon.restart()
    with Client(daemon.endpoint, timeout=30.0) as client:
        (listed,) = client.sequences().sequences
        assert (listed.sequence, listed.model, listed.num_tokens) == ("chat", IDENTITY.model, 8)
        assert client.open(IDENTITY, LAYOUT).resume("chat").state == b"state"


def test_a_generation_that_was_given_holds_over_a_restart(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    first = namespace.match([]).save("chat", [])
    resumed = namespace.resume("chat")
    daemon.restart()
    lease = reopened(namespace)
    with pytest.raises(SequenceTaken):
        lease.save("chat", [], generation=first)
    assert lease.save("chat", [], generation=resumed.generation) == resumed.generation


def test_a_generation_of_what_was_discarded_is_not_given_again_after_a_restart(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    first = namespace.match([]).save("chat", [])
    namespace.discard("chat")
    daemon.restart()
    lease = reopened(namespace)
    assert lease.save("chat", []) > first
    with pytest.raises(SequenceTaken):
        lease.save("chat", [], generation=first)


def test_a_stop_keeps_sequences_for_a_machine_that_is_started_anew(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    namespace.match([]).save("chat", TOKENS[:8], b"state")
    assert daemon.stop() == 0
    shutil.rmtree(daemon.directory)
    daemon.start()
    reopened(namespace)
    assert namespace.resume("chat").tokens.tolist() == TOKENS[:8]


def test_without_a_checkpoint_a_power_loss_takes_what_was_saved(
    daemon: RunningDaemon, namespace: Namespace
) -> None:
    namespace.match([]).save("chat", [])
    daemon.kill()
    shutil.rmtree(daemon.directory)
    daemon.start()
    reopened(namespace)
    with pytest.raises(UnknownSequence):
        namespace.resume("chat")
