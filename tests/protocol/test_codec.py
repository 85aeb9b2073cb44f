"""Frames: every message there and back, what is refused, and the golden frames.

The golden frames of a released version decode for ever. After a raise of PROTOCOL_VERSION add its
messages to GOLDEN below and write their frames with

    KVD_WRITE_GOLDEN=1 pytest tests/protocol/test_codec.py

which makes the files that are missing and never touches one that is there.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.protocol.codec import (
    decode_reply,
    decode_request,
    encode,
    failure,
    pack_tokens,
    request_id,
)
from kvd.protocol.errors import ERRORS, BadRequest, KvdError, OutOfPages, error_from_wire
from kvd.protocol.keys import Identity
from kvd.protocol.layout import Layout
from kvd.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AnyReply,
    AnyRequest,
    AttachReply,
    AttachRequest,
    CloseRequest,
    CommitItem,
    CommitReply,
    CommitRequest,
    CommitResult,
    DetachRequest,
    DoneReply,
    ErrorReply,
    Failure,
    HeartbeatRequest,
    MatchItem,
    MatchReply,
    MatchRequest,
    MatchResult,
    NamespaceStatus,
    OpenReply,
    OpenRequest,
    ReleaseRequest,
    ReserveItem,
    ReserveReply,
    ReserveRequest,
    ReserveResult,
    Run,
    SessionStatus,
    Shortage,
    StatusReply,
    StatusRequest,
    TierStatus,
)

HERE = Path(__file__).parent

ASKED: dict[str, Any] = {
    "id": 7,
    "epoch": (1 << 63) - 1,
    "deadline_ns": 123_456_789_012,
    "trace": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}
ANSWERED = {"id": 7, "epoch": 3}
EXTRAS = ((16, bytes(range(32))), (17, bytes(32)))
FAILURE = Failure("out_of_pages", "no pages", {"num_free": 3, "arena": "host"})
IDENTITY = Identity("llama", "sha256:00ff", "lora", 1, 2, "yarn-4")
LAYOUT = Layout(32, 8, 128, "bfloat16", block_size=32, num_planes=1, order="layer_first")

# Every message of a version with every field set. What is here stays as it is.
GOLDEN: dict[int, list[AnyRequest | AnyReply]] = {
    1: [
        AttachRequest(
            version=1, min_version=1, client="kvd_infer", pid=4711, previous="s-1", **ASKED
        ),
        HeartbeatRequest(leases=(1, 2, 1 << 40), **ASKED),
        DetachRequest(**ASKED),
        OpenRequest(
            identity=IDENTITY,
            layout=LAYOUT,
            salt="tenant",
            maps=False,
            group="llama",
            keyed=True,
            **ASKED,
        ),
        CloseRequest(namespace=3, **ASKED),
        MatchRequest(
            items=(
                MatchItem(
                    namespace=1,
                    lease=2,
                    num_tokens=4096,
                    reserve=16,
                    ahead=15,
                    exact_tail=True,
                    extras=EXTRAS,
                ),
            ),
            **ASKED,
        ),
        ReserveRequest(items=(ReserveItem(lease=2, start=16, stop=32, ahead=4),), **ASKED),
        CommitRequest(items=(CommitItem(2, 4, (Run(64, 2), Run(5, 1)), 48, EXTRAS),), **ASKED),
        AbortRequest(leases=(2,), **ASKED),
        ReleaseRequest(leases=(2, 3), **ASKED),
        StatusRequest(**ASKED),
        ErrorReply(code="stale_epoch", message="of before", details={"epoch": 2}, **ANSWERED),
        DoneReply(**ANSWERED),
        AttachReply(
            version=1,
            session="s-2",
            heartbeat_seconds=2.5,
            max_request_bytes=1 << 26,
            header_path="/dev/shm/kvd/header",
            lock_path="/dev/shm/kvd/s-2.lock",
            **ANSWERED,
        ),
        OpenReply(namespace=3, arena_path="/dev/shm/kvd/arena-0", num_pages=1 << 20, **ANSWERED),
        MatchReply(
            results=(
                MatchResult(
                    48,
                    (Run(64, 2), Run(5, 1)),
                    12,
                    9,
                    (Run(80, 16),),
                    Shortage(16, 1, 2, 3, 4, 64),
                    {"host": 32, "lmdb": 16},
                ),
                FAILURE,
            ),
            **ANSWERED,
        ),
        ReserveReply(results=(ReserveResult((Run(80, 16),)), FAILURE), **ANSWERED),
        CommitReply(results=(CommitResult((Run(80, 3),), 1), FAILURE), **ANSWERED),
        StatusReply(
            version="0.1.0",
            pid=1,
            endpoint="ipc:///run/kvd.sock",
            uptime_seconds=1.5,
            tiers=(TierStatus("host", 1 << 32, 1 << 30, {"free": 1, "committed": 2}),),
            namespaces=(NamespaceStatus(1, "llama", "sha256:00ff", "tenant", 16, 4096, 5, 2),),
            sessions=(SessionStatus("s-2", "kvd_infer", 4711, True, 0.5, 3, 16),),
            counters={"matches": 12},
            **ANSWERED,
        ),
    ],
}
GOLDEN_TOKENS = [0, 1, 151_643, (1 << 32) - 1]
NEWEST = GOLDEN[max(GOLDEN)]
REQUESTS = [one for one in NEWEST if isinstance(one, get_args(AnyRequest))]
REPLIES = [one for one in NEWEST if isinstance(one, get_args(AnyReply))]


def golden_path(version: int) -> Path:
    return HERE / f"golden/v{version}.json"


def write_golden(version: int) -> None:
    frames = {type(message).__name__: encode(message).hex() for message in GOLDEN[version]}
    tokens = pack_tokens(GOLDEN_TOKENS).hex()
    text = json.dumps({"version": version, "frames": frames, "tokens": tokens}, indent=1)
    golden_path(version).write_text(text + "\n")


if os.environ.get("KVD_WRITE_GOLDEN"):
    for missing in GOLDEN:
        if not golden_path(missing).exists():
            write_golden(missing)


def golden_frames() -> list[Any]:
    return [
        pytest.param(
            bytes.fromhex(frames["frames"][type(message).__name__]),
            message,
            id=f"v{version}-{type(message).__name__}",
        )
        for version, messages in GOLDEN.items()
        if (frames := json.loads(golden_path(version).read_text()))
        for message in messages
    ]


def decode(frame: bytes, like: object) -> AnyRequest | AnyReply:
    return decode_request(frame) if isinstance(like, get_args(AnyRequest)) else decode_reply(frame)


def each(messages: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("message", messages, ids=lambda one: type(one).__name__)


# --- golden frames ---


@pytest.mark.parametrize(("frame", "message"), golden_frames())
def test_a_golden_frame_decodes_for_ever(frame: bytes, message: AnyRequest | AnyReply) -> None:
    assert decode(frame, message) == message


@pytest.mark.parametrize(("frame", "message"), golden_frames())
def test_a_field_of_a_newer_peer_is_ignored(frame: bytes, message: Any) -> None:
    fields = msgspec.msgpack.decode(frame)
    newer = msgspec.msgpack.encode(fields | {"from_a_newer_version": {"deep": [1, {"er": b"x"}]}})
    assert decode(newer, message) == message


@pytest.mark.parametrize("version", GOLDEN)
def test_golden_tokens_are_little_endian_words(version: int) -> None:
    frame = bytes.fromhex(json.loads(golden_path(version).read_text())["tokens"])
    assert np.frombuffer(frame, "<u4").tolist() == GOLDEN_TOKENS
    assert pack_tokens(GOLDEN_TOKENS) == frame


def test_the_spoken_version_has_golden_frames() -> None:
    assert PROTOCOL_VERSION in GOLDEN
    assert sorted(GOLDEN) == list(range(1, PROTOCOL_VERSION + 1))


@pytest.mark.parametrize("kind", [*get_args(AnyRequest), *get_args(AnyReply)])
def test_a_golden_message_sets_every_field(kind: type[msgspec.Struct]) -> None:
    (message,) = [one for one in NEWEST if type(one) is kind]
    values = msgspec.structs.asdict(message)
    parts = [part for value in values.values() if isinstance(value, tuple) for part in value]
    for one in [message, *parts]:
        if isinstance(one, msgspec.Struct):
            defaults = {f.name: f.default for f in msgspec.structs.fields(one)}
            assert [name for name, value in defaults.items() if getattr(one, name) == value] == []


# --- there and back ---


@each(NEWEST)
def test_a_message_comes_back_as_it_was_sent(message: Any) -> None:
    assert decode(encode(message), message) == message


numbers = st.integers(0, (1 << 63) - 1)
runs = st.lists(st.builds(Run, numbers, numbers)).map(tuple)
extras = st.lists(st.tuples(numbers, st.binary(min_size=32, max_size=32)), max_size=3).map(tuple)
match_items = st.builds(
    MatchItem, numbers, numbers, numbers, numbers, numbers, st.booleans(), extras
)
commit_items = st.builds(CommitItem, numbers, numbers, runs, numbers, extras)
reserve_items = st.builds(ReserveItem, numbers, numbers, numbers, numbers)


def batches(kind: Any, items: Any) -> Any:
    envelope = {
        "id": numbers,
        "epoch": numbers,
        "deadline_ns": numbers,
        "trace": st.text(max_size=32),
    }
    return st.builds(kind, items=st.lists(items, max_size=4).map(tuple), **envelope)


@given(
    batches(MatchRequest, match_items)
    | batches(CommitRequest, commit_items)
    | batches(ReserveRequest, reserve_items)
)
def test_any_batch_comes_back_as_it_was_sent(message: AnyRequest) -> None:
    assert decode_request(encode(message)) == message


def test_what_has_its_default_takes_no_room() -> None:
    frame = msgspec.msgpack.decode(encode(DetachRequest(id=1)))
    assert frame == {"type": "detach", "id": 1}


# --- what cannot be read ---


def required(message: msgspec.Struct) -> list[str]:
    return [f.name for f in msgspec.structs.fields(message) if f.required]


@pytest.mark.parametrize(
    ("message", "name"),
    [pytest.param(m, n, id=f"{type(m).__name__}-{n}") for m in NEWEST for n in required(m)],
)
def test_a_missing_field_is_named(message: Any, name: str) -> None:
    fields = msgspec.msgpack.decode(encode(message))
    del fields[name]
    with pytest.raises(BadRequest, match=name):
        decode(msgspec.msgpack.encode(fields), message)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        pytest.param(m, f.name, id=f"{type(m).__name__}-{f.name}")
        for m in NEWEST
        for f in msgspec.structs.fields(m)
    ],
)
def test_a_field_of_the_wrong_type_is_named(message: Any, name: str) -> None:
    fields = msgspec.msgpack.decode(encode(message)) | {name: [{}]}
    with pytest.raises(BadRequest, match=name):
        decode(msgspec.msgpack.encode(fields), message)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"id": -1}, "id"),
        ({"id": 1 << 63}, "id"),
        ({"id": True}, "id"),
        ({"epoch": -1}, "epoch"),
        ({"trace": "x" * 129}, "trace"),
        ({"client": "x" * 257}, "client"),
        ({"previous": "x" * 65}, "previous"),
        ({"pid": "4711"}, "pid"),
    ],
)
def test_a_value_out_of_bounds_is_named(fields: dict[str, Any], name: str) -> None:
    good = msgspec.msgpack.decode(encode(NEWEST[0]))
    with pytest.raises(BadRequest, match=name):
        decode_request(msgspec.msgpack.encode(good | fields))


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"extras": [[0, bytes(31)]]}, "extras"),
        ({"extras": [[-1, bytes(32)]]}, "extras"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"reserve": 1.5}, "reserve"),
    ],
)
def test_a_wrong_value_inside_an_item_is_named(item: dict[str, Any], name: str) -> None:
    fields = {"namespace": 1, "lease": 1, "num_tokens": 1} | item
    request = {"type": "match", "id": 1, "items": [fields]}
    with pytest.raises(BadRequest, match=name):
        decode_request(msgspec.msgpack.encode(request))


@pytest.mark.parametrize("part", ["identity", "layout"])
def test_an_unknown_field_of_an_identity_is_refused(part: str) -> None:
    """It says that the KV is another one, so it cannot be ignored."""
    (message,) = [one for one in NEWEST if isinstance(one, OpenRequest)]
    fields = msgspec.msgpack.decode(encode(message))
    fields[part]["quantised"] = True
    with pytest.raises(BadRequest, match="quantised"):
        decode_request(msgspec.msgpack.encode(fields))


def test_a_request_is_no_reply() -> None:
    with pytest.raises(BadRequest, match="heartbeat"):
        decode_reply(encode(HeartbeatRequest(id=1, leases=())))


def reads_or_refuses(frame: bytes) -> None:
    assert isinstance(request_id(frame), int)
    for read in (decode_request, decode_reply):
        with suppress(BadRequest):
            read(frame)


@given(st.binary(max_size=200))
def test_random_bytes_are_read_or_refused(frame: bytes) -> None:
    reads_or_refuses(frame)


@given(st.sampled_from(NEWEST), st.integers(0, 10_000), st.binary(max_size=6))
def test_a_damaged_frame_is_read_or_refused(message: Any, place: int, damage: bytes) -> None:
    frame = bytearray(encode(message))
    place %= len(frame)
    frame[place : place + len(damage)] = damage
    reads_or_refuses(bytes(frame))


@each(NEWEST)
def test_a_frame_that_ends_early_is_refused(message: Any) -> None:
    frame = encode(message)
    for end in range(len(frame)):
        with pytest.raises(BadRequest):
            decode(frame[:end], message)


@pytest.mark.parametrize("inside", [b"\xa7details", b"\xa7unknown"])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"])
def test_deep_nesting_is_refused(inside: bytes, opening: bytes) -> None:
    start = b"\x86\xa4type\xa5error\xa2id\x01\xa5epoch\x01\xa4code\xa1c\xa7message\xa1m"
    frame = start + inside + opening * 1_000_000 + b"\xc0"
    with pytest.raises(BadRequest):
        decode_reply(frame)
    assert request_id(frame) == 0


@pytest.mark.parametrize("opening", [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff"])
def test_a_claim_of_many_items_takes_no_memory(opening: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_request(b"\x83\xa4type\xa5match\xa2id\x01\xa5items" + opening)


def test_the_id_of_a_request_is_found_when_nothing_else_can_be_read() -> None:
    assert request_id(msgspec.msgpack.encode({"type": "from_the_future", "id": 42})) == 42
    assert request_id(msgspec.msgpack.encode({"type": "match", "items": 5})) == 0
    assert request_id(b"") == 0


# --- tokens ---


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_tokens_come_back_as_they_were_packed(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert np.frombuffer(packed, "<u4").tolist() == tokens
    assert pack_tokens(packed) == packed
    assert pack_tokens(np.array(tokens, ">i8")) == packed


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [1 << 32],
        [1 << 64],
        [1 << 63, -1],
        [10**400],
        [1.0],
        [True],
        ["1"],
        [None],
        [[1, 2]],
        [[1, 2], [3]],
        "12",
        5,
        None,
        {1, 2},
        np.array([1.5]),
    ],
    ids=repr,
)
def test_what_is_no_list_of_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(BadRequest):
        pack_tokens(tokens)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_bytes_that_are_no_whole_tokens_are_refused(length: int) -> None:
    with pytest.raises(BadRequest, match=str(length)):
        pack_tokens(bytes(length))


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_every_kind_of_bytes_means_packed_tokens(kind: Any) -> None:
    packed = pack_tokens([1, 2, 3])
    assert pack_tokens(kind(packed)) == packed


# --- errors by wire ---


@pytest.mark.parametrize("kind", ERRORS.values())
def test_an_error_is_itself_again_behind_the_wire(kind: type[KvdError]) -> None:
    reply = ReserveReply(id=1, epoch=1, results=(failure(kind("why", num_free=3)),))
    received = decode_reply(encode(reply))
    assert isinstance(received, ReserveReply)
    (failed,) = received.results
    assert isinstance(failed, Failure)
    error = error_from_wire(failed.code, failed.message, failed.details)
    assert type(error) is kind
    assert (error.message, error.details) == ("why", {"num_free": 3})


def test_a_failure_stands_in_the_place_of_its_item() -> None:
    results = (ReserveResult(()), failure(OutOfPages("none")), ReserveResult((Run(0, 1),)))
    reply = decode_reply(encode(ReserveReply(id=1, epoch=1, results=results)))
    assert isinstance(reply, ReserveReply)
    assert [isinstance(one, Failure) for one in reply.results] == [False, True, False]
