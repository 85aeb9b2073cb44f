"""Identity: when is KV the same KV. Fingerprint and namespace.

Never Python's `hash()`: it is salted per process and far too short.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, NewType

import msgspec
from msgspec import UNSET

from kvd.protocol.errors import BadRequest
from kvd.protocol.layout import Layout

BlockKey = NewType("BlockKey", bytes)
KEY_BYTES = 32

Name = Annotated[str, msgspec.Meta(max_length=1024)]


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model computed the KV. Content properties only, never properties of an instance.

    `revision` is the weights' revision or digest and is required: a name alone does not say which
    weights. `positions` names the position scheme where the client changes it (rope scaling).
    """

    model: Name
    revision: Name
    adapter: Name = ""
    shard_rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    shard_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    positions: Name = ""


def check_identity(identity: Identity) -> None:
    """Refuse an identity that does not say which weights it means (BadRequest)."""
    if not identity.model or not identity.revision:
        raise BadRequest(
            "an identity needs a model and a revision (or a digest of the weights): "
            "equal names do not mean equal weights"
        )
    if identity.shard_rank >= identity.shard_size:
        raise BadRequest(f"shard {identity.shard_rank} of {identity.shard_size} does not exist")


def _fields(value: object) -> Iterator[bytes]:
    """A value as typed, length-prefixed pieces, so that no two values have the same bytes."""
    match value:
        case str():
            raw, kind = value.encode(), b"s"
        case int():
            raw, kind = str(value).encode(), b"i"
        case bytes():
            raw, kind = value, b"b"
        case _:
            raise TypeError(f"{type(value).__name__} has no place in a fingerprint")
    yield kind + len(raw).to_bytes(8, "little")
    yield raw


def _digest(kind: str, *values: object) -> bytes:
    digest = hashlib.sha256()
    for value in (kind, *values):
        for piece in _fields(value):
            digest.update(piece)
    return digest.digest()


def fingerprint(identity: Identity, layout: Layout) -> bytes:
    """SHA-256 over every field of identity and layout that is set, by name: 32 bytes."""
    values: list[object] = []
    for struct in (identity, layout):
        for name in struct.__struct_fields__:
            if (value := getattr(struct, name)) is not UNSET:
                values += [name, value]
    return _digest("kvd.fingerprint.1", *values)


def namespace_key(identity: Identity, layout: Layout, salt: str, *, extras: bool = False) -> bytes:
    """The domain in which equal tokens mean equal KV: fingerprint and salt. 32 bytes.

    Where positions have extras beside their tokens, it is another domain.
    """
    kind = ("extras",) if extras else ()
    return _digest("kvd.namespace.1", fingerprint(identity, layout), salt, *kind)


class NamespaceInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that tells a namespace from others, as it is kept beside its blocks."""

    identity: Identity
    layout: Layout
    salt: str = ""
    extras: bool = False

    @property
    def key(self) -> bytes:
        return namespace_key(self.identity, self.layout, self.salt, extras=self.extras)


def chain(parent: bytes, rows: bytes | bytearray, block_bytes: int) -> list[BlockKey]:
    """The keys of blocks that follow the one of key `parent`: each SHA-256 of the last and its own.

    The parent of a first block is its namespace's key, so equal tokens in two namespaces have
    different keys. `rows` are whole blocks of `block_bytes` each.
    """
    keys = []
    for start in range(0, len(rows), block_bytes):
        parent = hashlib.sha256(parent + rows[start : start + block_bytes]).digest()
        keys.append(BlockKey(parent))
    return keys
