"""Router: from the frames of its sockets to requests and back.

A socket is read until it is empty in a callback of the event loop, and each request is answered
there and then; only what must wait becomes a task. Measured, 8 clients: two to three times the
requests per second of a task or a mailbox per request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio
import zmq
from msgspec.structs import replace
from opentelemetry.trace import get_current_span, use_span

import kvd
from kvd.actors.doors import NOBLOCK, Door, Doors, has_more
from kvd.actors.inspection import explained, listed
from kvd.actors.sessions import Session, SessionTable, remove_swept, sweep
from kvd.actors.signal import Signal
from kvd.actors.status import (
    client_status,
    lease_status,
    namespace_status,
    pin_status,
    session_status,
)
from kvd.actors.traces import tell_answer
from kvd.actors.transfers import Transfers
from kvd.actors.verbs import Answer, Later, Verbs, tokens_in
from kvd.protocol.codec import MAX_HEADER_BYTES, decode_request, encode, request_id
from kvd.protocol.errors import (
    DaemonUnavailable,
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
    ConfigReply,
    ConfigRequest,
    DetachRequest,
    DoneReply,
    DrainRequest,
    ErrorReply,
    ExplainRequest,
    ForkRequest,
    LeasesReply,
    LeasesRequest,
    MatchReply,
    MatchRequest,
    ReloadReply,
    ReloadRequest,
    StatusReply,
    StatusRequest,
    TreeRequest,
    VerifyReply,
    VerifyRequest,
)
from kvd.telemetry import (
    Timings,
    refused,
    request_duration,
    request_span,
    request_wait,
    timed,
    within,
)

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus
    from opentelemetry.trace import Span

    from kvd.actors.manager import Manager
    from kvd.actors.mover import Mover
    from kvd.actors.publisher import Publisher
    from kvd.actors.reload import Reloader
    from kvd.actors.scrubber import Scrubber
    from kvd.actors.sequences import Sequences
    from kvd.cache.leases import Lease
    from kvd.config import Config

logger = logging.getLogger(__name__)

# After so long other callbacks have their turn: a few busy clients keep the socket from ever being
# empty, and what is given, waited for or swept would come to nothing.
DRAIN_SECONDS = 0.002
# A thousand clients that attach at once take turns with what the others ask.
ATTACH_PAUSE_SECONDS = 0.001

Phase: TypeAlias = Literal["starting", "ready", "draining", "stopping"]

# What needs no session; all else is served by Verbs.
_WITHOUT_SESSION = frozenset(
    (
        AttachRequest,
        StatusRequest,
        LeasesRequest,
        CheckpointRequest,
        VerifyRequest,
        ConfigRequest,
        ReloadRequest,
        TreeRequest,
        ExplainRequest,
        DrainRequest,
    )
)


class Router:
    """All endpoints. Sessions are known by their connection, which a client cannot forge.

    Everything here runs on one event loop, and nothing between two awaits is interrupted: the
    session table and the manager's state need no lock. While it `is_draining`, who has no session
    gets none.
    """

    def __init__(
        self,
        config: Config,
        manager: Manager,
        mover: Mover,
        sequences: Sequences,
        scrubber: Scrubber,
        sessions: SessionTable,
        reloader: Reloader,
        epoch: int,
        header: Path,
        listeners: Mapping[str, int],
        publisher: Publisher | None = None,
    ) -> None:
        """`listeners` are sockets, by their endpoints, that somebody else made, and keeps."""
        self._config = config
        self._manager = manager
        self._mover = mover
        self._scrubber = scrubber
        self._sessions = sessions
        self.counters: Counter[str] = Counter()
        self._doors = Doors(config, self.counters, listeners)
        self.timings = Timings(request_duration)
        self.phase: Phase = "starting"
        self._verbs = Verbs(
            config.limits, manager, mover, sequences, sessions, epoch, self.counters
        )
        self._reloader = reloader
        self._transfers = Transfers(manager)
        self._epoch = epoch
        self._header = header
        self._publisher = publisher
        self._started = time.monotonic()
        # Work that must be awaited, from the socket's callback, which is no task and starts none.
        self._later: list[tuple[bytes, AnyRequest, Later, Session | None, Span]] = []
        self._stirred = anyio.Event()
        self._attaching: deque[tuple[bytes, AttachRequest, Span]] = deque()
        self._knocked = anyio.Event()
        self._configured = Signal()
        self._checkpointing: list[tuple[bytes, CheckpointRequest, Span]] = []
        self._wanted = anyio.Event()
        self._drained = Signal()
        self._is_closing = False

    # --- life ---

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve the endpoints until close(); raises ConfigError where one cannot be bound."""
        self._loop = asyncio.get_running_loop()
        with self._doors.open():
            try:
                for door in self._doors:
                    self._loop.add_reader(door.socket.fileno(), self._drain, door)
                # The descriptor tells of changes alone: what came before is read now.
                self._look_again()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._sweep)
                    tasks.start_soon(self._attach_in_turn)
                    tasks.start_soon(self._checkpoint)
                    self.phase = "ready"
                    task_status.started()
                    await self._start_later(tasks)
                    tasks.cancel_scope.cancel()
            finally:
                self._is_closing = True
                for door in self._doors:
                    self._loop.remove_reader(door.socket.fileno())
                for _, _, later, *_ in self._later:
                    later.close()

    async def pulse(self) -> None:
        """Return when requests have been looked for once more; never, where they are not."""
        self._look_again()
        await self._drained.wait()

    def configure(self, config: Config) -> None:
        """Go by another configuration; whose key opens something else now has to attach anew."""
        self._config, self._verbs.limits = config, config.limits
        self._doors.configure(config)
        for session in list(self._sessions):
            if session.access != self._doors.access(session.identity):
                self._end(session)
        self._configured.set()

    @property
    def is_draining(self) -> bool:
        return self.phase == "draining"

    @property
    def is_ready(self) -> bool:
        """Whether who comes is served."""
        return self.phase == "ready" and not self._manager.trouble

    @property
    def num_attaching(self) -> int:
        """Clients that wait for a session."""
        return len(self._attaching)

    def close(self) -> None:
        """Take no more requests."""
        self.phase = "stopping"
        self._is_closing = True
        self._stirred.set()

    async def _start_later(self, tasks: TaskGroup) -> None:
        while not self._is_closing:
            await self._stirred.wait()
            self._stirred = anyio.Event()
            work, self._later = self._later, []
            for each in work:
                tasks.start_soon(self._finish, *each)

    async def _finish(
        self,
        identity: bytes,
        request: AnyRequest,
        later: Later,
        session: Session | None,
        span: Span,
    ) -> None:
        """Answer a request that had to wait, of a session or of an operator without one."""
        with use_span(span, end_on_exit=True):
            try:
                with timed(request_wait, {"verb": request.verb}):
                    answer = await later
            except KvdError as error:
                self._refuse(identity, request.id, error)
            except Exception:
                self._fail(identity, request)
            else:
                self._answer(identity, request, answer)
            finally:
                if session is not None:
                    session.num_waiting -= 1
        # Sending can swallow the news of requests: look for them.
        self._look_again()

    def _look_again(self) -> None:
        for door in self._doors:
            self._loop.call_soon(self._drain, door)

    def _drain(self, door: Door) -> None:
        self._drained.set()
        now = time.perf_counter()
        end = now + DRAIN_SECONDS
        while now < end:
            if self._is_closing or not has_more(door.socket):
                return
            now = self._receive(door, now)
        self._loop.call_soon(self._drain, door)

    # --- requests ---

    def _receive(self, door: Door, started: float) -> float:
        """Read a message and serve it; when that is done."""
        frames = door.receive()
        identity, header, *rest = frames if len(frames) > 1 else (frames[0], b"")
        try:
            request = decode_request(header)
        except KvdError as error:
            self._refuse(identity, request_id(header[:MAX_HEADER_BYTES]), error)
            return time.perf_counter()
        if door.is_remote and request.deadline_ns:  # by a clock of its own
            request = replace(request, deadline_ns=time.monotonic_ns() + request.deadline_ns)
        span = request_span(type(request).__name__, request.trace)
        is_answered = True
        with within(span):
            try:
                self._check(request)
                is_answered = self._serve(identity, request, rest)
            except KvdError as error:
                self._refuse(identity, request.id, error)
            except Exception:
                self._fail(identity, request)
        if is_answered:
            span.end()
        done = time.perf_counter()
        self.timings.note(request.verb, done - started)
        if (session := self._sessions.find(identity)) is not None:
            session.took(done - started)
        return done

    def _check(self, request: AnyRequest) -> None:
        if request.epoch != self._epoch and type(request) not in _WITHOUT_SESSION:
            raise StaleEpoch("the daemon was restarted: attach again")
        if request.deadline_ns and time.monotonic_ns() > request.deadline_ns:
            raise DeadlineExceeded("the deadline had passed when the request was read")

    def _serve(self, identity: bytes, request: AnyRequest, frames: Sequence[bytes]) -> bool:
        """Answer a request.

        False where the answer comes later; with it ends the span, which is kept beside the request.
        """
        self._doors.access(identity).check(request)
        if type(request) in _WITHOUT_SESSION:
            return self._serve_anybody(identity, request, frames)
        session = self._sessions.get(identity)
        if isinstance(request, DetachRequest):
            self._end(session)
            self._answer(identity, request, Answer(DoneReply(id=request.id, epoch=self._epoch)))
            return True
        answer = self._verbs.serve(session, request, frames)
        if not isinstance(answer, Answer):
            self._wait(session, request, answer)
            return False
        self._answer(identity, request, answer)
        return True

    def _serve_anybody(self, identity: bytes, request: AnyRequest, frames: Sequence[bytes]) -> bool:
        """Answer what needs no session, as `_serve` does."""
        match request:
            case AttachRequest():
                self._line_up(identity, request)
                return False
            case StatusRequest():
                self._send(identity, self._status(request))
            case LeasesRequest():
                self._send(identity, self._leases(request))
            case VerifyRequest():
                self._send(identity, self._verify(request))
            case TreeRequest():
                tokens = tokens_in(frames, request.num_tokens)
                self._send(identity, listed(self._manager, request, tokens, self._epoch))
            case ExplainRequest():
                tokens = tokens_in(frames, request.num_tokens)
                self._send(identity, explained(self._manager, request, tokens, self._epoch))
            case DrainRequest():
                self._set_draining(request)
                self._answer(identity, request, Answer(DoneReply(id=request.id, epoch=self._epoch)))
            case CheckpointRequest():
                self._want_checkpoint(identity, request)
                return False
            case ConfigRequest():
                values = self._reloader.listed()
                self._send(identity, ConfigReply(id=request.id, epoch=self._epoch, values=values))
            case ReloadRequest():
                self._begin(identity, request, self._reload(request))
                return False
            case _:
                raise AssertionError(f"{request.verb} needs a session")
        return True

    def _wait(self, session: Session, request: AnyRequest, later: Later) -> None:
        """Have a request answered when it can be; of one session only so many wait."""
        if session.num_waiting >= (most := self._config.limits.session_waiting):
            later.close()
            self._undo(session.identity, request)
            raise LimitExceeded(f"{most} requests of this session wait already")
        session.num_waiting += 1
        self._begin(session.identity, request, later, session)

    def _begin(
        self, identity: bytes, request: AnyRequest, later: Later, session: Session | None = None
    ) -> None:
        self._later.append((identity, request, later, session, get_current_span()))
        self._stirred.set()

    # --- answers ---

    def _answer(self, identity: bytes, request: AnyRequest, answer: Answer) -> None:
        if request.trace and (session := self._sessions.find(identity)) is not None:
            tell_answer(self._manager.state, session.id, request, answer)
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
        socket, name = self._doors.way_to(identity)
        try:
            socket.send_multipart((name, encode(reply), *frames), NOBLOCK)
        except zmq.ZMQError as error:  # host unreachable, or its queue is full
            self.counters["replies_undeliverable"] += 1
            logger.debug("reply %s undeliverable: %s", reply.id, error)
            return False
        return True

    def _send_pages(self, identity: bytes, lease: Lease, answer: Answer) -> None:
        """Send page memory where it lies; its pages are held until ZeroMQ is done with it."""
        hold = self._transfers.hold(lease)
        socket, name = self._doors.way_to(identity)
        message: list[Any] = [name, encode(answer.reply), *answer.frames]
        try:
            tracker = socket.send_multipart(message, zmq.NOBLOCK, copy=False, track=True)
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
        refused(error)
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
        logger.exception("reason=internal request=%s failed", type(request).__name__)
        self._refuse(identity, request.id, KvdError("internal error; see kvd's log"))

    # --- sessions ---

    def _line_up(self, identity: bytes, request: AttachRequest) -> None:
        """A session costs more than what sessions ask: those that want one are served in turn."""
        if len(self._attaching) >= (most := self._config.limits.sessions):
            raise LimitExceeded(f"{most} clients attach already")
        self._attaching.append((identity, request, get_current_span()))
        self._knocked.set()

    async def _attach_in_turn(self) -> None:
        """Attach who waits for it, one by one, and serve everybody else between."""
        while True:
            await self._knocked.wait()
            self._knocked = anyio.Event()
            while self._attaching:
                identity, request, span = self._attaching.popleft()
                with use_span(span, end_on_exit=True):
                    try:
                        self._check(request)
                        self._send(identity, self._attach(identity, request))
                    except KvdError as error:
                        self._refuse(identity, request.id, error)
                    except Exception:
                        self._fail(identity, request)
                self._look_again()
                await anyio.sleep(ATTACH_PAUSE_SECONDS)

    def _attach(self, identity: bytes, request: AttachRequest) -> AttachReply:
        version = min(PROTOCOL_VERSION, request.version)
        if version < max(MIN_PROTOCOL_VERSION, request.min_version):
            raise VersionMismatch(
                f"this kvd speaks protocol {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, the "
                f"client {request.min_version} to {request.version}: upgrade the older one"
            )
        olds = (self._sessions.find(identity), self._sessions.known_as(request.previous))
        if self.is_draining and not any(olds):
            raise DaemonUnavailable("it is draining, and takes no new sessions")
        for old in olds:
            if old is not None:
                self._end(old)
        access = self._doors.access(identity)
        session = self._sessions.attach(identity, request.client, request.pid, access)
        if (client := access.client) is not None:
            self._manager.state.bound_session(session.id, client.reserved_fraction)
        logger.info("session=%s of %s (pid %s)", session.name, session.client, request.pid)
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
            logger.info("session=%s ended", session.name)

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
                    logger.info("session=%s is gone (%s)", left.name, left.client)
                self._manager.session_gone(session_id)
            self._manager.free_earlier(self._sessions.earlier)
            with anyio.CancelScope(shield=True):  # whoever sweeps next must find them unlocked
                await anyio.to_thread.run_sync(remove_swept, watched, swept)
            await self._see_to_header()
            with anyio.move_on_after(self._config.sessions.sweep_seconds):
                await self._configured.wait()

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
        self._checkpointing.append((identity, request, get_current_span()))
        self._wanted.set()

    async def _checkpoint(self) -> None:
        """One after the other, each for all who asked before it began."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            asked, self._checkpointing = self._checkpointing, []
            try:
                num_blocks = await self._mover.checkpoint([span for _, _, span in asked])
            except KvdError as error:
                for identity, request in _each_in_its_span(asked):
                    self._refuse(identity, request.id, error)
            except Exception:
                for identity, request in _each_in_its_span(asked):
                    self._fail(identity, request)
            else:
                for identity, request in _each_in_its_span(asked):
                    reply = CheckpointReply(id=request.id, epoch=self._epoch, num_blocks=num_blocks)
                    self._send(identity, reply)
            self._look_again()

    async def _reload(self, request: ReloadRequest) -> Answer:
        done = await self._reloader.reload()
        return Answer(
            ReloadReply(
                id=request.id,
                epoch=self._epoch,
                changed=done.changed,
                needs_restart=done.needs_restart,
            )
        )

    def _set_draining(self, request: DrainRequest) -> None:
        self.phase = "ready" if request.undo else "draining"
        logger.info("draining: no new sessions" if self.is_draining else "draining is over")

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
            sessions=session_status(self._sessions, self._manager.state),
            counters={"requests": self.timings.counts.total()}
            | dict(self.counters)
            | dict(self._manager.state.counters),
            is_draining=self.is_draining,
            clients=client_status(self._config.clients, self._sessions),
            events=self._publisher.status() if self._publisher else None,
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


def _each_in_its_span(
    asked: Sequence[tuple[bytes, CheckpointRequest, Span]],
) -> Iterator[tuple[bytes, CheckpointRequest]]:
    """Each of them while its span is the current one, which ends then."""
    for identity, request, span in asked:
        with use_span(span, end_on_exit=True):
            yield identity, request
