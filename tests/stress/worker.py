"""One client of the stress: `python -m tests.stress.worker ENDPOINT SEED CLIENT FIRST STOP`.

It does the operations FIRST to STOP - 1 of its sequence, which is the same for equal seeds, and
says after each, as one line of JSON, what happened in it. So who replaces it knows where to go on.
"""

from __future__ import annotations

import faulthandler
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec
import numpy as np

from kvd_client import (
    Client,
    DaemonUnavailable,
    DeadlineExceeded,
    KvdError,
    LeaseEnded,
    OutOfPages,
    PagesInUse,
)
from tests.stress.content import DOMAINS, Domain, fill, prompts_of, verify

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd_client import Lease
    from tests.stress.content import Tokens

# What a client must expect, whatever it does. Anything else ends the worker.
EXPECTED = (OutOfPages, LeaseEnded, DeadlineExceeded, DaemonUnavailable)
MAX_HELD = 4
# A reserve waits for others at most so long. They may well wait for this one.
PATIENCE = (0.05, 0.2, 0.5)
# Shorter than many an answer takes.
LATE_SECONDS = 0.001
# No operation may take so long: each of its calls ends within the client's timeout.
HANG_SECONDS = 60


class Work:
    """A lease and what it is for."""

    def __init__(self, lease: Lease, domain: Domain, tokens: Tokens) -> None:
        self.lease = lease
        self.domain = domain
        self.tokens = tokens

    def __enter__(self) -> Self:
        self.lease.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.lease.__exit__(*exc)

    @property
    def num_whole(self) -> int:
        """Tokens of the sequence that fill blocks."""
        return len(self.tokens) - len(self.tokens) % self.domain.layout.block_size

    def read(self) -> None:
        """Compare every byte of what is matched or committed."""
        verify(self.lease, self.domain, self.tokens)

    def write(self, rng: Random) -> None:
        """Fill the pages that are there, in two pieces, up to any token."""
        start = self.lease.num_committed
        stop = min(self.lease.capacity_tokens, len(self.tokens))
        middle = rng.randint(start, stop)
        fill(self.lease, self.domain, self.tokens, middle, stop)
        fill(self.lease, self.domain, self.tokens, start, middle)

    def compute(self, rng: Random, stop: int | None = None) -> None:
        """Reserve what is missing up to `stop`, write and commit it."""
        stop = self.num_whole if stop is None else min(stop, self.num_whole)
        self.lease.reserve(stop, timeout=rng.choice(PATIENCE))
        self.write(rng)
        self.commit(stop)

    def commit(self, stop: int | None = None, *, timeout: float | None = None) -> None:
        """Commit up to `stop`, all that was written unless said."""
        self.lease.commit(self.tokens[self.lease.num_committed : stop], timeout=timeout)

    def views(self) -> list[NDArray[Any]]:
        """Writable views of all that is reserved."""
        return self.lease.write_arrays(self.lease.num_committed, self.lease.capacity_tokens)


