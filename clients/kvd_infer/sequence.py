"""Sequence: one output of a request on its way, with its tokens and its KV."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from opentelemetry import trace
from torch import Tensor

from kvd_client import LeaseEnded
from kvd_infer import telemetry
from kvd_infer.rows import Rows

if TYPE_CHECKING:
    from kvd_client import Layout, Lease, Namespace
    from kvd_infer.sampler import SamplingParams
    from kvd_infer.text import TextStream


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of an engine: `params.n` continuations of the prompt `tokens`.

    Of those that wait the next is the one of the highest priority, and the oldest of these. What
    is not done by `deadline`, as time.monotonic() has it, ends there.
    """

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    deadline: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The next tokens of a sequence, from position `start` on, and where their rows lie.

    `tokens` are ids, `[tokens]` in int64; `targets` the rows to be written and `parts` all rows to
    attend to, as `[layers, planes, tokens, heads, head_size]`, in the tokens' order.
    """

    tokens: Tensor
    start: int
    targets: list[Tensor]
    parts: list[Tensor]

    def forget(self) -> None:
        """Let go of all views, whoever has this: nothing may hold one when rows are `written`."""
        self.targets.clear()
        self.parts.clear()


class Sequence:
    """Its tokens are the prompt and what was generated; the KV of all but the last is computed.

    tokens:   0 ……… prompt ……… generated ……… num_tokens
    rows:     0 ……………… rows.length ……………… num_tokens - 1
              KV is there   to be computed      to be sampled from

    It has rows while it runs. What it gives back when it is preempted is matched again later, as
    far as it is still cached, and computed else: nothing of the output changes.
    """

    def __init__(self, request: Request, sample: int, arrival: int) -> None:
        self.request = request
        self.sample = sample
        self.order = (-request.priority, arrival, sample)
        self.num_tokens = self.num_prompt = len(request.tokens)
        self._ids = torch.empty(self.num_prompt + request.params.max_tokens, dtype=torch.int64)
        self._ids[: self.num_prompt] = torch.tensor(request.tokens)
        self.rows: Rows | None = None
        # Of the prompt, those that were in kvd when it began; not what it has computed since.
        self.cached_tokens: int | None = None
        self.text: TextStream | None = None
        self.generation = 0  # of its last save
        self.span = telemetry.tracer.start_span(
            telemetry.REQUEST,
            attributes={"request": request.id, "sample": sample, "prompt_tokens": self.num_prompt},
        )

    @property
    def name(self) -> str:
        """What it is saved by."""
        return f"{self.request.id}/{self.sample}"

    @property
    def tokens(self) -> Tensor:
        """All ids so far, `[num_tokens]` in int64."""
        return self._ids[: self.num_tokens]

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def most_tokens(self) -> int:
        """How long it may get."""
        return len(self._ids)

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is to be computed before the next can be sampled."""
        return self.num_tokens - (self.rows.length if self.rows else 0)

    @property
    def is_private(self) -> bool:
        """Whether its KV lies in memory of the engine's own."""
        return self.rows is not None and self.rows.are_private

    @property
    def num_private(self) -> int:
        """Tokens whose KV lies there, or will when they are computed."""
        if self.rows is None or not self.rows.are_private:
            return 0
        return max(self.num_tokens - self.rows.capacity, 0)

    @property
    def tokens_by_tier(self) -> Mapping[str, int]:
        """Where what is cached of its tokens was when it began."""
        return self.rows.lease.tokens_by_tier if self.rows and self.rows.lease else {}

    def begin(
        self, namespace: Namespace | None, layout: Layout, seconds: float | None = None
    ) -> None:
        """Take what is cached of its tokens, and comes to memory within so many seconds."""
        with trace.use_span(self.span), telemetry.tracer.start_as_current_span(telemetry.MATCH):
            self._have(Rows(namespace, layout, self.tokens, seconds=seconds))

    def resume(self, namespace: Namespace, generated: list[int], lease: Lease) -> None:
        """Go on behind tokens that another process generated, with what is left of their KV."""
        for token in generated:
            self.append(token)
        self._have(Rows(namespace, namespace.layout, self.tokens, lease))

    def _have(self, rows: Rows) -> None:
        self.rows = rows
        if self.cached_tokens is None:
            self.cached_tokens = min(rows.reused_tokens, self.num_prompt)

    def share(self, other: Sequence, seconds: float) -> bool:
        """Share the rows of another sequence of the request, whose prompt is all computed.

        Whether that could be; else it takes what is cached, as any.
        """
        with suppress(LeaseEnded):
            self.rows = other.rows.fork(seconds) if other.rows else None
        return self.rows is not None

    def reserve(self, num_tokens: int, seconds: float) -> bool:
        """Have pages for so many of the missing tokens; whether there are. Raises LeaseEnded."""
        assert self.rows is not None
        return self.rows.reserve(self.rows.length + num_tokens, seconds)

    def chunk(self, num_tokens: int) -> Chunk:
        """The next tokens to be computed. Raises LeaseEnded."""
        assert self.rows is not None
        start = self.rows.length
        stop = start + num_tokens
        return Chunk(self.tokens[start:stop], start, *self.rows.extend(stop))

    def written(self, num_tokens: int) -> None:
        """The rows of so many more tokens are computed. Raises LeaseEnded where that is void."""
        assert self.rows is not None
        self.rows.learn(self.tokens)
        self.rows.written(self.rows.length + num_tokens)

    def append(self, token: int) -> None:
        self._ids[self.num_tokens] = token
        self.num_tokens += 1

    def release(self) -> None:
        """Give its pages back; what is committed stays cached, as long as there is room."""
        if self.rows is not None:
            # The traceback of a step that failed may hold views of them.
            self.rows.close(Exception)
            self.rows = None

    def end(self, reason: str) -> None:
        """It is over."""
        self.release()
        self.span.set_attributes(
            {
                "reason": reason,
                "cached_tokens": self.cached_tokens or 0,
                "generated_tokens": self.num_generated,
            }
        )
        self.span.end()
