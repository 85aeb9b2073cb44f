"""Wire: a client that says exactly what a test tells it to, on a bare DEALER socket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from kvd.arena.membership import SessionLock
from kvd.protocol.codec import decode_reply, encode, pack_tokens
from kvd.protocol.keys import namespace_key
from kvd.protocol.messages import (
    PROTOCOL_VERSION,
    AnyReply,
    AnyRequest,
    AttachReply,
    AttachRequest,
    CommitItem,
    CommitReply,
    CommitRequest,
    CommitResult,
    DetachRequest,
    DropItem,
    DropReply,
    DropRequest,
    DropResult,
    ErrorReply,
    ExplainReply,
    ExplainRequest,
    ExtendItem,
    ExtendRequest,
    Failure,
    ForkItem,
    ForkRequest,
    LeasesReply,
    LeasesRequest,
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
    PrefetchItem,
    PrefetchRequest,
    ReleaseRequest,
    ReserveItem,
    ReserveReply,
    ReserveRequest,
    ReserveResult,
    ResumeReply,
    ResumeRequest,
    Run,
    SaveRequest,
    SessionStatus,
    StatusReply,
    StatusRequest,
    StoreRequest,
    TreeReply,
    TreeRequest,
    UnpinReply,
    UnpinRequest,
)
from tests.e2e.support import BLOCK, IDENTITY, LAYOUT, PATIENCE_SECONDS


class Wire:
    """One connection. Ids of requests count up; everything else is the test's."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        """`options` are the socket's, by their names in pyzmq."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for name, value in options.items():
            setattr(self._socket, name, value)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.RCVHWM, 10)
        self._socket.setsockopt(zmq.SNDHWM, 100)
        self._socket.connect(endpoint)
        self.epoch = 0
        self.session = ""
        self.secret = ""
        self.namespace = 0
        self.num_pages = 0
        self.salt = ""
        self.lock: SessionLock | None = None
        self.next_id = 1

    def close(self) -> None:
        """Detach, unless there is nobody to hear it, and end the connection."""
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):
            request = DetachRequest(**self.envelope())
            self._socket.send(encode(request), zmq.NOBLOCK)
        if self.lock is not None:
            self.lock.close()
        self._socket.close()
        self._context.term()

    def vanish(self) -> None:
        """End the connection without a word."""
        self._socket.close(0)
        self._context.term()

    # --- frames ---

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def offer(self, *frames: bytes) -> bool:
        """Send, unless so much lies there already that it would have to wait."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            return True
        return False

    def receive_frame(self) -> bytes:
        assert self._socket.poll(int(PATIENCE_SECONDS * 1000)), "no answer"
        (frame,) = self._socket.recv_multipart()
        return frame

    def receive_all(self) -> tuple[AnyReply, *tuple[bytes, ...]]:
        """A reply and the frames behind it."""
        assert self._socket.poll(int(PATIENCE_SECONDS * 1000)), "no answer"
        header, *frames = self._socket.recv_multipart()
        return decode_reply(header), *frames

    def receive(self) -> AnyReply:
        return decode_reply(self.receive_frame())

    def pending(self, milliseconds: int) -> Iterator[AnyReply]:
        """What was answered and not read yet; the first of it may come within so long."""
        while self._socket.poll(milliseconds):
            yield self.receive()
            milliseconds = 0

    def ask(self, request: AnyRequest, tokens: object = None) -> AnyReply:
        frames = [encode(request)]
        if tokens is not None:
            frames.append(tokens if isinstance(tokens, bytes) else pack_tokens(tokens))  # type: ignore[arg-type]
        self.send(*frames)
        return self.receive()

    # --- verbs ---

    def envelope(self, **fields: Any) -> dict[str, Any]:
        self.next_id += 1
        return {"id": self.next_id, "epoch": self.epoch} | fields

    def attach(
        self, *, maps: bool = True, version: int = PROTOCOL_VERSION, **fields: Any
    ) -> AttachReply:
        envelope = self.envelope(version=version, min_version=1, client="wire", **fields)
        reply = self.ask(AttachRequest(**envelope))
        assert isinstance(reply, AttachReply), reply
        self.epoch, self.secret = reply.epoch, reply.session
        self.session = Path(reply.lock_path).stem
        if maps:
            self.lock = SessionLock(reply.lock_path)
        return reply

    def open(self, salt: str = "", *, maps: bool = True, **fields: Any) -> int:
        fields = {"identity": IDENTITY, "layout": LAYOUT, "salt": salt, "maps": maps} | fields
        request = OpenRequest(**self.envelope(**fields))
        reply = self.ask(request)
        assert isinstance(reply, OpenReply), reply
        self.namespace, self.num_pages, self.salt = reply.namespace, reply.num_pages, salt
        return reply.namespace

    def match(self, lease: int, tokens: list[int], **fields: Any) -> MatchResult | Failure:
        self.begin_match(lease, tokens, **fields)
        return self.end_match()

    def begin_match(
        self, lease: int, tokens: list[int], *, deadline_ns: int = 0, **fields: Any
    ) -> None:
        item = MatchItem(self.namespace, lease, len(tokens), **fields)
        request = MatchRequest(**self.envelope(deadline_ns=deadline_ns), items=(item,))
        self.send(encode(request), packed(tokens))

    def end_match(self) -> MatchResult | Failure:
        reply = self.receive()
        assert isinstance(reply, MatchReply), reply
        return reply.results[0]

    def matched(self, lease: int, tokens: list[int], **fields: Any) -> MatchResult:
        result = self.match(lease, tokens, **fields)
        assert isinstance(result, MatchResult), result
        return result

    def extend(self, lease: int, tokens: list[int], **fields: Any) -> MatchResult | Failure:
        item = ExtendItem(lease, len(tokens))
        request = ExtendRequest(**self.envelope(**fields), items=(item,))
        self.send(encode(request), packed(tokens))
        return self.end_match()

    def extended(self, lease: int, tokens: list[int], **fields: Any) -> MatchResult:
        result = self.extend(lease, tokens, **fields)
        assert isinstance(result, MatchResult), result
        return result

    def prefetch(self, tokens: list[int]) -> AnyReply:
        item = PrefetchItem(self.namespace, len(tokens))
        return self.ask(PrefetchRequest(**self.envelope(), items=(item,)), tokens)

    def reserve(self, lease: int, start: int, stop: int, **fields: Any) -> ReserveResult | Failure:
        ahead = fields.pop("ahead", 0)
        fields.setdefault("deadline_ns", soon(0.2))
        item = ReserveItem(lease, start, stop, ahead)
        reply = self.ask(ReserveRequest(**self.envelope(**fields), items=(item,)))
        assert isinstance(reply, ReserveReply), reply
        return reply.results[0]

    def reserved(self, lease: int, start: int, stop: int, **fields: Any) -> tuple[Run, ...]:
        result = self.reserve(lease, start, stop, deadline_ns=0, **fields)
        assert isinstance(result, ReserveResult), result
        return result.runs

    def commit(
        self, lease: int, first: int, pages: tuple[Run, ...], tokens: list[int]
    ) -> CommitResult | Failure:
        item = CommitItem(lease, first, pages, len(tokens))
        reply = self.ask(CommitRequest(**self.envelope(), items=(item,)), tokens)
        assert isinstance(reply, CommitReply), reply
        return reply.results[0]

    def store(self, lease: int, tokens: list[int]) -> tuple[Run, ...]:
        """Have these whole blocks committed, under a lease that stays."""
        num_blocks = len(tokens) // BLOCK
        runs = self.matched(lease, tokens, reserve=num_blocks).reserved
        done = self.commit(lease, 0, runs, tokens)
        assert isinstance(done, CommitResult), done
        return done.runs

    def release(self, *leases: int, keep_blocks: int = 0) -> AnyReply:
        request = ReleaseRequest(**self.envelope(), leases=leases, keep_blocks=keep_blocks)
        return self.ask(request)

    def fork(self, lease: int, source: int, **fields: Any) -> MatchResult | Failure:
        item = ForkItem(lease, source, **fields)
        reply = self.ask(ForkRequest(**self.envelope(), items=(item,)))
        assert isinstance(reply, MatchReply), reply
        return reply.results[0]

    def pin(self, tokens: list[int], seconds: float, owner: str = "") -> PinResult | Failure:
        item = PinItem(self.namespace, len(tokens), seconds, owner)
        reply = self.ask(PinRequest(**self.envelope(), items=(item,)), tokens)
        assert isinstance(reply, PinReply), reply
        return reply.results[0]

    def pinned(self, tokens: list[int], seconds: float = 3600.0, owner: str = "") -> PinResult:
        result = self.pin(tokens, seconds, owner)
        assert isinstance(result, PinResult), result
        return result

    def unpin(self, owner: str = "", *pins: int) -> int:
        reply = self.ask(UnpinRequest(**self.envelope(), owner=owner, pins=pins))
        assert isinstance(reply, UnpinReply), reply
        return reply.num_pins

    def drop(self, tokens: list[int] = [], from_block: int = 0) -> DropResult:  # noqa: B006
        item = DropItem(self.namespace, len(tokens), from_block)
        reply = self.ask(DropRequest(**self.envelope(), items=(item,)), tokens)
        assert isinstance(reply, DropReply), reply
        (result,) = reply.results
        assert isinstance(result, DropResult), result
        return result

    def leases(self, **fields: Any) -> LeasesReply:
        reply = self.ask(LeasesRequest(**self.envelope(), **fields))
        assert isinstance(reply, LeasesReply), reply
        return reply

    def load(
        self, lease: int, pages: tuple[Run, ...], first_slice: int = 0, num_slices: int = 1
    ) -> list[bytes] | ErrorReply:
        """The frames of a piece, or why there are none."""
        request = LoadRequest(
            **self.envelope(),
            lease=lease,
            pages=pages,
            first_slice=first_slice,
            num_slices=num_slices,
        )
        self.send(encode(request))
        reply, *frames = self.receive_all()
        return reply if isinstance(reply, ErrorReply) else frames

    def put(
        self,
        lease: int,
        pages: tuple[Run, ...],
        data: bytes,
        first_slice: int = 0,
        num_slices: int = 1,
    ) -> AnyReply:
        """Store a piece."""
        request = StoreRequest(
            **self.envelope(),
            lease=lease,
            pages=pages,
            first_slice=first_slice,
            num_slices=num_slices,
        )
        return self.ask(request, data)

    def send_save(self, name: str, lease: int, tokens: list[int], **fields: Any) -> None:
        request = SaveRequest(
            **self.envelope(),
            sequence=name,
            lease=lease,
            num_tokens=len(tokens),
            saver=1,
            **fields,
        )
        self.send(encode(request), packed(tokens))

    def save(self, name: str, lease: int, tokens: list[int], **fields: Any) -> AnyReply:
        self.send_save(name, lease, tokens, **fields)
        return self.receive()

    def resume(self, name: str) -> tuple[ResumeReply, bytes, bytes]:
        """The reply, the tokens and the rows of the tail, of a sequence of the namespace."""
        key = namespace_key(IDENTITY, LAYOUT, self.salt)
        request = ResumeRequest(**self.envelope(), namespace_key=key, sequence=name)
        self.send(encode(request))
        reply, tokens, tail = self.receive_all()
        assert isinstance(reply, ResumeReply), reply
        return reply, tokens, tail

    def tree(self, tokens: list[int] = [], **fields: Any) -> TreeReply:  # noqa: B006
        fields = {"namespace": self.namespace, "num_tokens": len(tokens)} | fields
        reply = self.ask(TreeRequest(**self.envelope(**fields)), tokens)
        assert isinstance(reply, TreeReply), reply
        return reply

    def explain(self, tokens: list[int], **fields: Any) -> ExplainReply:
        fields = {"namespace": self.namespace, "num_tokens": len(tokens)} | fields
        reply = self.ask(ExplainRequest(**self.envelope(**fields)), tokens)
        assert isinstance(reply, ExplainReply), reply
        return reply

    def status(self) -> StatusReply:
        reply = self.ask(StatusRequest(**self.envelope()))
        assert isinstance(reply, StatusReply), reply
        return reply

    def pages(self) -> dict[str, int]:
        tier = self.status().tiers[0]
        return {state: count for state, count in tier.pages.items() if count}

    def me(self) -> SessionStatus:
        return next(one for one in self.status().sessions if one.session == self.session)


def refused(reply: AnyReply, code: str) -> str:
    """The message of a request that was refused with this code."""
    assert isinstance(reply, ErrorReply), reply
    assert reply.code == code, reply
    return reply.message


def failed(result: object, code: str) -> str:
    """The message of an item that could not be done, with this code."""
    assert isinstance(result, Failure), result
    assert result.code == code, result
    return result.message


def numbers(runs: tuple[Run, ...]) -> list[int]:
    return [page for run in runs for page in range(run.first, run.first + run.count)]


def soon(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, "<u4").tobytes()
