"""One daemon for the tests of a module, each with a namespace of its own; or parts of one, here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.actors.stored import running
from tests.actors.wire import Wire
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import eventually, faultless_daemon, settings

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    limits = {"sessions": 8, "session_leases": 16, "batch_items": 32, "request_bytes": "1MiB"}
    with faultless_daemon(settings(limits=limits)) as daemon:
        yield daemon


@pytest.fixture
def connect(daemon: RunningDaemon) -> Iterator[Callable[[], Wire]]:
    """Makes bare connections; when all are closed, nothing of them is left in the daemon."""
    wires: list[Wire] = []

    def connect() -> Wire:
        wires.append(Wire(daemon.endpoint))
        return wires[-1]

    yield connect
    for wire in wires:
        wire.close()
    observer = Wire(daemon.endpoint)
    eventually(lambda: not observer.status().sessions)
    eventually(lambda: observer.pages().keys() <= {"free", "committed", "unbacked"})
    observer.close()


@pytest.fixture
def join(connect: Callable[[], Wire], request: pytest.FixtureRequest) -> Callable[[], Wire]:
    """Makes clients that are attached and have this test's namespace open."""

    def join() -> Wire:
        wire = connect()
        wire.attach()
        wire.open(request.node.name)
        return wire

    return join


@pytest.fixture
def wire(join: Callable[[], Wire]) -> Wire:
    return join()


@pytest.fixture
def start(shm: Path) -> Callable[..., Any]:  # noqa: F811
    """Starts memory and a store in this process: `async with start() as cache`."""
    return lambda *args: running(shm, *args)
