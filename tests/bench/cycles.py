"""cycles: small matches and releases by many processes at once, against an echo of the same."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvd_client import Client, Namespace
from tests.bench.common import (
    IDENTITY,
    LAYOUT_SMALL,
    Bench,
    Row,
    capacity_for,
    pairs,
    random_tokens,
    row,
    running_daemon,
    seconds,
    store,
)
from tests.bench.echo import Frames, dealer, echo_server, frames_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier

    import zmq

NUM_PROCESSES = 8
NUM_TOKENS = 512
ROUND_SECONDS = 2.0
PATIENCE_SECONDS = 60.0  # for processes that start, side by side

Latencies = NDArray[np.float64]
Round = list[Latencies]  # of each process


def cycles(bench: Bench) -> Iterator[Row]:
    num_processes = bench.pick(NUM_PROCESSES, 2)
    round_seconds = 0.05 if bench.tiny else ROUND_SECONDS
    rounds: dict[str, list[Round]] = {"kvd": [], "echo": []}
    with running_daemon(capacity_for(num_processes * NUM_TOKENS, LAYOUT_SMALL)) as daemon:
        frames = _frames(daemon.endpoint)
        with (
            echo_server(frames.matched) as echo,
            _crowd(num_processes, daemon.endpoint, echo, frames) as run,
        ):

            def measure(what: str) -> float:
                rounds[what].append(run(what, round_seconds))
                return 1 / _cycles_per_second(rounds[what][-1])

            bench.say(f"{num_processes} processes with kvd and with the echo in turn")
            found = pairs(lambda: measure("kvd"), lambda: measure("echo"), bench.pick(9, 2))
    told = (
        f"match and release of {NUM_TOKENS} cached tokens, each of {num_processes} processes its "
        f"own, {len(found.ours)} rounds of {round_seconds:g} s"
    )
    yield row(
        "cycles_vs_echo",
        found.ratio,
        "x",
        f"{told}: a cycle every {found}; frames of {frames.sizes} bytes, of which the last is not "
        "sent: releases are not answered. The echo is a bare ROUTER; its clients are bare DEALERs "
        "in the same processes",
    )
    yield row("cycles_per_second", 1 / statistics.median(found.ours), "/s", told)
    yield _spread(rounds, told)


def _frames(endpoint: str) -> Frames:
    with Client(endpoint, timeout=60) as client:
        namespace = client.open(IDENTITY, LAYOUT_SMALL)
        tokens = random_tokens(NUM_TOKENS, seed=0)
        store(namespace, tokens)
        with namespace.match(tokens) as lease:
            return frames_of(lease, tokens)


def _cycles_per_second(found: Round) -> float:
    return sum(len(latencies) / float(latencies.sum()) for latencies in found)


def _spread(rounds: dict[str, list[Round]], told: str) -> Row:
    """The tail of a cycle's latency over all processes, a median over the rounds."""
    p50, p99 = _percentiles(rounds["kvd"])
    echo50, echo99 = _percentiles(rounds["echo"])
    return row(
        "cycles_p99_over_p50",
        p99 / p50,
        "x",
        f"{told}: p50 {seconds(p50)}, p99 {seconds(p99)}; of the echo {seconds(echo50)} and "
        f"{seconds(echo99)}",
    )


def _percentiles(rounds: list[Round]) -> tuple[float, float]:
    found = [np.percentile(np.concatenate(latencies), (50, 99)) for latencies in rounds]
    p50, p99 = np.median(found, axis=0)
    return float(p50), float(p99)


# --- the processes ---


@contextmanager
def _crowd(
    num_processes: int, kvd: str, echo: str, frames: Frames
) -> Iterator[Callable[[str, float], Round]]:
    """Processes that begin together what they are told to; each answers its latencies."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes)
    pipes, processes = [], []
    for number in range(num_processes):
        ours, theirs = context.Pipe()
        processes.append(
            context.Process(target=_client, args=(theirs, barrier, kvd, echo, frames, number))
        )
        processes[-1].start()
        theirs.close()
        pipes.append(ours)

    def run(what: str, duration: float) -> Round:
        for pipe in pipes:
            pipe.send((what, duration))
        return [pipe.recv() for pipe in pipes]

    try:
        yield run
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join()


def _client(
    pipe: Connection, barrier: Barrier, kvd: str, echo: str, frames: Frames, number: int
) -> None:
    """One process, until its pipe is closed."""
    tokens = random_tokens(NUM_TOKENS, seed=number)
    with Client(kvd, timeout=60) as client, dealer(echo) as socket:
        namespace = client.open(IDENTITY, LAYOUT_SMALL)
        store(namespace, tokens)
        cycles = {
            "kvd": lambda: _match(namespace, tokens),
            "echo": lambda: _echo(socket, frames),
        }
        try:
            while True:
                what, duration = pipe.recv()
                barrier.wait(PATIENCE_SECONDS)
                pipe.send(_latencies(cycles[what], duration))
        except EOFError:
            return


def _match(namespace: Namespace, tokens: NDArray[np.uint32]) -> None:
    with namespace.match(tokens) as lease:
        assert lease.num_tokens == NUM_TOKENS


def _echo(socket: zmq.Socket[bytes], frames: Frames) -> None:
    socket.send_multipart(frames.match)
    socket.recv_multipart()
    socket.send(frames.release)


def _latencies(cycle: Callable[[], None], duration: float) -> Latencies:
    times = [time.perf_counter()]
    end = times[0] + duration
    while times[-1] < end:
        cycle()
        times.append(time.perf_counter())
    return np.diff(times)
