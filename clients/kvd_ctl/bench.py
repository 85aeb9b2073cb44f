"""`kvd-ctl bench`: how fast the kvd that runs answers, measured in a namespace of its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvd.protocol.codec import TOKEN_BYTES
from kvd_client import Client, DaemonUnavailable, Identity, Layout, to_json
from kvd_ctl import render

if TYPE_CHECKING:
    from kvd_client import Namespace

IDENTITY = Identity("kvd-ctl bench", "1")
LAYOUT = Layout(1, 1, 16, "float32", block_size=16)  # 2 KiB a page
NUM_PROMPTS = 64
NUM_BLOCKS = 8
# Where less memory than this has yet to be taken, other blocks might go for those of a benchmark.
ROOM_BYTES = 16 << 20
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Timings:
    """How long each of many calls took, by what was asked."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds.setdefault(what, []).append(time.perf_counter() - started)

    def summary(self) -> dict[str, dict[str, float]]:
        """How many, how many a second, one behind the other, and microseconds by quantile."""
        return {what: _summary(sorted(seconds)) for what, seconds in self.seconds.items()}


def measure(client: Client, seconds: float, *, as_json: bool) -> None:
    """Match, commit and drop prompts that nobody else has."""
    memory = client.status().tiers[0]
    has_room = memory.capacity_bytes - memory.backed_bytes >= ROOM_BYTES
    # One for all runs: an empty namespace is still listed.
    namespace = client.open(IDENTITY, LAYOUT)
    timings = Timings()
    try:
        prompts = [_random_prompt() for _ in range(NUM_PROMPTS)]
        if has_room:
            for prompt in prompts:
                _commit(namespace, prompt, timings)
        _match(namespace, prompts, seconds, "match and release" if has_room else "miss", timings)
    finally:
        namespace.drop()
    summary = timings.summary()
    if as_json:
        print(to_json(summary))
        return
    if not has_room:
        render.console.print(
            "memory is taken: nothing was committed, since others' blocks might go"
        )
    render.table(
        "microseconds",
        [
            {"call": what} | {name: f"{value:.0f}" for name, value in figures.items()}
            for what, figures in summary.items()
        ],
    )


def _random_prompt() -> bytes:
    return secrets.token_bytes(NUM_BLOCKS * LAYOUT.block_size * TOKEN_BYTES)


def _commit(namespace: Namespace, prompt: bytes, timings: Timings) -> None:
    """Nothing is written to the pages: nobody reads what this namespace has."""
    with timings.of("match with pages"):
        lease = namespace.match(prompt, reserve_tokens=NUM_BLOCKS * LAYOUT.block_size)
    with lease:
        if not lease.is_open:
            raise DaemonUnavailable("kvd does not answer any more")
        with timings.of("commit"):
            lease.commit(prompt)


def _match(
    namespace: Namespace, prompts: list[bytes], seconds: float, what: str, timings: Timings
) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for prompt in prompts:
            with timings.of(what), namespace.match(prompt) as lease:
                is_open = lease.is_open
            if not is_open:
                raise DaemonUnavailable("kvd does not answer any more")


def _summary(seconds: list[float]) -> dict[str, float]:
    last = len(seconds) - 1
    quantiles = {name: seconds[int(last * part)] * 1e6 for name, part in QUANTILES.items()}
    return {"count": len(seconds), "per_second": len(seconds) / sum(seconds)} | quantiles
