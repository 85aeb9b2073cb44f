"""What a daemon refuses to start with: TCP without keys on both ends."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from kvd.config import parse
from kvd.protocol.errors import ConfigError
from kvd.testing.daemons import DaemonFailed, running_daemon
from tests.security.conftest import Keys, address_of

CLIENT = {"name": "engine", "key": "0" * 40, "salts": [""]}
TCP = {"endpoint": "tcp://127.0.0.1:7654", "server_key": "/etc/kvd/server.key_secret"}


def test_tcp_is_off_unless_it_is_configured() -> None:
    assert parse({}).tcp.endpoint == ""
    assert parse({"clients": [CLIENT]}).tcp.endpoint == ""


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"tcp": TCP}, r"tcp: without any \[\[clients\]\]"),
        ({"tcp": TCP | {"server_key": ""}, "clients": [CLIENT]}, "server_key '' .*keys new"),
        ({"tcp": TCP | {"server_key": "server.key"}, "clients": [CLIENT]}, "no absolute path"),
        ({"tcp": TCP | {"endpoint": "ipc:///x"}, "clients": [CLIENT]}, "not tcp://"),
        ({"tcp": TCP | {"endpoint": "tcp://*:70000"}, "clients": [CLIENT]}, "address and a port"),
        ({"clients": [CLIENT, CLIENT | {"name": "b"}]}, "two have the same key"),
        ({"clients": [CLIENT, CLIENT | {"key": "1" * 40}]}, "two have the same name"),
        ({"clients": [CLIENT | {"salts": []}]}, "engine has no salts"),
        ({"clients": [CLIENT | {"verbs": ["mach"]}]}, "engine: there is no verb 'mach'"),
        ({"clients": [CLIENT | {"key": "short"}]}, "key"),
        ({"clients": [CLIENT | {"name": "a b"}]}, "name"),
        ({"clients": [CLIENT | {"sessions": 0}]}, "sessions"),
        ({"ipc": {"mode": "0666"}}, "mode"),
    ],
)
def test_what_cannot_be_is_refused_by_name(document: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(document)


def start(document: dict[str, Any]) -> None:
    with running_daemon(document):
        pass


def test_a_server_key_that_others_may_read_is_refused(keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "server.key_secret"
    path.write_text(Path(keys.secret("server")).read_text())
    path.chmod(0o644)
    document = keys.settings()
    document["tcp"]["server_key"] = str(path)
    with pytest.raises(DaemonFailed, match="chmod 600"):
        start(document)


def test_an_address_that_is_taken_is_refused(keys: Keys) -> None:
    document = keys.settings()
    with (
        socket.create_server(address_of(document["tcp"]["endpoint"])),
        pytest.raises(DaemonFailed, match="cannot be bound: Address already in use"),
    ):
        start(document)
