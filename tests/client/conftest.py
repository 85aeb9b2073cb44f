"""One daemon for the tests of a module; each test has clients and a namespace of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvd_client.client import Client, Namespace
from tests.arena.conftest import child  # noqa: F401 - a fixture
from tests.e2e.conftest import program  # noqa: F401 - a fixture
from tests.e2e.support import IDENTITY, LAYOUT, eventually, faultless_daemon, pages, settings

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client.client import Lease


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    limits = {"session_leases": 64, "request_bytes": "1MiB"}
    with faultless_daemon(settings(limits=limits)) as daemon:
        yield daemon


@pytest.fixture
def connect(daemon: RunningDaemon) -> Iterator[Callable[..., Client]]:
    """Makes clients; when all are closed, the daemon holds nothing for them, nor of them."""
    clients: list[Client] = []
    gc.freeze()  # what was there before is long to search, and holds nothing of this test

    def connect(**options: Any) -> Client:
        clients.append(Client(daemon.endpoint, timeout=30.0, **options))
        # One that closes while it attaches leaves a session that ends by silence alone.
        assert clients[-1].wait_attached(30.0)
        return clients[-1]

    yield connect
    while clients:
        clients.pop().close()
    gc.collect()  # the frames of expected exceptions hold leases
    gc.unfreeze()
    with Client(daemon.endpoint, timeout=30.0) as observer:
        eventually(lambda: len(observer.status().sessions) == 1)
        eventually(lambda: pages(observer).keys() <= {"unbacked", "free", "committed"})
        for space in observer.status().namespaces:  # the next test finds memory in one piece
            observer.drop(space.namespace)


@pytest.fixture
def client(connect: Callable[[], Client]) -> Client:
    return connect()


@pytest.fixture
def open_namespace(request: pytest.FixtureRequest) -> Callable[[Client], Namespace]:
    """Opens this test's own namespace, for any client."""
    return lambda client: client.open(IDENTITY, LAYOUT, salt=request.node.name)


@pytest.fixture
def namespace(client: Client, open_namespace: Callable[[Client], Namespace]) -> Namespace:
    return open_namespace(client)


@pytest.fixture
def lease(namespace: Namespace) -> Iterator[Lease]:
    """A lease on nothing yet, with 16 pages for 64 tokens."""
    lease = namespace.match(range(64), reserve_tokens=64)
    yield lease
    lease.release()
