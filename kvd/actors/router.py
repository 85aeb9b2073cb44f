"""Router: the ROUTER socket; from frames to requests and back.

The socket is read until it is empty in a callback of the event loop, and each request is answered
there and then; only what must wait becomes a task. Measured, 8 clients: two to three times the
requests per second of a task or a mailbox per request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import zmq

import kvd
from kvd.actors.sessions import Session, SessionTable, remove_swept, sweep
from kvd.actors.status import lease_status, namespace_status, pin_status
from kvd.actors.transfers import Transfers
from kvd.actors.verbs import Answer, Later, Verbs
from kvd.protocol.codec import MAX_HEADER_BYTES, decode_request, encode, request_id
from kvd.protocol.endpoint import socket_path
from kvd.protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    KvdError,
    LimitExceeded,
    StaleEpoch,
    VersionMismatch,
)
from kvd.protocol.messages import (
    MIN_PROTOCOL_VERSION,
    NO_REPLY,
    PROTOCOL_VERSION,
    AnyReply,
    AnyRequest,
    AttachReply,
    AttachRequest,
    CheckpointReply,
    CheckpointRequest,
    DetachRequest,
    DoneReply,
    ErrorReply,
    ForkRequest,
    LeasesReply,
    LeasesRequest,
    MatchReply,
    MatchRequest,
    SessionStatus,
    StatusReply,
    StatusRequest,
    VerifyReply,
    VerifyRequest,
)
from kvd.telemetry import request_span

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from kvd.actors.manager import Manager
    from kvd.actors.mover import Mover
    from kvd.actors.publisher import Publisher
    from kvd.actors.scrubber import Scrubber
    from kvd.actors.sequences import Sequences
    from kvd.cache.leases import Lease
    from kvd.config import Config

logger = logging.getLogger(__name__)

# As plain numbers: pyzmq's enums cost more than what they are asked for.
EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
# After so long other callbacks have their turn: a few busy clients keep the socket from ever being
# empty, and what is given, waited for or swept would come to nothing.
DRAIN_SECONDS = 0.002
# A thousand clients that attach at once take turns with what the others ask.
ATTACH_PAUSE_SECONDS = 0.001
# So many requests of one connection wait here; more wait where they are sent.
QUEUED_REQUESTS = 16

_WITHOUT_SESSION = (
    AttachRequest,
    StatusRequest,
    LeasesRequest,
    CheckpointRequest,
    VerifyRequest,
)


class Router:
    """One endpoint. Sessions are known by their connection, which a client cannot forge.

    Everything here runs on one event loop, and nothing between two awaits is interrupted: the
    session table and the manager's state need no lock.
    """

    def __init__(
        self,
        config: Config,
        manager: Manager,
        mover: Mover,
        sequences: Sequences,
        scrubber: Scrubber,
        sessions: SessionTable,
        epoch: int,
        header: Path,
        publisher: Publisher | None = None,
    ) -> None:
        self._config = config
        self._manager = manager
        self._mover = mover
        self._scrubber = scrubber
        self._sessions = sessions
        self.counters: Counter[str] = Counter()
        self._verbs = Verbs(
            config.limits, manager, mover, sequences, sessions, epoch, self.counters
        )
        self._transfers = Transfers(manager)
        self._epoch = epoch
        self._header = header
        self._publisher = publisher
        self._started = time.monotonic()
        # Work that must be awaited, from the socket's callback, which is no task and starts none.
        self._later: list[tuple[Session, AnyRequest, Later]] = []
        self._stirred = anyio.Event()
        self._attaching: deque[tuple[bytes, AttachRequest]] = deque()
        self._knocked = anyio.Event()
        self._checkpointing: list[tuple[bytes, CheckpointRequest]] = []
        self._wanted = anyio.Event()
        self._is_closing = False

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
                    tasks.start_soon(self._attach_in_turn)
                    tasks.start_soon(self._checkpoint)
                    task_status.started()
                    await self._start_later(tasks)
                    tasks.cancel_scope.cancel()
            finally:
                self._is_closing = True
                self._loop.remove_reader(self._socket.fileno())
                for _, _, later in self._later:
                    later.close()
                socket_path(self._config.resolved_endpoint).unlink(missing_ok=True)

    def close(self) -> None:
        """Take no more requests."""
        self._is_closing = True
        self._stirred.set()

    async def _start_later(self, tasks: TaskGroup) -> None:
        while not self._is_closing:
            await self._stirred.wait()
            self._stirred = anyio.Event()
            work, self._later = self._later, []
            for each in work:
                tasks.start_soon(self._finish, *each)

    async def _finish(self, session: Session, request: AnyRequest, later: Later) -> None:
        """Answer a request that had to wait."""
        try:
            answer = await later
        except KvdError as error:
            self._refuse(session.identity, request.id, error)
        except Exception:
            self._fail(session.identity, request)
        else:
            self._answer(session.identity, request, answer)
        finally:
            session.num_waiting -= 1
        # Sending can swallow the news of requests: look for them.
        self._loop.call_soon(self._drain)

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
        now = time.perf_counter()
        end = now + DRAIN_SECONDS
        while now < end:
            if self._is_closing:
                return
            # Cheaper than the exception that an empty socket raises.
            if not int(self._socket.get(EVENTS)) & POLLIN:
                return
            now = self._receive(self._socket.recv_multipart(NOBLOCK), now)
        self._loop.call_soon(self._drain)

    # --- requests ---

    def _receive(self, frames: list[bytes], started: float) -> float:
        """Serve a message that was begun to be read; when that is done."""
        identity, header, *rest = frames if len(frames) > 1 else (frames[0], b"")
        try:
            request = decode_request(header)
        except KvdError as error:
            self._refuse(identity, request_id(header[:MAX_HEADER_BYTES]), error)
            return time.perf_counter()
        self.counters["requests"] += 1
        with request_span(type(request).__name__, request.trace):
            try:
                self._check(request)
                self._serve(identity, request, rest)
            except KvdError as error:
                self._refuse(identity, request.id, error)
            except Exception:
                self._fail(identity, request)
        done = time.perf_counter()
        if (session := self._sessions.find(identity)) is not None:
            session.took(done - started)
        return done

    def _check(self, request: AnyRequest) -> None:
        if request.epoch != self._epoch and not isinstance(request, _WITHOUT_SESSION):
            raise StaleEpoch("the daemon was restarted: attach again")
        if request.deadline_ns and time.monotonic_ns() > request.deadline_ns:
            raise DeadlineExceeded("the deadline had passed when the request was read")

    def _serve(self, identity: bytes, request: AnyRequest, frames: Sequence[bytes]) -> None:
        """Answer what needs no session; the verbs of a session are served by Verbs."""
        match request:
            case AttachRequest():
                self._line_up(identity, request)
            case StatusRequest():
                self._send(identity, self._status(request))
            case LeasesRequest():
                self._send(identity, self._leases(request))
            case VerifyRequest():
                self._send(identity, self._verify(request))
            case CheckpointRequest():
                self._want_checkpoint(identity, request)
            case DetachRequest():
                self._end(self._sessions.get(identity))
                self._answer(identity, request, Answer(DoneReply(id=request.id, epoch=self._epoch)))
            case _:
                session = self._sessions.get(identity)
                answer = self._verbs.serve(session, request, frames)
                if isinstance(answer, Answer):
                    self._answer(identity, request, answer)
                else:
                    self._wait(session, request, answer)

    def _wait(self, session: Session, request: AnyRequest, later: Later) -> None:
        """Have a request answered when it can be; of one session only so many wait."""
        if session.num_waiting >= (most := self._config.limits.session_waiting):
            later.close()
            self._undo(session.identity, request)
            raise LimitExceeded(f"{most} requests of this session wait already")
        session.num_waiting += 1
        self._later.append((session, request, later))
        self._stirred.set()

    # --- answers ---

    def _answer(self, identity: bytes, request: AnyRequest, answer: Answer) -> None:
        if request.id == NO_REPLY and isinstance(answer.reply, DoneReply):
            return
        if answer.lease is not None:
            self._send_pages(identity, answer.lease, answer)
            return
        is_sent = self._send(identity, answer.reply, *answer.frames)
        if not is_sent and isinstance(answer.reply, MatchReply):
            self._undo(identity, request)

    def _send(self, identity: bytes, reply: AnyReply, *frames: bytes | memoryview) -> bool:
        """Send without blocking; False for a client that is gone or does not read."""
        try:
            self._socket.send_multipart((identity, encode(reply), *frames), NOBLOCK)
        except zmq.ZMQError as error:  # host unreachable, or its queue is full
            self.counters["replies_undeliverable"] += 1
            logger.debug("reply %s undeliverable: %s", reply.id, error)
            return False
        return True

    def _send_pages(self, identity: bytes, lease: Lease, answer: Answer) -> None:
        """Send page memory where it lies; its pages are held until ZeroMQ is done with it."""
        hold = self._transfers.hold(lease)
        message: list[Any] = [identity, encode(answer.reply), *answer.frames]
        try:
            tracker = self._socket.send_multipart(message, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            self._transfers.let_go(hold)
            self.counters["replies_undeliverable"] += 1
            logger.debug("pages undeliverable: %s", error)
        else:
            assert tracker is not None
            self._transfers.sent(hold, tracker)

    def _undo(self, identity: bytes, request: AnyRequest) -> None:
        """Nobody will ever know of these leases."""
        session = self._sessions.find(identity)
        if session is not None and isinstance(request, MatchRequest | ForkRequest):
            self._manager.release(session.id, [item.lease for item in request.items])

    def _refuse(self, identity: bytes, request: int, error: KvdError) -> None:
        self.counters["errors"] += 1
        self.counters[f"errors_{error.code}"] += 1
        reply = ErrorReply(
            id=request,
            epoch=self._epoch,
            code=error.code,
            message=error.message,
            details=error.details,
        )
        self._send(identity, reply)

    def _fail(self, identity: bytes, request: AnyRequest) -> None:
        """A fault of ours, and this request's alone: the daemon serves on, and says so."""
        logger.exception("reason=internal %s failed", type(request).__name__)
        self._refuse(identity, request.id, KvdError("internal error; see kvd's log"))

    # --- sessions ---

    def _line_up(self, identity: bytes, request: AttachRequest) -> None:
        """A session costs more than what sessions ask: those that want one are served in turn."""
        if len(self._attaching) >= (most := self._config.limits.sessions):
            raise LimitExceeded(f"{most} clients attach already")
        self._attaching.append((identity, request))
        self._knocked.set()

    async def _attach_in_turn(self) -> None:
        """Attach who waits for it, one by one, and serve everybody else between."""
        while True:
            await self._knocked.wait()
            self._knocked = anyio.Event()
            while self._attaching:
                identity, request = self._attaching.popleft()
                try:
                    self._check(request)
                    self._send(identity, self._attach(identity, request))
                except KvdError as error:
                    self._refuse(identity, request.id, error)
                except Exception:
                    self._fail(identity, request)
                self._loop.call_soon(self._drain)
                await anyio.sleep(ATTACH_PAUSE_SECONDS)

    def _attach(self, identity: bytes, request: AttachRequest) -> AttachReply:
        version = min(PROTOCOL_VERSION, request.version)
        if version < max(MIN_PROTOCOL_VERSION, request.min_version):
            raise VersionMismatch(
                f"this kvd speaks protocol {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, the "
                f"client {request.min_version} to {request.version}: upgrade the older one"
            )
        for old in (self._sessions.find(identity), self._sessions.known_as(request.previous)):
            if old is not None:
                self._end(old)
        session = self._sessions.attach(identity, request.client, request.pid)
        logger.info("session %s of %s (pid %s)", session.name, request.client, request.pid)
        return AttachReply(
            id=request.id,
            epoch=self._epoch,
            version=version,
            session=session.secret,
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
            self._transfers.end_done()
            for session in self._sessions.silent(time.monotonic()):
                self._end(session)
            watched = self._sessions.watched()
            swept = await anyio.to_thread.run_sync(sweep, watched)
            for session_id in swept:
                if (left := self._sessions.gone(session_id)) is not None:
                    self._manager.end_session(session_id)
                    logger.info("session %s is gone (%s)", left.name, left.client)
                self._manager.session_gone(session_id)
            self._manager.free_earlier(self._sessions.earlier)
            with anyio.CancelScope(shield=True):  # whoever sweeps next must find them unlocked
                await anyio.to_thread.run_sync(remove_swept, watched, swept)
            await self._see_to_header()
            await anyio.sleep(self._config.sessions.sweep_seconds)

    async def _see_to_header(self) -> None:
        """Tell, once, that the files are gone without which nobody can attach."""
        is_there = await anyio.to_thread.run_sync(lambda: os.path.exists(self._header))
        if not is_there and not self._manager.trouble:
            self._manager.trouble = f"{self._header} was removed: nobody can attach, start kvd anew"
            logger.error("reason=header_removed %s", self._manager.trouble)

    # --- what operators ask ---

    def _want_checkpoint(self, identity: bytes, request: CheckpointRequest) -> None:
        if len(self._checkpointing) >= (most := self._config.limits.session_waiting):
            raise LimitExceeded(f"{most} checkpoints are waited for already")
        self._checkpointing.append((identity, request))
        self._wanted.set()

    async def _checkpoint(self) -> None:
        """One after the other, each for all who asked before it began."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            asked, self._checkpointing = self._checkpointing, []
            try:
                num_blocks = await self._mover.checkpoint()
            except KvdError as error:
                for identity, request in asked:
                    self._refuse(identity, request.id, error)
            except Exception:
                for identity, request in asked:
                    self._fail(identity, request)
            else:
                for identity, request in asked:
                    reply = CheckpointReply(id=request.id, epoch=self._epoch, num_blocks=num_blocks)
                    self._send(identity, reply)
            self._loop.call_soon(self._drain)

    def _verify(self, request: VerifyRequest) -> VerifyReply:
        last = self._scrubber.verify(start=request.start)
        return VerifyReply(
            id=request.id, epoch=self._epoch, tiers=tuple(last.tiers), is_done=last.is_done
        )

    def _status(self, request: StatusRequest) -> StatusReply:
        return StatusReply(
            id=request.id,
            epoch=self._epoch,
            version=kvd.__version__,
            pid=os.getpid(),
            endpoint=self._config.resolved_endpoint,
            uptime_seconds=round(time.monotonic() - self._started, 3),
            tiers=self._manager.tier_status(),
            namespaces=namespace_status(self._manager.state),
            sessions=tuple(self._session_status(session) for session in self._sessions),
            counters=dict(self.counters) | dict(self._manager.state.counters),
            events=self._publisher.status() if self._publisher else None,
        )

    def _session_status(self, session: Session) -> SessionStatus:
        leases = self._manager.state.leases.of_session(session.id)
        p50, p99 = session.percentiles_us()
        return SessionStatus(
            session.name,
            session.client,
            session.pid,
            session.maps,
            round(time.monotonic() - session.last_seen, 3),
            len(leases),
            sum(len(lease.reserved) for lease in leases),
            session.num_requests,
            p50,
            p99,
        )

    def _leases(self, request: LeasesRequest) -> LeasesReply:
        clients = {session.id: session.client for session in self._sessions}
        state = self._manager.state
        return LeasesReply(
            id=request.id,
            epoch=self._epoch,
            leases=lease_status(state, request.limit, clients),
            pins=pin_status(state, request.limit),
            num_leases=len(state.leases),
            num_pins=len(state.pins),
        )
