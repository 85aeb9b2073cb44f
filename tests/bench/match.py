"""match_vs_echo: match and release of 128k cached tokens against an echo of the same sizes."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from kvd.arena.runs import runs_of
from kvd.protocol.codec import encode
from kvd.protocol.messages import (
    DoneReply,
    MatchItem,
    MatchReply,
    MatchRequest,
    MatchResult,
    ReleaseRequest,
)
from kvd_client import Client, Lease, Namespace
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

NUM_TOKENS = 128 << 10
NUM_NODES = 64
EPOCH = (1 << 61) + 1  # as long on the wire as a real one


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
            frames = _Frames.of(lease, branched)
        with _echoing(frames) as echo:

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


class _Frames:
    """The messages of one cycle, in their real sizes."""

    def __init__(self, match: Sequence[bytes], release: bytes, matched: bytes, done: bytes) -> None:
        self.match = match
        self.release = release
        self.matched = matched
        self.done = done

    @classmethod
    def of(cls, lease: Lease, tokens: NDArray[np.uint32]) -> _Frames:
        item = MatchItem(1, 10_000, len(tokens))
        request = MatchRequest(id=10_000, epoch=EPOCH, deadline_ns=1 << 50, items=(item,))
        result = MatchResult(
            lease.num_tokens, runs_of(lease.pages), 1, 1, tokens_by_tier=lease.tokens_by_tier
        )
        return cls(
            (encode(request), tokens.tobytes()),
            encode(ReleaseRequest(id=10_000, epoch=EPOCH, leases=(10_000,))),
            encode(MatchReply(id=10_000, epoch=EPOCH, results=(result,))),
            encode(DoneReply(id=10_000, epoch=EPOCH)),
        )

    @property
    def sizes(self) -> str:
        sizes = [sum(map(len, self.match)), len(self.matched), len(self.release), len(self.done)]
        return ", ".join(map(str, sizes))


@contextmanager
def _echoing(frames: _Frames) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER whose peer, in a process of its own, answers as kvd would."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        endpoint = f"ipc://{Path(folder) / 'echo.sock'}"
        process = multiprocessing.get_context("spawn").Process(
            target=_echo, args=(endpoint, frames.matched, frames.done)
        )
        process.start()
        try:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVTIMEO, 30_000)  # an echo that died is an error
                socket.connect(endpoint)
                _echo_twice(socket, frames)
                yield socket
        finally:
            process.terminate()
            process.join()


def _echo(endpoint: str, matched: bytes, done: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        while True:
            identity, *request = socket.recv_multipart()
            socket.send_multipart((identity, matched if len(request) == 2 else done))


def _echoes(socket: zmq.Socket[bytes], frames: _Frames, count: int) -> float:
    def run() -> None:
        for _ in range(count):
            _echo_twice(socket, frames)

    return timed(run) / count


def _echo_twice(socket: zmq.Socket[bytes], frames: _Frames) -> None:
    socket.send_multipart(frames.match)
    socket.recv_multipart()
    socket.send(frames.release)
    socket.recv_multipart()
