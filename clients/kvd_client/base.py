"""What clients of threads and of tasks share: each operation once, as a generator.

`Client` and `AsyncClient` drive them; see `Operation`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvd.protocol.codec import TOKEN_BYTES, TokenIds, pack_tokens
from kvd.protocol.endpoint import client_endpoint, is_remote
from kvd.protocol.errors import (
    BadRequest,
    DaemonUnavailable,
    DeadlineExceeded,
    LimitExceeded,
    NotAttached,
    StaleEpoch,
    UnknownNamespace,
)
from kvd.protocol.messages import (
    NO_REPLY,
    AnyReply,
    AnyRequest,
    CheckpointReply,
    CheckpointRequest,
    CloseRequest,
    ConfigReply,
    ConfigRequest,
    DiscardReply,
    DiscardRequest,
    DoneReply,
    DrainRequest,
    DropItem,
    DropReply,
    DropRequest,
    DropResult,
    ExplainReply,
    ExplainRequest,
    LeasesReply,
    LeasesRequest,
    PinItem,
    PinReply,
    PinRequest,
    PinResult,
    ReleaseRequest,
    ReloadReply,
    ReloadRequest,
    SequencesReply,
    SequencesRequest,
    StatusReply,
    StatusRequest,
    TreeReply,
    TreeRequest,
    UnpinReply,
    UnpinRequest,
    VerifyReply,
    VerifyRequest,
)
from kvd_client.asked import ExtraItems, check_tokens, pack_extras
from kvd_client.keys import load_keys
from kvd_client.session import (
    Answered,
    Call,
    Link,
    LinkChanged,
    Operation,
    Session,
    checked,
    result_of,
    traceparent,
    wire,
)
from kvd_client.transport import Connection

if TYPE_CHECKING:
    from kvd_client.binding import Binding
    from kvd_client.lease import LeaseBase
    from kvd_client.namespace import NamespaceBase

R = TypeVar("R", bound=AnyReply)
T = TypeVar("T")

# A shorter silence says nothing of the daemon: one caller's tiny timeout is nobody else's outage.
SUSPECT_SECONDS = 0.2
# So often a verification is asked how far it has come.
VERIFY_SECONDS = 0.2
MAX_NAME = 64
MAX_SECONDS = 86_400.0 * 365


class ClientBase:
    """A client of one daemon, but for how it waits."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout: float = 2.0,
        name: str | None = None,
        maps: bool = True,
        key: str | None = None,
        server_key: str | None = None,
    ) -> None:
        """Begin to attach, without waiting. Raises ConfigError for an endpoint that cannot be.

        A client that maps shares the daemon's memory. One that does not, or cannot, has private
        memory with copies of the blocks that it leases; so has one whose endpoint is tcp://, which
        needs the files of its own secret `key` and of the daemon's `server_key`.
        """
        if not isinstance(endpoint, str | None) or not isinstance(name, str | None):
            raise BadRequest("an endpoint and a client's name are strings")
        self.endpoint = endpoint or client_endpoint()
        self.timeout = check_timeout(timeout)
        self._keys = load_keys(key, server_key) if is_remote(self.endpoint) else None
        self._maps = maps and self._keys is None
        given = name or os.path.basename(sys.argv[0]) or "python"
        self.name = given.encode(errors="replace").decode(errors="replace")[:MAX_NAME]
        # What maps memory for this client: while it does, its pages could still be written.
        self._leases: weakref.WeakSet[LeaseBase] = weakref.WeakSet()
        self._namespaces: weakref.WeakSet[NamespaceBase] = weakref.WeakSet()
        self._connect()

    @property
    def attached(self) -> bool:
        """Whether the daemon answers."""
        return self.connection.core.link is Link.ATTACHED

    # --- for the shells ---

    def _attaching(self, seconds: float) -> Operation[bool]:
        deadline = self.deadline(seconds)
        core = self.connection.core
        while not self.attached:
            if not (yield LinkChanged(core.link, deadline)):
                return False
        return True

    def _status(self) -> Operation[StatusReply]:
        deadline = self.deadline(None)
        request = StatusRequest(id=self.next_id(), deadline_ns=wire(deadline), trace=traceparent())
        return (yield from self._ask(Call(request), deadline, StatusReply))  # needs no session

    def _leases_of_all(self, limit: int) -> Operation[LeasesReply]:
        deadline = self.deadline(None)
        request = LeasesRequest(
            id=self.next_id(), deadline_ns=wire(deadline), trace=traceparent(), limit=limit
        )
        return (yield from self._ask(Call(checked(request)), deadline, LeasesReply))

    def _checkpoint(self, timeout: float | None) -> Operation[int]:
        deadline = self.deadline(timeout)
        request = CheckpointRequest(
            id=self.next_id(), deadline_ns=wire(deadline), trace=traceparent()
        )
        try:
            reply = yield from self._ask(Call(request), deadline, CheckpointReply)
        except DeadlineExceeded as error:
            raise self._goes_on("saved") from error
        return reply.num_blocks

    def _tree(
        self, namespace: int, tokens: TokenIds, depth: int, limit: int
    ) -> Operation[TreeReply]:
        packed, deadline = pack_tokens(tokens), self.deadline(None)
        request = TreeRequest(
            id=self.next_id(),
            deadline_ns=wire(deadline),
            namespace=namespace,
            num_tokens=len(packed) // TOKEN_BYTES,
            depth=depth,
            limit=limit,
        )
        return (yield from self._ask(Call(checked(request), packed), deadline, TreeReply))

    def _explain(
        self, namespace: int, tokens: TokenIds, extras: ExtraItems
    ) -> Operation[ExplainReply]:
        packed, deadline = pack_tokens(tokens), self.deadline(None)
        count = len(packed) // TOKEN_BYTES
        request = ExplainRequest(
            id=self.next_id(),
            deadline_ns=wire(deadline),
            namespace=namespace,
            num_tokens=count,
            extras=pack_extras(extras, 0, count),
        )
        return (yield from self._ask(Call(checked(request), packed), deadline, ExplainReply))

    def _drain(self, *, undo: bool) -> Operation[None]:
        deadline = self.deadline(None)
        request = DrainRequest(id=self.next_id(), deadline_ns=wire(deadline), undo=undo)
        yield from self._ask(Call(request), deadline, DoneReply)

    def _goes_on(self, what: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"not all was {what} within the deadline; kvd on {self.endpoint} goes on with it, "
            "unless it does not answer"
        )

    def _verify(
        self, progress: Callable[[VerifyReply], None] | None, timeout: float | None
    ) -> Operation[VerifyReply]:
        deadline = self.deadline(timeout)
        reply = first = yield from self._ask_to_verify(start=True)
        while not reply.is_done:
            if progress is not None:
                progress(reply)
            if (now := time.monotonic()) >= deadline:
                raise self._goes_on("verified")
            yield LinkChanged(self.connection.core.link, min(deadline, now + VERIFY_SECONDS))
            reply = yield from self._ask_to_verify(start=False)
            if reply.epoch != first.epoch:
                raise DaemonUnavailable("kvd was restarted while it verified: verify again")
        return reply

    def _ask_to_verify(self, *, start: bool) -> Operation[VerifyReply]:
        deadline = self.deadline(None)
        request = VerifyRequest(
            id=self.next_id(), deadline_ns=wire(deadline), trace=traceparent(), start=start
        )
        return (yield from self._ask(Call(request), deadline, VerifyReply))

    def _config(self) -> Operation[ConfigReply]:
        deadline = self.deadline(None)
        request = ConfigRequest(id=self.next_id(), deadline_ns=wire(deadline))
        return (yield from self._ask(Call(request), deadline, ConfigReply))

    def _reload(self, timeout: float | None) -> Operation[ReloadReply]:
        deadline = self.deadline(timeout)
        request = ReloadRequest(id=self.next_id(), deadline_ns=wire(deadline))
        return (yield from self._ask(Call(request), deadline, ReloadReply))

    def _pin(
        self,
        namespace: int,
        tokens: TokenIds,
        seconds: float,
        owner: str | None,
        extras: ExtraItems,
        deadline: float,
    ) -> Operation[PinResult]:
        packed = pack_tokens(tokens)
        count = len(packed) // TOKEN_BYTES
        item = PinItem(namespace, count, seconds, owner or "", pack_extras(extras, 0, count))
        session = yield from self.session(deadline)
        request = PinRequest(
            id=self.next_id(),
            epoch=session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            items=(item,),
        )
        reply = yield from self.request(session, checked(request), deadline, PinReply, packed)
        return result_of(reply.results)

    def _unpin(self, owner: str | None, pins: Sequence[int]) -> Operation[int]:
        if not isinstance(pins, Sequence):
            raise BadRequest(f"{pins!r} is no sequence of pins")
        request = UnpinRequest(id=NO_REPLY, owner=owner or "", pins=tuple(pins))
        reply, _ = yield from self._ask_anew(request, self.deadline(None), UnpinReply)
        return reply.num_pins

    def _sequences(
        self, key: bytes | None, name: str | None, limit: int
    ) -> Operation[SequencesReply]:
        request = SequencesRequest(id=NO_REPLY, namespace_key=key, sequence=name, limit=limit)
        reply, _ = yield from self._ask_anew(request, self.deadline(None), SequencesReply)
        return reply

    def _discard(self, key: bytes, name: str, generation: int) -> Operation[bool]:
        request = DiscardRequest(
            id=NO_REPLY, namespace_key=key, sequence=name, generation=generation
        )
        reply, _ = yield from self._ask_anew(request, self.deadline(None), DiscardReply)
        return reply.was_there

    def _ask_anew(
        self, request: AnyRequest, deadline: float, kind: type[R]
    ) -> Operation[tuple[R, Sequence[memoryview]]]:
        """The answer, and frames behind it, to what no session owns: asked anew in the next one."""
        checked(request)
        while True:
            session = yield from self.session(deadline)
            with contextlib.suppress(NotAttached, StaleEpoch):
                call = self.call(
                    session,
                    msgspec.structs.replace(
                        request,
                        id=self.next_id(),
                        epoch=session.epoch,
                        deadline_ns=wire(deadline),
                        trace=traceparent(),
                    ),
                )
                return (yield from self._ask(call, deadline, kind)), call.rest

    def _drop_from(
        self, namespace: int, tokens: TokenIds, from_token: int, extras: ExtraItems, deadline: float
    ) -> Operation[DropResult]:
        block_size = (yield from self._block_size(namespace)) if check_tokens(from_token) else 1
        from_block = from_token // block_size
        return (yield from self._drop(namespace, tokens, from_block, extras, deadline))

    def _drop(
        self, namespace: int, tokens: TokenIds, from_block: int, extras: ExtraItems, deadline: float
    ) -> Operation[DropResult]:
        packed = pack_tokens(tokens)
        count = len(packed) // TOKEN_BYTES
        item = DropItem(namespace, count, from_block, pack_extras(extras, 0, count))
        session = yield from self.session(deadline)
        request = DropRequest(
            id=self.next_id(),
            epoch=session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            items=(item,),
        )
        reply = yield from self.request(session, checked(request), deadline, DropReply, packed)
        return result_of(reply.results)

    def _block_size(self, namespace: int) -> Operation[int]:
        status = yield from self._status()
        for each in status.namespaces:
            if each.namespace == namespace:
                return each.block_size
        raise UnknownNamespace(f"there is no namespace {namespace}")

    def _let_go(self) -> None:
        for lease in list(self._leases):
            lease.release_quietly()
        for namespace in list(self._namespaces):
            namespace.unbind()

    def _leave_others(self, session: Session) -> None:
        """There is a new session: leases of others are void, and shall keep no page out of use.

        Views of theirs that live keep their mapping, and with it the lock of their session.
        """
        for lease in _members(self._leases):
            lease.leave_others(session)
        for namespace in _members(self._namespaces):
            namespace.leave_others(session)

    # --- for leases and namespaces ---

    @property
    def connection(self) -> Connection:
        if os.getpid() != self._pid:
            self._finalizer.detach()
            self._connect()
        return self._connection

    def deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self.timeout if timeout is None else check_timeout(timeout))

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
        raw: bytes | None = None,
    ) -> Operation[R]:
        """Ask and wait for the answer; raises what the daemon answered, or DeadlineExceeded."""
        return (yield from self._ask(self.call(session, request, raw), deadline, kind))

    def call(self, session: Session, request: AnyRequest, raw: bytes | None = None) -> Call:
        """A request of a session that is there, and not too large."""
        core = self.connection.core
        if core.session is not session:
            raise StaleEpoch("the session of this lease or namespace is over")
        if core.link is Link.DOWN:
            raise DaemonUnavailable(f"kvd on {self.endpoint} does not answer")
        call = Call(request, raw)
        if (size := sum(map(len, call.frames))) > session.max_request_bytes:
            raise LimitExceeded(
                f"a request of {size} bytes; kvd takes {session.max_request_bytes} at most"
            )
        return call

    def _ask(self, call: Call, deadline: float, kind: type[R]) -> Operation[R]:
        self.connection.send(call)
        return (yield from self.answer(call, deadline, kind))

    def answer(self, call: Call, deadline: float, kind: type[R]) -> Operation[R]:
        """The answer to a call that was sent."""
        connection = self.connection
        started, heard = time.monotonic(), connection.core.num_received
        if not (yield Answered(call, deadline)):
            silence = time.monotonic() - started
            if silence >= SUSPECT_SECONDS and connection.core.num_received == heard:
                connection.suspect()
            why = connection.core.refusal or "is kvd running?"
            raise DeadlineExceeded(f"no answer from {self.endpoint} within the deadline: {why}")
        error, call.error = call.error, None
        if error is not None:
            try:
                raise error
            finally:
                # Else the error holds this frame, the frame the error, and both the arena.
                del error
        assert isinstance(call.reply, kind)
        return call.reply

    def post(self, session: Session, request: AnyRequest) -> None:
        """Send what needs no answer."""
        # A forked child has nothing of its parent's to end, and does not attach for it.
        if self.has(session):
            self._connection.post(Call(request))

    def has(self, session: Session) -> bool:
        """Whether this process has this session with the daemon."""
        return os.getpid() == self._pid and self._connection.core.session is session

    def linger(self, lease: LeaseBase) -> None:
        """Release a lease when the last writable view of its pages is gone."""
        if os.getpid() == self._pid:
            self._connection.linger(lease)

    def granted(self, lease: LeaseBase) -> None:
        self._leases.add(lease)

    def released(self, session: Session, lease_id: int) -> None:
        """End a lease; an answer is not waited for, since the next request comes behind it."""
        self._connection.core.living.pop(lease_id, None)
        self.post(session, ReleaseRequest(id=NO_REPLY, epoch=session.epoch, leases=(lease_id,)))

    def close_namespace(self, binding: Binding) -> None:
        """End what this client has of a namespace."""
        for lease in [each for each in self._leases if each.is_of(binding)]:
            lease.release()
        session = binding.session
        self.post(
            session,
            CloseRequest(id=NO_REPLY, epoch=session.epoch, namespace=binding.namespace),
        )

    def next_id(self) -> int:
        return self.connection.core.next_id()

    def _connect(self) -> None:
        self._pid = os.getpid()
        # By this the daemon knows a first save that is said again; a child's are its own.
        self.saver = secrets.randbits(62) | 1
        self._connection = Connection(
            self.endpoint,
            self.name,
            weakref.WeakMethod(self._leave_others),
            maps=self._maps,
            keys=self._keys,
        )
        self._finalizer = weakref.finalize(self, self._connection.close)


def _members(those: weakref.WeakSet[T]) -> list[T]:
    """The members of a set to which other threads may add."""
    while True:
        with contextlib.suppress(RuntimeError):  # it changed meanwhile
            return list(those)


def check_timeout(timeout: float) -> float:
    """Refuse what is no number of seconds (BadRequest); a negative one is over already."""
    if not isinstance(timeout, int | float) or not -MAX_SECONDS <= timeout <= MAX_SECONDS:
        raise BadRequest(f"{timeout!r} is no number of seconds up to {MAX_SECONDS:.0f}")
    return timeout
