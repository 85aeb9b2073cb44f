"""Client: the core on a plain DEALER socket, for engines that are synchronous."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from typing import Self, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvd.arena.host import MappedArena
from kvd.protocol.codec import TOKEN_BYTES, TokenIds, pack_tokens
from kvd.protocol.endpoint import client_endpoint, socket_path
from kvd.protocol.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    LimitExceeded,
    NotAttached,
    StaleEpoch,
    UnknownNamespace,
)
from kvd.protocol.keys import Identity, check_identity
from kvd.protocol.layout import Layout, check_layout
from kvd.protocol.messages import (
    NO_REPLY,
    AnyReply,
    AnyRequest,
    DetachRequest,
    MatchItem,
    MatchReply,
    MatchRequest,
    OpenReply,
    OpenRequest,
    ReleaseRequest,
    StatusReply,
    StatusRequest,
)
from kvd_client.lease import Binding, Lease, ahead_of, pages_for
from kvd_client.session import Call, Core, Link, Session, result_of, traceparent, wire

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=AnyReply)

# While the daemon is away it is looked for this often, and a probe is given up after so long.
PROBE_SECONDS = 0.1
PROBE_PATIENCE_SECONDS = 1.0
DETACH_SECONDS = 0.5
# A shorter silence says nothing of the daemon: one caller's tiny timeout is nobody else's outage.
SUSPECT_SECONDS = 0.2
MAX_NAME = 64


class _Wake:
    """An eventfd. It is closed with the last reference: nobody writes to whose number it gets."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.fd)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.fd)


