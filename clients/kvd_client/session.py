"""The sans-I/O core: requests to frames, replies to results, ids, deadlines, epochs.

It never waits and owns no socket: `Connection` puts a socket and a mutex around it.

Concurrency: all of it belongs to whoever holds that mutex, with two exceptions. Any thread may make
ids, and add or remove a living lease; each is one operation of a dict or a counter, which the
interpreter does whole.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

from msgspec.structs import replace
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvd.arena.header import SharedHeader, map_header
from kvd.arena.membership import SessionLock
from kvd.protocol.codec import decode_reply, decode_request, encode
from kvd.protocol.errors import (
    BadRequest,
    DaemonUnavailable,
    Forbidden,
    KvdError,
    NotAttached,
    StaleEpoch,
    error_from_wire,
)
from kvd.protocol.messages import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AnyReply,
    AnyRequest,
    AttachReply,
    AttachRequest,
    ErrorReply,
    Failure,
    HeartbeatRequest,
)

logger = logging.getLogger(__name__)

Q = TypeVar("Q", bound=AnyRequest)
T = TypeVar("T")

# The daemon answers this much before the caller's deadline, so that the answer arrives within it.
MAX_MARGIN_SECONDS = 0.1

_propagator = TraceContextTextMapPropagator()


@dataclass(eq=False, slots=True)
class Session:
    """One attachment. Its leases hold while `header` still shows its epoch and their generations.

    `lock` tells the daemon that this process may map; every mapping holds it as well. A session
    that does not map has neither.
    """

    secret: str
    epoch: int
    heartbeat_seconds: float
    max_request_bytes: int
    header: SharedHeader | None
    lock: SessionLock | None

    def end(self) -> None:
        """It is over: the lock is held on by mappings alone."""
        self.lock = None

    @property
    def name(self) -> str:
        """As others know it, from the daemon's status."""
        return self.secret.partition("-")[0]


class Link(Enum):
    """How the daemon stands, as far as the client knows.

    ATTACHING: at the start, and when a reply says that the session is over (`Core.receive`).
    ATTACHED: when attach is granted, and at any reply while there is a session (`Core.receive`).
    DOWN: when the connection is lost (`Core.disconnected`), attach is refused (`Core.receive`), or
    a deadline passes in silence (`Connection.suspect`). From there the probes lead back.
    """

    ATTACHING = "attaching"  # worth waiting for, within a deadline
    ATTACHED = "attached"
    DOWN = "down"  # not worth waiting for until it speaks again


class Call:
    """A request under way and, later, its answer.

    `wake` is told when the answer is there; `rest` are the raw frames behind a reply.
    """

    __slots__ = ("error", "frames", "id", "is_answered", "reply", "request", "rest", "wake")

    def __init__(self, request: AnyRequest, raw: bytes | None = None) -> None:
        self.id = request.id
        self.request = request
        self.frames = [encode(request)] if raw is None else [encode(request), raw]
        self.wake: Callable[[], None] = _nobody_waits
        self.is_answered = False
        self.reply: AnyReply | None = None
        self.error: KvdError | None = None
        self.rest: Sequence[memoryview] = ()

    def count_deadline_from_now(self) -> None:
        """Have the deadline understood by another machine, whose clock is another."""
        if self.request.deadline_ns:
            left = max(1, self.request.deadline_ns - time.monotonic_ns())
            self.frames[0] = encode(replace(self.request, deadline_ns=left))

    def answer(
        self, reply: AnyReply | None, error: KvdError | None, rest: Sequence[memoryview] = ()
    ) -> None:
        self.reply, self.error, self.rest = reply, error, rest
        self.is_answered = True
        self.wake()


def _nobody_waits() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Answered:
    """Until the call, which was sent, is answered."""

    call: Call
    deadline: float


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """Until the link is another one than was seen."""

    seen: Link
    deadline: float


# What a client does is told once, for threads and for tasks: an operation yields what it waits for,
# and is told whether that came before its deadline.
Operation: TypeAlias = Generator[Answered | LinkChanged, bool, T]


