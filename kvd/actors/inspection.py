"""What operators ask of a tree: what it has, and why a match ends where it ends.

Both only look: nothing is leased or touched. What they look at is bounded, so that each holds the
daemon for a few milliseconds at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import groupby, islice
from typing import TYPE_CHECKING

import numpy as np

from kvd.cache.rows import row_bytes, rows_of
from kvd.protocol.codec import TOKEN_BYTES
from kvd.protocol.keys import KEY_BYTES
from kvd.protocol.messages import ExplainReply, NearMiss, Stretch, TreeNode, TreeReply

if TYPE_CHECKING:
    from kvd.actors.manager import Manager
    from kvd.cache.memory import Namespace
    from kvd.cache.radix import Found, Node
    from kvd.protocol.codec import Tokens
    from kvd.protocol.messages import ExplainRequest, Extras, TreeRequest

# Of a node that is listed, so many first tokens are told.
NUM_TOKENS = 16
# So many nodes are looked at to find the biggest.
MAX_LOOKED_AT = 10_000
# In other namespaces, so many tokens are looked for, and so many namespaces are told.
MAX_NEAR_TOKENS = 16_384
NUM_NEAR = 10


def listed(manager: Manager, request: TreeRequest, tokens: Tokens, epoch: int) -> TreeReply:
    """The answer to a TreeRequest. Raises UnknownNamespace."""
    space = manager.known(request.namespace)
    tree, layout = space.tree, space.arena.layout
    found = tree.find(rows_of(tokens, (), 0, tree.row_bytes), anywhere=True)
    places: dict[Node, int] = {}
    nodes: list[TreeNode] = []
    for node in islice(_biggest_first(found.node, request.depth), request.limit):
        assert node.parent is not None
        places[node] = len(nodes)
        nodes.append(
            TreeNode(
                parent=places.get(node.parent, -1),
                num_blocks=node.num_blocks,
                num_children=len(node.children),
                tiers=_tiers(node, manager),
                tokens=_first_ids(node),
                hits=node.hits,
                age_touches=manager.state.memory.num_touches - node.stamp,
                is_locked=node.locks > 0,
            )
        )
    return TreeReply(
        id=request.id,
        epoch=epoch,
        nodes=tuple(nodes),
        num_nodes=tree.num_nodes,
        num_tokens=found.total_blocks * layout.block_size,
        block_size=layout.block_size,
        page_bytes=layout.page_bytes,
    )


def _biggest_first(top: Node, depth: int) -> Iterator[Node]:
    """The nodes below `top`: again and again the biggest of those whose parent came before."""
    left = MAX_LOOKED_AT
    heap: list[tuple[int, int, int, Node]] = []

    def reach(node: Node, level: int) -> None:
        nonlocal left
        for child in node.children[:left] if level <= depth else ():
            heappush(heap, (-child.num_blocks, -left, level, child))
            left -= 1

    reach(top, 1)
    while heap:
        _, _, level, node = heappop(heap)
        yield node
        reach(node, level + 1)


def _first_ids(node: Node) -> bytes:
    """The ids of its first tokens, without what else its rows have."""
    rows = np.frombuffer(node.tokens[: NUM_TOKENS * node.tree.row_bytes], np.uint8)
    return rows.reshape(-1, node.tree.row_bytes)[:, :TOKEN_BYTES].tobytes()


def explained(
    manager: Manager, request: ExplainRequest, tokens: Tokens, epoch: int
) -> ExplainReply:
    """The answer to an ExplainRequest. Raises UnknownNamespace, and BadRequest for extras."""
    space = manager.known(request.namespace)
    tree, block_size = space.tree, space.arena.layout.block_size
    rows = rows_of(tokens, request.extras, 0, tree.row_bytes)
    found = tree.find(rows, anywhere=True)
    rest = rows[found.total_blocks * tree.block_bytes :]
    num_evicted = manager.state.memory.evicted.num_following(
        _last_key(found), rest, 0, tree.block_bytes
    )
    return ExplainReply(
        id=request.id,
        epoch=epoch,
        stretches=tuple(_stretches(found, manager)),
        num_common_tokens=tree.num_common(found, rest),
        num_evicted_tokens=num_evicted * block_size,
        block_size=block_size,
        near=_near(manager.state.namespaces.values(), space, tokens, request.extras, found),
    )


def _stretches(found: Found, manager: Manager) -> Iterator[Stretch]:
    left = found.total_blocks
    for tiers, nodes in groupby(found.node.path(), key=lambda node: _tiers(node, manager)):
        num_blocks = min(left, sum(node.num_blocks for node in nodes))
        left -= num_blocks
        yield Stretch(num_blocks * found.node.tree.block_bytes // found.node.tree.row_bytes, tiers)


def _last_key(found: Found) -> bytes:
    """The key that the block behind the found ones follows."""
    end = found.num_blocks * KEY_BYTES
    return bytes(found.node.keys[:end][-KEY_BYTES:]) or found.node.tree.key


def _near(
    spaces: Iterable[Namespace], here: Namespace, tokens: Tokens, extras: Extras, found: Found
) -> tuple[NearMiss, ...]:
    """Other namespaces that have more of these tokens, whatever their blocks' size is."""
    least = found.total_blocks * here.arena.layout.block_size
    tokens = tokens[: MAX_NEAR_TOKENS * TOKEN_BYTES]
    with_extras = tuple(extra for extra in extras if extra[0] < MAX_NEAR_TOKENS)
    rows = {
        row_bytes(extras=wide): rows_of(tokens, with_extras * wide, 0, row_bytes(extras=wide))
        for wide in (False, True)
    }
    near = []
    for space in spaces:
        there = space.tree.find(rows[space.tree.row_bytes], anywhere=True)
        if (num_tokens := there.total_blocks * space.arena.layout.block_size) > least:
            near.append(NearMiss(space.id, num_tokens))
    return tuple(sorted(near, key=lambda one: -one.num_tokens)[:NUM_NEAR])


def _tiers(node: Node, manager: Manager) -> tuple[str, ...]:
    return tuple(name for tier, name in enumerate(manager.tier_names) if node.is_in(tier))
