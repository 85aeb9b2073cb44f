"""Connection: the core on a DEALER socket, which is driven by whoever asks."""

from __future__ import annotations

import logging
import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import zmq

from kvd.protocol.endpoint import not_for_us, socket_path
from kvd.protocol.errors import DaemonUnavailable, Forbidden
from kvd.protocol.messages import DetachRequest
from kvd_client.session import Call, Core, Link, Session

if TYPE_CHECKING:
    from pathlib import Path

    from kvd_client.keys import Keys
    from kvd_client.lease import LeaseBase

logger = logging.getLogger(__name__)

OnAttach: TypeAlias = Callable[[], Callable[[Session], None] | None]

# While the daemon is away it is looked for this often, and a probe is given up after so long.
PROBE_SECONDS = 0.1
PROBE_PATIENCE_SECONDS = 1.0
DETACH_SECONDS = 0.5
# By TCP: a daemon that is silent for so long is gone, with its machine perhaps.
PING_MS, SILENCE_MS = 2_000, 10_000
# As long as poll can wait at once.
MAX_WAIT_SECONDS = 86_400.0

# As plain ints: pyzmq's own are enums, whose `&` costs more than asking the socket.
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_EVENTS, _RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)


def _nobody() -> None:
    return None


class _Waiter:
    """How a thread waits: on an eventfd of its own and, where it reads, on the sockets beside it.

    The eventfd is closed with the last reference: nobody writes to whose number it gets.
    """

    def __init__(self, idle: tuple[int, ...], reading: tuple[int, ...], thread: int) -> None:
        """Wait on `idle` in any case, and on `reading` where this thread reads."""
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = thread
        self._idle = _poller(self._fd, *idle)
        self._reading = _poller(self._fd, *idle, *reading)

    def __del__(self) -> None:
        os.close(self._fd)

    def wake(self) -> None:
        """End the wait, or the next one; any thread may, at any moment."""
        if threading.get_ident() != self._thread:  # which does not wait
            os.eventfd_write(self._fd, 1)

    def wait(self, seconds: float, *, reads: bool) -> list[int]:
        """The descriptors of sockets that have news."""
        poller = self._reading if reads else self._idle
        milliseconds = math.ceil(min(seconds, MAX_WAIT_SECONDS) * 1000)
        ready = [fd for fd, _ in poller.poll(milliseconds)]
        if self._fd in ready:
            os.eventfd_read(self._fd)
        return ready


