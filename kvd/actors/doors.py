"""Doors: the sockets where requests come in, and who comes through them.

Whoever may open an ipc socket may use it. By TCP nobody comes without a key of the configuration:
ZeroMQ asks at each handshake (ZAP), and says with each message whose it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvd.actors.access import EVERYTHING, INFERENCE_ALONE, NOTHING, Access, access_of
from kvd.arena.owner import share
from kvd.protocol.certificates import load_pair
from kvd.protocol.endpoint import check_socket, socket_path
from kvd.protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections import Counter

    from kvd.config import Config

Socket: TypeAlias = "zmq.Socket[bytes]"

# As plain numbers: pyzmq's enums cost more than what they are asked for.
EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
# So many requests of one connection wait here; more wait where they are sent.
QUEUED_REQUESTS = 16
# A TCP connection is closed that has not shown its key by then, or whose end is silent for so long.
HANDSHAKE_MS = 5_000
PING_MS, SILENCE_MS = 5_000, 20_000

# Who comes: by ipc anybody, or an operator where those have a door of their own; by TCP a key.
ANYBODY, OPERATOR = b"", b"operator"

# How a handshake ends that comes to nothing: the key is not known, or none was shown.
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


def has_more(socket: Socket) -> bool:
    """Cheaper than the exception that an empty socket raises."""
    return bool(int(socket.get(EVENTS)) & POLLIN)


class Door:
    """A socket, and who comes through it; by TCP each message says that."""

    is_remote = False

    def __init__(self, socket: Socket, who: bytes = ANYBODY) -> None:
        self.socket = socket
        self._prefix = who + b"\0"

    def receive(self) -> list[bytes]:
        """The frames of a message that is there, the first of them its sender's identity."""
        frames = self.socket.recv_multipart(NOBLOCK)
        frames[0] = self._prefix + frames[0]
        return frames


class TcpDoor(Door):
    """Here each has a key, and a clock of another machine."""

    is_remote = True

    def receive(self) -> list[bytes]:
        first = self.socket.recv(NOBLOCK, copy=False)
        key = str(first.get("User-Id")).encode()
        rest = self.socket.recv_multipart(NOBLOCK) if first.more else []
        return [key + b"\0" + first.bytes, *rest]


