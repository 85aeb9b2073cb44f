"""Traces: what a request's span tells of its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
    from kvd.actors.verbs import Answer
    from kvd.cache.state import CacheState


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
