"""`kvd-ctl config` and `kvd-ctl reload`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from tests.ctl.conftest import run_here
from tests.e2e.support import settings


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """Each test's own, whose file it may change."""
    with running_daemon(settings()) as daemon:
        yield daemon


def append(daemon: RunningDaemon, text: str) -> None:
    with daemon.config_path.open("a") as file:
        file.write(text)


def row(said: str, key: str) -> list[str]:
    (line,) = (line for line in said.splitlines() if line.startswith(key))
    return line.split()[1:]


def test_config_tells_each_value_and_where_it_comes_from(
    daemon: RunningDaemon, ctl: Callable[..., str]
) -> None:
    said = ctl("config")
    assert row(said, "limits.sessions") == ["1024", "default"]
    assert row(said, "cache.scrub_bytes") == ["32MiB", "default"]
    assert row(said, "sessions.silent_seconds") == ["60.0", "file", str(daemon.config_path)]
    assert row(said, "tiers")[0:2] == ['[{"type":', '"host",']
    assert row(said, "endpoint") == [daemon.endpoint, "file", str(daemon.config_path)]


def test_config_as_json_has_plain_values(ask: Callable[..., Any]) -> None:
    values = {each["key"]: each for each in ask("config")}
    assert values["cache.scrub_bytes"] == {
        "key": "cache.scrub_bytes",
        "value": 32 << 20,
        "origin": "default",
    }
    assert values["tiers"]["value"] == settings()["tiers"]


def test_reload_tells_what_changed_and_what_waits(
    daemon: RunningDaemon, ctl: Callable[..., str]
) -> None:
    append(daemon, "hang_seconds = 30.0\n[limits]\npins = 7\n")
    now, later = ctl("reload", "--wait").split("changed at the next start of kvd:")
    assert row(now, "limits.pins") == ["1024", "7"]
    assert row(later, "hang_seconds") == ["60.0", "30.0"]
    assert ctl("reload").startswith("changed: none")


def test_reload_as_json_has_both(daemon: RunningDaemon, ask: Callable[..., Any]) -> None:
    append(daemon, "[limits]\npins = 7\n")
    change = {"key": "limits.pins", "before": 1024, "after": 7}
    assert ask("reload") == {"changed": [change], "needs_restart": []}


def test_a_reload_that_is_refused_is_one_line(daemon: RunningDaemon) -> None:
    append(daemon, "[limits]\npin = 7\n")
    done = run_here("reload", KVD_ENDPOINT=daemon.endpoint)
    assert (done.exit_code, done.stdout) == (1, "")
    mistake = "unknown key limits.pin; did you mean limits.pins?"
    assert done.stderr == f"kvd-ctl: {daemon.config_path}: {mistake}\n"
