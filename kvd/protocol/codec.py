"""Structs to frames and back; the only encoder and decoder.

A message is one msgpack frame, followed by one raw frame of tokens for the verbs that carry some.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvd.protocol.errors import BadRequest, KvdError, LimitExceeded
from kvd.protocol.messages import AnyReply, AnyRequest, Failure

# A message without its tokens: reading more would hold the daemon for longer than anyone shall.
MAX_HEADER_BYTES = 256 << 10
TOKEN_BYTES = 4

Tokens: TypeAlias = bytes  # little-endian uint32, as on the wire
# What people have: ids, or bytes of them as on the wire.
TokenIds: TypeAlias = Sequence[int] | NDArray[Any] | bytes | bytearray | memoryview


def _plain(value: object) -> int:
    """Ints with a name of their own (ByteSize) are ints on the wire."""
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"{type(value).__name__} does not cross the wire")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


class _Id(msgspec.Struct):
    id: int


_ids = msgspec.msgpack.Decoder(_Id)


def encode(message: AnyRequest | AnyReply) -> bytes:
    return _encoder.encode(message)


# msgspec lets some bad UTF-8 through as what it is, depending on its version.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def to_json(value: object) -> str:
    """Messages and plain values as JSON, for programs that read a command's output."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain)).decode()


def decode_request(frame: bytes) -> AnyRequest:
    """Raises BadRequest, saying which field is wrong, and LimitExceeded for a frame too long."""
    if len(frame) > MAX_HEADER_BYTES:
        raise LimitExceeded(f"a message of {len(frame)} bytes; at most {MAX_HEADER_BYTES}")
    try:
        return _requests.decode(frame)
    except _UNREADABLE as error:
        raise BadRequest(f"request cannot be read: {error}") from error


def decode_reply(frame: bytes) -> AnyReply:
    """Raises BadRequest, saying which field is wrong."""
    try:
        return _replies.decode(frame)
    except _UNREADABLE as error:
        raise BadRequest(f"reply cannot be read: {error}") from error


def request_id(frame: bytes) -> int:
    """The id of a request that cannot be read otherwise, 0 if even that is not there."""
    try:
        return _ids.decode(frame).id
    except _UNREADABLE:
        return 0


def pack_tokens(tokens: TokenIds) -> Tokens:
    """Token ids as little-endian uint32; refuses what is no token id (BadRequest)."""
    if isinstance(tokens, memoryview) and tokens.format not in ("B", "b", "c"):
        tokens = np.asarray(tokens)
    if isinstance(tokens, bytes | bytearray | memoryview):
        packed = bytes(tokens)
        if len(packed) % TOKEN_BYTES:
            raise BadRequest(f"{len(packed)} bytes are not a whole number of uint32 tokens")
        return packed
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"not a sequence of token ids: {error}") from error
    if ids.size == 0:
        return b""
    if ids.dtype == np.uint32 and ids.ndim == 1:
        return ids.tobytes()
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > 0xFFFFFFFF:
        raise BadRequest(
            "token ids are integers from 0 to 2**32 - 1 in one dimension, "
            f"not {ids.dtype} of shape {ids.shape}"
        )
    return ids.astype("<u4").tobytes()


def failure(error: KvdError) -> Failure:
    return Failure(error.code, error.message, error.details)


assert sys.byteorder == "little", "kvd's arrays and frames are little-endian"
