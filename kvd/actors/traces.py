"""Traces: what a request's span tells of its answer, and from which spans blocks come."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from opentelemetry import trace

from kvd import telemetry
from kvd.protocol.messages import (
    AnyRequest,
    CommitResult,
    MatchResult,
    ReserveResult,
    Runs,
)

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from kvd.actors.verbs import Answer
    from kvd.arena.page_table import PageTable
    from kvd.arena.runs import Pages
    from kvd.cache.state import CacheState

# Of so many blocks it is known who committed them: a few megabytes.
MAX_ORIGINS = 1 << 14


def tell_answer(state: CacheState, session: int, request: AnyRequest, answer: Answer) -> None:
    """Tell the current span what its request was about, and what it got."""
    told: Counter[str] = Counter()
    for result in getattr(answer.reply, "results", ()):
        match result:
            case MatchResult():
                told[telemetry.MATCHED_TOKENS] += sum(result.tokens_by_tier.values())
                for tier, num_tokens in result.tokens_by_tier.items():
                    told[f"{telemetry.MATCHED_TOKENS}.{tier}"] += num_tokens
                told[telemetry.NUM_PAGES] += _num_pages(result.reserved)
            case ReserveResult() | CommitResult():
                told[telemetry.NUM_PAGES] += _num_pages(result.runs)
    if answer.frames:
        told[telemetry.NUM_BYTES] = sum(memoryview(frame).nbytes for frame in answer.frames)
    span = trace.get_current_span()
    span.set_attributes(told)
    items = (answer.reply, *getattr(request, "items", (request,)))
    if models := _models(state, session, items):
        span.set_attribute(telemetry.NAMESPACE, ", ".join(sorted(models)))


def _models(state: CacheState, session: int, items: Iterable[object]) -> set[str]:
    """Of the namespaces that these name, or that the leases are of which they name."""
    models = set()
    for item in items:
        if space := state.namespaces.get(getattr(item, "namespace", -1)):
            models.add(space.identity.model)
        elif lease := state.leases.find(session, getattr(item, "lease", -1)):
            models.add(lease.namespace.identity.model)
    return models


def _num_pages(runs: Runs) -> int:
    return sum(run.count for run in runs)


class Origins:
    """Which spans committed the blocks that memory has, so that their copies are linked to them.

    A page has other blocks in turn, each under a generation of its own.
    """

    def __init__(self) -> None:
        self._spans: dict[tuple[int, int, int], SpanContext] = {}

    def note(self, arena: int, table: PageTable, pages: Pages) -> None:
        """These blocks come from the current span, if it is to be seen."""
        span = trace.get_current_span()
        if not span.is_recording():
            return
        self._spans |= dict.fromkeys(_blocks(arena, table, pages), span.get_span_context())
        while len(self._spans) > MAX_ORIGINS:
            del self._spans[next(iter(self._spans))]

    def links(self, arena: int, table: PageTable, pages: Pages) -> list[trace.Link]:
        """To the spans that these blocks come from, as far as that is known."""
        if not self._spans:
            return []
        blocks = _blocks(arena, table, pages)
        spans = {span.span_id: span for block in blocks if (span := self._spans.get(block))}
        return [trace.Link(span) for span in spans.values()]


def _blocks(arena: int, table: PageTable, pages: Pages) -> Iterator[tuple[int, int, int]]:
    return zip(itertools.repeat(arena), pages.tolist(), table.generations(pages).tolist())