class Worker:
    """A client that does what its seed says, one small method per operation.

    An operation draws from the generator that it is given and from nothing else. What happened in
    it is appended to `happened`, from any thread.
    """

    def __init__(self, endpoint: str, seed: int, number: int) -> None:
        self.endpoint = endpoint
        self.seed = seed
        self.number = number
        self.prompts = prompts_of(seed)
        self.held: list[Work] = []
        self.stray: list[NDArray[Any]] = []
        self.happened: list[str] = []
        self._attach()

    def do(self, place: int) -> Counter[str]:
        """Do the operation at this place of the sequence; how often what happened in it."""
        self.happened.clear()
        operation, rng = self.draw(place)
        try:
            self._attempt(operation, rng)
        except BaseException as error:
            error.add_note(
                f"seed {self.seed}, client {self.number}, operation {place}: {operation.__name__}"
            )
            raise
        return Counter(self.happened)

    def draw(self, place: int) -> tuple[Operation, Random]:
        """The operation at this place, and what it draws from."""
        rng = Random(f"{self.seed}/{self.number}/{place}")
        (operation,) = rng.choices(list(OPERATIONS), list(OPERATIONS.values()))
        return operation, rng

    def close(self) -> None:
        self.client.close()

    # --- operations ---

    def look(self, rng: Random) -> None:
        """Read what is cached."""
        with self._match(rng) as work:
            work.read()

    def prefill(self, rng: Random) -> None:
        """Read what is cached, compute the rest at once."""
        with self._match(rng, reserve=True) as work:
            work.read()
            work.compute(rng)
            work.read()

    def decode(self, rng: Random) -> None:
        """Compute block by block, with pages reserved as they are needed, and stop anywhere."""
        with self._match(rng) as work:
            size = work.domain.layout.block_size
            start = work.lease.num_committed
            for stop in range(start + size, rng.randint(start, len(work.tokens)) + 1, size):
                work.compute(rng, stop)
            work.read()

    def repeat(self, rng: Random) -> None:
        """Give up on each answer too early, and ask again: the repeat gets the first answer."""
        with self._match(rng) as work:
            _late(partial(work.lease.reserve, work.num_whole, timeout=rng.random() * LATE_SECONDS))
            work.lease.reserve(work.num_whole, timeout=rng.choice(PATIENCE))
            work.write(rng)
            _late(partial(work.commit, timeout=rng.random() * LATE_SECONDS))
            work.commit()
            work.read()

    def give_up(self, rng: Random) -> None:
        """Match, and do not wait for the answer: there is a lease or there is none."""
        with self._match(rng, reserve=True, timeout=rng.random() * LATE_SECONDS) as work:
            work.read()

    def abort(self, rng: Random) -> None:
        """Give up what was written, and perhaps compute it after all."""
        with self._match(rng, reserve=True) as work:
            work.write(rng)
            work.lease.abort()
            work.read()
            if rng.random() < 0.5:
                work.compute(rng)
                work.read()

    def end_in_use(self, rng: Random) -> None:
        """No end is possible while a writable view lives; all goes on when it is gone."""
        with self._match(rng, reserve=True) as work:
            views = work.views()
            if work.lease.capacity_tokens > work.lease.num_committed:
                _expect(PagesInUse, work.lease.abort)
                _expect(PagesInUse, work.lease.release)
            del views
            work.compute(rng)
            work.read()

    def ask_too_much(self, rng: Random) -> None:
        """Reserve more than there is, or more than there may be just now."""
        with self._match(rng) as work:
            num_pages = rng.choice((64, 1800, 1800, 100_000))
            num_tokens = num_pages * work.domain.layout.block_size
            work.lease.reserve(num_tokens, timeout=rng.choice(PATIENCE))

    def hold(self, rng: Random) -> None:
        """Match, and keep the lease for later operations."""
        if len(self.held) == MAX_HELD:
            self.let_go(rng)
        work = self._match(rng, reserve=rng.random() < 0.25)
        work.read()
        self.held.append(work)

    def go_on(self, rng: Random) -> None:
        """Use a lease that was held meanwhile. One that gets no pages is lost."""
        work = self._take(rng)
        work.read()
        work.compute(rng, rng.randint(0, len(work.tokens)))
        work.read()
        self.held.append(work)

    def let_go(self, rng: Random) -> None:
        """Release a lease that was held meanwhile."""
        with self._take(rng) as work:
            work.read()

    def lose(self, rng: Random) -> None:
        """Drop the last reference to a lease without a word."""
        self._take(rng).read()

    def lose_in_use(self, rng: Random) -> None:
        """Drop a lease while views of its pages live, and these with the next such operation."""
        views = self._match(rng, reserve=True).views()
        _scribble(self.stray)
        self.stray = views

    def reattach(self, rng: Random) -> None:
        """Detach with leases held and views alive; whoever writes through these harms nobody."""
        work = self._match(rng, reserve=True)
        views = work.views()
        self.client.close()
        for one in self.held:
            _expect(LeaseEnded, one.read)
        self.held.clear()
        self._attach()
        _scribble(views)
        _scribble(self.stray)
        if rng.random() < 0.5:
            self.stray = views

    def together(self, rng: Random) -> None:
        """Two threads, each with leases of its own; they often compute the same blocks."""
        operations, seeds = rng.choices(ALONE, k=2), [rng.random(), rng.random()]
        if rng.random() < 0.5:
            operations[1], seeds[1] = operations[0], seeds[0]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._attempt, operations, map(Random, seeds)))

    def take_stock(self, rng: Random) -> None:
        """The books agree at any time."""
        status = self.client.status()
        (tier,) = status.tiers
        blocks = sum(namespace.num_blocks for namespace in status.namespaces)
        assert blocks == tier.pages["committed"], status
        assert tier.backed_bytes <= tier.capacity_bytes, status

    # --- what operations share ---

    def _attempt(self, operation: Operation, rng: Random) -> None:
        try:
            operation(self, rng)
        except EXPECTED as error:
            self.happened.append(type(error).__name__)

    def _attach(self) -> None:
        self.client = Client(self.endpoint, name=f"client {self.number}")
        self.namespaces = {domain: domain.open(self.client) for domain in DOMAINS}

    def _match(self, rng: Random, *, reserve: bool = False, timeout: float | None = None) -> Work:
        """Lease the beginning of any prompt, with some pages more where that is said."""
        domain = rng.choice(DOMAINS)
        # Some are asked for more often than others: they stay, and are hit.
        prompt = self.prompts[int(len(self.prompts) * rng.random() ** 3)]
        tokens = prompt[: rng.randint(1, len(prompt))]
        reserve_tokens = rng.randint(1, len(tokens)) if reserve else 0
        lease = self.namespaces[domain].match(
            tokens, reserve_tokens=reserve_tokens, timeout=timeout or rng.choice(PATIENCE)
        )
        if lease.shortage:
            self.happened.append("shortages")
        if not lease.is_open:
            raise DaemonUnavailable("a miss in an outage")
        self.happened.append("hits" if lease.num_tokens else "misses")
        return Work(lease, domain, tokens)

    def _take(self, rng: Random) -> Work:
        """A lease that was held meanwhile; whoever takes it puts it back or ends it."""
        if not self.held:
            self.hold(rng)
        return self.held.pop(rng.randrange(len(self.held)))


