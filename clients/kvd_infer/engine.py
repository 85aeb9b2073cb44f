"""Engine: requests in, tokens out; one step of all sequences after the other.

    engine = Engine(Model.load(directory), client)
    engine.add(Request("one", tokens, SamplingParams(max_tokens=64)))
    while engine.has_work:
        for output in engine.step(): ...

What a step computed is believed only when its pages were its own to the end (`Sequence.written`),
before any token of it is sampled. Whose rows were void waits for its turn, and computes again what
is no longer cached: with kvd, or without it in private memory, to the same end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from kvd_client import BadRequest, KvdError, LeaseEnded, SequenceTaken
from kvd_infer import telemetry
from kvd_infer.sampler import Draw, NextToken, next_tokens
from kvd_infer.saved import Saved, check_saving
from kvd_infer.scheduler import DEFAULT_LIMITS, GROW_SECONDS, MATCH_SECONDS, Limits, Part, Scheduler
from kvd_infer.sequence import Chunk, Request, Sequence
from kvd_infer.text import TextStream

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from kvd_client import Client, Lease, Namespace, Resumed
    from kvd_infer.model import Model

logger = logging.getLogger(__name__)

# Why a sequence is over: a stop token or string, its length, its caller, its deadline, or another
# process that goes on with it; or a fault of ours, which the log tells.
Reason: TypeAlias = Literal["stop", "length", "cancelled", "deadline", "taken", "failed"]


@dataclass(frozen=True, slots=True)
class Output:
    """What came of one sequence in a step: its next tokens, and why it is over if it is.

    `text` is what became final with them, for an engine with a tokenizer. `cached_tokens` of the
    prompt were in kvd when the sequence began.
    """

    request: str
    sample: int
    tokens: tuple[NextToken, ...]
    text: str
    cached_tokens: int
    reason: Reason | None = None


class Engine:
    """A model, the sequences that it generates, and their pages. One thread at a time.

    Whatever becomes of the daemon, sequences end as they would without it.
    """

    def __init__(
        self,
        model: Model,
        client: Client | None = None,
        *,
        tokenizer: PreTrainedTokenizerFast | None = None,
        limits: Limits = DEFAULT_LIMITS,
        save_every: int = 0,
    ) -> None:
        """Without a client all KV lies in private memory.

        Each sequence is saved in kvd after so many tokens that it generated, 0 for never. The
        model's own end of text is the tokenizer's.
        """
        self.model = model
        self.scheduler = Scheduler(
            client.open(model.identity, model.layout) if client else None, model.layout, limits
        )
        self.num_computed = 0  # tokens, but for those of void steps
        self._tokenizer = tokenizer
        self._save_every = save_every
        self._num_added = 0
        # The sequences of each request that are not over, and of these those which wait for the
        # first one to have computed the prompt for all.
        self._requests: dict[str, list[Sequence]] = {}
        self._followers: dict[Sequence, list[Sequence]] = {}
        self._outputs: list[Output] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._outputs)

    @property
    def namespace(self) -> Namespace | None:
        """Where its KV is cached."""
        return self.scheduler.namespace

    # --- requests ---

    def add(self, request: Request) -> None:
        """Have a request wait for its turn. Raises BadRequest for one that cannot be."""
        if request.id in self._requests:
            raise BadRequest(f"request {request.id} is under way already: give each its own id")
        self.check(request)
        self._prefetch(request)
        request = replace(request, params=request.params.seeded())
        first, *others = (self._sequence(request, sample) for sample in range(request.params.n))
        self._requests[request.id] = [first, *others]
        if others:
            self._followers[first] = others
        self.scheduler.add(first)

    def resume(self, name: str) -> Request:
        """Go on with a sequence that another engine saved, by its name; what was asked of that.

        The first output has all tokens up to the last save. Raises UnknownSequence, BadRequest for
        what is under way here, no engine saved or this one cannot do, DaemonUnavailable,
        DeadlineExceeded.
        """
        if self.namespace is None:
            raise BadRequest("an engine without kvd has no saved sequences: give it a client")
        id = name.rpartition("/")[0]
        if any(each.name == name for each in self._requests.get(id, ())):
            raise BadRequest(f"{name} is under way here already")
        resumed = self.namespace.resume(name)
        try:
            sequence, generated = self._taken_up(name, resumed)
        except BadRequest as error:
            resumed.lease.release()
            raise BadRequest(f"{name} cannot be gone on with here: {error}") from error
        sequence.resume(self.namespace, generated, resumed.lease)
        sequence.generation = resumed.generation
        self._requests.setdefault(id, []).append(sequence)
        self.scheduler.run(sequence)
        text = sequence.text.feed(generated) if sequence.text else ""
        self._say(sequence, tuple(NextToken(token, None) for token in generated), text)
        return sequence.request

    def cancel(self, id: str) -> None:
        """End a request where it stands; one that is over already stays as it is."""
        for sequence in list(self._requests.get(id, ())):
            self._end(sequence, "cancelled")

    def close(self) -> None:
        """End all requests."""
        for id in list(self._requests):
            self.cancel(id)

    def check(self, request: Request) -> None:
        """Raises BadRequest for one that cannot be. For any thread."""
        prompt, most = request.tokens, len(request.tokens) + request.params.max_tokens
        if most > self.model.max_tokens:
            raise BadRequest(
                f"a prompt of {len(prompt)} tokens and max_tokens {request.params.max_tokens} are "
                f"more than the {self.model.max_tokens} of the model"
            )
        if not prompt or not self._are_ids(prompt):
            raise BadRequest(
                f"a prompt has at least one token, and ids below {self.model.vocabulary_size}"
            )
        if request.params.stop and self._tokenizer is None:
            raise BadRequest("stop strings need a tokenizer: give one to the engine")
        check_saving(request)

    def _are_ids(self, tokens: Iterable[int]) -> bool:
        size = self.model.vocabulary_size
        return all(isinstance(token, int) and 0 <= token < size for token in tokens)

    def _taken_up(self, name: str, resumed: Resumed[Lease]) -> tuple[Sequence, list[int]]:
        """A sequence that was saved, and what it had generated. Raises BadRequest."""
        id, _, sample = name.rpartition("/")
        saved, tokens = Saved.decode(resumed.state), resumed.tokens.tolist()
        request = saved.request(id, tokens)
        self.check(request)
        if sample not in map(str, range(request.params.n)):
            raise BadRequest(f"none of its {request.params.n} sequences is called so")
        generated = [*tokens[saved.num_prompt :], saved.last]
        if len(generated) >= request.params.max_tokens or not self._are_ids(generated):
            raise BadRequest("what it has generated cannot be")
        return self._sequence(request, int(sample)), generated

    def _sequence(self, request: Request, sample: int) -> Sequence:
        self._num_added += 1
        sequence = Sequence(request, sample, self._num_added)
        if self._tokenizer is not None:
            sequence.text = TextStream(self._tokenizer, request.params.stop)
        return sequence

    def _prefetch(self, request: Request) -> None:
        """What only stores have comes to memory while the request waits for others."""
        if self._requests and self.namespace is not None:
            with suppress(KvdError):
                self.namespace.prefetch(request.tokens, timeout=MATCH_SECONDS)

    # --- a step ---

    def step(self) -> list[Output]:
        """Compute the next tokens of the sequences whose turn it is; what came of all."""
        self._end_late()
        if parts := self.scheduler.plan():
            with telemetry.step([part.sequence.span for part in parts]):
                self._do(parts)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _do(self, parts: list[Part]) -> None:
        try:
            self._sample(self._compute(parts))
        except BaseException:
            # How far each came is not known: all is planned anew, should anybody step again.
            for sequence in list(self.scheduler.running):
                self.scheduler.preempt(sequence)
            raise

    def _end_late(self) -> None:
        now = time.monotonic()
        under_way = [each for sequences in self._requests.values() for each in sequences]
        for sequence in under_way:
            if sequence.request.deadline <= now:
                self._end(sequence, "deadline")

    def _compute(self, parts: list[Part]) -> list[tuple[Sequence, Tensor]]:
        """Compute these; the sequences that are ready for their next token, with its logits."""
        begun: list[tuple[Part, Chunk]] = []
        for part in parts:
            with self._void_ends(part.sequence):
                begun.append((part, part.sequence.chunk(part.num_tokens)))
        if not begun:
            return []
        last = [place for place, (part, _) in enumerate(begun) if part.is_last]
        logits = self.model.forward([chunk for _, chunk in begun], last)
        rows = dict(zip(last, logits, strict=True))
        ready: list[tuple[Sequence, Tensor]] = []
        for place, (part, _) in enumerate(begun):
            with self._void_ends(part.sequence):
                part.sequence.written(part.num_tokens)
                self.num_computed += part.num_tokens
                telemetry.tokens.add(part.num_tokens, {"source": "computed"})
                if place in rows:
                    ready.append((part.sequence, rows[place]))
        return ready

    @contextmanager
    def _void_ends(self, sequence: Sequence) -> Iterator[None]:
        """What is computed of a sequence whose lease ended is void: it is computed again."""
        try:
            yield
        except LeaseEnded as error:
            logger.warning("reason=computed_again %s: %s", sequence.name, error)
            self.scheduler.preempt(sequence)

    def _sample(self, computed: list[tuple[Sequence, Tensor]]) -> None:
        """Choose the next token of each; of those that follow one, too."""
        ready = [(each, row) for first, row in computed for each in (first, *self._followed(first))]
        if not ready:
            return
        draws = [Draw(each.request.params, each.sample, each.tokens) for each, _ in ready]
        tokens = next_tokens(torch.stack([row for _, row in ready]), draws)
        for (sequence, _), token in zip(ready, tokens, strict=True):
            try:
                self._take(sequence, token)
            except Exception:  # its text, or its save: nobody else's fault
                logger.exception("reason=internal %s", sequence.name)
                sequence.text = None
                self._end(sequence, "failed")

    def _followed(self, first: Sequence) -> list[Sequence]:
        """Those that waited for what the first has computed, which is the prompt of all.

        They run with it as long as there are places and pages. Others wait, and match it.
        """
        followers = self._followers.pop(first, [])
        can_run = True
        for follower in followers:
            can_run = can_run and self.scheduler.has_place and follower.share(first, GROW_SECONDS)
            follower.cached_tokens = first.cached_tokens
            if can_run:
                self.scheduler.run(follower)
            else:
                self.scheduler.add(follower)
        return followers

    def _take(self, sequence: Sequence, token: NextToken) -> None:
        sequence.append(token.id)
        text = sequence.text.feed([token.id]) if sequence.text else ""
        reason = self._reason(sequence, token.id)
        if reason and sequence.text:
            text += sequence.text.finish()
            reason = "stop" if sequence.text.stopped_by else reason
        self._say(sequence, (token,), text, reason)
        if reason:
            self._finish(sequence, reason)
        elif self._save_every and sequence.num_generated % self._save_every == 0:
            self._save(sequence)

    def _reason(self, sequence: Sequence, token: int) -> Reason | None:
        params = sequence.request.params
        is_end = not params.ignore_eos and token in self.model.end_ids
        is_stopped = sequence.text is not None and sequence.text.stopped_by is not None
        if is_end or is_stopped or token in params.stop_token_ids:
            return "stop"
        return "length" if sequence.num_tokens == sequence.most_tokens else None

    # --- what becomes of a sequence ---

    def _say(
        self,
        sequence: Sequence,
        tokens: tuple[NextToken, ...],
        text: str,
        reason: Reason | None = None,
    ) -> None:
        self._outputs.append(
            Output(
                sequence.request.id,
                sequence.sample,
                tokens,
                text,
                sequence.cached_tokens or 0,
                reason,
            )
        )

    def _end(self, sequence: Sequence, reason: Reason) -> None:
        """End it before its time."""
        for follower in self._followers.pop(sequence, ()):
            self.scheduler.add(follower)
        self._say(sequence, (), sequence.text.finish() if sequence.text else "", reason)
        self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: Reason) -> None:
        self.scheduler.remove(sequence)
        sequence.end(reason)
        sequences = self._requests[sequence.request.id]
        sequences.remove(sequence)
        if not sequences:
            del self._requests[sequence.request.id]
        if sequence.generation and self.namespace is not None:
            try:
                self.namespace.discard(sequence.name, generation=sequence.generation)
            except KvdError as error:
                logger.warning("reason=not_discarded %s: %s", sequence.name, error)

    def _save(self, sequence: Sequence) -> None:
        """Keep it for another process to go on with, where kvd has all of its KV."""
        rows = sequence.rows
        lease = rows.lease if rows else None
        if rows is None or lease is None or lease.capacity_tokens < rows.length:
            return
        request, tokens = sequence.request, sequence.tokens.numpy()
        try:
            sequence.generation = lease.save(
                sequence.name,
                tokens[: rows.length],
                Saved.of(request, int(tokens[-1])).encode(),
                generation=sequence.generation,
            )
        except SequenceTaken:
            sequence.generation = 0
            self._end(sequence, "taken")
        except KvdError as error:
            logger.warning("reason=not_saved %s: %s", sequence.name, error)
