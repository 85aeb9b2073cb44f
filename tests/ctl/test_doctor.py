"""What `kvd-ctl doctor` says of a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.config import Config
from kvd_client import ConfigError
from kvd_ctl import doctor
from kvd_ctl.doctor import Wanted
from tests.ctl.conftest import run, run_here

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon

TIB = 1 << 40


def wanted_in(directory: Path) -> Wanted:
    return Wanted(directory, directory, directory, 0, 0, 0)


def findings(daemon: RunningDaemon) -> dict[str, str]:
    """The level of everything that was looked at."""
    done = run_here("doctor", "--config", daemon.config_path, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == any(one["level"] == "bad" for one in found)
    return {one["what"]: one["level"] for one in found}


def test_it_looks_at_all_that_kvd_needs(daemon: RunningDaemon) -> None:
    found = findings(daemon)
    assert found.keys() >= {
        *("daemon", "shared memory", "huge pages", "memory limit", "disk", "permissions"),
        *("file descriptors", "locked memory", "library pyzmq", "library lmdb", "GPU", "clock"),
    }
    assert found["daemon"] == found["library pyzmq"] == found["permissions"] == "ok"


def test_without_a_daemon_it_says_how_to_start_one(tmp_path: Path) -> None:
    done = run("doctor", "--endpoint", f"ipc://{tmp_path}/kvd.sock")
    assert done.stdout.startswith("warn daemon: ")
    assert "-> start it: kvd" in done.stdout


def test_a_daemon_that_does_not_answer_is_bad(daemon: RunningDaemon) -> None:
    daemon.pause()
    try:
        done = run_here("doctor", "--config", daemon.config_path, "--timeout", 0.3)
    finally:
        daemon.resume()
    assert done.exit_code == 1
    assert "bad  daemon: no answer" in done.stdout


@pytest.mark.parametrize(
    ("wanted_bytes", "left_bytes", "level"), [(1, 1, "ok"), (1, TIB, "warn"), (TIB, 0, "bad")]
)
def test_memory_must_fit_and_should_be_free(
    wanted_bytes: int, left_bytes: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SMALL_BYTES", 0)
    assert doctor.shared_memory(Path("/dev/shm"), wanted_bytes, left_bytes).level == level


@pytest.mark.parametrize(("wanted_bytes", "level"), [(0, "ok"), (1 << 60, "warn")])
def test_the_disk_should_have_room(
    tmp_path: Path, wanted_bytes: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SMALL_BYTES", 0)
    assert doctor.disk(tmp_path / "not there yet", wanted_bytes).level == level


@pytest.mark.parametrize(
    ("name", "limit", "level"),
    [
        ("memory.max", "max", "ok"),
        ("memory.max", "2000", "ok"),
        ("memory.max", "1000", "bad"),
        ("memory.limit_in_bytes", "1000", "bad"),
    ],
)
def test_a_container_must_allow_what_memory_takes(
    tmp_path: Path, name: str, limit: str, level: str
) -> None:
    (tmp_path / name).write_text(f"{limit}\n")
    assert doctor.memory_limit([tmp_path / "inner", tmp_path], 1500).level == level


def test_a_process_is_in_control_groups_that_are_looked_at_up_to_their_root() -> None:
    groups = list(doctor.control_groups(None))
    assert all(group.is_relative_to("/sys/fs/cgroup") for group in groups)
    assert Path("/sys/fs/cgroup") in groups or Path("/sys/fs/cgroup/memory") in groups


@pytest.mark.parametrize(("mode", "level"), [(0o750, "ok"), (0o757, "bad")])
def test_nobody_else_may_write_where_kvd_reads(tmp_path: Path, mode: int, level: str) -> None:
    tmp_path.chmod(mode)
    found = list(doctor.permissions(wanted_in(tmp_path), tmp_path / "nonesuch"))
    assert {one.level for one in found} == {level}


def test_without_a_daemon_the_configuration_says_what_is_wanted(tmp_path: Path) -> None:
    host = {"type": "host", "capacity_bytes": "1GiB"}
    config = Config(tiers=(host, host, {"type": "lmdb", "capacity_bytes": "2GiB"}))
    wanted = doctor.wants(config, None)
    assert (wanted.memory_bytes, wanted.disk_bytes) == (2 << 30, 2 << 30)


def test_memory_is_looked_at_where_its_pages_lie() -> None:
    config = Config(tiers=({"type": "lmdb"}, {"type": "host", "directory": "/run/kvd/pages"}))
    assert doctor.wants(config, None).memory_directory == Path("/run/kvd/pages")


def test_a_capacity_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="much"):
        doctor.wants(Config(tiers=({"type": "host", "capacity_bytes": "much"},)), None)


def test_a_library_that_is_missing_or_broken_is_told() -> None:
    assert doctor._library("nonesuch-library", "pass").level == "warn"
    assert doctor._library("pytest", "raise SystemExit(1)").level == "bad"
    assert doctor._library("pytest", "print('it works')").level == "ok"
