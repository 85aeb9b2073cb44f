"""index: the daemon's own memory while prompts come that nobody ever saw before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvd.protocol.codec import TOKEN_BYTES
from kvd_client import Client, Namespace
from tests.bench.common import (
    IDENTITY,
    LAYOUT_SMALL,
    Bench,
    Row,
    random_tokens,
    row,
    running_daemon,
    store,
)

NUM_PAGES = 16 << 10
TURNOVERS = 8
LONGEST = 32  # blocks of a prompt


def index(bench: Bench) -> Iterator[Row]:
    num_pages = bench.pick(NUM_PAGES, 512)
    turnovers = bench.pick(TURNOVERS, 1)
    with (
        running_daemon(num_pages * LAYOUT_SMALL.page_bytes) as daemon,
        Client(daemon.endpoint, timeout=60) as client,
    ):
        namespace = client.open(IDENTITY, LAYOUT_SMALL)
        store(namespace, random_tokens(LAYOUT_SMALL.block_size, seed=0))
        idle = _anonymous_bytes(daemon.pid)
        rng = np.random.default_rng(1)
        taken = []
        for number in range(2 * turnovers):
            _turn_over(namespace, rng, num_pages)
            taken.append(_anonymous_bytes(daemon.pid) - idle)
            bench.say(f"{number + 1} turnovers: {taken[-1] >> 10} KiB")
        status = client.status()
    (cached,) = status.namespaces
    yield row(
        "index_growth",
        taken[-1] / taken[turnovers - 1],
        "x",
        f"anonymous memory (smaps_rollup) of a daemon of {num_pages} pages beyond its "
        f"{idle / (1 << 20):.1f} MiB before: {2 * turnovers} turnovers of its capacity, by unique "
        f"prompts of 1 to {LONGEST} blocks, against {turnovers}; after each of them "
        f"{', '.join(str(size >> 10) for size in taken)} KiB",
    )
    yield row(
        "index_bytes_per_block",
        taken[-1] / cached.num_blocks,
        "B",
        f"that memory over {cached.num_blocks} cached blocks in {cached.num_nodes} nodes; each "
        f"has {LAYOUT_SMALL.block_size * TOKEN_BYTES} bytes of tokens, and what is remembered of "
        "ended leases is in it too",
    )


def _turn_over(namespace: Namespace, rng: np.random.Generator, num_blocks: int) -> None:
    """Have so many blocks committed by prompts that share nothing."""
    while num_blocks > 0:
        count = int(rng.integers(1, LONGEST + 1))
        store(namespace, rng.integers(0, 128_000, count * LAYOUT_SMALL.block_size, np.uint32))
        num_blocks -= count


def _anonymous_bytes(pid: int) -> int:
    found = re.search(r"Anonymous:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    assert found
    return int(found[1]) << 10
