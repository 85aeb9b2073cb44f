"""Events: what kvd publishes of the blocks that come to its tiers and leave them.

The schema is vLLM's, since routers understand it: a batch is `[time, events, 0]`, an event a map
with its name as `type`, or in the encoding of before June 2026 an array that begins with its name.
A batch travels as three frames: topic, its number as 8 bytes, big-endian, and the msgpack payload.

`epoch` is ours, for consumers ignore keys that they do not know: the daemon's start, by which a
restart is seen wherever the batch before it was lost. Arrays have no place for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import astuple

from kvd.protocol.keys import KEY_BYTES

TOPIC_PREFIX = "kv@"
SEQ_BYTES = 8
# Behind the last batch that a replay sends stands this one: no topic, number -1, no payload.
END_OF_REPLAY = (b"", b"\xff" * SEQ_BYTES, b"")

Encoding: TypeAlias = Literal["map", "array"]


class BlockStored(Struct, tag=True, frozen=True, omit_defaults=True):
    """A medium has these blocks from now on: consecutive ones, behind `parent_block_hash`.

    It has that one already, unless it is None. `token_ids` are those of all of them. `extra_keys`
    say for each what else tells it from another: adapter, images with their offset, salt.
    """

    num_positional: ClassVar[int] = 8

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    locality: str | None = None
    ownership: str | None = None
    epoch: int = 0


class BlockRemoved(Struct, tag=True, frozen=True, omit_defaults=True):
    """A medium has these blocks no more."""

    num_positional: ClassVar[int] = 2

    block_hashes: list[int]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None
    epoch: int = 0


class AllBlocksCleared(Struct, tag=True, frozen=True, omit_defaults=True):
    """Nothing of what this instance told before counts any more, in any medium, of any model."""

    num_positional: ClassVar[int] = 0

    epoch: int = 0


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}


def topic(instance: str, model: str) -> str:
    """`kv@instance@model`, which routers split at each @: in names it is written %40."""
    return TOPIC_PREFIX + "@".join(name.replace("@", "%40") for name in (instance, model))


def hashes_of(keys: bytes) -> list[int]:
    """What events call blocks, by their keys: the last 8 bytes, never 0, which means no block."""
    words = np.frombuffer(keys, ">u8")
    return [number or 1 for number in words[KEY_BYTES // 8 - 1 :: KEY_BYTES // 8].tolist()]


def encode_batch(seconds: float, events: Sequence[Event], encoding: Encoding) -> bytes:
    """A payload, of Unix time `seconds`."""
    body = events if encoding == "map" else [_positional(event) for event in events]
    return msgspec.msgpack.encode((seconds, body, 0))


def decode_batch(payload: bytes) -> tuple[float, list[Event]]:
    """Time and events of a payload in either encoding; raises msgspec.MsgspecError."""
    seconds, events, _ = msgspec.msgpack.decode(payload, type=tuple[float, list[Any], Any])
    return seconds, [_event(event) for event in events]


def _positional(event: Event) -> list[Any]:
    return [type(event).__name__, *astuple(event)[: event.num_positional]]


def _event(raw: Any) -> Event:
    if isinstance(raw, list):
        name, *values = raw
        fields = _KINDS[name].__struct_fields__ if name in _KINDS else ()
        raw = {"type": name} | dict(zip(fields, values, strict=False))
    event: Event = msgspec.convert(raw, Event)
    return event
