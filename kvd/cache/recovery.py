"""Recovery: trees from what an earlier epoch left, in the page tables and in the stores.

Both say of each block what it is and which block it follows. What does not lead back to a root, or
is not what its key says, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from kvd.arena.page_table import NO_PARENT, PageState
from kvd.protocol.keys import KEY_BYTES, BlockKey, chain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.arena.page_table import FoundRecords
    from kvd.arena.runs import Pages
    from kvd.cache.memory import Namespace
    from kvd.cache.radix import Node

ROOT = -1
NOWHERE = -2


@dataclass(frozen=True, slots=True)
class Forest:
    """Blocks in any order: of each the place of the one before it (ROOT, NOWHERE) and its rows.

    `spaces` has the namespace of each block at a root, by its place. Blocks of a store have keys,
    those in memory pages.
    """

    before: NDArray[np.int64]
    rows: Sequence[bytes]
    spaces: dict[int, Namespace]
    keys: Sequence[BlockKey] = ()
    pages: Sequence[int] = ()


def plant(forest: Forest, tier: int) -> NDArray[np.bool_]:
    """Add the blocks to the trees of their namespaces, which nobody uses yet; which were added."""
    count = len(forest.before)
    # The children of each block stand together in `order`, from `starts` of it on.
    order = np.argsort(forest.before, kind="stable")
    starts = np.searchsorted(forest.before[order], np.arange(count + 1)).tolist()
    children = order.tolist()
    planted = np.zeros(count, np.bool_)
    waiting = [(space, space.tree.root, place) for place, space in forest.spaces.items()]
    while waiting:
        space, end, first = waiting.pop()
        members = [first]
        following = children[starts[first] : starts[first + 1]]
        while len(following) == 1:
            members += following
            following = children[starts[members[-1]] : starts[members[-1] + 1]]
        good = _good(forest, space, end, members, tier)
        if good:
            planted[members[: len(good)]] = True
            end = space.tree.recover(
                end,
                b"".join(forest.rows[place] for place in members[: len(good)]),
                b"".join(good),
                tier,
                [forest.pages[place] for place in members[: len(good)]] if forest.pages else (),
            )
        if len(good) == len(members):
            waiting += [(space, end, place) for place in following]
    return planted


def _good(
    forest: Forest, space: Namespace, end: Node, members: list[int], tier: int
) -> list[BlockKey]:
    """The keys of a chain of blocks, as far as they are what they should be, and are not there."""
    width = space.tree.block_bytes
    whole = takewhile(lambda row: len(row) == width, (forest.rows[place] for place in members))
    rows = list(whole)
    if not rows:
        return []
    twin = end.child(rows[0])
    if twin is not None and twin.is_in(tier):
        return []
    keys = chain(end.last_key, b"".join(rows), width)
    if not forest.keys:
        return keys
    wrong = (at for at, key in enumerate(keys) if key != forest.keys[members[at]])
    return keys[: next(wrong, len(keys))]


# --- page tables ---


@dataclass(frozen=True, slots=True)
class FoundPages:
    """What becomes of an adopted arena's pages.

    `quarantined` are by the session that may still write them, 0 where that is not known.
    """

    forest: Forest
    quarantined: dict[int, Pages]


def read_table(found: FoundRecords, block_bytes: int, spaces: dict[int, Namespace]) -> FoundPages:
    """What the page table of an adopted arena says; `spaces` by the numbers that it knows.

    The rows of one block are of `block_bytes`.
    """
    records, pages, sealed = found.records, found.pages, found.sealed
    is_block = found.are_committed & np.isin(records["namespace"], list(spaces))
    before = _places_before(records, pages, is_block)
    roots = np.flatnonzero(before == ROOT)
    numbers = records["namespace"][roots].tolist()
    forest = Forest(
        before,
        [rows.tobytes()[:block_bytes] for rows in records["rows"]],
        {place: spaces[number] for place, number in zip(roots.tolist(), numbers, strict=True)},
        pages=pages.tolist(),
    )
    is_free = sealed & np.isin(records["state"], (PageState.UNBACKED, PageState.FREE))
    in_doubt = ~is_free & ~found.are_committed
    owners = np.where(sealed, records["session"], 0)
    return FoundPages(
        forest,
        {
            int(owner): pages[in_doubt & (owners == owner)]
            for owner in np.unique(owners[in_doubt]).tolist()
        },
    )


def _places_before(
    records: NDArray[np.void], pages: Pages, is_block: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """For each record the place of the block before it, ROOT, or NOWHERE where it is no block."""
    if not len(pages):
        return np.empty(0, np.int64)
    parents = records["parent"]
    at = np.minimum(np.searchsorted(pages, parents), len(pages) - 1)
    parent = records[at]
    follows = (
        (pages[at] == parents)
        & is_block[at]
        & (parent["generation"] == records["parent_generation"])
        & (parent["namespace"] == records["namespace"])
        & (parent["block"] + 1 == records["block"])
    )
    is_first = (parents == NO_PARENT) & (records["block"] == 0)
    before = np.where(is_first, ROOT, np.where(follows, at, NOWHERE))
    return np.where(is_block, before, NOWHERE).astype(np.int64)


# --- stores ---


def about(parent: bytes, rows: bytes) -> bytes:
    """What a store keeps of a block beside its data: the key before its own, and its rows.

    Its own key is the digest of both, so a record that was damaged is seen as such.
    """
    return parent + rows


def read_store(records: Sequence[tuple[BlockKey, bytes]], spaces: dict[bytes, Namespace]) -> Forest:
    """What a store has; `spaces` by their keys."""
    places = {key: place for place, (key, _) in enumerate(records)}
    before = np.empty(len(records), np.int64)
    roots: dict[int, Namespace] = {}
    for place, (_, what) in enumerate(records):
        parent = what[:KEY_BYTES]
        if (space := spaces.get(parent)) is not None:
            roots[place] = space
            before[place] = ROOT
        else:
            before[place] = places.get(BlockKey(parent), NOWHERE)
    rows = [what[KEY_BYTES:] for _, what in records]
    return Forest(before, rows, roots, [key for key, _ in records])
