"""Which blocks were evicted: what a cache of endless size would still have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.protocol.keys import KEY_BYTES, BlockKey, chain

# 2 MiB.
NUM_PLACES = 1 << 18
# So many blocks behind a match are looked at: each costs a SHA-256, a microsecond or so.
MAX_LOOKED_AT = 1024


class Evicted:
    """The last blocks that no tier has any more, by the beginnings of their keys.

    Each has one place, where another comes in its stead: so it forgets, and what it counts is an
    estimate from below.
    """

    def __init__(self) -> None:
        self._places = np.zeros(NUM_PLACES, np.uint64)
        self._is_empty = True

    def add(self, keys: Sequence[BlockKey]) -> None:
        words = np.frombuffer(b"".join(keys), np.uint64)[:: KEY_BYTES // 8]
        self._places[words % NUM_PLACES] = words
        self._is_empty = self._is_empty and not keys

    def __contains__(self, key: BlockKey) -> bool:
        word = int.from_bytes(key[:8], "little")
        return int(self._places[word % NUM_PLACES]) == word

    def num_following(self, parent: bytes, rows: bytes, first: int, block_bytes: int) -> int:
        """How many blocks of `rows` from byte `first` on, which follow `parent`, were evicted."""
        if self._is_empty:
            return 0
        starts = range(first, len(rows) - block_bytes + 1, block_bytes)[:MAX_LOOKED_AT]
        for count, start in enumerate(starts):
            (parent,) = chain(parent, rows[start : start + block_bytes], block_bytes)
            if parent not in self:
                return count
        return len(starts)
