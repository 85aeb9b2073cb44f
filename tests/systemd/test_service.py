"""kvd as a service: it is installed, starts, tells how it is, and comes back whatever happens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.e2e.support import eventually
from tests.systemd.conftest import (
    ALL,
    BINARIES,
    CONFIGURATION,
    ENGINE,
    MATCH,
    ROOT,
    SOURCE,
    STORE,
    UNITS,
    Box,
)

OPERATING = (ROOT / "config/OPERATING.md").read_text()
IN_MEMORY = "4 blocks in host"
# Holds leases while kvd goes, and has them again when it is back.
HOLD = """
with Client(timeout=30.0) as client:
    namespace = client.open(IDENTITY, LAYOUT)
    store(namespace, tokens_of(1, 4))
    with namespace.match(tokens_of(1, 4), reserve_tokens=BLOCK):
        systemd.notify(READY=1)
        eventually(lambda: not client.attached)
    assert namespace.match(tokens_of(1, 4)).num_tokens == 0
    systemd.notify(STATUS="without kvd")
    assert client.wait_attached(90.0)
    assert namespace.match(tokens_of(1, 4)).num_tokens == 16
"""
MAKE_NEWER = f"""
set -e
mkdir /opt/kvd/newer
cp -a {SOURCE}/kvd /opt/kvd/newer
echo '__version__ = "99.0"' > /opt/kvd/newer/kvd/__init__.py
"""
# Connects again and again until it is told to stop; each time it must be served.
CONNECT = """
import pathlib, socket
systemd.notify(READY=1)
while not pathlib.Path("/run/enough").exists():
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect("/run/kvd.sock")
    with Client() as client:
        assert client.wait_attached(90.0)
