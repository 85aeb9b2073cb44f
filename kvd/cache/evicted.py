"""Evicted: which blocks were evicted not long ago, so that a loss can be told from a miss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.protocol.keys import BlockKey

# Some 8 MiB of the daemon's own memory.
MAX_BLOCKS = 65_536
# So much of a key tells blocks apart where nothing that is served depends on it.
DIGEST_BYTES = 8


class Evicted:
    """The last blocks that went from every tier: half of `max_blocks` at least, where so many did.

    One that was committed again is still among them: who asks has looked for it in the tree before.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._half = max_blocks // 2
        # Two generations: the older one goes as a whole, so that adding costs the same each time.
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, key: BlockKey) -> bool:
        digest = key[:DIGEST_BYTES]
        return digest in self._young or digest in self._old

    def add(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._young.add(key[:DIGEST_BYTES])
            if len(self._young) >= self._half:
                self._old, self._young = self._young, set()
