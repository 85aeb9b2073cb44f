"""Namespaces: arenas and namespaces, as they come and go; what is pinned in them, what is dropped.

All of it needs no lease. Plans and tokens are what they are in `state.py`.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from kvd.arena.page_table import PageState
from kvd.cache.memory import NO_QUOTA, ArenaState, Memory, Namespace, Quota
from kvd.cache.pages import PagePool
from kvd.cache.pins import Pin, PinTable
from kvd.cache.plan import Detached, DropAnswer, Forgotten, Pinned, Plan, Removed, Unnamed
from kvd.cache.radix import Gone, Tree
from kvd.cache.stores import Stores, StoreState
from kvd.protocol.errors import BadRequest, ConfigError, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvd.arena.runs import Pages
    from kvd.cache.changes import Change
    from kvd.config import CacheConfig, LimitConfig
    from kvd.protocol.codec import Tokens
    from kvd.protocol.keys import Identity, NamespaceInfo
    from kvd.protocol.layout import Layout


class Namespaces:
    """What the cache has, whoever holds it: in one memory tier and the stores below it."""

    def __init__(
        self,
        capacity_bytes: int,
        config: CacheConfig,
        limits: LimitConfig,
        stores: Sequence[StoreState],
    ) -> None:
        self.limits = limits
        self.counters: Counter[str] = Counter()
        self.memory = Memory(capacity_bytes, config, self.counters)
        self.stores = Stores(stores, self.memory, self.counters)
        self._num_tiers = 1 + len(stores)
        self.namespaces: dict[int, Namespace] = {}
        self.pins = PinTable(*self._pin_bounds())
        self.quarantined: dict[int, list[tuple[ArenaState, Pages]]] = {}
        self._by_key: dict[bytes, Namespace] = {}
        self._num_opened = 0
        self._num_arenas = 0
        self._listener: Callable[[Namespace, Change], None] | None = None

    def _pin_bounds(self) -> tuple[int, int, int]:
        limits, capacity = self.limits, self.memory.capacity_bytes
        total, of_owner = limits.pinned_fraction, limits.owner_pinned_fraction
        return limits.pins, int(capacity * total), int(capacity * of_owner)

    def configure(
        self, config: CacheConfig, limits: LimitConfig, quotas: Mapping[Namespace, Quota]
    ) -> Plan:
        """Go by other bounds from here on. Raises ConfigError, and changes nothing then."""
        if sum(quota.guaranteed_bytes for quota in quotas.values()) > self.memory.capacity_bytes:
            raise ConfigError("quotas: they guarantee open namespaces more than the capacity")
        self.limits = limits
        self.memory.config = config
        self.pins.bound(*self._pin_bounds())
        plan: Plan = []
        for space, quota in quotas.items():
            self.memory.set_quota(space, quota, plan)
        self.stores.set_admission(config.admission)
        return plan

    # --- arenas and namespaces ---

    def find_arena(self, layout: Layout, row_bytes: int) -> ArenaState | None:
        wanted = layout, row_bytes
        arenas = self.memory.arenas.values()
        return next((arena for arena in arenas if (arena.layout, arena.row_bytes) == wanted), None)

    def add_arena(
        self,
        layout: Layout,
        row_bytes: int,
        num_pages: int,
        extent_pages: int,
        record_bytes: int = 0,
    ) -> ArenaState:
        """An arena without memory."""
        number = self._num_arenas
        self._num_arenas += 1
        pool = PagePool(num_pages, extent_pages, layout.group_pages)
        arena = ArenaState(number, layout, row_bytes, pool, record_bytes)
        self.memory.arenas[number] = arena
        return arena

    def make_place(self, *, for_arena: bool) -> Plan:
        """See that a namespace, and an arena for it, may be added: idle ones go, coldest first.

        Raises LimitExceeded as `check_can_make_place`, and changes nothing then.
        """
        self.check_can_make_place(for_arena=for_arena)
        plan: Plan = []
        arenas, spaces = self.memory.arenas, self.namespaces
        if for_arena and len(arenas) >= self.limits.layouts:
            unused = filter(self._is_unused, arenas.values())
            arena = min(unused, key=lambda a: max(map(_last_touch, a.namespaces), default=-1))
            for space in list(arena.namespaces):
                self._forget(space, plan)
            del arenas[arena.id]
            plan.append(Removed(arena.id))
        if len(spaces) >= self.limits.namespaces:
            self._forget(min(filter(self._is_idle, spaces.values()), key=_place), plan)
        return plan

    def check_can_make_place(self, *, for_arena: bool) -> None:
        """Raises LimitExceeded where there is no place, and all that could make it are in use."""
        arenas, spaces, limits = self.memory.arenas, self.namespaces, self.limits
        is_full = for_arena and len(arenas) >= limits.layouts
        if is_full and not any(map(self._is_unused, arenas.values())):
            raise LimitExceeded(f"all {limits.layouts} layouts are in use")
        if len(spaces) >= limits.namespaces and not any(map(self._is_idle, spaces.values())):
            raise LimitExceeded(f"all {limits.namespaces} namespaces are in use")

    def check_place(self, *, for_arena: bool) -> None:
        """Raises LimitExceeded where one more namespace, and an arena for it, are too many."""
        if len(self.namespaces) >= self.limits.namespaces:
            raise LimitExceeded(f"there are {self.limits.namespaces} namespaces already")
        if for_arena and len(self.memory.arenas) >= self.limits.layouts:
            raise LimitExceeded(f"there are {self.limits.layouts} layouts already")

    def _is_idle(self, space: Namespace) -> bool:
        """Nobody has it open, and nobody holds anything in it."""
        return not space.sessions and space.num_pages == space.lru.num_blocks

    def _is_unused(self, arena: ArenaState) -> bool:
        blocks = sum(space.num_pages for space in arena.namespaces)
        return (
            all(map(self._is_idle, arena.namespaces))
            and arena.pool.num_held == blocks
            and not arena.pool.num_backing
        )

    def _forget(self, space: Namespace, plan: Plan) -> None:
        self._remove(space, space.tree.detach(space.tree.root), plan)
        space.arena.namespaces.remove(space)
        del self.namespaces[space.id], self._by_key[space.key]
        plan.append(Unnamed(space.arena.id, space.id, space.key))

    @property
    def next_number(self) -> int:
        """The number of the namespace that is made next."""
        return self._num_opened + 1

    def give_up(self, arena: ArenaState) -> None:
        """An arena that nobody uses yet, and its namespaces, are as if they never were."""
        del self.memory.arenas[arena.id]
        for space in arena.namespaces:
            del self.namespaces[space.id], self._by_key[space.key]
        for session, pieces in list(self.quarantined.items()):
            self.quarantined[session] = [piece for piece in pieces if piece[0] is not arena]

    def find_namespace(self, key: bytes) -> Namespace | None:
        return self._by_key.get(key)

    def restore_namespace(
        self, number: int, info: NamespaceInfo, arena: ArenaState, quota: Quota
    ) -> Namespace:
        """A namespace of an earlier epoch, which no session has open yet."""
        self._num_opened = max(self._num_opened, number)
        return self._add_namespace(number, info.key, info.identity, info.salt, arena, quota)

    def _add_namespace(
        self,
        number: int,
        key: bytes,
        identity: Identity,
        salt: str,
        arena: ArenaState,
        quota: Quota,
    ) -> Namespace:
        tree = Tree(key, arena.layout.block_size, arena.row_bytes, self._num_tiers)
        space = Namespace(number, key, identity, salt, arena, tree, quota)
        if self._listener is not None:
            tree.listener = partial(self._listener, space)
        self._by_key[key] = self.namespaces[number] = space
        arena.namespaces.append(space)
        return space

    def tell(self, listener: Callable[[Namespace, Change], None]) -> None:
        """From now on have `listener` told which blocks come to a tier and leave one."""
        self._listener = listener
        for space in self.namespaces.values():
            space.tree.listener = partial(listener, space)

    def open_namespace(
        self,
        session: int,
        key: bytes,
        identity: Identity,
        salt: str,
        arena: ArenaState,
        *,
        quota: Quota = NO_QUOTA,
    ) -> Namespace:
        """The namespace of this key, made at its first use; the session has it open from here on.

        Raises LimitExceeded as `check_open`.
        """
        self.check_open(session, key, quota)
        space = self._by_key.get(key)
        if space is None:
            self._num_opened += 1
            space = self._add_namespace(self._num_opened, key, identity, salt, arena, quota)
        space.sessions.add(session)
        return space

    def check_open(self, session: int, key: bytes, quota: Quota) -> None:
        """To be asked before another namespace makes place for this one.

        Raises LimitExceeded where its guarantee, with those of all others, is more than there is,
        or where the session has too many open.
        """
        space, spaces = self._by_key.get(key), self.namespaces.values()
        if space is None:
            guaranteed = sum(each.quota.guaranteed_bytes for each in spaces)
            if guaranteed + quota.guaranteed_bytes > self.memory.capacity_bytes:
                raise LimitExceeded("the quotas guarantee more than the capacity: lower them")
        elif session in space.sessions:
            return
        most = self.limits.session_namespaces
        if sum(session in each.sessions for each in spaces) >= most:
            raise LimitExceeded(f"a session may have {most} namespaces open: close some")

    # --- pins ---

    def pin(
        self, owner: str, space: Namespace, tokens: Tokens, seconds: float, now: float
    ) -> Pinned:
        """Lock the longest resident prefix for so long; the same owner's pin of it is renewed.

        Where nothing is resident there is no pin, and its number is 0.

        Raises LimitExceeded, and changes nothing, where it would pass a quota.
        """
        asked = xxhash.xxh3_128_digest(tokens)
        renewed = self.pins.find(owner, space, asked)
        found = space.tree.find(tokens)
        if found.total_blocks == 0:
            return Pinned(0, 0, [])
        num_bytes = found.total_blocks * space.arena.layout.page_bytes
        self.pins.check_room(owner, num_bytes, renewed)
        number = renewed.id if renewed else self.pins.next_id()
        node = space.tree.lock(found)
        plan: Plan = []
        if renewed:
            self._unpin(renewed, plan)
        pin = Pin(number, owner, space, asked, node, found.total_blocks, now + seconds)
        self.pins.add(pin)
        return Pinned(number, found.total_blocks, plan)

    def unpin(self, owner: str, numbers: tuple[int, ...] = ()) -> tuple[int, Plan]:
        """End an owner's pins, those with these numbers or all; how many there were."""
        plan: Plan = []
        pins = [pin for pin in self.pins.of_owner(owner) if not numbers or pin.id in numbers]
        for pin in pins:
            self._unpin(pin, plan)
        return len(pins), plan

    def expire(self, now: float) -> Plan:
        """End the pins whose time is over."""
        plan: Plan = []
        for pin in self.pins.expired(now):
            self._unpin(pin, plan)
            self.counters["pins_expired"] += 1
        return plan

    def _unpin(self, pin: Pin, plan: Plan) -> None:
        gone = pin.namespace.tree.unlock(pin.node, self.memory.touch())
        self.memory.free(pin.namespace, gone, plan)
        self.pins.remove(pin)

    # --- drop ---

    def drop(self, space: Namespace, tokens: Tokens, from_block: int = 0) -> DropAnswer:
        """Remove blocks from the index: those of these tokens from `from_block` on, and all behind.

        Without tokens, every block. What leases hold they keep to themselves until they end; pins
        of it end. Whatever was computed before the drop is not committed after it.
        """
        if from_block and not tokens:
            raise BadRequest("drop: without tokens there is no block to begin from")
        tree = space.tree
        plan: Plan = []
        space.generation += 1
        before = list(tree.counts)
        if tokens:
            found = tree.find(tokens[: (from_block + 1) * tree.block_bytes], anywhere=True)
            if found.total_blocks <= from_block:
                return DropAnswer([0] * self._num_tiers, 0, plan)
            gone = tree.detach(found.node, found.num_blocks - 1)
        else:
            gone = tree.detach(tree.root)
        self._remove(space, gone, plan)
        num_detached = int((space.arena.pool.states[gone.held] == PageState.DETACHED).sum())
        self.counters["blocks_dropped"] += len(gone.keys)
        num_blocks = [old - new for old, new in zip(before, tree.counts, strict=True)]
        return DropAnswer(num_blocks, num_detached, plan)

    def remove(self, space: Namespace, tokens: Tokens) -> Plan:
        """The last block of these tokens is no good any more: it goes, with all that follows it.

        The prefix before it stays. Nothing where it went meanwhile.
        """
        plan: Plan = []
        tree = space.tree
        found = tree.find(tokens, anywhere=True)
        if found.total_blocks * tree.block_bytes == len(tokens):
            gone = tree.detach(found.node, found.num_blocks - 1)
            self._remove(space, gone, plan)
        return plan

    def remove_copy(self, space: Namespace, tokens: Tokens, tier: int) -> Plan:
        """A store's copy of the last block of these tokens is no good: it is forgotten there.

        So is all that follows it; what memory has of them gets copies anew.
        """
        plan: Plan = []
        tree = space.tree
        found = tree.find(tokens, anywhere=True)
        is_there = found.total_blocks * tree.block_bytes == len(tokens) and found.node.is_in(tier)
        if is_there and (keys := tree.forget(found.node, found.num_blocks - 1, tier)):
            plan.append(Forgotten(tier, space.arena.layout, keys))
        return plan

    def forget_copies(self, layout: Layout, tier: int) -> None:
        """A store gave up all it had of a layout; what memory has gets copies anew."""
        for space in self.memory.spaces():
            if space.arena.layout == layout:
                for child in list(space.tree.root.children):
                    space.tree.forget(child, 0, tier)

    def _remove(self, space: Namespace, gone: Gone, plan: Plan) -> None:
        """Blocks left the tree: memory and stores have them no more, but for who holds them."""
        self.memory.free(space, gone.free, plan)
        if len(gone.held):
            space.arena.pool.move(gone.held, PageState.COMMITTED, PageState.DETACHED)
            plan.append(Detached(space.arena.id, gone.held))
        self.stores.forget_keys(space, gone.keys, plan)
        for pin in self.pins:
            if pin.node.detached:
                self._unpin(pin, plan)


def _place(space: Namespace) -> tuple[bool, int]:
    """In which order idle namespaces go: those that are guaranteed something at the end."""
    return space.guaranteed_pages > 0, _last_touch(space)


def _last_touch(space: Namespace) -> int:
    return space.lru.last_touch
