"""hit_vs_copy: leasing a long prefix against copying it, all memory touched before."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from kvd_client import Client
from tests.bench.common import (
    IDENTITY,
    LAYOUT_8B,
    Bench,
    Row,
    capacity_for,
    copy_all,
    describe,
    fitting_tokens,
    like,
    one_thread,
    pairs,
    random_tokens,
    row,
    running_daemon,
    store,
    timed,
)

NUM_TOKENS = 32 << 10
# Leases are taken in bursts, since one is so much shorter than a copy.
BURST = 20


def hit_vs_copy(bench: Bench) -> Iterator[Row]:
    wanted = bench.pick(NUM_TOKENS, 256)
    num_tokens = fitting_tokens(wanted, LAYOUT_8B, copies=2)
    tokens = random_tokens(num_tokens, seed=0)
    with (
        one_thread(),
        running_daemon(capacity_for(num_tokens, LAYOUT_8B)) as daemon,
        Client(daemon.endpoint, timeout=60) as client,
    ):
        bench.say(f"storing {describe(num_tokens, LAYOUT_8B, wanted)}")
        namespace = client.open(IDENTITY, LAYOUT_8B)
        store(namespace, tokens)

        def hit() -> None:
            with namespace.match(tokens) as lease:
                tensors = lease.read_tensors(0, num_tokens)
                assert sum(tensor.shape[2] for tensor in tensors) == num_tokens

        def hits() -> float:
            return statistics.median(timed(hit) for _ in range(BURST))

        with namespace.match(tokens) as held:
            leased = held.read_tensors(0, num_tokens)
            private = like(leased)
            copy_all(private, leased)
            bench.say("leasing and copying in turn")
            found = pairs(hits, lambda: timed(lambda: copy_all(private, leased)), bench.pick(7, 2))
            num_runs = len(leased)
    yield row(
        "hit_vs_copy",
        found.ratio,
        "x",
        f"match, views of all pages, release of {describe(num_tokens, LAYOUT_8B, wanted)} "
        f"in {num_runs} runs: {found}; the copy is torch.Tensor.copy_ on one thread",
    )
