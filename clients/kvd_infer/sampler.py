"""From logits to the next tokens: the likeliest ones, or drawn as each request asks.

A token is drawn by the Gumbel-max trick (Maddison 2014): the largest of scores plus noise has the
distribution of their softmax. The noise is a function of seed, sample number and position alone
(Philox, Salmon 2011, counts instead of having a state), so a sequence goes on as it would have,
whatever the batch around it, preempted or resumed in another process. Logits that differ in their
last digits, as those of other batches do, seldom give another token.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from kvd_client import BadRequest

# Beyond these, scores overflow.
MIN_FACTOR, MAX_FACTOR = 1e-3, 1e3
SEED_BITS = 64
MAX_SAMPLES = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request wants its tokens chosen, and where they end.

    `temperature` 0 takes the likeliest token each time; `top_k` 0 and `top_p` 1 leave out none,
    `repetition_penalty` 1 is none. A sequence ends before a string of `stop`, behind an id of
    `stop_token_ids` and, unless `ignore_eos`, behind the model's own. `n` sequences are drawn.
    `logprobs` asks for the chosen token's log-probability and those of so many likeliest ones.

    Raises BadRequest for values that cannot be.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        rules = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (
                self.is_greedy or MIN_FACTOR <= self.temperature <= MAX_FACTOR,
                f"0 (greedy), or {MIN_FACTOR} to {MAX_FACTOR:g}",
            ),
            "top_k": (self.top_k >= 0, "at least 1, or 0 for all tokens"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "repetition_penalty": (
                MIN_FACTOR <= self.repetition_penalty <= MAX_FACTOR,
                f"{MIN_FACTOR} to {MAX_FACTOR:g}, 1 for none",
            ),
            "seed": (
                self.seed is None or 0 <= self.seed < 1 << SEED_BITS,
                f"from 0 to 2**{SEED_BITS} - 1, or left out",
            ),
            "stop": (all(self.stop), "strings of at least one character"),
            "stop_token_ids": (all(each >= 0 for each in self.stop_token_ids), "token ids"),
            "n": (1 <= self.n <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
            "logprobs": (self.logprobs is None or self.logprobs >= 0, "at least 0, or left out"),
        }
        for name, (holds, wanted) in rules.items():
            if not holds:
                raise BadRequest(f"{name} is {getattr(self, name)!r}: it must be {wanted}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def seeded(self) -> SamplingParams:
        """These, with a seed drawn now where none was given: a request needs one at its start."""
        if self.seed is not None:
            return self
        return msgspec.structs.replace(self, seed=secrets.randbits(SEED_BITS))


@dataclass(frozen=True, slots=True)
class Draw:
    """What the next token is chosen by, besides its logits: one sequence of a request.

    The params are seeded, unless greedy. `sample` says which of the request's `n` sequences it is;
    `tokens` are all its ids, prompt and generated.
    """

    params: SamplingParams
    sample: int
    tokens: Sequence[int] | Tensor


@dataclass(frozen=True, slots=True)
class NextToken:
    """The token that a sequence goes on with.

    Where asked, `logprobs` has the likeliest tokens, in their order, and this one: by the model's
    own logits, before anything was done to them.
    """

    id: int
    logprobs: Mapping[int, float] | None


def next_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[NextToken]:
    """One token for each draw, by its row of the logits, `[draws, vocabulary]` on any device."""
    likeliest = logits.argmax(dim=-1).tolist()
    chosen = [
        _choose(row, draw) if _changes(draw.params) else best
        for row, draw, best in zip(logits, draws, likeliest, strict=True)
    ]
    return [
        NextToken(id, _logprobs(row, id, draw.params.logprobs))
        for row, draw, id in zip(logits, draws, chosen, strict=True)
    ]


def processed(logits: Tensor, draw: Draw) -> Tensor:
    """The scores of one row as transformers' `generate` has them before it draws, on the CPU.

    Where several scores at the edge of `top_p` are equal, it keeps some of them; here all stay.
    """
    params = draw.params
    scores = logits.float().cpu()
    if params.repetition_penalty != 1:
        scores = _penalized(scores, draw.tokens, params.repetition_penalty)
    if not params.is_greedy:
        scores = scores / params.temperature
        if params.top_k:
            scores = _top_k(scores, params.top_k)
        if params.top_p < 1:
            scores = _top_p(scores, params.top_p)
    return scores


def _changes(params: SamplingParams) -> bool:
    """Whether another token than the likeliest may be chosen."""
    return not params.is_greedy or params.repetition_penalty != 1


def _choose(logits: Tensor, draw: Draw) -> int:
    scores = processed(logits, draw)
    if not draw.params.is_greedy:
        scores = scores + _noise(draw, len(scores))
    return int(scores.argmax())


def _penalized(scores: Tensor, tokens: Sequence[int] | Tensor, penalty: float) -> Tensor:
    seen = torch.as_tensor(tokens, dtype=torch.long)
    seen = seen[seen < len(scores)]  # a model may read more ids than it writes
    old = scores[seen]
    return scores.scatter(0, seen, torch.where(old < 0, old * penalty, old / penalty))


def _top_k(scores: Tensor, k: int) -> Tensor:
    kept = scores.topk(min(k, len(scores))).values
    return scores.masked_fill(scores < kept[-1], -torch.inf)


def _top_p(scores: Tensor, p: float) -> Tensor:
    # numpy sorts values alone, some thirty times as fast as torch sorts values and places.
    ordered = torch.from_numpy(np.sort(scores.numpy()))
    removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    num_removed = min(int(removed.sum()), len(scores) - 1)
    return scores.masked_fill(scores < ordered[num_removed], -torch.inf)


def _noise(draw: Draw, size: int) -> Tensor:
    """Gumbel noise for each token of a vocabulary of this size."""
    seed = draw.params.seed
    assert seed is not None, "a request is seeded at its start"
    key = np.array([seed, draw.sample], np.uint64)
    counter = np.array([0, 0, 0, len(draw.tokens)], np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(size)
    return torch.from_numpy(uniform).log().neg().log().neg()


def _logprobs(logits: Tensor, id: int, num_likeliest: int | None) -> dict[int, float] | None:
    if num_likeliest is None:
        return None
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(num_likeliest, len(logprobs)))
    likeliest = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return likeliest | {id: float(logprobs[id])}
