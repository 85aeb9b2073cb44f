"""Publisher: the sockets of the events: one publishes them, one replays what somebody missed.

A reader that does not read costs what ZeroMQ keeps for it, a bounded number of batches; it misses
the rest, sees so by their numbers, and asks for it. Nothing else waits for anybody who reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import zmq
import zmq.asyncio

from kvd.protocol.endpoint import check_socket, socket_path
from kvd.protocol.errors import ConfigError
from kvd.protocol.events import END_OF_REPLAY, SEQ_BYTES
from kvd.protocol.messages import EventStatus

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from kvd.actors.feed import Feed, Message
    from kvd.config import EventConfig

logger = logging.getLogger(__name__)

# What changes within so long is told together.
PAUSE_SECONDS = 0.01
# So many batches are kept for one reader that does not read; what is replayed waits for it instead.
PUBLISHED_BATCHES = 1000
REPLAYED_BATCHES = 100
# So many replays at once, and one that is not read for so long ends.
MAX_REPLAYS = 16
STALL_SECONDS = 5.0
# A request to replay is a number; what is larger is none.
MAX_REQUEST_BYTES = 64


class Publisher:
    """The events of one daemon, from when it begins to serve until all is saved."""

    def __init__(self, config: EventConfig, feed: Feed) -> None:
        self._config = config
        self._feed = feed
        self._endpoint = self._replay_endpoint = ""
        self._num_replays = 0
        self._anew = anyio.Lock()
        self._is_closing = False

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Publish until close(); raises ConfigError where an endpoint cannot be bound."""
        with (
            zmq.asyncio.Context() as context,
            context.socket(zmq.PUB) as self._socket,
            context.socket(zmq.ROUTER) as self._replays,
        ):
            self._set_options()
            with (
                _bound(self._socket, self._config, "endpoint") as self._endpoint,
                _bound(self._replays, self._config, "replay_endpoint") as self._replay_endpoint,
            ):
                async with anyio.create_task_group() as tasks:
                    begun = self._feed.begin()
                    task_status.started()
                    tasks.start_soon(self._listen, tasks)
                    await self._publish(begun)
                    await self._publish_news()
                    tasks.cancel_scope.cancel()

    def _set_options(self) -> None:
        self._socket.setsockopt(zmq.SNDHWM, PUBLISHED_BATCHES)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._replays.setsockopt(zmq.SNDHWM, REPLAYED_BATCHES)
        self._replays.setsockopt(zmq.LINGER, 0)
        self._replays.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._replays.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an answer

    def close(self) -> None:
        """Publish what is noted now, and nothing more."""
        self._is_closing = True
        self._feed.noted.set()

    def status(self) -> EventStatus:
        return EventStatus(self._endpoint, self._replay_endpoint, self._feed.next_seq)

    async def _publish_news(self) -> None:
        while not self._is_closing or self._feed.has_news:
            if not self._feed.has_news:
                await self._feed.noted.wait()
            await anyio.sleep(PAUSE_SECONDS)
            await self._publish(self._feed.news())

    async def _publish(self, messages: Iterable[Message]) -> None:
        for message in messages:
            await self._socket.send_multipart(message, zmq.NOBLOCK)
            await anyio.lowlevel.checkpoint()

    # --- replay ---

    async def _listen(self, tasks: TaskGroup) -> None:
        while True:
            match await self._replays.recv_multipart():
                case [identity, b"", seq] if len(seq) == SEQ_BYTES:
                    if self._num_replays < MAX_REPLAYS:
                        self._num_replays += 1
                        tasks.start_soon(self._replay, identity, int.from_bytes(seq, "big"))
                case _:
                    logger.debug("not a request to replay events")

    async def _replay(self, identity: bytes, seq: int) -> None:
        """Send the batches from number `seq` on; in place of those that are lost, what is there."""
        try:
            while seq < self._feed.next_seq:
                if seq < self._feed.first_seq:
                    seq = await self._send_snapshot(identity)
                else:
                    await self._send(identity, self._feed.kept(seq))
                seq += 1
            await self._send(identity, END_OF_REPLAY)
        except (zmq.ZMQError, TimeoutError) as error:
            logger.debug("events are not replayed any more to one who asked: %s", error)
        finally:
            self._num_replays -= 1

    async def _send_snapshot(self, identity: bytes) -> int:
        """One at a time, since each has a copy of the index; the number of the last batch in it."""
        async with self._anew:
            seq = self._feed.next_seq - 1
            for message in self._feed.snapshot():
                await self._send(identity, message)
        return seq

    async def _send(self, identity: bytes, message: tuple[bytes, bytes, bytes]) -> None:
        """Send when there is room. Raises ZMQError where nobody is there, and TimeoutError."""
        with anyio.fail_after(STALL_SECONDS):
            while True:
                await anyio.lowlevel.checkpoint()  # others have their turn
                try:
                    await self._replays.send_multipart((identity, b"", *message), zmq.NOBLOCK)
                    return
                except zmq.Again:
                    await anyio.sleep(PAUSE_SECONDS)


@contextmanager
def _bound(socket: zmq.asyncio.Socket, config: EventConfig, key: str) -> Iterator[str]:
    """Bind a socket: where, as a reader needs it. Nowhere without an endpoint."""
    endpoint: str = getattr(config, key)
    if not endpoint:
        yield ""
        return
    path = socket_path(endpoint) if endpoint.startswith("ipc://") else None
    if path:
        check_socket(path)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{endpoint} cannot be bound: {error.strerror}: set events.{key}"
        ) from error
    if path:
        path.chmod(0o660)
    try:
        yield socket.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        if path:
            path.unlink(missing_ok=True)
