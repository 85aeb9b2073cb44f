"""One client of the crashes: `python -m tests.stress.crash_worker ENDPOINT SEED NUMBER STEP`.

It computes the sequences NUMBER, NUMBER + STEP, … for as long as it lives, whatever becomes of the
daemon. A line tells of each commit that was answered: the sequence, and how many of its tokens are
committed now. Another line, OUTAGE, tells that the daemon was lost.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from kvd_client import Client, DaemonUnavailable, DeadlineExceeded, LeaseEnded
from tests.stress.content import (
    DOMAINS,
    PICTURE,
    Domain,
    Tokens,
    extras_of,
    fill,
    ids_of,
    show,
    verify,
)

if TYPE_CHECKING:
    from kvd_client import Lease

OUTAGE = "outage"
# What a client must expect of a daemon that dies. Anything else ends the worker.
EXPECTED = (DaemonUnavailable, DeadlineExceeded, LeaseEnded)
# So many sequences of a domain have a common beginning.
FAMILY = 16
MAX_PART_TOKENS = 48
MAX_PIECE_BLOCKS = 8
# Neither a sequence nor the wait for a daemon may take so long.
HANG_SECONDS = 60


def sequence_of(seed: int, number: int) -> tuple[Domain, Tokens]:
    """Where a sequence belongs, and its tokens, which are whole blocks."""
    domain = DOMAINS[number % len(DOMAINS)]
    family = Random(f"{seed}/family {number // (FAMILY * len(DOMAINS))}")
    tokens = _part(family) + _part(Random(f"{seed}/sequence {number}"))
    tokens = tokens[: len(tokens) - len(tokens) % domain.layout.block_size]
    return domain, show(tokens, int(domain.extras))


def _part(rng: Random) -> Tokens:
    # Some tokens are 0, where a picture may be.
    num_tokens = rng.randint(8, MAX_PART_TOKENS)
    return tuple(rng.randrange(4) and rng.randrange(PICTURE) for _ in range(num_tokens))


class Worker:
    """A client that computes sequences of its own, and after each reads one of those so far."""

    def __init__(self, endpoint: str, seed: int, first: int) -> None:
        self.seed = seed
        self.first = first
        self.rng = Random(f"{seed}/worker {first}")
        self.client = Client(endpoint, name=f"client {first}")
        self.namespaces = {domain: domain.open(self.client) for domain in DOMAINS}

    def work(self, step: int) -> None:
        for number in count(self.first, step):
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            while not self._attempt(partial(self.compute, number)):
                pass
            self._attempt(partial(self.read, self.rng.randrange(self.first, number + 1, step)))

    def compute(self, number: int) -> None:
        """Read what is cached of a sequence, compute and commit the rest in pieces."""
        domain, tokens = sequence_of(self.seed, number)
        with self._match(domain, tokens) as lease:
            while (start := lease.num_committed) < len(tokens):
                num_blocks = self.rng.randint(1, MAX_PIECE_BLOCKS)
                stop = min(start + num_blocks * domain.layout.block_size, len(tokens))
                lease.reserve(stop)
                fill(lease, domain, tokens, start, stop)
                piece = tokens[start:stop]
                lease.commit(ids_of(piece), extras=extras_of(piece, start))
                print(number, stop, flush=True)

    def read(self, number: int) -> None:
        """Read what is cached of a sequence."""
        with self._match(*sequence_of(self.seed, number)):
            pass

    @contextmanager
    def _match(self, domain: Domain, tokens: Tokens) -> Iterator[Lease]:
        """A lease of a sequence, of which every byte that is there was compared."""
        extras = extras_of(tokens)
        with self.namespaces[domain].match(ids_of(tokens), extras=extras) as lease:
            if not lease.is_open:
                raise DaemonUnavailable("a miss in an outage")
            verify(lease, domain, tokens)
            yield lease

    def _attempt(self, operation: Callable[[], None]) -> bool:
        """Whether it was done; where the daemon was lost, another is there now."""
        try:
            operation()
        except EXPECTED:
            print(OUTAGE, flush=True)
            assert self.client.wait_attached(HANG_SECONDS)
            return False
        return True


def main(endpoint: str, *numbers: str) -> None:
    seed, first, step = map(int, numbers)
    Worker(endpoint, seed, first).work(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
