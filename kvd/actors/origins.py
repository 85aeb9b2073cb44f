"""Origins: from which spans the blocks come that memory has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from opentelemetry import trace

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from kvd.arena.page_table import PageTable
    from kvd.arena.runs import Pages

# Of so many blocks it is known who committed them: a few megabytes.
MAX_ORIGINS = 1 << 14


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
