"""Verbs: what a session may ask, item by item, from a request to its reply.

Nearly every request is answered in the call; one that must wait is answered by a coroutine, which
the router runs as a task of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import anyio
from msgspec.structs import replace

from kvd.actors import copies
from kvd.arena.membership import is_held
from kvd.protocol.codec import TOKEN_BYTES, failure
from kvd.protocol.errors import (
    BadRequest,
    Forbidden,
    KvdError,
    LimitExceeded,
    NotAttached,
    OutOfPages,
    SessionLockMissing,
    UnknownNamespace,
    UnknownSequence,
    Unsupported,
)
from kvd.protocol.messages import (
    MAX_PIECE_BYTES,
    AbortRequest,
    AnyReply,
    AnyRequest,
    CloseRequest,
    CommitReply,
    CommitRequest,
    DetachRequest,
    DiscardReply,
    DiscardRequest,
    DoneReply,
    DropItem,
    DropReply,
    DropRequest,
    DropResult,
    ExtendItem,
    ExtendRequest,
    Failure,
    ForkItem,
    ForkRequest,
    HeartbeatRequest,
    LoadReply,
    LoadRequest,
    MatchItem,
    MatchReply,
    MatchRequest,
    MatchResult,
    OpenReply,
    OpenRequest,
    PinItem,
    PinReply,
    PinRequest,
    PinResult,
    PrefetchRequest,
    ReleaseRequest,
    ReserveItem,
    ReserveReply,
    ReserveRequest,
    ReserveResult,
    ResumeReply,
    ResumeRequest,
    SaveReply,
    SaveRequest,
    SequencesReply,
    SequencesRequest,
    SequenceStatus,
    Shortage,
    StoreRequest,
    UnpinReply,
    UnpinRequest,
)
from kvd.telemetry import RESERVE, child_span, refused

if TYPE_CHECKING:
    from collections import Counter

    from kvd.actors.manager import Manager, Match
    from kvd.actors.mover import Mover
    from kvd.actors.sequences import Sequences
    from kvd.actors.sessions import Session, SessionTable
    from kvd.cache.leases import Lease
    from kvd.cache.memory import Namespace
    from kvd.config import Config, LimitConfig

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply and frames behind it; where they are page memory, `lease` is held meanwhile."""

    reply: AnyReply
    frames: Sequence[bytes | memoryview] = ()
    lease: Lease | None = None


Later: TypeAlias = Coroutine[Any, Any, Answer]


@dataclass(frozen=True, slots=True)
class _Wait:
    """In the place of a result: pages that must be waited for, for a match or for themselves."""

    lease: Lease
    start: int
    stop: int
    ahead: int
    match: MatchResult | None = None


@dataclass(frozen=True, slots=True)
class _Lack:
    """In the place of a result: a match of which more can be had."""

    session: Session
    item: MatchItem | ExtendItem
    tokens: bytes
    match: Match


