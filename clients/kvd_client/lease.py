"""LeaseBase: the right to pages, from its match to its release; it grows and is committed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from kvd.arena.runs import Pages, pages_of, runs_of
from kvd.protocol.codec import TOKEN_BYTES, TokenIds, pack_tokens
from kvd.protocol.errors import (
    BadRequest,
    LeaseEnded,
    NotAttached,
    PagesInUse,
    StaleEpoch,
)
from kvd.protocol.messages import (
    NO_REPLY,
    AbortRequest,
    AnyReply,
    AnyRequest,
    CommitItem,
    CommitReply,
    CommitRequest,
    ExtendItem,
    ExtendRequest,
    ForkItem,
    ForkRequest,
    MatchReply,
    MatchResult,
    ReleaseRequest,
    ReserveItem,
    ReserveReply,
    ReserveRequest,
    Runs,
    SaveReply,
    SaveRequest,
    Shortage,
)
from kvd_client.asked import Asked, ahead_of, pack_extras, pages_for, whole
from kvd_client.binding import Binding, Populating
from kvd_client.copies import Copies
from kvd_client.session import Operation, Session, checked, result_of, traceparent, wire
from kvd_client.views import LeaseViews

if TYPE_CHECKING:
    from kvd_client.base import ClientBase
    from kvd_client.namespace import NamespaceBase

R = TypeVar("R", bound=AnyReply)


class LeaseBase(LeaseViews):
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
        super().__init__(namespace.layout)
        self._namespace = namespace
        self._client: ClientBase = namespace._client
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
        self._populating = Populating()
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
        if (mirror := binding.mirror) is not None:
            yield from Copies(self._client, binding.session, self._id, mirror).load(pages)

    def _store(self, pages: Pages) -> Operation[None]:
        """Send the bytes of pages that this lease reserved."""
        binding = self._bound()
        if (mirror := binding.mirror) is not None:
            yield from Copies(self._client, binding.session, self._id, mirror).store(pages)

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
        """The own page of the last of so many tokens; none where their blocks are all committed.

        Nor where it is opaque: its rows cannot be told apart, and are to be computed again.
        """
        first, num_rows = divmod(num_tokens, self.layout.block_size)
        if num_rows == 0 or num_tokens <= self._num_named or self.layout.is_opaque:
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
        self._populating = Populating()
        self._hold_only(binding, self.pages)

    def release_quietly(self) -> bool:
        """Release the lease if no writable view is left; whether it is released."""
        with contextlib.suppress(PagesInUse):
            self.release()
        return self._binding is None

    def _let_go(self) -> None:
        if not self.release_quietly():
            self._client.linger(self)

    def leave_others(self, session: Session) -> None:
        """Let go of the mapping if it is of any other session than this: the lease is over.

        At any moment, by any thread: whoever uses the mapping at that moment has it for itself.
        """
        if (binding := self._binding) is not None and binding.session is not session:
            self._populating.end()
            self._binding = None
            binding.end()

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


_MISS = MatchResult(0, (), 0, 0)
