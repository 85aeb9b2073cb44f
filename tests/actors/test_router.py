"""What crosses the wire, good and bad, against a real daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvd.protocol.codec import encode
from kvd.protocol.messages import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AbortRequest,
    AttachRequest,
    CheckpointReply,
    CheckpointRequest,
    CloseRequest,
    CommitItem,
    CommitReply,
    CommitRequest,
    CommitResult,
    DetachRequest,
    DoneReply,
    DrainRequest,
    DropItem,
    DropRequest,
    ErrorReply,
    ForkItem,
    ForkRequest,
    HeartbeatRequest,
    LoadRequest,
    MatchItem,
    MatchReply,
    MatchRequest,
    OpenRequest,
    PinItem,
    PinRequest,
    ReleaseRequest,
    ReserveItem,
    ReserveReply,
    ReserveRequest,
    ReserveResult,
    Run,
    StatusRequest,
    StoreRequest,
    UnpinRequest,
    VerifyReply,
    VerifyRequest,
)
from kvd.testing.daemons import running_daemon
from tests.actors.wire import Wire, failed, numbers, packed, refused, soon
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    SESSIONS,
    UNUSED,
    capacity_of,
    eventually,
    settings,
    tokens_of,
)

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon

Connect = Callable[[], Wire]
TOKENS = tokens_of(1, 4)


def booked(wire: Wire) -> dict[str, int]:
    """What the daemon's books count of pages and blocks, and of this session.

    Memory is made ready in the background, so that pages without any use are not told apart.
    """
    status, me = wire.status(), wire.me()
    pages = {state: count for state, count in wire.pages().items() if state not in UNUSED}
    names = ("pages_reserved", "blocks_committed", "blocks_duplicate")
    counters = {name: status.counters.get(name, 0) for name in names}
    return counters | pages | {"leases": me.num_leases, "held": me.num_reserved}


# --- attach ---


@pytest.mark.parametrize(("version", "min_version"), [(0, 0), (99, 98)])
def test_a_version_that_is_not_shared_is_refused_with_both(
    connect: Connect, version: int, min_version: int
) -> None:
    wire = connect()
    reply = wire.ask(AttachRequest(id=1, version=version, min_version=min_version))
    message = refused(reply, "version_mismatch")
    assert f"{min_version} to {version}" in message
    assert f"{MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}" in message


def test_a_newer_client_that_still_speaks_ours_is_attached(connect: Connect) -> None:
    assert connect().attach(version=9).version == PROTOCOL_VERSION


def test_what_does_not_need_a_session_is_answered_without_one(connect: Connect) -> None:
    assert connect().status().version


def test_every_other_verb_needs_a_session(connect: Connect) -> None:
    wire = connect()
    epoch = wire.status().epoch
    for request in every_request(epoch, 1):
        refused(wire.ask(request, b""), "not_attached")


def test_while_it_drains_who_has_a_session_keeps_it_and_nobody_else_gets_one(
    join: Connect, connect: Connect
) -> None:
    wire, other = join(), connect()
    assert isinstance(wire.ask(DrainRequest(id=1)), DoneReply)
    assert wire.status().is_draining
    attach = AttachRequest(id=2, version=PROTOCOL_VERSION, min_version=1)
    assert "draining" in refused(other.ask(attach), "unavailable")
    other.attach(previous=wire.secret)
    other.ask(DrainRequest(id=3, undo=True))
    assert connect().attach()


def test_attaching_again_ends_the_session_before(wire: Wire) -> None:
    wire.matched(1, TOKENS, reserve=4)
    before = wire.session
    wire.attach()
    assert wire.session != before
    assert before not in {one.session for one in wire.status().sessions}
    assert wire.me().num_leases == 0


def test_a_client_that_comes_back_ends_its_session_before(wire: Wire, connect: Connect) -> None:
    wire.matched(1, TOKENS, reserve=4)
    again = connect()
    again.attach(previous=wire.secret)
    assert wire.session not in {one.session for one in again.status().sessions}
    assert again.pages()["quarantined"] == 4
    refused(wire.release(1), "not_attached")


def test_sessions_are_bounded(connect: Connect) -> None:
    wires = [connect() for _ in range(9)]
    for wire in wires[:8]:
        wire.attach(maps=False)
    request = AttachRequest(id=1, version=1, min_version=1)
    assert "8 sessions" in refused(wires[8].ask(request), "limit_exceeded")
    for wire in wires[:8]:
        assert isinstance(wire.ask(DetachRequest(**wire.envelope())), DoneReply)
    wires[8].attach()


def test_an_arena_is_opened_only_by_who_holds_the_lock(connect: Connect) -> None:
    wire = connect()
    reply = wire.attach(maps=False)
    request = OpenRequest(**wire.envelope(), identity=IDENTITY, layout=LAYOUT)
    assert reply.lock_path in refused(wire.ask(request), "session_lock_missing")
    assert wire.open(maps=False)


def test_a_session_that_ended_has_nothing_open(
    daemon: RunningDaemon, connect: Connect, wire: Wire
) -> None:
    other = connect()
    other.attach(maps=False)
    request = OpenRequest(
        **other.envelope(), identity=IDENTITY, layout=LAYOUT, salt="late", maps=False
    )
    daemon.pause()  # so that it reads both before it opens
    other.send(encode(request))
    other.send(encode(DetachRequest(**other.envelope())))
    daemon.resume()
    assert isinstance(other.receive(), DoneReply)
    refused(other.receive(), "not_attached")
    assert [space.num_sessions for space in wire.status().namespaces if space.salt == "late"] == [0]


# --- stale, late, wrong ---


def every_request(epoch: int, namespace: int, **fields: Any) -> list[Any]:
    envelope = {"id": 77, "epoch": epoch} | fields
    return [
        HeartbeatRequest(**envelope, leases=()),
        OpenRequest(**envelope, identity=IDENTITY, layout=LAYOUT),
        MatchRequest(**envelope, items=(MatchItem(namespace, 1, 0),)),
        ReserveRequest(**envelope, items=(ReserveItem(1, 0, 1),)),
        CommitRequest(**envelope, items=(CommitItem(1, 0, (), 0),)),
        AbortRequest(**envelope, leases=(1,)),
        ReleaseRequest(**envelope, leases=(1,)),
        CloseRequest(**envelope, namespace=namespace),
        DetachRequest(**envelope),
        ForkRequest(**envelope, items=(ForkItem(2, 1),)),
        LoadRequest(**envelope, lease=1, pages=(), first_slice=0, num_slices=1),
        StoreRequest(**envelope, lease=1, pages=(), first_slice=0, num_slices=1),
        PinRequest(**envelope, items=(PinItem(namespace, 0, 1.0),)),
        UnpinRequest(**envelope),
        DropRequest(**envelope, items=(DropItem(namespace),)),
    ]


def test_a_request_of_another_epoch_is_refused(wire: Wire) -> None:
    wire.matched(1, TOKENS, reserve=4)
    before = booked(wire)
    for epoch in (0, 1, wire.epoch + 2):
        for request in every_request(epoch, wire.namespace):
            refused(wire.ask(request, b""), "stale_epoch")
    assert booked(wire) == before


def test_a_request_whose_deadline_has_passed_is_not_done(wire: Wire) -> None:
    wire.matched(1, TOKENS, reserve=4)
    before = booked(wire)
    for request in every_request(wire.epoch, wire.namespace, deadline_ns=soon(-1)):
        refused(wire.ask(request, b""), "deadline_exceeded")
    assert booked(wire) == before


GARBAGE = {
    "empty": b"",
    "zero": b"\0",
    "text": b"GET / HTTP/1.1\r\n",
    "a number": msgspec.msgpack.encode(7),
    "a list": msgspec.msgpack.encode([1, 2, 3]),
    "no type": msgspec.msgpack.encode({"id": 1}),
    "unknown type": msgspec.msgpack.encode({"type": "reboot", "id": 1}),
    "a reply": msgspec.msgpack.encode({"type": "done", "id": 1, "epoch": 1}),
    "id missing": msgspec.msgpack.encode({"type": "status"}),
    "id negative": msgspec.msgpack.encode({"type": "status", "id": -1}),
    "id too large": msgspec.msgpack.encode({"type": "status", "id": (1 << 64) - 1}),
    "id of text": msgspec.msgpack.encode({"type": "status", "id": "x"}),
    "cut off": encode(StatusRequest(id=1))[:-1],
    "too long": encode(StatusRequest(id=1)) + b"\0",
    "deep": b"\x91" * 100_000,
    "a trace of half a kilobyte": msgspec.msgpack.encode(
        {"type": "status", "id": 1, "trace": "x" * 500}
    ),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_what_cannot_be_read_is_refused(wire: Wire, name: str) -> None:
    wire.matched(1, TOKENS, reserve=4)
    before = booked(wire)
    wire.send(GARBAGE[name])
    refused(wire.receive(), "bad_request")
    assert booked(wire) == before


def test_a_bad_request_is_answered_under_its_id(wire: Wire) -> None:
    wire.send(msgspec.msgpack.encode({"type": "match", "id": 4711, "items": 3}))
    reply = wire.receive()
    assert reply.id == 4711
    assert "items" in refused(reply, "bad_request")


def test_more_frames_than_there_should_be_do_no_harm(wire: Wire) -> None:
    wire.send(encode(StatusRequest(id=5)), b"x", b"", b"y" * 1000)
    assert wire.receive().id == 5


@pytest.mark.parametrize("trace", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_trace_that_is_none_does_no_harm(wire: Wire, trace: str) -> None:
    assert wire.ask(StatusRequest(id=5, trace=trace)).id == 5


def test_a_frame_over_the_bound_ends_its_connection_alone(wire: Wire, connect: Connect) -> None:
    huge = connect()
    huge.attach()
    huge.open("huge")
    huge.send(encode(StatusRequest(id=5)), bytes((1 << 20) + 1))
    assert wire.matched(1, TOKENS).num_tokens == 0
    # Its socket connects again by itself, and is a stranger then.
    eventually(lambda: stranger(huge))


def stranger(wire: Wire) -> bool:
    reply = wire.ask(DetachRequest(**wire.envelope()))
    return isinstance(reply, ErrorReply) and reply.code == "not_attached"


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_number_of_tokens_that_is_not_sent_is_refused(wire: Wire, wrong: int) -> None:
    wire.matched(1, TOKENS, reserve=4)
    before = booked(wire)
    items = (MatchItem(wire.namespace, 2, len(TOKENS) + wrong),)
    refused(wire.ask(MatchRequest(**wire.envelope(), items=items), TOKENS), "bad_request")
    commits = (CommitItem(1, 0, (), len(TOKENS) + wrong),)
    refused(wire.ask(CommitRequest(**wire.envelope(), items=commits), TOKENS), "bad_request")
    assert booked(wire) == before


def test_half_a_token_is_refused(wire: Wire) -> None:
    items = (MatchItem(wire.namespace, 2, 4),)
    refused(wire.ask(MatchRequest(**wire.envelope(), items=items), bytes(15)), "bad_request")
    refused(wire.ask(MatchRequest(**wire.envelope(), items=items)), "bad_request")


def test_a_number_of_tokens_beyond_all_sense_is_refused(wire: Wire) -> None:
    items = tuple(MatchItem(wire.namespace, 2, (1 << 63) - 1) for _ in range(2))
    refused(wire.ask(MatchRequest(**wire.envelope(), items=items), b""), "bad_request")


def test_a_batch_is_bounded(wire: Wire) -> None:
    match = MatchRequest(**wire.envelope(), items=(MatchItem(wire.namespace, 1, 0),) * 33)
    assert "33 items" in refused(wire.ask(match, b""), "limit_exceeded")
    reserve = ReserveRequest(**wire.envelope(), items=(ReserveItem(1, 0, 1),) * 33)
    assert "at most 32" in refused(wire.ask(reserve), "limit_exceeded")
    commit = CommitRequest(**wire.envelope(), items=(CommitItem(1, 0, (), 0),) * 33)
    refused(wire.ask(commit, b""), "limit_exceeded")
    assert wire.me().num_leases == 0


def test_a_batch_of_nothing_is_answered(wire: Wire) -> None:
    assert wire.ask(MatchRequest(**wire.envelope(), items=()), b"") == MatchReply(
        id=wire.next_id, epoch=wire.epoch, results=()
    )


def test_an_unknown_namespace_is_refused(wire: Wire) -> None:
    for namespace in (0, wire.namespace + 1, (1 << 63) - 1):
        wire.namespace, own = namespace, wire.namespace
        failed(wire.match(1, TOKENS), "unknown_namespace")
        wire.namespace = own
    assert wire.me().num_leases == 0


def test_the_namespace_of_another_session_is_unknown(wire: Wire, connect: Connect) -> None:
    other = connect()
    other.attach()
    other.namespace = wire.namespace
    failed(other.match(1, TOKENS), "unknown_namespace")


def test_one_bad_item_does_not_spoil_the_others(wire: Wire) -> None:
    items = tuple(MatchItem(wire.namespace + (i == 1), i + 1, BLOCK) for i in range(3))
    reply = wire.ask(MatchRequest(**wire.envelope(), items=items), TOKENS[: 3 * BLOCK])
    assert isinstance(reply, MatchReply)
    assert [type(result).__name__ for result in reply.results] == [
        "MatchResult",
        "Failure",
        "MatchResult",
    ]


def test_extras_are_refused_where_the_namespace_has_none(wire: Wire) -> None:
    failed(wire.match(1, TOKENS, extras=((3, b"x" * 32),)), "bad_request")
    assert wire.me().num_leases == 0


@pytest.mark.parametrize("fields", [{"group": "g"}, {"keyed": True}])
def test_a_namespace_of_a_kind_that_is_to_come_is_refused(
    wire: Wire, fields: dict[str, Any]
) -> None:
    request = OpenRequest(**wire.envelope(), identity=IDENTITY, layout=LAYOUT, **fields)
    refused(wire.ask(request), "unsupported")


def test_leases_of_a_session_are_bounded(wire: Wire) -> None:
    for lease in range(16):
        wire.matched(lease, TOKENS)
    assert "16 leases" in failed(wire.match(16, TOKENS), "limit_exceeded")
    wire.release(0)
    wire.matched(16, TOKENS)


# --- a lost reply: the same once more ---


def test_a_repeated_match_gets_the_first_answer_and_books_nothing(wire: Wire) -> None:
    wire.store(1, TOKENS)
    longer = TOKENS + tokens_of(2, 2)
    first = wire.matched(2, longer, reserve=2, ahead=3)
    before = booked(wire)
    assert wire.matched(2, longer, reserve=2, ahead=3) == first
    assert first.num_tokens == len(TOKENS)
    assert len(numbers(first.reserved)) == 5
    assert booked(wire) == before


def test_a_match_repeated_after_its_commit_grants_none_of_those_pages_again(wire: Wire) -> None:
    first = wire.matched(1, TOKENS, reserve=4)
    wire.commit(1, 0, first.reserved, TOKENS)
    assert "committed" in failed(wire.match(1, TOKENS, reserve=4), "bad_request")
    assert wire.matched(1, TOKENS).num_tokens == 0


def test_a_repeated_reserve_gets_the_first_answer_and_books_nothing(wire: Wire) -> None:
    wire.matched(1, TOKENS)
    first = wire.reserved(1, 0, 3, ahead=2)
    before = booked(wire)
    assert wire.reserved(1, 0, 3, ahead=2) == first
    assert len(numbers(first)) == 5
    assert booked(wire) == before


def test_a_reserve_repeated_after_the_next_one_gets_the_first_answer(wire: Wire) -> None:
    wire.matched(1, TOKENS)
    first = wire.reserved(1, 0, 3)
    second = wire.reserved(1, 3, 8)
    assert wire.reserved(1, 0, 3) == first
    assert wire.reserved(1, 3, 8) == second
    assert len({*numbers(first), *numbers(second)}) == 8


def test_a_repeated_commit_gets_the_first_answer_and_books_nothing(wire: Wire) -> None:
    runs = wire.matched(1, TOKENS, reserve=4).reserved
    first = wire.commit(1, 0, runs, TOKENS)
    before = booked(wire)
    assert wire.commit(1, 0, runs, TOKENS) == first == CommitResult(runs, 0)
    assert booked(wire) == before


def test_a_repeated_commit_of_duplicates_gets_their_pages(join: Connect) -> None:
    one, two = join(), join()
    mine = two.matched(1, TOKENS, reserve=4).reserved
    theirs = one.store(1, TOKENS)
    first = two.commit(1, 0, mine, TOKENS)
    before = booked(two)
    again = two.commit(1, 0, mine, TOKENS)
    assert isinstance(first, CommitResult)
    assert isinstance(again, CommitResult)
    assert (first.runs, first.num_duplicates) == (theirs, 4)
    assert again.runs == theirs
    assert booked(two) == before


def test_a_match_with_other_tokens_replaces_the_lease(wire: Wire) -> None:
    first = wire.matched(1, TOKENS, reserve=4)
    second = wire.matched(1, tokens_of(2, 4))
    assert (first.slot, first.generation) != (second.slot, second.generation)
    assert booked(wire) | {"leases": 1, "held": 0} == booked(wire)


def test_a_reserve_repeated_after_abort_grants_no_page_of_others(join: Connect) -> None:
    """The reply to a reserve was lost, and the client gave up; then it began anew."""
    one, two = join(), join()
    one.matched(1, TOKENS)
    one.reserved(1, 0, 4)
    one.ask(AbortRequest(**one.envelope(), leases=(1,)))
    two.matched(1, TOKENS)
    theirs = numbers(two.reserved(1, 0, 128))
    again = one.reserve(1, 0, 4)
    granted = numbers(again.runs) if isinstance(again, ReserveResult) else []
    assert not set(granted) & set(theirs)


# --- release and abort ---


def test_a_repeated_release_is_counted_and_changes_nothing(wire: Wire) -> None:
    wire.matched(1, TOKENS, reserve=4)
    assert isinstance(wire.release(1), DoneReply)
    before = booked(wire)
    unknown = wire.status().counters.get("releases_unknown", 0)
    assert isinstance(wire.release(1, 1), DoneReply)
    assert wire.status().counters["releases_unknown"] == unknown + 2
    assert booked(wire) == before


def test_a_release_before_its_match_is_remembered(wire: Wire) -> None:
    wire.release(1)
    failed(wire.match(1, TOKENS, reserve=4), "lease_ended")
    assert booked(wire) | {"leases": 0, "held": 0} == booked(wire)
    wire.matched(2, TOKENS)


def test_what_was_released_cannot_be_used(wire: Wire) -> None:
    runs = wire.matched(1, TOKENS, reserve=4).reserved
    wire.release(1)
    failed(wire.reserve(1, 0, 4), "lease_ended")
    failed(wire.commit(1, 0, runs, TOKENS), "lease_ended")


def test_abort_frees_what_is_not_committed(wire: Wire) -> None:
    runs = numbers(wire.matched(1, TOKENS, reserve=8).reserved)
    wire.commit(1, 0, (Run(runs[0], 4),), TOKENS)
    assert wire.me().num_reserved == 4
    wire.ask(AbortRequest(**wire.envelope(), leases=(1,)))
    wire.ask(AbortRequest(**wire.envelope(), leases=(1, 99)))
    assert (wire.me().num_leases, wire.me().num_reserved) == (1, 0)
    failed(wire.commit(1, 4, (Run(runs[4], 1),), tokens_of(2, 1)), "bad_request")


def test_a_lease_of_another_session_is_not_ones_own(join: Connect) -> None:
    one, two = join(), join()
    one.matched(1, TOKENS, reserve=4)
    two.release(1)
    failed(two.reserve(1, 0, 4), "lease_ended")
    assert one.me().num_leases == 1


def test_close_releases_what_the_namespace_had(wire: Wire) -> None:
    wire.matched(1, TOKENS, reserve=4)
    wire.ask(CloseRequest(**wire.envelope(), namespace=wire.namespace))
    assert (wire.me().num_leases, wire.me().num_reserved) == (0, 0)
    failed(wire.match(2, TOKENS), "unknown_namespace")


def test_close_leaves_the_other_namespaces_of_a_session_alone(wire: Wire) -> None:
    first = wire.namespace
    wire.matched(1, TOKENS, reserve=4)
    wire.open("another")
    wire.ask(CloseRequest(**wire.envelope(), namespace=wire.namespace))
    wire.namespace = first
    assert wire.me().num_reserved == 4
    wire.matched(2, TOKENS)


def test_a_heartbeat_releases_what_it_does_not_list(wire: Wire) -> None:
    for lease in (1, 2, 3):
        wire.matched(lease, TOKENS, reserve=2)
    assert isinstance(wire.ask(HeartbeatRequest(**wire.envelope(), leases=(2, 99))), DoneReply)
    assert (wire.me().num_leases, wire.me().num_reserved) == (1, 2)


def test_detach_ends_leases_and_quarantines_their_pages(wire: Wire) -> None:
    wire.matched(1, TOKENS, reserve=4)
    quarantined = wire.pages().get("quarantined", 0)
    assert isinstance(wire.ask(DetachRequest(**wire.envelope())), DoneReply)
    assert wire.pages()["quarantined"] == quarantined + 4
    refused(wire.release(1), "not_attached")


# --- commit ---


def commit_wrong(wire: Wire, first: int, pages: tuple[Run, ...], tokens: list[int]) -> str:
    """A commit that is refused and changes nothing."""
    before = booked(wire)
    message = failed(wire.commit(1, first, pages, tokens), "bad_request")
    assert booked(wire) == before
    return message


def test_pages_that_are_not_reserved_cannot_be_committed(wire: Wire) -> None:
    wire.matched(1, TOKENS)
    for first in (0, 127, 128, 1 << 40, (1 << 63) - 1):
        commit_wrong(wire, 0, (Run(first, 1),), TOKENS[:BLOCK])


def test_the_pages_of_another_session_cannot_be_committed(join: Connect) -> None:
    one, two = join(), join()
    theirs = two.matched(1, TOKENS, reserve=4).reserved
    one.matched(1, TOKENS, reserve=4)
    commit_wrong(one, 0, theirs, TOKENS)


def test_the_pages_of_another_lease_cannot_be_committed(wire: Wire) -> None:
    other = wire.matched(2, TOKENS, reserve=4).reserved
    wire.matched(1, TOKENS, reserve=4)
    commit_wrong(wire, 0, other, TOKENS)


def test_a_page_cannot_be_committed_twice(wire: Wire) -> None:
    (page, *_) = numbers(wire.matched(1, TOKENS, reserve=4).reserved)
    commit_wrong(wire, 0, (Run(page, 1), Run(page, 1)), TOKENS[: 2 * BLOCK])
    commit_wrong(wire, 0, (Run(page, 2), Run(page + 1, 1)), TOKENS[: 3 * BLOCK])
    wire.commit(1, 0, (Run(page, 1),), TOKENS[:BLOCK])
    commit_wrong(wire, 1, (Run(page, 1),), TOKENS[BLOCK : 2 * BLOCK])


def test_a_gap_in_the_positions_cannot_be_committed(wire: Wire) -> None:
    runs = wire.matched(1, TOKENS, reserve=4).reserved
    for first in (1, 2, 4, (1 << 63) - 1):
        assert "prefix ends at 0" in commit_wrong(wire, first, runs, TOKENS)


def test_other_tokens_than_before_cannot_be_committed(wire: Wire) -> None:
    wire.store(1, TOKENS)
    commit_wrong(wire, 0, wire.reserved(1, 4, 8), tokens_of(2, 4))


@pytest.mark.parametrize("extra", [-1, 1, BLOCK, -BLOCK])
def test_only_whole_blocks_are_committed(wire: Wire, extra: int) -> None:
    runs = wire.matched(1, TOKENS, reserve=4).reserved
    commit_wrong(wire, 0, runs, (TOKENS + tokens_of(2, 1))[: len(TOKENS) + extra])


@pytest.mark.parametrize(
    "pages", [(Run(0, (1 << 63) - 1),), (Run((1 << 63) - 1, (1 << 63) - 1),), (Run(0, 100),) * 100]
)
def test_more_pages_than_there_are_cannot_be_committed(wire: Wire, pages: tuple[Run, ...]) -> None:
    wire.matched(1, TOKENS, reserve=4)
    commit_wrong(wire, 0, pages, TOKENS)


def test_a_commit_of_nothing_does_nothing(wire: Wire) -> None:
    wire.matched(1, TOKENS, reserve=4)
    before = booked(wire)
    assert wire.commit(1, 0, (), []) == CommitResult((), 0)
    failed(wire.commit(1, 0, (Run(5, 0),), []), "bad_request")
    assert booked(wire) == before


@pytest.mark.parametrize(
    "extras",
    [
        ((16, b"x" * 32),),  # behind the tokens
        ((0, b"x" * 32), (0, b"y" * 32)),
        ((0, bytes(32)),),  # which means that there is none
    ],
)
def test_extras_that_say_nothing_of_the_tokens_are_refused(
    wire: Wire, extras: tuple[tuple[int, bytes], ...]
) -> None:
    wire.namespace = wire.open(extras=True)
    runs = wire.matched(1, TOKENS[: 4 * BLOCK], reserve=4).reserved
    item = CommitItem(1, 0, runs, 4 * BLOCK, extras=extras)
    reply = wire.ask(CommitRequest(**wire.envelope(), items=(item,)), TOKENS[: 4 * BLOCK])
    assert isinstance(reply, CommitReply)
    failed(reply.results[0], "bad_request")


# --- reserve ---


def test_a_gap_in_what_was_granted_is_refused(wire: Wire) -> None:
    wire.matched(1, TOKENS)
    failed(wire.reserve(1, 1, 4), "bad_request")
    failed(wire.reserve(1, (1 << 63) - 1, (1 << 63) - 1), "bad_request")
    assert wire.me().num_reserved == 0


def test_more_pages_than_there_are_are_refused_at_once_and_hold_nobody_up(
    wire: Wire, join: Connect
) -> None:
    wire.matched(1, TOKENS)
    request = ReserveRequest(**wire.envelope(), items=(ReserveItem(1, 0, 129),))
    wire.send(encode(request))  # without a deadline
    other = join()
    other.matched(1, TOKENS)
    assert len(numbers(other.reserved(1, 0, 4))) == 4
    reply = wire.receive()
    assert isinstance(reply, ReserveReply)
    assert "129 pages wanted" in failed(reply.results[0], "out_of_pages")


def test_a_reserve_beyond_all_sense_is_refused(wire: Wire) -> None:
    wire.matched(1, TOKENS)
    failed(wire.reserve(1, 0, (1 << 63) - 1, ahead=(1 << 63) - 1), "out_of_pages")
    assert len(numbers(wire.reserved(1, 0, 4, ahead=(1 << 63) - 1))) <= 128
    wire.release(1)


def test_a_shortage_says_how_the_pages_stand(join: Connect) -> None:
    one, two = join(), join()
    one.store(1, TOKENS)
    one.reserved(1, 4, 128)
    two.matched(1, tokens_of(2, 1))
    message = failed(two.reserve(1, 0, 1), "out_of_pages")
    assert message == (
        "1 pages wanted, 0 free; of 128 4 are locked by leases and pins, "
        "124 reserved, 0 quarantined"
    )


def test_a_match_that_falls_short_is_a_lease_with_its_shortage(join: Connect) -> None:
    one, two = join(), join()
    one.store(1, TOKENS)
    one.reserved(1, 4, 128)
    item = MatchItem(two.namespace, 1, len(TOKENS), reserve=1)
    request = MatchRequest(**two.envelope(deadline_ns=soon(0.2)), items=(item,))
    reply = two.ask(request, packed(TOKENS))
    assert isinstance(reply, MatchReply)
    (result,) = reply.results
    assert result.num_tokens == len(TOKENS)  # type: ignore[union-attr]
    assert result.shortage.num_reserved == 124  # type: ignore[union-attr]
    assert two.me().num_leases == 1


def test_a_reserve_is_answered_when_another_releases(join: Connect) -> None:
    one, two = join(), join()
    one.matched(1, TOKENS, reserve=128)
    two.matched(1, TOKENS)
    two.send(encode(ReserveRequest(**two.envelope(), items=(ReserveItem(1, 0, 4),))))
    one.release(1)
    reply = two.receive()
    assert isinstance(reply, ReserveReply)
    assert isinstance(reply.results[0], ReserveResult)


def test_a_reserve_whose_lease_ends_while_it_waits_is_told_so(join: Connect) -> None:
    one, two = join(), join()
    one.matched(1, TOKENS, reserve=128)
    two.matched(1, TOKENS)
    two.send(encode(ReserveRequest(**two.envelope(), items=(ReserveItem(1, 0, 4),))))
    two.send(encode(ReleaseRequest(**two.envelope(), leases=(1,))))
    replies = {type(reply): reply for reply in (two.receive(), two.receive())}
    answer = replies[ReserveReply]
    assert isinstance(answer, ReserveReply)
    failed(answer.results[0], "lease_ended")


# --- who does not behave ---


def test_a_client_that_never_reads_does_not_hinder_others(wire: Wire, connect: Connect) -> None:
    deaf = connect()
    request = encode(StatusRequest(id=1))
    before = wire.status().counters.get("replies_undeliverable", 0)
    for _ in range(4000):
        deaf.send(request)
    wire.store(1, TOKENS)
    eventually(lambda: wire.status().counters.get("replies_undeliverable", 0) > before)
    assert wire.matched(2, TOKENS).num_tokens == len(TOKENS)


def test_a_match_whose_answer_cannot_be_delivered_leaves_no_lease(connect: Connect) -> None:
    deaf, other = connect(), connect()
    deaf.attach()
    deaf.open("deaf")
    frames = [
        encode(MatchRequest(**deaf.envelope(), items=(MatchItem(deaf.namespace, 1, 0),))),
        b"",
    ]
    for _ in range(4000):
        deaf.send(*frames)
    deaf.close()
    eventually(lambda: not other.status().sessions)
    other.attach()


def test_a_client_that_goes_in_the_middle_does_no_harm(wire: Wire, connect: Connect) -> None:
    for _ in range(5):
        hasty = connect()
        hasty.send(encode(StatusRequest(id=1)))
        hasty.close()
    assert wire.matched(1, TOKENS).num_tokens == 0


def test_a_session_without_a_mapping_ends_when_it_falls_silent() -> None:
    sessions = SESSIONS | {"silent_seconds": 0.2}
    with running_daemon(settings(sessions=sessions)) as daemon:
        silent, mapping = Wire(daemon.endpoint), Wire(daemon.endpoint)
        mapping.attach()
        mapping.open()
        silent.attach(maps=False)
        silent.open(maps=False)
        silent.matched(1, TOKENS, reserve=4)
        eventually(lambda: [one.session for one in mapping.status().sessions] == [mapping.session])
        eventually(lambda: mapping.pages().keys() <= {"unbacked", "free"})
        silent.close()
        mapping.close()


def test_status_tells_how_everything_stands(wire: Wire, daemon: RunningDaemon) -> None:
    wire.store(1, TOKENS)
    wire.reserved(1, 4, 6)
    status = wire.status()
    assert (status.pid, status.endpoint) == (daemon.pid, daemon.endpoint)
    tier, *_ = status.tiers
    assert (tier.name, tier.capacity_bytes) == ("host", capacity_of(128))
    num_pages = sum(tier.pages.values())
    assert num_pages >= 128  # where a test had extras, there is an arena for those too
    assert tier.backed_bytes == (num_pages - tier.pages["unbacked"]) * LAYOUT.page_bytes
    (space,) = (one for one in status.namespaces if one.namespace == wire.namespace)
    assert (space.model, space.num_blocks, space.num_nodes) == ("model", 4, 1)
    assert (wire.me().num_leases, wire.me().num_reserved, wire.me().maps) == (1, 2, True)


def test_operators_ask_without_a_session(connect: Connect) -> None:
    wire = connect()
    assert isinstance(wire.ask(CheckpointRequest(id=1)), CheckpointReply)
    last = wire.ask(VerifyRequest(id=2))
    begun = wire.ask(VerifyRequest(id=3, start=True))
    assert isinstance(last, VerifyReply)
    assert isinstance(begun, VerifyReply)
    assert (last.tiers, last.is_done, begun.is_done) == ((), True, False)
