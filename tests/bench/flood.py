"""flood: how long one client's requests take the daemon while another sends without end."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import zmq
from msgspec import Struct
from numpy.typing import NDArray

from kvd.protocol.codec import decode_reply, encode
from kvd.protocol.messages import (
    PROTOCOL_VERSION,
    AnyRequest,
    AttachReply,
    AttachRequest,
    MatchItem,
    MatchRequest,
    OpenReply,
    OpenRequest,
)
from kvd_client import Client, Namespace
from tests.bench.common import (
    IDENTITY,
    LAYOUT_SMALL,
    Bench,
    Row,
    capacity_for,
    random_tokens,
    row,
    running_daemon,
    seconds,
    store,
)
from tests.bench.echo import dealer

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

NUM_TOKENS = 512
LONG_TOKENS = 128 * 1024
BATCH_ITEMS = 256
NUM_CYCLES = 3000  # the daemon keeps the times of a session's last few hundred requests
PATIENCE_SECONDS = 60.0


class Latency(Struct, frozen=True):
    """The 99th percentile of a request: as the daemon measures it, and as its client sees it."""

    daemon: float
    client: float


def flood(bench: Bench) -> Iterator[Row]:
    num_cycles = bench.pick(NUM_CYCLES, 30)
    found: dict[str, tuple[Latency, Latency]] = {}
    for kind in FLOODS:
        with (
            running_daemon(capacity_for(LONG_TOKENS, LAYOUT_SMALL)) as daemon,
            Client(daemon.endpoint, timeout=PATIENCE_SECONDS) as client,
        ):
            namespace = client.open(IDENTITY, LAYOUT_SMALL)
            tokens = random_tokens(NUM_TOKENS, seed=1)
            store(namespace, tokens)
            quiet = _latency(namespace, tokens, num_cycles)
            with _flooding(kind, daemon.endpoint):
                found[kind] = quiet, _latency(namespace, tokens, num_cycles)
        before, after = found[kind]
        bench.say(
            f"{kind}: {seconds(before.daemon)} to {seconds(after.daemon)} in the daemon, "
            f"{seconds(before.client)} to {seconds(after.client)} for the client"
        )
    told = (
        f"p99 of {num_cycles} matches of {NUM_TOKENS} cached tokens beside another client that "
        f"sends {', '.join(FLOODS)} without end, over that without it; the worst of them"
    )
    ratios = [
        (after.daemon / before.daemon, after.client / before.client)
        for before, after in found.values()
    ]
    yield row(
        "flood_p99", max(daemon for daemon, _ in ratios), "x", f"{told}, as the daemon has it"
    )
    yield row(
        "flood_p99_seen", max(client for _, client in ratios), "x", f"{told}, as a client has it"
    )


def _latency(namespace: Namespace, tokens: NDArray[np.uint32], num_cycles: int) -> Latency:
    times = np.empty(num_cycles)
    for number in range(num_cycles):
        start = time.perf_counter()
        lease = namespace.match(tokens)
        times[number] = time.perf_counter() - start
        assert lease.num_tokens == NUM_TOKENS
        lease.release()
    status = namespace.client.status()
    (mine,) = (one for one in status.sessions if one.client == namespace.client.name)
    return Latency(mine.request_p99_us / 1e6, float(np.percentile(times, 99)))


# --- the flood ---


@contextmanager
def _flooding(kind: str, endpoint: str) -> Iterator[None]:
    """While inside, a process of its own sends without end."""
    context = multiprocessing.get_context("spawn")
    flows = context.Event()
    process = context.Process(target=_flood, args=(kind, endpoint, flows), daemon=True)
    process.start()
    assert flows.wait(PATIENCE_SECONDS)
    try:
        yield
    finally:
        process.kill()
        process.join()


def _flood(kind: str, endpoint: str, flows: Event) -> None:
    with dealer(endpoint) as socket:
        attached = _ask(socket, _attach())
        assert isinstance(attached, AttachReply)
        epoch = attached.epoch
        request = OpenRequest(
            id=2, epoch=epoch, identity=IDENTITY, layout=LAYOUT_SMALL, salt="flood", maps=False
        )
        opened = _ask(socket, request)
        assert isinstance(opened, OpenReply)
        frames = FLOODS[kind](epoch, opened.namespace)
        num_sent = 0
        while True:
            if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                socket.send_multipart(frames)
                num_sent += 1
            else:
                socket.poll(100, zmq.POLLIN | zmq.POLLOUT)
            while socket.poll(0):
                socket.recv_multipart()
            if num_sent == 100:
                flows.set()


def _ask(socket: zmq.Socket[bytes], request: AnyRequest) -> object:
    socket.send(encode(request))
    return decode_reply(socket.recv())


def _attach() -> AttachRequest:
    return AttachRequest(
        id=1, version=PROTOCOL_VERSION, min_version=PROTOCOL_VERSION, client="flood"
    )


def _match(epoch: int, namespace: int, num_items: int, num_tokens: int) -> Sequence[bytes]:
    items = tuple(MatchItem(namespace, lease, num_tokens) for lease in range(num_items))
    request = MatchRequest(id=3, epoch=epoch, items=items)
    return encode(request), random_tokens(num_items * num_tokens, seed=2).tobytes()


FLOODS = {
    "matches of 512 tokens": lambda epoch, space: _match(epoch, space, 1, NUM_TOKENS),
    "matches of 128k tokens": lambda epoch, space: _match(epoch, space, 1, LONG_TOKENS),
    "batches of 256 matches": lambda epoch, space: _match(epoch, space, BATCH_ITEMS, 0),
    "attaches": lambda epoch, space: (encode(_attach()),),
}
