"""By ipc: the modes of the files say who may come, and operators have a door of their own."""

from __future__ import annotations

import grp
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.arena.owner import check_group
from kvd.protocol.errors import ConfigError
from kvd.testing.daemons import DaemonFailed, RunningDaemon, running_daemon
from kvd_client import Client, Forbidden
from tests.e2e.support import IDENTITY, LAYOUT, store, tokens_of, with_store

TOKENS = tokens_of(1, 4)
NOBODY = 65534
GROUP = grp.getgrgid(NOBODY).gr_name

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def use(endpoint: str) -> None:
    """Leave one of each kind of file behind."""
    with Client(endpoint, timeout=30.0) as client:
        namespace = client.open(IDENTITY, LAYOUT)
        store(namespace, TOKENS)
        with namespace.match(TOKENS) as lease:
            lease.save("one", TOKENS)
        client.checkpoint(timeout=30.0)


def made(daemon: RunningDaemon) -> Iterator[Path]:
    """All that a daemon has made and a client could see."""
    yield from daemon.directory.rglob("*")
    yield from daemon.data_directory.rglob("*")
    yield from (daemon.directory, daemon.data_directory)


# --- who may come ---


def test_what_a_daemon_makes_is_its_users_and_its_groups() -> None:
    with running_daemon(with_store()) as daemon:
        use(daemon.endpoint)
        assert [str(path) for path in made(daemon) if mode_of(path) & 0o007] == []
        assert mode_of(daemon.data_directory) == 0o700
        assert mode_of(Path(daemon.endpoint.removeprefix("ipc://"))) == 0o660


def test_with_mode_0600_its_directories_are_its_users_alone() -> None:
    with running_daemon(with_store(ipc={"mode": "0600"})) as daemon:
        use(daemon.endpoint)
        assert mode_of(daemon.directory) == 0o700
        assert mode_of(Path(daemon.endpoint.removeprefix("ipc://"))) == 0o600


MAP = """
import os, sys
from kvd_client import Client
from tests.e2e.support import IDENTITY, LAYOUT, holds, store, tokens_of
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(65534)
with Client(sys.argv[1], timeout=2.0) as client:
    namespace = client.open(IDENTITY, LAYOUT)
    store(namespace, tokens_of(2, 4))
    with namespace.match(tokens_of(2, 4)) as lease:
        (session,) = client.status().sessions
        print(holds(lease, tokens_of(2, 4)), session.maps)
"""


def run_as_nobody(endpoint: str, group: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAP, endpoint, str(group)], capture_output=True, text=True
    )


@needs_root
def test_a_member_of_the_group_maps_memory_and_others_do_not_come() -> None:
    with running_daemon(with_store(ipc={"group": GROUP})) as daemon:
        daemon.base.chmod(0o711)
        inside, outside = (run_as_nobody(daemon.endpoint, group) for group in (NOBODY, 12345))
        assert (inside.stdout, inside.returncode) == ("True True\n", 0), inside.stderr
        assert (outside.stdout, outside.returncode) == ("", 1)
        assert (
            f"{daemon.endpoint} is for its user, and for the group of ipc.group" in outside.stderr
        )


def test_a_group_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no group 'nonesuch'.*ipc.group"):
        check_group("nonesuch")
    with (
        pytest.raises(DaemonFailed, match="no group 'nonesuch'"),
        running_daemon({"ipc": {"group": "nonesuch"}}),
    ):
        pass


# --- operators ---


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operators' socket."""
    return tmp_path_factory.mktemp("operators") / "kvd.sock"


@pytest.fixture(scope="module")
def daemon(door: Path) -> Iterator[RunningDaemon]:
    with running_daemon(with_store(operator={"endpoint": f"ipc://{door}"})) as daemon:
        yield daemon


@pytest.fixture
def operator(daemon: RunningDaemon, door: Path) -> Iterator[Client]:
    with Client(f"ipc://{door}", timeout=30.0, name="operator") as client:
        yield client


@pytest.fixture
def engine(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout=30.0, name="engine") as client:
        yield client


def test_what_is_for_operators_is_refused_elsewhere(engine: Client, operator: Client) -> None:
    before = operator.status().counters.get("errors_forbidden", 0)
    for ask in (engine.status, engine.leases, engine.checkpoint, engine.verify):
        with pytest.raises(
            Forbidden, match=r"is not for whoever comes here: operators ask at operator\.endpoint"
        ):
            ask()
    assert operator.status().counters["errors_forbidden"] == before + 4


@pytest.mark.usefixtures("operator")
def test_the_operators_door_is_the_users_alone(door: Path) -> None:
    assert mode_of(door) == 0o600


def test_an_engine_works_while_operators_have_a_door(engine: Client, operator: Client) -> None:
    store(engine.open(IDENTITY, LAYOUT), TOKENS)
    (namespace,) = operator.status().namespaces
    operator.pin(namespace.namespace, TOKENS, 60.0, owner="engine")
    with pytest.raises(Forbidden, match="pins of others"):
        engine.unpin(owner="operator")
    assert engine.unpin() == 1


def test_the_operators_door_has_one_owner_and_is_removed_at_the_end(tmp_path: Path) -> None:
    document = with_store(operator={"endpoint": f"ipc://{tmp_path}/kvd.sock"})
    with (
        running_daemon(document),
        pytest.raises(DaemonFailed, match=r"another kvd .* owns ipc"),
        running_daemon(document),
    ):
        pass
    assert not (tmp_path / "kvd.sock").exists()
