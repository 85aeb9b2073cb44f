"""CacheState: match, reserve, commit, release, drop, end of sessions, over all parts of the cache.

Concurrency: the state belongs to one event loop. Every method runs to its end without an await, so
there is no lock; what takes time (backing) is begun here, done elsewhere, and ended here by a
second call that names pages, never nodes. Each method returns its answer with a plan: the steps
that the caller must carry out, in their order, before the answer leaves the daemon.

Tokens are rows here (`rows.py`): as wide as the namespace's tree has them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from msgspec.structs import asdict, replace

from kvd.arena.page_table import PageState
from kvd.cache.leases import OWN_SESSION, Lease, LeaseTable
from kvd.cache.namespaces import Namespaces
from kvd.cache.plan import (
    CommitAnswer,
    Committed,
    Ended,
    Granted,
    Lacking,
    Matched,
    Plan,
    Quarantined,
    Reserved,
    Short,
)
from kvd.cache.radix import Found, Node
from kvd.protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    Dropped,
    LeaseEnded,
    LimitExceeded,
    OutOfPages,
)
from kvd.protocol.messages import Tail

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvd.arena.runs import Pages
    from kvd.cache.memory import Namespace
    from kvd.cache.stores import StoreState
    from kvd.config import CacheConfig, LimitConfig
    from kvd.protocol.codec import Tokens


# Of blocks in stores, so many at most are read before those that came are looked at.
MAX_PROMOTED = 1024


class CacheState(Namespaces):
    """All that the cache knows: one memory tier of `capacity_bytes`, and the stores below it."""

    def __init__(
        self,
        capacity_bytes: int,
        num_slots: int,
        config: CacheConfig,
        limits: LimitConfig,
        stores: Sequence[StoreState] = (),
    ) -> None:
        super().__init__(capacity_bytes, config, limits, stores)
        self.leases = LeaseTable(num_slots)
        self._reserved_bytes: Counter[int] = Counter()
        self._reserved_fractions: dict[int, float] = {}

    # --- match and fork ---

    def match(
        self,
        session: int,
        lease_id: int,
        namespace: Namespace,
        tokens: Tokens,
        *,
        exact_tail: bool = False,
        now: float = 0.0,
    ) -> Matched:
        """Find the longest prefix of whole blocks and lease it, in one step.

        With `exact_tail`, the block behind it that agrees longest with the rest is leased too. The
        same id with the same tokens gets the first answer; with others, the old lease is released
        and its id stands for the new one.
        """
        # What a repeat is told by decides nothing but whether a client repeats itself: a hash will
        # do, and holds no prompt in memory.
        asked = b"tail" * exact_tail + xxhash.xxh3_128_digest(tokens)
        plan: Plan = []
        if known := self._known(session, lease_id, namespace, asked, plan):
            return known
        tree = namespace.tree
        found = self._find(namespace, tokens)
        lease = self._grant(session, lease_id, namespace, asked, found, now)
        self.stores.admit(namespace, lease.node, is_new=False)
        if exact_tail:
            self._lock_tail(lease, tokens[lease.num_blocks * tree.block_bytes :])
        return Matched(lease, plan)

    def fork(self, session: int, lease_id: int, source: Lease, now: float = 0.0) -> Matched:
        """Lease the committed blocks of a lease once more; a repeat gets the first answer."""
        if (session, lease_id) == (source.session, source.id):
            raise BadRequest(f"fork: lease {lease_id} is its source itself")
        asked = b"fork %d" % source.id
        plan: Plan = []
        if known := self._known(session, lease_id, source.namespace, asked, plan):
            return known
        end = Found(source.node, source.node.num_blocks, source.num_blocks)
        lease = self._grant(session, lease_id, source.namespace, asked, end, now)
        lease.drops = source.drops
        return Matched(lease, plan)

    def _known(
        self, session: int, lease_id: int, namespace: Namespace, asked: bytes, plan: Plan
    ) -> Matched | None:
        """The first answer to a repeat; what the id stood for otherwise ends."""
        if self.leases.is_buried(session, lease_id):
            raise LeaseEnded(f"lease {lease_id} was released before it was asked for")
        if known := self.leases.find(session, lease_id):
            if known.namespace is namespace and known.asked == asked:
                return Matched(known, plan)
            self._end(known, plan)
        return None

    def _grant(
        self,
        session: int,
        lease_id: int,
        namespace: Namespace,
        asked: bytes,
        found: Found,
        now: float,
    ) -> Lease:
        if session != OWN_SESSION and self.leases.count(session) >= self.limits.session_leases:
            raise LimitExceeded(f"a session may hold {self.limits.session_leases} leases")
        slot, generation = self.leases.take_slot()
        lease = Lease(
            session=session,
            id=lease_id,
            namespace=namespace,
            asked=asked,
            node=namespace.tree.lock(found),
            num_blocks=found.total_blocks,
            num_matched=found.total_blocks,
            slot=slot,
            generation=generation,
            drops=namespace.generation,
            since=now,
        )
        self.leases.add(lease)
        return lease

    def _find(self, space: Namespace, tokens: Tokens, start: Node | None = None) -> Found:
        """The longest prefix in memory that may be served."""
        found = space.tree.find(tokens, start)
        if space.arena.unverified and (pages := self._unverified(space, found)):
            end = min(pages) * space.tree.block_bytes
            return space.tree.find(tokens[:end], start)
        return found

    def _unverified(self, space: Namespace, found: Found) -> dict[int, int]:
        """The unverified pages among the last blocks of a found path, by their place in it."""
        return (
            {
                place: page
                for place, page in enumerate(_pages_to(found)[-found.total_blocks :])
                if page in space.arena.unverified
            }
            if found.total_blocks
            else {}
        )

    def lacking(
        self, space: Namespace, tokens: Tokens, start: Node | None = None
    ) -> Lacking | None:
        """What must be done before more of these tokens are in memory and may be served.

        First pages are to be verified, then blocks to be read from a store. None where nothing is.
        """
        found = space.tree.find(tokens, start)
        if space.arena.unverified and (pages := self._unverified(space, found)):
            return Lacking(np.array(list(pages.values()), np.int64))
        if self._num_tiers == 1 or found.num_blocks < found.node.num_blocks:
            return None
        rest = tokens[found.total_blocks * space.tree.block_bytes :]
        tier, keys = space.tree.stored(found.node, rest, MAX_PROMOTED, self.stores.readable)
        return Lacking(np.empty(0, np.int64), tier, keys) if keys else None

    def extend(self, lease: Lease, tokens: Tokens, *, exact_tail: bool = False) -> Matched:
        """Lease what became resident behind a match of these tokens that committed nothing yet."""
        space = lease.namespace
        at = lease.num_blocks * space.tree.block_bytes
        if lease.num_blocks != lease.num_matched or lease.node.path_tokens() != tokens[:at]:
            raise BadRequest("extend: the lease is of other tokens, or has committed some")
        plan: Plan = []
        if not lease.node.detached:
            found = self._find(space, tokens[at:], lease.node)
            if found.total_blocks:
                self._unlock_tail(lease, plan)
                lease.node = space.tree.lock(found, below=lease.node)
                lease.num_blocks += found.total_blocks
                lease.num_matched = lease.num_blocks
                self.stores.admit(space, lease.node, is_new=False)
            if exact_tail and lease.tail is None:
                self._lock_tail(lease, tokens[lease.num_blocks * space.tree.block_bytes :])
        return Matched(lease, plan)

    def _lock_tail(self, lease: Lease, rest: Tokens) -> None:
        if found := lease.namespace.tree.find_tail(lease.node, rest):
            place, num_tokens = found
            if place.node.pages[0] in lease.namespace.arena.unverified:
                return
            lease.tail_node = lease.namespace.tree.lock(place)
            lease.tail = Tail(lease.tail_node.pages[0], num_tokens)

    def lacks_more(self, lease: Lease, tokens: Tokens) -> bool:
        """Whether more of these tokens than a match of them leased could be had in time."""
        space = lease.namespace
        if space.arena.unverified:
            return self.lacking(space, tokens) is not None
        rest = tokens[lease.num_blocks * space.tree.block_bytes :]
        if self._num_tiers == 1 or len(rest) < space.tree.block_bytes or lease.node.detached:
            return False
        return bool(space.tree.stored(lease.node, rest, 1, self.stores.readable)[1])

    def num_pending(self, lease: Lease, tokens: Tokens) -> int:
        """How many of these tokens, right behind those of a match, a store has."""
        space = lease.namespace
        rest = tokens[lease.num_blocks * space.tree.block_bytes :]
        if self._num_tiers == 1 or lease.node.detached:
            return 0
        count = len(rest) // space.tree.block_bytes
        keys = space.tree.stored(lease.node, rest, count, self.stores.readable)[1]
        return len(keys) * space.arena.layout.block_size

    def count_match(
        self, lease: Lease, tokens: Tokens, by_tier: Mapping[str, int], num_late: int = 0
    ) -> None:
        """A match of these tokens was answered, perhaps again, with so many of them by tier.

        Behind those a store has `num_late` more, which did not come in time.
        """
        if lease.is_counted:
            return
        lease.is_counted = True
        tree, hit_tokens = lease.namespace.tree, sum(by_tier.values())
        for node in lease.node.path():
            node.hits += 1
        self.counters["matches"] += 1
        self.counters["match_hits" if hit_tokens else "match_misses"] += 1
        self.counters["tokens_requested"] += len(tokens) // tree.row_bytes
        self.counters["tokens_matched"] += hit_tokens
        for tier, count in by_tier.items():
            self.counters[f"tokens_from_{tier}"] += count
        reason, count = "late", num_late
        if not num_late:
            reason, count = "evicted", self._num_evicted(lease, tokens)
        # An exact tail is of the first of these blocks.
        tail = lease.tail.num_tokens if lease.tail else 0
        self.counters[f"tokens_{reason}"] += max(0, count - tail)

    def _num_evicted(self, lease: Lease, tokens: Tokens) -> int:
        """How many of these tokens, right behind those of a match, were evicted, at least."""
        space = lease.namespace
        end = lease.num_blocks * space.tree.block_bytes
        num_blocks = self.memory.evicted.num_following(
            lease.node.last_key, tokens, end, space.tree.block_bytes
        )
        return num_blocks * space.arena.layout.block_size

    def hold(self, number: int, space: Namespace, tokens: Tokens, now: float) -> Lease:
        """A lease of the daemon's own on what memory has of these tokens."""
        found = self._find(space, tokens)
        return self._grant(OWN_SESSION, number, space, b"", found, now)

    # --- reserve ---

    def reserve(self, lease: Lease, start: int, stop: int, ahead: int = 0) -> Granted | Short:
        """Pages number `start` to `stop - 1` of those granted to this lease since its last abort.

        Up to `ahead` more come with them, as far as nobody need wait for memory. What was granted
        before is granted again, so that a repeat gets the first answer.
        """
        have = len(lease.granted)
        if start > have:
            raise BadRequest(f"reserve from {start}: the lease was granted {have} pages so far")
        again = lease.granted[start : stop + ahead]
        if not lease.reserved.issuperset(again.tolist()):
            raise BadRequest(f"reserve from {start}: pages from there on were committed")
        if stop < have or start < have == stop:
            return Granted(again, [])
        space, needed = lease.namespace, stop - have
        ahead = min(ahead, self._num_reservable(lease, needed) - needed)
        plan: Plan = []
        if not self.memory.make_room(space, needed, plan):
            shortage = self.memory.shortage(space, needed)
            return Short(shortage, not plan and self._is_hopeless(lease, needed), plan)
        ahead = self.memory.spare(space, needed, ahead, plan)
        self.memory.make_groups(space, needed + ahead, plan)
        pages = space.arena.pool.take(needed, ahead)
        count = len(pages)
        space.num_pages += count
        lease.granted = np.concatenate((lease.granted, pages))
        lease.reserved.update(pages.tolist())
        self._reserved_bytes[lease.session] += count * space.arena.layout.page_bytes
        if count:
            plan.append(Reserved(space.arena.id, pages, lease.session))
        self.counters["pages_reserved"] += count
        return Granted(lease.granted[start:], plan)

    def _num_reservable(self, lease: Lease, needed: int) -> int:
        """How many pages the lease's session may still reserve; raises OutOfPages for too few."""
        page_bytes = lease.namespace.arena.layout.page_bytes
        session, usual = lease.session, self.limits.session_reserved_fraction
        fraction = self._reserved_fractions.get(session, usual)
        most = int(fraction * self.memory.capacity_bytes)
        reserved = self._reserved_bytes[session]
        count = (most - reserved) // page_bytes
        if needed > count:
            shortage = self.memory.shortage(lease.namespace, needed)
            raise OutOfPages(
                f"a session may hold {most} bytes of uncommitted pages, and has {reserved}: "
                "commit or release some",
                **asdict(replace(shortage, max_pages=most // page_bytes)),
            )
        return count

    def _is_hopeless(self, lease: Lease, needed: int) -> bool:
        """Whether waiting is in vain: beside what the lease holds there will not be more."""
        space = lease.namespace
        own = lease.num_blocks + len(lease.reserved)
        if needed > min(space.arena.pool.num_pages, space.max_pages) - own:
            return True
        others = len(self.leases) > 1 or len(self.pins) or self.quarantined or self.stores.writes
        backing = any(arena.pool.num_backing for arena in self.memory.arenas.values())
        return self.memory.may_back and not others and not backing

    # --- commit ---

    def commit(self, lease: Lease, first_block: int, pages: Pages, tokens: Tokens) -> CommitAnswer:
        """Make blocks of a lease matchable; the lease's lock moves to the end of them.

        There are three kinds, in this order: blocks this lease committed before (a repeat gets the
        first answer), blocks that others committed meanwhile (theirs stay, the caller's copies are
        private until its release), and new ones. Raises Dropped where a drop was between: what the
        lease knows is older; and DeadlineExceeded where blocks that are there are unverified.
        """
        tree = lease.namespace.tree
        if len(tokens) != len(pages) * tree.block_bytes:
            raise BadRequest(f"{len(pages)} pages do not hold these tokens in whole blocks")
        if first_block > lease.num_blocks:
            raise BadRequest(
                f"commit from block {first_block}: the lease's prefix ends at {lease.num_blocks}"
            )
        repeated = min(lease.num_blocks - first_block, len(pages))
        self._check_repeat(lease, first_block, tokens[: repeated * tree.block_bytes])
        fresh = pages[repeated:]
        if len(set(fresh.tolist())) != len(fresh) or not lease.reserved.issuperset(fresh.tolist()):
            raise BadRequest("a committed page must be reserved by its lease and named once")
        rest = tokens[repeated * tree.block_bytes :]
        if self._unverified(lease.namespace, tree.find(rest, lease.node)):
            raise DeadlineExceeded("blocks that are there were not verified in time: commit again")
        if len(fresh) and (lease.drops != lease.namespace.generation or lease.node.detached):
            raise Dropped("blocks of this namespace were dropped since the lease was granted")
        plan: Plan = []
        self._append(lease, fresh, rest, plan)
        self._unlock_tail(lease, plan)
        now_in = lease.node.path_pages()[first_block : first_block + len(pages)]
        return CommitAnswer(now_in, int((now_in != pages).sum()), plan)

    def _check_repeat(self, lease: Lease, first_block: int, tokens: Tokens) -> None:
        start = first_block * lease.namespace.tree.block_bytes
        if tokens and lease.node.path_tokens()[start : start + len(tokens)] != tokens:
            raise BadRequest(f"blocks from {first_block} on were committed with other tokens")

    def _append(self, lease: Lease, pages: Pages, tokens: Tokens, plan: Plan) -> None:
        """Lead the lease's path over present blocks, then add the rest."""
        tree = lease.namespace.tree
        found = tree.find(tokens, lease.node)
        present = found.total_blocks
        if present:
            lease.node = tree.lock(found, below=lease.node)
            lease.num_blocks += present
            self.counters["blocks_duplicate"] += present
        if present < len(pages):
            rest = tokens[present * tree.block_bytes :]
            plan.append(self._insert(lease, pages[present:], rest))
            self.stores.admit(lease.namespace, lease.node, is_new=True)

    def _insert(self, lease: Lease, pages: Pages, tokens: Tokens) -> Committed:
        space, first_block = lease.namespace, lease.num_blocks
        parent = lease.node.pages[-1] if first_block else -1
        listed = pages.tolist()
        lease.node = space.tree.append(lease.node, tokens, listed)
        lease.num_blocks += len(listed)
        self._take_reserved(lease, listed)
        space.arena.pool.move(pages, PageState.RESERVED, PageState.COMMITTED)
        if lease.session != OWN_SESSION:  # the daemon's own are those that come up
            self.counters["blocks_committed"] += len(listed)
        return Committed(space.arena.id, pages, parent, first_block, tokens, space.id)

    # --- ends ---

    def abort(self, lease: Lease) -> Plan:
        """Give back the lease's uncommitted pages; a living session says that no view remains."""
        plan: Plan = []
        lease.granted = lease.granted[:0]
        self._free_reserved(lease, plan)
        return plan

    def release(self, session: int, lease_id: int) -> Plan:
        """End a lease. An unknown id is remembered: its match may still be on the way."""
        plan: Plan = []
        lease = self.leases.find(session, lease_id)
        if lease is None:
            self.counters["releases_unknown"] += 1
            self.leases.bury(session, lease_id)
        else:
            self._end(lease, plan)
        return plan

    def keep(self, lease: Lease, num_blocks: int) -> Plan:
        """Release all of a lease but its first blocks, `num_blocks` of them at most."""
        plan = self.abort(lease)
        self._unlock_tail(lease, plan)
        lease.asked = b""
        if num_blocks < lease.num_blocks:
            tree = lease.namespace.tree
            kept = tree.node_at(lease.node, num_blocks)
            gone = tree.unlock(lease.node, self.memory.touch(), above=kept)
            self.memory.free(lease.namespace, gone, plan)
            lease.node, lease.num_blocks = kept, num_blocks
            lease.num_matched = min(lease.num_matched, num_blocks)
        return plan

    def close_namespace(self, session: int, space: Namespace) -> Plan:
        """The session uses it no more: its leases there end."""
        plan: Plan = []
        for lease in self.leases.of_session(session):
            if lease.namespace is space:
                self._end(lease, plan)
        space.sessions.discard(session)
        return plan

    def bound_session(self, session: int, reserved_fraction: float) -> None:
        """Have a session hold so much of the capacity in uncommitted pages, and not the usual."""
        self._reserved_fractions[session] = reserved_fraction

    def end_session(self, session: int) -> Plan:
        """End a session's leases. Its reserved pages are quarantined: it could still write them."""
        plan: Plan = []
        for lease in self.leases.of_session(session):
            if lease.reserved:
                space, pages = lease.namespace, _sorted(lease.reserved)
                self._take_reserved(lease, pages.tolist())
                space.num_pages -= len(pages)
                space.arena.pool.move(pages, PageState.RESERVED, PageState.QUARANTINED)
                self.quarantined.setdefault(session, []).append((space.arena, pages))
                self.counters["pages_quarantined"] += len(pages)
                plan.append(Quarantined(space.arena.id, pages))
            self._end(lease, plan)
        self.leases.forget_session(session)
        self._reserved_bytes.pop(session, None)
        self._reserved_fractions.pop(session, None)
        for space in self.namespaces.values():
            space.sessions.discard(session)
        return plan

    def session_gone(self, session: int) -> Plan:
        """No process of an ended session is left: what it could write is free."""
        return [
            self.memory.free_pages(arena, pages)
            for arena, pages in self.quarantined.pop(session, [])
        ]

    def _end(self, lease: Lease, plan: Plan) -> None:
        plan.append(Ended(lease.slot, lease.generation + 1))
        self._free_reserved(lease, plan)
        self._unlock_tail(lease, plan)
        gone = lease.namespace.tree.unlock(lease.node, self.memory.touch())
        self.memory.free(lease.namespace, gone, plan)
        self.leases.remove(lease)

    def _unlock_tail(self, lease: Lease, plan: Plan) -> None:
        if lease.tail_node is not None:
            gone = lease.namespace.tree.unlock(lease.tail_node, self.memory.touch())
            self.memory.free(lease.namespace, gone, plan)
            lease.tail_node = lease.tail = None

    def _free_reserved(self, lease: Lease, plan: Plan) -> None:
        if lease.reserved:
            pages = _sorted(lease.reserved)
            self._take_reserved(lease, pages.tolist())
            self.memory.free(lease.namespace, pages, plan)

    def _take_reserved(self, lease: Lease, pages: list[int]) -> None:
        """These pages are not the lease's to write any more."""
        lease.reserved.difference_update(pages)
        size = len(pages) * lease.namespace.arena.layout.page_bytes
        self._reserved_bytes[lease.session] -= size


def _pages_to(found: Found) -> list[int]:
    """The pages of a found path."""
    above = found.node.path_pages()[: -found.node.num_blocks] if found.node.num_blocks else ()
    return [*map(int, above), *found.node.pages[: found.num_blocks]]


def _sorted(pages: set[int]) -> Pages:
    return np.array(sorted(pages), np.int64)
