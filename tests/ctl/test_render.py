"""Tables on a terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from kvd_client import Client, Identity
from tests.ctl.conftest import run_on_terminal
from tests.e2e.support import LAYOUT, store, tokens_of

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon

TOKENS = tokens_of(1, 4)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("status", r"^committed +\d"),
        ("tiers", r"^host +memory +\d"),
        ("sessions", r"^[0-9a-f]{16} an-engine"),
        ("namespaces", r" organization/Model-3.1-8B-Instruct f{12} team "),
        ("leases", r"^[0-9a-f]{16} an-engine"),
        ("pins", r" an-engine-with-a-name-as-long-as-they-get "),
    ],
)
def test_tables_fit_80_columns_and_tell_whose(
    command: str, told: str, daemon: RunningDaemon
) -> None:
    name = "an-engine-with-a-name-as-long-as-they-get"
    identity = Identity("organization/Model-3.1-8B-Instruct", "f" * 40, "adapter", 1, 2)
    with Client(daemon.endpoint, timeout=30.0, name=name) as client:
        namespace = client.open(identity, LAYOUT, salt="team")
        store(namespace, TOKENS)
        namespace.pin(TOKENS, 60.0)
        with namespace.match(TOKENS):
            ended, said = run_on_terminal(command, KVD_ENDPOINT=daemon.endpoint)
        client.unpin()
    assert ended == 0
    assert re.search(told, said, re.MULTILINE)
    assert max(map(len, said.replace(daemon.endpoint, "").splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "columns"),
    [
        ("config", ["key", "value", "origin"]),
        ("sessions", ["client", "reserved", "requests"]),
        ("namespaces", ["namespace", "model", "layout", "generation"]),
        ("leases", ["session", "client", "detached"]),
    ],
)
def test_on_a_narrow_terminal_no_column_is_lost(
    command: str, columns: list[str], daemon: RunningDaemon, client: Client
) -> None:
    with client.open(Identity("model", "1"), LAYOUT).match([]):
        _, said = run_on_terminal(command, KVD_ENDPOINT=daemon.endpoint, COLUMNS="40")
    words = re.findall(r"\w+", said)
    assert [column for column in columns if column not in words] == []
