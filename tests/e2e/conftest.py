"""A real daemon in a process of its own, and real clients in theirs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client.client import Client, Namespace
from tests.arena.conftest import child, mount, shm  # noqa: F401 - fixtures
from tests.e2e.support import IDENTITY, LAYOUT, settings

if TYPE_CHECKING:
    from tests.arena.conftest import Child

# What a program starts with: `client` and `namespace` on the endpoint in its first argument.
PROLOGUE = """
import os, signal, sys
from kvd_client import *
from kvd_client import Client
from tests.e2e.support import *
client = Client(sys.argv[1], timeout=30.0, name='program')
namespace = client.open(IDENTITY, LAYOUT)
"""


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(settings()) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout=30.0, name="test") as client:
        assert client.wait_attached(30.0)
        yield client


@pytest.fixture
def namespace(client: Client) -> Namespace:
    return client.open(IDENTITY, LAYOUT)


@pytest.fixture
def tmpfs(mount: Callable[..., Path]) -> Iterator[Callable[..., Path]]:  # noqa: F811
    """Mounts small file systems; no mapping of this process holds them at the end."""
    yield mount
    gc.collect()


@pytest.fixture
def program(daemon: RunningDaemon, child: Callable[..., Child]) -> Callable[..., Child]:  # noqa: F811
    """Starts a client in a process of its own: `program(code, *args)`, args from argv[2] on."""

    def start(code: str, *args: object) -> Child:
        return child(PROLOGUE + code, daemon.endpoint, *args)

    return start
