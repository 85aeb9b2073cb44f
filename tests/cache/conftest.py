"""A small cache whose blocks are letters: `cache.fill("abc")` commits three blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvd.cache.state import ArenaState, CacheState, Committed, Freed, Granted, Namespace, Plan
from kvd.protocol.keys import Identity
from kvd.protocol.layout import Layout

if TYPE_CHECKING:
    from kvd.cache.leases import Lease

LAYOUT = Layout(1, 1, 2, "float16", block_size=1, num_planes=1)  # 4 bytes a page
EXTENT = 16


def packed(text: str) -> bytes:
    return np.array([ord(letter) for letter in text], "<u4").tobytes()


class Cache:
    """One CacheState with one namespace, "", and clients that do as they should."""

    def __init__(self, num_pages: int = 16, *, backed: bool = True, **settings: Any) -> None:
        self.state = CacheState(num_pages * LAYOUT.page_bytes, 64, **settings)
        self.arena: ArenaState = self.state.add_arena(LAYOUT, num_pages, EXTENT)
        self.namespace = self.tenant("")
        if backed:
            for run in self.state.begin_backing(self.arena, num_pages):
                self.state.end_backing(self.arena, run, backed=True)
        self._lease_id = 1000

    def tenant(self, salt: str) -> Namespace:
        identity = Identity("model", "main")
        return self.state.open_namespace(salt.encode(), identity, salt, self.arena)

    def match(self, text: str, session: int = 1, lease: int | None = None, salt: str = "") -> Lease:
        self._lease_id += 1
        lease_id = self._lease_id if lease is None else lease
        return self.state.match(session, lease_id, self.tenant(salt), packed(text)).lease

    def reserve(self, lease: Lease, count: int) -> list[int]:
        have = len(lease.granted)
        answer = self.state.reserve(lease, have, have + count)
        assert isinstance(answer, Granted)
        return list(answer.pages.tolist())

    def commit(self, lease: Lease, text: str, pages: list[int] | None = None) -> list[int]:
        """Commit letters behind the lease's prefix; the pages that now hold them."""
        pages = self.reserve(lease, len(text)) if pages is None else pages
        answer = self.state.commit(lease, lease.num_blocks, np.array(pages, np.int64), packed(text))
        return list(answer.pages.tolist())

    def hold(self, text: str, session: int = 1, salt: str = "") -> Lease:
        """A lease on all of these blocks, computed where they are not there."""
        lease = self.match(text, session, salt=salt)
        if rest := text[lease.num_blocks :]:
            self.commit(lease, rest)
        return lease

    def fill(self, text: str, salt: str = "") -> None:
        self.release(self.hold(text, salt=salt))

    def release(self, lease: Lease) -> Plan:
        return self.state.release(lease.session, lease.id)

    def texts(self, salt: str = "") -> set[str]:
        """The ends of all branches of the tree, from the root."""
        return {
            "".join(map(chr, np.frombuffer(node.path_tokens(), "<u4")))
            for node in self.tenant(salt).tree.nodes()
            if not node.children
        }

    def counts(self) -> dict[str, int]:
        """How many pages are in each state, where there are some."""
        return {name: count for name, count in self.arena.pool.counts().items() if count}


def freed(plan: Plan) -> list[int]:
    return [page for step in plan if isinstance(step, Freed) for page in step.pages.tolist()]


def committed(plan: Plan) -> list[Committed]:
    return [step for step in plan if isinstance(step, Committed)]


@pytest.fixture
def cache() -> Cache:
    return Cache()
