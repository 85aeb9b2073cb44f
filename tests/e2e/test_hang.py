"""A disk that hangs: what is asked of it never returns, and kvd starts, serves and stops."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.testing.daemons import DaemonFailed, RunningDaemon, running_daemon
from kvd.testing.faults import SWITCH, Faults, set_faults
from kvd_client import DeadlineExceeded
from tests.arena.conftest import child, shm  # noqa: F401 - fixtures
from tests.e2e.support import (
    BLOCK,
    eventually,
    faultless_daemon,
    holds,
    store,
    tokens_of,
    with_store,
)

if TYPE_CHECKING:
    from kvd_client.client import Client, Namespace
    from tests.arena.conftest import Child

TOKENS = tokens_of(1, 8)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    cache = {"scrub_bytes": 0}
    with faultless_daemon(with_store(cache=cache, grace_seconds=0.5, hang_seconds=0.5)) as daemon:
        yield daemon


def hang(daemon: RunningDaemon) -> None:
    set_faults(daemon.data_directory, Faults.STUCK)


def work_again(daemon: RunningDaemon) -> None:
    set_faults(daemon.data_directory, Faults.NONE)


def num_found(namespace: Namespace) -> int:
    """How many blocks of TOKENS are served; what is served is right."""
    eventually(lambda: namespace.match(tokens_of(99, 1)).is_open)
    with namespace.match(TOKENS) as lease:
        assert holds(lease, TOKENS, lease.num_tokens)
        return lease.num_tokens // BLOCK


def stops_without_its_disk(daemon: RunningDaemon) -> bool:
    return (
        daemon.stop() == 0
        and "reason=left tier faulty does not answer" in daemon.log
        and "reason=not_closed tier=faulty" in daemon.log
        and not (daemon.base / "kvd.sock").exists()
    )


# --- a stop ---


def test_a_write_that_hangs_does_not_hinder_a_stop_and_memory_is_kept(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    hang(daemon)
    store(namespace, TOKENS)
    assert stops_without_its_disk(daemon)
    assert "reason=not_saved" in daemon.log
    work_again(daemon)
    daemon.start()
    assert num_found(namespace) == 8
    client.checkpoint()
    assert client.status().tiers[1].num_blocks == 8


def test_a_sync_that_hangs_does_not_hinder_a_stop_and_the_next_start_finds_all(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    client.checkpoint()
    hang(daemon)
    assert stops_without_its_disk(daemon)
    work_again(daemon)
    shutil.rmtree(daemon.directory)
    daemon.start()
    assert num_found(namespace) == 8


def test_a_read_that_hangs_does_not_hinder_a_stop(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    client.checkpoint()
    hang(daemon)
    with pytest.raises(DeadlineExceeded, match=r"verified .* goes on with it"):
        client.verify(timeout=0.1)
    assert stops_without_its_disk(daemon)


def test_a_close_that_hangs_does_not_hinder_a_stop(daemon: RunningDaemon) -> None:
    hang(daemon)
    assert stops_without_its_disk(daemon)


def test_sequences_that_cannot_be_copied_hinder_neither_a_stop_nor_that_blocks_are_saved(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    with namespace.match(TOKENS) as lease:
        lease.save("chat", TOKENS)
    (name,) = [path.name for path in (daemon.directory / "sequences").iterdir()]
    copies = daemon.data_directory / "sequences"
    copies.mkdir(mode=0o700)
    os.mkfifo(copies / f"{name}.new")  # nobody reads it: who writes it hangs
    assert daemon.stop() == 0
    assert "reason=left the disk of saved sequences" in daemon.log
    shutil.rmtree(daemon.directory)
    daemon.start()
    assert num_found(namespace) == 8


# --- a start ---


def test_a_tier_that_hangs_is_off_until_the_next_start(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    daemon.stop()
    hang(daemon)
    daemon.start()
    assert num_found(namespace) == 8
    assert client.status().tiers[1].trouble == "tier faulty does not answer"
    assert stops_without_its_disk(daemon)
    work_again(daemon)
    shutil.rmtree(daemon.directory)
    daemon.start()
    assert num_found(namespace) == 8


def test_sequences_on_a_disk_that_hangs_end_the_start_with_words(daemon: RunningDaemon) -> None:
    daemon.stop()
    copies = daemon.data_directory / "sequences"
    copies.mkdir(mode=0o700)
    os.mkfifo(copies / "one.sequence")  # nobody writes it: who reads it hangs
    with pytest.raises(DaemonFailed, match="kvd: the disk of saved sequences does not answer"):
        daemon.start()


def test_a_stop_does_not_wait_for_a_start_that_hangs() -> None:
    with running_daemon(with_store(grace_seconds=0.1)) as daemon:
        daemon.stop()
        switch = daemon.data_directory / SWITCH
        os.mkfifo(switch)
        command = [sys.executable, "-m", "kvd", "--config", str(daemon.config_path)]
        with (
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as start,
            switch.open("w"),  # when the tier reads it; it reads on until this is closed
        ):
            start.terminate()
            assert "reason=left the start does not end" in start.communicate()[1]
            assert start.returncode == 0


# --- an operator ---


def test_a_checkpoint_has_its_deadline_and_goes_on(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    hang(daemon)
    store(namespace, TOKENS)
    with pytest.raises(DeadlineExceeded, match=r"saved .* goes on with it"):
        client.checkpoint(timeout=0.1)
    work_again(daemon)
    eventually(lambda: client.status().tiers[1].num_blocks == 8)


# --- inside another program ---

EMBEDDED = """
import os, sys, anyio
from pathlib import Path
from kvd.config import parse
from kvd.daemon import Daemon
from kvd.testing.faults import Faults, set_faults
from tests.e2e.support import with_store
base = Path(sys.argv[1])
own = {"endpoint": f"ipc://{base}/kvd.sock", "directory": f"{base}/kvd"}
data = base / "data"
async def main():
    document = with_store(grace_seconds=0.1, data_directory=str(data))
    async with Daemon(parse(document | own)):
        set_faults(data, Faults.STUCK)
    print(os.listdir(base))
    set_faults(data, Faults.NONE)
anyio.run(main)
print("ended")
"""


def test_the_block_of_a_daemon_in_a_program_ends(
    shm: Path,  # noqa: F811
    child: Callable[..., Child],  # noqa: F811
) -> None:
    program = child(EMBEDDED, shm)
    assert "kvd.sock'" not in program.says()
    assert program.says() == "ended"
