"""Ways to continue prompts greedily: the engine, and transformers' two; and the models for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from kvd_infer.engine import Engine
    from tests.bench.common import Bench

Prompts: TypeAlias = list[tuple[int, ...]]

# What the demo's model is like, for where its weights are not.
GEOMETRY = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
# Of continuous batching in transformers: pages like kvd's blocks, and steps like the engine's. Of
# larger pages and of longer or shorter steps none was faster.
PAGE_TOKENS = 16
STEP_TOKENS = 512


@dataclass(slots=True)
class Run:
    """Prompts continued together: the tokens of each, and when each came, in seconds."""

    tokens: list[list[int]]
    arrivals: list[list[float]]
    cpu_seconds: float = 0.0  # of this process, where told
    held_tokens: int = 0  # for so many there were pages, at most

    @property
    def seconds(self) -> float:
        return max(map(max, self.arrivals))

    @property
    def first(self) -> float:
        """Until the first token of a sequence, on average."""
        return sum(arrivals[0] for arrivals in self.arrivals) / len(self.arrivals)

    @property
    def rate(self) -> float:
        """Tokens a second while all sequences generate."""
        start = max(arrivals[0] for arrivals in self.arrivals)
        later = [at for arrivals in self.arrivals for at in arrivals if at > start]
        return len(later) / (self.seconds - start)

    @property
    def rate_of_all(self) -> float:
        """Tokens a second from the first prompt to the last token."""
        return sum(map(len, self.tokens)) / self.seconds


# Continues prompts by so many tokens each.
Way: TypeAlias = Callable[[Prompts, int], Run]


def in_turn(ways: Sequence[Way], rounds: Sequence[Prompts], num_tokens: int) -> list[list[Run]]:
    """The runs of each way, over the prompts of each round; every way is the first in turn."""
    runs: list[list[Run]] = [[] for _ in ways]
    for number, prompts in enumerate(rounds):
        for place in range(number, number + len(ways)):
            runs[place % len(ways)].append(ways[place % len(ways)](prompts, num_tokens))
    return runs


# --- models and prompts ---


def load(bench: Bench) -> tuple[PreTrainedModel, str]:
    """The demo's model, else a random one that is as fast; and what it is."""
    from demo import models

    if bench.tiny:
        return random_model(bench), "a tiny random Llama"
    try:
        return models.load(models.smollm2_dir(bench.say)), "SmolLM2-135M in float32"
    except models.ModelUnavailable as error:
        bench.say(f"a random model instead of the demo's: {error}")
        return random_model(bench), "a random Llama of SmolLM2-135M's shape in float32"


def random_model(bench: Bench, **overrides: int) -> PreTrainedModel:
    from demo.models import tiny_llama

    return tiny_llama(**({} if bench.tiny else GEOMETRY) | overrides)


def random_prompts(vocabulary_size: int, length: int, count: int, seed: int) -> Prompts:
    """No two begin alike, whatever their length and number."""
    tokens = np.random.default_rng([seed, length, count]).integers(
        0, vocabulary_size, (count, length)
    )
    return [tuple(prompt) for prompt in tokens.tolist()]


# --- the ways ---


def by_engine(engine: Engine, prompts: Prompts, num_tokens: int) -> Run:
    (run,) = by_engines([engine], prompts, num_tokens)
    return run


def by_engines(engines: Sequence[Engine], prompts: Prompts, num_tokens: int) -> list[Run]:
    """The runs of several, which take turns step by step; each has a clock for its own steps."""
    steppings = [_Stepping(engine, prompts, num_tokens) for engine in engines]
    while any(each.engine.has_work for each in steppings):
        for each in steppings:
            each.step()
        steppings.reverse()
    return [each.run for each in sorted(steppings, key=lambda each: engines.index(each.engine))]


class _Stepping:
    """An engine's way through its prompts."""

    def __init__(self, engine: Engine, prompts: Prompts, num_tokens: int) -> None:
        from kvd_infer.sampler import SamplingParams
        from kvd_infer.sequence import Request

        self.engine = engine
        self.run = Run([[] for _ in prompts], [[] for _ in prompts])
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add(Request(str(number), prompt, params))
        self._seconds = 0.0

    def step(self) -> None:
        run = self.run
        start, cpu_start = time.perf_counter(), time.process_time()
        outputs = self.engine.step()
        self._seconds += time.perf_counter() - start
        run.cpu_seconds += time.process_time() - cpu_start
        for output in outputs:
            run.tokens[int(output.request)] += [token.id for token in output.tokens]
            run.arrivals[int(output.request)].append(self._seconds)
        run.held_tokens = max(run.held_tokens, _held_tokens(self.engine))


def _held_tokens(engine: Engine) -> int:
    leases = [each.rows.lease for each in engine.scheduler.running if each.rows is not None]
    return sum(lease.capacity_tokens for lease in leases if lease is not None)


def by_generate(model: PreTrainedModel, prompts: Prompts, num_tokens: int) -> Run:
    import torch

    ids = torch.tensor(prompts)
    times = _Times()
    generate: Any = model.generate
    output = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=_greedy(model, num_tokens),
        streamer=times,
    )
    tokens = output[:, ids.shape[1] :].tolist()
    arrivals = [at - times.all[0] for at in times.all[1:]]
    return Run(tokens, [arrivals] * len(prompts))


class _Times:
    """A streamer that only looks at the clock: for the prompts, then for each step."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def put(self, value: object) -> None:
        self.all.append(time.perf_counter())

    def end(self) -> None:
        """The last step was told."""


def by_generate_batch(model: PreTrainedModel, prompts: Prompts, num_tokens: int) -> Run:
    """Continuous batching of transformers, without the time to set it up.

    It has memory for twice what it needs: with less, it lets prompts wait for a margin.
    """
    from transformers import ContinuousBatchingConfig

    pages = -(-(len(prompts[0]) + num_tokens) // PAGE_TOKENS) * len(prompts)
    generate_batch: Any = model.generate_batch
    outputs = generate_batch(
        [list(prompt) for prompt in prompts],
        generation_config=_greedy(model, num_tokens),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=2 * pages,
            max_batch_tokens=STEP_TOKENS,
            allow_block_sharing=False,
        ),
        record_timestamps=True,
        warmup=False,
    ).values()
    start = min(output.created_time for output in outputs)
    arrivals = [[at - start for at in output.timestamps] for output in outputs]
    tokens = [output.generated_tokens for output in outputs]
    return Run(tokens, arrivals)


def _greedy(model: PreTrainedModel, num_tokens: int) -> GenerationConfig:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=model.config.vocab_size,  # no token is the end
        pad_token_id=0,
    )
