"""What operators ask for: that all is saved, and that nothing is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import pytest

from kvd.config import LimitConfig
from kvd.protocol.codec import encode
from kvd.protocol.keys import KEY_BYTES
from kvd.protocol.messages import CheckpointReply, CheckpointRequest, ErrorReply
from kvd.testing.faults import Faults, set_faults
from kvd_client import DaemonUnavailable, DeadlineExceeded, TierFailed
from kvd_client.client import Client
from tests.actors.wire import Wire, packed
from tests.e2e.support import (
    BLOCK,
    FAULTY,
    IDENTITY,
    LAYOUT,
    LMDB,
    PATIENCE_SECONDS,
    eventually,
    faultless_daemon,
    holds,
    settings,
    store,
    tokens_of,
)

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client import TierStatus
    from kvd_client.client import Namespace

TOKENS = tokens_of(1, 8)


@pytest.fixture
def below() -> dict[str, Any]:
    """The tier below memory."""
    return LMDB


@pytest.fixture
def daemon(below: dict[str, Any]) -> Iterator[RunningDaemon]:
    (memory,) = settings()["tiers"]
    # No round of its own finds what the tests look for.
    with faultless_daemon(settings(tiers=[memory, below], cache={"scrub_bytes": 0})) as daemon:
        yield daemon


def data_of(daemon: RunningDaemon) -> Path:
    return daemon.directory.parent / "data"


def disk_of(client: Client) -> TierStatus:
    return client.status().tiers[1]


def start_again(daemon: RunningDaemon, namespace: Namespace, *, with_memory: bool = True) -> None:
    """As the machine does, which loses what was in memory, or as systemd after a crash."""
    if not with_memory:
        shutil.rmtree(daemon.directory)
    daemon.start()
    eventually(lambda: namespace.match(tokens_of(99, 1)).is_open)


def flip_page(daemon: RunningDaemon, page: int) -> None:
    """Change a byte of a page in the arena's file."""
    (path,) = daemon.directory.glob("*.arena")
    with path.open("r+b") as file:
        file.seek(page * LAYOUT.slice_bytes)
        (byte,) = file.read(1)
        file.seek(page * LAYOUT.slice_bytes)
        file.write(bytes([byte ^ 1]))


def flip_record(daemon: RunningDaemon, block: list[int]) -> None:
    """Change a byte of the record of the block that has these tokens."""
    (path,) = data_of(daemon).glob("lmdb/*/data.mdb")
    with lmdb.open(str(path.parent), max_dbs=3, readonly=True, lock=False) as environment:
        data, abouts = (environment.open_db(name) for name in (b"data", b"about"))
        with environment.begin() as txn:
            (record,) = (
                txn.get(key, db=data)
                for key, about in txn.cursor(abouts)
                if about[KEY_BYTES:] == packed(block)  # behind its parent's key
            )
    with path.open("r+b") as file:
        place = file.read().index(record)
        file.seek(place)
        file.write(bytes([record[0] ^ 1]))


def num_found(namespace: Namespace) -> int:
    """How many blocks of TOKENS are served; what is served is right."""
    with namespace.match(TOKENS) as lease:
        assert holds(lease, TOKENS, lease.num_tokens)
        return lease.num_tokens // BLOCK


# --- verify ---


