"""LeaseBase: a context manager over pages; views of them as numpy arrays or torch tensors."""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvd.arena.host import MappedArena
from kvd.arena.runs import Pages, pages_of, runs_of
from kvd.protocol.codec import TOKEN_BYTES, TokenIds, pack_tokens
from kvd.protocol.errors import (
    BadRequest,
    LeaseEnded,
    NotAttached,
    PagesInUse,
    StaleEpoch,
    Unsupported,
)
from kvd.protocol.layout import check_rows
from kvd.protocol.messages import (
    NO_REPLY,
    AbortRequest,
    AnyReply,
    AnyRequest,
    CommitItem,
    CommitReply,
    CommitRequest,
    DoneReply,
    ExtendItem,
    ExtendRequest,
    Extras,
    ForkItem,
    ForkRequest,
    LoadReply,
    LoadRequest,
    MatchReply,
    MatchResult,
    ReleaseRequest,
    ReserveItem,
    ReserveReply,
    ReserveRequest,
    Run,
    Runs,
    SaveReply,
    SaveRequest,
    Shortage,
    StoreRequest,
)
from kvd_client.mirror import Mirror, Piece
from kvd_client.session import Call, Operation, Session, checked, result_of, traceparent, wire

if TYPE_CHECKING:
    import torch

    from kvd.arena.base import Arena, Array
    from kvd.arena.device import DevicePages, MappedDevice
    from kvd.protocol.layout import Layout
    from kvd_client.base import ClientBase, NamespaceBase

R = TypeVar("R", bound=AnyReply)

# Runs shorter than this are left to fault: a thread would cost as much.
POPULATE_BYTES = 1 << 20
# Of the copies for a client that does not map, so many are under way at once.
PIECES_UNDER_WAY = 4
MAX_TOKENS = 1 << 40
EXTRA_BYTES = 32


