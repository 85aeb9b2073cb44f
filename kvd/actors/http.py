"""Http: /healthz, /readyz and /metrics, for who looks after daemons.

It is served by the loop that serves requests, so that an answer says that this one turns.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

import anyio
from anyio import to_thread
from anyio.streams.buffered import BufferedByteReceiveStream

from kvd.actors.turns import again_and_again
from kvd.protocol.endpoint import local_address
from kvd.protocol.errors import ConfigError, needing_extra

if TYPE_CHECKING:
    from types import ModuleType

    from anyio.abc import SocketStream, TaskStatus

    from kvd.actors.manager import Manager
    from kvd.actors.router import Router

logger = logging.getLogger(__name__)

# Whoever did not send a request or take the answer by then is left.
REQUEST_SECONDS = 5.0
MAX_REQUEST_BYTES = 8 << 10
# So many connections at once; one more takes the place of the oldest, which is slow or silent.
MAX_CONNECTIONS = 16


class Response(NamedTuple):
    status: HTTPStatus
    body: bytes
    kind: str = "text/plain; charset=utf-8"


class Http:
    """One port. A connection is answered once; nothing is kept of who asks."""

    def __init__(
        self, endpoint: str, router: Router, manager: Manager, read: Callable[[], None]
    ) -> None:
        """`read` brings what the metrics tell up to date. Raises ConfigError."""
        self._prometheus = prometheus()
        self._endpoint = endpoint
        self._router = router
        self._manager = manager
        self._read = read
        self._paths = {"/healthz": self._health, "/readyz": self._ready, "/metrics": self._metrics}
        self._open: OrderedDict[SocketStream, anyio.CancelScope] = OrderedDict()
        # The exporter's collector is not made for two at once.
        self._formatting = anyio.CapacityLimiter(1)
        self._scope = anyio.CancelScope()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until close(); raises ConfigError where the port cannot be had."""
        host, port = local_address(self._endpoint)
        try:
            listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
        except OSError as error:
            raise ConfigError(
                f"{self._endpoint} cannot be bound: {error.strerror}: set http.endpoint"
            ) from error
        async with listener:
            task_status.started()
            with self._scope:
                await again_and_again(listener.serve, self._serve)

    def close(self) -> None:
        self._scope.cancel()

    async def _serve(self, stream: SocketStream) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            self._open.popitem(last=False)[1].cancel()
        async with stream:
            with anyio.move_on_after(REQUEST_SECONDS) as self._open[stream]:
                with suppress(anyio.BrokenResourceError, anyio.IncompleteRead):  # it is gone
                    await stream.send(_message(await self._answer(stream)))
                    await stream.send_eof()
                    await _drained(stream)
            self._open.pop(stream, None)

    async def _answer(self, stream: SocketStream) -> Response:
        buffered = BufferedByteReceiveStream(stream)
        try:
            head = await buffered.receive_until(b"\r\n\r\n", MAX_REQUEST_BYTES)
        except anyio.DelimiterNotFound:
            return _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        method, _, rest = head.split(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method != "GET":
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        if path not in self._paths:
            return _plain(HTTPStatus.NOT_FOUND)
        try:
            return await self._paths[path]()
        except Exception:
            logger.exception("reason=internal %s failed", path)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _health(self) -> Response:
        return _plain(HTTPStatus.OK)

    async def _ready(self) -> Response:
        """What is degraded is told, but such a daemon serves."""
        router, tiers = self._router, self._manager.tier_status()
        body = {
            "phase": router.phase,
            "degraded": {tier.name: tier.trouble for tier in tiers if tier.trouble},
        }
        status = HTTPStatus.OK if router.is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return Response(status, json.dumps(body).encode() + b"\n", "application/json")

    async def _metrics(self) -> Response:
        self._read()
        client = self._prometheus
        text = await to_thread.run_sync(
            client.generate_latest, client.REGISTRY, limiter=self._formatting
        )
        return Response(HTTPStatus.OK, text, client.CONTENT_TYPE_LATEST)


def prometheus() -> ModuleType:
    """What writes metrics down. Raises ConfigError where it is not installed."""
    with needing_extra("telemetry", "http.endpoint"):
        import prometheus_client
    return prometheus_client


async def _drained(stream: SocketStream) -> None:
    """Wait until the other end has taken all and closes: what is closed before is cut off."""
    with suppress(anyio.EndOfStream):
        while True:
            await stream.receive()


def _plain(status: HTTPStatus) -> Response:
    return Response(status, f"{status.phrase}\n".encode())


def _message(answer: Response) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.kind}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + answer.body
