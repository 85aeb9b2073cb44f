"""One client of the stress: `python -m tests.stress.worker ENDPOINT SEED CLIENT FIRST STOP`.

It does the operations FIRST to STOP - 1 of its sequence, which is the same for equal seeds, and
says after each, as one line of JSON, what happened in it. So who replaces it knows where to go on.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec
import numpy as np

from kvd_client import (
    Client,
    DaemonUnavailable,
    DeadlineExceeded,
    Dropped,
    KvdError,
    LeaseEnded,
    LimitExceeded,
    OutOfPages,
    PagesInUse,
)
from tests.stress.awaiting import Awaiting
from tests.stress.content import (
    DOMAINS,
    LAYOUTS,
    Domain,
    extras_of,
    fill,
    ids_of,
    prompts_of,
    verify,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd_client import Lease
    from tests.stress.content import Tokens

# What a client must expect, whatever it does. Anything else ends the worker.
EXPECTED = (OutOfPages, Dropped, DeadlineExceeded, DaemonUnavailable)
MAX_HELD = 4
# A reserve waits for others at most so long. They may well wait for this one.
PATIENCE = (0.05, 0.2, 0.5)
# Shorter than many an answer takes.
LATE_SECONDS = 0.001
INTERRUPT_SECONDS = 0.05
# More pages than can be had, but fewer than the arena has: one waits for them.
TOO_MANY = 1800
PIN_SECONDS = 1.0
# For so many operations one layout is asked for more, then the other: memory moves between them.
SEASON_OPERATIONS = 50
IN_SEASON = 0.8
# No operation may take so long: each of its calls ends within the client's timeout.
HANG_SECONDS = 60


class Interrupted(Exception):
    """Raised in the main thread, wherever it is."""


class Work:
    """A lease and what it is for."""

    def __init__(self, lease: Lease, domain: Domain, tokens: Tokens) -> None:
        self.lease = lease
        self.domain = domain
        self.begin(tokens)

    def begin(self, tokens: Tokens) -> None:
        """The lease stands for the beginning of these tokens; the rest is to be computed."""
        self.tokens = tokens
        # Rows up to this token hold what they must.
        self.num_written = max(self.lease.num_tokens, self.lease.num_committed)

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
        """Compare every byte of what is matched or written."""
        verify(self.lease, self.domain, self.tokens, self.num_written)

    def write(self, rng: Random) -> None:
        """Fill the rest of the pages that are there, in two pieces."""
        start, stop = self.num_written, min(self.lease.capacity_tokens, len(self.tokens))
        middle = rng.randint(start, stop)
        fill(self.lease, self.domain, self.tokens, middle, stop)
        fill(self.lease, self.domain, self.tokens, start, middle)
        self.num_written = stop

    def compute(self, rng: Random, stop: int | None = None) -> None:
        """Reserve what is missing up to `stop`, write and commit it."""
        stop = self.num_whole if stop is None else min(stop, self.num_whole)
        self.lease.reserve(stop, timeout=rng.choice(PATIENCE))
        self.write(rng)
        self.commit(stop)

    def commit(self, stop: int | None = None, *, timeout: float | None = None) -> None:
        """Commit up to `stop`, all that was written unless said."""
        start = self.lease.num_committed
        tokens = self.tokens[start : self.num_written if stop is None else stop]
        try:
            self.lease.commit(ids_of(tokens), extras=extras_of(tokens, start), timeout=timeout)
        except Dropped:
            self.read()  # it is good all the same
            raise

    def abort(self) -> None:
        self.lease.abort()
        self.num_written = self.lease.num_committed

    def keep(self, num_tokens: int, tokens: Tokens) -> None:
        """Keep so much of the beginning, and go on from there with these tokens."""
        self.lease.release(keep_tokens=num_tokens)
        self.begin(tokens)

    def copy(self, source: Work) -> None:
        """Copy the rows of another's that agree, as far as there are pages."""
        stop = min(source.num_written, self.lease.capacity_tokens)
        stop = _num_common(source.tokens[:stop], self.tokens)
        if stop > self.num_written:
            self.lease.copy_rows(source.lease, self.num_written, stop)
            self.num_written = stop

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
        self.kind = KINDS[number % len(KINDS)]
        prompts = prompts_of(seed)
        self.sequences = {domain: domain.sequences(prompts) for domain in DOMAINS}
        self.held: list[Work] = []
        self.stray: list[NDArray[Any]] = []
        self.happened: list[str] = []
        self.season = LAYOUTS[0]
        self._attach()

    def do(self, place: int) -> Counter[str]:
        """Do the operation at this place of the sequence; how often what happened in it."""
        self.happened.clear()
        self.season = LAYOUTS[place // SEASON_OPERATIONS % len(LAYOUTS)]
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
            work.abort()
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
            num_pages = rng.choice((64, TOO_MANY, TOO_MANY, 100_000))
            num_tokens = num_pages * work.domain.layout.block_size
            work.lease.reserve(num_tokens, timeout=rng.choice(PATIENCE))

    def interrupt(self, rng: Random) -> None:
        """Be torn out of a reserve that waits, as by Ctrl-C, and go on with the lease."""
        with self._match(rng, reserve=True) as work:
            with suppress(Interrupted), _alarm(rng.random() * INTERRUPT_SECONDS):
                work.lease.reserve(TOO_MANY * work.domain.layout.block_size, timeout=PATIENCE[1])
            if rng.random() < 0.5:
                work.abort()
            work.compute(rng)
            work.read()

    def hold(self, rng: Random) -> None:
        """Match, and keep the lease for later operations."""
        if len(self.held) == MAX_HELD:
            self.let_go(rng)
        work = self._match(rng, reserve=rng.random() < 0.25, exact_tail=rng.random() < 0.5)
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

    def tail(self, rng: Random) -> None:
        """Match to the token; the rows of a block that agrees in part are not computed again."""
        with self._match(rng, exact_tail=True, reserve=rng.random() < 0.5) as work:
            if work.lease.num_tokens > work.lease.num_committed:
                self.happened.append("tails")
            work.read()
            work.compute(rng)
            work.read()

    def fork(self, rng: Random) -> None:
        """Go on from one beginning in two ways; rows behind the last whole block are copied."""
        with self._match(rng, reserve=True) as work:
            work.write(rng)
            with self._fork(rng, work) as fork:
                fork.read()
                fork.compute(rng)
                fork.read()
            work.compute(rng)
            work.read()

    def keep(self, rng: Random) -> None:
        """Give back all but some blocks, and go on from these in another way."""
        with self._match(rng, reserve=True) as work:
            work.compute(rng)
            size, committed = work.domain.layout.block_size, work.lease.num_committed
            if committed < size:
                return
            num_tokens = rng.randint(size, committed)
            work.keep(num_tokens, self._sibling(rng, work, num_tokens - num_tokens % size))
            self.happened.append("keeps")
            work.compute(rng)
            work.read()

    def replace(self, rng: Random) -> None:
        """Have a lease stand for something else."""
        with self._match(rng, reserve=True) as work:
            work.write(rng)
            tokens = self._tokens(rng, work.domain)
            work.lease.replace(
                ids_of(tokens),
                extras=extras_of(tokens),
                reserve_tokens=rng.randint(0, len(tokens)),
                exact_tail=rng.random() < 0.5,
                timeout=rng.choice(PATIENCE),
            )
            work.begin(tokens)
            self._note_match(work.lease)
            work.read()
            work.compute(rng)
            work.read()

    def pin(self, rng: Random) -> None:
        """What is pinned stays, whatever others need meanwhile, unless it is dropped."""
        domain = self._domain(rng)
        tokens, namespace = self._tokens(rng, domain), self.namespaces[domain]
        asked = {"tokens": ids_of(tokens), "extras": extras_of(tokens)}
        num_drops = self._num_drops(domain)
        end = time.monotonic() + (seconds := rng.random() * PIN_SECONDS)
        try:
            pinned = namespace.pin(**asked, seconds=seconds)
        except LimitExceeded:
            self.happened.append("pins_refused")
            return
        self.happened.append("pins" if pinned.pin else "pins_of_nothing")
        self._attempt(Worker.prefill, rng)
        with namespace.match(**asked) as lease:
            self._note_match(lease)
            if lease.num_tokens < pinned.num_tokens and time.monotonic() < end:
                assert self._num_drops(domain) > num_drops, f"{pinned} did not stay"
            verify(lease, domain, tokens)
        if pinned.pin and rng.random() < 0.5:
            self.client.unpin(pins=[pinned.pin])

    def drop(self, rng: Random) -> None:
        """Remove what follows any place of a sequence; seldom all of a namespace."""
        domain = self._domain(rng)
        tokens = self._tokens(rng, domain) if rng.random() < 0.9 else ()
        self.namespaces[domain].drop(
            ids_of(tokens), from_token=rng.randint(0, len(tokens) // 2), extras=extras_of(tokens)
        )
        self.happened.append("drops")

    def take_stock(self, rng: Random) -> None:
        """The books agree at any time, and no bound is passed."""
        status = self.client.status()
        tier, *_ = status.tiers
        blocks = sum(namespace.num_blocks for namespace in status.namespaces)
        assert blocks == tier.pages["committed"], status
        assert tier.backed_bytes <= tier.capacity_bytes, status
        for space in status.namespaces:
            size = space.num_pages * space.page_bytes
            assert not space.max_bytes or size <= space.max_bytes, space

    # --- what operations share ---

    def _attempt(self, operation: Operation, rng: Random) -> None:
        try:
            operation(self, rng)
        except EXPECTED as error:
            self.happened.append(type(error).__name__)
        except LeaseEnded:
            if self.kind.maps:
                raise  # the daemon keeps its leases as long as it lives
            self.happened.append("LeaseEnded")

    def _attach(self) -> None:
        self.client = self.kind.make(self.endpoint, f"client {self.number}", self.happened.append)
        self.namespaces = {domain: domain.open(self.client) for domain in DOMAINS}

    def _num_drops(self, domain: Domain) -> int:
        return sum(
            space.generation for space in self.client.status().namespaces if domain.has(space)
        )

    def _domain(self, rng: Random) -> Domain:
        """Any; most are of the season's layout."""
        in_season = [domain for domain in DOMAINS if domain.layout == self.season]
        return rng.choice(in_season if rng.random() < IN_SEASON else DOMAINS)

    def _tokens(self, rng: Random, domain: Domain) -> Tokens:
        """The beginning of any sequence."""
        # Some are asked for more often than others: they stay, and are hit.
        sequences = self.sequences[domain]
        tokens = sequences[int(len(sequences) * rng.random() ** 3)]
        return tokens[: rng.randint(1, len(tokens))]

    def _sibling(self, rng: Random, work: Work, num_tokens: int) -> Tokens:
        """Any sequence that begins with so many tokens of this work."""
        start = work.tokens[:num_tokens]
        sequences = self.sequences[work.domain]
        return rng.choice([tokens for tokens in sequences if tokens[:num_tokens] == start])

    def _match(
        self,
        rng: Random,
        *,
        reserve: bool = False,
        exact_tail: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Lease the beginning of any sequence, with some pages more where that is said."""
        domain = self._domain(rng)
        tokens = self._tokens(rng, domain)
        lease = self.namespaces[domain].match(
            ids_of(tokens),
            extras=extras_of(tokens),
            reserve_tokens=rng.randint(1, len(tokens)) if reserve else 0,
            exact_tail=exact_tail,
            timeout=timeout or rng.choice(PATIENCE),
        )
        self._note_match(lease)
        return Work(lease, domain, tokens)

    def _fork(self, rng: Random, work: Work) -> Work:
        """Another work with the same blocks, and the rows behind these that agree."""
        lease = work.lease.fork(
            reserve_tokens=rng.randint(0, len(work.tokens)), timeout=rng.choice(PATIENCE)
        )
        self.happened.append("forks")
        fork = Work(lease, work.domain, self._sibling(rng, work, lease.num_committed))
        fork.copy(work)
        return fork

    def _note_match(self, lease: Lease) -> None:
        if lease.shortage:
            self.happened.append("shortages")
        if not lease.is_open:
            raise DaemonUnavailable("a miss in an outage")
        self.happened.append("hits" if lease.num_tokens else "misses")
        if lease.num_tokens and not self.kind.maps:
            self.happened.append("copies")

    def _take(self, rng: Random) -> Work:
        """A lease that was held meanwhile; whoever takes it puts it back or ends it."""
        if not self.held:
            self.hold(rng)
        return self.held.pop(rng.randrange(len(self.held)))


@dataclass(frozen=True, slots=True)
class Kind:
    """How a worker reaches the daemon. Where nothing is mapped, its leases end with silence."""

    is_async: bool = False
    maps: bool = True

    def make(self, endpoint: str, name: str, note: Callable[[str], None]) -> Client:
        if self.is_async:
            return Awaiting.client(endpoint, name=name, maps=self.maps, note=note)
        return Client(endpoint, name=name, maps=self.maps)


# In turn; of a few clients each is another.
KINDS = (Kind(), Kind(is_async=True), Kind(maps=False), Kind(), Kind(is_async=True, maps=False))

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
    Worker.ask_too_much: 2,
    Worker.interrupt: 1,
    Worker.hold: 8,
    Worker.go_on: 8,
    Worker.let_go: 6,
    Worker.lose: 3,
    Worker.lose_in_use: 3,
    Worker.reattach: 2,
    Worker.together: 6,
    Worker.tail: 10,
    Worker.fork: 8,
    Worker.keep: 6,
    Worker.replace: 6,
    Worker.pin: 4,
    Worker.drop: 2,
    Worker.take_stock: 2,
}
# These touch nothing that the worker keeps, and so can be done in several threads at once.
ALONE: tuple[Operation, ...] = (
    Worker.look,
    Worker.prefill,
    Worker.decode,
    Worker.repeat,
    Worker.tail,
    Worker.fork,
    Worker.keep,
    Worker.replace,
)


def _num_common(some: Tokens, others: Tokens) -> int:
    """How many tokens agree from the first on."""
    pairs = enumerate(zip(some, others, strict=False))
    return next(
        (place for place, (one, other) in pairs if one != other), min(len(some), len(others))
    )


def _expect(kind: type[KvdError], call: Callable[[], None]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{call} did not raise {kind.__name__}")


def _late(call: Callable[[], object]) -> None:
    """Whether the answer comes in time or not."""
    with suppress(DeadlineExceeded):
        call()


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise Interrupted after so many seconds."""

    def ring(*_: object) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


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
