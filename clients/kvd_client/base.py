"""What clients of threads and of tasks share: each operation once, as a generator.

`Client` and `AsyncClient` drive them; see `Operation`.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from typing import Any, Generic, TypeVar

from kvd.arena.host import MappedArena
from kvd.protocol.codec import TOKEN_BYTES, TokenIds, pack_tokens
from kvd.protocol.endpoint import client_endpoint
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
    MatchItem,
    MatchReply,
    MatchRequest,
    OpenReply,
    OpenRequest,
    ReleaseRequest,
    StatusReply,
    StatusRequest,
)
from kvd_client.lease import Binding, LeaseBase, ahead_of, pages_for
from kvd_client.session import (
    Answered,
    Call,
    Link,
    LinkChanged,
    Operation,
    Session,
    result_of,
    traceparent,
    wire,
)
from kvd_client.transport import Connection

R = TypeVar("R", bound=AnyReply)
L = TypeVar("L", bound=LeaseBase)

# A shorter silence says nothing of the daemon: one caller's tiny timeout is nobody else's outage.
SUSPECT_SECONDS = 0.2
MAX_NAME = 64


class ClientBase:
    """A client of one daemon, but for how it waits."""

    def __init__(
        self, endpoint: str | None = None, *, timeout: float = 2.0, name: str | None = None
    ) -> None:
        """Begin to attach, without waiting. Raises ConfigError for an endpoint that cannot be."""
        self.endpoint = endpoint or client_endpoint()
        self.timeout = timeout
        given = name or os.path.basename(sys.argv[0]) or "python"
        self.name = given.encode(errors="replace").decode(errors="replace")[:MAX_NAME]
        # What maps memory for this client: while it does, its pages could still be written.
        self._leases: weakref.WeakSet[LeaseBase] = weakref.WeakSet()
        self._namespaces: weakref.WeakSet[NamespaceBase[Any]] = weakref.WeakSet()
        self._connect()

    @property
    def attached(self) -> bool:
        """Whether the daemon answers."""
        return self.connection.core.link is Link.ATTACHED

    # --- for the shells ---

    def _attaching(self, seconds: float) -> Operation[bool]:
        deadline = time.monotonic() + seconds
        core = self.connection.core
        while not self.attached:
            if not (yield LinkChanged(core.link, deadline)):
                return False
        return True

    def _status(self) -> Operation[StatusReply]:
        deadline = self.deadline(None)
        request = StatusRequest(id=self.next_id(), deadline_ns=wire(deadline))
        return (yield from self._ask(Call(request), deadline, StatusReply))  # needs no session

    def _let_go(self) -> None:
        for lease in list(self._leases):
            lease.release_quietly()
        for namespace in list(self._namespaces):
            namespace.unbind()

    # --- for leases and namespaces ---

    @property
    def connection(self) -> Connection:
        if os.getpid() != self._pid:
            self._finalizer.detach()
            self._connect()
        return self._connection

    def deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self.timeout if timeout is None else timeout)

    def session(self, deadline: float) -> Operation[Session]:
        """The session, waited for while it is on its way; raises DaemonUnavailable."""
        connection = self.connection
        core = connection.core
        while (link := core.link) is not Link.DOWN:
            session = core.session
            if link is Link.ATTACHED and session is not None:
                return session
            left = deadline - time.monotonic()
            if not (yield LinkChanged(link, deadline)):
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
    ) -> Operation[R]:
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
        return (yield from self._ask(call, deadline, kind))

    def _ask(self, call: Call, deadline: float, kind: type[R]) -> Operation[R]:
        connection = self.connection
        started, heard = time.monotonic(), connection.core.num_received
        if not (yield Answered(call, deadline)):
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

    def linger(self, lease: LeaseBase) -> None:
        """Release a lease when the last writable view of its pages is gone."""
        if os.getpid() == self._pid:
            self._connection.linger(lease)

    def granted(self, lease: L) -> L:
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


class NamespaceBase(Generic[L]):
    """The KV of one model for one client; made by its `open`."""

    _lease_class: type[L]

    def __init__(self, client: ClientBase, identity: Identity, layout: Layout, salt: str) -> None:
        """Raises BadRequest for an identity or a layout that cannot be."""
        check_identity(identity)
        check_layout(layout)
        self.identity = identity
        self.layout = layout
        self.salt = salt
        self._client = client
        self._binding: Binding | None = None
        client._namespaces.add(self)

    def bind(self, session: Session, deadline: float) -> Operation[Binding]:
        """The namespace as this session knows it, its arena mapped."""
        if (bound := self._binding) is not None and bound.session is session:
            return bound
        request = OpenRequest(
            id=self._client.next_id(),
            epoch=session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            identity=self.identity,
            layout=self.layout,
            salt=self.salt,
        )
        reply = yield from self._client.request(session, request, deadline, OpenReply)
        try:
            arena = MappedArena(reply.arena_path, self.layout, reply.num_pages, session.lock)
        except OSError as error:  # a restart between the reply and here, or another file system
            raise DaemonUnavailable(f"the arena cannot be mapped: {error}") from error
        self._binding = Binding(session, reply.namespace, arena)
        return self._binding

    def unbind(self) -> None:
        """Let go of the mapping; views of it that live keep it, and the session's lock with it."""
        self._binding = None

    def _match(self, tokens: TokenIds, reserve_tokens: int, timeout: float | None) -> Operation[L]:
        packed = pack_tokens(tokens)
        deadline = self._client.deadline(timeout)
        while True:
            try:
                session = yield from self._client.session(deadline)
                binding = yield from self.bind(session, deadline)
                return (yield from self._lease(binding, packed, reserve_tokens, deadline))
            except (NotAttached, StaleEpoch, UnknownNamespace):
                continue  # the daemon was restarted: the session, or its want, ends this loop
            except (DaemonUnavailable, DeadlineExceeded):
                return self._lease_class(self._client, self.layout)

    def _lease(
        self, binding: Binding, tokens: bytes, reserve_tokens: int, deadline: float
    ) -> Operation[L]:
        core, session = self._client.connection.core, binding.session
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
            reply = yield from self._client.request(session, request, deadline, MatchReply, tokens)
            result = result_of(reply.results)
        except BaseException:
            # The lease may have been granted, or be so later: end it, whatever became of it.
            self._client.released(session, lease_id)
            raise
        return self._client.granted(
            self._lease_class(self._client, self.layout, binding, lease_id, result)
        )
