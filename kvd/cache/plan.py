"""What the cache decides: plans, made of steps, and answers that carry one.

A plan's steps are carried out in their order before the answer leaves the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.cache.leases import Lease
    from kvd.protocol.keys import BlockKey
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Run, Shortage


@dataclass(frozen=True, slots=True)
class Reserved:
    """Note that `session` may write these pages."""

    arena: int
    pages: Pages
    session: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Note these blocks, the first of which follows the block in page `parent` (-1: none)."""

    arena: int
    pages: Pages
    parent: int
    first_block: int
    rows: bytes
    namespace: int


@dataclass(frozen=True, slots=True)
class Detached:
    """Note that these blocks are no blocks any more, though leases hold their pages."""

    arena: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Freed:
    """Note that nobody holds these pages; descendants stand before their parents."""

    arena: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Note that a session that is over could still write these pages."""

    arena: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Ended:
    """Void the lease in this slot of the shared header, by the next generation."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Back:
    """Have memory given to these extents; `end_backing` is told when it is there."""

    arena: int
    run: Run


@dataclass(frozen=True, slots=True)
class Unback:
    """Take the memory of these extents back, before any is given after this step."""

    arena: int
    run: Run


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Have a store forget these blocks, descendants before their parents.

    After all that is on its way to it, and before what goes there from now on.
    """

    tier: int
    layout: Layout
    keys: list[BlockKey]


@dataclass(frozen=True, slots=True)
class Unnamed:
    """Note no more what a namespace's number and key stand for: nothing is left of it."""

    arena: int
    namespace: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """Close an arena: it has no page that anybody holds, and no namespace."""

    arena: int


Step: TypeAlias = (
    Reserved
    | Committed
    | Detached
    | Freed
    | Quarantined
    | Ended
    | Back
    | Unback
    | Forgotten
    | Unnamed
    | Removed
)
Plan: TypeAlias = list[Step]


def merged(plan: Plan) -> Plan:
    """A plan that only ends things, with one step for all pages that it frees in an arena."""
    freed: dict[int, list[Pages]] = {}
    others: Plan = []
    for step in plan:
        if isinstance(step, Freed):
            freed.setdefault(step.arena, []).append(step.pages)
        else:
            others.append(step)
    return [*others, *(Freed(arena, np.concatenate(pages)) for arena, pages in freed.items())]


@dataclass(frozen=True, slots=True)
class Matched:
    lease: Lease
    plan: Plan


@dataclass(frozen=True, slots=True)
class Lacking:
    """Between a match and more blocks: pages to verify, or else records of a store to read."""

    pages: Pages
    tier: int = 0
    keys: list[BlockKey] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Granted:
    """Pages for a lease."""

    pages: Pages
    plan: Plan


@dataclass(frozen=True, slots=True)
class Short:
    """No pages now: what the plan has backed is to be waited for, or what others hold.

    `hopeless`: nobody else holds any, none is on its way, and the plan frees none for the next try.
    """

    shortage: Shortage
    hopeless: bool
    plan: Plan


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    pages: Pages
    num_duplicates: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Pinned:
    pin: int
    num_blocks: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class DropAnswer:
    """How many blocks left each tier, and how many of those in memory leases still hold."""

    num_blocks: list[int]
    num_detached: int
    plan: Plan
