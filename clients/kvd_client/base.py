"""What clients of threads and of tasks share: each operation once, as a generator.

`Client` and `AsyncClient` drive them; see `Operation`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvd.arena.host import MappedArena
from kvd.protocol.codec import TOKEN_BYTES, TokenIds, pack_tokens
from kvd.protocol.endpoint import client_endpoint, is_remote
from kvd.protocol.errors import (
    BadRequest,
    DaemonUnavailable,
    DeadlineExceeded,
    KvdError,
    LimitExceeded,
    NotAttached,
    StaleEpoch,
    TierFailed,
    UnknownNamespace,
)
from kvd.protocol.keys import Identity, check_identity, namespace_key
from kvd.protocol.layout import Layout, check_layout, check_rows
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
    MatchItem,
    MatchRequest,
    OpenReply,
    OpenRequest,
    PinItem,
    PinReply,
    PinRequest,
    PinResult,
    PrefetchItem,
    PrefetchRequest,
    ReleaseRequest,
    ReloadReply,
    ReloadRequest,
    ResumeReply,
    ResumeRequest,
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
from kvd_client.asked import Asked, ahead_of, check_tokens, pack_extras, pages_for
from kvd_client.binding import Binding
from kvd_client.keys import load_keys
from kvd_client.lease import LeaseBase
from kvd_client.mirror import Mirror
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
    from kvd.arena.device import MappedDevice
    from kvd.arena.membership import SessionLock

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=AnyReply)
T = TypeVar("T")
L = TypeVar("L", bound=LeaseBase)

# What else identifies a position: 32 bytes, a digest of the image there, say.
ExtraItems: TypeAlias = Sequence[tuple[int, bytes]]

# A shorter silence says nothing of the daemon: one caller's tiny timeout is nobody else's outage.
SUSPECT_SECONDS = 0.2
# So often a verification is asked how far it has come.
VERIFY_SECONDS = 0.2
MAX_NAME = 64
MAX_SECONDS = 86_400.0 * 365


@dataclass(frozen=True, slots=True)
class Resumed(Generic[L]):
    """A sequence as it was saved, and a lease of what is left of its KV.

    The KV of the first `lease.num_tokens` tokens is there; that of the others is to be computed.
    """

    tokens: NDArray[np.uint32]
    state: bytes
    generation: int
    lease: L


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


class NamespaceBase:
    """The KV of one model for one client; made by its `open`."""

    def __init__(
        self, client: ClientBase, identity: Identity, layout: Layout, salt: str, *, extras: bool
    ) -> None:
        """Raises BadRequest for what cannot be."""
        # As it will be asked, so that what cannot be asked is refused here.
        self._open = checked(
            OpenRequest(id=NO_REPLY, identity=identity, layout=layout, salt=salt, extras=extras)
        )
        check_identity(identity)
        check_layout(layout)
        self.identity = identity
        self.layout = layout
        self.salt = salt
        self.extras = extras
        self._client = client
        self._key = namespace_key(identity, layout, salt, extras=extras)
        self._binding: Binding | None = None
        client._namespaces.add(self)

    def close(self) -> None:
        """Have the daemon close it: this client's leases of it end, their pages are let go of.

        It is opened anew at its next use. Raises PagesInUse while a writable view of them lives.
        """
        binding, self._binding = self._binding, None
        if binding is not None:
            self._client.close_namespace(binding)

    def leave_others(self, session: Session) -> None:
        """Let go of the mapping for any other session."""
        if (binding := self._binding) is not None and binding.session is not session:
            self._binding = None
            binding.end()

    def unbind(self) -> None:
        """Let go of the mapping; views of it that live keep it, and the session's lock with it."""
        self._binding = None

    def _bound(self, deadline: float, use: Callable[[Binding], Operation[T]]) -> Operation[T]:
        """Use the namespace as the present session knows it, its arena mapped."""
        while True:
            try:
                session = yield from self._client.session(deadline)
                binding = yield from self._bind(session, deadline)
                return (yield from use(binding))
            except (NotAttached, StaleEpoch, UnknownNamespace):
                # The daemon was restarted, or the namespace closed: the session, or its want, ends
                # this loop.
                self._binding = None

    def _bind(self, session: Session, deadline: float) -> Operation[Binding]:
        if (bound := self._binding) is not None and bound.session is session:
            return bound
        request = msgspec.structs.replace(
            self._open,
            id=self._client.next_id(),
            epoch=session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            maps=session.lock is not None,
        )
        reply = yield from self._client.request(session, request, deadline, OpenReply)
        self._binding = Binding(session, reply.namespace, self._arena(session, reply))
        return self._binding

    def _arena(self, session: Session, reply: OpenReply) -> MappedArena | MappedDevice | Mirror:
        if (lock := session.lock) is not None:
            try:
                return _mapped(reply, self.layout, lock)
            # A restart meanwhile, no right to it, or no torch.
            except (OSError, KvdError, ImportError) as error:
                logger.warning("the arena cannot be mapped; blocks are copied instead: %s", error)
        return Mirror(self.layout, reply.num_pages)

    def _match(
        self,
        lease: LeaseBase,
        tokens: TokenIds,
        reserve_tokens: int,
        exact_tail: bool,
        extras: ExtraItems,
        timeout: float | None,
    ) -> Operation[None]:
        """Have a lease, which is a miss so far, stand for the longest cached prefix of tokens.

        What cannot be is refused at once, before the operation begins.
        """
        if exact_tail := bool(exact_tail):
            check_rows(self.layout)
        asked = _asked(tokens, extras)
        num_pages = pages_for(reserve_tokens, self.layout)
        # The rows of a tail need a page of the lease's own, the first of a group.
        own = self.layout.group_pages * exact_tail
        ahead = ahead_of(num_pages, self.layout) if num_pages else own
        deadline = self._client.deadline(timeout)

        def use(binding: Binding) -> Operation[None]:
            def request(lease_id: int) -> MatchRequest:
                item = MatchItem(
                    binding.namespace,
                    lease_id,
                    asked.num_tokens,
                    reserve=num_pages,
                    ahead=ahead,
                    exact_tail=exact_tail,
                    extras=asked.extras,
                )
                return MatchRequest(
                    id=self._client.next_id(),
                    epoch=binding.session.epoch,
                    deadline_ns=wire(deadline),
                    trace=traceparent(),
                    items=(item,),
                )

            return lease.begin(binding, request, deadline, asked)

        return self._unless_away(self._bound(deadline, use))

    def _prefetch(
        self, tokens: TokenIds, extras: ExtraItems, timeout: float | None
    ) -> Operation[None]:
        asked, deadline = _asked(tokens, extras), self._client.deadline(timeout)

        def use(binding: Binding) -> Operation[None]:
            item = PrefetchItem(binding.namespace, asked.num_tokens, asked.extras)
            request = PrefetchRequest(
                id=self._client.next_id(),
                epoch=binding.session.epoch,
                deadline_ns=wire(deadline),
                trace=traceparent(),
                items=(item,),
            )
            yield from self._client.request(
                binding.session, request, deadline, DoneReply, asked.tokens
            )

        return self._unless_away(self._bound(deadline, use))

    def _unless_away(self, operation: Operation[None]) -> Operation[None]:
        try:
            yield from operation
        except (DaemonUnavailable, DeadlineExceeded):
            pass
        except TierFailed as error:  # it has no memory to make an arena of
            logger.warning("going on without kvd: %s", error)

    def _pin(
        self,
        tokens: TokenIds,
        seconds: float,
        owner: str | None,
        extras: ExtraItems,
        timeout: float | None,
    ) -> Operation[PinResult]:
        deadline = self._client.deadline(timeout)
        return (
            yield from self._bound(
                deadline,
                lambda bound: self._client._pin(
                    bound.namespace, tokens, seconds, owner, extras, deadline
                ),
            )
        )

    def _drop(
        self, tokens: TokenIds, from_token: int, extras: ExtraItems, timeout: float | None
    ) -> Operation[DropResult]:
        deadline = self._client.deadline(timeout)
        from_block = check_tokens(from_token) // self.layout.block_size
        return (
            yield from self._bound(
                deadline,
                lambda bound: self._client._drop(
                    bound.namespace, tokens, from_block, extras, deadline
                ),
            )
        )

    def _resume(
        self, lease: L, sequence: str, reserve_tokens: int, timeout: float | None
    ) -> Operation[Resumed[L]]:
        """Have a lease, which is a miss so far, stand for what is left of a sequence."""
        deadline = self._client.deadline(timeout)
        request = ResumeRequest(id=NO_REPLY, namespace_key=self._key, sequence=sequence)
        check_tokens(check_tokens(reserve_tokens) + self.layout.block_size)
        # The namespace is open before: what is refused leaves the sequence to its owner.
        reply, (tokens, tail) = yield from self._bound(
            deadline, lambda _: self._client._ask_anew(request, deadline, ResumeReply)
        )
        num_tokens = len(tokens) // TOKEN_BYTES
        reserve_tokens += num_tokens % self.layout.block_size
        exact_tail, left = not self.layout.is_opaque, deadline - time.monotonic()
        yield from self._match(lease, tokens, reserve_tokens, exact_tail, reply.extras, left)
        lease.fill_tail(tail, num_tokens)
        return Resumed(np.array(tokens.cast("I")), reply.state, reply.generation, lease)


def _mapped(reply: OpenReply, layout: Layout, lock: SessionLock) -> MappedArena | MappedDevice:
    where = reply.arena_path, layout, reply.num_pages, lock
    if reply.device is None:
        return MappedArena(*where)
    from kvd.arena.device import MappedDevice  # which needs torch

    return MappedDevice(reply.device, *where)


def _asked(tokens: TokenIds, extras: ExtraItems) -> Asked:
    packed = pack_tokens(tokens)
    return Asked(packed, pack_extras(extras, 0, len(packed) // TOKEN_BYTES))


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