Operation: TypeAlias = Callable[[Worker, Random], None]

# How often each is done, in relation to the others.
OPERATIONS: dict[Operation, int] = {
    Worker.look: 20,
    Worker.prefill: 20,
    Worker.decode: 12,
    Worker.repeat: 4,
    Worker.give_up: 3,
    Worker.abort: 6,
    Worker.end_in_use: 4,
    Worker.ask_too_much: 3,
    Worker.hold: 8,
    Worker.go_on: 8,
    Worker.let_go: 6,
    Worker.lose: 3,
    Worker.lose_in_use: 3,
    Worker.reattach: 2,
    Worker.together: 6,
    Worker.take_stock: 2,
}
# These touch nothing that the worker keeps, and so can be done in several threads at once.
ALONE: tuple[Operation, ...] = (Worker.look, Worker.prefill, Worker.decode, Worker.repeat)


def _expect(kind: type[KvdError], call: Callable[[], None]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{call.__qualname__} did not raise {kind.__name__}")


def _late(call: Callable[[], object]) -> None:
    """Whether the answer comes in time or not."""
    with suppress(DeadlineExceeded):
        call()


def _scribble(views: list[NDArray[Any]]) -> None:
    for view in views:
        view.view(np.uint8)[:] = 0xEE


def main(endpoint: str, *numbers: str) -> None:
    seed, number, first, stop = map(int, numbers)
    worker = Worker(endpoint, seed, number)
    for place in range(first, stop):
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        print(msgspec.json.encode(worker.do(place)).decode(), flush=True)
    worker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
