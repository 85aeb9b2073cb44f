"""Which block goes when room is needed."""

from __future__ import annotations

import itertools
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.cache.radix import Node


class Lru:
    """The unlocked nodes of one namespace that one tier has; the least recent leaf is found.

    A node's `stamp` is its last touch, and whoever touches a node touches all above it: so among
    the leaves, the nodes without a child in this tier, the one of the least stamp is the least
    recent of all. They stand in a heap, each once at most, and may stand there with an older stamp
    than they have, or though they are no leaf any more: that is put right when they come first.
    """

    def __init__(self, tier: int) -> None:
        self.tier = tier
        self.num_blocks = 0
        self.last_touch = -1
        self._bit = 1 << tier
        self._heap: list[tuple[int, int, Node]] = []
        self._order = itertools.count()

    def add(self, node: Node) -> None:
        """A node of this tier was unlocked, or came unlocked to it."""
        self.num_blocks += node.num_blocks
        self.last_touch = max(self.last_touch, node.stamp)
        self.offer(node)

    def discard(self, node: Node) -> None:
        """An unlocked node of this tier is about to be locked, or to leave it."""
        self.num_blocks -= node.num_blocks

    def shorten(self, num_blocks: int) -> None:
        """An unlocked node of this tier lost blocks."""
        self.num_blocks -= num_blocks

    def offer(self, node: Node) -> None:
        """A node may have become a leaf."""
        if not node.queued & self._bit and self._is_leaf(node):
            node.queued |= self._bit
            heappush(self._heap, (node.stamp, next(self._order), node))

    def coldest(self) -> Node | None:
        """The least recent leaf."""
        while self._heap:
            stamp, _, node = self._heap[0]
            if not self._is_leaf(node):
                heappop(self._heap)
                node.queued &= ~self._bit
            elif stamp != node.stamp:
                heapreplace(self._heap, (node.stamp, next(self._order), node))
            else:
                return node
        return None

    def _is_leaf(self, node: Node) -> bool:
        is_here = node.tiers & self._bit and not node.locks
        return bool(is_here) and not node.num_children[self.tier]
