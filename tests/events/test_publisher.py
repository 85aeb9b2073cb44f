"""Publisher: where events may be had, what a replay answers, and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from kvd.actors.publisher import MAX_REQUEST_BYTES
from kvd.config import Config, EventConfig, parse
from kvd.daemon import Daemon
from kvd.protocol.errors import ConfigError
from kvd.protocol.events import END_OF_REPLAY
from kvd.testing.daemons import DaemonFailed, running_daemon
from kvd_client import Client
from tests.e2e.support import settings
from tests.events.conftest import publishing

if TYPE_CHECKING:
    from collections.abc import Sequence


def asked(endpoint: str, *requests: Sequence[bytes]) -> list[bytes]:
    """The numbers of what a replay answers, up to its end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        for request in requests:
            socket.send_multipart(request)
        seqs: list[bytes] = []
        while (answer := tuple(socket.recv_multipart()[1:])) != END_OF_REPLAY:
            seqs.append(answer[1])
        return seqs


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"endpoint": "tcp://0.0.0.0:5557"}, "needs keys"),
        ({"endpoint": "tcp://10.0.0.1:5557"}, "needs keys"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, "an address and a port"),
        ({"endpoint": "ipc://relative"}, "absolute path"),
        ({"replay_endpoint": "ipc:///tmp/x"}, "nothing is published"),
    ],
)
def test_an_endpoint_is_of_this_machine(section: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({"events": section})


def test_topics_have_the_name_of_the_machine_or_another() -> None:
    assert EventConfig().instance
    assert EventConfig(topic_instance="pod-7").instance == "pod-7"


@pytest.mark.parametrize(
    ("media", "called"), [({}, ["CPU", "DISK"]), ({"lmdb": "STORAGE"}, ["CPU", "STORAGE"])]
)
def test_a_tier_is_called_by_its_kind_or_as_chosen(
    tmp_path: Path, media: dict[str, str], called: list[str]
) -> None:
    places = {"directory": f"{tmp_path}/a", "data_directory": f"{tmp_path}/b"}
    assert Daemon(parse({**places, "events": {"media": media}}))._media() == called


def test_tiers_that_are_called_alike_are_refused(tmp_path: Path) -> None:
    document = settings(
        events={"endpoint": f"ipc://{tmp_path}/e", "media": {"host": "X", "lmdb": "X"}}
    )
    document["tiers"].append({"type": "lmdb", "capacity_bytes": "16MiB"})
    with pytest.raises(DaemonFailed, match="called alike, X, X"), running_daemon(document):
        pass


def test_what_is_no_socket_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("mine")
    document = settings(events={"endpoint": f"ipc://{tmp_path}/e"})
    with pytest.raises(DaemonFailed, match="is no socket"), running_daemon(document):
        pass
    assert (tmp_path / "e").read_text() == "mine"


def test_a_port_may_be_chosen_by_the_system() -> None:
    document = settings(events={"endpoint": "tcp://127.0.0.1:*"})
    with running_daemon(document) as daemon, Client(daemon.endpoint, timeout=30.0) as client:
        status = client.status().events
        assert status
        assert status.endpoint.startswith("tcp://127.0.0.1:")
        assert status.replay_endpoint == ""


def test_what_is_no_request_is_passed_over() -> None:
    with publishing() as (_, client):
        status = client.status().events
        assert status
        bad = ([b""], [b"", b"7"], [b"x", bytes(8)], [b"", bytes(MAX_REQUEST_BYTES)])
        assert asked(status.replay_endpoint, *bad, [b"", bytes(8)]) == [bytes(8)]


def test_of_what_is_still_to_come_there_is_nothing() -> None:
    with publishing() as (_, client):
        status = client.status().events
        assert status
        assert asked(status.replay_endpoint, [b"", b"\xff" * 8]) == []


def test_it_is_off_unless_it_is_told_where() -> None:
    assert Config().events.endpoint == ""
    with running_daemon(settings()) as daemon, Client(daemon.endpoint, timeout=30.0) as client:
        assert client.status().events is None