@dataclass(frozen=True, slots=True)
class Asked:
    """What a match is of: packed tokens, and what else identifies their positions."""

    tokens: bytes
    extras: Extras

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Binding:
    """A namespace as one session knows it: its number and its arena, mapped or copied."""

    def __init__(
        self, session: Session, namespace: int, arena: MappedArena | MappedDevice | Mirror
    ) -> None:
        self.session = session
        self.namespace = namespace
        self._arena: MappedArena | MappedDevice | Mirror | None = arena
        self._pid = os.getpid()
        self._tensor: torch.Tensor | None = None
        self._least_pages = max(1, POPULATE_BYTES // arena.layout.page_bytes)
        self._read = np.zeros(arena.num_pages, np.bool_)
        self._written = np.zeros(arena.num_pages, np.bool_)

    @property
    def arena(self) -> MappedArena | MappedDevice | Mirror:
        """The pages; raises LeaseEnded when the session is over."""
        if (arena := self._arena) is None:
            raise LeaseEnded("the lease ended with its session")
        return arena

    def end(self) -> None:
        """Let go of the arena, whoever still has this; views of it that live keep the mapping."""
        self._arena = self._tensor = None

    @property
    def is_own(self) -> bool:
        """Whether this process made it; a forked child has no mapping of its parent's."""
        return os.getpid() == self._pid

    @property
    def mirror(self) -> Mirror | None:
        """The arena, where its bytes are copied."""
        return self.arena if isinstance(self.arena, Mirror) else None

    @property
    def device(self) -> MappedDevice | None:
        """The arena, where its pages lie on a device."""
        return None if isinstance(self.arena, MappedArena | Mirror) else self.arena

    def settle(self) -> None:
        """Wait for what this process has begun on the pages, where that goes on by itself."""
        if self.is_own and (device := self.device) is not None:
            device.settle()

    @property
    def read_tensor(self) -> torch.Tensor:
        """All pages, read-only: `[layers, planes, pages, block_size, heads, head_size]`.

        Raises Unsupported where the order does not allow it.
        """
        if self._tensor is None:
            with warnings.catch_warnings():
                # torch has no read-only tensors and says so: a write to this one would fault.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                self._tensor = as_tensor(self.arena.readable.layers, self.arena.layout)
        return self._tensor

    def populate_read(self, pages: Pages, populating: _Populating) -> None:
        """Fault pages in for reading, in the background, those that were not yet."""
        if isinstance(self.arena, MappedArena):
            self._populate(pages, self._read, self.arena.populate_read, populating)

    def populate_write(self, pages: Pages, populating: _Populating) -> None:
        """Fault reserved pages in for writing, in the background, those that were not yet."""
        if isinstance(self.arena, MappedArena):
            self._populate(pages, self._written, self.arena.populate_write, populating)

    def _populate(
        self,
        pages: Pages,
        done: NDArray[np.bool_],
        populate: Callable[[Run], Iterator[None]],
        populating: _Populating,
    ) -> None:
        if len(pages) < self._least_pages:
            return
        pages = pages[~done[pages]]
        if len(pages) < self._least_pages:
            return
        done[pages] = True
        populating.begin(chain.from_iterable(map(populate, runs_of(pages))))


class _Populating:
    """The faulting in of a lease's pages, in threads; no step of it comes after its end.

    A page that was given back, and is touched then, would have memory that nobody counts.
    """

    def __init__(self) -> None:
        # One that the collector may take again, should it end the lease within a step.
        self._step = threading.RLock()
        self._is_over = False

    def begin(self, steps: Iterator[None]) -> None:
        threading.Thread(target=self._run, args=(steps,), name="kvd-populate", daemon=True).start()

    def _run(self, steps: Iterator[None]) -> None:
        while self._take(steps):
            pass

    def _take(self, steps: Iterator[None]) -> bool:
        with self._step:
            return not self._is_over and next(steps, self) is not self

    def end(self) -> None:
        """Wait for the step under way, a few milliseconds at most, and have no other."""
        with self._step:
            self._is_over = True


class LeaseBase:
    """The right to a prefix's pages and to pages behind it, until released.

    The lease's block table, `pages`, has the matched blocks' pages first and the reserved ones
    behind them, so that page i holds the tokens from `i * block_size` on. What is matched is read
    through read-only views, what is reserved is written through writable ones; after using either
    and before relying on the result, `check()` says whether the pages were still this lease's.

    `tokens_by_tier` says where the matched tokens were when they were asked for. The next
    `pending_tokens` are in a store and on their way to memory: `extend` leases them.

    Not for several threads or tasks at once.
    """

    def __init__(self, namespace: NamespaceBase) -> None:
        """Made by `match`; it is a miss in an outage until it stands for a lease of the daemon."""
        self.layout = namespace.layout
        self._namespace = namespace
        self._client: ClientBase = namespace._client
        self._exports: list[_Export] = []
        self._stand_for(None, 0, _MISS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.release()
        else:
            self._let_go()  # the traceback may hold views: then released when they are gone

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a half-made lease, or an interpreter that ends
            if self._binding is not None:
                self._let_go()

    @property
    def is_open(self) -> bool:
        """Whether the lease can be used: granted, not released, and not ended by the daemon."""
        binding = self._binding
        if binding is None or not binding.is_own:
            return False
        session, result = binding.session, self._result
        if session.header is None:
            return self._client.has(session)
        return (
            session.header.epoch == session.epoch
            and session.header.generation(result.slot) == result.generation
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens for which the block table has pages."""
        return len(self.pages) * self.layout.block_size

    def is_of(self, binding: Binding) -> bool:
        """Whether it is a lease of this namespace, as this session knows it."""
        own = self._binding
        return own is not None and (own.session, own.namespace) == (
            binding.session,
            binding.namespace,
        )

    def check(self) -> None:
        """Raise LeaseEnded if the pages may have been another's since they were used.

        Where they lie on a device, its work is waited for: it may still use them.
        """
        if (binding := self._binding) is not None:
            binding.settle()
        if not self.is_open:
            raise LeaseEnded("the lease has ended: what was computed with its pages is void")

    # --- begin ---

    def begin(
        self,
        binding: Binding,
        request: Callable[[int], AnyRequest],
        deadline: float,
        asked: Asked | None = None,
    ) -> Operation[None]:
        """Stand for a new lease of the daemon, which is requested by its id."""
        core, session = self._client.connection.core, binding.session
        lease_id = core.next_lease_id()
        core.living[lease_id] = None
        try:
            reply = yield from self._client.request(
                session,
                request(lease_id),
                deadline,
                MatchReply,
                asked.tokens if asked else None,
            )
            result = result_of(reply.results)
            self._stand_for(binding, lease_id, result, asked)
            self._client.granted(self)
            yield from self._load(self.pages[: self.num_committed // self.layout.block_size])
            yield from self._take_tail(result)
        except BaseException:
            # The lease may have been granted, or be so later: end it, whatever became of it.
            self._populating.end()
            self._hold_only(binding, self.pages[:0])
            self._stand_for(None, 0, _MISS)
            self._client.released(session, lease_id)
            raise

    def _stand_for(
        self,
        binding: Binding | None,
        lease_id: int,
        result: MatchResult,
        asked: Asked | None = None,
    ) -> None:
        self._populating = _Populating()
        self.num_tokens = self.num_committed = result.num_tokens
        self.tokens_by_tier = result.tokens_by_tier
        self.pending_tokens = result.pending_tokens
        self.shortage: Shortage | None = result.shortage
        self.pages: Pages = pages_of(result.runs)
        self._binding = binding
        self._id = lease_id
        self._asked = asked
        self._result = result
        self._num_granted = 0
        # Tokens up to which blocks were named in a commit, whatever became of it.
        self._num_named = self.num_committed
        # What of a mirror this lease has, also where the block table shows others' pages.
        self._held: Pages = self.pages[:0]
        if binding is not None:
            binding.populate_read(self.pages, self._populating)
            self._hold(self.pages)
            if result.reserved:
                self._grant(result.reserved)

    def _take_tail(self, result: MatchResult) -> Operation[None]:
        """Copy the rows that agree into the first own page, before others are written there."""
        tail, binding = result.tail, self._binding
        if tail is None or not result.reserved or binding is None:
            return
        page = np.array([tail.page])
        self._hold(page)
        yield from self._load(page)
        # Arrays, or tensors where the pages lie on a device; both are indexed alike.
        source: Any = binding.arena.readable.pages
        own: Any = binding.arena.writable().pages
        rows = slice(tail.num_tokens)
        own[result.reserved[0].first, :, :, rows] = source[tail.page, :, :, rows]
        binding.settle()
        # From the next commit on its page may be another's.
        self._hold_only(binding, self.pages)
        self.num_tokens += tail.num_tokens

    def _fork(self, fork: LeaseBase, reserve_tokens: int, timeout: float | None) -> Operation[None]:
        """Have another lease, which is a miss so far, stand for the committed blocks of this."""
        binding = self._bound()
        num_pages = pages_for(reserve_tokens, self.layout)
        deadline = self._client.deadline(timeout)

        def request(lease_id: int) -> ForkRequest:
            return ForkRequest(
                id=self._client.next_id(),
                epoch=binding.session.epoch,
                deadline_ns=wire(deadline),
                trace=traceparent(),
                items=(ForkItem(lease_id, self._id, num_pages, ahead_of(num_pages, self.layout)),),
            )

        with self._ends_with_session():
            yield from fork.begin(binding, request, deadline)

    def _extend(self, timeout: float | None) -> Operation[int]:
        binding, asked = self._bound(), self._asked
        is_as_matched = self._num_named == self.num_tokens == self._result.num_tokens
        if asked is None or not is_as_matched:
            raise BadRequest("extend: the lease is no match, or no longer what was matched")
        self._check_unused(self.capacity_tokens)
        deadline = self._client.deadline(timeout)
        request = ExtendRequest(
            id=self._client.next_id(),
            epoch=binding.session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            items=(ExtendItem(self._id, asked.num_tokens, asked.extras),),
        )
        reply = yield from self._ask(request, deadline, MatchReply, asked.tokens)
        result = result_of(reply.results)
        matched, place = pages_of(result.runs), self.num_tokens // self.layout.block_size
        self._hold(matched[place:])
        with self._ends_with_session():
            yield from self._load(matched[place:])
        binding.populate_read(matched[place:], self._populating)
        # What was reserved stands behind what is matched, wherever that ends.
        self.pages = np.concatenate((matched, self.pages[place:]))
        self.num_tokens = self.num_committed = self._num_named = result.num_tokens
        self.tokens_by_tier, self.pending_tokens = result.tokens_by_tier, result.pending_tokens
        self._result = result
        return self.num_tokens

    def _replace(self, match: Operation[None]) -> Operation[None]:
        """Stand for what is matched, and no more for what it did before."""
        self.release()
        self._stand_for(None, 0, _MISS)
        return match

    def copy_rows(self, source: LeaseBase, start: int, stop: int) -> None:
        """Copy the KV of tokens `start` to `stop - 1` of another lease into own pages.

        Raises BadRequest where the layouts differ, one of them has no pages for these tokens, or
        they are matched or committed here; Unsupported where the layout is opaque.
        """
        if source.layout != self.layout:
            raise BadRequest(f"another layout: {self.layout.difference(source.layout)}")
        check_rows(self.layout)
        sources = chain.from_iterable(source.read_pages(start, stop))
        targets = chain.from_iterable(self.write_pages(start, stop))
        at = start - start % self.layout.block_size
        for theirs, own in zip(sources, targets, strict=True):
            rows = slice(max(start - at, 0), stop - at)
            own[:, :, rows] = theirs[:, :, rows]
            at += self.layout.block_size

    # --- pages ---

    def _reserve(self, num_tokens: int, timeout: float | None) -> Operation[None]:
        missing = pages_for(num_tokens, self.layout) - len(self.pages)
        binding = self._bound()
        if missing <= 0:
            return
        deadline = self._client.deadline(timeout)
        request = ReserveRequest(
            id=self._client.next_id(),
            epoch=binding.session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            items=(
                ReserveItem(
                    self._id,
                    self._num_granted,
                    self._num_granted + missing,
                    ahead_of(missing, self.layout),
                ),
            ),
        )
        reply = yield from self._ask(request, deadline, ReserveReply)
        self._grant(result_of(reply.results).runs)

    def _grant(self, runs: Runs) -> None:
        pages = pages_of(runs)
        self._num_granted += len(pages)
        self.pages = np.concatenate((self.pages, pages))
        self._hold(pages)
        if self._binding is not None:
            self._binding.populate_write(pages, self._populating)

    # --- copies, where nothing is mapped ---

    def _hold(self, pages: Pages) -> None:
        if self._binding is not None and (mirror := self._binding.mirror) is not None:
            mirror.hold(pages)
            self._held = np.concatenate((self._held, pages))

    def _hold_only(self, binding: Binding, pages: Pages) -> None:
        if (mirror := binding.mirror) is not None:
            held, self._held = self._held, pages.copy()
            mirror.hold(pages)
            mirror.let_go(held)

    def _load(self, pages: Pages) -> Operation[None]:
        """Have the bytes of blocks of this lease."""
        binding = self._bound()
        if (mirror := binding.mirror) is None:
            return
        pages = mirror.missing(pages)

        def call(piece: Piece) -> Call:
            return self._call(binding.session, LoadRequest, piece)

        yield from self._move(mirror.pieces(pages), call, LoadReply, mirror.write)
        mirror.loaded(pages)

    def _store(self, pages: Pages) -> Operation[None]:
        """Send the bytes of pages that this lease reserved."""
        binding = self._bound()
        if (mirror := binding.mirror) is None:
            return

        def call(piece: Piece) -> Call:
            return self._call(binding.session, StoreRequest, piece, mirror.read(piece))

        yield from self._move(mirror.pieces(pages), call, DoneReply, lambda *_: None)
        mirror.loaded(pages)

    def _call(
        self,
        session: Session,
        kind: type[LoadRequest | StoreRequest],
        piece: Piece,
        raw: bytes | None = None,
    ) -> Call:
        request = kind(
            id=self._client.next_id(),
            epoch=session.epoch,
            lease=self._id,
            pages=piece.runs,
            first_slice=piece.first_slice,
            num_slices=piece.num_slices,
        )
        return self._client.call(session, request, raw)

    def _move(
        self,
        pieces: Iterable[Piece],
        call_for: Callable[[Piece], Call],
        kind: type[AnyReply],
        take: Callable[[Piece, Sequence[memoryview]], None],
    ) -> Operation[None]:
        """Ask for each piece and take what came with its answer, several under way at once."""
        connection = self._client.connection
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
                yield from self._client.answer(call, self._client.deadline(None), kind)
                take(piece, call.rest)
                under_way.popleft()
        finally:
            for _, call in under_way:
                connection.withdraw(call)

    # --- views ---

    def read_arrays(self, start: int, stop: int) -> list[Array]:
        """The KV of tokens `start` to `stop - 1`, one read-only array per run of pages.

        Each is `[layers, planes, tokens, heads, head_size]`; of one layer and plane it is one
        strided array. bfloat16 comes as its bits, in uint16. Raises Unsupported for layouts in
        another order than `layer_first`, which have `read_pages`, and where the pages lie on a
        device, of which there are tensors alone.
        """
        self._check_arrays()
        return self._read_views(start, stop)

    def read_tensors(self, start: int, stop: int) -> list[torch.Tensor]:
        """As `read_arrays`, as torch tensors, on the device where the pages lie.

        torch knows no read-only: writing to one faults, or on a GPU damages what others read.
        """
        pages = self._bound().read_tensor
        return [
            pages[:, :, run.first : run.first + run.count].flatten(2, 3)[:, :, part]
            for run, part in self._pieces(start, stop)
        ]

    def write_arrays(self, start: int, stop: int) -> list[Array]:
        """Writable arrays over reserved pages, shaped as those of `read_arrays`.

        Let go of them before commit, abort or release, which refuse while any of them lives.
        Raises BadRequest for tokens that are matched or committed: those are never written again.
        Raises Unsupported as `read_arrays` does.
        """
        self._check_arrays()
        return self._write_views(start, stop)

    def write_tensors(self, start: int, stop: int) -> list[torch.Tensor]:
        """As `write_arrays`, as torch tensors, on the device where the pages lie."""
        return [as_tensor(view, self.layout) for view in self._write_views(start, stop)]

    def _check_arrays(self) -> None:
        if (device := self._bound().device) is not None:
            raise Unsupported(
                f"the pages lie on {device.device}: use read_tensors and write_tensors"
            )

    def _read_views(self, start: int, stop: int) -> list[Any]:
        """Arrays, or tensors where the pages lie on a device."""
        arena = self._bound().arena.readable
        return [arena.run_view(run)[:, :, part] for run, part in self._pieces(start, stop)]

    def _write_views(self, start: int, stop: int) -> list[Any]:
        pieces = self._pieces(start, stop)
        arena = self._writable(start, stop)
        return [arena.run_view(run)[:, :, part] for run, part in pieces]

    def read_pages(self, start: int, stop: int) -> list[Any]:
        """The whole pages of tokens `start` to `stop - 1`, one read-only array per run of pages.

        In every order each is `[pages, layers, planes, block_size, heads, head_size]`; of an opaque
        layout `[pages, layers, bytes]` in uint8. Where they lie on a device, they are tensors.
        """
        arena = self._bound().arena.readable
        return [arena.pages_view(run) for run, _ in self._pieces(start, stop)]

    def write_pages(self, start: int, stop: int) -> list[Any]:
        """Writable arrays shaped as those of `read_pages`, on the terms of `write_arrays`."""
        pieces = self._pieces(start, stop)
        arena = self._writable(start, stop)
        return [arena.pages_view(run) for run, _ in pieces]

    def _writable(self, start: int, stop: int) -> Arena | DevicePages:
        """An arena of which every view counts as one of these tokens."""
        if start < self._num_named:
            raise BadRequest(f"token {start} is committed; writable from {self._num_named} on")
        arena = self._bound().arena.writable()
        self._exports.append(_Export(start, stop, weakref.ref(arena.root)))
        return arena

    def _pieces(self, start: int, stop: int) -> list[tuple[Run, slice]]:
        """The runs of pages that hold these tokens, and which tokens of each run."""
        if not 0 <= whole(start) <= whole(stop) <= self.capacity_tokens:
            raise BadRequest(
                f"tokens {start} to {stop} of {self.capacity_tokens} for which there are pages"
            )
        block_size = self.layout.block_size
        first = start // block_size
        at = first * block_size
        pieces = []
        for run in runs_of(self.pages[first : -(-stop // block_size)]):
            size = run.count * block_size
            pieces.append((run, slice(max(start - at, 0), min(stop - at, size))))
            at += size
        return pieces

    # --- ends ---

    def _commit(
        self, tokens: TokenIds, extras: Sequence[tuple[int, bytes]], timeout: float | None
    ) -> Operation[int]:
        packed = pack_tokens(tokens)
        num_tokens = len(packed) // TOKEN_BYTES
        packed_extras = pack_extras(extras, self.num_committed, self.num_committed + num_tokens)
        count = num_tokens // self.layout.block_size
        stop = self.num_committed + count * self.layout.block_size
        if count == 0:
            return self.num_committed
        self._bound()
        if stop > self.capacity_tokens:
            raise BadRequest(f"tokens up to {stop} have no pages; reserve them first")
        self._check_unused(stop)
        first = self.num_committed // self.layout.block_size
        packed = packed[: count * self.layout.block_size * TOKEN_BYTES]
        item = CommitItem(
            self._id,
            first,
            runs_of(self.pages[first : first + count]),
            len(packed) // TOKEN_BYTES,
            tuple(extra for extra in packed_extras if extra[0] < stop),
        )
        # What was named before was stored before, and may be committed already.
        unstored = max(first, self._num_named // self.layout.block_size)
        with self._ends_with_session():
            yield from self._store(self.pages[unstored : first + count])
        deadline = self._client.deadline(timeout)
        request = CommitRequest(
            id=self._client.next_id(),
            epoch=self._bound().session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            items=(item,),
        )
        self._num_named = stop
        reply = yield from self._ask(request, deadline, CommitReply, packed)
        result = result_of(reply.results)
        # Where a block was there before, its page takes the place of this lease's copy.
        pages = pages_of(result.runs)
        self._hold(pages[pages != self.pages[first : first + count]])
        with self._ends_with_session():
            yield from self._load(pages)
        self.pages[first : first + count] = pages
        self.num_committed = stop
        return stop

    def _save(
        self,
        sequence: str,
        tokens: TokenIds,
        state: bytes,
        generation: int,
        extras: Sequence[tuple[int, bytes]],
        timeout: float | None,
    ) -> Operation[int]:
        packed = pack_tokens(tokens)
        num_tokens = len(packed) // TOKEN_BYTES
        tail = self._tail_of(num_tokens)
        session = self._bound().session
        deadline = self._client.deadline(timeout)
        request = checked(
            SaveRequest(
                id=self._client.next_id(),
                epoch=session.epoch,
                deadline_ns=wire(deadline),
                trace=traceparent(),
                sequence=sequence,
                lease=self._id,
                num_tokens=num_tokens,
                saver=self._client.saver,
                generation=generation,
                tail_page=int(tail[0]) if len(tail) else None,
                extras=pack_extras(extras, 0, num_tokens),
                state=state,
            )
        )
        with self._ends_with_session():
            yield from self._store(tail)
        reply = yield from self._ask(request, deadline, SaveReply, packed)
        return reply.generation

    def _tail_of(self, num_tokens: int) -> Pages:
        """The own page of the last of so many tokens; none where their blocks are all committed."""
        first, num_rows = divmod(num_tokens, self.layout.block_size)
        if num_rows == 0 or num_tokens <= self._num_named:
            return self.pages[:0]
        if num_tokens > self.capacity_tokens:
            raise BadRequest(f"tokens up to {num_tokens} have no pages")
        return self.pages[first : first + 1]

    def fill_tail(self, rows: memoryview, num_tokens: int) -> None:
        """Take over the rows of the last tokens, where all blocks before them are here."""
        first, num_rows = divmod(num_tokens, self.layout.block_size)
        start = num_tokens - num_rows
        has_blocks = self.num_committed == start and self.num_tokens < num_tokens
        if has_blocks and len(rows) and num_tokens <= self.capacity_tokens:
            arena = self._writable(start, num_tokens)
            arena.write_rows(int(self.pages[first]), num_rows, rows)
            self.num_tokens = num_tokens

    def abort(self) -> None:
        """Give back the pages that are not committed. Raises PagesInUse."""
        self._check_unused(self.capacity_tokens)
        binding = self._binding
        if binding is not None:
            # First said, then believed: else an interrupt between would have the daemon grant anew
            # what this lease thinks it has not.
            self._client.post(
                binding.session,
                AbortRequest(id=NO_REPLY, epoch=binding.session.epoch, leases=(self._id,)),
            )
            self._show_committed(binding)
            self._num_named = self.num_committed
            self.num_tokens = min(self.num_tokens, self.num_committed)

    def release(self, keep_tokens: int = 0) -> None:
        """End the lease. Idempotent; raises PagesInUse while a writable view of its pages lives.

        With `keep_tokens` it stays, with the whole blocks of so many committed tokens and no other
        page. Raises BadRequest where fewer are committed, or not even a block is to stay.
        """
        keep_tokens = whole(keep_tokens)
        is_nothing = 0 < keep_tokens < self.layout.block_size
        if not 0 <= keep_tokens <= self.num_committed or is_nothing:
            raise BadRequest(
                f"keep {keep_tokens} tokens of {self.num_committed} committed, in blocks of "
                f"{self.layout.block_size}"
            )
        self._check_unused(self.capacity_tokens)
        if num_blocks := keep_tokens // self.layout.block_size:
            self._keep(num_blocks)
            return
        if (binding := self._binding) is not None:
            self._populating.end()
            # In this order an interrupt may release it twice, which does no harm; never not at all.
            self._hold_only(binding, self.pages[:0])
            self._client.released(binding.session, self._id)
            self._binding = None

    def _keep(self, num_blocks: int) -> None:
        binding = self._bound()
        request = ReleaseRequest(
            id=NO_REPLY,
            epoch=binding.session.epoch,
            leases=(self._id,),
            keep_blocks=num_blocks,
        )
        self._client.post(binding.session, request)  # first said, then believed, as an abort
        self.num_committed = self._num_named = num_blocks * self.layout.block_size
        self.num_tokens = min(self.num_tokens, self.num_committed)
        self._show_committed(binding)

    def _show_committed(self, binding: Binding) -> None:
        """The block table has the committed blocks alone."""
        self.pages = self.pages[: self.num_committed // self.layout.block_size]
        self._num_granted = 0
        self._populating.end()
        self._populating = _Populating()
        self._hold_only(binding, self.pages)

    def release_quietly(self) -> bool:
        """Release the lease if no writable view is left; whether it is released."""
        with contextlib.suppress(PagesInUse):
            self.release()
        return self._binding is None

    def _let_go(self) -> None:
        if not self.release_quietly():
            self._client.linger(self)

    def _check_unused(self, stop: int) -> None:
        """Refuse while a writable view of tokens up to `stop` lives; wait for work on a device.

        So what is committed is whole, and what is given back is neither read nor written any more.
        """
        self._exports = [export for export in self._exports if export.root() is not None]
        held = [export for export in self._exports if export.start < stop]
        if held:
            raise PagesInUse(
                f"a writable view of tokens {held[0].start} to {held[0].stop} is still in use: "
                "let go of the arrays and tensors first"
            )
        if (binding := self._binding) is not None:
            binding.settle()

    def leave_others(self, session: Session) -> None:
        """Let go of the mapping if it is of any other session than this: the lease is over.

        At any moment, by any thread: whoever uses the mapping at that moment has it for itself.
        """
        if (binding := self._binding) is not None and binding.session is not session:
            self._populating.end()
            self._binding = None
            binding.end()

    def _bound(self) -> Binding:
        binding = self._binding
        if binding is None:
            raise LeaseEnded(
                "the lease was released, ended with its session, or never had pages (no daemon "
                "answered)"
            )
        if not binding.is_own:
            raise LeaseEnded("a forked child has no leases of its parent: match anew")
        return binding

    def _ask(
        self, request: AnyRequest, deadline: float, kind: type[R], tokens: bytes | None = None
    ) -> Operation[R]:
        session = self._bound().session
        with self._ends_with_session():
            return (yield from self._client.request(session, request, deadline, kind, tokens))

    @contextlib.contextmanager
    def _ends_with_session(self) -> Iterator[None]:
        try:
            yield
        except (NotAttached, StaleEpoch) as error:
            raise LeaseEnded(f"the lease ended with its session: {error}") from error


@dataclass(frozen=True, slots=True)
class _Export:
    """Writable views of these tokens, alive while `root` is: every view of an arena holds it."""

    start: int
    stop: int
    root: weakref.ref[object]


_MISS = MatchResult(0, (), 0, 0)


def pages_for(num_tokens: int, layout: Layout) -> int:
    """Raises BadRequest for what is no number of tokens."""
    return -(-check_tokens(num_tokens) // layout.block_size)


def check_tokens(number: int) -> int:
    """A number of tokens; refuses what is none (BadRequest)."""
    if not 0 <= (tokens := whole(number)) <= MAX_TOKENS:
        raise BadRequest(f"{number} is no number of tokens up to {MAX_TOKENS}")
    return tokens


def whole(number: int) -> int:
    """Refuse what is no whole number (BadRequest)."""
    try:
        return operator.index(number)
    except TypeError as error:
        raise BadRequest(f"{number!r} is no whole number") from error


def pack_extras(extras: Sequence[tuple[int, bytes]], start: int, stop: int) -> Extras:
    """Extras as on the wire; refuses what is none of a position in these tokens (BadRequest)."""
    if isinstance(extras, tuple) and not extras:
        return ()
    try:
        packed = tuple((operator.index(position), bytes(extra)) for position, extra in extras)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"extras are pairs of a position and {EXTRA_BYTES} bytes") from error
    for position, extra in packed:
        if not start <= position < stop or len(extra) != EXTRA_BYTES:
            raise BadRequest(
                f"an extra of {len(extra)} bytes at {position}: they have {EXTRA_BYTES} bytes and "
                f"stand at positions {start} to {stop - 1}"
            )
    return packed


def ahead_of(num_pages: int, layout: Layout) -> int:
    """How many pages to ask for beside these, so that runs are whole groups."""
    return -num_pages % layout.group_pages


def as_tensor(view: Array | torch.Tensor, layout: Layout) -> torch.Tensor:
    """A torch tensor over the view's memory, in the layout's dtype."""
    import torch  # only who asks for tensors needs it

    return torch.as_tensor(view).view(getattr(torch, layout.dtype))
