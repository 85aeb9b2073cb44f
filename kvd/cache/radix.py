"""One radix tree of tokens per namespace: longest match, split, insert, cut, merge.

The idea of a radix tree over token prefixes is SGLang's RadixAttention (Zheng et al., 2024). Here a
node is a run of blocks as flat arrays, so that a match compares whole nodes at the speed of memcmp
and never hashes: a hit is exact by construction.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.cache.policy import Lru
    from kvd.protocol.codec import Tokens


class Node:
    """A run of at least one block: their tokens and the page of each. The root alone has none.

    `locks` counts the leases whose path goes through this node; `stamp` is the touch that last
    moved it in the LRU. Nodes are compared by identity.
    """

    __slots__ = ("children", "first_blocks", "locks", "pages", "parent", "stamp", "tokens", "tree")

    def __init__(self, tree: Tree, tokens: Tokens, pages: Sequence[int]) -> None:
        self.tree = tree
        self.parent: Node | None = None
        self.tokens = bytearray(tokens)
        self.pages = array("q", pages)
        self.locks = 0
        self.stamp = 0
        # Children by their first block, ascending, with those blocks beside them for bisection.
        self.first_blocks: list[bytes] = []
        self.children: list[Node] = []

    @property
    def num_blocks(self) -> int:
        return len(self.pages)

    def child(self, first_block: bytes) -> Node | None:
        place = bisect_left(self.first_blocks, first_block)
        if place < len(self.first_blocks) and self.first_blocks[place] == first_block:
            return self.children[place]
        return None

    def add_child(self, child: Node) -> None:
        first_block = bytes(child.tokens[: self.tree.block_bytes])
        place = bisect_left(self.first_blocks, first_block)
        self.first_blocks.insert(place, first_block)
        self.children.insert(place, child)
        child.parent = self

    def remove_child(self, child: Node) -> None:
        place = bisect_left(self.first_blocks, bytes(child.tokens[: self.tree.block_bytes]))
        assert self.children[place] is child
        del self.first_blocks[place], self.children[place]

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_pages(self) -> Pages:
        """The pages of all blocks from the root to the end of this node."""
        return np.frombuffer(b"".join([node.pages for node in self.path()]), np.int64)

    def path_tokens(self) -> bytearray:
        return bytearray().join(node.tokens for node in self.path())


@dataclass(frozen=True, slots=True)
class Found:
    """Where tokens leave the tree: after the first `num_blocks` blocks of `node`."""

    node: Node
    num_blocks: int
    total_blocks: int


class Tree:
    """The blocks of one namespace. Its unlocked nodes stand in the LRU, the others do not."""

    def __init__(self, block_size: int, lru: Lru) -> None:
        self.block_bytes = block_size * 4
        self.root = Node(self, b"", ())
        self._lru = lru

    def find(self, tokens: Tokens, start: Node | None = None) -> Found:
        """The longest prefix of whole blocks of `tokens` below `start` (the root unless said)."""
        node = start or self.root
        width = self.block_bytes
        at, end = 0, len(tokens) - len(tokens) % width
        while at < end:
            child = node.child(tokens[at : at + width])
            if child is None:
                break
            node, piece = child, tokens[at : min(end, at + len(child.tokens))]
            if node.tokens != piece:
                common = self._common_blocks(node, piece)
                return Found(node, common, at // width + common)
            at += len(piece)
        return Found(node, node.num_blocks, at // width)

    def lock(self, found: Found, below: Node | None = None) -> Node:
        """Lock the found path, from `below` (the root unless said) on; the node that ends it.

        A node that goes on behind the match is split, so that no more is locked than was found.
        """
        end = found.node
        if found.num_blocks < end.num_blocks:
            end = self._split(end, found.num_blocks)
        top = below or self.root
        node = end
        while node is not top:
            if node.locks == 0:
                self._lru.discard(node)  # the upper part of a split is not there
            node.locks += 1
            node = _parent(node)
        return end

    def unlock(self, end: Node, touch: int) -> None:
        """Unlock a path, leaf first; what nobody else holds becomes the most recent, as `touch`."""
        unlocked: list[list[Node]] = []
        node = end
        while node is not self.root:
            node.locks -= 1
            if node.locks == 0:
                node.stamp = touch
                # A chain of only children was last touched together, so it may be one node.
                if unlocked and len(node.children) == 1:
                    unlocked[-1].append(node)
                else:
                    unlocked.append([node])
            node = _parent(node)
        for chain in unlocked:
            self._merge(chain)
            self._lru.add(chain[0])

    def append(self, end: Node, tokens: Tokens, pages: Sequence[int]) -> Node:
        """Add blocks behind a locked path, none of which is there; the node that ends it now.

        The caller's lock covers them. A leaf that it alone holds grows; a node that others lock
        too gets a child, else they would lock more than they found.
        """
        if end.locks == 1 and not end.children and end is not self.root:
            end.tokens += tokens
            end.pages.extend(pages)
            return end
        node = Node(self, tokens, pages)
        node.locks = 1
        end.add_child(node)
        return node

    def cut(self, leaf: Node, num_blocks: int) -> Pages:
        """Remove blocks from the end of an unlocked leaf; their pages, the last one first."""
        assert not leaf.children
        assert not leaf.locks
        keep = leaf.num_blocks - num_blocks
        pages = np.array(leaf.pages[keep:], np.int64)[::-1]
        if keep == 0:
            self._lru.discard(leaf)
            _parent(leaf).remove_child(leaf)
            leaf.parent = None
        else:
            self._lru.shorten(num_blocks)
        del leaf.pages[keep:], leaf.tokens[keep * self.block_bytes :]
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""
        waiting = list(self.root.children)
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children)

    def _common_blocks(self, node: Node, tokens: bytes) -> int:
        if node.tokens.startswith(tokens):
            return len(tokens) // self.block_bytes
        ours = np.frombuffer(node.tokens, np.uint32, len(tokens) // 4)
        differing = np.flatnonzero(ours != np.frombuffer(tokens, np.uint32))
        return int(differing[0]) * 4 // self.block_bytes

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Cut a node in two; returns the upper part, which is new and about to be locked.

        The lower part stays the same object: whoever locked the node still ends at its end.
        """
        parent = _parent(node)
        place = num_blocks * self.block_bytes
        parent.remove_child(node)
        upper = Node(self, bytes(node.tokens[:place]), node.pages[:num_blocks])
        upper.locks = node.locks
        if node in self._lru:
            self._lru.shorten(num_blocks)
        del node.tokens[:place], node.pages[:num_blocks]
        upper.add_child(node)
        parent.add_child(upper)
        return upper

    def _merge(self, chain: Sequence[Node]) -> None:
        """Join nodes, each the only child of the next, into the first and lowest of them."""
        if len(chain) == 1:
            return
        lowest, parent = chain[0], _parent(chain[-1])
        parent.remove_child(chain[-1])
        lowest.tokens = bytearray().join(node.tokens for node in reversed(chain))
        pages = array("q")
        for node in reversed(chain):
            pages.extend(node.pages)
        lowest.pages = pages
        parent.add_child(lowest)


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent
