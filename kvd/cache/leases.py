"""Leases: a session's right to pages; granted, released, or ended with its session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvd.arena.runs import runs_of
from kvd.protocol.errors import LeaseEnded, LimitExceeded

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.cache.memory import Namespace
    from kvd.cache.radix import Node
    from kvd.protocol.messages import Runs, Tail

# The session, which no client has, of leases that the daemon itself holds.
OWN_SESSION = 0
# A release that overtook its match is remembered, so that the match is refused. A client has few
# calls under way; the oldest of more than this many tombstones goes.
MAX_TOMBSTONES = 4096


@dataclass(eq=False, slots=True)
class Lease:
    """One lease. Its path, from the root to the end of `node`, is locked.

    The path has `num_blocks` blocks: those matched and those committed since. Beside it the block
    at the end of `tail_node` may be locked, of which only the first tokens agree. `asked` tells a
    repeated request from another. The pages reserved for it are `granted` in their order, from its
    beginning or its last abort on, so that a repeated reserve gets its first answer. `reserved` are
    the pages that are not committed. `drops` is the namespace's generation at its beginning, and
    `is_counted` says that its match is among those that were counted.
    """

    session: int
    id: int
    namespace: Namespace
    asked: bytes
    node: Node
    num_blocks: int
    num_matched: int
    slot: int
    generation: int
    drops: int
    since: float
    is_counted: bool = False
    tail_node: Node | None = None
    tail: Tail | None = None
    granted: Pages = field(default_factory=lambda: np.empty(0, np.int64))
    reserved: set[int] = field(default_factory=set)

    @property
    def runs(self) -> Runs:
        """The pages of the matched blocks, in order."""
        return runs_of(self.node.path_pages()[: self.num_matched])


class LeaseTable:
    """The leases of all sessions, and the slots in the shared header that fence them."""

    def __init__(self, num_slots: int) -> None:
        self._by_session: dict[int, dict[int, Lease]] = {}
        self._tombstones: dict[int, OrderedDict[int, None]] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._generations: dict[int, int] = {}
        self.num_slots = num_slots

    def __iter__(self) -> Iterator[Lease]:
        for leases in self._by_session.values():
            yield from leases.values()

    def __len__(self) -> int:
        return self.num_slots - len(self._free_slots)

    def of_session(self, session: int) -> list[Lease]:
        return list(self._by_session.get(session, {}).values())

    def count(self, session: int) -> int:
        return len(self._by_session.get(session, ()))

    def find(self, session: int, lease: int) -> Lease | None:
        return self._by_session.get(session, {}).get(lease)

    def has(self, lease: Lease) -> bool:
        """Whether a lease has not ended."""
        return self.find(lease.session, lease.id) is lease

    def get(self, session: int, lease: int) -> Lease:
        """Raises LeaseEnded for an id that is not, or no longer, a lease of this session."""
        if found := self.find(session, lease):
            return found
        raise LeaseEnded(f"lease {lease} has ended or was never granted")

    def take_slot(self) -> tuple[int, int]:
        """A slot for a new lease and the generation that stands in it."""
        if not self._free_slots:
            raise LimitExceeded(
                f"all {self.num_slots} leases are in use", num_leases=self.num_slots
            )
        slot = self._free_slots.pop()
        return slot, self._generations.setdefault(slot, 0)

    def add(self, lease: Lease) -> None:
        self._by_session.setdefault(lease.session, {})[lease.id] = lease

    def remove(self, lease: Lease) -> None:
        """End a lease: its slot's generation is another one from here on."""
        del self._by_session[lease.session][lease.id]
        self._generations[lease.slot] += 1
        self._free_slots.append(lease.slot)

    def bury(self, session: int, lease: int) -> None:
        """Remember that this id has ended."""
        stones = self._tombstones.setdefault(session, OrderedDict())
        stones[lease] = None
        stones.move_to_end(lease)
        if len(stones) > MAX_TOMBSTONES:
            stones.popitem(last=False)

    def is_buried(self, session: int, lease: int) -> bool:
        return lease in self._tombstones.get(session, {})

    def forget_session(self, session: int) -> None:
        """Drop what was remembered of a session that has no lease left."""
        assert not self._by_session.pop(session, {})
        self._tombstones.pop(session, None)
