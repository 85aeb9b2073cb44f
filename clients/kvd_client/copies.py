"""Copies: a lease's pages over the socket, into a mirror and out of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.protocol.messages import AnyReply, DoneReply, LoadReply, LoadRequest, StoreRequest
from kvd_client.session import traceparent

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd_client.base import ClientBase
    from kvd_client.mirror import Mirror, Piece
    from kvd_client.session import Call, Operation, Session

# So many are under way at once.
PIECES_UNDER_WAY = 4


@dataclass(frozen=True, slots=True)
class Copies:
    """What a lease of a client that does not map asks for, and sends."""

    client: ClientBase
    session: Session
    lease: int
    mirror: Mirror

    def load(self, pages: Pages) -> Operation[None]:
        """Have the bytes of blocks of the lease."""
        pages = self.mirror.missing(pages)

        def call(piece: Piece) -> Call:
            return self._call(LoadRequest, piece)

        yield from self._move(self.mirror.pieces(pages), call, LoadReply, self.mirror.write)
        self.mirror.loaded(pages)

    def store(self, pages: Pages) -> Operation[None]:
        """Send the bytes of pages that the lease reserved."""

        def call(piece: Piece) -> Call:
            return self._call(StoreRequest, piece, self.mirror.read(piece))

        yield from self._move(self.mirror.pieces(pages), call, DoneReply, lambda *_: None)
        self.mirror.loaded(pages)

    def _call(
        self, kind: type[LoadRequest | StoreRequest], piece: Piece, raw: bytes | None = None
    ) -> Call:
        request = kind(
            id=self.client.next_id(),
            epoch=self.session.epoch,
            trace=traceparent(),
            lease=self.lease,
            pages=piece.runs,
            first_slice=piece.first_slice,
            num_slices=piece.num_slices,
        )
        return self.client.call(self.session, request, raw)

    def _move(
        self,
        pieces: Iterable[Piece],
        call_for: Callable[[Piece], Call],
        kind: type[AnyReply],
        take: Callable[[Piece, Sequence[memoryview]], None],
    ) -> Operation[None]:
        """Ask for each piece and take what came with its answer, several under way at once."""
        connection = self.client.connection
        under_way: deque[tuple[Piece, Call]] = deque()
        waiting = iter(pieces)
        try:
            while True:
                while len(under_way) < PIECES_UNDER_WAY and (piece := next(waiting, None)):
                    under_way.append((piece, call := call_for(piece)))
                    connection.send(call)
                if not under_way:
                    return
                piece, call = under_way[0]
                # Each has the whole time: how much there is to move is nobody's fault.
                yield from self.client.answer(call, self.client.deadline(None), kind)
                take(piece, call.rest)
                under_way.popleft()
        finally:
            for _, call in under_way:
                connection.withdraw(call)
