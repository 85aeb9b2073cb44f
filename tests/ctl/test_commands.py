"""What commands print of a daemon that runs, and what they change there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

import kvd
from kvd_client import Client, Identity
from tests.ctl.conftest import run_on_terminal
from tests.e2e.support import BLOCK, IDENTITY, LAYOUT, OPAQUE, store, tokens_of

if TYPE_CHECKING:
    from kvd.protocol.messages import NamespaceStatus
    from kvd.testing.daemons import RunningDaemon
    from kvd_client import Namespace

TOKENS = tokens_of(1, 4)
LISTED = ",".join(map(str, TOKENS))

Ctl: TypeAlias = Callable[..., str]
Ask: TypeAlias = Callable[..., Any]


def known(namespace: Namespace) -> NamespaceStatus:
    """A namespace as the daemon tells of it."""
    listed = namespace.client.status().namespaces
    return next(each for each in listed if each.salt == namespace.salt)


@pytest.fixture
def number(namespace: Namespace) -> int:
    """A namespace that has TOKENS, by its number."""
    store(namespace, TOKENS)
    return known(namespace).namespace


# --- what is there ---


def test_ping_tells_who_answers(daemon: RunningDaemon, ctl: Ctl) -> None:
    said = ctl("ping")
    assert f"kvd {kvd.__version__} (pid {daemon.pid}) answers on {daemon.endpoint}" in said


def test_ping_as_json_measures(daemon: RunningDaemon, ask: Ask) -> None:
    said = ask("ping")
    assert (said["endpoint"], said["pid"]) == (daemon.endpoint, daemon.pid)
    assert said["milliseconds"] > 0


@pytest.mark.usefixtures("number")
def test_status_tells_pages_by_state_and_hits(namespace: Namespace, ctl: Ctl) -> None:
    namespace.match(TOKENS).release()
    said = ctl("status")
    (counts,) = re.findall(r"^(?:state +pages\n)((?:\w+ +\d+\n)+)", said, re.MULTILINE)
    states = dict(line.split() for line in counts.splitlines())
    assert int(states["committed"]) >= len(TOKENS) // BLOCK
    assert "0" not in states.values()
    assert re.search(r"hits [1-9]\d*, misses .* matched \(\d+\.\d%\)", said)


def test_status_as_json_is_all_that_kvd_says(daemon: RunningDaemon, ask: Ask) -> None:
    said = ask("status")
    assert {"tiers", "namespaces", "sessions", "counters"} <= said.keys()
    assert said["pid"] == daemon.pid


def test_sessions_tell_who_is_attached(client: Client, ctl: Ctl) -> None:
    (session,) = (each for each in client.status().sessions if each.client == "engine")
    (line,) = (line for line in ctl("sessions").splitlines() if session.session in line)
    assert line.split()[1:3] == ["engine", str(os.getpid())]


@pytest.mark.usefixtures("number")
def test_sessions_as_json_have_their_latency(client: Client, ask: Ask) -> None:
    (engine,) = (each for each in ask("sessions") if each["client"] == "engine")
    assert engine["request_p99_us"] >= engine["request_p50_us"] >= 0
    assert engine["pid"] == os.getpid()


def test_namespaces_have_the_revision_shortened_in_the_table_alone(
    client: Client, ctl: Ctl, ask: Ask
) -> None:
    revision = "0123456789abcdef" * 2
    namespace = client.open(Identity("model", revision, adapter="x"), LAYOUT, salt="revised")
    store(namespace, TOKENS)
    assert "0123456789ab " in ctl("namespaces")
    assert revision in [each["revision"] for each in ask("namespaces")]


def test_columns_that_say_nothing_are_left_out(number: int, ctl: Ctl) -> None:
    said = ctl("namespaces")
    assert "salt" in said
    assert "positions" not in said
    assert "2x1x8 float32 layer_first" in said


def test_a_namespace_says_what_packs_its_pages(client: Client, ctl: Ctl) -> None:
    client.open(IDENTITY, OPAQUE, salt="packed").match(TOKENS)
    assert "2x1x8 float32 opaque, packed by a test's" in ctl("namespaces")


def test_the_oldest_leases_come_first(namespace: Namespace, ctl: Ctl, ask: Ask) -> None:
    with namespace.match(TOKENS), namespace.match(TOKENS):
        first, second = ask("leases")["leases"]
        said = ctl("leases", "--limit", 1).splitlines()
    assert first["age_seconds"] >= second["age_seconds"]
    assert said[2].split()[:3] == [first["session"], "engine", str(first["lease"])]
    assert said[3:] == ["and 1 more: see --limit"]


def test_no_leases_are_told_in_words(client: Client, ctl: Ctl) -> None:
    assert ctl("leases") == "leases: none\n"


# --- pins ---


def test_a_pin_is_kept_and_listed_until_it_is_unpinned(number: int, ctl: Ctl, ask: Ask) -> None:
    said = ctl("pin", number, f"{LISTED},7", "--for", "1h")
    (pin,) = ask("pins")["pins"]
    size = f"{len(TOKENS) // BLOCK * LAYOUT.page_bytes // 1024}KiB"
    assert said == (
        f"pin {pin['pin']} of kvd-ctl keeps {len(TOKENS)} of {len(TOKENS) + 1} tokens, "
        f"{size}, for 1.0h\n"
    )
    assert ctl("pins").splitlines()[2].split()[:2] == [str(pin["pin"]), "kvd-ctl"]
    assert ctl("unpin", pin["pin"]) == "pins of kvd-ctl ended: 1\n"
    assert ctl("pins") == "pins: none\n"


def test_pins_of_another_owner_stay(number: int, ask: Ask) -> None:
    ask("pin", number, LISTED, "--for", "1h", "--owner", "me")
    assert ask("unpin") == {"num_pins": 0}
    assert ask("unpin", "--owner", "me") == {"num_pins": 1}


def test_what_is_not_resident_is_not_pinned(number: int, ctl: Ctl) -> None:
    assert "nothing is pinned" in ctl("pin", number, "-", "--for", "90s", stdin="[1, 2, 3, 4]")


# --- drops ---


def test_a_drop_of_tokens_begins_where_it_is_told(
    number: int, namespace: Namespace, ctl: Ctl
) -> None:
    with namespace.match(TOKENS):
        said = ctl("drop", number, "-", "--from-token", BLOCK, stdin=LISTED)
    assert said == "blocks dropped: host 3; still held by leases: 3\n"
    assert known(namespace).num_blocks == 1


def test_a_drop_of_a_namespace_needs_no_answer_with_yes(
    number: int, namespace: Namespace, ask: Ask
) -> None:
    said = ask("drop", number, "--yes")
    assert (said["blocks_by_tier"], said["num_detached"]) == ({"host": 4}, 0)
    assert known(namespace).num_blocks == 0


@pytest.mark.parametrize(("answer", "status", "num_left"), [("y\n", 0, 0), ("n\n", 1, 4)])
def test_a_drop_of_a_namespace_asks_on_a_terminal(
    number: int, namespace: Namespace, answer: str, status: int, num_left: int
) -> None:
    endpoint = namespace.client.endpoint
    ended, said = run_on_terminal("drop", number, "--endpoint", endpoint, answer=answer)
    assert f"Drop all 4 blocks of namespace {number} ({IDENTITY.model}, salt " in said
    assert (ended, known(namespace).num_blocks) == (status, num_left)
