"""The unions are whole and can grow: both ends are upgraded one after the other."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from kvd.protocol import messages
from kvd.protocol.messages import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AnyReply,
    AnyRequest,
    MatchItem,
    Reply,
    Request,
    Run,
)

# What version 1 required. A field that comes later has a default, so this list never grows.
REQUIRED_IN_REQUESTS = {
    "attach": {"id", "version", "min_version"},
    "heartbeat": {"id", "leases"},
    "detach": {"id"},
    "open": {"id", "identity", "layout"},
    "close": {"id", "namespace"},
    "match": {"id", "items"},
    "reserve": {"id", "items"},
    "commit": {"id", "items"},
    "abort": {"id", "leases"},
    "release": {"id", "leases"},
    "status": {"id"},
}


def tag(kind: type[msgspec.Struct]) -> object:
    return kind.__struct_config__.tag


@pytest.mark.parametrize(("base", "union"), [(Request, AnyRequest), (Reply, AnyReply)])
def test_every_message_is_in_its_union(base: type, union: object) -> None:
    defined = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }
    assert defined == set(get_args(union))


@pytest.mark.parametrize("union", [AnyRequest, AnyReply])
def test_every_message_has_its_own_tag(union: object) -> None:
    tags = [tag(kind) for kind in get_args(union)]
    assert len(set(tags)) == len(tags)


def test_a_request_requires_what_version_1_required() -> None:
    required = {
        tag(kind): {field.name for field in msgspec.structs.fields(kind) if field.required}
        for kind in get_args(AnyRequest)
    }
    assert {name: required[name] for name in REQUIRED_IN_REQUESTS} == REQUIRED_IN_REQUESTS


@pytest.mark.parametrize("kind", [*get_args(AnyRequest), *get_args(AnyReply), MatchItem, Run])
def test_a_message_cannot_be_changed(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen


@pytest.mark.parametrize("kind", [*get_args(AnyRequest), *get_args(AnyReply)])
def test_a_message_tolerates_fields_of_a_newer_peer(kind: type[msgspec.Struct]) -> None:
    assert not kind.__struct_config__.forbid_unknown_fields


def test_a_run_travels_as_two_numbers() -> None:
    assert msgspec.msgpack.encode(Run(5, 3)) == b"\x92\x05\x03"


def test_this_version_and_the_one_before_are_spoken() -> None:
    assert 1 <= MIN_PROTOCOL_VERSION <= PROTOCOL_VERSION <= MIN_PROTOCOL_VERSION + 1