class Connection:
    """A socket that belongs to nobody: each thread sends its calls itself and reads its answers.

    Concurrency. `_mutex` guards the socket, its monitor and the core. No answer is lost, since:

    - The descriptor of a ZeroMQ socket tells of changes alone, and any use of the socket can
      swallow one. So whoever has used it goes on, before it gives the mutex up, until there is
      nothing left to read, nor to send as far as that can be (`_pump`). While the mutex is free,
      all that came is handed out, and the descriptor tells of what comes.
    - An answer is handed out by setting it and then waking its thread by that thread's eventfd,
      which stays readable until the thread, once woken, clears it and looks again. So it does not
      matter whether the thread was about to wait, waited, or was the one who reads.
    - Of the threads that wait one, the `_reader`, waits on the sockets too. Each notes itself in
      `_waiting` before it tries to become it. Who leaves, answered or not, ceases to be it before
      it looks there and wakes another (`_pass_on`). So either that one became the reader, or it is
      found; and if it leaves instead of reading, it passes on in turn.

    An event loop that waits polls the socket's descriptor itself and pumps, beside any reader.

    The thread of the connection, the keeper, sends heartbeats and looks for the daemon. It watches
    the monitor always, the socket only while its own probe is under way and nobody else reads.
    The collector ends leases and clients wherever it runs, also under the mutex: `post` leaves its
    call to the keeper there, `linger` and `close` do not need it. Locks are taken by `with` alone:
    an interrupt between a call of `acquire` and the next line would leave them taken for ever.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        on_attach: OnAttach = _nobody,
        *,
        maps: bool,
        keys: Keys | None = None,
    ) -> None:
        """`on_attach` gives who is told of each session, if anybody: it must not wait or ask.

        With keys it is by TCP.
        """
        path = socket_path(endpoint) if keys is None else None
        self._on_attach = on_attach
        self.core = Core(name, self._link_changed, maps=maps)
        self._mutex = threading.RLock()
        self._reader: _Waiter | None = None
        self._outbox: deque[Call] = deque()
        self._waiting: dict[int, _Waiter] = {}
        self._watching: set[Callable[[], None]] = set()
        self._lingering: deque[LeaseBase] = deque()
        self._last_beat = 0.0
        self._closing = False
        self._closed = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        # Nothing is queued for a daemon that is not there: it would be answered to nobody.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._endpoint = endpoint
        self._is_remote = keys is not None
        self._refused_at = 0.0
        self._has_talked = False
        if keys is not None:
            self._socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server)
            self._socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.own.public)
            self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.own.secret)
            self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._socket.connect(endpoint)
        self.fileno: int = self._socket.fileno()
        self._monitor_fileno: int = self._monitor.fileno()
        self._waiters = threading.local()
        # It is woken also by what happens in its own thread: a collection, say.
        self._keeper = _Waiter((self._monitor_fileno,), (self.fileno,), thread=0)
        if path is not None:
            self._look_at(path)
        self._thread = threading.Thread(target=self._run, name="kvd-client", daemon=True)
        self._thread.start()

    def _look_at(self, path: Path) -> None:
        """Nobody need wait to find out that there is no daemon, or that it is not for this user."""
        if not os.path.exists(path):
            self.core.set_link(Link.DOWN)
        elif not os.access(path, os.W_OK):
            self.core.refused(not_for_us(f"ipc://{path}"))

    # --- for threads ---

    def wait(self, call: Call, deadline: float) -> bool:
        """Wait for the answer to a call that was sent; whether it came before the deadline."""
        waiter = self._waiter()
        call.wake = waiter.wake
        try:
            with self._mutex:
                self._waiting[call.id] = waiter
            while not call.is_answered and (left := deadline - time.monotonic()) > 0:
                self._wait(waiter, left)
        finally:
            with self._mutex:
                if self._reader is waiter:  # an interrupt came where it was to cease
                    self._reader = None
                self._waiting.pop(call.id, None)
                self._forget(call)
                self._pass_on()
        return call.is_answered

    def await_link(self, seen: Link, deadline: float) -> bool:
        """Wait until the link is another one than was seen; whether it is so by the deadline."""
        waiter = self._waiter()
        self.watch(waiter.wake)
        try:
            while self.core.link is seen and (left := deadline - time.monotonic()) > 0:
                waiter.wait(left, reads=False)
        finally:
            self.unwatch(waiter.wake)
        return self.core.link is not seen

    # --- for event loops ---

    def withdraw(self, call: Call) -> None:
        """Nobody waits for this call any more, sent or not."""
        with self._mutex:
            self._forget(call)

    def pump(self) -> None:
        """Hand out what came."""
        with self._mutex:
            self._pump()

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called at each change of the link, in whatever thread."""
        with self._mutex:
            self._watching.add(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        with self._mutex:
            self._watching.discard(wake)

    # --- for all ---

    def send(self, call: Call) -> None:
        """Send a call, whose `wake` is told of the answer. Raises DaemonUnavailable when closed."""
        with self._mutex:
            self._send(call)

    def post(self, call: Call) -> None:
        """Send what needs no answer, behind all that was sent before."""
        self._outbox.append(call)
        if self._mutex._is_owned():  # type: ignore[attr-defined]
            self._keeper.wake()
        else:
            self.pump()

    def suspect(self) -> None:
        """A deadline passed in silence: nobody else shall wait until the daemon speaks again."""
        with self._mutex:
            self.core.set_link(Link.DOWN)

    def linger(self, lease: LeaseBase) -> None:
        """Release a lease when the last writable view of its pages is gone."""
        if not self._closing:  # which ends every lease: one kept here would only keep the session
            self._lingering.append(lease)
            self._keeper.wake()

    def close(self) -> None:
        """Detach, as far as the daemon is there, and end the thread. Idempotent."""
        self._closing = True
        self._keeper.wake()
        if threading.current_thread() is not self._thread:  # which a last reference may go in
            self._thread.join()

    # --- waiting ---

    def _waiter(self) -> _Waiter:
        waiter: _Waiter | None = getattr(self._waiters, "own", None)
        if waiter is None:
            sockets = (self.fileno, self._monitor_fileno)
            waiter = self._waiters.own = _Waiter((), sockets, threading.get_ident())
        return waiter

    def _wait(self, waiter: _Waiter, seconds: float) -> None:
        """Wait until woken, and read meanwhile if nobody else does."""
        try:
            with self._mutex:
                if self._reader is None:
                    self._reader = waiter
            news = waiter.wait(seconds, reads=self._reader is waiter)
            if self._reader is waiter:
                with self._mutex:
                    self._pump()
                    if self._monitor_fileno in news:
                        self._watch_connection()
        finally:
            if self._reader is waiter:
                self._reader = None

    def _pass_on(self) -> None:
        """Wake one who waits, so that it reads, unless somebody does."""
        if self._reader is None:
            if self._waiting:
                next(iter(self._waiting.values())).wake()
            elif self.core.probing:
                self._keeper.wake()

    def _link_changed(self, link: Link) -> None:
        session, on_attach = self.core.session, self._on_attach()
        if link is Link.ATTACHED and session is not None and on_attach is not None:
            on_attach(session)
        self._keeper.wake()
        for wake in self._watching:
            wake()

    # --- the socket, under the mutex ---

    def _send(self, call: Call) -> None:
        if self._closed:
            raise DaemonUnavailable("the client is closed")
        if self._is_remote:
            call.count_deadline_from_now()
        self.core.send(call)
        self._outbox.append(call)
        self._pump()

    def _forget(self, call: Call) -> None:
        if not call.is_answered:
            self.core.forget(call)
            if call in self._outbox:
                self._outbox.remove(call)

    def _pump(self) -> None:
        """Send and receive until there is nothing left of either."""
        while not self._closed:
            events = int(self._socket.get(_EVENTS))
            if events & _POLLIN:
                self._receive()
            elif self._outbox and events & _POLLOUT:
                # In this order an interrupt sends it twice, which does no harm; never not at all.
                try:
                    self._socket.send_multipart(self._outbox[0].frames, zmq.NOBLOCK)
                except zmq.Again:
                    continue  # the daemon went since the socket was asked: now it says otherwise
                self._outbox.popleft()
            else:
                break

    def _receive(self) -> None:
        frame, rest = self._socket.recv(zmq.NOBLOCK), []
        while self._socket.get(_RCVMORE):
            rest.append(self._socket.recv(zmq.NOBLOCK, copy=False).buffer)
        self.core.receive(frame, rest)

    def _watch_connection(self) -> None:
        """A lost connection ends every call under way at once; a new one is tried at once."""
        while not self._closed and int(self._monitor.get(_EVENTS)) & _POLLIN:
            # Not by pyzmq's own parser, whose import would bring asyncio with it.
            frame = self._monitor.recv_multipart(zmq.NOBLOCK)[0]
            event = int.from_bytes(frame[:2], sys.byteorder)
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused_at = time.monotonic()
                self.core.refused(Forbidden("it does not know this client's key"))
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._is_remote:
                self.core.refused(
                    Forbidden("the handshake failed: is server_key that of this kvd?")
                )
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._has_talked = True
            if event == zmq.EVENT_DISCONNECTED:
                self._fail_all()
                if self._has_talked:  # else it was the handshake that was refused
                    self.core.refusal, self._has_talked = None, False
            if not self.core.probing:
                self._last_beat = 0.0
                self._keeper.wake()

    def _fail_all(self) -> None:
        """The connection is gone, and with it every call, sent or not."""
        self._outbox.clear()
        self.core.disconnected()

    # --- the keeper ---

    def _run(self) -> None:
        try:
            self._keep()
        except Exception:
            logger.exception("reason=internal the client's thread failed: kvd is not used any more")
        finally:
            self._finish()

    def _keep(self) -> None:
        while not self._closing:
            self._release_lingering()
            with self._mutex:
                self._pump()
                self._watch_connection()
                wait = self._beat(time.monotonic())
                if not (probing := self.core.probing):
                    self._pass_on()
            if probing:
                self._wait(self._keeper, wait)
            else:
                self._keeper.wait(wait, reads=False)

    def _beat(self, now: float) -> float:
        """Send a heartbeat, or look for the daemon, when it is time; seconds until the next."""
        core = self.core
        if self._refused_at and now - self._refused_at >= PROBE_PATIENCE_SECONDS:
            self._knock_again()
        up = core.link is Link.ATTACHED
        every = core.session.heartbeat_seconds if up and core.session else PROBE_SECONDS
        if (due := self._last_beat + every) > now:
            return due - now
        patience = 0.0 if up else PROBE_PATIENCE_SECONDS
        if not self._outbox and (not core.probing or now - self._last_beat >= patience):
            self._last_beat = now
            # Behind every match whose lease it does not list: both are sent under the mutex.
            probe = core.probe(int((now + PROBE_PATIENCE_SECONDS) * 1e9))
            probe.wake = self._keeper.wake
            self._send(probe)
        return every

    def _knock_again(self) -> None:
        """The daemon may know the key by now; by itself, ZeroMQ takes a refusal for good."""
        self._refused_at = 0.0
        self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)

    def _release_lingering(self) -> None:
        for _ in range(len(self._lingering)):
            lease = self._lingering.popleft()
            if not lease.release_quietly():
                self._lingering.append(lease)

    def _finish(self) -> None:
        if (session := self.core.session) is not None and self.core.link is Link.ATTACHED:
            detach = Call(DetachRequest(id=self.core.next_id(), epoch=session.epoch))
            self.send(detach)
            self.wait(detach, time.monotonic() + DETACH_SECONDS)
        with self._mutex:
            self._closed = True
            self._lingering.clear()
            self.core.closed()
            self._fail_all()
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
        self._context.term()


def _poller(*fds: int) -> select.poll:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return poller
