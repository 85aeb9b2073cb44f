"""What `kvd-ctl prefetch` brings to memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd.testing.faults import Faults, set_faults
from tests.ctl.conftest import run_here
from tests.e2e.support import BLOCK, IDENTITY, LAYOUT, NUM_PAGES, store, tokens_of, with_store

if TYPE_CHECKING:
    from kvd_client import Client, Namespace

TOKENS = tokens_of(1, 4)
LISTED = ",".join(map(str, TOKENS))

Ctl: TypeAlias = Callable[..., str]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(with_store()) as daemon:
        yield daemon


def num_in_memory(client: Client) -> int:
    return client.status().tiers[0].num_blocks


@pytest.fixture
def number(namespace: Namespace) -> int:
    """A namespace whose blocks the store alone has, by its number."""
    client = namespace.client
    store(namespace, TOKENS)
    client.checkpoint()
    with namespace.match([], reserve_tokens=NUM_PAGES * BLOCK):
        assert num_in_memory(client) == 0
    spaces = client.status().namespaces
    return next(each.namespace for each in spaces if each.salt == namespace.salt)


def test_what_the_store_has_is_in_memory_when_it_ends(
    number: int, client: Client, ctl: Ctl
) -> None:
    said = ctl("prefetch", number, f"{LISTED},7")
    assert said == "in memory: 16 of the 16 tokens that kvd has of these 17\n"
    assert num_in_memory(client) == len(TOKENS) // BLOCK


def test_what_does_not_come_in_time_is_counted(daemon: RunningDaemon, number: int) -> None:
    set_faults(daemon.data_directory, Faults.STUCK)
    try:
        done = run_here("prefetch", number, LISTED, "--timeout", 2, KVD_ENDPOINT=daemon.endpoint)
    finally:
        set_faults(daemon.data_directory, Faults.NONE)
    assert done.exit_code == 1
    assert "in memory: 0 of the 16 tokens" in done.stdout


def test_where_positions_have_extras_it_is_refused(daemon: RunningDaemon, client: Client) -> None:
    wide = client.open(IDENTITY, LAYOUT, salt="wide", extras=True)
    wide.match(TOKENS).release()
    (space,) = (each for each in client.status().namespaces if each.extras)
    done = run_here("prefetch", space.namespace, LISTED, KVD_ENDPOINT=daemon.endpoint)
    assert (done.exit_code, "extras" in done.stderr) == (1, True)