class Connection:
    """The socket and the one thread that owns it; everybody else hands it calls.

    Concurrency: calls lie in a deque, whose append and popleft are whole operations; a write to
    `_wake` makes the thread look. An answer is handed over by the call's own lock. Any thread may
    declare the link down; the next reply that comes in declares it up again.
    """

    def __init__(self, endpoint: str, name: str) -> None:
        socket_path(endpoint)
        self.core = Core(name, self._link_changed)
        self.settled = threading.Event()  # the link is up or down, not on its way
        self.up = threading.Event()
        self._outbox: deque[Call] = deque()
        self._lingering: deque[Lease] = deque()
        self._wake = _Wake()
        self._last_beat = 0.0
        self._closing = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        # Nothing is queued for a daemon that is not there: it would be answered to nobody.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(endpoint)
        self._thread = threading.Thread(target=self._run, name="kvd-client", daemon=True)
        self._thread.start()

    def post(self, call: Call) -> None:
        """Have a call sent; its answer comes to it."""
        if self._closing:
            raise DaemonUnavailable("the client is closed")
        self._outbox.append(call)
        self._wake.set()

    def withdraw(self, call: Call) -> None:
        """Nobody waits for this call any more, sent or not."""
        with contextlib.suppress(ValueError):
            self._outbox.remove(call)
        self.core.forget(call)

    def suspect(self) -> None:
        """A deadline passed in silence: nobody else shall wait until the daemon speaks again."""
        self.core.set_link(Link.DOWN)
        self._wake.set()

    def linger(self, lease: Lease) -> None:
        """Release a lease when the last writable view of its pages is gone."""
        if not self._closing:  # which ends every lease: one kept here would only keep the session
            self._lingering.append(lease)

    def close(self) -> None:
        """Detach, as far as the daemon is there, and end the thread. Idempotent."""
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:  # which a last reference may go in
            self._thread.join()

    def _link_changed(self, link: Link) -> None:
        (self.up.set if link is Link.ATTACHED else self.up.clear)()
        (self.settled.clear if link is Link.ATTACHING else self.settled.set)()

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("reason=internal the client's thread failed: kvd is not used any more")
        finally:
            self._finish()

    def _serve(self) -> None:
        poller = select.poll()
        for fd in (self._wake.fd, self._socket.fileno(), self._monitor.fileno()):
            poller.register(fd, select.POLLIN)
        while not self._closing:
            wait = self._beat(time.monotonic())
            # The sockets' descriptors tell of changes alone, and sending can swallow one: read and
            # send until there is nothing left of either.
            while self._receive() or self._flush():
                pass
            ready = poller.poll(math.ceil(wait * 1000))
            if (self._wake.fd, select.POLLIN) in ready:
                self._wake.clear()
            self._watch_connection()

    def _beat(self, now: float) -> float:
        """Send a heartbeat, or look for the daemon, when it is time; seconds until the next."""
        core = self.core
        up = core.link is Link.ATTACHED
        every = core.session.heartbeat_seconds if up and core.session else PROBE_SECONDS
        if (due := self._last_beat + every) > now:
            return due - now
        patience = 0.0 if up else PROBE_PATIENCE_SECONDS
        if not self._outbox and (not core.probing or now - self._last_beat >= patience):
            self._release_lingering()
            self._last_beat = now
            # In front: a heartbeat behind a match would have to list its lease, which came later.
            self._outbox.appendleft(core.probe(int((now + PROBE_PATIENCE_SECONDS) * 1e9)))
        return every

    def _flush(self) -> bool:
        """Send what lies there; whether there was anything to send."""
        sent = False
        while self._outbox:
            try:
                call = self._outbox.popleft()
            except IndexError:  # withdrawn meanwhile
                break
            try:
                self.core.send(call)
                self._socket.send_multipart(call.frames, zmq.NOBLOCK)
            except zmq.Again:  # no connection yet, or not any more
                self.core.forget(call)
                self._outbox.appendleft(call)
                break
            sent = True
        return sent

    def _receive(self) -> bool:
        received = False
        while _readable(self._socket):
            self.core.receive(self._socket.recv_multipart(zmq.NOBLOCK))
            received = True
        return received

    def _watch_connection(self) -> None:
        """A lost connection ends every call under way at once; a new one is tried at once."""
        while _readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._fail_all()
            if not self.core.probing:
                self._last_beat = 0.0

    def _fail_all(self) -> None:
        """The connection is gone, and with it every call, sent or not."""
        while self._outbox:
            self.core.send(self._outbox.popleft())
        self.core.disconnected()

    def _release_lingering(self) -> None:
        for _ in range(len(self._lingering)):
            lease = self._lingering.popleft()
            if not lease.release_quietly():
                self._lingering.append(lease)

    def _finish(self) -> None:
        self._detach()
        self._lingering.clear()
        self.core.closed()
        self._fail_all()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _detach(self) -> None:
        """End the session, and wait a little until the daemon says that it is so."""
        if self.core.session is None or self.core.link is not Link.ATTACHED:
            return
        call = Call(DetachRequest(id=self.core.next_id(), epoch=self.core.session.epoch))
        self._outbox.append(call)
        deadline = time.monotonic() + DETACH_SECONDS
        while not call.wait(0) and (left := deadline - time.monotonic()) > 0:
            while self._receive() or self._flush():
                pass
            self._socket.poll(math.ceil(min(0.01, left) * 1000))


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message lies there; cheaper than the exception that an empty socket raises."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class Client:
    """A client of one daemon, for any number of threads.

    Every call ends within `timeout` seconds. When the daemon does not answer, a match is a miss at
    the cost of at most one such time, and then of nothing until the daemon is back: this client
    looks for it in the background and attaches again by itself. A forked child attaches anew.
    """

    def __init__(
        self, endpoint: str | None = None, *, timeout: float = 2.0, name: str | None = None
    ) -> None:
        """Begin to attach, without waiting. Raises ConfigError for an endpoint that cannot be."""
        self.endpoint = endpoint or client_endpoint()
        self.timeout = timeout
        given = name or os.path.basename(sys.argv[0]) or "python"
        self.name = given.encode(errors="replace").decode(errors="replace")[:MAX_NAME]
        # What maps memory for this client: while it does, its pages could still be written.
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._namespaces: weakref.WeakSet[Namespace] = weakref.WeakSet()
        self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def attached(self) -> bool:
        """Whether the daemon answers."""
        return self.connection.core.link is Link.ATTACHED

    def wait_attached(self, seconds: float) -> bool:
        """Wait until the daemon answers, for so many seconds at most."""
        return self.connection.up.wait(seconds)

    def open(self, identity: Identity, layout: Layout, salt: str = "") -> Namespace:
        """The namespace of a model's KV. It is bound to the daemon at each first use."""
        check_identity(identity)
        check_layout(layout)
        namespace = Namespace(self, identity, layout, salt)
        self._namespaces.add(namespace)
        return namespace

    def status(self) -> StatusReply:
        """How the daemon stands. Raises DaemonUnavailable or DeadlineExceeded."""
        deadline = time.monotonic() + self.timeout
        request = StatusRequest(id=self.next_id(), deadline_ns=wire(deadline))
        return self._ask(Call(request), deadline, StatusReply)  # needs no session

    def close(self) -> None:
        """Detach. Leases that are still open end; their pages are freed when no view is left.

        Other processes of the session must have let go of its pages before.
        """
        for lease in list(self._leases):
            lease.release_quietly()
        for namespace in list(self._namespaces):
            namespace.unbind()
        self._finalizer()

    # --- for leases and namespaces ---

    @property
    def connection(self) -> Connection:
        if os.getpid() != self._pid:
            self._finalizer.detach()
            self._connect()
        return self._connection

    def session(self, deadline: float) -> Session:
        """The session, waited for while it is on its way; raises DaemonUnavailable."""
        connection = self.connection
        core = connection.core
        while core.link is not Link.DOWN:
            session = core.session
            if core.link is Link.ATTACHED and session is not None:
                return session
            left = deadline - time.monotonic()
            if not connection.settled.wait(left):
                if left < SUSPECT_SECONDS:
                    raise DeadlineExceeded(f"{left} s were too short to attach")
                connection.suspect()
        why = f"refuses: {core.refusal}" if core.refusal else "does not answer"
        raise DaemonUnavailable(f"kvd on {self.endpoint} {why}")

    def request(
        self,
        session: Session,
        request: AnyRequest,
        deadline: float,
        kind: type[R],
        tokens: bytes | None = None,
    ) -> R:
        """Ask and wait for the answer; raises what the daemon answered, or DeadlineExceeded."""
        core = self.connection.core
        if core.session is not session:
            raise StaleEpoch("the session of this lease or namespace is over")
        if core.link is Link.DOWN:
            raise DaemonUnavailable(f"kvd on {self.endpoint} does not answer")
        call = Call(request, tokens)
        if (size := sum(map(len, call.frames))) > session.max_request_bytes:
            raise LimitExceeded(
                f"a request of {size} bytes; kvd takes {session.max_request_bytes} at most"
            )
        return self._ask(call, deadline, kind)

    def _ask(self, call: Call, deadline: float, kind: type[R]) -> R:
        connection = self.connection
        started, heard = time.monotonic(), connection.core.num_received
        connection.post(call)
        try:
            answered = call.wait(deadline - time.monotonic())
        finally:
            connection.withdraw(call)
        if not answered:
            silence = time.monotonic() - started
            if silence >= SUSPECT_SECONDS and connection.core.num_received == heard:
                connection.suspect()
            raise DeadlineExceeded(
                f"no answer from {self.endpoint} within the deadline: is kvd running?"
            )
        error, call.error = call.error, None
        if error is not None:
            try:
                raise error
            finally:
                del (
                    error
                )  # else the error holds this frame, the frame the error, and both the arena
        assert isinstance(call.reply, kind)
        return call.reply

    def post(self, session: Session, request: AnyRequest) -> None:
        """Send what needs no answer."""
        # A forked child has nothing of its parent's to end, and does not attach for it.
        if os.getpid() == self._pid and self._connection.core.session is session:
            self._connection.post(Call(request))

    def linger(self, lease: Lease) -> None:
        """Release a lease when the last writable view of its pages is gone."""
        if os.getpid() == self._pid:
            self._connection.linger(lease)

    def granted(self, lease: Lease) -> Lease:
        self._leases.add(lease)
        return lease

    def released(self, session: Session, lease_id: int) -> None:
        """End a lease; an answer is not waited for, since the next request comes behind it."""
        self._connection.core.living.pop(lease_id, None)
        self.post(session, ReleaseRequest(id=NO_REPLY, epoch=session.epoch, leases=(lease_id,)))

    def next_id(self) -> int:
        return self.connection.core.next_id()

    def _connect(self) -> None:
        self._pid = os.getpid()
        self._connection = Connection(self.endpoint, self.name)
        self._finalizer = weakref.finalize(self, self._connection.close)


