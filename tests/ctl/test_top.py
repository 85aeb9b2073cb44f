"""What `kvd-ctl top` makes of two looks, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvd.testing.daemons import running_daemon
from kvd_client import Client
from kvd_ctl.top import view_of
from tests.ctl.conftest import run_here
from tests.e2e.support import settings, store, tokens_of

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client import Namespace

TOKENS = tokens_of(1, 4)


def test_a_view_has_what_was_done_between_two_looks(namespace: Namespace, client: Client) -> None:
    store(namespace, TOKENS)
    before = client.status()
    with namespace.match(TOKENS + tokens_of(2, 4)):
        view = view_of(before, client.status())
    assert not view.is_restarted
    assert view.hit_rate == 0.5
    assert view.rates["matches"] * view.seconds == pytest.approx(1)
    by_source = {name: rate * view.seconds for name, rate in view.tokens_by_source.items()}
    assert by_source == pytest.approx({"host": len(TOKENS), "missed": len(TOKENS)})
    assert (view.sessions[0].client, view.sessions[0].num_leases) == ("engine", 1)


def test_after_a_restart_a_view_has_what_was_done_since(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    with running_daemon(settings()) as other, Client(other.endpoint, timeout=30.0) as client:
        view = view_of(namespace.client.status(), client.status())
    assert view.is_restarted
    assert view.hit_rate is None
    assert all(rate >= 0 for rate in view.rates.values())


def test_it_ends_after_so_many_looks(daemon: RunningDaemon) -> None:
    args = ("top", "--interval", 0.1, "--count", 3, "--json", "--timeout", 30)
    done = run_here(*args, KVD_ENDPOINT=daemon.endpoint)
    assert done.exit_code == 0
    assert [json.loads(line)["is_restarted"] for line in done.stdout.splitlines()] == [False] * 3


def test_without_a_terminal_views_are_printed(daemon: RunningDaemon) -> None:
    args = ("top", "--interval", 0.1, "--count", 1, "--timeout", 30)
    done = run_here(*args, KVD_ENDPOINT=daemon.endpoint)
    assert "hit rate" in done.stdout
    assert "blocks_evicted" in done.stdout
    assert "\x1b" not in done.stdout


@contextmanager
def running_top(*args: object, stdout: int, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvd_ctl", "top", "--interval", "0.1", *map(str, args)],
        stdout=stdout,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_it_goes_on_over_a_restart_and_says_so() -> None:
    with (
        running_daemon(settings()) as daemon,
        running_top(
            "--json", "--timeout", 1, stdout=subprocess.PIPE, KVD_ENDPOINT=daemon.endpoint
        ) as top,
    ):
        assert top.stdout is not None
        looks: Iterator[dict[str, Any]] = map(json.loads, top.stdout)
        assert any(look.get("is_restarted") is False for look in looks)
        daemon.kill()
        assert any("error" in look for look in looks)
        daemon.start()
        assert any(look.get("is_restarted") for look in looks)
        top.send_signal(signal.SIGINT)
        top.stdout.close()
        assert top.wait(60) == 0


def test_ctrl_c_leaves_the_terminal_as_it_was(daemon: RunningDaemon) -> None:
    ours, its = os.openpty()
    with running_top(stdout=its, TERM="xterm", KVD_ENDPOINT=daemon.endpoint) as top:
        os.close(its)
        said = b""
        while b"hit rate" not in said:
            said += os.read(ours, 4096)
        top.send_signal(signal.SIGINT)
        assert top.wait(60) == 0
        said += os.read(ours, 65536)
    os.close(ours)
    for on, off in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):
        assert said.rindex(on) < said.rindex(off)
