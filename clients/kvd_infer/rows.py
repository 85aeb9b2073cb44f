"""The keys and values of one sequence: in pages leased from kvd, then in private memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor

from kvd_client import (
    BadRequest,
    Client,
    DaemonUnavailable,
    DeadlineExceeded,
    KvdError,
    Layout,
    Lease,
    LeaseEnded,
    Namespace,
    OutOfPages,
    PagesInUse,
)
from kvd_infer import telemetry

logger = logging.getLogger(__name__)

# Pages that are not there soon are not worth the wait: there is private memory.
RESERVE_SECONDS = 1.0
CHUNK_TOKENS = 256

# Whoever goes on without kvd: that is said once, until a match is answered again.
_without_kvd: WeakSet[Client] = WeakSet()


class Rows:
    """The KV of one sequence's tokens, a row for each; what kvd knows of them is there at first.

    tokens:   0 ……… sealed ……… length ……… capacity ………
    lie in:   pages            own pages            private memory
              that are never written again

    The first ids are known, so that their blocks can be committed as soon as they are written. A
    daemon that is away or has no pages is no error: the rest then lies in private memory. Views
    are `[layers, planes, tokens, heads, head_size]`, in the tokens' order; those for writing must
    be gone before the next call.
    """

    length: int  # tokens whose rows are written
    reused_tokens: int  # those of them that were matched
    _pages_end: bool  # once a token has no page, none behind it gets one: commits are contiguous

    def __init__(
        self,
        namespace: Namespace | None,
        layout: Layout,
        tokens: Tensor,
        lease: Lease | None = None,
        seconds: float | None = None,
    ) -> None:
        """Match the ids `tokens` but for the last: an engine computes at least one itself.

        What only stores have of them is waited for so long, by default as the client waits. Or have
        what a lease has of them, be it a resumed sequence's.
        """
        self._namespace = namespace
        self._layout = layout
        self._tokens = tokens
        self._take(lease or self._match(tokens[:-1], seconds))
        self.reused_tokens = self.length

    @property
    def num_known(self) -> int:
        """Tokens whose ids are known."""
        return len(self._tokens)

    @property
    def num_committed(self) -> int:
        return self._lease.num_committed if self._lease else 0

    @property
    def lease(self) -> Lease | None:
        """The pages; None where all lies in private memory."""
        return self._lease

    @property
    def are_private(self) -> bool:
        """Whether those that come lie in private memory, and are not committed."""
        return self._lease is None or self._pages_end

    @property
    def capacity(self) -> int:
        """Tokens that have a page."""
        return self._lease.capacity_tokens if self._lease else 0

    def reserve(self, num_tokens: int, seconds: float) -> bool:
        """Have pages for so many tokens; whether there are, or none are to be had any more.

        Raises LeaseEnded.
        """
        lease = self._lease
        if lease is None or self._pages_end or num_tokens <= lease.capacity_tokens:
            return True
        with self._going_on():
            try:
                lease.reserve(num_tokens, timeout=seconds)
            except (OutOfPages, DeadlineExceeded):
                return False
            return True
        self._pages_end = True
        return True

    def extend(self, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        """Views for writing tokens `length` to `stop - 1`, and for reading all up to them.

        Tokens for which there is no page soon, and all behind them, lie in private memory.
        """
        self._check()
        self._reserve_or_end(stop)
        return self._views(self.length, stop, for_writing=True), self._views(0, stop)

    def written(self, stop: int) -> None:
        """The rows up to `stop` are written: commit blocks of known ids. Raises LeaseEnded."""
        self._check()
        start, self.length = self.length, stop
        size = self._layout.block_size
        # Once for each block: what cannot be committed would be tried again with each token.
        if start < self.num_known and start // size < stop // size:
            self._commit()

    def commit(self, tokens: Tensor) -> None:
        """Commit what is written of the sequence, whose ids are `tokens`. Raises LeaseEnded."""
        if len(tokens) < self.length:
            raise BadRequest(f"{len(tokens)} ids for the KV of {self.length} tokens: crop it first")
        if not torch.equal(tokens[: self.num_known], self._tokens):
            raise BadRequest("the ids do not begin with the prompt, or with what was committed")
        self.learn(tokens[: max(self.length, self.num_known)])
        self._commit()

    def learn(self, tokens: Tensor) -> None:
        """The ids of the sequence so far, which begin with those that are known."""
        self._tokens = tokens

    def fork(self, seconds: float) -> Rows | None:
        """The same rows for another sequence, blocks shared and the rest copied.

        None where they lie in private memory, or there are no pages for the rest so soon. Raises
        LeaseEnded.
        """
        old = self._lease
        if old is None or self._pages_end:
            return None
        with self._going_on():
            num_tokens = self.length - self.num_committed
            lease = old.fork(reserve_tokens=num_tokens, timeout=seconds)
            if lease.capacity_tokens >= self.length:
                lease.copy_rows(old, self.num_committed, self.length)
                fork = Rows(self._namespace, self._layout, self._tokens, lease)
                fork.length = self.length
                return fork
            lease.release()
        return None

    def crop(self, num_tokens: int) -> None:
        """Forget all rows and ids but those of the first tokens, of which there are more.

        Where that goes into blocks which are never written again, the sequence goes on in pages of
        its own, with copies of the rows that it keeps of the last block. Raises LeaseEnded.
        """
        self._tokens = self._tokens[:num_tokens]
        self.reused_tokens = min(self.reused_tokens, num_tokens)
        if num_tokens < self._num_sealed:
            self._move(num_tokens)
        self.length = num_tokens

    def begin_anew(self) -> None:
        """Forget all rows; the known ids are to be written again."""
        tokens = self._tokens
        self.crop(0)
        self._tokens = tokens

    def close(self, error: type[BaseException] | None = None) -> None:
        """Release the pages, later where a traceback may hold views of them. Idempotent."""
        self._memory = _PrivateMemory(self._layout)
        if self._lease is not None:
            self._lease.__exit__(error)

    # --- where rows lie ---

    def _views(self, start: int, stop: int, *, for_writing: bool = False) -> list[Tensor]:
        capacity = self.capacity
        views: list[Tensor] = []
        if self._lease is not None and start < capacity:
            pages = self._lease.write_tensors if for_writing else self._lease.read_tensors
            views += pages(start, min(stop, capacity))
        if stop > capacity:
            views += self._memory.tensors(max(start - capacity, 0), stop - capacity)
        return views

    def _reserve_or_end(self, num_tokens: int) -> None:
        """Have pages for so many tokens; without them, none behind gets one any more."""
        if not self.reserve(num_tokens, RESERVE_SECONDS):
            self._pages_end = True

    def _move(self, num_tokens: int) -> None:
        """Hold the first tokens in a lease that can be written behind them."""
        old = self._lease
        assert old is not None, "only pages are never written again"
        self._take(self._match(self._tokens))
        self._reserve_or_end(num_tokens)
        _copy(
            old.read_tensors(self.length, num_tokens),
            self._views(self.length, num_tokens, for_writing=True),
        )
        old.check()
        old.release_quietly()  # or it is released when the last views of its pages are gone

    # --- the daemon ---

    def _take(self, lease: Lease | None) -> None:
        """The rows are those that this lease matched; without one all lies in private memory."""
        self._lease = lease
        self._memory = _PrivateMemory(self._layout)
        self._pages_end = False
        self.length = self._lease.num_tokens if self._lease else 0
        self._num_sealed = self.num_committed

    def _match(self, tokens: Tensor, seconds: float | None = None) -> Lease | None:
        """A lease of the longest prefix that kvd knows; None where there is none to be had."""
        if self._namespace is None:
            return None
        client = self._namespace.client
        with self._going_on():
            lease = self._namespace.match(tokens.numpy(), exact_tail=True, timeout=seconds)
            if not lease.is_open and lease.capacity_tokens == 0:
                raise DaemonUnavailable(f"none answers on {client.endpoint}")
            if client in _without_kvd:
                _without_kvd.discard(client)
                logger.warning("kvd answers again")
            return lease
        return None

    def _check(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _commit(self) -> None:
        """Commit the whole blocks of known ids whose rows are written, and lie in pages."""
        if (lease := self._lease) is not None:
            stop = min(self.num_known, self.length, lease.capacity_tokens)
            # Whatever becomes of the commit: an answer may be lost.
            self._num_sealed = max(self._num_sealed, stop - stop % self._layout.block_size)
            if stop - lease.num_committed >= self._layout.block_size:
                with self._going_on(), telemetry.tracer.start_as_current_span(telemetry.COMMIT):
                    lease.commit(self._tokens[lease.num_committed : stop].numpy())

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Inference goes on without what the daemon could not do, whatever the reason."""
        try:
            yield
        except (BadRequest, LeaseEnded, PagesInUse):  # mistakes, and what must be told
            raise
        except KvdError as error:
            assert self._namespace is not None
            if (client := self._namespace.client) not in _without_kvd:
                _without_kvd.add(client)
                logger.warning("going on without kvd: %s", error)


class _PrivateMemory:
    """The KV of tokens that have no page, in the shape of leased runs; grows by chunks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._chunks: list[Tensor] = []

    def tensors(self, start: int, stop: int) -> list[Tensor]:
        """Views of tokens `start` to `stop - 1`, one per chunk."""
        self._grow(stop)
        views, at = [], 0
        for chunk in self._chunks:
            size = chunk.shape[2]
            first, end = max(start - at, 0), min(stop - at, size)
            if first < end:
                views.append(chunk[:, :, first:end])
            at += size
        return views

    def _grow(self, num_tokens: int) -> None:
        missing = num_tokens - sum(chunk.shape[2] for chunk in self._chunks)
        if missing > 0:
            layout = self._layout
            shape = (
                layout.num_layers,
                layout.num_planes,
                max(missing, CHUNK_TOKENS),
                layout.num_kv_heads,
                layout.head_size,
            )
            self._chunks.append(torch.empty(shape, dtype=getattr(torch, layout.dtype)))


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy rows between views that are cut in different places."""
    if sources:
        rows = torch.cat(list(sources), dim=2).split([target.shape[2] for target in targets], dim=2)
        for target, its_rows in zip(targets, rows, strict=True):
            target.copy_(its_rows)
