"""match_vs_echo: match and release of 128k cached tokens against an echo of the same sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvd_client import Client, Namespace
from tests.bench.common import (
    IDENTITY,
    LAYOUT_SMALL,
    Bench,
    Pairs,
    Row,
    capacity_for,
    pairs,
    random_tokens,
    row,
    running_daemon,
    store,
    timed,
)
from tests.bench.echo import Frames, dealer, echo_server, frames_of

if TYPE_CHECKING:
    import zmq

NUM_TOKENS = 128 << 10
NUM_NODES = 64


def match_vs_echo(bench: Bench) -> Iterator[Row]:
    num_tokens = bench.pick(NUM_TOKENS, 1024)
    num_nodes = bench.pick(NUM_NODES, 4)
    num_cycles = bench.pick(50, 3)
    branched, straight = random_tokens(num_tokens, seed=0), random_tokens(num_tokens, seed=1)
    with (
        running_daemon(capacity_for(4 * num_tokens, LAYOUT_SMALL)) as daemon,
        Client(daemon.endpoint, timeout=60) as client,
    ):
        bench.say(f"storing {num_tokens} tokens twice, once over {num_nodes} nodes")
        namespace = client.open(IDENTITY, LAYOUT_SMALL)
        store(namespace, straight)
        store(namespace, branched)
        _branch(namespace, branched, num_nodes)
        with namespace.match(branched) as lease:
            frames = frames_of(lease, branched)
        with echo_server(frames.matched, frames.done) as endpoint, dealer(endpoint) as echo:
            _echo_twice(echo, frames)  # until it is there

            def measure(tokens: NDArray[np.uint32]) -> Pairs:
                return pairs(
                    lambda: _cycles(client, namespace, tokens, num_cycles),
                    lambda: _echoes(echo, frames, num_cycles),
                    bench.pick(15, 2),
                )

            bench.say("matching and echoing in turn")
            measured = {
                f"over {num_nodes} nodes": measure(branched),
                "in one node": measure(straight),
            }
    told = "; ".join(
        f"{where} {1 / found.ratio:.3g} x ({found})" for where, found in measured.items()
    )
    yield row(
        "match_vs_echo",
        max(1 / found.ratio for found in measured.values()),
        "x",
        f"{num_tokens} tokens, a cycle of match and release: {told}. "
        f"Frames of {frames.sizes} bytes; the echo is a plain pyzmq ROUTER and a plain DEALER; "
        f"{num_cycles} cycles and a status request, which is answered last, are timed together",
    )


def _branch(namespace: Namespace, tokens: NDArray[np.uint32], num_nodes: int) -> None:
    """Make the tokens' path one of `num_nodes` nodes, by others that leave it at each."""
    step = len(tokens) // num_nodes
    for number in range(1, num_nodes):
        other = random_tokens(LAYOUT_SMALL.block_size, seed=100 + number)
        store(namespace, np.concatenate((tokens[: number * step], other)))


def _cycles(client: Client, namespace: Namespace, tokens: NDArray[np.uint32], count: int) -> float:
    def run() -> None:
        for _ in range(count):
            with namespace.match(tokens) as lease:
                assert lease.num_tokens == len(tokens)
        client.status()

    return timed(run) / count


def _echoes(socket: zmq.Socket[bytes], frames: Frames, count: int) -> float:
    def run() -> None:
        for _ in range(count):
            _echo_twice(socket, frames)

    return timed(run) / count


def _echo_twice(socket: zmq.Socket[bytes], frames: Frames) -> None:
    socket.send_multipart(frames.match)
    socket.recv_multipart()
    socket.send(frames.release)
    socket.recv_multipart()