class Core:
    """One client's side of the protocol."""

    def __init__(self, name: str, on_link: Callable[[Link], None], *, maps: bool = True) -> None:
        """`on_link` is told each change of the link, in the thread that made it."""
        self.link = Link.ATTACHING
        self.session: Session | None = None
        # Why the daemon, which is there, gave no session.
        self.refusal: KvdError | None = None
        # Leases that exist or are asked for: what the daemon holds beside them is released there.
        self.living: dict[int, None] = {}
        self.num_received = 0
        self._name = name
        self._maps = maps
        self._on_link = on_link
        self._previous = ""
        self._pending: dict[int, Call] = {}
        self._probe = 0
        self._ids = itertools.count(1)
        self._lease_ids = itertools.count(1)

    def next_id(self) -> int:
        return next(self._ids)

    def next_lease_id(self) -> int:
        return next(self._lease_ids)

    # --- out ---

    def send(self, call: Call) -> None:
        """A call is about to be sent: its reply belongs to it."""
        self._pending[call.id] = call

    def forget(self, call: Call) -> None:
        """Nobody waits for this answer any more."""
        self._pending.pop(call.id, None)

    def disconnected(self) -> None:
        """The connection is gone, and with it every answer under way."""
        self._probe = 0
        self.set_link(Link.DOWN)
        error = DaemonUnavailable(
            f"kvd refuses: {self.refusal}" if self.refusal else "the connection to kvd was lost"
        )
        while self._pending:
            self._pending.popitem()[1].answer(None, error)

    def probe(self, deadline_ns: int) -> Call:
        """The message that finds out how the daemon stands: a heartbeat, or without session attach.

        A daemon that was only stopped still knows the session, and its leases with it.
        """
        number = self._probe = self.next_id()
        if self.session is not None:
            return Call(
                HeartbeatRequest(id=number, epoch=self.session.epoch, leases=tuple(self.living))
            )
        return Call(
            AttachRequest(
                id=number,
                deadline_ns=deadline_ns,
                version=PROTOCOL_VERSION,
                min_version=MIN_PROTOCOL_VERSION,
                client=self._name,
                pid=os.getpid(),
                previous=self._previous,
            )
        )

    @property
    def probing(self) -> bool:
        """Whether the last probe is still to be answered."""
        return self._probe != 0

    # --- in ---

    def receive(self, frame: bytes, rest: Sequence[memoryview] = ()) -> None:
        """A reply came: the daemon is there, and perhaps another one than before."""
        try:
            reply = decode_reply(frame)
        except BadRequest:
            return  # of a newer daemon: whoever asked runs into the deadline
        self.num_received += 1
        error = _error_of(reply)
        if is_probe := self._probe != 0 and reply.id == self._probe:
            self._probe = 0
        if isinstance(reply, AttachReply):
            self._attached(reply)
        elif self.session is None:
            if is_probe and error is not None and not isinstance(error, NotAttached | StaleEpoch):
                self.refused(error)
        elif (
            reply.epoch != self.session.epoch
            or isinstance(error, NotAttached)
            or (is_probe and isinstance(error, Forbidden))  # the client's key was taken out
        ):
            self._lost()
        else:
            self.set_link(Link.ATTACHED)
        if (call := self._pending.pop(reply.id, None)) is not None:
            call.answer(reply, error, rest)

    def closed(self) -> None:
        """The client is closed: no lease of it holds any more."""
        self.session = None
        self.living.clear()

    def set_link(self, link: Link) -> None:
        if link is not self.link:
            self.link = link
            self._on_link(link)

    def _attached(self, reply: AttachReply) -> None:
        header, lock = self._map(reply) if self._maps else (None, None)
        self.session = Session(
            reply.session,
            reply.epoch,
            reply.heartbeat_seconds,
            reply.max_request_bytes,
            header,
            lock,
        )
        self.refusal = None
        self.set_link(Link.ATTACHED)

    def _map(self, reply: AttachReply) -> tuple[SharedHeader, SessionLock] | tuple[None, None]:
        """Nothing where it cannot be mapped: from within another container, say."""
        try:
            return map_header(reply.header_path), SessionLock(reply.lock_path)
        except (OSError, ValueError, KvdError) as error:
            logger.warning("kvd's memory cannot be mapped; blocks are copied instead: %s", error)
            return None, None

    def refused(self, error: KvdError) -> None:
        """The daemon is there, and does not let this client in."""
        if self.refusal is None:
            logger.warning("kvd is there, but gives no session: %s", error)
        self.refusal = error
        self.set_link(Link.DOWN)

    def _lost(self) -> None:
        """The daemon does not know the session: every lease of it is void."""
        assert self.session is not None
        self._previous = self.session.secret
        self.session.end()
        self.session = None
        self.living.clear()
        self.set_link(Link.ATTACHING)


def checked(request: Q) -> Q:
    """A request as the daemon will read it; raises BadRequest where it could not."""
    try:
        decode_request(encode(request))
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"{type(request).__name__}: {error}") from error
    return request


def wire(deadline: float) -> int:
    """A deadline (time.monotonic) for the wire: a little earlier, so that the answer is in time."""
    left = max(0.0, deadline - time.monotonic())
    return int((deadline - min(MAX_MARGIN_SECONDS, left / 4)) * 1e9)


def result_of(results: Sequence[T | Failure]) -> T:
    """The one result of a batch of one; raises the error that stands in its place."""
    (result,) = results
    if isinstance(result, Failure):
        raise error_from_wire(result.code, result.message, result.details)
    return result


def traceparent() -> str:
    """The W3C trace context of the caller's span, or nothing."""
    if not trace.get_current_span().get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent", "")


def _error_of(reply: AnyReply) -> KvdError | None:
    if isinstance(reply, ErrorReply):
        return error_from_wire(reply.code, reply.message, reply.details)
    return None