def test_a_byte_that_changed_in_memory_is_found(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    with namespace.match(TOKENS) as lease:
        page = lease.pages[5]
    eventually(lambda: client.verify().tiers[0].num_checked == 8)
    flip_page(daemon, page)
    memory, _ = client.verify().tiers
    assert (memory.num_bad, client.status().counters["checksum_failures"]) == (1, 1)
    assert "24 tokens in, is damaged" in daemon.log
    assert num_found(namespace) == 5
    store(namespace, TOKENS)
    assert num_found(namespace) == 8


def test_a_byte_that_changed_on_disk_is_found(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    daemon.stop()
    flip_record(daemon, TOKENS[3 * BLOCK : 4 * BLOCK])
    start_again(daemon, namespace, with_memory=False)
    _, disk = client.verify().tiers
    assert (disk.num_blocks, disk.num_bad, disk.num_missing) == (8, 1, 0)
    assert "16 tokens in, is damaged" in daemon.log
    assert num_found(namespace) == 3
    assert disk_of(client).num_blocks == 3
    store(namespace, TOKENS)
    assert num_found(namespace) == 8


def test_a_byte_that_changed_while_nobody_ran_is_found_by_itself(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    with namespace.match(TOKENS) as lease:
        page = lease.pages[2]
    eventually(lambda: client.verify().tiers[0].num_checked == 8)
    daemon.kill()
    flip_page(daemon, page)
    start_again(daemon, namespace)
    eventually(lambda: client.status().counters.get("checksum_failures") == 1)
    assert num_found(namespace) == 2


def test_progress_is_told_until_it_is_done(client: Client, namespace: Namespace) -> None:
    store(namespace, TOKENS)
    told: list[bool] = []
    reply = client.verify(lambda reply: told.append(reply.is_done))
    assert reply.is_done
    assert set(told) == {False}


def test_a_restart_ends_a_verification(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    with pytest.raises(DaemonUnavailable):
        client.verify(lambda _: daemon.restart())


# --- checkpoint ---


def test_what_a_checkpoint_saved_outlives_the_machines_memory(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    assert client.checkpoint() == 8
    assert client.checkpoint() == 0
    daemon.kill()
    start_again(daemon, namespace, with_memory=False)
    assert num_found(namespace) == 8


@pytest.mark.parametrize("below", [FAULTY])
def test_a_checkpoint_goes_on_without_who_asked_for_it(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    eventually(lambda: disk_of(client).used_bytes)
    set_faults(data_of(daemon), Faults.STUCK)
    with pytest.raises(DeadlineExceeded):
        client.checkpoint(timeout=0.3)
    assert disk_of(client).num_blocks == 0
    set_faults(data_of(daemon), Faults.NONE)
    eventually(lambda: disk_of(client).num_blocks == 8)


@pytest.mark.parametrize("below", [FAULTY])
def test_checkpoints_that_wait_are_bounded(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    eventually(lambda: disk_of(client).used_bytes)
    with closing(Wire(daemon.endpoint)) as wire:
        set_faults(data_of(daemon), Faults.STUCK)  # so that none is done
        for number in range(LimitConfig().session_waiting + 1):
            wire.send(encode(CheckpointRequest(id=number + 1)))
        refusal = wire.receive()
        set_faults(data_of(daemon), Faults.NONE)
        assert isinstance(refusal, ErrorReply)
        assert refusal.code == "limit_exceeded"


@pytest.mark.parametrize("below", [FAULTY])
def test_who_asks_while_a_checkpoint_is_made_shares_the_next_one(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    eventually(lambda: disk_of(client).used_bytes)
    with closing(Wire(daemon.endpoint)) as wire:
        set_faults(data_of(daemon), Faults.STUCK)
        for number in range(5):
            wire.send(encode(CheckpointRequest(id=number + 1)))
        set_faults(data_of(daemon), Faults.NONE)
        replies = [wire.receive() for _ in range(5)]
    assert {reply.id for reply in replies} == {1, 2, 3, 4, 5}
    assert all(isinstance(reply, CheckpointReply) for reply in replies)
    assert client.status().counters["checkpoints_done"] <= 2


@pytest.mark.parametrize("below", [FAULTY])
@pytest.mark.parametrize(
    ("faults", "message"), [(Faults.FULL, "the tier is full"), (Faults.GONE, "the tier is gone")]
)
def test_a_disk_that_takes_nothing_fails_a_checkpoint_and_nothing_else(
    daemon: RunningDaemon, client: Client, namespace: Namespace, faults: Faults, message: str
) -> None:
    store(namespace, TOKENS)
    set_faults(data_of(daemon), faults)
    with pytest.raises(TierFailed, match=message):
        client.checkpoint(timeout=PATIENCE_SECONDS)
    disk = disk_of(client)
    assert message in disk.trouble
    assert disk.waiting_bytes == 8 * LAYOUT.page_bytes
    assert num_found(namespace) == 8
    set_faults(data_of(daemon), Faults.NONE)
    eventually(lambda: not disk_of(client).trouble)
    assert client.checkpoint(timeout=PATIENCE_SECONDS) == 8


def test_removed_files_in_memory_are_told_of_until_a_start(
    daemon: RunningDaemon, client: Client
) -> None:
    shutil.rmtree(daemon.directory)
    eventually(lambda: client.status().tiers[0].trouble)
    with Client(daemon.endpoint) as other, pytest.raises(DaemonUnavailable, match="no room"):
        other.sequences()
    assert daemon.log.count("reason=header_removed") == 1
    daemon.restart()
    assert client.wait_attached(PATIENCE_SECONDS)
    assert not client.status().tiers[0].trouble


# --- drain ---


def test_a_refusal_ends_with_who_refused(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    client.drain()
    with Client(daemon.endpoint, timeout=PATIENCE_SECONDS) as late:
        theirs = late.open(IDENTITY, LAYOUT)
        with pytest.raises(DaemonUnavailable, match="it is draining"):
            theirs.drop(TOKENS)
        daemon.kill()
        eventually(lambda: "does not answer" in refusal_of(theirs))


def refusal_of(namespace: Namespace) -> str:
    with pytest.raises(DaemonUnavailable) as refusal:
        namespace.drop(TOKENS, timeout=1.0)
    return str(refusal.value)
