"""Operators: what is asked without a session, from a request to its reply.

As with verbs, nearly every request is answered in the call, and one that must wait by a coroutine.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, assert_never, get_args

import anyio
from opentelemetry.trace import get_current_span

import kvd
from kvd.actors.inspection import explained, listed
from kvd.actors.status import (
    client_status,
    lease_status,
    namespace_status,
    pin_status,
    session_status,
)
from kvd.actors.verbs import Answer, Later, tokens_in
from kvd.protocol.errors import KvdError
from kvd.protocol.messages import (
    AnyRequest,
    CheckpointReply,
    CheckpointRequest,
    ConfigReply,
    ConfigRequest,
    DoneReply,
    DrainRequest,
    ExplainRequest,
    LeasesReply,
    LeasesRequest,
    ReloadReply,
    ReloadRequest,
    StatusReply,
    StatusRequest,
    TreeRequest,
    VerifyReply,
    VerifyRequest,
)

if TYPE_CHECKING:
    from collections import Counter

    from opentelemetry.trace import Span

    from kvd.actors.manager import Manager
    from kvd.actors.mover import Mover
    from kvd.actors.publisher import Publisher
    from kvd.actors.reload import Reloader
    from kvd.actors.scrubber import Scrubber
    from kvd.actors.sessions import SessionTable
    from kvd.config import Config
    from kvd.telemetry import Timings

logger = logging.getLogger(__name__)

# What needs no session.
OperatorRequest: TypeAlias = (
    StatusRequest
    | LeasesRequest
    | CheckpointRequest
    | VerifyRequest
    | ConfigRequest
    | ReloadRequest
    | TreeRequest
    | ExplainRequest
    | DrainRequest
)
WITHOUT_SESSION = frozenset(get_args(OperatorRequest))


def needs_no_session(request: AnyRequest) -> TypeGuard[OperatorRequest]:
    """By one look into a set, since it is asked of each request."""
    return type(request) in WITHOUT_SESSION


class Operators:
    """Serves what needs no session; `num_waiting` of these requests wait."""

    def __init__(
        self,
        config: Config,
        manager: Manager,
        mover: Mover,
        scrubber: Scrubber,
        sessions: SessionTable,
        reloader: Reloader,
        publisher: Publisher | None,
        epoch: int,
        counters: Counter[str],
        timings: Timings,
    ) -> None:
        self._config = config
        self._manager = manager
        self._scrubber = scrubber
        self._sessions = sessions
        self._reloader = reloader
        self._publisher = publisher
        self._epoch = epoch
        self._counters = counters
        self._timings = timings
        self._checkpoints = _Checkpoints(mover)
        self._started = time.monotonic()
        self.num_waiting = 0

    def configure(self, config: Config) -> None:
        """Go by another configuration."""
        self._config = config

    def serve(self, request: OperatorRequest, frames: Sequence[bytes]) -> Answer | Later:
        """Answer a request. Raises what it is refused with."""
        match request:
            case StatusRequest():
                return Answer(self._status(request))
            case LeasesRequest():
                return Answer(self._leases(request))
            case VerifyRequest():
                return Answer(self._verify(request))
            case TreeRequest():
                tokens = tokens_in(frames, request.num_tokens)
                return Answer(listed(self._manager, request, tokens, self._epoch))
            case ExplainRequest():
                tokens = tokens_in(frames, request.num_tokens)
                return Answer(explained(self._manager, request, tokens, self._epoch))
            case ConfigRequest():
                values = self._reloader.listed()
                return Answer(ConfigReply(id=request.id, epoch=self._epoch, values=values))
            case DrainRequest():
                self._set_draining(request)
                return Answer(DoneReply(id=request.id, epoch=self._epoch))
            case CheckpointRequest():
                return self._checkpoint(request)
            case ReloadRequest():
                return self._reload(request)
            case _:
                assert_never(request)

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
            counters={"requests": self._timings.counts.total()}
            | dict(self._counters)
            | dict(self._manager.state.counters),
            is_draining=self._sessions.is_draining,
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

    def _verify(self, request: VerifyRequest) -> VerifyReply:
        last = self._scrubber.verify(start=request.start)
        return VerifyReply(
            id=request.id, epoch=self._epoch, tiers=tuple(last.tiers), is_done=last.is_done
        )

    def _set_draining(self, request: DrainRequest) -> None:
        self._sessions.is_draining = not request.undo
        logger.info("draining is over" if request.undo else "draining: no new sessions")

    async def _checkpoint(self, request: CheckpointRequest) -> Answer:
        num_blocks = await self._checkpoints.next()
        return Answer(CheckpointReply(id=request.id, epoch=self._epoch, num_blocks=num_blocks))

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


@dataclass(eq=False, slots=True)
class _Checkpoint:
    """One that is still to be made or has a result, and the spans of the requests for it."""

    asked: list[Span] = field(default_factory=list)
    result: int | KvdError | None = None


class _Checkpoints:
    """Checkpoints one after the other, each for all who asked before it began."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._next = _Checkpoint()
        self._making = anyio.Lock()

    async def next(self) -> int:
        """Wait for the next one; how many blocks it copied. Raises what it failed with."""
        mine = self._next
        mine.asked.append(get_current_span())
        async with self._making:
            if mine.result is None:
                self._next = _Checkpoint()
                try:
                    mine.result = await self._mover.checkpoint(mine.asked)
                except KvdError as error:
                    mine.result = error
        if isinstance(mine.result, KvdError):
            raise mine.result
        return mine.result
