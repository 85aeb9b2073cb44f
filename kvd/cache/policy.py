"""Which block goes when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.cache.radix import Node


class Lru:
    """The unlocked nodes of one namespace, least recently used first.

    Whoever unlocks a path adds its nodes leaf first. A node is unlocked only when everything below
    it is, so a parent always stands behind its children and the first node is a leaf.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def add(self, node: Node) -> None:
        self._nodes[node] = None
        self.num_blocks += node.num_blocks

    def discard(self, node: Node) -> None:
        """Remove a node, if it stands here."""
        if node in self._nodes:
            del self._nodes[node]
            self.num_blocks -= node.num_blocks

    def shorten(self, num_blocks: int) -> None:
        """A node that stands here loses blocks."""
        self.num_blocks -= num_blocks

    def hottest(self) -> Node | None:
        return next(reversed(self._nodes), None)

    def coldest(self) -> Node | None:
        return next(iter(self._nodes), None)
