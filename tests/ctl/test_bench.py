"""What `kvd-ctl bench` measures, and that it takes nothing from others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from tests.e2e.support import settings, store, tokens_of

if TYPE_CHECKING:
    from kvd_client import Client, Namespace

Ask: TypeAlias = Callable[..., Any]


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[RunningDaemon]:
    tier = {"type": "host", "capacity_bytes": getattr(request, "param", "64MiB")}
    with running_daemon(settings(tiers=[tier])) as daemon:
        yield daemon


def test_it_measures_matches_and_commits_and_leaves_no_block(client: Client, ask: Ask) -> None:
    said = ask("bench", "--seconds", 0.1)
    assert said.keys() == {"match with pages", "commit", "match and release"}
    for figures in said.values():
        assert 0 < figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"]
    status = client.status()
    assert [each.num_blocks for each in status.namespaces] == [0]
    assert status.counters["match_hits"] == said["match and release"]["count"]


@pytest.mark.parametrize("daemon", ["64KiB"], indirect=True)
def test_where_memory_is_taken_it_commits_nothing(namespace: Namespace, ask: Ask) -> None:
    store(namespace, tokens_of(1, 4))
    assert ask("bench", "--seconds", 0.1).keys() == {"miss"}
    assert namespace.client.status().counters["blocks_committed"] == 4
