"""What must hold of the cache at any time, recounted from pages and trees."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvd.arena.page_table import PageState
from kvd.cache.radix import MEMORY
from kvd.protocol.keys import chain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.cache.memory import ArenaState, Namespace
    from kvd.cache.radix import Node
    from kvd.cache.state import CacheState


def check(state: CacheState) -> None:
    """AssertionError where the books differ."""
    for arena in state.memory.arenas.values():
        arena.pool.check()
        _check_arena(state, arena)
    for namespace in state.namespaces.values():
        _check_tree(state, namespace)
        _check_pages(state, namespace)


def _check_arena(state: CacheState, arena: ArenaState) -> None:
    held = {
        PageState.COMMITTED: [
            page for space in arena.namespaces for node in space.tree.nodes() for page in node.pages
        ],
        PageState.DETACHED: [
            page
            for space in arena.namespaces
            for node in _locks(state, space)
            if node.detached
            for page in node.pages
        ],
        PageState.RESERVED: [
            page
            for lease in state.leases
            if lease.namespace.arena is arena
            for page in lease.reserved
        ],
        PageState.QUARANTINED: [
            page
            for pieces in state.quarantined.values()
            for other, pages in pieces
            if other is arena
            for page in pages.tolist()
        ],
    }
    for page_state, pages in held.items():
        found = (arena.pool.states == page_state).nonzero()[0].tolist()
        assert sorted(pages) == found, page_state


def _check_pages(state: CacheState, space: Namespace) -> None:
    detached = sum(node.num_blocks for node in _locks(state, space) if node.detached)
    reserved = sum(len(lease.reserved) for lease in state.leases if lease.namespace is space)
    assert space.num_pages == space.tree.num_blocks + detached + reserved
    nodes = list(space.tree.nodes())
    assert space.tree.num_nodes == len(nodes)
    for tier, lru in enumerate(space.tree.lrus):
        here = [node for node in nodes if node.is_in(tier)]
        assert space.tree.counts[tier] == sum(node.num_blocks for node in here)
        assert lru.num_blocks == sum(node.num_blocks for node in here if not node.locks)
        leaves = [node for node in here if not node.locks and not node.num_children[tier]]
        coldest = lru.coldest()
        assert (coldest in leaves) if leaves else coldest is None
        assert coldest is None or coldest.stamp == min(leaf.stamp for leaf in leaves)


def _check_tree(state: CacheState, space: Namespace) -> None:
    tree, locks = space.tree, _locks(state, space)
    for node in tree.nodes():
        assert not node.detached
        assert node.num_blocks >= 1
        assert len(node.pages) == (node.num_blocks if node.is_in(MEMORY) else 0)
        assert node.block_keys() == chain(_before(node).last_key, node.tokens, tree.block_bytes)
        _check_tiers(node)
        assert len(node.tokens) == node.num_blocks * space.tree.block_bytes
        assert node.locks == locks[node]
        assert node.first_blocks == sorted(node.first_blocks)
        for child in node.children:
            assert child.parent is node
            assert node.locks or child.stamp <= node.stamp
    for lease in state.leases:
        if lease.namespace is space:
            assert len(lease.node.path_pages()) == lease.num_blocks


def _check_tiers(node: Node) -> None:
    """A tier that has a block has all before it; a store has a copy, awaits one or has none."""
    tree, parent = node.tree, _before(node)
    assert node.tiers
    for tier in range(len(tree.lrus)):
        assert node.num_children[tier] == sum(child.is_in(tier) for child in node.children)
        assert not node.is_in(tier) or parent is tree.root or parent.is_in(tier)
        is_unsaved, is_saving = node in tree.unsaved[tier], bool(node.saving >> tier & 1)
        is_let_go = node in tree.let_go[tier]
        assert is_unsaved + is_saving + is_let_go + node.is_in(tier) <= 1
        assert node.is_in(MEMORY) or not (is_unsaved or is_saving or is_let_go)


def _before(node: Node) -> Node:
    assert node.parent is not None
    return node.parent


def _locks(state: CacheState, space: Namespace) -> Counter[Node]:
    """How often each node is held, by all paths of leases and pins."""
    locks: Counter[Node] = Counter()
    for end in _ends(state, space):
        locks.update(end.path())
    return locks


def _ends(state: CacheState, space: Namespace) -> Iterator[Node]:
    for lease in state.leases:
        if lease.namespace is space:
            yield lease.node
            if lease.tail_node is not None:
                yield lease.tail_node
    for pin in state.pins:
        if pin.namespace is space:
            yield pin.node
    for write in state.stores.writes:
        for piece in write.pieces:
            if piece.space is space:
                yield piece.end
