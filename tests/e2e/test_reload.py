"""A daemon that reads its configuration anew while clients are at work."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from kvd.protocol.codec import encode
from kvd.protocol.messages import ReloadReply, ReloadRequest
from kvd.testing.daemons import RunningDaemon, running_daemon, to_toml
from kvd_client import Client, ConfigError, LimitExceeded
from tests.actors.wire import Wire
from tests.e2e.support import (
    IDENTITY,
    LAYOUT,
    SESSIONS,
    compute,
    eventually,
    holds,
    settings,
    store,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd_client import Namespace
    from tests.arena.conftest import Child

TOKENS = tokens_of(1, 8)


def write(daemon: RunningDaemon, **sections: Any) -> None:
    """Give a daemon of these tests another file, which it has not read yet."""
    places = {
        "endpoint": daemon.endpoint,
        "directory": str(daemon.directory),
        "data_directory": str(daemon.data_directory),
    }
    daemon.config_path.write_text(to_toml(settings() | places | sections))


def hang_up(daemon: RunningDaemon) -> None:
    os.kill(daemon.pid, signal.SIGHUP)


# --- what changes ---


def test_a_reload_tells_what_changed_and_what_waits(daemon: RunningDaemon, client: Client) -> None:
    tiers = [{"type": "host", "capacity_bytes": "1MiB"}]
    write(daemon, limits={"pins": 7}, tiers=tiers)
    reply = client.reload()
    assert [(each.key, each.before, each.after) for each in reply.changed] == [
        ("limits.pins", 1024, 7)
    ]
    (waits,) = reply.needs_restart
    assert (waits.key, waits.after) == ("tiers", tiers)
    assert "reason=needs_restart for: tiers" in daemon.log
    daemon.restart()
    assert client.wait_attached(30.0)
    assert client.status().tiers[0].capacity_bytes == 1 << 20


def test_a_signal_reloads_too(daemon: RunningDaemon, client: Client) -> None:
    write(daemon, log={"level": "debug", "format": "json"})
    hang_up(daemon)
    eventually(lambda: "reloaded; changed: log.level, log.format" in daemon.log)
    line = json.loads(daemon.log.splitlines()[-1])
    assert line["message"] == "reloaded; changed: log.level, log.format"


def test_every_value_is_told_with_where_it_comes_from(
    daemon: RunningDaemon, client: Client
) -> None:
    write(daemon, limits={"pins": 7})
    client.reload()
    told = {each.key: (each.value, each.origin) for each in client.config().values}
    assert told["limits.pins"] == (7, f"file {daemon.config_path}")
    assert told["log.level"] == ("info", "default")


def test_a_quota_counts_in_namespaces_that_are_open(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    write(daemon, quotas=[{"model": IDENTITY.model, "max_bytes": 4 * LAYOUT.page_bytes}])
    client.reload()
    (listed,) = client.status().namespaces
    assert (listed.max_bytes, listed.num_pages) == (4 * LAYOUT.page_bytes, 4)
    with namespace.match(TOKENS) as lease:
        assert lease.num_tokens == len(TOKENS) // 2
        assert holds(lease, TOKENS, lease.num_tokens)


def test_a_lowered_limit_lets_go_of_nothing_that_is_held(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    store(namespace, TOKENS)
    leases = [namespace.match(TOKENS) for _ in range(5)]
    write(daemon, limits={"session_leases": 2, "sessions": 1})
    client.reload()
    (session,) = client.status().sessions
    eventually(lambda: client.status().sessions[0].num_requests > session.num_requests + 3)
    for lease in leases:
        lease.check()
    with pytest.raises(LimitExceeded, match="may hold 2 leases"):
        leases[0].fork()
    for lease in leases:
        lease.release()


def test_a_client_that_is_gone_is_noticed_as_soon_as_the_new_sweep_says(
    program: Callable[..., Child], daemon: RunningDaemon, client: Client
) -> None:
    write(daemon, sessions=SESSIONS | {"sweep_seconds": 86_400})
    client.reload()
    killed = program("lease = namespace.match([], reserve_tokens=4)\nprint('holds')")
    assert killed.says() == "holds"
    killed.send(signal.SIGKILL)
    write(daemon)
    client.reload()
    eventually(lambda: [each.client for each in client.status().sessions] == ["test"])


# --- what is refused ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grace_seconds = ", "cannot be read"),
        ("grace_second = 1", "unknown key grace_second; did you mean grace_seconds?"),
        ("[limits]\nsessions = 0", "limits.sessions: Expected `int` >= 1"),
        ('[[tiers]]\ntype = "nonesuch"', "unknown type 'nonesuch'"),
        ('[[quotas]]\nguaranteed_bytes = "1TiB"', "guarantee open namespaces more than"),
    ],
)
def test_a_file_that_is_not_good_changes_nothing_and_says_why(
    daemon: RunningDaemon, client: Client, namespace: Namespace, text: str, message: str
) -> None:
    store(namespace, TOKENS)
    before = client.config()
    daemon.config_path.write_text(text)
    hang_up(daemon)
    eventually(lambda: "reason=not_reloaded" in daemon.log)
    with pytest.raises(ConfigError) as refused:
        client.reload()
    assert message in str(refused.value)
    assert str(refused.value).startswith(str(daemon.config_path))
    assert f"reason=not_reloaded {refused.value}" in daemon.log
    assert client.config().values == before.values


# --- meanwhile ---


def test_nobodys_request_fails_while_it_reloads(
    daemon: RunningDaemon, client: Client, program: Callable[..., Child]
) -> None:
    busy = program(
        """
import select
print('works')
number = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    number += 1
    tokens = tokens_of(number % 8, 8)
    with namespace.match(tokens) as lease:
        compute(lease, tokens)
        lease.check()
print(client.status().counters.get('errors', 0), number > 0)
"""
    )
    assert busy.says() == "works"
    for number in range(50):
        write(daemon, limits={"pins": number + 1}, cache={"low_watermark": 0.5})
        assert client.reload().changed
    busy.tell()
    assert busy.says() == "0 True"


@pytest.fixture
def full() -> Iterator[RunningDaemon]:
    with running_daemon(settings(limits={"sessions": 1, "session_waiting": 2})) as daemon:
        yield daemon


def test_a_daemon_that_takes_no_more_sessions_is_told_to(full: RunningDaemon) -> None:
    with Client(full.endpoint, timeout=30.0) as one, closing(Wire(full.endpoint)) as wire:
        assert one.wait_attached(30.0)
        write(full, limits={"sessions": 2})
        assert isinstance(wire.ask(ReloadRequest(id=1)), ReloadReply)
        wire.attach()


def test_reloads_that_wait_are_bounded(full: RunningDaemon) -> None:
    with closing(Wire(full.endpoint)) as wire:
        for number in range(20):
            wire.send(encode(ReloadRequest(id=number + 1)))
        replies = [wire.receive() for _ in range(20)]
        codes = {getattr(reply, "code", "") for reply in replies}
    assert codes == {"", "limit_exceeded"}


def test_a_commit_under_way_is_done_with_the_new_bounds(
    daemon: RunningDaemon, client: Client, namespace: Namespace
) -> None:
    with namespace.match(TOKENS) as lease:
        lease.reserve(len(TOKENS))
        write(daemon, cache={"high_watermark": 0.5, "low_watermark": 0.25})
        client.reload()
        compute(lease, TOKENS)
        lease.check()
