"""What a hostile client says: messages of the union, well formed and meaning harm, and broken ones.

All of it is made from the types of the messages, so that a new verb is tried from its first day,
and from one Random, so that a seed brings it again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import inspect
from msgspec.msgpack import encode as pack

from kvd.protocol.messages import Run
from tests.e2e.support import BLOCK
from tests.protocol.samples import REPLIES, REQUESTS

if TYPE_CHECKING:
    from random import Random

_type_info = cache(inspect.type_info)

EDGES = [0, 1, 1 << 31, 1 << 32, 1 << 53, 1 << 62, 1 << 63]
NUMBERS = [edge + step for edge in EDGES for step in (-1, 0, 1)] + [-(1 << 63), (1 << 64) - 1]
NEITHER: list[Any] = [
    None,
    True,
    "",
    "\0",
    "x" * 5000,
    b"",
    bytes(32),
    1.5,
    float("nan"),
    [],
    [[]],
    {},
    {"": 0},
]
MANY = [2, 40, 1000, 20_000]
MAX_TOKENS = 100_000
DEPTH = 100
WORST_FRAMES = [b"", b"\xc0", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\x81" * 1000]


class Facts:
    """What stood under a name in what was heard: the newest values of each."""

    def __init__(self) -> None:
        self._values: dict[str, deque[Any]] = defaultdict(lambda: deque(maxlen=32))

    def learn(self, **values: Any) -> None:
        for name, value in values.items():
            self._values[name].append(value)

    def read(self, value: Any) -> None:
        """Learn every field of a reply and of its parts."""
        if isinstance(value, msgspec.Struct):
            fields = msgspec.structs.asdict(value)
            unlearnt = dict | msgspec.UnsetType
            self.learn(**{k: one for k, one in fields.items() if not isinstance(one, unlearnt)})
            value = tuple(fields.values())
        if isinstance(value, tuple):
            if value and isinstance(value[0], Run):
                self.learn(pages=value)
            for one in value:
                self.read(one)

    def guess(self, rng: Random, name: str) -> list[Any]:
        """One of the values of that name, if there are any and they shall be used."""
        known = self._values.get(name)
        return [rng.choice(known)] if known and rng.random() < 0.97 else []


class Hostile:
    """Makes messages out of a Random, its own invention and the facts it was told."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.facts = Facts()

    def request(self) -> list[bytes]:
        """The frames of a request: as it should be, or with something wrong in it."""
        return self._frames(self._message(self.rng.choices(REQUESTS, _WEIGHTS)[0]))

    def reply(self) -> bytes:
        return self._frames(self._message(self.rng.choice(REPLIES)))[0]

    # --- messages ---

    def _message(self, kind: type[msgspec.Struct]) -> Any:
        message = self._struct(_type_info(kind))
        for _ in range(self.rng.choice([0, 0, 0, 1, 2])):
            self._twist(message)
        return message

    def _struct(self, info: Any) -> Any:
        values = {
            field.encode_name: self._field(field)
            for field in info.fields
            if field.required or self._is_likely(field.encode_name)
        }
        if {"pages", "num_tokens"} <= values.keys() and self.rng.random() < 0.8:
            values["num_tokens"] = BLOCK * sum(count for _, count in values["pages"])
        if info.array_like:
            return list(values.values())
        return {info.tag_field: info.tag} | values if info.tag_field else values

    def _field(self, field: inspect.Field) -> Any:
        for known in self.facts.guess(self.rng, field.encode_name):
            return msgspec.to_builtins(known, builtin_types=(bytes,))
        return self._value(field.type)

    def _is_likely(self, name: str) -> bool:
        return self.rng.random() < (0.9 if self.facts.guess(self.rng, name) else 0.1)

    def _value(self, info: Any) -> Any:
        """A value that the type allows."""
        match info:
            case inspect.IntType():
                low = info.ge or 0
                return self.rng.randint(low, min(low + 8, low + 8 if info.le is None else info.le))
            case inspect.StrType():
                return self.rng.choice(["", "a", "b"])
            case inspect.BytesType():
                return self.rng.randbytes(info.min_length or 4)
            case inspect.BoolType():
                return self.rng.random() < 0.5
            case inspect.FloatType():
                return self.rng.choice([0.0, 1.0, 1e300, float("inf"), float("nan")])
            case inspect.LiteralType():
                return self.rng.choice(info.values)
            case inspect.DictType():
                return {"a": self._value(info.value_type)}
            case inspect.TupleType():
                return [self._value(one) for one in info.item_types]
            case inspect.VarTupleType():
                return [
                    self._value(info.item_type) for _ in range(self.rng.choice([0, 1, 1, 2, 5]))
                ]
            case inspect.UnionType():
                return self._value(self.rng.choice(info.types))
            case inspect.StructType():
                return self._struct(info)
        return self.rng.choice(NEITHER)

    def _twist(self, message: Any) -> None:
        """Put one thing wrong, anywhere in a message."""
        inside, key = self._place(message)
        match self.rng.randrange(6):
            case 0 | 1:
                inside[key] = self.rng.choice(NUMBERS)
            case 2:
                inside[key] = self.rng.choice(NEITHER)
            case 3:
                del inside[key]
            case 4:
                many = inside[key] if isinstance(inside[key], list) else [inside[key]]
                inside[key] = many * (self.rng.choice(MANY) // max(1, len(many)))
            case 5:
                for _ in range(self.rng.randrange(DEPTH)):
                    inside[key] = [inside[key]]

    def _place(self, message: Any) -> tuple[Any, Any]:
        """Some place in a message: what it is in and its key there."""
        inside, key = message, self.rng.choice(_keys(message))
        while self.rng.random() < 0.8 and (keys := _keys(inside[key])):
            inside, key = inside[key], self.rng.choice(keys)
        return inside, key

    # --- frames ---

    def _frames(self, message: Any) -> list[bytes]:
        frames = [pack(message), *self._tokens(message)]
        match self.rng.randrange(20):
            case 0:
                frames[0] = self._damaged(frames[0])
            case 1:
                frames[-1] = self._damaged(frames[-1])
            case 2:
                frames += [bytes(self.rng.choice([0, 7, 1000]))] * self.rng.randrange(9)
            case 3:
                frames = frames[1:] or [b""]
            case 4:
                frames[0] = self.rng.choice(WORST_FRAMES)
        return frames

    def _tokens(self, message: Any) -> list[bytes]:
        """The tokens that the message announces, as far as that can be, of one of few sequences."""
        items = message.get("items")
        counts = [
            item["num_tokens"]
            for item in (items if isinstance(items, list) else [])
            if isinstance(item, dict) and "num_tokens" in item
        ]
        if not counts:
            return []
        num_tokens = sum(count for count in counts if isinstance(count, int) and count > 0)
        first = self.rng.randrange(3) * MAX_TOKENS
        return [np.arange(first, first + min(num_tokens, MAX_TOKENS), dtype="<u4").tobytes()]

    def _damaged(self, frame: bytes) -> bytes:
        """A frame that ends early, has something more in it, or something else."""
        place, noise = self.rng.randrange(len(frame) + 1), self.rng.randbytes(self.rng.randrange(9))
        before, behind = frame[:place], frame[place:]
        return self.rng.choice(
            [before, before + noise + behind, before + noise + behind[len(noise) :]]
        )


def _keys(value: Any) -> list[Any]:
    if isinstance(value, list):
        return list(range(len(value)))
    return list(value) if isinstance(value, dict) else []


# What ends a session, or much of it, comes seldom: else nothing would last long enough.
_WEIGHTS = [5 if {"items", "identity"} & set(kind.__struct_fields__) else 1 for kind in REQUESTS]
