"""A slow, obvious model of what the cache must answer: dicts, a list by age, sets. No tree, no run.

A block is named by its namespace and by all tokens from position 0 to its end, so that a prefix is
a shorter name and a match is a look-up for each length. Which pages are handed out is the pool's
own affair: the model is told, and says whether they could be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Tokens = tuple[int, ...]


class Block(NamedTuple):
    namespace: int
    tokens: Tokens  # from position 0 to the end of this block


class Page(NamedTuple):
    arena: int
    number: int


@dataclass
class Arena:
    block_size: int
    page_bytes: int
    num_pages: int
    extent_pages: int


@dataclass
class Lease:
    session: int
    namespace: int
    asked: Tokens
    held: Tokens  # the tokens of all blocks that it locks
    num_matched: int
    granted: list[Page] = field(default_factory=list)  # since the last abort
    reserved: set[Page] = field(default_factory=set)


@dataclass
class Shortage:
    num_wanted: int
    num_free: int
    num_locked: int
    num_reserved: int
    num_quarantined: int
    num_pages: int


class Refused(Exception):
    """What the model does not do; `kind` says which error of kvd it is."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Model:
    def __init__(
        self,
        arenas: list[Arena],
        arena_of: dict[int, int],
        capacity_bytes: int,
        high: float,
        low: float,
        num_slots: int,
        max_session_leases: int,
    ) -> None:
        self.arenas = arenas
        self.arena_of = arena_of  # of each namespace
        self.capacity_bytes = capacity_bytes
        self.high = high
        self.low = low
        self.num_slots = num_slots
        self.max_session_leases = max_session_leases
        self.pages = {
            Page(number, page): "unbacked"
            for number, arena in enumerate(arenas)
            for page in range(arena.num_pages)
        }
        self.being_backed: set[Page] = set()
        self.may_back = True
        self.blocks: dict[Block, Page] = {}
        self.by_age: list[Block] = []  # those that no lease locks, the least recent first
        self.leases: dict[tuple[int, int], Lease] = {}
        self.ended_ids: set[tuple[int, int]] = set()
        self.quarantined: dict[int, set[Page]] = {}

    # --- looking ---

    def block_size(self, lease: Lease) -> int:
        return self.arenas[self.arena_of[lease.namespace]].block_size

    def held_blocks(self, lease: Lease) -> list[Block]:
        return self.blocks_of(lease.namespace, lease.held)

    def blocks_of(self, namespace: int, tokens: Tokens) -> list[Block]:
        """The whole blocks of these tokens, the first one first."""
        size = self.arenas[self.arena_of[namespace]].block_size
        return [Block(namespace, tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def is_locked(self, block: Block) -> bool:
        return any(block in self.held_blocks(lease) for lease in self.leases.values())

    def of_arena(self, arena: int, *states: str) -> list[Page]:
        return [p for p, state in self.pages.items() if p.arena == arena and state in states]

    def unlocked(self, arena: int) -> list[Block]:
        return [block for block in self.by_age if self.arena_of[block.namespace] == arena]

    # --- match ---

    def match(self, session: int, lease_id: int, namespace: int, asked: Tokens) -> Lease:
        """The longest prefix of whole blocks that are there, locked for the lease."""
        key = session, lease_id
        if key in self.ended_ids:
            raise Refused("ended")
        if known := self.leases.get(key):
            if (known.namespace, known.asked) == (namespace, asked):
                return known
            self.end_lease(key)
        if sum(lease.session == session for lease in self.leases.values()) == (
            self.max_session_leases
        ) or (len(self.leases) == self.num_slots):
            raise Refused("limit")
        held: Tokens = ()
        for block in self.blocks_of(namespace, asked):
            if block not in self.blocks:
                break
            held = block.tokens
        lease = self.leases[key] = Lease(session, namespace, asked, held, len(held))
        self.lock(lease)
        return lease

    def matched_pages(self, lease: Lease) -> list[Page]:
        return [
            self.blocks[block]
            for block in self.blocks_of(lease.namespace, lease.held[: lease.num_matched])
        ]

    def lock(self, lease: Lease) -> None:
        held = self.held_blocks(lease)
        self.by_age = [block for block in self.by_age if block not in held]

    # --- reserve ---

    def extents_to_back(self, lease: Lease, count: int) -> int:
        """How many extents a reserve asks for: what is missing beside those on their way."""
        number = self.arena_of[lease.namespace]
        arena = self.arenas[number]
        if count > arena.num_pages:
            return 0
        missing = count - len(self.of_arena(number, "free")) - len(self.on_its_way(number))
        return min(max(-(-missing // arena.extent_pages), 0), self.backable_extents(number))

    def backable_extents(self, number: int) -> int:
        """For how many extents there is memory, and room in the arena."""
        if not self.may_back:
            return 0
        arena = self.arenas[number]
        backed_bytes = sum(
            self.arenas[page.arena].page_bytes
            for page, state in self.pages.items()
            if state != "unbacked" or page in self.being_backed
        )
        extent_bytes = arena.extent_pages * arena.page_bytes
        unbacked = set(self.of_arena(number, "unbacked")) - self.on_its_way(number)
        return min(
            (self.capacity_bytes - backed_bytes) // extent_bytes,
            len(unbacked) // arena.extent_pages,
        )

    def waits_for_memory(self, lease: Lease, count: int) -> bool:
        number = self.arena_of[lease.namespace]
        return bool(self.on_its_way(number) or self.extents_to_back(lease, count))

    def on_its_way(self, arena: int) -> set[Page]:
        return {page for page in self.being_backed if page.arena == arena}

    def shortage(self, lease: Lease, count: int) -> Shortage | None:
        """Why there are no pages now: memory is on its way or will be, or too much is locked."""
        number = self.arena_of[lease.namespace]
        free = len(self.of_arena(number, "free"))
        unlocked = self.unlocked(number)
        if count <= free:
            return None
        if count <= free + len(unlocked) and not self.waits_for_memory(lease, count):
            return None
        committed = self.of_arena(number, "committed")
        return Shortage(
            count,
            free,
            len(committed) - len(unlocked),
            len(self.of_arena(number, "reserved")),
            len(self.of_arena(number, "quarantined")),
            self.arenas[number].num_pages,
        )

    def with_ahead(self, lease: Lease, count: int, ahead: int) -> int:
        """How many pages are granted: those ahead as far as they are free once `count` are taken.

        Blocks are evicted for them only where there is no more memory to be had.
        """
        number = self.arena_of[lease.namespace]
        free, unlocked = len(self.of_arena(number, "free")), len(self.unlocked(number))
        if self.on_its_way(number) or self.backable_extents(number):
            return count + min(ahead, max(free - count, 0))
        return count + min(ahead, free + unlocked - count)

    def make_room(self, lease: Lease, count: int) -> list[Page]:
        """Evict what must go, the least recent first: their pages in that order.

        Where no memory is to be had, more go, `count` at most, until `count` pages are there in
        whole groups of 16.
        """
        number = self.arena_of[lease.namespace]
        missing = max(count - len(self.of_arena(number, "free")), 0)
        gone = [self.evict(block) for block in self.unlocked(number)[:missing]]
        if not self.on_its_way(number) and not self.backable_extents(number):
            left = count
            while left and self.unlocked(number) and self.whole_groups(number) < count // 16:
                gone.append(self.evict(self.unlocked(number)[0]))
                left -= 1
        return gone

    def whole_groups(self, number: int) -> int:
        free = [page.number // 16 for page in self.of_arena(number, "free")]
        return sum(free.count(group) == 16 for group in set(free))

    def grant(self, lease: Lease, pages: list[Page]) -> None:
        for page in pages:
            assert self.pages[page] == "free"
            self.pages[page] = "reserved"
        lease.granted += pages
        lease.reserved |= set(pages)

    def evict(self, block: Block) -> Page:
        assert not self.is_locked(block)
        size = self.arenas[self.arena_of[block.namespace]].block_size
        for other in self.blocks:  # nothing that follows it may be left
            assert (other.namespace, other.tokens[:-size]) != block
        self.by_age.remove(block)
        page = self.blocks.pop(block)
        self.pages[page] = "free"
        return page

    # --- memory ---

    def begin_backing(self, pages: list[Page]) -> None:
        for page in pages:
            assert self.pages[page] == "unbacked"
            assert page not in self.being_backed
        self.being_backed |= set(pages)

    def end_backing(self, pages: list[Page], *, backed: bool) -> None:
        self.being_backed -= set(pages)
        if backed:
            self.pages.update(dict.fromkeys(pages, "free"))
        self.may_back &= backed

    def used_bytes(self) -> int:
        return sum(
            self.arenas[page.arena].page_bytes
            for page, state in self.pages.items()
            if state not in ("unbacked", "free")
        )

    def trim(self) -> list[Page]:
        """Above the high watermark: the least recent blocks of all, until the low one."""
        gone: list[Page] = []
        if self.used_bytes() > self.high * self.capacity_bytes:
            while self.by_age and self.used_bytes() > self.low * self.capacity_bytes:
                gone.append(self.evict(self.by_age[0]))
        return gone

    # --- commit ---

    def commit(
        self, lease: Lease, first_block: int, pages: list[Page], tokens: Tokens
    ) -> tuple[list[Page], int]:
        """The pages that now hold the blocks, and how many of them are not those named."""
        size = self.block_size(lease)
        start = first_block * size
        if len(tokens) != len(pages) * size or start > len(lease.held):
            raise Refused("bad")
        known = lease.held[start : start + len(tokens)]
        if known != tokens[: len(known)]:
            raise Refused("bad")
        fresh = pages[len(known) // size :]
        if len(set(fresh)) != len(fresh) or not lease.reserved.issuperset(fresh):
            raise Refused("bad")
        for page in fresh:
            end = len(lease.held) + size
            block = Block(lease.namespace, lease.held + tokens[len(lease.held) - start :][:size])
            assert len(block.tokens) == end
            lease.held = block.tokens
            if block not in self.blocks:
                self.blocks[block] = page
                self.pages[page] = "committed"
                lease.reserved.remove(page)
        self.lock(lease)
        all_blocks = self.held_blocks(lease)[first_block : first_block + len(pages)]
        now_in = [self.blocks[block] for block in all_blocks]
        return now_in, sum(now != page for now, page in zip(now_in, pages, strict=True))

    # --- ends ---

    def abort(self, lease: Lease) -> set[Page]:
        given_back = set(lease.reserved)
        lease.granted = []
        self.pages.update(dict.fromkeys(given_back, "free"))
        lease.reserved.clear()
        return given_back

    def release(self, session: int, lease_id: int) -> set[Page]:
        key = session, lease_id
        given_back = self.end_lease(key) if key in self.leases else set()
        self.ended_ids.add(key)
        return given_back

    def end_lease(self, key: tuple[int, int]) -> set[Page]:
        """Give back what it reserved, and touch its path: the last block first, the root last."""
        given_back = self.abort(self.leases[key])
        lease = self.leases.pop(key)
        for block in reversed(self.held_blocks(lease)):
            if not self.is_locked(block):
                self.by_age.append(block)
        return given_back

    def end_session(self, session: int) -> set[Page]:
        """What the session could still write is quarantined."""
        quarantined: set[Page] = set()
        for key in [key for key in self.leases if key[0] == session]:
            lease = self.leases[key]
            quarantined |= lease.reserved
            self.pages.update(dict.fromkeys(lease.reserved, "quarantined"))
            lease.reserved.clear()
            self.end_lease(key)
        if quarantined:
            self.quarantined[session] = quarantined
        self.ended_ids = {key for key in self.ended_ids if key[0] != session}
        return quarantined

    def session_gone(self, session: int) -> set[Page]:
        pages = self.quarantined.pop(session, set())
        self.pages.update(dict.fromkeys(pages, "free"))
        return pages
