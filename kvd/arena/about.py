"""About: what an arena's files are, said in a file beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from kvd.arena.checksum import with_sum, without_sum
from kvd.arena.files import open_ours, replace_file
from kvd.protocol.errors import TierFailed
from kvd.protocol.keys import NamespaceInfo
from kvd.protocol.layout import Layout

VERSION = 2

Count = Annotated[int, msgspec.Meta(ge=1)]
RowBytes = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class About(msgspec.Struct, frozen=True):
    """All that one must know to read an arena and its page table.

    `boot` is the start of the machine on which they were made; `header` is which shared header
    clients know its leases by; `namespaces` says what the numbers in the records stand for.
    """

    version: int
    boot: bytes
    layout: Layout
    row_bytes: RowBytes
    num_pages: Count
    extent_pages: Count
    header: bytes = b""
    namespaces: dict[int, NamespaceInfo] = {}


def write_about(path: Path, about: About) -> None:
    """Whoever reads the file finds what it says now or what it said before; raises OSError."""
    replace_file(path, with_sum(msgspec.msgpack.encode(about)))


def read_about(path: Path) -> About:
    """Raises OSError, and TierFailed for what this version cannot read."""
    with open(open_ours(path), "rb") as file:
        encoded = without_sum(file.read())
    if encoded is None:
        raise TierFailed(f"{path} is damaged, or of another version")
    try:
        about = msgspec.msgpack.decode(encoded, type=About)
    except msgspec.MsgspecError as error:
        raise TierFailed(f"{path} cannot be read: {error}") from error
    if about.version != VERSION:
        raise TierFailed(f"{path} has version {about.version} and not {VERSION}")
    return about
