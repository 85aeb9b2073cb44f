"""`kvd-ctl install` and `uninstall` on a system of their own; below a directory: tests/ctl."""

from __future__ import annotations

import pytest

from tests.systemd.conftest import ALL, BINARIES, CONFIGURATION, MATCH, STORE, UNITS, Box

HUGE = """
endpoint = "ipc:///run/kvd.sock"
directory = "/dev/shm/kvd"
data_directory = "/var/lib/kvd"
tiers = [{type = "host", directory = "/run/kvd/pages", capacity_bytes = "64MiB"}]
"""


def test_only_root_installs(box: Box) -> None:
    done = box.try_("runuser", "-u", "nobody", "--", f"{BINARIES}/kvd-ctl", "install")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvd-ctl: only root may")


def test_a_kvd_that_the_service_would_not_see_is_not_installed(box: Box) -> None:
    box.run("cp", "-a", "/opt/kvd/venv", "/home/venv")
    done = box.try_("/home/venv/bin/python", "-m", "kvd_ctl", "install")
    assert (done.returncode, done.stdout) == (1, "")
    assert "would not see /home/venv" in done.stderr


def test_memory_on_huge_pages_is_used(box: Box) -> None:
    box.write(CONFIGURATION, HUGE)
    if box.try_("systemctl", "enable", "--now", "run-kvd-pages.mount").returncode:
        pytest.skip("this kernel has no tmpfs with huge=within_size")
    box.run("systemctl", "start", "kvd.service")
    assert box.run("stat", "-c", "%U:%G %a", "/run/kvd/pages") == "kvd:kvd 750"
    box.engine(STORE)
    box.run("systemctl", "restart", "kvd.service")
    assert box.engine(MATCH) == ALL
    assert "ok   huge pages: memory comes in pages of 2MiB" in box.ctl(
        "doctor", "--config", CONFIGURATION
    )


def test_uninstalled_it_is_gone(box: Box) -> None:
    box.run("systemctl", "enable", "--now", "kvd.socket", "kvd.service")
    box.ctl("uninstall", "--purge-data")
    assert box.show("LoadState") == "not-found"
    assert box.run("find", UNITS, "-name", "*kvd*") == ""
    assert box.try_("ls", "-d", "/run/kvd.sock", "/dev/shm/kvd", "/var/lib/kvd").stdout == ""
