"""Engines of tiny models, and what compares them with a model alone."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from demo.models import tiny_llama
from kvd_client import Client
from kvd_infer.engine import Engine
from kvd_infer.hf_model import layout_of
from kvd_infer.model import Model
from kvd_infer.sampler import SamplingParams
from kvd_infer.sequence import Request
from tests.e2e.support import SESSIONS, capacity_of, eventually
from tests.infer.conftest import PATIENCE_SECONDS, plain_logits, tolerance_of
from tests.infer.runs import prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvd.protocol.messages import StatusReply
    from kvd_client import Namespace
    from kvd_infer.engine import Output, Reason

STEPS = 24
BLOCK = 16

# A random model without kvd; `model_of` makes the same with it.
reference = cache(tiny_llama)


def model_of(revision: str) -> Model:
    return Model(tiny_llama(), revision)


def pool(num_pages: int) -> dict[str, Any]:
    """The configuration of a daemon that has so many pages for these models, and no disk."""
    capacity_bytes = capacity_of(num_pages, layout_of(reference()))
    return {
        "tiers": [{"type": "host", "capacity_bytes": capacity_bytes}],
        "sessions": SESSIONS,
        "limits": {"session_reserved_fraction": 1.0},
        "cache": {"high_watermark": 1.0, "low_watermark": 1.0, "back_ahead_bytes": "1MiB"},
    }


def ids(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(prompt(num_tokens, seed)[0].tolist())


def greedy(id: str, tokens: tuple[int, ...], max_tokens: int = STEPS, **fields: Any) -> Request:
    return Request(id, tokens, SamplingParams(max_tokens=max_tokens, temperature=0), **fields)


def die_on_the_way(endpoint: str, revision: str, request: Request, num_steps: int) -> None:
    """Be an engine that saves after each fifth token, and is killed after so many steps."""
    with Client(endpoint, timeout=PATIENCE_SECONDS) as client:
        assert client.wait_attached(PATIENCE_SECONDS)
        engine = Engine(model_of(revision), client, save_every=5)
        engine.add(request)
        for _ in range(num_steps):
            engine.step()
        os.kill(os.getpid(), signal.SIGKILL)


class Heard:
    """What engines said of each sequence, by its name."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.texts: dict[str, str] = defaultdict(str)
        self.reasons: dict[str, Reason] = {}
        self.cached: dict[str, int] = {}

    def take(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            name = f"{output.request}/{output.sample}"
            assert name not in self.reasons, "nothing comes behind the end"
            self.tokens[name] += [token.id for token in output.tokens]
            self.texts[name] += output.text
            self.cached[name] = output.cached_tokens
            if output.reason:
                self.reasons[name] = output.reason


def run(engine: Engine, *requests: Request) -> Heard:
    """Add these, and go on to the end of all."""
    heard = Heard()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        heard.take(engine.step())
    return heard


def assert_as_alone(heard: Heard, *requests: Request, plain: PreTrainedModel | None = None) -> None:
    """Each request has what `generate` makes of it alone; near-ties are judged token by token."""
    plain = plain or reference()
    for request in requests:
        num_tokens = request.params.max_tokens
        for sample in range(request.params.n):
            tokens = heard.tokens[f"{request.id}/{sample}"]
            if tokens != alone(plain, request.tokens, num_tokens):
                assert len(tokens) == num_tokens
                assert_best(plain, request.tokens, tokens)


@cache
def alone(plain: PreTrainedModel, tokens: tuple[int, ...], num_tokens: int) -> list[int]:
    """What `generate` makes of a prompt."""
    prompt = torch.tensor([tokens])
    output = plain.generate(  # type: ignore[operator]
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    generated: list[int] = output[0, len(tokens) :].tolist()
    return generated


def assert_best(plain: PreTrainedModel, tokens: tuple[int, ...], generated: list[int]) -> None:
    """Each token is the best one, by a model without kvd, after those before it."""
    sequence = torch.tensor([[*tokens, *generated]])
    judged = plain_logits(plain, sequence)[0, len(tokens) - 1 : -1]
    chosen = judged.gather(1, torch.tensor(generated)[:, None])[:, 0]
    assert float((judged.max(1).values - chosen).max()) <= tolerance_of(plain, sequence)


def assert_all_given_back(namespace: Namespace) -> None:
    """The engines are idle: nobody has a lease, and no page is but free or committed."""
    assert namespace.client.wait_attached(PATIENCE_SECONDS)
    eventually(lambda: _is_given_back(namespace.client.status()))


def _is_given_back(status: StatusReply) -> bool:
    tier, *_ = status.tiers
    used = {state for state, num_pages in tier.pages.items() if num_pages}
    has_leases = any(session.num_leases for session in status.sessions)
    return not has_leases and used <= {"committed", "free", "unbacked"}
