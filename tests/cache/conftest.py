"""A small cache whose tokens are letters: `cache.fill("abc")` commits three blocks of one each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from kvd.cache.memory import ArenaState, Namespace, Quota
from kvd.cache.plan import Back, Committed, Forgotten, Freed, Granted, Lacking, Plan, Short
from kvd.cache.radix import MEMORY, Node, Tree
from kvd.cache.state import CacheState
from kvd.cache.stores import StoreState
from kvd.config import CacheConfig, LimitConfig
from kvd.protocol.codec import TOKEN_BYTES
from kvd.protocol.keys import Identity
from kvd.protocol.layout import Layout
from kvd.protocol.messages import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.cache.leases import Lease
    from kvd.cache.stores import Admission, Write

LAYOUT = Layout(1, 1, 2, "float16", block_size=1, num_planes=1)  # 4 bytes a page
WIDE = Layout(2, 1, 2, "float16", block_size=1, num_planes=1)  # 8 bytes a page
FOURS = Layout(1, 1, 2, "float16", block_size=4, num_planes=1)  # 16 bytes a page
EXTENT = 16


def histories(num_steps: int) -> settings:
    """A hundred random histories; with KVD_STRESS=20, twenty times as many."""
    return settings(
        max_examples=100 * int(os.environ.get("KVD_STRESS", "1")),
        stateful_step_count=num_steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def packed(text: str) -> bytes:
    return np.array([ord(letter) for letter in text], "<u4").tobytes()


class Cache:
    """One CacheState with one namespace, "", and clients that do as they should."""

    def __init__(
        self,
        num_pages: int = 16,
        *,
        layout: Layout = LAYOUT,
        row_bytes: int = TOKEN_BYTES,
        backed: bool = True,
        watermarks: tuple[float, float] = (1.0, 1.0),
        stores: Sequence[StoreState] = (),
        **limits: Any,
    ) -> None:
        config = CacheConfig(*watermarks)
        limits = {"session_reserved_fraction": 1.0} | limits
        capacity = num_pages * layout.page_bytes
        self.state = CacheState(capacity, 64, config, LimitConfig(**limits), stores)
        self.memory = self.state.memory
        self.row_bytes = row_bytes
        self.arena = self.add_arena(layout, num_pages)
        self.namespace = self.tenant("", layout)
        if backed:
            self.back(num_pages)
        self._lease_id = 1000

    def add_arena(self, layout: Layout, num_pages: int) -> ArenaState:
        return self.state.add_arena(layout, self.row_bytes, num_pages, EXTENT)

    def add_wide(self, num_pages: int, *, backed: bool = True) -> ArenaState:
        """A second layout, with a namespace "wide"."""
        arena = self.add_arena(WIDE, num_pages)
        self.tenant("wide", WIDE)
        if backed:
            self.back(num_pages, arena)
        return arena

    def fill_wide_extent(self) -> None:
        """Memory moves there, and blocks of sixteen letters w fill it."""
        lease = self.match("w" * 16, salt="wide")
        assert isinstance(self.state.reserve(lease, 0, 16), Short)
        self.end_backing(0, 16, lease.namespace.arena)
        self.commit(lease, "w" * 16)
        self.release(lease)

    def let_time_pass(self) -> None:
        for _ in range(4):
            self.memory.touch()

    def tenant(
        self,
        salt: str,
        layout: Layout = LAYOUT,
        *,
        session: int = 1,
        **quota: int,
    ) -> Namespace:
        arena = self.state.find_arena(layout, self.row_bytes)
        assert arena
        return self.state.open_namespace(
            session,
            salt.encode(),
            Identity("model", "main"),
            salt,
            arena,
            quota=Quota(**quota),
        )

    def begin_backing(self, num_pages: int, arena: ArenaState | None = None) -> list[Run]:
        plan: Plan = []
        self.memory.begin_backing(arena or self.arena, num_pages, plan)
        return backing(plan)

    def end_backing(
        self, first: int, count: int, arena: ArenaState | None = None, *, backed: bool = True
    ) -> Plan:
        return self.memory.end_backing(arena or self.arena, Run(first, count), backed=backed)

    def back(self, num_pages: int, arena: ArenaState | None = None) -> None:
        for run in self.begin_backing(num_pages, arena):
            self.end_backing(run.first, run.count, arena)

    def match(
        self,
        text: str,
        session: int = 1,
        lease: int | None = None,
        salt: str = "",
        *,
        exact_tail: bool = False,
    ) -> Lease:
        self._lease_id += 1
        lease_id = self._lease_id if lease is None else lease
        space, tokens = self._named(salt), packed(text)
        lease = self.state.match(session, lease_id, space, tokens, exact_tail=exact_tail).lease
        num_tokens = lease.num_matched * space.arena.layout.block_size
        num_tokens += lease.tail.num_tokens if lease.tail else 0
        self.state.count_match(lease, tokens, {"memory": num_tokens})
        return lease

    def fork(self, source: Lease, lease: int | None = None) -> Lease:
        self._lease_id += 1
        lease_id = self._lease_id if lease is None else lease
        return self.state.fork(source.session, lease_id, source).lease

    def reserve(self, lease: Lease, count: int) -> list[int]:
        have = len(lease.granted)
        answer = self.state.reserve(lease, have, have + count)
        assert isinstance(answer, Granted)
        return list(answer.pages.tolist())

    def commit(self, lease: Lease, text: str, pages: list[int] | None = None) -> list[int]:
        """Commit letters behind the lease's prefix; the pages that now hold them."""
        num_blocks = len(text) // lease.namespace.arena.layout.block_size
        pages = self.reserve(lease, num_blocks) if pages is None else pages
        answer = self.state.commit(lease, lease.num_blocks, np.array(pages, np.int64), packed(text))
        return list(answer.pages.tolist())

    def hold(self, text: str, session: int = 1, salt: str = "") -> Lease:
        """A lease on all of these blocks, computed where they are not there."""
        lease = self.match(text, session, salt=salt)
        if rest := text[lease.num_blocks * lease.namespace.arena.layout.block_size :]:
            self.commit(lease, rest)
        return lease

    def fill(self, text: str, salt: str = "") -> None:
        self.release(self.hold(text, salt=salt))

    def begin_write(self, store: StoreState, num_blocks: int = 64) -> Write:
        write = self.state.stores.next_write(store, num_blocks * self.arena.layout.page_bytes, [])
        assert write
        return write

    def end_write(self, write: Write, *, saved: bool = True) -> int:
        return self.state.stores.end_write(write, [], saved=saved)

    def save(self, store: StoreState) -> None:
        """All that waits goes down."""
        while write := self.state.stores.next_write(store, 1 << 20, []):
            self.end_write(write)

    def store(self, text: str, store: StoreState) -> None:
        """Blocks that a store has and memory has no more."""
        self.fill(text)
        self.save(store)
        self.evict(len(text))

    def evict(self, count: int) -> None:
        """So many of the least recent blocks leave memory."""
        for _ in range(count):
            leaf = self.namespace.lru.coldest()
            assert leaf is not None
            self.memory.free(self.namespace, self.namespace.tree.cut(leaf, 1).pages, [])

    def lacking(self, text: str) -> Lacking | None:
        return self.state.lacking(self.namespace, packed(text))

    def release(self, lease: Lease) -> Plan:
        return self.state.release(lease.session, lease.id)

    def pin(self, text: str, owner: str = "me", seconds: float = 10, now: float = 0) -> int:
        return self.state.pin(owner, self.namespace, packed(text), seconds, now).pin

    def texts(self, salt: str = "") -> set[str]:
        """The ends of all branches of the tree, from the root."""
        return {text_of(node) for node in self._named(salt).tree.nodes() if not node.children}

    def texts_in(self, tier: int, salt: str = "") -> set[str]:
        """The ends of all branches that one tier has."""
        return {
            text_of(node)
            for node in self._named(salt).tree.nodes()
            if node.is_in(tier) and not node.num_children[tier]
        }

    def counts(self) -> dict[str, int]:
        """How many pages are in each state, where there are some."""
        return {name: count for name, count in self.arena.pool.counts().items() if count}

    def _named(self, salt: str) -> Namespace:
        spaces = self.state.namespaces.values()
        return next((one for one in spaces if one.salt == salt), None) or self.tenant(salt)


