"""Reserves: pages for leases, at once where they are free and nobody waits, else in turn."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
from msgspec.structs import asdict, replace

from kvd.actors.sessions import session_name
from kvd.arena.runs import runs_of
from kvd.cache.leases import OWN_SESSION
from kvd.cache.plan import Back, Granted, Plan, Short
from kvd.protocol.errors import KvdError, LeaseEnded, OutOfPages

if TYPE_CHECKING:
    from kvd.cache.leases import Lease
    from kvd.cache.state import CacheState
    from kvd.protocol.messages import Runs, Shortage

# So often a reserve may evict blocks of another layout, without yet making an extent whole.
MAX_TRIES = 4
# Of who holds most pages, a shortage names so many.
NUM_HOLDERS = 5


@dataclass(eq=False, slots=True)
class _Waiter:
    """A reserve that could not be answered at once."""

    lease: Lease
    start: int
    stop: int
    ahead: int
    done: anyio.Event = field(default_factory=anyio.Event)
    runs: Runs = ()
    error: KvdError | None = None


class Reserves:
    """All reserves of one daemon. Whoever frees pages calls `serve`."""

    def __init__(
        self, state: CacheState, write: Callable[[Plan], None], tidy: Callable[[], None]
    ) -> None:
        """`write` notes what the state decided; `tidy` is called when less may be ready."""
        self._state = state
        self._write = write
        self._tidy = tidy
        self._waiters: deque[_Waiter] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiters)

    def now(self, lease: Lease, start: int, stop: int, ahead: int) -> Runs | None:
        """The pages, if they can be had without waiting and without overtaking who waits."""
        have = len(lease.granted)  # what was granted before is granted again
        if stop >= have and any(_holds_up(other, lease) for other in self._waiters):
            if stop > have:
                return None
            ahead = 0
        answer = self._reserve(lease, start, stop, ahead)
        self._tidy()
        return runs_of(answer.pages) if isinstance(answer, Granted) else None

    async def in_turn(
        self, lease: Lease, start: int, stop: int, ahead: int, seconds: float
    ) -> Runs:
        """The pages, in the order of arrival; raises OutOfPages or LeaseEnded."""
        waiter = _Waiter(lease, start, stop, ahead)
        self._waiters.append(waiter)
        self.serve()
        self._state.counters["reserves_waited"] += not waiter.done.is_set()
        try:
            with anyio.move_on_after(seconds):
                await waiter.done.wait()
        finally:
            if not waiter.done.is_set():
                self._waiters.remove(waiter)
                self.serve()
        if waiter.error:
            raise waiter.error
        if not waiter.done.is_set():
            wanted = stop - len(lease.granted)
            self._state.counters["reserves_short"] += 1
            raise self._out_of_pages(self._state.memory.shortage(lease.namespace, wanted))
        return waiter.runs

    def serve(self) -> None:
        """Answer the waiting reserves in their order, the daemon's own last, as far as pages go.

        Who cannot be served holds up those behind who want the same pages, and nobody else.
        """
        unserved: list[_Waiter] = []
        for waiter in sorted(self._waiters, key=lambda one: one.lease.session == OWN_SESSION):
            lease = waiter.lease
            is_held_up = any(_holds_up(other, lease) for other in unserved)
            if is_held_up and self._state.leases.has(lease):
                continue
            if not waiter.done.is_set() and not self._try(waiter):
                unserved.append(waiter)
        self._waiters = deque(waiter for waiter in self._waiters if not waiter.done.is_set())

    def _try(self, waiter: _Waiter) -> bool:
        lease = waiter.lease
        try:
            if not self._state.leases.has(lease):
                raise LeaseEnded(f"lease {lease.id} ended while it waited for pages")
            answer = self._reserve(lease, waiter.start, waiter.stop, waiter.ahead)
            if isinstance(answer, Granted):
                waiter.runs = runs_of(answer.pages)
                self._tidy()
            elif answer.hopeless:
                raise self._out_of_pages(answer.shortage)
            else:
                return False
        except KvdError as error:
            self._state.counters["reserves_short"] += isinstance(error, OutOfPages)
            waiter.error = error
        waiter.done.set()
        return True

    def _reserve(self, lease: Lease, start: int, stop: int, ahead: int) -> Granted | Short:
        """Ask the state for pages until it answers with some, or with what is to be waited for."""
        for _ in range(MAX_TRIES):
            answer = self._state.reserve(lease, start, stop, ahead)
            self._write(answer.plan)
            # What was evicted elsewhere, without memory on its way, may serve the next try.
            is_done = any(isinstance(step, Back) for step in answer.plan) or not answer.plan
            if isinstance(answer, Granted) or is_done:
                break
        return answer

    def _out_of_pages(self, shortage: Shortage) -> OutOfPages:
        held: Counter[int] = Counter()
        for lease in self._state.leases:
            held[lease.session] += lease.num_blocks + len(lease.reserved)
        holders = {session_name(number): count for number, count in held.most_common(NUM_HOLDERS)}
        quota = f", whose namespace may have {shortage.max_pages}" if shortage.max_pages else ""
        return OutOfPages(
            f"{shortage.num_wanted} pages wanted{quota}, {shortage.num_free} free; of "
            f"{shortage.num_pages} {shortage.num_locked} are locked by leases and pins, "
            f"{shortage.num_reserved} reserved, {shortage.num_quarantined} quarantined",
            **asdict(replace(shortage, holders=holders)),
        )


def _holds_up(waiter: _Waiter, lease: Lease) -> bool:
    """Whether a waiter wants the pages that the lease could have.

    Who waits for its namespace's quota wants none but that namespace's; and the daemon, which
    brings blocks up, lets everybody go first.
    """
    if waiter.lease.session == OWN_SESSION:
        return False
    space, mine = waiter.lease.namespace, lease.namespace
    wanted = waiter.stop - len(waiter.lease.granted)
    is_at_quota = space.quota.max_bytes and space.num_pages + wanted > space.max_pages
    return mine is space or (mine.arena is space.arena and not is_at_quota)
