"""What must hold of the cache at any time, recounted from pages and trees."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvd.arena.page_table import PageState

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
    assert space.lru.num_blocks == sum(node.num_blocks for node in space.lru)
    assert space.tree.num_blocks == sum(node.num_blocks for node in space.tree.nodes())
    assert space.tree.num_nodes == sum(1 for _ in space.tree.nodes())


def _check_tree(state: CacheState, space: Namespace) -> None:
    age = {node: place for place, node in enumerate(space.lru)}
    locks = _locks(state, space)
    for node in space.tree.nodes():
        assert not node.detached
        assert node.num_blocks >= 1
        assert len(node.tokens) == node.num_blocks * space.tree.block_bytes
        assert node.locks == locks[node]
        assert (node in space.lru) == (node.locks == 0)
        assert node.first_blocks == sorted(node.first_blocks)
        for child in node.children:
            assert child.parent is node
            assert node.locks or age[child] < age[node]
    for lease in state.leases:
        if lease.namespace is space:
            assert len(lease.node.path_pages()) == lease.num_blocks


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
