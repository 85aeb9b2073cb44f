"""Changes: which blocks come to a tier and leave one, as a tree tells of them.

Tuples, since there is one for each commit: they are made in half of a dataclass's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from kvd.protocol.keys import BlockKey


class Came(NamedTuple):
    """A tier has these blocks from now on: consecutive ones, behind that of key `parent`.

    It has that one already. The parent of a first block is its namespace's key.
    """

    tier: int
    parent: bytes
    keys: bytes
    rows: bytes


class Went(NamedTuple):
    """A tier has these blocks no more; descendants stand before their parents."""

    tier: int
    keys: list[BlockKey]


Change: TypeAlias = Came | Went
Listener: TypeAlias = Callable[[Change], None]
