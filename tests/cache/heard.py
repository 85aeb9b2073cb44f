"""Heard: what one knows of the tiers who is told of each change, and of nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.cache.changes import Came, Went
from kvd.protocol.keys import KEY_BYTES, BlockKey, chain

if TYPE_CHECKING:
    from kvd.cache.changes import Change
    from kvd.cache.memory import Namespace


class Heard:
    """Of each tier the blocks, with the key that each follows. What makes no sense is refused."""

    def __init__(self) -> None:
        self.parents: dict[tuple[int, BlockKey], bytes] = {}

    def __call__(self, space: Namespace, change: Change) -> None:
        match change:
            case Came():
                self._came(space, change)
            case Went(tier, keys):
                for key in keys:
                    del self.parents[tier, key]
                    assert key not in self.followed(tier)

    def _came(self, space: Namespace, came: Came) -> None:
        keys = chain(came.parent, came.rows, space.tree.block_bytes)
        assert b"".join(keys) == came.keys
        assert came.parent == space.key or (came.tier, came.parent) in self.parents
        for key, parent in zip(keys, (came.parent, *keys), strict=False):
            assert (came.tier, key) not in self.parents
            self.parents[came.tier, key] = parent

    def followed(self, tier: int) -> set[bytes]:
        return {parent for (other, _), parent in self.parents.items() if other == tier}


def present(spaces: dict[int, Namespace]) -> set[tuple[int, bytes]]:
    """The same, by the trees."""
    return {
        (came.tier, came.keys[at : at + KEY_BYTES])
        for space in spaces.values()
        for came in space.tree.present()
        for at in range(0, len(came.keys), KEY_BYTES)
    }
