"""Router: the ROUTER socket; from frames to calls of the manager and back.

The socket is read until it is empty in a callback of the event loop, and each request is answered
there and then; only what must wait becomes a task. Measured, 8 clients: two to three times the
requests per second of a task or a mailbox per request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVarTuple, assert_never

import anyio
import zmq
from msgspec.structs import replace

import kvd
from kvd.actors.sessions import Session, SessionTable, sweep
from kvd.arena.membership import is_held
from kvd.protocol.codec import TOKEN_BYTES, decode_request, encode, failure, request_id
from kvd.protocol.endpoint import socket_path
from kvd.protocol.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    KvdError,
    LimitExceeded,
    OutOfPages,
    SessionLockMissing,
    StaleEpoch,
    UnknownNamespace,
    Unsupported,
    VersionMismatch,
)
from kvd.protocol.messages import (
    MIN_PROTOCOL_VERSION,
    NO_REPLY,
    PROTOCOL_VERSION,
    AbortRequest,
    AnyReply,
    AnyRequest,
    AttachReply,
    AttachRequest,
    CloseRequest,
    CommitItem,
    CommitReply,
    CommitRequest,
    CommitResult,
    DetachRequest,
    DoneReply,
    ErrorReply,
    Failure,
    HeartbeatRequest,
    MatchItem,
    MatchReply,
    MatchRequest,
    MatchResult,
    OpenReply,
    OpenRequest,
    ReleaseRequest,
    ReserveReply,
    ReserveRequest,
    ReserveResult,
    SessionStatus,
    Shortage,
    StatusReply,
    StatusRequest,
)
from kvd.telemetry import request_span

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from kvd.actors.manager import Manager
    from kvd.cache.leases import Lease
    from kvd.config import Config

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

_Work: TypeAlias = tuple[Callable[..., Coroutine[Any, Any, None]], tuple[Any, ...]]

# After so many messages other callbacks have their turn.
DRAIN_BATCH = 256
# So many requests of one connection wait here; more wait where they are sent.
QUEUED_REQUESTS = 16


class Router:
    """One endpoint. Sessions are known by their connection, which a client cannot forge.

    Everything here runs on one event loop, and nothing between two awaits is interrupted: the
    session table and the manager's state need no lock.
    """

    def __init__(
        self, config: Config, manager: Manager, sessions: SessionTable, epoch: int, header: Path
    ) -> None:
        self._config = config
        self._manager = manager
        self._sessions = sessions
        self._epoch = epoch
        self._header = header
        self._started = time.monotonic()
        # Work that must be awaited, from the socket's callback, which is no task and starts none.
        self._work: list[_Work] = []
        self._stirred = anyio.Event()
        self._is_closing = False
        self.counters: Counter[str] = Counter()

    # --- life ---

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve the endpoint until close(); raises ConfigError where it cannot be bound."""
        self._loop = asyncio.get_running_loop()
        with zmq.Context() as context, context.socket(zmq.ROUTER) as self._socket:
            self._bind()
            try:
                self._loop.add_reader(self._socket.fileno(), self._drain)
                # The descriptor tells of changes alone: what came before is read now.
                self._loop.call_soon(self._drain)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._sweep)
                    task_status.started()
                    await self._start_work(tasks)
                    tasks.cancel_scope.cancel()
            finally:
                self._is_closing = True
                self._loop.remove_reader(self._socket.fileno())
                socket_path(self._config.resolved_endpoint).unlink(missing_ok=True)

    def close(self) -> None:
        """Take no more requests."""
        self._is_closing = True
        self._stirred.set()

    async def _start_work(self, tasks: TaskGroup) -> None:
        while not self._is_closing:
            await self._stirred.wait()
            self._stirred = anyio.Event()
            work, self._work = self._work, []
            for function, args in work:
                tasks.start_soon(self._run_guarded, function, args)

    async def _run_guarded(
        self, function: Callable[..., Coroutine[Any, Any, None]], args: tuple[Any, ...]
    ) -> None:
        """A fault of ours is one request's alone, whose client runs into its deadline."""
        try:
            await function(*args)
        except Exception:
            logger.exception("reason=internal %s failed", function.__name__)

    def _bind(self) -> None:
        path = socket_path(self._config.resolved_endpoint)
        if path.exists() and not path.is_socket():  # ZeroMQ would remove it
            raise ConfigError(f"{path} is there and is no socket: choose another endpoint")
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_REQUESTS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._config.limits.request_bytes)
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise ConfigError(f"{path} cannot be bound: {error.strerror}") from error
        path.chmod(0o660)

    def _drain(self) -> None:
        for _ in range(DRAIN_BATCH):
            if self._is_closing:
                return
            # Cheaper than the exception that an empty socket raises.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            self._receive(self._socket.recv_multipart(zmq.NOBLOCK))
        self._loop.call_soon(self._drain)

    def _send(self, identity: bytes, reply: AnyReply) -> bool:
        """Send without blocking; False for a client that is gone or does not read."""
        try:
            self._socket.send_multipart((identity, encode(reply)), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # host unreachable, or its queue is full
            self.counters["replies_undeliverable"] += 1
            logger.debug("reply %s undeliverable: %s", reply.id, error)
            return False
        return True

    def _send_later(self, identity: bytes, reply: AnyReply) -> None:
        """Send from a task; since that can swallow the news of requests, look for them."""
        self._send(identity, reply)
        self._loop.call_soon(self._drain)

    # --- requests ---

    def _receive(self, frames: list[bytes]) -> None:
        identity, header, *rest = frames if len(frames) > 1 else (frames[0], b"")
        try:
            request = decode_request(header)
        except BadRequest as error:
            self._refuse(identity, request_id(header), error)
            return
        self.counters["requests"] += 1
        tokens = rest[0] if rest else b""
        with request_span(type(request).__name__, request.trace):
            try:
                self._check(request)
                self._serve(identity, request, tokens)
            except KvdError as error:
                self._refuse(identity, request.id, error)
            except Exception:
                # Ours, and this request's alone: the daemon serves on, and says so.
                logger.exception("reason=internal %s failed", type(request).__name__)
                self._refuse(identity, request.id, KvdError("internal error; see kvd's log"))

    def _refuse(self, identity: bytes, request: int, error: KvdError) -> None:
        self.counters["errors"] += 1
        self.counters[f"errors_{error.code}"] += 1
        self._send(identity, self._error(request, error))

    def _error(self, request: int, error: KvdError) -> ErrorReply:
        return ErrorReply(
            id=request,
            epoch=self._epoch,
            code=error.code,
            message=error.message,
            details=error.details,
        )

    def _check(self, request: AnyRequest) -> None:
        if not isinstance(request, AttachRequest | StatusRequest) and request.epoch != self._epoch:
            raise StaleEpoch("the daemon was restarted: attach again")
        if request.deadline_ns and time.monotonic_ns() > request.deadline_ns:
            raise DeadlineExceeded("the deadline had passed when the request was read")

    def _serve(self, identity: bytes, request: AnyRequest, tokens: bytes) -> None:
        """Answer a request, or start the task that will."""
        if isinstance(request, AttachRequest):
            self._send(identity, self._attach(identity, request))
            return
        if isinstance(request, StatusRequest):
            self._send(identity, self._status(request))
            return
        session = self._sessions.get(identity)
        match request:
            case MatchRequest():
                self._match(session, request, tokens)
            case ReserveRequest():
                self._reserve(session, request)
            case CommitRequest():
                self._send(identity, self._commit(session, request, tokens))
            case OpenRequest():
                self._start(self._open, session, request)
            case HeartbeatRequest():
                self._manager.release_others(session.id, request.leases)
                self._done(session, request)
            case ReleaseRequest():
                self._check_batch(len(request.leases))
                self._manager.release(session.id, request.leases)
                self._done(session, request)
            case AbortRequest():
                self._check_batch(len(request.leases))
                self._manager.abort(session.id, request.leases)
                self._done(session, request)
            case CloseRequest():
                self._manager.close_namespace(session.id, request.namespace)
                session.namespaces.discard(request.namespace)
                self._done(session, request)
            case DetachRequest():
                self._end(session)
                self._done(session, request)
            case _:
                assert_never(request)

    def _done(self, session: Session, request: AnyRequest) -> None:
        if request.id != NO_REPLY:
            self._send(session.identity, DoneReply(id=request.id, epoch=self._epoch))

    # --- sessions ---

    def _attach(self, identity: bytes, request: AttachRequest) -> AttachReply:
        version = min(PROTOCOL_VERSION, request.version)
        if version < max(MIN_PROTOCOL_VERSION, request.min_version):
            raise VersionMismatch(
                f"this kvd speaks protocol {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, the "
                f"client {request.min_version} to {request.version}: upgrade the older one"
            )
        for old in (self._sessions.find(identity), self._sessions.named(request.previous)):
            if old is not None:
                self._end(old)
        session = self._sessions.attach(identity, request.client, request.pid)
        logger.info("session %s of %s (pid %s)", session.name, request.client, request.pid)
        return AttachReply(
            id=request.id,
            epoch=self._epoch,
            version=version,
            session=session.name,
            heartbeat_seconds=self._config.sessions.heartbeat_seconds,
            max_request_bytes=self._config.limits.request_bytes,
            header_path=str(self._header),
            lock_path=str(self._sessions.path(session.id)),
        )

    def _end(self, session: Session) -> None:
        """End a session; what it could still write waits for its processes to be gone."""
        if self._sessions.find(session.identity) is session:
            self._sessions.end(session)
            self._manager.end_session(session.id)
            logger.info("session %s ended", session.name)

    async def _sweep(self) -> None:
        """See again and again whose processes are gone."""
        while True:
            for session in self._sessions.silent(time.monotonic()):
                self._end(session)
            watched = self._sessions.watched()
            for session_id in await anyio.to_thread.run_sync(sweep, watched):
                if (left := self._sessions.gone(session_id)) is not None:
                    self._manager.end_session(session_id)
                    logger.info("session %s is gone (%s)", left.name, left.client)
                self._manager.session_gone(session_id)
            await anyio.sleep(self._config.sessions.sweep_seconds)

    # --- namespaces ---

    async def _open(self, session: Session, request: OpenRequest) -> None:
        try:
            reply: AnyReply = await self._opened(session, request)
        except KvdError as error:
            self.counters["errors"] += 1
            reply = self._error(request.id, error)
        self._send_later(session.identity, reply)

    async def _opened(self, session: Session, request: OpenRequest) -> OpenReply:
        if request.group or request.keyed:
            raise Unsupported("groups and keyed namespaces are not served by this version")
        lock = self._sessions.path(session.id)
        if request.maps and not await anyio.to_thread.run_sync(is_held, lock):
            raise SessionLockMissing(f"take a shared lock on {lock} before mapping an arena")
        session.maps = session.maps or request.maps
        opened = await self._manager.open(request.identity, request.layout, request.salt)
        session.namespaces.add(opened.namespace.id)
        return OpenReply(
            id=request.id,
            epoch=self._epoch,
            namespace=opened.namespace.id,
            arena_path=str(opened.arena.path),
            num_pages=opened.arena.num_pages,
        )

    # --- match, reserve, commit ---

    def _match(self, session: Session, request: MatchRequest, tokens: bytes) -> None:
        self._check_batch(len(request.items), sum(i.num_tokens for i in request.items), tokens)
        results: list[MatchResult | Failure] = []
        waiting: list[tuple[int, Lease]] = []
        start = 0
        for place, item in enumerate(request.items):
            piece = tokens[start : start + item.num_tokens * TOKEN_BYTES]
            start += len(piece)
            try:
                result = self._match_item(session, item, piece)
                if item.reserve and not result.reserved:
                    lease = self._manager.lease(session.id, item.lease)
                    waiting.append((place, lease))
                results.append(result)
            except KvdError as error:
                results.append(failure(error))
        if waiting:
            self._start(self._match_later, session, request, results, waiting)
        else:
            self._send_matched(session, request, results)

    def _match_item(self, session: Session, item: MatchItem, tokens: bytes) -> MatchResult:
        if item.namespace not in session.namespaces:
            raise UnknownNamespace(f"this session has not opened namespace {item.namespace}")
        if item.exact_tail or item.extras:
            raise Unsupported("exact tails and extras are not served by this version")
        lease, result = self._manager.match(session.id, item, tokens)
        if not item.reserve:
            return result
        runs = self._manager.reserve_now(lease, 0, item.reserve, item.ahead)
        return replace(result, reserved=runs) if runs else result

    async def _match_later(
        self,
        session: Session,
        request: MatchRequest,
        results: list[MatchResult | Failure],
        waiting: list[tuple[int, Lease]],
    ) -> None:
        """Wait for the pages of a match; where they fall short the lease is granted without."""
        for place, lease in waiting:
            item, result = request.items[place], results[place]
            assert isinstance(result, MatchResult)
            try:
                runs = await self._manager.reserve(
                    lease, 0, item.reserve, item.ahead, self._seconds_left(request)
                )
                results[place] = replace(result, reserved=runs)
            except OutOfPages as error:
                shortage = Shortage(**error.details)
                results[place] = replace(result, shortage=shortage)
            except KvdError as error:
                results[place] = failure(error)
        self._send_matched(session, request, results)
        self._loop.call_soon(self._drain)

    def _send_matched(
        self, session: Session, request: MatchRequest, results: list[MatchResult | Failure]
    ) -> None:
        reply = MatchReply(id=request.id, epoch=self._epoch, results=tuple(results))
        if not self._send(session.identity, reply):
            # Nobody will ever know of these leases.
            self._manager.release(session.id, [item.lease for item in request.items])

    def _reserve(self, session: Session, request: ReserveRequest) -> None:
        self._check_batch(len(request.items))
        results: list[ReserveResult | Failure] = []
        waiting: list[int] = []
        for place, item in enumerate(request.items):
            try:
                lease = self._manager.lease(session.id, item.lease)
                runs = self._manager.reserve_now(lease, item.start, item.stop, item.ahead)
                if runs is None:
                    waiting.append(place)
                results.append(ReserveResult(runs or ()))
            except KvdError as error:
                results.append(failure(error))
        if waiting:
            self._start(self._reserve_later, session, request, results, waiting)
        else:
            self._send_reserved(session, request, results)

    async def _reserve_later(
        self,
        session: Session,
        request: ReserveRequest,
        results: list[ReserveResult | Failure],
        waiting: list[int],
    ) -> None:
        for place in waiting:
            item = request.items[place]
            try:
                lease = self._manager.lease(session.id, item.lease)
                runs = await self._manager.reserve(
                    lease, item.start, item.stop, item.ahead, self._seconds_left(request)
                )
                results[place] = ReserveResult(runs)
            except KvdError as error:
                results[place] = failure(error)
        self._send_reserved(session, request, results)
        self._loop.call_soon(self._drain)

    def _send_reserved(
        self, session: Session, request: ReserveRequest, results: list[ReserveResult | Failure]
    ) -> None:
        reply = ReserveReply(id=request.id, epoch=self._epoch, results=tuple(results))
        self._send(session.identity, reply)

    def _commit(self, session: Session, request: CommitRequest, tokens: bytes) -> CommitReply:
        self._check_batch(len(request.items), sum(i.num_tokens for i in request.items), tokens)
        results: list[CommitResult | Failure] = []
        start = 0
        for item in request.items:
            piece = tokens[start : start + item.num_tokens * TOKEN_BYTES]
            start += len(piece)
            try:
                results.append(self._commit_item(session, item, piece))
            except KvdError as error:
                results.append(failure(error))
        return CommitReply(id=request.id, epoch=self._epoch, results=tuple(results))

    def _commit_item(self, session: Session, item: CommitItem, tokens: bytes) -> CommitResult:
        if item.extras:
            raise Unsupported("extras are not served by this version")
        return self._manager.commit(session.id, item, tokens)

    # --- what the verbs share ---

    def _check_batch(self, num_items: int, num_tokens: int = 0, tokens: bytes = b"") -> None:
        if num_items > self._config.limits.batch_items:
            raise LimitExceeded(
                f"{num_items} items in a request; at most {self._config.limits.batch_items}"
            )
        if num_tokens * TOKEN_BYTES != len(tokens):
            raise BadRequest(f"{num_tokens} tokens announced, {len(tokens)} bytes of them sent")

    def _seconds_left(self, request: AnyRequest) -> float:
        if not request.deadline_ns:
            return self._config.limits.wait_seconds
        left = (request.deadline_ns - time.monotonic_ns()) / 1e9
        return max(0.0, min(left, self._config.limits.wait_seconds))

    def _start(self, function: Callable[[*Ts], Coroutine[Any, Any, None]], *args: *Ts) -> None:
        self._work.append((function, args))
        self._stirred.set()

    def _status(self, request: StatusRequest) -> StatusReply:
        state = self._manager.state
        return StatusReply(
            id=request.id,
            epoch=self._epoch,
            version=kvd.__version__,
            pid=os.getpid(),
            endpoint=self._config.resolved_endpoint,
            uptime_seconds=round(time.monotonic() - self._started, 3),
            tiers=(self._manager.tier_status(),),
            namespaces=self._manager.namespace_status(),
            sessions=tuple(self._session_status(session) for session in self._sessions),
            counters=dict(self.counters) | dict(state.counters),
        )

    def _session_status(self, session: Session) -> SessionStatus:
        leases = self._manager.state.leases.of_session(session.id)
        return SessionStatus(
            session.name,
            session.client,
            session.pid,
            session.maps,
            round(time.monotonic() - session.last_seen, 3),
            len(leases),
            sum(len(lease.reserved) for lease in leases),
        )
