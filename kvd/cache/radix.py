"""One radix tree of tokens per namespace: longest match, split, insert, cut, merge, detach.

The idea of a radix tree over token prefixes is SGLang's RadixAttention (Zheng et al., 2024). Here a
node is a run of blocks as flat arrays, so that a match compares whole nodes at the speed of memcmp
and never hashes: a hit is exact by construction.

Tier 0 is memory; the others are stores, from the fastest on. All blocks of a node are in the same
tiers. In each tier a block is there only with all blocks before it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvd.cache.changes import Came, Went
from kvd.cache.policy import Lru
from kvd.protocol.keys import KEY_BYTES, BlockKey, chain

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.cache.changes import Listener
    from kvd.protocol.codec import Tokens

MEMORY = 0
# Of children that only stores have, so many at most are looked at for one in memory.
MAX_LOOKED_AT = 64


class Node:
    """A run of at least one block: their tokens, keys and, in memory, pages. The root has none.

    `tiers` has a bit for each tier that has these blocks, `num_children` says how many children
    each tier has. `locks` counts the paths that are held through this node, by leases, pins and
    transfers; `saving` has a bit for each store that a copy is on its way to. `stamp` is its last
    touch, `hits` counts the matches through it, and `queued` belongs to the LRUs. A detached node
    has left the tree under those who hold it: its parent does not list it, and it is gone with the
    last of them. Nodes are compared by identity.
    """

    __slots__ = (
        "children",
        "detached",
        "first_blocks",
        "hits",
        "keys",
        "locks",
        "num_children",
        "pages",
        "parent",
        "queued",
        "saving",
        "stamp",
        "tiers",
        "tokens",
        "tree",
    )

    def __init__(self, tree: Tree, tokens: Tokens, keys: bytes, pages: Sequence[int] = ()) -> None:
        self.tree = tree
        self.parent: Node | None = None
        self.tokens = bytearray(tokens)
        self.keys = bytearray(keys)
        self.pages = array("q", pages)
        self.tiers = 0
        self.num_children = [0] * len(tree.lrus)
        self.locks = 0
        self.stamp = 0
        self.hits = 0
        self.queued = 0
        self.saving = 0
        self.detached = False
        # Children by their first block, ascending, with those blocks beside them for bisection.
        self.first_blocks: list[bytes] = []
        self.children: list[Node] = []

    @property
    def num_blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def last_key(self) -> bytes:
        """The key that the blocks behind this node follow."""
        return bytes(self.keys[-KEY_BYTES:]) or self.tree.key

    def block_keys(self, start: int = 0) -> list[BlockKey]:
        """The keys of its blocks from number `start` on."""
        first, end = start * KEY_BYTES, len(self.keys)
        return [
            BlockKey(bytes(self.keys[at : at + KEY_BYTES])) for at in range(first, end, KEY_BYTES)
        ]

    def is_in(self, tier: int) -> bool:
        return bool(self.tiers >> tier & 1)

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
        self._count(child.tiers, 1)

    def remove_child(self, child: Node) -> None:
        place = bisect_left(self.first_blocks, bytes(child.tokens[: self.tree.block_bytes]))
        assert self.children[place] is child
        del self.first_blocks[place], self.children[place]
        self._count(child.tiers, -1)

    def enter(self, tier: int) -> None:
        """A tier has these blocks from here on; the node is listed by its parent."""
        assert not self.is_in(tier)
        self.tiers |= 1 << tier
        _parent(self).num_children[tier] += 1

    def leave(self, tier: int) -> None:
        assert self.is_in(tier)
        self.tiers &= ~(1 << tier)
        _parent(self).num_children[tier] -= 1

    def _count(self, tiers: int, change: int) -> None:
        for tier in range(len(self.num_children)):
            if tiers >> tier & 1:
                self.num_children[tier] += change

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
    """Blocks that left the tree, descendants first; pages free now, or with who holds them.

    `keys` are those of all of them.
    """

    free: Pages
    held: Pages
    keys: list[BlockKey]


@dataclass(frozen=True, slots=True)
class Cut:
    """Blocks of which a tier's copy went, the last one first; pages where it was memory's.

    `was_last`: no tier has them any more.
    """

    pages: Pages
    keys: list[BlockKey]
    was_last: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """How many blocks have a copy now; of which none counts, the last one first.

    And the pages of detached blocks that nobody holds any more.
    """

    num_blocks: int
    uncounted: list[BlockKey]
    gone: Pages


class Tree:
    """The blocks of one namespace, of key `key`.

    "Tokens" here are rows of `row_bytes` each: a token's id and, where a namespace has extras, what
    else tells its position from another (`rows.py`). The tree compares them whole.

    `unsaved` has for each tier the nodes in memory that shall have a copy there and have none yet,
    in the order in which they came; `let_go` those of which the tier had one that made room.
    A `listener` is told which blocks come to a tier and leave one, but for those of `recover`.
    """

    def __init__(self, key: bytes, block_size: int, row_bytes: int, num_tiers: int = 1) -> None:
        self.key = key
        self.row_bytes = row_bytes
        self.block_bytes = block_size * row_bytes
        self.lrus = [Lru(tier) for tier in range(num_tiers)]
        self.unsaved: list[dict[Node, None]] = [{} for _ in range(num_tiers)]
        self.let_go: list[dict[Node, None]] = [{} for _ in range(num_tiers)]
        # Each node is in these or not, whatever becomes of its shape.
        self.marks = (*self.unsaved, *self.let_go)
        self.counts = [0] * num_tiers
        self.num_nodes = 0
        self.root = Node(self, b"", b"")
        self.listener: Listener | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks in memory."""
        return self.counts[MEMORY]

    # --- finding ---

    def find(self, tokens: Tokens, start: Node | None = None, *, anywhere: bool = False) -> Found:
        """The longest prefix of whole blocks of `tokens` below `start` (the root unless said).

        Of blocks in memory; with `anywhere`, of those that any tier has.
        """
        node = start or self.root
        width = self.block_bytes
        at, end = 0, len(tokens) - len(tokens) % width
        while at < end:
            child = node.child(tokens[at : at + width])
            if child is None or not (anywhere or child.pages):
                break
            node, piece = child, tokens[at : min(end, at + len(child.tokens))]
            if node.tokens != piece:
                common = self._common_blocks(node, piece)
                return Found(node, common, at // width + common)
            at += len(piece)
        return Found(node, node.num_blocks, at // width)

    def find_tail(self, end: Node, rest: Tokens) -> tuple[Found, int] | None:
        """The block in memory behind `end` that agrees longest with `rest`, and in how many tokens.

        For what `find` left over: no block agrees whole. None where none agrees in a single token.
        """
        rest = rest[: self.block_bytes]
        # Children are sorted by their bytes: who agrees longest stands beside where `rest` would.
        place = bisect_left(end.first_blocks, rest)
        sides = (range(place - 1, -1, -1), range(place, len(end.children)))
        common, near = max(self._nearest(end, rest, side) for side in sides)
        return (Found(end.children[near], 1, 0), common) if common else None

    def _nearest(self, end: Node, rest: Tokens, places: range) -> tuple[int, int]:
        """Of children, nearest first: in how many tokens the first one in memory agrees, and it."""
        for place in places[:MAX_LOOKED_AT]:
            common = _common_rows(end.first_blocks[place], rest, self.row_bytes)
            if end.children[place].pages or not common:
                return common, place
        return 0, 0

    def num_common(self, found: Found, rest: Tokens) -> int:
        """In how many tokens, at most, a block behind `found` agrees with `rest`, in any tier."""
        node, at, width = found.node, found.num_blocks * self.block_bytes, self.block_bytes
        if at < len(node.tokens):
            blocks = [bytes(node.tokens[at : at + width])]
        else:
            place = bisect_left(node.first_blocks, rest[:width])
            blocks = node.first_blocks[max(0, place - 1) : place + 1]
        return max((_common_rows(block, rest, self.row_bytes) for block in blocks), default=0)

    def nodes(self, top: Node | None = None) -> Iterator[Node]:
        """Every node below `top` (the root unless said), parents before children."""
        waiting = list((top or self.root).children)
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children)

    # --- holding ---

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
                for lru in self._lrus_of(node):
                    lru.discard(node)
            node.locks += 1
            node = _parent(node)
        return end

    def unlock(self, end: Node, touch: int | None = None, above: Node | None = None) -> Pages:
        """Unlock a path; with a `touch`, it becomes the most recent, whoever else holds it.

        With `above`, a node of the path, only what lies below it. Returns the pages of detached
        blocks that nobody holds any more, the last one first.
        """
        unlocked: list[list[Node]] = []
        gone: list[Pages] = []
        node = end
        while node is not (above or self.root):
            node.locks -= 1
            node.stamp = node.stamp if touch is None else touch
            parent = _parent(node)
            if node.locks == 0 and node.detached:
                gone.append(_backwards(node))
                _unlist(node)
            elif node.locks == 0:
                if unlocked and _may_be_one(node, unlocked[-1][-1]):
                    unlocked[-1].append(node)
                else:
                    unlocked.append([node])
            node = parent
        for alike in unlocked:
            self._merge(alike)
            for lru in self._lrus_of(alike[0]):
                lru.add(alike[0])
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

    # --- adding ---

    def append(self, end: Node, tokens: Tokens, pages: Sequence[int]) -> Node:
        """Add blocks behind a locked path, none of which memory has; the node that ends it now.

        Those that a store has get their pages; the others are new. The caller's lock covers them.
        """
        width = self.block_bytes
        while pages and (child := end.child(tokens[:width])) is not None:
            common = self._common_blocks(child, tokens[: len(child.tokens)])
            if common < child.num_blocks:
                child = self._split(child, common)
            self._fill(child, pages[:common])
            tokens, pages, end = tokens[common * width :], pages[common:], child
        return self._grow(end, tokens, pages) if pages else end

    def _fill(self, node: Node, pages: Sequence[int]) -> None:
        """A node that only stores have comes to memory, and is locked by who brings it."""
        for lru in self._lrus_of(node):
            lru.discard(node)
        node.pages.extend(pages)
        node.enter(MEMORY)
        node.locks = 1
        self.counts[MEMORY] += len(pages)
        self._tell_came(node, MEMORY)

    def _grow(self, end: Node, tokens: Tokens, pages: Sequence[int]) -> Node:
        """A leaf of memory alone, which the caller alone holds, grows; else there is a new node.

        A node that others lock too must not grow: they would lock more than they found.
        """
        self.counts[MEMORY] += len(pages)
        keys = b"".join(chain(end.last_key, tokens, self.block_bytes))
        if self.listener is not None:
            self.listener(Came(MEMORY, end.last_key, keys, tokens))
        is_own = end.locks == 1 and end.tiers == 1 << MEMORY
        if is_own and not end.children:
            end.tokens += tokens
            end.keys += keys
            end.pages.extend(pages)
            return end
        node = self._add(end, tokens, keys, (MEMORY,), pages)
        node.locks = 1
        return node

    def recover(
        self, end: Node, tokens: Tokens, keys: bytes, tier: int, pages: Sequence[int] = ()
    ) -> Node:
        """A tier has these blocks, which follow `end`; the node that ends them.

        For a tree that nobody uses yet: nothing is locked. What is known of them already is so of
        the first of them, and in another tier.
        """
        width = self.block_bytes
        while tokens and (child := end.child(tokens[:width])) is not None:
            common = self._common_blocks(child, tokens[: len(child.tokens)])
            if common < child.num_blocks:
                child = self._split(child, common)
            child.pages.extend(pages[:common])
            child.enter(tier)
            self.counts[tier] += common
            self.lrus[tier].add(child)
            tokens, keys = tokens[common * width :], keys[common * KEY_BYTES :]
            pages, end = pages[common:], child
        if tokens:
            end = self._add(end, tokens, keys, (tier,), pages)
            self.counts[tier] += end.num_blocks
            self.lrus[tier].add(end)
        return end

    def _add(
        self,
        parent: Node,
        tokens: Tokens,
        keys: bytes,
        tiers: Iterable[int],
        pages: Sequence[int],
    ) -> Node:
        node = Node(self, tokens, keys, pages)
        for tier in tiers:
            node.tiers |= 1 << tier
        parent.add_child(node)
        self.num_nodes += 1
        return node

    # --- copies in stores ---

    def admit(self, end: Node, tier: int) -> None:
        """The blocks of a path in memory shall have copies in a store, where they have none."""
        missing = []
        node = end
        while node is not self.root and not node.is_in(tier):
            missing.append(node)
            node = _parent(node)
        for node in reversed(missing):
            if not node.saving >> tier & 1 and not node.detached:
                self.unsaved[tier].setdefault(node)
                self.let_go[tier].pop(node, None)

    def begin_saving(self, node: Node, num_blocks: int, tier: int) -> Node:
        """Lock the first blocks of a node in memory until `end_saving`; the node that has them.

        What else of its path has no copy comes before it, by calls of its own. The node is unsaved,
        or an unsaved one follows it and the store's copy of it went meanwhile.
        """
        node = self.lock(Found(node, num_blocks, 0))
        self.unsaved[tier].pop(node, None)
        self.let_go[tier].pop(node, None)
        node.saving |= 1 << tier
        return node

    def end_saving(self, end: Node, num_blocks: int, tier: int, *, saved: bool) -> Saved:
        """The copies of the last blocks of a path are there, or will not be.

        Those count whose ancestors have one. What is detached was forgotten when it was.
        """
        nodes = []
        node, left = end, num_blocks
        while left:
            nodes.append(node)
            left -= node.num_blocks
            node = _parent(node)
        count = 0
        uncounted: list[BlockKey] = []
        for node in reversed(nodes):
            node.saving &= ~(1 << tier)
            if node.detached:
                continue
            parent = _parent(node)
            if saved and (parent is self.root or parent.is_in(tier)):
                node.enter(tier)
                self.counts[tier] += node.num_blocks
                self._tell_came(node, tier)
                count += node.num_blocks
            else:
                self.unsaved[tier][node] = None
                uncounted += node.block_keys()
        return Saved(count, uncounted[::-1], self.unlock(end))

    def stored(
        self, end: Node, tokens: Tokens, max_blocks: int, readable: int = -1
    ) -> tuple[int, list[BlockKey]]:
        """The next blocks of these tokens that memory does not have and a store has, and which.

        It is the fastest of those whose bits are in `readable`.
        """
        keys: list[BlockKey] = []
        store, width = MEMORY, self.block_bytes
        while len(keys) < max_blocks and (child := end.child(tokens[:width])) is not None:
            tiers = child.tiers & readable
            tier = (tiers & -tiers).bit_length() - 1
            if child.is_in(MEMORY) or not tiers or (keys and tier != store):
                break
            store = tier
            common = self._common_blocks(child, tokens[: len(child.tokens)])
            keys += child.block_keys()[:common]
            if common < child.num_blocks:
                break
            tokens, end = tokens[len(child.tokens) :], child
        return store, keys[:max_blocks]

    # --- removing ---

    def cut(self, leaf: Node, num_blocks: int, tier: int = MEMORY) -> Cut:
        """A tier forgets blocks at the end of an unlocked leaf of its own.

        What another tier has stays in the tree.
        """
        assert not leaf.num_children[tier]
        assert not leaf.locks
        keep = leaf.num_blocks - num_blocks
        if keep and leaf.tiers != 1 << tier:
            self._split(leaf, keep)  # the leaf is its own lower part from here on
            keep = 0
        was_last = leaf.tiers == 1 << tier
        cut = Cut(_backwards(leaf, keep), leaf.block_keys(keep)[::-1], was_last)
        self.counts[tier] -= num_blocks
        self._tell_went(tier, cut.keys)
        self.lrus[tier].shorten(num_blocks)
        if keep:
            del leaf.pages[keep:], leaf.tokens[keep * self.block_bytes :]
            del leaf.keys[keep * KEY_BYTES :]
            return cut
        parent = _parent(leaf)
        leaf.leave(tier)
        if tier == MEMORY:
            del leaf.pages[:]
            self._unmark(leaf)
        elif leaf.is_in(MEMORY):
            self.let_go[tier][leaf] = None
        if not leaf.tiers:
            _unlist(leaf)
            self.num_nodes -= 1
        self.lrus[tier].offer(parent)
        return cut

    def forget(self, node: Node, keep: int, tier: int) -> list[BlockKey]:
        """A store forgets what it has behind the first `keep` blocks of a node; their keys.

        Descendants first. What memory has of them shall have copies again.
        """
        if keep:
            self._split(node, keep)  # the node is its own lower part from here on
        parent = _parent(node)
        keys: list[BlockKey] = []
        there = [one for one in (node, *self.nodes(node)) if one.is_in(tier)]
        for one in reversed(there):
            keys += one.block_keys()[::-1]
            self.counts[tier] -= one.num_blocks
            if not one.locks:
                self.lrus[tier].discard(one)
            one.leave(tier)
            if not one.tiers:
                _unlist(one)
                self.num_nodes -= 1
        self._tell_went(tier, keys)
        self.unsaved[tier].update((one, None) for one in there if one.is_in(MEMORY))
        self.lrus[tier].offer(parent)
        return keys

    def detach(self, node: Node, keep: int = 0) -> Gone:
        """Take what lies behind the first `keep` blocks of a node out of the tree.

        What is locked there is still held by who locked it, but found no more.
        """
        if keep:
            self._split(node, keep)  # the node is its own lower part from here on
        top = _parent(node) if node is not self.root else node
        below = list(self.nodes(node))
        if node is not self.root:
            below.insert(0, node)
            _unlist(node)
        free, held, keys = [], [], []
        if node is self.root:
            self.root.first_blocks.clear()
            self.root.children.clear()
            self.root.num_children = [0] * len(self.lrus)
        for one in reversed(below):
            self._uncount(one)
            keys += one.block_keys()[::-1]
            if one.locks:
                one.detached = True
                held.append(_backwards(one))
            else:
                free.append(_backwards(one))
                if _parent(one).locks:  # which stays for who holds it; any other goes whole
                    _unlist(one)
            one.tiers = 0
        for lru in self._lrus_of(top):
            lru.offer(top)
        nothing = np.empty(0, np.int64)
        return Gone(np.concatenate((*free, nothing)), np.concatenate((*held, nothing)), keys)

    def _uncount(self, node: Node) -> None:
        """A node leaves the tree, and every tier with it."""
        self.num_nodes -= 1
        self._unmark(node)
        for tier, lru in enumerate(self.lrus):
            if node.is_in(tier):
                self.counts[tier] -= node.num_blocks
                self._tell_went(tier, node.block_keys()[::-1])
                if not node.locks:
                    lru.discard(node)

    def _unmark(self, node: Node) -> None:
        for marked in self.marks:
            marked.pop(node, None)

    # --- telling ---

    def present(self) -> Iterator[Came]:
        """All that the tiers have, as if it came now."""
        for node in self.nodes():
            for tier in range(len(self.lrus)):
                if node.is_in(tier):
                    yield _came(node, tier)

    def _tell_came(self, node: Node, tier: int) -> None:
        if self.listener is not None:
            self.listener(_came(node, tier))

    def _tell_went(self, tier: int, keys: list[BlockKey]) -> None:
        if self.listener is not None and keys:
            self.listener(Went(tier, keys))

    # --- shape ---

    def _lrus_of(self, node: Node) -> Iterable[Lru]:
        return [lru for lru in self.lrus if node.is_in(lru.tier)]

    def _common_blocks(self, node: Node, tokens: bytes) -> int:
        if node.tokens.startswith(tokens):
            return len(tokens) // self.block_bytes
        return (
            _common_rows(node.tokens, tokens, self.row_bytes) * self.row_bytes // self.block_bytes
        )

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Cut a node in two; returns the upper part, which is new.

        The lower part stays the same object: whoever locked the node still ends at its end.
        """
        parent = _parent(node)
        place = num_blocks * self.block_bytes
        is_listed = _unlist(node)
        upper = Node(
            self,
            bytes(node.tokens[:place]),
            bytes(node.keys[: num_blocks * KEY_BYTES]),
            node.pages[:num_blocks],
        )
        upper.locks, upper.detached, upper.stamp = node.locks, node.detached, node.stamp
        upper.tiers, upper.saving, upper.hits = node.tiers, node.saving, node.hits
        for marked in self.marks:
            if node in marked:
                marked[upper] = None
        del node.tokens[:place], node.keys[: num_blocks * KEY_BYTES], node.pages[:num_blocks]
        upper.add_child(node)
        upper.parent = parent
        if is_listed:
            parent.add_child(upper)
        if not node.detached:
            self.num_nodes += 1
        return upper

    def _merge(self, nodes: Sequence[Node]) -> None:
        """Join nodes, each the only child of the next, into the first and lowest of them."""
        if len(nodes) == 1:
            return
        self.num_nodes -= len(nodes) - 1
        lowest, parent = nodes[0], _parent(nodes[-1])
        parent.remove_child(nodes[-1])
        lowest.tokens = bytearray().join(node.tokens for node in reversed(nodes))
        lowest.keys = bytearray().join(node.keys for node in reversed(nodes))
        pages = array("q")
        for node in reversed(nodes):
            pages.extend(node.pages)
        lowest.pages = pages
        lowest.hits = nodes[-1].hits  # whoever came to a lower one went through this one
        for node in nodes[1:]:
            node.tiers = 0
            self._unmark(node)
        parent.add_child(lowest)


def _came(node: Node, tier: int) -> Came:
    return Came(tier, _parent(node).last_key, bytes(node.keys), bytes(node.tokens))


def _may_be_one(node: Node, below: Node) -> bool:
    """Whether a node and its only child, both just unlocked, are alike in all but their blocks.

    They were last touched together, so one node makes the LRU no coarser.
    """
    tree = node.tree
    return (
        node.children == [below]
        and (node.tiers, node.stamp) == (below.tiers, below.stamp)
        and all((node in marked) == (below in marked) for marked in tree.marks)
    )


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
