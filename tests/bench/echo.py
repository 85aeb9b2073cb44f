"""An echo of the messages of match and release: bare sockets at both ends, sizes as they are."""

from __future__ import annotations

import multiprocessing
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    import numpy as np

    from kvd_client import Lease

READABLE = int(zmq.POLLIN)  # with the flag itself a check takes twice as long
EPOCH = (1 << 61) + 1  # as long on the wire as a real one


@dataclass(frozen=True, slots=True)
class Frames:
    """The messages of one cycle, in their real sizes."""

    match: tuple[bytes, bytes]
    release: bytes
    matched: bytes
    done: bytes

    @property
    def sizes(self) -> str:
        sizes = [sum(map(len, self.match)), len(self.matched), len(self.release), len(self.done)]
        return ", ".join(map(str, sizes))


def frames_of(lease: Lease, tokens: NDArray[np.uint32]) -> Frames:
    """The messages by which `tokens` were matched as `lease` and released."""
    item = MatchItem(1, 10_000, len(tokens))
    request = MatchRequest(id=10_000, epoch=EPOCH, deadline_ns=1 << 50, items=(item,))
    result = MatchResult(
        lease.num_tokens, runs_of(lease.pages), 1, 1, tokens_by_tier=lease.tokens_by_tier
    )
    return Frames(
        (encode(request), tokens.tobytes()),
        encode(ReleaseRequest(id=10_000, epoch=EPOCH, leases=(10_000,))),
        encode(MatchReply(id=10_000, epoch=EPOCH, results=(result,))),
        encode(DoneReply(id=10_000, epoch=EPOCH)),
    )


@contextmanager
def echo_server(matched: bytes, done: bytes | None = None) -> Iterator[str]:
    """The endpoint of a process that answers as kvd would; a release with `done`, or not at all."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        endpoint = f"ipc://{Path(folder) / 'echo.sock'}"
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(endpoint, matched, done)
        )
        process.start()
        try:
            yield endpoint
        finally:
            process.terminate()
            process.join()


@contextmanager
def dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 30_000)  # an echo that died is an error
        socket.connect(endpoint)
        yield socket


def _serve(endpoint: str, matched: bytes, done: bytes | None) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        poller = select.poll()
        poller.register(socket.fileno(), select.POLLIN)
        while True:
            # As kvd's router does: until it is empty, since the descriptor tells of changes alone.
            while int(socket.getsockopt(zmq.EVENTS)) & READABLE:
                identity, *request = socket.recv_multipart(zmq.NOBLOCK)
                reply = matched if len(request) == 2 else done
                if reply is not None:
                    socket.send_multipart((identity, reply), zmq.NOBLOCK)
            poller.poll()
