"""What `kvd-ctl` says of tiers, and what it has saved and verified."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd.testing.faults import Faults, set_faults
from tests.ctl.conftest import run, run_here, run_on_terminal
from tests.e2e.support import FAULTY, LAYOUT, eventually, settings, store, tokens_of

if TYPE_CHECKING:
    from kvd_client import Client, Namespace

TOKENS = tokens_of(1, 4)

Ctl: TypeAlias = Callable[..., str]
Ask: TypeAlias = Callable[..., Any]


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    (memory,) = settings()["tiers"]
    # No round of its own finds what the tests look for.
    with running_daemon(settings(tiers=[memory, FAULTY], cache={"scrub_bytes": 0})) as daemon:
        yield daemon


@pytest.fixture
def stored(client: Client, namespace: Namespace) -> None:
    """TOKENS are in memory, and can be verified there."""
    store(namespace, TOKENS)
    eventually(lambda: client.verify().tiers[0].num_checked == 4)


def spoil(daemon: RunningDaemon) -> None:
    """Change what is in memory of all blocks."""
    (path,) = daemon.directory.glob("*.arena")
    path.write_bytes(b"\xff" * path.stat().st_size)


def break_disk(daemon: RunningDaemon) -> None:
    set_faults(Path(daemon.directory.parent, "data"), Faults.GONE)


@pytest.mark.usefixtures("stored")
def test_a_checkpoint_says_how_many_blocks_it_copied(ctl: Ctl, ask: Ask) -> None:
    assert ctl("checkpoint") == "all blocks are saved; copied for it: 4\n"
    assert ask("checkpoint") == {"num_blocks": 0}


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("command", ["checkpoint", "verify"])
def test_of_a_disk_that_hangs_it_says_that_kvd_goes_on(
    daemon: RunningDaemon, ctl: Ctl, command: str
) -> None:
    ctl("checkpoint")
    set_faults(daemon.data_directory, Faults.STUCK)
    done = run_here(command, "--timeout", "0.3", KVD_ENDPOINT=daemon.endpoint)
    set_faults(daemon.data_directory, Faults.NONE)
    assert done.exit_code == 1
    assert "goes on with it" in done.stderr


@pytest.mark.usefixtures("stored")
def test_a_checkpoint_that_fails_is_one_line(daemon: RunningDaemon) -> None:
    break_disk(daemon)
    done = run_here("checkpoint", KVD_ENDPOINT=daemon.endpoint)
    assert (done.exit_code, done.stdout) == (1, "")
    assert re.fullmatch(r"kvd-ctl: tier faulty .*: the tier is gone\n", done.stderr)


@pytest.mark.usefixtures("stored")
def test_status_and_tiers_tell_of_memory_and_disk(ctl: Ctl, ask: Ask) -> None:
    ctl("checkpoint")
    assert re.search(r"^faulty tier: .* of 16MiB used, 4 blocks$", ctl("status"), re.MULTILINE)
    assert re.search(r"^faulty +store +4 .* yes *$", ctl("tiers"), re.MULTILINE)
    memory, disk = ask("tiers")
    assert (memory["kind"], memory["num_blocks"]) == ("memory", 4)
    assert (disk["kind"], disk["num_blocks"], disk["waiting_bytes"]) == ("store", 4, 0)
    assert 4 * LAYOUT.page_bytes < disk["used_bytes"] < disk["usable_bytes"]


@pytest.mark.usefixtures("stored")
def test_a_disk_that_fails_is_told_with_its_trouble(daemon: RunningDaemon, ctl: Ctl) -> None:
    break_disk(daemon)
    run_here("checkpoint", KVD_ENDPOINT=daemon.endpoint)
    assert "the tier is gone" in ctl("tiers")
    assert "; trouble: " in ctl("status")


@pytest.mark.usefixtures("stored")
def test_a_drop_tells_of_every_tier(ctl: Ctl) -> None:
    ctl("checkpoint")
    assert ctl("drop", 1, "--yes") == "blocks dropped: host 4, faulty 4; still held by leases: 0\n"


@pytest.mark.usefixtures("stored")
def test_what_is_good_is_verified_with_exit_status_0(ctl: Ctl, ask: Ask) -> None:
    ctl("checkpoint")
    assert re.search(r"^host +4 +4 +0 +0\nfaulty +4 +4 +0 +0$", ctl("verify"), re.MULTILINE)
    assert [tier["num_checked"] for tier in ask("verify")["tiers"]] == [4, 4]


@pytest.mark.usefixtures("stored")
def test_what_is_bad_is_told_with_exit_status_1(daemon: RunningDaemon) -> None:
    spoil(daemon)
    done = run("verify", KVD_ENDPOINT=daemon.endpoint)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"^host +4 +4 +[1-4] +0$", done.stdout, re.MULTILINE)


@pytest.mark.usefixtures("stored")
def test_a_disk_that_cannot_be_read_fails_a_verification(daemon: RunningDaemon, ctl: Ctl) -> None:
    ctl("checkpoint")
    break_disk(daemon)
    done = run_here("verify", KVD_ENDPOINT=daemon.endpoint)
    assert done.exit_code == 1
    assert "the tier is gone" in done.stdout


@pytest.mark.usefixtures("stored")
def test_a_verification_shows_how_far_it_is_on_a_terminal(daemon: RunningDaemon) -> None:
    ended, said = run_on_terminal("verify", KVD_ENDPOINT=daemon.endpoint, TERM="xterm")
    assert ended == 0
    assert "verifying" in said