class Doors:
    """All doors of a daemon; they serve while they are `open`.

    The identity of a connection is who came, a zero byte, and its name at its socket. That name
    the client may choose, so by it alone one could pass for another whose connection is gone.
    """

    def __init__(
        self, config: Config, counters: Counter[str], listeners: Mapping[str, int]
    ) -> None:
        """`listeners` are sockets, by their endpoints, that somebody else made, and keeps."""
        self._counters = counters
        self._listeners = listeners
        self._local: dict[bytes, Door] = {}
        self._tcp: TcpDoor | None = None
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Go by these clients; whose key is not among them may ask nothing more."""
        self._config = config
        self._accesses = {
            ANYBODY: INFERENCE_ALONE if config.operator.endpoint else EVERYTHING,
            OPERATOR: EVERYTHING,
        }
        for client in config.clients:
            self._accesses[client.key.encode()] = access_of(client)

    def __iter__(self) -> Iterator[Door]:
        yield from self._local.values()
        if self._tcp is not None:
            yield self._tcp

    def access(self, identity: bytes) -> Access:
        """What may be asked over a connection."""
        return self._accesses.get(identity.partition(b"\0")[0], NOTHING)

    def way_to(self, identity: bytes) -> tuple[Socket, bytes]:
        """The socket of a connection, and its name there."""
        who, _, name = identity.partition(b"\0")
        door = self._local.get(who) or self._tcp
        assert door is not None
        return door.socket, name

    def lets_in(self, key: bytes) -> bool:
        """Whether who has this key may come by TCP."""
        return key in self._accesses

    @contextmanager
    def open(self) -> Iterator[None]:
        """Bind them; raises ConfigError where one cannot be."""
        endpoint, for_operators = self._config.resolved_endpoint, self._config.operator.endpoint
        with ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            stack.enter_context(self._open_ipc(context, ANYBODY, endpoint))
            if for_operators:
                stack.enter_context(self._open_ipc(context, OPERATOR, for_operators))
            if self._config.tcp.endpoint:
                stack.enter_context(self._open_tcp())
            yield

    @contextmanager
    def _open_ipc(self, context: zmq.Context[Socket], who: bytes, endpoint: str) -> Iterator[None]:
        path = socket_path(endpoint)
        check_socket(path)
        with context.socket(zmq.ROUTER) as socket:
            self._bind(socket, endpoint)
            self._local[who] = Door(socket, who)
            if endpoint in self._listeners:
                yield
                return
            if who == OPERATOR:
                path.chmod(0o600)
            else:
                share(path, self._config.ipc.group, int(self._config.ipc.mode, 8))
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def _open_tcp(self) -> Iterator[None]:
        pair = load_pair(Path(self._config.tcp.server_key))
        # A thread of its own: what strangers have it compute costs nobody else.
        with zmq.Context() as context, self._asking(context), context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, pair.secret)
            socket.setsockopt_string(zmq.ZAP_DOMAIN, "kvd")
            # Without it, a handshake that finds nobody to ask is granted.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.setsockopt(zmq.IPV6, 1)  # which takes IPv4, too
            socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
            with self._counting(socket):
                self._bind(socket, self._config.tcp.endpoint)
                self._tcp = TcpDoor(socket)
                yield

    def _bind(self, socket: Socket, endpoint: str) -> None:
        if (listener := self._listeners.get(endpoint)) is not None:
            socket.setsockopt(zmq.USE_FD, listener)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.RCVHWM, QUEUED_REQUESTS)
        socket.setsockopt(zmq.MAXMSGSIZE, self._config.limits.request_bytes)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            keys = [key for key, each in self._config.endpoints.items() if each == endpoint]
            raise ConfigError(
                f"{endpoint} cannot be bound: {error.strerror}: set {keys[0]}"
            ) from error

    @contextmanager
    def _asking(self, context: zmq.Context[Socket]) -> Iterator[None]:
        """Answer ZeroMQ, which asks of each handshake whether its key may come (RFC 27).

        Measured: three times as fast as a task of zmq.auth, and nobody else is served meanwhile.
        """
        with context.socket(zmq.REP) as socket:
            socket.bind("inproc://zeromq.zap.01")

            def answer() -> None:
                version, request, *_, key = socket.recv_multipart(NOBLOCK)
                who = z85.encode(key)
                verdict = (b"200", b"", who) if self.lets_in(who) else (b"400", b"", b"")
                socket.send_multipart((version, request, *verdict, b""), NOBLOCK)

            with _reading(socket, answer):
                yield

    @contextmanager
    def _counting(self, socket: Socket) -> Iterator[None]:
        """Count the handshakes that come to nothing, of a wrong key and of none."""
        with socket.get_monitor_socket(REFUSED | FAILED) as monitor:

            def count() -> None:
                event = parse_monitor_message(monitor.recv_multipart(NOBLOCK))["event"]
                outcome = "refused" if event == REFUSED else "failed"
                self._counters[f"handshakes_{outcome}"] += 1

            with _reading(monitor, count):
                yield
            socket.disable_monitor()


@contextmanager
def _reading(socket: Socket, receive: Callable[[], None]) -> Iterator[None]:
    """Have each message of a socket received from the event loop."""
    loop = asyncio.get_running_loop()

    def drain() -> None:
        while has_more(socket):
            receive()

    loop.add_reader(socket.fileno(), drain)
    drain()  # the descriptor tells of nothing before the socket was looked at
    try:
        yield
    finally:
        loop.remove_reader(socket.fileno())