def disk(num_blocks: int = 64, tier: int = 1, admission: Admission = "all") -> StoreState:
    """A store in which a record takes what a page has."""
    records = {layout: layout.page_bytes for layout in (LAYOUT, WIDE, FOURS)}
    return StoreState(tier, f"disk{tier}", num_blocks * LAYOUT.page_bytes, admission, records)


def text_of(node: Node) -> str:
    return "".join(map(chr, np.frombuffer(node.path_tokens(), "<u4")))


def by_age(tree: Tree, tier: int = MEMORY) -> list[Node]:
    """The unlocked nodes that a tier has, in the order in which they go."""
    nodes = [node for node in tree.nodes() if node.is_in(tier) and not node.locks]
    return sorted(nodes, key=lambda node: (node.stamp, -len(node.path())))


def freed(plan: Plan) -> list[int]:
    return [page for step in plan if isinstance(step, Freed) for page in step.pages.tolist()]


def forgotten(plan: Plan) -> list[Forgotten]:
    return [step for step in plan if isinstance(step, Forgotten)]


def kinds(plan: Plan) -> list[type]:
    return [type(step) for step in plan]


def committed(plan: Plan) -> list[Committed]:
    return [step for step in plan if isinstance(step, Committed)]


def backing(plan: Plan) -> list[Run]:
    return [step.run for step in plan if isinstance(step, Back)]


@pytest.fixture
def cache() -> Cache:
    return Cache()