class Namespace:
    """The KV of one model for one client; made by `Client.open`."""

    def __init__(self, client: Client, identity: Identity, layout: Layout, salt: str) -> None:
        self.client = client
        self.identity = identity
        self.layout = layout
        self.salt = salt
        self._binding: Binding | None = None

    def match(
        self, tokens: TokenIds, *, reserve_tokens: int = 0, timeout: float | None = None
    ) -> Lease:
        """Lease the longest cached prefix of `tokens`, with pages for `reserve_tokens` tokens more.

        An engine computes at least one token itself, so it matches `prompt[:-1]`. Pages that could
        not be had are said in the lease's `shortage`. Without a daemon the lease is a miss, whose
        `is_open` is False. Raises BadRequest, LimitExceeded.
        """
        packed = pack_tokens(tokens)
        deadline = time.monotonic() + (self.client.timeout if timeout is None else timeout)
        while True:
            try:
                session = self.client.session(deadline)
                binding = self.bind(session, deadline)
                return self._match(binding, packed, reserve_tokens, deadline)
            except (NotAttached, StaleEpoch, UnknownNamespace):
                continue  # the daemon was restarted: the session, or its want, ends this loop
            except (DaemonUnavailable, DeadlineExceeded):
                return Lease(self.client, self.layout)

    def bind(self, session: Session, deadline: float) -> Binding:
        """The namespace as this session knows it, its arena mapped."""
        if (bound := self._binding) is not None and bound.session is session:
            return bound
        request = OpenRequest(
            id=self.client.next_id(),
            epoch=session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            identity=self.identity,
            layout=self.layout,
            salt=self.salt,
        )
        reply = self.client.request(session, request, deadline, OpenReply)
        try:
            arena = MappedArena(reply.arena_path, self.layout, reply.num_pages, session.lock)
        except OSError as error:  # a restart between the reply and here, or another file system
            raise DaemonUnavailable(f"the arena cannot be mapped: {error}") from error
        self._binding = Binding(session, reply.namespace, arena)
        return self._binding

    def unbind(self) -> None:
        """Let go of the mapping; views of it that live keep it, and the session's lock with it."""
        self._binding = None

    def _match(
        self, binding: Binding, tokens: bytes, reserve_tokens: int, deadline: float
    ) -> Lease:
        core, session = self.client.connection.core, binding.session
        lease_id = core.next_lease_id()
        num_pages = pages_for(reserve_tokens, self.layout)
        item = MatchItem(
            binding.namespace,
            lease_id,
            len(tokens) // TOKEN_BYTES,
            reserve=num_pages,
            ahead=ahead_of(num_pages),
        )
        request = MatchRequest(
            id=core.next_id(),
            epoch=session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            items=(item,),
        )
        core.living[lease_id] = None
        try:
            reply = self.client.request(session, request, deadline, MatchReply, tokens)
            result = result_of(reply.results)
        except BaseException:
            # The lease may have been granted, or be so later: end it, whatever became of it.
            self.client.released(session, lease_id)
            raise
        return self.client.granted(Lease(self.client, self.layout, binding, lease_id, result))
