"""Frames: every message there and back, what is refused, and the golden frames.

The golden frames of a released version decode for ever, and those of the spoken version are what
is sent, byte by byte. After a raise of PROTOCOL_VERSION write its frames with

    KVD_WRITE_GOLDEN=1 pytest tests/protocol/test_codec.py

which makes the file that is missing and never touches one that is there.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from kvd.protocol.messages import (
    PROTOCOL_VERSION,
    AnyReply,
    AnyRequest,
    CommitItem,
    CommitRequest,
    DetachRequest,
    Failure,
    HeartbeatRequest,
    MatchItem,
    MatchRequest,
    OpenRequest,
    ReserveItem,
    ReserveReply,
    ReserveRequest,
    ReserveResult,
    Run,
)
from tests.protocol.samples import REPLIES, REQUESTS, has_all, plain, sample

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_TOKENS = [0, 1, 151_643, (1 << 32) - 1]
SAMPLES = [sample(kind) for kind in (*REQUESTS, *REPLIES)]


def write_golden(path: Path) -> None:
    frames = {type(message).__name__: encode(message).hex() for message in SAMPLES}
    tokens = pack_tokens(GOLDEN_TOKENS).hex()
    golden = {"version": PROTOCOL_VERSION, "frames": frames, "tokens": tokens}
    path.write_text(json.dumps(golden, indent=1) + "\n")


SPOKEN = GOLDEN / f"v{PROTOCOL_VERSION}.json"
if os.environ.get("KVD_WRITE_GOLDEN") and not SPOKEN.exists():
    write_golden(SPOKEN)
assert SPOKEN.exists(), f"{SPOKEN.name} is missing: see above"

RELEASED = {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("v*.json"))}


def frames_of(*versions: str) -> pytest.MarkDecorator:
    frames = [
        pytest.param(name, bytes.fromhex(frame), id=f"{version}-{name}")
        for version in versions
        for name, frame in RELEASED[version]["frames"].items()
    ]
    return pytest.mark.parametrize(("name", "frame"), frames)


def read(name: str, frame: bytes) -> AnyRequest | AnyReply:
    """The message of that name, as its class is called."""
    message = decode_request(frame) if name.endswith("Request") else decode_reply(frame)
    assert type(message).__name__ == name
    return message


def decode(frame: bytes, like: object) -> AnyRequest | AnyReply:
    return read(type(like).__name__, frame)


def each(messages: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("message", messages, ids=lambda one: type(one).__name__)


# --- golden frames ---


@frames_of(*RELEASED)
def test_a_golden_frame_decodes_for_ever(name: str, frame: bytes) -> None:
    assert has_all(plain(read(name, frame)), msgspec.msgpack.decode(frame))


@frames_of(*RELEASED)
def test_a_field_of_a_newer_peer_is_ignored(name: str, frame: bytes) -> None:
    fields = msgspec.msgpack.decode(frame)
    newer = msgspec.msgpack.encode(fields | {"from_a_newer_version": {"deep": [1, {"er": b"x"}]}})
    assert read(name, newer) == read(name, frame)


@pytest.mark.parametrize("version", RELEASED)
def test_golden_tokens_are_little_endian_words(version: str) -> None:
    frame = bytes.fromhex(RELEASED[version]["tokens"])
    assert np.frombuffer(frame, "<u4").tolist() == GOLDEN_TOKENS
    assert pack_tokens(GOLDEN_TOKENS) == frame


def test_every_version_has_golden_frames() -> None:
    assert RELEASED.keys() == {f"v{version}" for version in range(1, PROTOCOL_VERSION + 1)}


@frames_of(SPOKEN.stem)
def test_a_frame_of_the_spoken_version_is_what_is_sent(name: str, frame: bytes) -> None:
    assert encode(read(name, frame)) == frame


@each(SAMPLES)
def test_the_spoken_version_has_a_golden_frame_that_sets_every_field(message: Any) -> None:
    frame = RELEASED[SPOKEN.stem]["frames"][type(message).__name__]
    golden = decode(bytes.fromhex(frame), message)
    values = msgspec.structs.asdict(golden).values()
    parts = [part for value in values if isinstance(value, tuple) for part in value]
    for one in [golden, *parts]:
        if isinstance(one, msgspec.Struct):
            defaults = {f.name: f.default for f in msgspec.structs.fields(one)}
            assert [name for name, value in defaults.items() if getattr(one, name) == value] == []


# --- there and back ---


@each(SAMPLES)
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
    [pytest.param(m, n, id=f"{type(m).__name__}-{n}") for m in SAMPLES for n in required(m)],
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
        for m in SAMPLES
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
    good = msgspec.msgpack.decode(encode(SAMPLES[0]))
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
    (message,) = [one for one in SAMPLES if isinstance(one, OpenRequest)]
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


@given(st.sampled_from(SAMPLES), st.integers(0, 10_000), st.binary(max_size=6))
def test_a_damaged_frame_is_read_or_refused(message: Any, place: int, damage: bytes) -> None:
    frame = bytearray(encode(message))
    place %= len(frame)
    frame[place : place + len(damage)] = damage
    reads_or_refuses(bytes(frame))


@each(SAMPLES)
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