class Verbs:
    """Serves the requests of attached sessions."""

    def __init__(
        self,
        limits: LimitConfig,
        manager: Manager,
        mover: Mover,
        sequences: Sequences,
        sessions: SessionTable,
        epoch: int,
        counters: Counter[str],
    ) -> None:
        self._limits = limits
        self._manager = manager
        self._mover = mover
        self._sequences = sequences
        self._sessions = sessions
        self._epoch = epoch
        self._counters = counters

    def configure(self, config: Config) -> None:
        """Go by another configuration."""
        self._limits = config.limits

    def serve(
        self, session: Session, request: AnyRequest, frames: Sequence[bytes]
    ) -> Answer | Later:
        """Answer a request. Raises what the whole of it is refused with."""
        match request:
            case MatchRequest():
                return self._match(session, request, frames)
            case ForkRequest():
                return self._fork(session, request)
            case ExtendRequest():
                return self._extend(session, request, frames)
            case PrefetchRequest():
                return self._prefetch(session, request, frames)
            case ReserveRequest():
                return self._reserve(session, request)
            case CommitRequest():
                return self._commit(session, request, frames)
            case LoadRequest():
                return self._load(session, request)
            case StoreRequest():
                return self._store(session, request, frames)
            case PinRequest():
                return self._pin(session, request, frames)
            case DropRequest():
                return self._drop(session, request, frames)
            case SaveRequest():
                return self._save(session, request, frames)
            case ResumeRequest():
                return self._resume(session, request)
            case DiscardRequest():
                return self._discard(session, request)
            case SequencesRequest():
                return self._list(session, request)
            case OpenRequest():
                return self._open(session, request)
            case UnpinRequest():
                self._check_batch(request.pins)
                owner = self._owner(session, request)
                count = self._manager.unpin(owner, request.pins)
                return Answer(UnpinReply(id=request.id, epoch=self._epoch, num_pins=count))
            case HeartbeatRequest():
                # What it held before a reload it may hold on.
                held = self._manager.state.leases.count(session.id)
                if len(request.leases) > (most := max(self._limits.session_leases, held)):
                    raise LimitExceeded(
                        f"a session may hold {most} leases, and names {len(request.leases)}"
                    )
                self._manager.release_others(session.id, request.leases)
            case ReleaseRequest():
                self._check_batch(request.leases)
                self._manager.release(session.id, request.leases, request.keep_blocks)
            case AbortRequest():
                self._check_batch(request.leases)
                self._manager.abort(session.id, request.leases)
            case CloseRequest():
                self._manager.close_namespace(session.id, request.namespace)
            case DetachRequest():
                pass  # the router ends the session
            case _:
                raise BadRequest(f"{type(request).__name__} is not served here")
        return self._done(request)

    def _done(self, request: AnyRequest) -> Answer:
        return Answer(DoneReply(id=request.id, epoch=self._epoch))

    # --- namespaces ---

    async def _open(self, session: Session, request: OpenRequest) -> Answer:
        if request.group or request.keyed:
            raise Unsupported("groups and keyed namespaces are not served by this version")
        if not session.access.may_open(request.identity.model, request.salt):
            raise Forbidden(f"namespaces of this model and salt are not for {session.client}")
        lock = self._sessions.path(session.id)
        if request.maps and not await anyio.to_thread.run_sync(is_held, lock):
            raise SessionLockMissing(f"take a shared lock on {lock} before mapping an arena")
        session.maps = session.maps or request.maps
        opened = await self._manager.open(
            session.id, request.identity, request.layout, request.salt, extras=request.extras
        )
        if self._sessions.find(session.identity) is not session:  # it ended meanwhile
            self._manager.close_namespace(session.id, opened.namespace.id)
            raise NotAttached("the session ended while it opened a namespace")
        return Answer(
            OpenReply(
                id=request.id,
                epoch=self._epoch,
                namespace=opened.namespace.id,
                arena_path=str(opened.arena.path),
                num_pages=opened.arena.num_pages,
                device=opened.arena.device,
            )
        )

    # --- leases ---

    def _match(
        self, session: Session, request: MatchRequest, frames: Sequence[bytes]
    ) -> Answer | Later:
        def match(item: MatchItem, tokens: bytes) -> MatchResult | _Wait | _Lack:
            match = self._manager.match(session.id, item, tokens)
            if match.lacks_more:
                return _Lack(session, item, tokens, match)
            return self._with_pages(item, match.lease, self._manager.matched(match))

        results = [self._tried(match, *each) for each in self._with_tokens(request.items, frames)]
        return self._answered(MatchReply, request, results)

    def _extend(
        self, session: Session, request: ExtendRequest, frames: Sequence[bytes]
    ) -> Answer | Later:
        def extend(item: ExtendItem, tokens: bytes) -> MatchResult | _Lack:
            match = self._manager.extend(session.id, item, tokens)
            if match.lacks_more:
                return _Lack(session, item, tokens, match)
            return self._manager.matched(match)

        results = [self._tried(extend, *each) for each in self._with_tokens(request.items, frames)]
        return self._answered(MatchReply, request, results)

    def _prefetch(
        self, session: Session, request: PrefetchRequest, frames: Sequence[bytes]
    ) -> Answer:
        for item, tokens in self._with_tokens(request.items, frames):
            self._mover.prefetch(*self._manager.named(session.id, item, tokens))
        return self._done(request)

    def _fork(self, session: Session, request: ForkRequest) -> Answer | Later:
        def fork(item: ForkItem) -> MatchResult | _Wait:
            return self._with_pages(item, *self._manager.fork(session.id, item))

        self._check_batch(request.items)
        results = [self._tried(fork, item) for item in request.items]
        return self._answered(MatchReply, request, results)

    def _with_pages(
        self, item: MatchItem | ForkItem, lease: Lease, result: MatchResult
    ) -> MatchResult | _Wait:
        """The result with pages behind the leased blocks, if some are wanted and to be had."""
        if not item.reserve and not item.ahead:
            return result
        try:
            runs = self._manager.reserves.now(lease, 0, item.reserve, item.ahead)
        except OutOfPages as error:
            return replace(result, shortage=Shortage(**error.details))
        if runs is None:
            return _Wait(lease, 0, item.reserve, item.ahead, result)
        return replace(result, reserved=runs)

    def _reserve(self, session: Session, request: ReserveRequest) -> Answer | Later:
        def reserve(item: ReserveItem) -> ReserveResult | _Wait:
            lease = self._manager.lease(session.id, item.lease)
            runs = self._manager.reserves.now(lease, item.start, item.stop, item.ahead)
            if runs is None:
                return _Wait(lease, item.start, item.stop, item.ahead)
            return ReserveResult(runs)

        self._check_batch(request.items)
        results = [self._tried(reserve, item) for item in request.items]
        return self._answered(ReserveReply, request, results)

    def _commit(
        self, session: Session, request: CommitRequest, frames: Sequence[bytes]
    ) -> Answer | Later:
        items = list(self._with_tokens(request.items, frames))
        waits = [self._tried(self._manager.unverified, session.id, *each) for each in items]
        if any(isinstance(wait, tuple) for wait in waits):
            return self._commit_later(session, request, items, waits)
        return self._committed(session, request, items)

    async def _commit_later(
        self, session: Session, request: CommitRequest, items: list[Any], waits: list[Any]
    ) -> Answer:
        """Blocks that an earlier epoch left are verified before they take the place of others."""
        end = time.monotonic() + self._seconds_left(request)
        for wait in waits:
            if isinstance(wait, tuple):
                seconds = max(0.0, end - time.monotonic())
                space, rows = wait
                await self._mover.prepare(space, rows, seconds, promote=False)
        return self._committed(session, request, items)

    def _committed(self, session: Session, request: CommitRequest, items: list[Any]) -> Answer:
        results = [self._tried(self._manager.commit, session.id, *each) for each in items]
        return Answer(CommitReply(id=request.id, epoch=self._epoch, results=tuple(results)))

    def _answered(
        self, kind: Callable[..., AnyReply], request: AnyRequest, results: Sequence[Any]
    ) -> Answer | Later:
        if any(isinstance(result, _Wait | _Lack) for result in results):
            return self._answered_later(kind, request, results)
        return Answer(kind(id=request.id, epoch=self._epoch, results=tuple(results)))

    async def _answered_later(
        self, kind: Callable[..., AnyReply], request: AnyRequest, results: Sequence[Any]
    ) -> Answer:
        end = time.monotonic() + self._seconds_left(request)
        settled = []
        for result in results:
            if isinstance(result, _Lack):
                result = await self._brought(result, end)
            if isinstance(result, _Wait):
                result = await self._settled(result, end)
            settled.append(result)
        return Answer(kind(id=request.id, epoch=self._epoch, results=tuple(settled)))

    async def _brought(self, lack: _Lack, end: float) -> MatchResult | _Wait | Failure:
        """A match with what came until then; what is still on its way goes on without it."""
        space, rows = lack.match.lease.namespace, lack.match.rows
        came = await self._mover.prepare(space, rows, max(0.0, end - time.monotonic()))
        item = lack.item
        try:
            match = self._manager.extend(
                lack.session.id,
                item,
                lack.tokens,
                exact_tail=isinstance(item, MatchItem) and item.exact_tail,
            )
        except KvdError as error:
            return self._failure(error)
        if match.lacks_more:
            self._mover.prefetch(space, rows)
        result = self._manager.matched(match, came)
        return (
            self._with_pages(item, match.lease, result) if isinstance(item, MatchItem) else result
        )

    async def _settled(self, wait: _Wait, end: float) -> MatchResult | ReserveResult | Failure:
        """Pages, in their turn and until then; a match is granted without them too."""
        seconds = max(0.0, end - time.monotonic())
        try:
            with child_span(RESERVE):
                runs = await self._manager.reserves.in_turn(
                    wait.lease, wait.start, wait.stop, wait.ahead, seconds
                )
        except OutOfPages as error:
            if wait.match is None:
                return self._failure(error)
            return replace(wait.match, shortage=Shortage(**error.details))
        except KvdError as error:
            return self._failure(error)
        return replace(wait.match, reserved=runs) if wait.match else ReserveResult(runs)

    def _seconds_left(self, request: AnyRequest) -> float:
        if not request.deadline_ns:
            return self._limits.wait_seconds
        left = (request.deadline_ns - time.monotonic_ns()) / 1e9
        return max(0.0, min(left, self._limits.wait_seconds))

    # --- copies for who cannot map ---

    def _load(self, session: Session, request: LoadRequest) -> Answer:
        lease = self._manager.lease(session.id, request.lease)
        memory = self._manager.memory(lease)
        frames = copies.load(memory, lease, request.pages, self._slices(lease, request))
        return Answer(LoadReply(id=request.id, epoch=self._epoch), frames, lease)

    def _store(self, session: Session, request: StoreRequest, frames: Sequence[bytes]) -> Answer:
        lease = self._manager.lease(session.id, request.lease)
        slices = self._slices(lease, request)
        data = memoryview(frames[0] if frames else b"")
        copies.store(self._manager.memory(lease), lease, request.pages, slices, data)
        return self._done(request)

    def _slices(self, lease: Lease, request: LoadRequest | StoreRequest) -> range:
        """The slices of a piece; refuses one that is too large for a message."""
        layout = lease.namespace.arena.layout
        slices = range(request.first_slice, request.first_slice + request.num_slices)
        if slices.stop > layout.num_slices:
            raise BadRequest(f"slices up to {slices.stop} of {layout.num_slices}")
        num_slices = len(slices) * sum(run.count for run in request.pages)
        if num_slices > max(1, MAX_PIECE_BYTES // layout.slice_bytes):
            raise LimitExceeded(
                f"{num_slices * layout.slice_bytes} bytes in a piece; at most {MAX_PIECE_BYTES}"
            )
        return slices

    # --- pins and drops ---

    def _pin(self, session: Session, request: PinRequest, frames: Sequence[bytes]) -> Answer:
        def pin(item: PinItem, tokens: bytes) -> PinResult:
            self._check_namespace(session, item.namespace)
            return self._manager.pin(item, self._owner(session, item), tokens)

        results = [self._tried(pin, *each) for each in self._with_tokens(request.items, frames)]
        return Answer(PinReply(id=request.id, epoch=self._epoch, results=tuple(results)))

    def _drop(self, session: Session, request: DropRequest, frames: Sequence[bytes]) -> Later:
        def drop(item: DropItem, tokens: bytes) -> DropResult:
            self._check_namespace(session, item.namespace)
            return self._manager.drop(item, tokens)

        results = [self._tried(drop, *each) for each in self._with_tokens(request.items, frames)]
        return self._dropped(request, results)

    async def _dropped(self, request: DropRequest, results: list[Any]) -> Answer:
        """Answered when it is so for good."""
        await self._manager.settle()
        return Answer(DropReply(id=request.id, epoch=self._epoch, results=tuple(results)))

    def _owner(self, session: Session, named: PinItem | UnpinRequest) -> str:
        """Whose pins are meant: only an operator's may be another's."""
        if named.owner not in ("", session.client) and not session.access.is_operator:
            raise Forbidden("the pins of others are the operators' affair")
        return named.owner or session.client

    def _check_namespace(self, session: Session, number: int) -> None:
        """Of a namespace that it may not open, a client learns nothing, as if there were none."""
        space = self._manager.state.namespaces.get(number)
        if space is not None and not session.access.may_open(space.identity.model, space.salt):
            raise UnknownNamespace(f"there is no namespace {number}")

    # --- sequences ---

    def _save(self, session: Session, request: SaveRequest, frames: Sequence[bytes]) -> Later:
        ((_, tokens),) = self._with_tokens((request,), frames)
        lease = self._manager.lease(session.id, request.lease)
        tail = b""
        if request.tail_page is not None:
            num_rows = request.num_tokens % lease.namespace.arena.layout.block_size
            tail = copies.rows(self._manager.memory(lease), lease, request.tail_page, num_rows)
        return self._saved(lease.namespace, request, tokens, tail)

    async def _saved(
        self, namespace: Namespace, request: SaveRequest, tokens: bytes, tail: bytes
    ) -> Answer:
        generation = await self._sequences.save(namespace, request, tokens, tail)
        return Answer(SaveReply(id=request.id, epoch=self._epoch, generation=generation))

    async def _resume(self, session: Session, request: ResumeRequest) -> Answer:
        if not self._known_sequences(session, request):
            raise UnknownSequence(f"no sequence {request.sequence!r} is saved in this namespace")
        saved = await self._sequences.resume((request.namespace_key, request.sequence))
        reply = ResumeReply(
            id=request.id,
            epoch=self._epoch,
            generation=saved.info.generation,
            extras=saved.content.extras,
            state=saved.content.state,
        )
        return Answer(reply, (saved.content.tokens, saved.content.tail))

    async def _discard(self, session: Session, request: DiscardRequest) -> Answer:
        key = (request.namespace_key, request.sequence)
        is_known = bool(self._known_sequences(session, request))
        was_there = is_known and await self._sequences.discard(key, request.generation)
        return Answer(DiscardReply(id=request.id, epoch=self._epoch, was_there=was_there))

    def _list(self, session: Session, request: SequencesRequest) -> Answer:
        found = self._known_sequences(session, request)
        return Answer(
            SequencesReply(
                id=request.id,
                epoch=self._epoch,
                sequences=tuple(found[: request.limit]),
                num_sequences=len(found),
            )
        )

    def _known_sequences(
        self, session: Session, request: ResumeRequest | DiscardRequest | SequencesRequest
    ) -> list[SequenceStatus]:
        """Those that a request names, of namespaces that the client may open."""
        found = self._sequences.listed(request.namespace_key, request.sequence)
        return [each for each in found if session.access.may_open(each.model, each.salt)]

    # --- what the verbs share ---

    def _tried(self, do: Callable[..., R], *args: Any) -> R | Failure:
        """One item's result, or in its place what it is refused with."""
        try:
            return do(*args)
        except KvdError as error:
            return self._failure(error)

    def _failure(self, error: KvdError) -> Failure:
        self._counters[f"failures_{error.code}"] += 1
        refused(error)
        return failure(error)

    def _check_batch(self, items: Sequence[object]) -> None:
        if len(items) > self._limits.batch_items:
            raise LimitExceeded(
                f"{len(items)} items in a request; at most {self._limits.batch_items}"
            )

    def _with_tokens(
        self, items: Sequence[Any], frames: Sequence[bytes]
    ) -> Iterator[tuple[Any, bytes]]:
        """Each item with its part of the frame of tokens, which has them one after the other."""
        self._check_batch(items)
        tokens = tokens_in(frames, sum(item.num_tokens for item in items))
        start = 0
        for item in items:
            stop = start + item.num_tokens * TOKEN_BYTES
            yield item, tokens[start:stop]
            start = stop


def tokens_in(frames: Sequence[bytes], announced: int) -> bytes:
    """The tokens behind a request, of which it announced so many; raises BadRequest for others."""
    tokens = frames[0] if frames else b""
    if announced * TOKEN_BYTES != len(tokens):
        raise BadRequest(f"{announced} tokens announced, {len(tokens)} bytes of them sent")
    return tokens