"""

STUCK = """
endpoint = "ipc:///run/kvd.sock"
directory = "/dev/shm/kvd"
data_directory = "/var/lib/kvd"
hang_seconds = 20.0
tiers = [{type = "host"}, {type = "faulty", tier = {type = "lmdb"}}]
"""


def came_back(box: Box) -> bool:
    """Whether systemd started it again, by itself and once."""
    return (box.show("NRestarts"), box.show("ActiveState")) == ("1", "active")


# --- the units ---


def test_systemd_has_nothing_to_say_against_the_units(box: Box) -> None:
    box.ctl("install", "--gpu")
    units = [f"{UNITS}/{name}" for name in ("kvd.service", "kvd.slice", "run-kvd-pages.mount")]
    done = box.try_("systemd-analyze", "verify", "--man=no", f"{UNITS}/kvd.socket", *units)
    box.run("rm", f"{UNITS}/kvd.service.d/gpu.conf")
    box.run("systemctl", "daemon-reload")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_service_is_hardened(box: Box) -> None:
    box.run(
        *("systemd-analyze", "security", "--no-pager", "--offline=yes", "--threshold=20"),
        f"{UNITS}/kvd.service",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("User", "kvd"), ("RemoveIPC", "no"), ("Slice", "kvd.slice"), ("LimitCORE", "0")],
)
def test_what_memory_needs_to_survive_is_set(box: Box, name: str, value: str) -> None:
    assert box.show(name) == value


# --- life ---


def test_it_serves_when_its_start_returns(box: Box) -> None:
    box.run("systemctl", "restart", "kvd.service")
    assert box.ctl("ping").startswith("kvd ")


def test_its_status_tells_of_blocks_and_hits(service: Box) -> None:
    service.engine(STORE)
    assert service.engine(MATCH) == ALL
    status = eventually(lambda: "hit rate" in (text := service.show("StatusText")) and text)
    assert status.startswith(IN_MEMORY)


def test_a_restart_keeps_what_is_cached(service: Box) -> None:
    service.engine(STORE)
    service.run("systemctl", "restart", "kvd.service")
    assert service.show("StatusText").startswith(IN_MEMORY)
    assert service.engine(MATCH) == ALL


def test_a_stop_and_a_start_keep_what_is_cached(service: Box) -> None:
    service.engine(STORE)
    service.run("systemctl", "stop", "kvd.socket")
    assert service.show("ActiveState") == "inactive"
    service.run("systemctl", "start", "kvd.service")
    assert service.show("StatusText").startswith(IN_MEMORY)
    assert service.engine(MATCH) == ALL


def test_a_reload_is_done_when_it_returns_and_keeps_what_is_cached(service: Box) -> None:
    service.engine(STORE)
    pid, text = service.show("MainPID"), service.run("cat", CONFIGURATION)
    service.write(CONFIGURATION, f"{text}\n[limits]\npins = 7\n")
    service.run("systemctl", "reload", "kvd.service")
    values = json.loads(service.ctl("config", "--json"))
    service.write(CONFIGURATION, f"{text}\nnonsense = 1\n")
    assert service.try_("systemctl", "reload", "kvd.service").returncode != 0
    service.write(CONFIGURATION, text)
    service.run("systemctl", "reload", "kvd.service")
    assert [each["value"] for each in values if each["key"] == "limits.pins"] == [7]
    assert (service.show("MainPID"), service.engine(MATCH)) == (pid, ALL)


def test_with_a_door_for_operators_a_reload_goes_there(
    box: Box, service_with: Callable[[str], Box]
) -> None:
    (lines,) = re.findall(r"^ExecReload=.*\n^ExecReload=.*", OPERATING, re.MULTILINE)
    (operator,) = re.findall(r"^# /etc/kvd/kvd.toml: (.*)", OPERATING, re.MULTILINE)
    text = box.run("cat", CONFIGURATION)
    box.write(CONFIGURATION, f"{operator}\n{text}")
    try:
        service = service_with(lines)
        service.run("systemctl", "reload", "kvd.service")
        service.engine(STORE)
        assert service.engine(MATCH) == ALL
        refused = service.try_("runuser", "-u", ENGINE, "--", f"{BINARIES}/kvd-ctl", "status")
    finally:
        box.write(CONFIGURATION, text)
    assert refused.returncode == 1
    assert "operators ask at operator.endpoint" in refused.stderr


def test_it_is_started_again_after_a_kill_and_has_what_was_cached(service: Box) -> None:
    service.engine(STORE)
    service.run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "kvd.service")
    assert service.engine(MATCH) == ALL
    assert came_back(service)


def test_a_configuration_that_is_not_good_is_tried_once(
    service_with: Callable[[str], Box], box: Box
) -> None:
    box.write("/etc/kvd/bad.toml", "grace_seconds = 0")
    with pytest.raises(AssertionError):
        service_with(f"ExecStart=\nExecStart={BINARIES}/kvd --config /etc/kvd/bad.toml")
    assert (box.show("ActiveState"), box.show("ExecMainStatus")) == ("failed", "78")
    assert box.show("NRestarts") == "0"


def test_one_that_stands_still_is_started_again(service_with: Callable[[str], Box]) -> None:
    service = service_with("WatchdogSec=2s")
    service.engine(STORE)
    service.run("systemctl", "kill", "--signal=STOP", "--kill-whom=main", "kvd.service")
    eventually(lambda: came_back(service))
    assert service.engine(MATCH) == ALL


def test_a_stop_does_not_wait_for_leases_and_who_holds_them_goes_on(service: Box) -> None:
    engine = service.start_engine(HOLD)
    service.run("systemctl", "stop", "kvd.socket")
    assert (service.show("ActiveState"), service.show("Result")) == ("inactive", "success")
    eventually(lambda: service.show("StatusText", engine) == "without kvd")
    service.run("systemctl", "start", "kvd.service")
    service.ended(engine)


def test_drained_it_is_stopped_by_systemd_and_finds_all_again(service: Box) -> None:
    service.engine(STORE)
    refused = service.try_(f"{BINARIES}/kvd-ctl", "drain", "--stop")
    assert "systemd perhaps: stop it there" in refused.stderr
    service.ctl("drain")
    service.run("systemctl", "stop", "kvd.socket")
    service.run("systemctl", "start", "kvd.service")
    assert service.engine(MATCH) == ALL


def test_another_version_has_what_was_cached(
    service: Box, service_with: Callable[[str], Box]
) -> None:
    service.engine(STORE)
    service.run("bash", "-c", MAKE_NEWER)
    newer = service_with("Environment=PYTHONPATH=/opt/kvd/newer")
    assert newer.ctl("ping").startswith("kvd 99.0 ")
    assert newer.engine(MATCH) == ALL


def test_the_first_client_starts_it(service: Box) -> None:
    service.engine(STORE)
    service.run("systemctl", "stop", "kvd.service")
    assert service.show("ActiveState") == "inactive"
    assert service.engine(MATCH) == ALL
    assert service.show("ActiveState") == "active"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whoever_connects_while_it_restarts_is_served(service: Box) -> None:
    engines = [service.start_engine(CONNECT) for _ in range(3)]
    for _ in range(3):
        service.run("systemctl", "restart", "kvd.service")
        service.run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "kvd.service")
    service.write("/run/enough", "")
    for engine in engines:
        service.ended(engine)


@pytest.mark.slow
def test_a_start_that_goes_on_is_waited_for(service_with: Callable[[str], Box], box: Box) -> None:
    """The disk does not answer: that takes longer to find than a start may take at first."""
    box.write("/var/lib/kvd/faults", "stuck")
    box.write("/etc/kvd/stuck.toml", STUCK)
    command = f"{BINARIES}/kvd --config /etc/kvd/stuck.toml"
    service = service_with(f"TimeoutStartSec=15s\nExecStart=\nExecStart={command}")
    assert "faulty is degraded" in service.show("StatusText")
