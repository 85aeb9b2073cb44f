"""store_vs_copy: writing a prefix into reserved pages and committing it, against a plain copy."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from kvd_client import Client, binding
from tests.bench.common import (
    IDENTITY,
    LAYOUT_8B,
    Bench,
    Pairs,
    Row,
    copy_all,
    describe,
    fitting_tokens,
    one_thread,
    pairs,
    random_tokens,
    row,
    running_daemon,
    timed,
)

if TYPE_CHECKING:
    import torch

    from kvd_client import Namespace

NUM_TOKENS = 8 << 10


def store_vs_copy(bench: Bench) -> Iterator[Row]:
    wanted = bench.pick(NUM_TOKENS, 256)
    # One prefix is read, one written, and two lie in the tier.
    num_tokens = fitting_tokens(wanted, LAYOUT_8B, copies=4)
    capacity = 2 * num_tokens * LAYOUT_8B.token_bytes + (512 << 20)
    seeds = count()
    with one_thread(), running_daemon(capacity) as daemon:
        bench.say(f"allocating {describe(num_tokens, LAYOUT_8B, wanted)} twice")
        source, target = _private(num_tokens), _private(num_tokens)

        def copy() -> float:
            return timed(lambda: copy_all([target], [source]))

        with Client(daemon.endpoint, timeout=60) as client:
            namespace = client.open(IDENTITY, LAYOUT_8B)
            for _ in range(4):  # until every page of the tier was written through this mapping
                _store(namespace, source, next(seeds))
            bench.say("storing into populated pages and copying in turn")
            populated = pairs(
                lambda: _store(namespace, source, next(seeds)), copy, bench.pick(9, 2)
            )

        def store_unpopulated() -> float:
            with (
                unpopulated(),
                Client(daemon.endpoint, timeout=60) as fresh,
            ):
                return _store(fresh.open(IDENTITY, LAYOUT_8B), source, next(seeds))

        bench.say("storing into unpopulated pages and copying in turn")
        first_touched = pairs(store_unpopulated, copy, bench.pick(5, 2))
    yield _row("store_vs_copy", populated, "reserved and populated", num_tokens, wanted)
    yield _row("store_vs_copy_unpopulated", first_touched, "reserved only", num_tokens, wanted)


def _row(name: str, found: Pairs, pages: str, num_tokens: int, wanted: int) -> Row:
    return row(
        name,
        found.ratio,
        "x",
        f"{describe(num_tokens, LAYOUT_8B, wanted)} copied into pages {pages} before, and "
        f"committed: {found}; both with torch.Tensor.copy_ on one thread",
    )


def _private(num_tokens: int) -> torch.Tensor:
    import torch

    layout = LAYOUT_8B
    shape = (layout.num_layers, 2, num_tokens, layout.num_kv_heads, layout.head_size)
    return torch.ones(shape, dtype=torch.bfloat16)


def _store(namespace: Namespace, source: torch.Tensor, seed: int) -> float:
    """Seconds from pages in hand to a committed prefix."""
    num_tokens = source.shape[2]
    tokens = random_tokens(num_tokens, seed)
    with namespace.match(tokens, reserve_tokens=num_tokens) as held:
        assert held.shortage is None
        wait_populated()

        def write() -> None:
            targets = held.write_tensors(0, num_tokens)
            copy_all(targets, source.split([target.shape[2] for target in targets], dim=2))

        def write_and_commit() -> None:
            write()
            held.commit(tokens)

        return timed(write_and_commit)


@contextmanager
def unpopulated() -> Iterator[None]:
    """Leases made here leave all pages to their first touch."""
    before = binding.POPULATE_BYTES
    binding.POPULATE_BYTES = sys.maxsize
    try:
        yield
    finally:
        binding.POPULATE_BYTES = before


def wait_populated() -> None:
    """Wait until the client library has populated what it began to."""
    for thread in threading.enumerate():
        if thread.name == "kvd-populate":
            thread.join()
