"""One radix tree of tokens per namespace: longest match, split, insert, cut, merge, detach.

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

    `locks` counts the paths that are held through this node, by leases and pins; `stamp` is the
    touch that last moved it in the LRU. A detached node has left the tree under those who hold it:
    its parent does not list it, and it is gone with the last of them. Nodes are compared by
    identity.
    """

    __slots__ = (
        "children",
        "detached",
        "first_blocks",
        "locks",
        "pages",
        "parent",
        "stamp",
        "tokens",
        "tree",
    )

    def __init__(self, tree: Tree, tokens: Tokens, pages: Sequence[int]) -> None:
        self.tree = tree
        self.parent: Node | None = None
        self.tokens = bytearray(tokens)
        self.pages = array("q", pages)
        self.locks = 0
        self.stamp = 0
        self.detached = False
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


@dataclass(frozen=True, slots=True)
class Gone:
    """Pages of blocks that left the tree, descendants first: free now, or with who holds them."""

    free: Pages
    held: Pages


class Tree:
    """The blocks of one namespace. Its unlocked nodes stand in the LRU, the others do not.

    "Tokens" here are rows of `row_bytes` each: a token's id and, where a namespace has extras, what
    else tells its position from another (`rows.py`). The tree compares them whole.
    """

    def __init__(self, block_size: int, row_bytes: int, lru: Lru) -> None:
        self.row_bytes = row_bytes
        self.block_bytes = block_size * row_bytes
        self.root = Node(self, b"", ())
        self.num_blocks = 0
        self.num_nodes = 0
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

    def find_tail(self, end: Node, rest: Tokens) -> tuple[Found, int] | None:
        """The block behind `end` that agrees longest with `rest`, and in how many tokens.

        For what `find` left over: no block agrees whole. None where none agrees in a single token.
        """
        rest = rest[: self.block_bytes]
        # Children are sorted by their bytes: who agrees longest stands beside where `rest` would.
        place = bisect_left(end.first_blocks, rest)
        common, child = max(
            (
                (_common_rows(end.first_blocks[near], rest, self.row_bytes), near)
                for near in (place - 1, place)
                if 0 <= near < len(end.children)
            ),
            default=(0, 0),
        )
        return (Found(end.children[child], 1, 0), common) if common else None

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

    def unlock(self, end: Node, touch: int, above: Node | None = None) -> Pages:
        """Unlock a path, leaf first; what nobody else holds becomes the most recent, as `touch`.

        With `above`, a node of the path, only what lies below it. Returns the pages of detached
        blocks that nobody holds any more, the last one first.
        """
        unlocked: list[list[Node]] = []
        gone: list[Pages] = []
        node = end
        while node is not (above or self.root):
            node.locks -= 1
            parent = _parent(node)
            if node.locks == 0 and node.detached:
                gone.append(_backwards(node))
                _unlist(node)
            elif node.locks == 0:
                node.stamp = touch
                # A chain of only children was last touched together, so it may be one node.
                if unlocked and node.children == unlocked[-1][-1:]:
                    unlocked[-1].append(node)
                else:
                    unlocked.append([node])
            node = parent
        for chain in unlocked:
            self._merge(chain)
            self._lru.add(chain[0])
        return np.concatenate(gone) if gone else np.empty(0, np.int64)

    def node_at(self, end: Node, num_blocks: int) -> Node:
        """The node of a locked path that ends after so many blocks; split where none does."""
        left = num_blocks
        for node in end.path():
            if left == 0:
                return _parent(node)
            if left < node.num_blocks:
                return self._split(node, left)
            left -= node.num_blocks
        return end

    def append(self, end: Node, tokens: Tokens, pages: Sequence[int]) -> Node:
        """Add blocks behind a locked path, none of which is there; the node that ends it now.

        The caller's lock covers them. A leaf that it alone holds grows; a node that others lock
        too gets a child, else they would lock more than they found.
        """
        self.num_blocks += len(pages)
        if end.locks == 1 and not end.children and end is not self.root:
            end.tokens += tokens
            end.pages.extend(pages)
            return end
        node = Node(self, tokens, pages)
        node.locks = 1
        end.add_child(node)
        self.num_nodes += 1
        return node

    def cut(self, leaf: Node, num_blocks: int) -> Pages:
        """Remove blocks from the end of an unlocked leaf; their pages, the last one first."""
        assert not leaf.children
        assert not leaf.locks
        keep = leaf.num_blocks - num_blocks
        pages = _backwards(leaf, keep)
        self.num_blocks -= num_blocks
        if keep == 0:
            self._lru.discard(leaf)
            _parent(leaf).remove_child(leaf)
            leaf.parent = None
            self.num_nodes -= 1
        else:
            self._lru.shorten(num_blocks)
        del leaf.pages[keep:], leaf.tokens[keep * self.block_bytes :]
        return pages

    def detach(self, node: Node, keep: int = 0) -> Gone:
        """Take what lies behind the first `keep` blocks of a node out of the tree.

        What is locked there is still held by who locked it, but found no more.
        """
        if keep and node.locks:
            self._split(node, keep)  # the node is its own lower part from here on
            keep = 0
        free, held = [], []
        below = list(self.nodes(node))
        if not keep and node is not self.root:
            below.insert(0, node)
            _unlist(node)
        for one in reversed(below):
            self.num_blocks -= one.num_blocks
            self.num_nodes -= 1
            if one.locks:
                one.detached = True
                held.append(_backwards(one))
            else:
                self._lru.discard(one)
                free.append(_backwards(one))
            if not one.locks or one.parent is self.root:
                _unlist(one)
        if keep:
            free.append(self.cut(node, node.num_blocks - keep))
        nothing = np.empty(0, np.int64)
        return Gone(np.concatenate((*free, nothing)), np.concatenate((*held, nothing)))

    def nodes(self, top: Node | None = None) -> Iterator[Node]:
        """Every node below `top` (the root unless said), parents before children."""
        waiting = list((top or self.root).children)
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children)

    def _common_blocks(self, node: Node, tokens: bytes) -> int:
        if node.tokens.startswith(tokens):
            return len(tokens) // self.block_bytes
        return (
            _common_rows(node.tokens, tokens, self.row_bytes) * self.row_bytes // self.block_bytes
        )

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Cut a node in two; returns the upper part, which is new and locked or about to be.

        The lower part stays the same object: whoever locked the node still ends at its end.
        """
        parent = _parent(node)
        place = num_blocks * self.block_bytes
        is_listed = _unlist(node)
        upper = Node(self, bytes(node.tokens[:place]), node.pages[:num_blocks])
        upper.locks, upper.detached = node.locks, node.detached
        if node in self._lru:
            self._lru.shorten(num_blocks)
        del node.tokens[:place], node.pages[:num_blocks]
        upper.add_child(node)
        upper.parent = parent
        if is_listed:
            parent.add_child(upper)
        if not node.detached:
            self.num_nodes += 1
        return upper

    def _merge(self, chain: Sequence[Node]) -> None:
        """Join nodes, each the only child of the next, into the first and lowest of them."""
        if len(chain) == 1:
            return
        self.num_nodes -= len(chain) - 1
        lowest, parent = chain[0], _parent(chain[-1])
        parent.remove_child(chain[-1])
        lowest.tokens = bytearray().join(node.tokens for node in reversed(chain))
        pages = array("q")
        for node in reversed(chain):
            pages.extend(node.pages)
        lowest.pages = pages
        parent.add_child(lowest)


def _unlist(node: Node) -> bool:
    """Remove a node from its parent's children, where it is one of them."""
    parent = _parent(node)
    is_listed = parent.child(bytes(node.tokens[: node.tree.block_bytes])) is node
    if is_listed:
        parent.remove_child(node)
    return is_listed


def _common_rows(ours: bytes | bytearray, tokens: bytes, row_bytes: int) -> int:
    """How many rows two pieces of tokens have in common from their beginning."""
    size = min(len(ours), len(tokens)) // 4
    differing = np.flatnonzero(
        np.frombuffer(ours, np.uint32, size) != np.frombuffer(tokens, np.uint32, size)
    )
    return (int(differing[0]) if len(differing) else size) * 4 // row_bytes


def _backwards(node: Node, start: int = 0) -> Pages:
    """The pages of a node from block `start` on, the last one first."""
    return np.array(node.pages[start:], np.int64)[::-1]


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent
