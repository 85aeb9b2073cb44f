"""A slow, obvious model of what the cache must answer: dicts, a list by age, sets. No tree, no run.

A block is known by its namespace and all its tokens from position 0 on, so that a prefix is a
shorter name and a match is a look-up for each length. Which pages are handed out, and which blocks
of which layout go for them, is the memory's own affair: the model is told, and says whether they
could be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

Tokens = tuple[int, ...]
Name = tuple[int, Tokens]  # of a block: its namespace, and all tokens from position 0 to its end


class Page(NamedTuple):
    arena: int
    number: int


@dataclass
class Arena:
    block_size: int
    page_bytes: int
    row_bytes: int
    num_pages: int
    extent_pages: int
    record_bytes: int  # in the page table, of each page

    @property
    def cost(self) -> int:
        """What a page takes of the capacity."""
        return self.page_bytes + self.record_bytes


@dataclass
class Namespace:
    key: int
    arena: int
    guaranteed_bytes: int
    max_bytes: int
    sessions: set[int] = field(default_factory=set)
    num_drops: int = 0


@dataclass(eq=False)
class Block:
    namespace: int
    tokens: Tokens  # from position 0 to the end of this block
    page: Page

    @property
    def name(self) -> Name:
        return self.namespace, self.tokens


@dataclass(eq=False)
class Write:
    """Copies on their way to a store; `held` are their blocks and all before them."""

    blocks: list[Block]
    held: set[Block]


@dataclass(eq=False)
class Store:
    """One tier below memory. `may_lack`: it failed, or forgot a copy for want of room."""

    usable_bytes: int
    admission: str
    works: bool = True
    may_lack: bool = False
    copies: set[Name] = field(default_factory=set)
    wanted: set[Name] = field(default_factory=set)  # in memory, and to be copied
    writes: list[Write] = field(default_factory=list)


@dataclass(eq=False)
class Lease:
    session: int
    namespace: int
    asked: object
    blocks: list[Block]
    num_matched: int
    num_drops: int
    tail: Block | None = None
    granted: list[Page] = field(default_factory=list)  # since the last abort
    reserved: set[Page] = field(default_factory=set)

    @property
    def tokens(self) -> Tokens:
        return self.blocks[-1].tokens if self.blocks else ()


@dataclass(eq=False)
class Pin:
    owner: str
    namespace: int
    asked: Tokens
    blocks: list[Block]
    expires: float


@dataclass
class Limits:
    capacity_bytes: int
    watermarks: tuple[float, float]  # high, low
    slots: int
    session_leases: int
    session_reserved_fraction: float
    namespaces: int
    layouts: int
    pins: int
    pinned_fraction: float
    owner_pinned_fraction: float


class Refused(Exception):
    """What the model does not do; `kind` says which error of kvd it is."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Model:
    def __init__(self, limits: Limits, stores: list[Store]) -> None:
        self.limits = limits
        self.stores = stores
        self.pressure_drops = 0
        self.clock = 0
        self.touched: dict[Name, int] = {}
        self.arenas: dict[int, Arena] = {}
        self.namespaces: dict[int, Namespace] = {}
        self.num_opened = 0
        self.pages: dict[Page, str] = {}
        self.being_backed: set[Page] = set()
        self.may_back = True
        self.index: dict[Name, Block] = {}
        self.by_age: list[Block] = []  # those of the index that nobody holds, least recent first
        self.leases: dict[tuple[int, int], Lease] = {}
        self.pins: dict[int, Pin] = {}
        self.num_pins = 0
        self.ended_ids: set[tuple[int, int]] = set()
        self.quarantined: dict[int, set[Page]] = {}

    # --- looking ---

    def arena_of(self, namespace: int) -> Arena:
        return self.arenas[self.namespaces[namespace].arena]

    def size(self, namespace: int) -> int:
        return self.arena_of(namespace).block_size

    def of_namespace(self, namespace: int) -> list[Block]:
        return [block for block in self.index.values() if block.namespace == namespace]

    def known(self, namespace: int, tokens: Tokens) -> list[Block]:
        """The blocks of the longest prefix that is there."""
        blocks: list[Block] = []
        size = self.size(namespace)
        for end in range(size, len(tokens) + 1, size):
            if (block := self.index.get((namespace, tokens[:end]))) is None:
                break
            blocks.append(block)
        return blocks

    def held_by_leases(self) -> list[Block]:
        tails = [lease.tail for lease in self.leases.values() if lease.tail]
        return tails + [block for lease in self.leases.values() for block in lease.blocks]

    def is_held(self, block: Block) -> bool:
        return block in self.held_by_leases() or any(
            block in pin.blocks for pin in self.pins.values()
        )

    def is_being_written(self, block: Block) -> bool:
        return any(block in write.held for store in self.stores for write in store.writes)

    def is_indexed(self, block: Block) -> bool:
        return self.index.get((block.namespace, block.tokens)) is block

    def in_state(self, arena: int, *states: str) -> list[Page]:
        return [p for p, state in self.pages.items() if p.arena == arena and state in states]

    def unlocked(self, *namespaces: int) -> list[Block]:
        return [
            block
            for block in self.by_age
            if block.namespace in namespaces and not self.is_being_written(block)
        ]

    def namespaces_of(self, arena: int) -> list[int]:
        return [one for one, space in self.namespaces.items() if space.arena == arena]

    # --- namespaces and arenas ---

    def find_arena(self, page_bytes: int, block_size: int, row_bytes: int) -> int | None:
        wanted = page_bytes, block_size, row_bytes
        for number, arena in self.arenas.items():
            if (arena.page_bytes, arena.block_size, arena.row_bytes) == wanted:
                return number
        return None

    def add_arena(self, number: int, arena: Arena) -> None:
        self.arenas[number] = arena
        self.pages |= {Page(number, page): "unbacked" for page in range(arena.num_pages)}

    def find_namespace(self, key: int) -> int | None:
        return next((one for one, space in self.namespaces.items() if space.key == key), None)

    def open(self, session: int, namespace: Namespace) -> int:
        number = self.find_namespace(namespace.key)
        if number is None:
            spaces = [*self.namespaces.values(), namespace]
            if sum(space.guaranteed_bytes for space in spaces) > self.limits.capacity_bytes:
                raise Refused("limit")
            self.num_opened += 1
            number = self.num_opened
            self.namespaces[number] = namespace
        self.namespaces[number].sessions.add(session)
        return number

    def close(self, session: int, namespace: int) -> None:
        for key, lease in list(self.leases.items()):
            if (lease.session, lease.namespace) == (session, namespace):
                self.end_lease(key)
        self.namespaces[namespace].sessions.discard(session)

    def make_place(self, *, for_arena: bool) -> None:
        """The coldest of those that nobody uses go."""
        idle = [one for one in self.namespaces if self.is_idle(one)]
        unused = [one for one in self.arenas if self.is_unused(one)]
        no_arena = for_arena and len(self.arenas) >= self.limits.layouts
        no_space = len(self.namespaces) >= self.limits.namespaces
        if (no_arena and not unused) or (no_space and not idle):
            raise Refused("limit")
        if no_arena:
            self.remove_arena(
                min(unused, key=lambda one: self.last_touch(*self.namespaces_of(one)))
            )
        if len(self.namespaces) >= self.limits.namespaces:
            self.forget(min(idle, key=self.place))

    def place(self, namespace: int) -> tuple[bool, int]:
        """Those that are guaranteed something go at the end."""
        size = self.arena_of(namespace).page_bytes
        guaranteed = self.namespaces[namespace].guaranteed_bytes // size
        return guaranteed > 0, self.last_touch(namespace)

    def is_idle(self, namespace: int) -> bool:
        return not self.namespaces[namespace].sessions and self.num_pages(namespace) == len(
            self.unlocked(namespace)
        )

    def is_unused(self, arena: int) -> bool:
        return (
            all(map(self.is_idle, self.namespaces_of(arena)))
            and not self.in_state(arena, "quarantined")
            and not self.on_its_way(arena)
        )

    def last_touch(self, *namespaces: int) -> int:
        """That of a block that is gone counts too."""
        touches = [at for name, at in self.touched.items() if name[0] in namespaces]
        return max(touches, default=-1)

    def remove_arena(self, number: int) -> None:
        for namespace in self.namespaces_of(number):
            self.forget(namespace)
        self.pages = {page: state for page, state in self.pages.items() if page.arena != number}
        del self.arenas[number]

    def forget(self, namespace: int) -> None:
        self.forget_copies(self.names_in(namespace))
        for block in self.unlocked(namespace):
            self.remove(block)
        del self.namespaces[namespace]

    # --- match and fork ---

    def match(
        self, session: int, lease_id: int, namespace: int, tokens: Tokens, *, exact_tail: bool
    ) -> Lease:
        """The longest prefix of whole blocks that are there; which tail, `hold_tail` is told."""
        asked = tokens, exact_tail
        if known := self.first_answer(session, lease_id, namespace, asked):
            return known
        blocks, drops = self.known(namespace, tokens), self.namespaces[namespace].num_drops
        lease = Lease(session, namespace, asked, blocks, len(blocks), drops)
        self.grant_lease(lease_id, lease)
        self.admit(lease.blocks, is_new=False)
        return lease

    def agreeing(self, lease: Lease, rest: Tokens) -> dict[Page, int]:
        """The blocks that follow what is held, and in how many tokens each agrees."""
        at, size = len(lease.tokens), self.size(lease.namespace)
        return {
            block.page: sum(block.tokens[at : at + n] == rest[:n] for n in range(1, len(rest) + 1))
            for block in self.of_namespace(lease.namespace)
            if block.tokens[:-size] == lease.tokens
        }

    def hold_tail(self, lease: Lease, page: Page) -> None:
        lease.tail = next(block for block in self.index.values() if block.page == page)
        self.lock([lease.tail])

    def fork(self, session: int, lease_id: int, source_id: int) -> Lease:
        if lease_id == source_id:
            raise Refused("bad")
        source = self.leases[session, source_id]
        asked = "fork", source_id
        if known := self.first_answer(session, lease_id, source.namespace, asked):
            return known
        blocks = list(source.blocks)
        lease = Lease(session, source.namespace, asked, blocks, len(blocks), source.num_drops)
        return self.grant_lease(lease_id, lease)

    def first_answer(
        self, session: int, lease_id: int, namespace: int, asked: object
    ) -> Lease | None:
        key = session, lease_id
        if key in self.ended_ids:
            raise Refused("ended")
        if known := self.leases.get(key):
            if (known.namespace, known.asked) == (namespace, asked):
                return known
            self.end_lease(key)
        return None

    def grant_lease(self, lease_id: int, lease: Lease) -> Lease:
        of_session = [one for one in self.leases.values() if one.session == lease.session]
        is_full = lease.session and len(of_session) == self.limits.session_leases
        if is_full or len(self.leases) == self.limits.slots:
            raise Refused("limit")
        self.leases[lease.session, lease_id] = lease
        self.lock(lease.blocks)
        return lease

    def lock(self, blocks: list[Block]) -> None:
        self.by_age = [block for block in self.by_age if block not in blocks]

    def let_go(self, blocks: list[Block]) -> None:
        """Touch what nobody holds now, the last block first; what left the index is free."""
        for block in reversed(blocks):
            if self.is_held(block):
                continue
            if self.is_indexed(block):
                self.by_age.append(block)
                self.clock += 1
                self.touched[block.name] = self.clock
            elif not self.is_being_written(block):
                self.pages[block.page] = "free"

    # --- what a namespace has and may have ---

    def num_pages(self, namespace: int) -> int:
        blocks = {*self.of_namespace(namespace), *self.held_by_leases()}
        blocks.update(*(write.held for store in self.stores for write in store.writes))
        reserved = [p for lease in self.leases_in(namespace) for p in lease.reserved]
        return len([b for b in blocks if b.namespace == namespace]) + len(reserved)

    def leases_in(self, namespace: int) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.namespace == namespace]

    def max_pages(self, namespace: int) -> int:
        arena, most = self.arena_of(namespace), self.namespaces[namespace].max_bytes
        return most // arena.page_bytes if most else arena.num_pages

    def num_spendable(self, victim: int, taker: int | None) -> int:
        """How many of its unlocked blocks a namespace may lose for another."""
        guaranteed = self.namespaces[victim].guaranteed_bytes // self.arena_of(victim).page_bytes
        beyond = self.num_pages(victim) - (0 if victim == taker else guaranteed)
        return max(0, min(beyond, len(self.unlocked(victim))))

    def num_evictable(self, namespace: int) -> int:
        """Blocks of its own layout that may go for a namespace."""
        neighbours = self.namespaces_of(self.namespaces[namespace].arena)
        return sum(self.num_spendable(victim, namespace) for victim in neighbours)

    def excess(self, namespace: int, count: int) -> int:
        """How many blocks of its own must go, so that it has no more than it may."""
        return max(0, self.num_pages(namespace) + count - self.max_pages(namespace))

    def num_reservable(self, session: int, namespace: int) -> int:
        """How many pages a session may still reserve."""
        reserved = sum(
            len(lease.reserved) * self.arena_of(lease.namespace).page_bytes
            for lease in self.leases.values()
            if lease.session == session
        )
        most = int(self.limits.session_reserved_fraction * self.limits.capacity_bytes)
        return (most - reserved) // self.arena_of(namespace).page_bytes

    # --- memory ---

    def grant(self, lease: Lease, pages: list[Page]) -> None:
        for page in pages:
            assert self.pages[page] == "free"
            self.pages[page] = "reserved"
        lease.granted += pages
        lease.reserved |= set(pages)

    def evict(self, page: Page, taker: int | None, excess: int) -> int:
        """The block in this page goes for a namespace: it is the coldest of its arena that may.

        Or the coldest of the taker's own, up to `excess` of them; how many more of these may go.
        """
        arena = self.namespaces_of(page.arena)
        coldest = self.unlocked(*(one for one in arena if self.num_spendable(one, taker)))[0]
        if coldest.page != page:
            assert excess
            assert taker is not None
            coldest = self.unlocked(taker)[0]
            excess -= 1
        assert coldest.page == page
        self.lose(coldest)
        return excess

    def lose(self, block: Block) -> None:
        """Memory evicts a block: each store that takes all has it, or still wanted it."""
        self.pressure_drops += any(block.name in store.wanted for store in self.stores)
        for store in self.stores:
            is_there = block.name in store.copies | store.wanted
            assert is_there or store.may_lack or store.admission == "reused"
            store.wanted.discard(block.name)
        self.remove(block)

    def remove(self, block: Block) -> None:
        assert not self.is_held(block)
        size = self.size(block.namespace)
        for other in self.of_namespace(block.namespace):  # nothing that follows it may be left
            assert other.tokens[:-size] != block.tokens
        self.by_age.remove(block)
        del self.index[block.namespace, block.tokens]
        self.pages[block.page] = "free"

    def on_its_way(self, arena: int) -> set[Page]:
        return {page for page in self.being_backed if page.arena == arena}

    def taken_bytes(self) -> int:
        return sum(
            self.arenas[page.arena].cost
            for page, state in self.pages.items()
            if state != "unbacked" or page in self.being_backed
        )

    def backable_extents(self, number: int) -> int:
        """For how many extents there is memory, and room in the arena."""
        arena = self.arenas[number]
        unbacked = set(self.in_state(number, "unbacked")) - self.being_backed
        left = (self.limits.capacity_bytes - self.taken_bytes()) // (
            arena.extent_pages * arena.cost
        )
        return max(0, min(left, len(unbacked) // arena.extent_pages)) if self.may_back else 0

    def idle_extents(self, number: int) -> int:
        """Extents whose pages are all free."""
        size = self.arenas[number].extent_pages
        extents = [page.number // size for page in self.in_state(number, "free")]
        return sum(extents.count(extent) == size for extent in set(extents))

    def begin_backing(self, pages: list[Page]) -> None:
        for page in pages:
            assert self.pages[page] == "unbacked"
            assert page not in self.being_backed
        self.being_backed |= set(pages)
        assert self.may_back
        assert self.taken_bytes() <= self.limits.capacity_bytes

    def end_backing(self, pages: list[Page], *, backed: bool) -> None:
        self.being_backed -= set(pages)
        if backed:
            self.pages.update(dict.fromkeys(pages, "free"))
        self.may_back &= backed

    def unback(self, pages: list[Page]) -> None:
        for page in pages:
            assert self.pages[page] == "free"
            self.pages[page] = "unbacked"

    def used_bytes(self) -> int:
        return sum(
            self.arenas[page.arena].cost
            for page, state in self.pages.items()
            if state not in ("unbacked", "free")
        )

    def spendable(self) -> list[Block]:
        """The unlocked blocks of those namespaces that may lose one for anybody."""
        return self.unlocked(*(one for one in self.namespaces if self.num_spendable(one, None)))

    def trim(self) -> list[Page]:
        """Above the high watermark: the least recent blocks of all, until the low one."""
        gone: list[Page] = []
        high, low = (part * self.limits.capacity_bytes for part in self.limits.watermarks)
        if self.used_bytes() > high:
            while (blocks := self.spendable()) and self.used_bytes() > low:
                self.lose(blocks[0])
                gone.append(blocks[0].page)
        return gone

    def missing(self, namespace: int, count: int) -> int:
        """How many pages are not there once the namespace has made room for itself."""
        free = len(self.in_state(self.namespaces[namespace].arena, "free"))
        return max(0, count - free - self.excess(namespace, count))

    def is_impossible(self, namespace: int, count: int) -> bool:
        """Whether memory would not help: more is asked for than the namespace may have."""
        most = min(self.arena_of(namespace).num_pages, self.max_pages(namespace))
        return count > most or self.excess(namespace, count) > len(self.unlocked(namespace))

    def is_hopeless(self, lease: Lease, count: int) -> bool:
        arena = self.arena_of(lease.namespace)
        most = min(arena.num_pages, self.max_pages(lease.namespace))
        writes = any(store.writes for store in self.stores)
        others = (
            len(self.leases) > 1 or self.pins or self.quarantined or self.being_backed or writes
        )
        own = len(lease.blocks) + len(lease.reserved)
        return count > most - own or (self.may_back and not others)

    def shortage(self, namespace: int, count: int) -> dict[str, object]:
        number = self.namespaces[namespace].arena
        held = self.in_state(number, "committed", "detached")
        most = self.namespaces[namespace].max_bytes
        return {
            "num_wanted": count,
            "num_free": len(self.in_state(number, "free")),
            "num_locked": len(held) - len(self.unlocked(*self.namespaces_of(number))),
            "num_reserved": len(self.in_state(number, "reserved")),
            "num_quarantined": len(self.in_state(number, "quarantined")),
            "num_pages": self.arenas[number].num_pages,
            "max_pages": self.max_pages(namespace) if most else 0,
            "holders": {},
        }

    # --- commit ---

    def commit(
        self, lease: Lease, first_block: int, pages: list[Page], tokens: Tokens
    ) -> tuple[list[Page], int]:
        """The pages that now hold the blocks, and how many of them are not those named."""
        size = self.size(lease.namespace)
        start = first_block * size
        if len(tokens) != len(pages) * size or first_block > len(lease.blocks):
            raise Refused("bad")
        known = lease.tokens[start : start + len(tokens)]
        if known != tokens[: len(known)]:
            raise Refused("bad")
        fresh = pages[len(known) // size :]
        if len(set(fresh)) != len(fresh) or not lease.reserved.issuperset(fresh):
            raise Refused("bad")
        if fresh and lease.num_drops != self.namespaces[lease.namespace].num_drops:
            raise Refused("dropped")
        num_known = len(self.index)
        for page in fresh:
            end = len(lease.tokens) + size - start
            self.commit_block(lease, page, lease.tokens[:start] + tokens[:end])
        self.lock(lease.blocks)
        if len(self.index) > num_known:
            self.admit(lease.blocks, is_new=True)
        self.let_go_tail(lease)
        now_in = [block.page for block in lease.blocks[first_block : first_block + len(pages)]]
        return now_in, sum(now != page for now, page in zip(now_in, pages, strict=True))

    def commit_block(self, lease: Lease, page: Page, tokens: Tokens) -> None:
        key = lease.namespace, tokens
        if key not in self.index:
            self.index[key] = Block(*key, page)
            self.pages[page] = "committed"
            lease.reserved.remove(page)
        lease.blocks.append(self.index[key])

    # --- ends ---

    def abort(self, lease: Lease) -> None:
        self.pages.update(dict.fromkeys(lease.reserved, "free"))
        lease.granted = []
        lease.reserved.clear()

    def keep(self, lease: Lease, num_blocks: int) -> None:
        self.abort(lease)
        self.let_go_tail(lease)
        lease.asked = None
        gone = lease.blocks[num_blocks:]
        del lease.blocks[num_blocks:]
        self.let_go(gone)
        lease.num_matched = min(lease.num_matched, num_blocks)

    def release(self, session: int, lease_id: int) -> None:
        key = session, lease_id
        if key in self.leases:
            self.end_lease(key)
        else:
            self.ended_ids.add(key)

    def end_lease(self, key: tuple[int, int]) -> None:
        """Give back what it reserved, and touch its path: the last block first."""
        lease = self.leases[key]
        self.abort(lease)
        self.let_go_tail(lease)
        del self.leases[key]
        self.let_go(lease.blocks)

    def let_go_tail(self, lease: Lease) -> None:
        tail, lease.tail = lease.tail, None
        if tail:
            self.let_go([tail])

    def end_session(self, session: int) -> None:
        """What the session could still write is quarantined."""
        for key, lease in list(self.leases.items()):
            if lease.session == session:
                self.pages.update(dict.fromkeys(lease.reserved, "quarantined"))
                if lease.reserved:
                    self.quarantined.setdefault(session, set()).update(lease.reserved)
                lease.reserved.clear()
                self.end_lease(key)
        self.ended_ids = {key for key in self.ended_ids if key[0] != session}
        for space in self.namespaces.values():
            space.sessions.discard(session)

    def session_gone(self, session: int) -> None:
        self.pages.update(dict.fromkeys(self.quarantined.pop(session, set()), "free"))

    # --- pins ---

    def pin(self, owner: str, namespace: int, tokens: Tokens, expires: float) -> tuple[int, int]:
        """The number of the pin, and of its blocks."""
        blocks = self.known(namespace, tokens)
        if not blocks:
            return 0, 0
        asked = owner, namespace, tokens
        renewed = next(
            (one for one, p in self.pins.items() if (p.owner, p.namespace, p.asked) == asked), 0
        )
        pin = Pin(owner, namespace, tokens, blocks, expires)
        others = [one for number, one in self.pins.items() if number != renewed]
        self.check_pins([*others, pin], owner)
        self.lock(blocks)
        before = self.pins.pop(renewed, None)
        self.num_pins += not renewed
        number = renewed or self.num_pins
        self.pins[number] = pin
        if before:
            self.let_go(before.blocks)
        return number, len(blocks)

    def check_pins(self, pins: list[Pin], owner: str) -> None:
        def num_bytes(*owners: str) -> int:
            return sum(
                len(pin.blocks) * self.arena_of(pin.namespace).page_bytes
                for pin in pins
                if pin.owner in owners
            )

        capacity, limits = self.limits.capacity_bytes, self.limits
        if (
            len(pins) > limits.pins
            or num_bytes(owner) > math.floor(capacity * limits.owner_pinned_fraction)
            or num_bytes(*{pin.owner for pin in pins})
            > math.floor(capacity * limits.pinned_fraction)
        ):
            raise Refused("limit")

    def unpin(self, number: int) -> None:
        self.let_go(self.pins.pop(number).blocks)

    def unpin_owner(self, owner: str, numbers: tuple[int, ...]) -> int:
        pins = [
            number
            for number, pin in self.pins.items()
            if pin.owner == owner and (not numbers or number in numbers)
        ]
        for number in pins:
            self.unpin(number)
        return len(pins)

    def expire(self, now: float) -> None:
        for number, pin in list(self.pins.items()):
            if pin.expires <= now:
                self.unpin(number)

    # --- drop ---

    def drop(self, namespace: int, tokens: Tokens, from_block: int) -> tuple[list[int], int]:
        """How many blocks left each tier, and how many of those in memory are still held."""
        self.namespaces[namespace].num_drops += 1
        top = namespace, tokens[: (from_block + 1) * self.size(namespace)]
        names = self.names_in(namespace)
        if tokens:
            names = {one for one in names if top in names and self.is_before(top, one)}
        gone = [self.index.pop(name) for name in sorted(names) if name in self.index]
        for block in gone:
            is_held = self.is_held(block) or self.is_being_written(block)
            self.pages[block.page] = "detached" if is_held else "free"
        self.by_age = [block for block in self.by_age if block not in gone]
        for number, pin in list(self.pins.items()):
            if pin.blocks[-1] in gone:
                self.unpin(number)
        num_copies = [len(store.copies & names) for store in self.stores]
        self.forget_copies(names)
        num_detached = sum(self.pages[block.page] == "detached" for block in gone)
        return [len(gone), *num_copies], num_detached

    # --- stores ---

    def names_in(self, namespace: int) -> set[Name]:
        """The blocks that any tier has."""
        names = set(self.index).union(*(store.copies for store in self.stores))
        return {name for name in names if name[0] == namespace}

    def before(self, name: Name) -> Name:
        return name[0], name[1][: -self.size(name[0])]

    def is_before(self, name: Name, other: Name) -> bool:
        """Whether one block is before another in its path, or is it itself."""
        return name[0] == other[0] and name[1] == other[1][: len(name[1])]

    def bytes_of(self, names: Iterable[Name]) -> int:
        return sum(self.arena_of(namespace).page_bytes for namespace, _ in names)

    def used_bytes_in(self, store: Store) -> int:
        coming = [block.name for write in store.writes for block in write.blocks]
        return self.bytes_of([*store.copies, *coming])

    def coming(self, store: Store) -> set[Name]:
        """What a store will have when all that is on its way is there."""
        blocks = [block for write in store.writes for block in write.blocks]
        return {block.name for block in blocks if self.is_indexed(block)}

    def admit(self, blocks: list[Block], *, is_new: bool) -> None:
        for store in self.stores:
            names = {block.name for block in blocks} - store.copies - self.coming(store)
            if store.admission == "all" or not is_new:
                store.wanted |= names
            elif names:
                store.may_lack = True

    def begin_write(self, store: Store, names: list[Name]) -> None:
        """All that comes before a block is there, or on its way, and nothing is there twice."""
        there = store.copies | self.coming(store)
        for name in names:
            assert name not in there
            assert not self.before(name)[1] or self.before(name) in there
            assert any(self.is_before(name, other) for other in store.wanted)
            there.add(name)
        store.wanted -= set(names)
        blocks = [self.index[name] for name in names]
        held = {block for name in names for block in self.known(*name)}
        store.writes.append(Write(blocks, held))
        assert self.used_bytes_in(store) <= store.usable_bytes

    def end_write(self, store: Store, *, saved: bool) -> int:
        """How many blocks have a copy now: those that are still there, behind one that has."""
        write = store.writes.pop(0)
        num_before = len(store.copies)
        for block in filter(self.is_indexed, write.blocks):
            before = self.before(block.name)
            is_saved = saved and (not before[1] or before in store.copies)
            (store.copies if is_saved else store.wanted).add(block.name)
        for block in write.held:
            if not (self.is_indexed(block) or self.is_held(block) or self.is_being_written(block)):
                self.pages[block.page] = "free"
        return len(store.copies) - num_before

    def leaves(self, store: Store, kept: Set[Name]) -> set[Name]:
        """What may go: copies that none follows, which nobody holds, but for those kept."""
        held = {
            name
            for name, block in self.index.items()
            if self.is_held(block) or self.is_being_written(block)
        }
        return store.copies - set(map(self.before, store.copies)) - held - kept

    def coldest(self, names: Set[Name]) -> Name | None:
        return min(names, key=self.touched.__getitem__, default=None)

    def forget_copy(self, store: Store, name: Name) -> None:
        store.copies.remove(name)
        store.may_lack = True

    def give_up(self, store: Store, names: set[Name]) -> None:
        store.copies -= names
        store.wanted |= names & self.index.keys()

    def forget_copies(self, names: set[Name]) -> None:
        for store in self.stores:
            store.copies -= names
            store.wanted -= names

    def lacking(self, namespace: int, tokens: Tokens) -> tuple[int, list[Name]] | None:
        """The tier to read of, and what is behind the blocks in memory, as far as it has it."""
        size, at = self.size(namespace), len(self.known(namespace, tokens))
        ends = range((at + 1) * size, len(tokens) + 1, size)
        found = [
            (self.fastest((namespace, tokens[:end])), (namespace, tokens[:end])) for end in ends
        ]
        tier = found[0][0] if found else 0
        names = [name for _, name in takewhile(lambda one: one[0] == tier, found)]
        return (tier, names) if tier else None

    def fastest(self, name: Name) -> int:
        """The fastest store that works and has a block; 0 where none does."""
        tiers = (
            tier
            for tier, store in enumerate(self.stores, 1)
            if store.works and name in store.copies
        )
        return min(tiers, default=0)
