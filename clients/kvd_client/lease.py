"""LeaseBase: a context manager over pages; views of them as numpy arrays or torch tensors."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvd.arena.base import GROUP_PAGES, Array
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
    MatchResult,
    ReserveItem,
    ReserveReply,
    ReserveRequest,
    Run,
    Runs,
    Shortage,
)
from kvd_client.session import Operation, Session, result_of, traceparent, wire

if TYPE_CHECKING:
    import torch

    from kvd.arena.host import MappedArena
    from kvd.protocol.layout import Layout
    from kvd_client.base import ClientBase

R = TypeVar("R", bound=AnyReply)

# Runs shorter than this are left to fault: a thread would cost as much.
POPULATE_BYTES = 1 << 20


class Binding:
    """A namespace as one session knows it: its number and its arena, mapped."""

    def __init__(self, session: Session, namespace: int, arena: MappedArena) -> None:
        self.session = session
        self.namespace = namespace
        self.arena = arena
        self._tensor: torch.Tensor | None = None
        self._read = np.zeros(arena.num_pages, np.bool_)
        self._written = np.zeros(arena.num_pages, np.bool_)

    @property
    def read_tensor(self) -> torch.Tensor:
        """All pages, read-only: `[layers, planes, pages, block_size, heads, head_size]`."""
        if self._tensor is None:
            with warnings.catch_warnings():
                # torch has no read-only tensors and says so: a write to this one would fault.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                self._tensor = as_tensor(self.arena.readable.pages, self.arena.layout)
        return self._tensor

    def populate_read(self, pages: Pages) -> None:
        """Fault pages in for reading, in the background, those that were not yet."""
        self._populate(pages, self._read, self.arena.populate_read)

    def populate_write(self, pages: Pages) -> None:
        """Fault reserved pages in for writing, in the background, those that were not yet."""
        self._populate(pages, self._written, self.arena.populate_write)

    def _populate(
        self, pages: Pages, done: NDArray[np.bool_], populate: Callable[[Run], None]
    ) -> None:
        pages = pages[~done[pages]]
        if len(pages) * self.arena.layout.page_bytes < POPULATE_BYTES:
            return
        done[pages] = True

        def run() -> None:
            for run in runs_of(pages):
                populate(run)

        threading.Thread(target=run, name="kvd-populate", daemon=True).start()


class LeaseBase:
    """The right to a prefix's pages and to pages behind it, until released.

    The lease's block table, `pages`, has the matched blocks' pages first and the reserved ones
    behind them, so that page i holds the tokens from `i * block_size` on. What is matched is read
    through read-only views, what is reserved is written through writable ones; after using either
    and before relying on the result, `check()` says whether the pages were still this lease's.

    Not for several threads or tasks at once.
    """

    def __init__(
        self,
        client: ClientBase,
        layout: Layout,
        binding: Binding | None = None,
        lease_id: int = 0,
        result: MatchResult | None = None,
    ) -> None:
        """Made by `Namespace.match`; without a binding it is a miss in an outage."""
        self.layout = layout
        self.num_tokens = result.num_tokens if result else 0
        self.num_committed = self.num_tokens
        self.tokens_by_tier = result.tokens_by_tier if result else {}
        self.shortage: Shortage | None = result.shortage if result else None
        self.pages: Pages = pages_of(result.runs if result else ())
        self._client = client
        self._binding = binding
        self._id = lease_id
        self._result = result
        self._num_granted = 0
        # Tokens up to which blocks were named in a commit, whatever became of it.
        self._num_named = self.num_committed
        self._exports: list[_Export] = []
        if binding and result:
            binding.populate_read(self.pages)
            self._grant(result.reserved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.release()
        else:
            self._let_go()  # the traceback may hold views: then released when they are gone

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a half-made lease, or an interpreter that ends
            self._let_go()

    @property
    def is_open(self) -> bool:
        """Whether the lease can be used: granted, not released, and not ended by the daemon."""
        binding, result = self._binding, self._result
        if binding is None or result is None:
            return False
        session = binding.session
        return (
            session.lock.is_held  # not so in a forked child, which has no mapping either
            and session.header.epoch == session.epoch
            and session.header.generation(result.slot) == result.generation
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens for which the block table has pages."""
        return len(self.pages) * self.layout.block_size

    def check(self) -> None:
        """Raise LeaseEnded if the pages may have been another's since they were used."""
        if not self.is_open:
            raise LeaseEnded("the lease has ended: what was computed with its pages is void")

    # --- pages ---

    def _reserve(self, num_tokens: int, timeout: float | None) -> Operation[None]:
        missing = pages_for(num_tokens, self.layout) - len(self.pages)
        if missing <= 0:
            return
        binding = self._bound()
        deadline = self._client.deadline(timeout)
        request = ReserveRequest(
            id=self._client.next_id(),
            epoch=binding.session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            items=(
                ReserveItem(
                    self._id, self._num_granted, self._num_granted + missing, ahead_of(missing)
                ),
            ),
        )
        reply = yield from self._ask(request, deadline, ReserveReply)
        self._grant(result_of(reply.results).runs)

    def _grant(self, runs: Runs) -> None:
        pages = pages_of(runs)
        self._num_granted += len(pages)
        self.pages = np.concatenate((self.pages, pages))
        if self._binding is not None:
            self._binding.populate_write(pages)

    # --- views ---

    def read_arrays(self, start: int, stop: int) -> list[Array]:
        """The KV of tokens `start` to `stop - 1`, one read-only array per run of pages.

        Each is `[layers, planes, tokens, heads, head_size]`; of one layer and plane it is one
        strided array. bfloat16 comes as its bits, in uint16.
        """
        arena = self._bound().arena.readable
        return [arena.run_view(run)[:, :, part] for run, part in self._pieces(start, stop)]

    def read_tensors(self, start: int, stop: int) -> list[torch.Tensor]:
        """As `read_arrays`, as torch tensors. torch knows no read-only: writing to one faults."""
        pages = self._bound().read_tensor
        return [
            pages[:, :, run.first : run.first + run.count].flatten(2, 3)[:, :, part]
            for run, part in self._pieces(start, stop)
        ]

    def write_arrays(self, start: int, stop: int) -> list[Array]:
        """Writable arrays over reserved pages, shaped as those of `read_arrays`.

        Let go of them before commit, abort or release, which refuse while any of them lives.
        Raises BadRequest for tokens that are matched or committed: those are never written again.
        """
        if start < self._num_named:
            raise BadRequest(f"token {start} is committed; writable from {self._num_named} on")
        pieces = self._pieces(start, stop)
        arena = self._bound().arena.writable()
        self._exports.append(_Export(start, stop, weakref.ref(arena.root)))
        return [arena.run_view(run)[:, :, part] for run, part in pieces]

    def write_tensors(self, start: int, stop: int) -> list[torch.Tensor]:
        """As `write_arrays`, as torch tensors."""
        return [as_tensor(array, self.layout) for array in self.write_arrays(start, stop)]

    def _pieces(self, start: int, stop: int) -> list[tuple[Run, slice]]:
        """The runs of pages that hold these tokens, and which tokens of each run."""
        if not 0 <= start <= stop <= self.capacity_tokens:
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

    def _commit(self, tokens: TokenIds, timeout: float | None) -> Operation[int]:
        packed = pack_tokens(tokens)
        count = len(packed) // (self.layout.block_size * TOKEN_BYTES)
        stop = self.num_committed + count * self.layout.block_size
        if stop > self.capacity_tokens:
            raise BadRequest(f"tokens up to {stop} have no pages; reserve them first")
        if count == 0:
            return self.num_committed
        self._check_exports(stop)
        binding = self._bound()
        deadline = self._client.deadline(timeout)
        first = self.num_committed // self.layout.block_size
        packed = packed[: count * self.layout.block_size * TOKEN_BYTES]
        item = CommitItem(
            self._id,
            first,
            runs_of(self.pages[first : first + count]),
            len(packed) // TOKEN_BYTES,
        )
        request = CommitRequest(
            id=self._client.next_id(),
            epoch=binding.session.epoch,
            deadline_ns=wire(deadline),
            trace=traceparent(),
            items=(item,),
        )
        self._num_named = stop
        reply = yield from self._ask(request, deadline, CommitReply, packed)
        result = result_of(reply.results)
        # Where a block was there before, its page takes the place of this lease's copy.
        self.pages[first : first + count] = pages_of(result.runs)
        self.num_committed = stop
        return stop

    def abort(self) -> None:
        """Give back the pages that are not committed. Raises PagesInUse."""
        self._check_exports(self.capacity_tokens)
        binding = self._binding
        if binding is not None:
            self.pages = self.pages[: self.num_committed // self.layout.block_size]
            self._num_granted = 0
            self._num_named = self.num_committed
            self._client.post(
                binding.session,
                AbortRequest(id=NO_REPLY, epoch=binding.session.epoch, leases=(self._id,)),
            )

    def release(self) -> None:
        """End the lease. Idempotent; raises PagesInUse while a writable view of its pages lives."""
        self._check_exports(self.capacity_tokens)
        binding, self._binding = self._binding, None
        if binding is not None:
            self._client.released(binding.session, self._id)

    def release_quietly(self) -> bool:
        """Release the lease if no writable view is left; whether it is released."""
        with contextlib.suppress(PagesInUse):
            self.release()
        return self._binding is None

    def _let_go(self) -> None:
        if not self.release_quietly():
            self._client.linger(self)

    def _check_exports(self, stop: int) -> None:
        self._exports = [export for export in self._exports if export.root() is not None]
        held = [export for export in self._exports if export.start < stop]
        if held:
            raise PagesInUse(
                f"a writable view of tokens {held[0].start} to {held[0].stop} is still in use: "
                "let go of the arrays and tensors first"
            )

    def _bound(self) -> Binding:
        if self._binding is None:
            raise LeaseEnded("the lease was released, or never had pages (no daemon answered)")
        if not self._binding.session.lock.is_held:
            raise LeaseEnded("a forked child has no leases of its parent: match anew")
        return self._binding

    def _ask(
        self, request: AnyRequest, deadline: float, kind: type[R], tokens: bytes | None = None
    ) -> Operation[R]:
        session = self._bound().session
        try:
            return (yield from self._client.request(session, request, deadline, kind, tokens))
        except (NotAttached, StaleEpoch) as error:
            raise LeaseEnded(f"the lease ended with its session: {error}") from error


@dataclass(frozen=True, slots=True)
class _Export:
    """Writable views of these tokens, alive while `root` is: every view of an arena holds it."""

    start: int
    stop: int
    root: weakref.ref[Array]


def pages_for(num_tokens: int, layout: Layout) -> int:
    return -(-num_tokens // layout.block_size)


def ahead_of(num_pages: int) -> int:
    """How many pages to ask for beside these, so that runs are whole groups."""
    return -num_pages % GROUP_PAGES


def as_tensor(array: Array, layout: Layout) -> torch.Tensor:
    """A torch tensor over the array's memory, in the layout's dtype."""
    import torch  # only who asks for tensors needs it

    return torch.from_numpy(array).view(getattr(torch, layout.dtype))
