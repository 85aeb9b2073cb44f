"""Whose kvd is: all of it its user's, and for its group alone."""

from __future__ import annotations

import pytest

from tests.systemd.conftest import BINARIES, ENGINE, PROLOGUE, PYTHON, STORE, Box

PLACES = ("/dev/shm/kvd", "/var/lib/kvd", "/run/kvd.sock")
MATCH_OUTSIDE = """
with Client() as client:
    print(client.open(IDENTITY, LAYOUT).match(tokens_of(1, 4)).num_tokens)
"""
# Where clients look before they look for the service.
RUNTIME = "/run/user-of-another"


def test_all_its_processes_are_its_users(service: Box) -> None:
    assert "/kvd.service" in service.run("ps", "-u", "kvd", "-o", "cgroup=")
    assert "/kvd.service" not in service.run("ps", "--deselect", "-u", "kvd", "-o", "cgroup=")


def test_all_its_files_are_its_users_and_nobody_elses(service: Box) -> None:
    service.engine(STORE)
    service.ctl("checkpoint")
    assert set(service.run("find", *PLACES, "-printf", "%u:%g\n").split()) == {"kvd:kvd"}
    assert service.run("find", *PLACES, "-perm", "/o=rwx") == ""


def test_its_group_may_enter_memory_and_the_socket_alone(service: Box) -> None:
    found = service.run("stat", "-c", "%a %n", *PLACES).splitlines()
    assert found == ["750 /dev/shm/kvd", "700 /var/lib/kvd", "660 /run/kvd.sock"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([f"{BINARIES}/kvd-ctl", "ping"], ""),
        ([PYTHON, "-c", PROLOGUE + MATCH_OUTSIDE], "0"),
    ],
    ids=["kvd-ctl", "client"],
)
def test_who_is_not_in_its_group_is_told_so(service: Box, command: list[str], said: str) -> None:
    done = service.try_("runuser", "-u", "nobody", "--", *command)
    assert done.stdout.strip() == said
    assert "ipc:///run/kvd.sock is for its user, and for the group of ipc.group" in done.stderr


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("755", f"kvd-ctl: {RUNTIME}/kvd belongs to another user: set KVD_ENDPOINT"),
        ("700", "answers on ipc:///run/kvd.sock"),
    ],
)
def test_a_place_of_another_user_is_not_trusted(service: Box, mode: str, said: str) -> None:
    """Where it cannot be seen what is there, the service is used."""
    service.run("install", "-d", "-o", "nobody", "-m", mode, RUNTIME, f"{RUNTIME}/kvd")
    service.write(f"{RUNTIME}/kvd/kvd.sock", "")
    ping = ["runuser", "-u", ENGINE, "--", f"{BINARIES}/kvd-ctl", "ping"]
    done = service.try_("env", f"XDG_RUNTIME_DIR={RUNTIME}", *ping)
    assert said in done.stdout + done.stderr
