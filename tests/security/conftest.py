"""Keys of two tenants, an operator and a stranger; a daemon that knows all but the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from kvd.protocol.certificates import KeyPair, make_pair
from kvd_client import Client
from tests.actors.wire import Wire
from tests.e2e.support import faultless_daemon, free_port, settings

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon

NAMES = ("server", "alice", "bob", "root", "stranger")

Connect: TypeAlias = Callable[..., Client]


def address_of(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


class Keys:
    """The key files of everybody."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pairs: dict[str, KeyPair] = {name: make_pair(directory, name) for name in NAMES}

    def secret(self, name: str) -> str:
        return str(self.directory / f"{name}.key_secret")

    def shown(self, name: str) -> str:
        return str(self.directory / f"{name}.key")

    def options(self, name: str) -> dict[str, bytes]:
        """The options of a bare socket."""
        own, server = self.pairs[name], self.pairs["server"]
        return {
            "curve_serverkey": server.public.encode(),
            "curve_publickey": own.public.encode(),
            "curve_secretkey": own.secret.encode(),
        }

    def settings(self, **sections: Any) -> dict[str, Any]:
        """A configuration where each tenant has the salt of its name."""
        clients = [
            {"name": name, "key": self.pairs[name].public, "salts": [name]}
            for name in ("alice", "bob")
        ]
        clients.append({"name": "root", "key": self.pairs["root"].public, "verbs": ["operator"]})
        tcp = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "server_key": self.secret("server")}
        return settings(**{"tcp": tcp, "clients": clients} | sections)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def document(keys: Keys) -> dict[str, Any]:
    return keys.settings()


@pytest.fixture(scope="module")
def endpoint(document: dict[str, Any]) -> str:
    """Where it listens by TCP."""
    return str(document["tcp"]["endpoint"])


@pytest.fixture(scope="module")
def daemon(document: dict[str, Any]) -> Iterator[RunningDaemon]:
    with faultless_daemon(document) as daemon:
        yield daemon


@pytest.fixture
def observer(daemon: RunningDaemon) -> Iterator[Client]:
    """A client by ipc, which may ask everything."""
    with Client(daemon.endpoint, timeout=30.0, name="observer") as client:
        yield client


@pytest.fixture
def connect(daemon: RunningDaemon, endpoint: str, keys: Keys) -> Iterator[Connect]:
    """Makes clients by TCP, by the names of their keys."""
    clients: list[Client] = []

    def connect(who: str, **options: Any) -> Client:
        files = {"key": keys.secret(who), "server_key": keys.shown("server")}
        clients.append(Client(endpoint, **{"timeout": 30.0} | files | options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def wire(daemon: RunningDaemon, endpoint: str, keys: Keys) -> Iterator[Callable[..., Wire]]:
    """Makes bare connections by TCP, by the names of their keys."""
    wires: list[Wire] = []

    def wire(who: str, **options: Any) -> Wire:
        wires.append(Wire(endpoint, **keys.options(who), **options))
        return wires[-1]

    yield wire
    for each in wires:
        each.close()
