"""One message of each kind with every field set, made from what its type says."""

from __future__ import annotations

import zlib
from typing import Any, get_args

import msgspec
from msgspec import inspect

from kvd.protocol.codec import decode_reply, decode_request, encode
from kvd.protocol.messages import AnyReply, AnyRequest

REQUESTS = get_args(AnyRequest)
REPLIES = get_args(AnyReply)
MAX_NUMBER = (1 << 63) - 1


def sample(kind: type[msgspec.Struct]) -> AnyRequest | AnyReply:
    """A message whose fields all differ from their defaults; the same one every time."""
    frame = msgspec.msgpack.encode(_struct(inspect.type_info(kind)))
    return decode_request(frame) if kind in REQUESTS else decode_reply(frame)


def plain(message: AnyRequest | AnyReply) -> Any:
    """A message as somebody reads it who knows msgpack alone."""
    return msgspec.msgpack.decode(encode(message))


def has_all(new: Any, old: Any) -> bool:
    """Whether `new` says what `old` says, and perhaps more: fields that came later."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and has_all(new[key], old[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(has_all, new, old))
    return type(old) is type(new) and bool(old == new)


def _struct(info: Any) -> Any:
    values = {field.encode_name: _value(field.type, field) for field in info.fields}
    if info.array_like:
        return list(values.values())
    return {info.tag_field: info.tag} | values if info.tag_field else values


def _value(info: Any, field: inspect.Field) -> Any:
    name = field.encode_name
    match info:
        case inspect.IntType():
            return _number(info, field)
        case inspect.StrType():
            return name[: info.max_length]
        case inspect.BytesType():
            return name.encode().ljust(info.min_length or 0, b".")
        case inspect.BoolType():
            return not field.default
        case inspect.FloatType():
            return 1.5
        case inspect.LiteralType():
            return info.values[0]
        case inspect.AnyType():
            return name
        case inspect.DictType():
            return {name: _value(info.value_type, field)}
        case inspect.TupleType():
            return [_value(one, field) for one in info.item_types]
        case inspect.VarTupleType(item_type=inspect.UnionType(types=types)):
            return [_value(one, field) for one in types]
        case inspect.VarTupleType():
            return [_value(info.item_type, field)]
        case inspect.UnionType():
            return _value(info.types[0], field)
        case inspect.StructType():
            return _struct(info)
    raise TypeError(f"{info} has no sample")


def _number(info: inspect.IntType, field: inspect.Field) -> int:
    """A number that tells this field from others."""
    low = info.ge or 0
    high = MAX_NUMBER if info.le is None else info.le
    number = low + zlib.crc32(field.encode_name.encode()) % (high - low + 1)
    return number if number != field.default else low + high - number
