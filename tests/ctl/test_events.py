"""`kvd-ctl events`: lines for people, objects for programs, until it is told to end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.testing.daemons import running_daemon
from tests.ctl.conftest import run_here
from tests.e2e.support import IDENTITY, LAYOUT, settings, store, tokens_of
from tests.events.conftest import publishing

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client import Client

Events = Callable[..., str]


@pytest.fixture(scope="module")
def told() -> Iterator[Client]:
    """A client of a daemon that tells of events, and has four blocks in memory and on disk."""
    with publishing(topic_instance="pod") as (_, client):
        store(client.open(IDENTITY, LAYOUT), tokens_of(1, 4))
        client.checkpoint()
        yield client


@pytest.fixture
def events(told: Client) -> Events:
    def events(*args: object) -> str:
        done = run_here("events", *args, "--timeout", 30, KVD_ENDPOINT=told.endpoint)
        assert (done.exit_code, done.stderr) == (0, ""), done
        return done.stdout

    return events


def test_each_event_is_a_line(events: Events) -> None:
    cleared, host, disk = events("--since", 0, "--count", 3).splitlines()
    assert cleared.endswith(" 0 kv@pod@ nothing told before counts any more")
    assert " kv@pod@model CPU has 4 blocks " in host
    assert host.endswith(" behind the root")
    assert " kv@pod@model DISK has 4 blocks " in disk


def test_each_event_is_an_object(events: Events) -> None:
    lines = map(json.loads, events("--since", 0, "--count", 3, "--json").splitlines())
    assert [(line["type"], line["topic"]) for line in lines] == [
        ("AllBlocksCleared", "kv@pod@"),
        ("BlockStored", "kv@pod@model"),
        ("BlockStored", "kv@pod@model"),
    ]


def test_it_follows_until_it_is_interrupted(told: Client) -> None:
    command = [sys.executable, "-m", "kvd_ctl", "events", "--since", "0", "--json"]
    with subprocess.Popen(
        [*command, "--endpoint", told.endpoint], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert json.loads(process.stdout.readline())["seq"] == 0
        told.drop(1, tokens_of(1, 4))
        while json.loads(process.stdout.readline())["type"] != "BlockRemoved":
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_without_events_it_says_what_to_set(daemon: RunningDaemon) -> None:
    done = run_here("events", KVD_ENDPOINT=daemon.endpoint)
    assert done.exit_code == 1
    assert "set events.endpoint" in done.stderr


def test_without_a_replay_what_was_cannot_be_asked_for(tmp_path: Path) -> None:
    events = {"endpoint": f"ipc://{tmp_path}/events"}
    with running_daemon(settings(events=events)) as daemon:
        done = run_here("events", "--since", 0, "--timeout", 30, KVD_ENDPOINT=daemon.endpoint)
    assert done.exit_code == 1
    assert "set events.replay_endpoint" in done.stderr


def test_a_number_that_no_batch_can_have_is_refused() -> None:
    done = run_here("events", "--since", 1 << 64)
    assert done.exit_code == 2
    assert "--since" in done.stderr
