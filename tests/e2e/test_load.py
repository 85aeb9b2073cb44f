"""Ten clients at once on a pool that is smaller than what they work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.support import pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd_client.client import Client
    from tests.arena.conftest import Child

# 24 families of 8 common blocks with 4 branches of up to 8 more: up to 960 blocks in 128 pages.
WORK = """
import random
rng = random.Random(int(sys.argv[2]))
hits = full = wrong = 0
for turn in range(150):
    family, branch = rng.randrange(24), rng.randrange(4)
    tokens = tokens_of(family, 8) + tokens_of(1000 + 4 * family + branch, rng.randint(1, 8))
    lease = namespace.match(tokens, reserve_tokens=rng.choice([0, 4 * BLOCK]))
    try:
        with lease:
            wrong += not holds(lease, tokens, lease.num_tokens)
            hits += lease.num_tokens > 0
            if rng.random() < 0.2:
                lease.abort()
            compute(lease, tokens)
            wrong += not holds(lease, tokens)
            lease.check()
    except OutOfPages:
        full += 1
print(hits, full, wrong)
client.close()
"""


def test_ten_clients_read_what_was_committed_for_exactly_their_tokens(
    program: Callable[..., Child], client: Client
) -> None:
    workers = [program(WORK, seed) for seed in range(10)]
    answers = [[int(word) for word in worker.says().split()] for worker in workers]
    assert [worker.ended() for worker in workers] == [0] * 10
    assert [wrong for _, _, wrong in answers] == [0] * 10
    assert sum(hits for hits, _, _ in answers) > 100
    counters = client.status().counters
    assert counters["blocks_evicted"] > 128
    assert counters["blocks_duplicate"] > 0
    assert set(pages(client)) <= {"free", "committed"}
