"""The sans-I/O core: what it makes of replies, without a socket."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.arena.header import create_header
from kvd.arena.membership import create_session_file, is_held
from kvd.protocol.codec import decode_request, encode
from kvd.protocol.errors import (
    DaemonUnavailable,
    Forbidden,
    KvdError,
    LeaseEnded,
    NotAttached,
    StaleEpoch,
    VersionMismatch,
)
from kvd.protocol.messages import (
    PROTOCOL_VERSION,
    AnyReply,
    AttachReply,
    AttachRequest,
    DoneReply,
    ErrorReply,
    Failure,
    HeartbeatRequest,
    StatusRequest,
)
from kvd_client.session import MAX_MARGIN_SECONDS, Call, Core, Link, result_of, traceparent, wire


class Daemon:
    """Answers by hand what a core has sent."""

    def __init__(self, core: Core, directory: Path) -> None:
        self.core = core
        self.directory = directory
        self.header = create_header(directory / "header")
        self.num_sessions = 0

    def probe(self) -> AttachRequest | HeartbeatRequest:
        """What the core would send to find out how the daemon stands."""
        call = self.core.probe(0)
        self.core.send(call)
        request = decode_request(call.frames[0])
        assert isinstance(request, AttachRequest | HeartbeatRequest)
        return request

    def reply(self, reply: AnyReply) -> None:
        self.core.receive(encode(reply))

    def refuse(self, request: int, error: KvdError, epoch: int = 1) -> None:
        self.reply(ErrorReply(id=request, epoch=epoch, code=error.code, message=error.message))

    def attach(self, epoch: int = 1) -> AttachRequest:
        """Let the core attach; what it asked for."""
        request = self.probe()
        assert isinstance(request, AttachRequest)
        self.num_sessions += 1
        path = self.directory / f"{self.num_sessions}.session"
        create_session_file(path)
        self.reply(
            AttachReply(
                id=request.id,
                epoch=epoch,
                version=PROTOCOL_VERSION,
                session=str(self.num_sessions),
                heartbeat_seconds=1.0,
                max_request_bytes=1 << 20,
                header_path=str(self.directory / "header"),
                lock_path=str(path),
            )
        )
        return request


@pytest.fixture
def links() -> list[Link]:
    return []


@pytest.fixture
def core(links: list[Link]) -> Core:
    return Core("test", links.append)


@pytest.fixture
def daemon(core: Core, tmp_path: Path) -> Daemon:
    return Daemon(core, tmp_path)


def ask(core: Core) -> Call:
    call = Call(StatusRequest(id=core.next_id()))
    core.send(call)
    return call


def test_ids_and_lease_ids_count_up_and_are_never_zero(core: Core) -> None:
    assert [core.next_id(), core.next_id()] == [1, 2]
    assert [core.next_lease_id(), core.next_lease_id()] == [1, 2]


def test_without_a_session_a_probe_attaches_and_with_one_it_beats(daemon: Daemon) -> None:
    request = daemon.attach()
    assert (request.version, request.client) == (PROTOCOL_VERSION, "test")
    daemon.core.living[7] = None
    beat = daemon.probe()
    assert isinstance(beat, HeartbeatRequest)
    assert (beat.epoch, beat.leases) == (1, (7,))


def test_attaching_takes_the_lock_of_the_session(daemon: Daemon, links: list[Link]) -> None:
    daemon.attach()
    assert is_held(daemon.directory / "1.session")
    assert links == [Link.ATTACHED]


def test_a_probe_is_under_way_until_it_is_answered(daemon: Daemon) -> None:
    daemon.attach()
    beat = daemon.probe()
    assert daemon.core.probing
    daemon.reply(DoneReply(id=99, epoch=1))
    assert daemon.core.probing
    daemon.reply(DoneReply(id=beat.id, epoch=1))
    assert not daemon.core.probing


def test_an_answer_goes_to_its_call(daemon: Daemon) -> None:
    daemon.attach()
    one, two = ask(daemon.core), ask(daemon.core)
    daemon.reply(DoneReply(id=two.id, epoch=1))
    assert two.is_answered
    assert not one.is_answered
    daemon.refuse(one.id, LeaseEnded("over"))
    assert one.is_answered
    assert isinstance(one.error, LeaseEnded)


def test_an_answer_that_nobody_waits_for_is_dropped(daemon: Daemon) -> None:
    daemon.attach()
    call = ask(daemon.core)
    daemon.core.forget(call)
    daemon.core.forget(call)
    daemon.reply(DoneReply(id=call.id, epoch=1))
    assert not call.is_answered


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\x01\x02\x03", bytes(100)])
def test_a_reply_that_cannot_be_read_is_dropped(daemon: Daemon, frame: bytes) -> None:
    daemon.attach()
    daemon.core.receive(frame)
    assert daemon.core.link is Link.ATTACHED


END: dict[str, Callable[[Daemon, int], None]] = {
    "not attached": lambda daemon, call: daemon.refuse(call, NotAttached("who?")),
    "stale epoch": lambda daemon, call: daemon.refuse(call, StaleEpoch("old"), epoch=2),
    "another epoch": lambda daemon, call: daemon.reply(DoneReply(id=call, epoch=2)),
}


@pytest.mark.parametrize("how", END)
def test_a_session_that_the_daemon_does_not_know_is_over(daemon: Daemon, how: str) -> None:
    daemon.attach()
    daemon.core.living[7] = None
    END[how](daemon, ask(daemon.core).id)
    assert (daemon.core.session, daemon.core.link) == (None, Link.ATTACHING)
    assert daemon.core.living == {}
    assert daemon.attach(epoch=2).previous == "1"
    assert daemon.core.link is Link.ATTACHED


def test_a_session_whose_heartbeat_is_forbidden_is_over_and_another_verb_ends_none(
    daemon: Daemon,
) -> None:
    daemon.attach()
    daemon.refuse(ask(daemon.core).id, Forbidden("status is not for you"))
    assert daemon.core.link is Link.ATTACHED
    daemon.refuse(daemon.probe().id, Forbidden("your key was taken out"))
    assert daemon.core.session is None


def test_a_call_says_another_machine_how_long_it_waits() -> None:
    call = Call(StatusRequest(id=1, deadline_ns=time.monotonic_ns() + 10**9))
    call.count_deadline_from_now()
    assert 0 < decode_request(call.frames[0]).deadline_ns <= 10**9


def test_without_a_deadline_a_call_waits_for_another_machine_too() -> None:
    call = Call(StatusRequest(id=1))
    call.count_deadline_from_now()
    assert decode_request(call.frames[0]).deadline_ns == 0


def test_a_refusal_to_attach_is_kept_until_it_attaches(daemon: Daemon) -> None:
    daemon.refuse(daemon.probe().id, VersionMismatch("mine is 1, yours is 9"))
    assert (daemon.core.link, daemon.core.session) == (Link.DOWN, None)
    assert "yours is 9" in str(daemon.core.refusal)
    daemon.attach()
    assert (daemon.core.link, daemon.core.refusal) == (Link.ATTACHED, None)


@pytest.mark.parametrize("missing", ["header", "session"])
def test_a_session_whose_memory_cannot_be_mapped_does_not_map(
    daemon: Daemon, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = daemon.probe()
    here = daemon.directory
    reply = AttachReply(
        id=request.id,
        epoch=1,
        version=1,
        session="x",
        heartbeat_seconds=1.0,
        max_request_bytes=1,
        header_path=str(here / ("nowhere" if missing == "header" else "header")),
        lock_path=str(here / "nowhere"),
    )
    daemon.reply(reply)
    session = daemon.core.session
    assert session is not None
    assert (session.header, session.lock) == (None, None)
    assert caplog.text.count("nowhere") == 1


def test_a_lost_connection_ends_every_call_under_way(daemon: Daemon) -> None:
    daemon.attach()
    calls = [ask(daemon.core) for _ in range(3)]
    daemon.core.disconnected()
    assert all(call.is_answered for call in calls)
    assert all(isinstance(call.error, DaemonUnavailable) for call in calls)
    assert (daemon.core.link, daemon.core.probing) == (Link.DOWN, False)


def test_a_daemon_that_speaks_again_is_up_with_its_session(daemon: Daemon) -> None:
    daemon.attach()
    session = daemon.core.session
    daemon.core.set_link(Link.DOWN)
    daemon.reply(DoneReply(id=99, epoch=1))
    assert (daemon.core.link, daemon.core.session) == (Link.ATTACHED, session)


def test_each_change_of_the_link_is_told_once(daemon: Daemon, links: list[Link]) -> None:
    daemon.attach()
    for _ in range(3):
        daemon.core.set_link(Link.DOWN)
    daemon.reply(DoneReply(id=99, epoch=1))
    daemon.reply(DoneReply(id=99, epoch=1))
    assert links == [Link.ATTACHED, Link.DOWN, Link.ATTACHED]


@pytest.mark.parametrize("seconds", [10.0, 0.1, 0.0, -5.0])
def test_a_deadline_on_the_wire_is_a_little_earlier(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    margin = deadline - wire(deadline) / 1e9
    assert -1e-6 <= margin <= MAX_MARGIN_SECONDS + 1e-6


def test_the_result_of_a_failed_item_is_its_error() -> None:
    assert result_of(["x"]) == "x"
    with pytest.raises(LeaseEnded, match="over") as raised:
        result_of([Failure("lease_ended", "over", {"lease": 3})])
    assert raised.value.details == {"lease": 3}
    with pytest.raises(KvdError):
        result_of([Failure("of_the_future", "what", {})])


def test_without_a_span_there_is_no_trace() -> None:
    assert traceparent() == ""
