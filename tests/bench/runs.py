"""median_run_tokens: how long runs of pages are when sequences grow side by side for long."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvd.arena.runs import runs_of
from kvd_client import Client, Lease, Namespace
from tests.bench.common import IDENTITY, LAYOUT_SMALL, Bench, Row, row, running_daemon

NUM_SEQUENCES = 16
NUM_PAGES = 8192
CYCLES = 5
BLOCK = LAYOUT_SMALL.block_size


class Sequence:
    """A prompt, then one block after the other, to a length of its own."""

    def __init__(self, namespace: Namespace, rng: np.random.Generator, longest: int) -> None:
        prompt = int(rng.integers(4, longest // 2))
        self.num_tokens = int(rng.integers(prompt + 1, longest))
        self.tokens = rng.integers(0, 128_000, self.num_tokens, dtype=np.uint32)
        self.at = prompt
        self.lease: Lease = namespace.match(self.tokens[:prompt], reserve_tokens=prompt)
        self.commit()

    def step(self) -> bool:
        """Decode up to the end of the next block; whether the sequence goes on."""
        self.at = min(self.at - self.at % BLOCK + BLOCK, self.num_tokens)
        self.lease.reserve(self.at)
        self.commit()
        return self.at < self.num_tokens

    def commit(self) -> None:
        first = self.lease.num_committed
        self.lease.commit(self.tokens[first : self.at])

    def run_tokens(self) -> list[int]:
        """The lengths of the runs that hold its blocks."""
        num_blocks = self.lease.num_committed // BLOCK
        return [run.count * BLOCK for run in runs_of(self.lease.pages[:num_blocks])]


def median_run_tokens(bench: Bench) -> Iterator[Row]:
    num_pages = bench.pick(NUM_PAGES, 512)
    longest = bench.pick(4096, 256)
    cycles = bench.pick(CYCLES, 1)
    with (
        running_daemon(num_pages * LAYOUT_SMALL.page_bytes) as daemon,
        Client(daemon.endpoint, timeout=60) as client,
    ):
        namespace = client.open(IDENTITY, LAYOUT_SMALL)
        lengths = _decode(bench, namespace, num_pages, longest, cycles)
        evicted = client.status().counters["blocks_evicted"]
    assert evicted > 0 or bench.tiny
    common = ", ".join(f"{tokens} ({count})" for tokens, count in Counter(lengths).most_common(5))
    yield row(
        "median_run_tokens",
        statistics.median(lengths),
        "tokens",
        f"{NUM_SEQUENCES} sequences of up to {longest} tokens, each replaced at its end, in "
        f"{num_pages} pages; runs of those that ended while the pool was filled once more after "
        f"{cycles} times; {evicted} blocks evicted; of {len(lengths)} runs the most frequent "
        f"lengths are {common}; shortest {min(lengths)}, mean {statistics.mean(lengths):.0f}",
    )


def _decode(
    bench: Bench, namespace: Namespace, num_pages: int, longest: int, cycles: int
) -> list[int]:
    """Fill the pool `cycles` times and once more; the run lengths of the last time."""
    rng = np.random.default_rng(0)
    living = [Sequence(namespace, rng, longest) for _ in range(NUM_SEQUENCES)]
    lengths: list[int] = []
    ended = told = 0  # blocks of the sequences that are over; fills of the pool told of
    while ended < (cycles + 1) * num_pages:
        for place, sequence in enumerate(living):
            if sequence.step():
                continue
            ended += sequence.lease.num_committed // BLOCK
            if ended >= cycles * num_pages:
                lengths += sequence.run_tokens()
            sequence.lease.release()
            living[place] = Sequence(namespace, rng, longest)
        if ended // num_pages > told:
            told = ended // num_pages
            bench.say(f"the pool was filled {told} of {cycles + 1} times")
    for sequence in living:
        sequence.lease.release()
    return lengths
