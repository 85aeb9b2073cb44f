"""Scheduler: which tokens of which sequences the next step computes.

Continuous batching (Orca, Yu 2022) with chunked prefill (Sarathi, Agrawal 2023): each step has a
budget of tokens, of which every sequence that generates takes one, and prompts the rest. Where
pages run out, the last sequence gives back its own and waits: what it has committed stays cached,
so that it goes on by matching.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd_client import BadRequest, LeaseEnded
from kvd_infer import telemetry

if TYPE_CHECKING:
    from kvd_client import Layout, Namespace
    from kvd_infer.sequence import Sequence

# Pages that memory is being found for come soon; others when a sequence gives back its own.
GROW_SECONDS = 0.02
# Others' pages may be free again: a sequence for which there were none is tried so often.
RETRY_SECONDS = 0.2
# What only stores have was asked for when the request came: while others run, those wait no longer.
MATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step computes at most, and how many sequences run.

    `private_tokens` is for how many tokens there may be KV in memory of the engine's own, where
    there is no kvd or no page; one sequence goes on in any case.
    """

    step_tokens: int = 512
    sequences: int = 32
    private_tokens: int = 16384

    def __post_init__(self) -> None:
        if min(self.step_tokens, self.sequences) < 1:
            raise BadRequest("limits are at least one token a step, and one sequence")


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Part:
    """What a step computes of one sequence: its next `num_tokens` tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled then."""
        return self.num_tokens == self.sequence.num_missing


class Scheduler:
    """The sequences that wait and those that run, each in the order of their turn."""

    def __init__(self, namespace: Namespace | None, layout: Layout, limits: Limits) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.namespace = namespace
        self._layout = layout
        self._limits = limits
        self.num_preempted = 0
        self._retry_at = 0.0

    @property
    def has_place(self) -> bool:
        """Whether another one may run."""
        return len(self.running) < self._limits.sequences

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def run(self, sequence: Sequence) -> None:
        """Have a sequence run that has its rows already; without a place it waits, without them."""
        if self.has_place:
            insort(self.running, sequence, key=_order)
        else:
            sequence.release()
            self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It is over, wherever it was."""
        for sequences in (self.running, self.waiting):
            if sequence in sequences:
                sequences.remove(sequence)
        self._retry_at = 0.0

    def preempt(self, sequence: Sequence) -> None:
        """It waits for its turn again, without pages."""
        self.running.remove(sequence)
        sequence.release()
        self.num_preempted += 1
        self.add(sequence)

    def plan(self) -> list[Part]:
        """What the next step computes, within the budget; pages for it are there."""
        num_running = len(self.running)
        parts = self._go_on()
        if len(self.running) == num_running:  # else pages are short
            parts += self._admit(self._limits.step_tokens - sum(part.num_tokens for part in parts))
        return parts

    # --- those that run ---

    def _go_on(self) -> list[Part]:
        """Those that generate come first: each takes one token, and somebody reads along."""
        budget = self._limits.step_tokens
        parts: list[Part] = []
        for sequence in sorted(self.running, key=lambda each: (each.num_missing > 1, each.order)):
            num_tokens = min(sequence.num_missing, budget)
            if num_tokens and sequence in self.running and self._make_room(sequence, num_tokens):
                parts.append(Part(sequence, num_tokens))
                budget -= num_tokens
        return [part for part in parts if part.sequence in self.running]

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Preempt the last ones until there are pages; whether the sequence still runs.

        One that is alone goes on in private memory instead. Where that is short, the last ones that
        have some are preempted.
        """
        try:
            while not self._has_room(sequence, num_tokens):
                rivals = [
                    each for each in self.running if each.is_private or not sequence.is_private
                ]
                if len(rivals) == 1:
                    break
                self.preempt(last := rivals[-1])
                if last is sequence:
                    return False
        except LeaseEnded:  # the daemon is another: its rows are void
            self.preempt(sequence)
            return False
        return True

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether there are pages for so many of its missing tokens, or there is private memory."""
        has_pages = sequence.reserve(num_tokens, GROW_SECONDS)
        if not sequence.is_private:
            return has_pages
        num_private = sum(each.num_private for each in {sequence, *self.running})
        return num_private <= self._limits.private_tokens

    # --- those that wait ---

    def _admit(self, budget: int) -> list[Part]:
        parts: list[Part] = []
        for sequence in list(self.waiting):
            if budget == 0 or not self.has_place:
                break
            if self._is_under_way(sequence):
                continue
            if not self._begin(sequence):
                break
            self.waiting.remove(sequence)
            self.run(sequence)
            for tier, num_tokens in sequence.tokens_by_tier.items():
                telemetry.tokens.add(num_tokens, {"source": tier})
            parts.append(Part(sequence, min(sequence.num_missing, budget)))
            budget -= parts[-1].num_tokens
        return parts

    def _is_under_way(self, sequence: Sequence) -> bool:
        """Whether one that runs, and has its turn before, computes blocks that this one shares.

        It commits them sooner than they could be computed twice out of one budget.
        """
        size = self._layout.block_size
        return any(
            other.num_missing > 1
            and not other.is_private
            and other.rows is not None
            and other.order < sequence.order
            and _num_shared(other, sequence) // size * size > other.rows.num_committed
            for other in self.running
        )

    def _begin(self, sequence: Sequence) -> bool:
        """Take what is cached, and pages for all that is missing; whether there are.

        Where nobody runs who would give pages back, it begins with those that there are.
        """
        if self.running and time.monotonic() < self._retry_at:
            return False
        try:
            sequence.begin(self.namespace, self._layout, MATCH_SECONDS if self.running else None)
            # A block more, or the first tokens that it generates would take the room of another.
            num_tokens = sequence.num_missing + self._layout.block_size
            if self._has_room(sequence, num_tokens) or not self.running:
                return True
        except LeaseEnded:  # there will be another daemon
            pass
        sequence.release()
        self._retry_at = time.monotonic() + RETRY_SECONDS
        return False


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


def _num_shared(one: Sequence, other: Sequence) -> int:
    """How many tokens both begin with."""
    size = min(one.num_tokens, other.num_tokens)
    differs = one.tokens[:size] != other.tokens[:size]
    return int(differs.int().argmax()) if differs.any() else size
