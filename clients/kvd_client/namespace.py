"""What namespaces of threads and of tasks share: each operation once, as a generator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvd.arena.host import MappedArena
from kvd.protocol.codec import TOKEN_BYTES, TokenIds
from kvd.protocol.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    KvdError,
    NotAttached,
    StaleEpoch,
    TierFailed,
    UnknownNamespace,
)
from kvd.protocol.keys import Identity, check_identity, namespace_key
from kvd.protocol.layout import Layout, check_layout, check_rows
from kvd.protocol.messages import (
    NO_REPLY,
    DoneReply,
    DropResult,
    MatchItem,
    MatchRequest,
    OpenReply,
    OpenRequest,
    PinResult,
    PrefetchItem,
    PrefetchRequest,
    ResumeReply,
    ResumeRequest,
)
from kvd_client.asked import ExtraItems, ahead_of, asked_for, check_tokens, pages_for
from kvd_client.binding import Binding
from kvd_client.lease import LeaseBase
from kvd_client.mirror import Mirror
from kvd_client.session import Operation, Session, checked, traceparent, wire

if TYPE_CHECKING:
    from kvd.arena.device import MappedDevice
    from kvd.arena.membership import SessionLock
    from kvd_client.base import ClientBase

logger = logging.getLogger(__name__)

T = TypeVar("T")
L = TypeVar("L", bound=LeaseBase)


@dataclass(frozen=True, slots=True)
class Resumed(Generic[L]):
    """A sequence as it was saved, and a lease of what is left of its KV.

    The KV of the first `lease.num_tokens` tokens is there; that of the others is to be computed.
    """

    tokens: NDArray[np.uint32]
    state: bytes
    generation: int
    lease: L


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
        asked = asked_for(tokens, extras)
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
        asked, deadline = asked_for(tokens, extras), self._client.deadline(timeout)

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
