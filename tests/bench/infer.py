"""infer: the engine cold and warm, MHA and GQA, with kvd and without, and beside transformers.

Prompts are random tokens, continued greedily and on one thread. Where ways are compared they take
turns, over the same prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from kvd_client import Client, Layout
from tests.bench.common import Bench, Pairs, Row, one_thread, row, running_daemon, seconds, store
from tests.bench.ways import (
    Prompts,
    Run,
    by_engine,
    by_engines,
    by_generate,
    by_generate_batch,
    in_turn,
    load,
    random_model,
    random_prompts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvd_infer.engine import Engine

CAPACITY_BYTES = 6 << 30
# So many tokens at the end of a warm prompt are new.
NEW_TOKENS = 48
# Prompts of more tokens in all are not computed: what is warm has KV of ones.
MAX_COLD_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Sizes:
    """Prompts are given as their length and number."""

    cells: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    alone: tuple[int, int]
    beside: tuple[tuple[int, int], ...]
    num_generated: int
    num_pairs: int
    num_rounds: int


FULL = Sizes(
    cells=tuple((length, count) for length in (128, 512, 2000) for count in (1, 4, 16)),
    heads=(2000, 4),
    alone=(128, 4),
    beside=((128, 1), (64, 16), (512, 2)),
    num_generated=16,
    num_pairs=10,
    num_rounds=3,
)
TINY = Sizes(((64, 1), (64, 2)), (64, 2), (64, 2), ((64, 2),), 3, 2, 1)


def infer(bench: Bench) -> Iterator[Row]:
    from kvd_infer.engine import Engine
    from kvd_infer.model import Model

    sizes = TINY if bench.tiny else FULL
    with (
        one_thread(),
        running_daemon(CAPACITY_BYTES) as daemon,
        Client(daemon.endpoint, timeout=60) as client,
    ):
        plain, what = load(bench)
        model = Model(load(bench)[0], revision="bench")
        engine = Engine(model, client)
        yield from _cold_and_warm(bench, sizes, engine, what)
        yield from _heads(bench, sizes, client)
        yield from _alone(bench, sizes, engine, Engine(model))
        yield from _beside(bench, sizes, engine, plain, what)


# --- cold and warm ---


@dataclass(frozen=True, slots=True)
class Cell:
    """Prompts of one length, continued together: where `cold` is None they were stored."""

    length: int
    cold: Run | None
    warm: Run

    @property
    def num_sequences(self) -> int:
        return len(self.warm.tokens)

    @property
    def num_tokens(self) -> int:
        """Of a sequence, at its end, that have KV."""
        return self.length + len(self.warm.tokens[0]) - 1

    @property
    def held_tokens(self) -> float:
        """For so many tokens a sequence had pages."""
        return self.warm.held_tokens / self.num_sequences

    def waste(self, held_tokens: float) -> float:
        """The share of such memory that has no token."""
        return 1 - self.num_tokens / held_tokens

    def __str__(self) -> str:
        cold = seconds(self.cold.first) if self.cold else "not computed"
        return (
            f"{self.num_sequences} of {self.length} tokens: first token cold {cold}, warm "
            f"{seconds(self.warm.first)}, then {self.warm.rate:.1f} tokens a second"
        )


def _cold_and_warm(bench: Bench, sizes: Sizes, engine: Engine, what: str) -> Iterator[Row]:
    cells = []
    for length, count in sizes.cells:
        cells.append(_cell(engine, length, count, sizes.num_generated))
        bench.say(str(cells[-1]))
    layout, most = engine.model.layout, engine.model.max_tokens
    print(_cells_table(cells, layout, most))
    longest, cold = [(cell, cell.cold) for cell in cells if cell.cold][-1]
    yield row(
        "infer_warm_ttft",
        cold.first / longest.warm.first,
        "x",
        f"{what}, one thread; the first token of a prompt with all but {NEW_TOKENS} of its tokens "
        f"cached, against computing all: {longest}",
    )
    yield row(
        "infer_contiguous_vs_paged",
        most / longest.held_tokens,
        "x",
        f"KV memory of a sequence of {longest.num_tokens} tokens, reserved for the model's "
        f"{most} in one piece, over its pages: "
        f"{longest.waste(most):.0%} of it without a token against "
        f"{longest.waste(longest.held_tokens):.1%}",
    )


def _cell(engine: Engine, length: int, count: int, num_generated: int) -> Cell:
    vocabulary_size = engine.model.vocabulary_size
    prompts = random_prompts(vocabulary_size, length, count, seed=0)
    others = random_prompts(vocabulary_size, length, count, seed=1)
    num_cached = length - NEW_TOKENS
    cold = None
    if length * count <= MAX_COLD_TOKENS:
        cold = by_engine(engine, prompts, num_generated)
    else:
        _store(engine, [prompt[:num_cached] for prompt in prompts])
    warm = [
        prompt[:num_cached] + other[num_cached:]
        for prompt, other in zip(prompts, others, strict=True)
    ]
    return Cell(length, cold, by_engine(engine, warm, num_generated))


def _cells_table(cells: Sequence[Cell], layout: Layout, most_tokens: int) -> str:
    return _table(
        f"Prompt tokens | Sequences | First token, cold | Warm, {NEW_TOKENS} new | Tokens "
        "a second | KV a sequence | Without a token, in pages | In one piece",
        (
            f"{cell.length} | {cell.num_sequences} | "
            f"{seconds(cell.cold.first) if cell.cold else ''} | {seconds(cell.warm.first)} | "
            f"{cell.warm.rate:.1f} | "
            f"{cell.held_tokens * layout.token_bytes / 2**20:.1f} MiB | "
            f"{cell.waste(cell.held_tokens):.1%} | {cell.waste(most_tokens):.1%}"
            for cell in cells
        ),
    )


# --- a KV head for each query head, or for several ---


def _heads(bench: Bench, sizes: Sizes, client: Client) -> Iterator[Row]:
    from kvd_infer.engine import Engine
    from kvd_infer.model import Model

    grouped = random_model(bench)
    query_heads = grouped.config.num_attention_heads
    multi = random_model(bench, num_key_value_heads=query_heads)
    engines = [Engine(Model(each, revision="random"), client) for each in (grouped, multi)]
    length, count = sizes.heads
    prompts = random_prompts(engines[0].model.vocabulary_size, length, count, seed=0)
    for engine in engines:
        _store(engine, prompts)
    bench.say("GQA and MHA, step by step in turn")
    grouped_runs, multi_runs = _step_by_step(engines, [prompts] * sizes.num_rounds, sizes)
    small, large = (engine.model.layout for engine in engines)
    found = Pairs([1 / run.rate for run in grouped_runs], [1 / run.rate for run in multi_runs])
    yield row(
        "infer_mha_vs_gqa",
        found.ratio,
        "x",
        f"time a token while {count} sequences of {length} tokens generate, a random model with "
        f"{query_heads} query heads and {small.num_kv_heads} KV heads against one with "
        f"{large.num_kv_heads}: {found}",
    )
    yield row(
        "infer_mha_vs_gqa_bytes",
        large.token_bytes / small.token_bytes,
        "x",
        f"KV of a token of the same: {small.token_bytes} against {large.token_bytes} bytes",
    )


# --- without kvd, and without reuse ---


def _alone(bench: Bench, sizes: Sizes, engine: Engine, private: Engine) -> Iterator[Row]:
    length, count = sizes.alone
    bench.say("with kvd and with private memory, step by step in turn")
    rounds = _rounds(engine, length, count, sizes.num_pairs)
    ours, theirs = _step_by_step([engine, private], rounds, sizes)
    what = (
        f"tokens a second of {count} new prompts of {length} tokens and {sizes.num_generated} "
        "generated ones, with kvd over the same engine with private memory"
    )
    by_clock = _pairs(ours, theirs)
    yield row(
        "infer_vs_private", by_clock.ratio, "x", f"{what}: {_told(by_clock)}; {_same(ours, theirs)}"
    )
    by_cpu = Pairs([run.cpu_seconds for run in ours], [run.cpu_seconds for run in theirs])
    yield row(
        "infer_vs_private_cpu",
        by_cpu.ratio,
        "x",
        f"{what}, by this process's time on the CPU, which others on the machine disturb less: "
        f"{_told(by_cpu)}",
    )


def _told(found: Pairs) -> str:
    """With the second least and second greatest ratio: the median of many is there by 98 %."""
    ratios = sorted(theirs / ours for ours, theirs in zip(found.ours, found.theirs, strict=True))
    return f"{found}; the ratio is in [{ratios[1]:.3f}, {ratios[-2]:.3f}] by 98 %"


# --- beside transformers ---


def _beside(
    bench: Bench, sizes: Sizes, engine: Engine, plain: PreTrainedModel, what: str
) -> Iterator[Row]:
    ways = {
        "kvd_infer": partial(by_engine, engine),
        "generate": partial(by_generate, plain),
        "generate_batch": partial(by_generate_batch, plain),
    }
    found = {}
    for length, count in sizes.beside:
        bench.say(f"{', '.join(ways)} in turn: {count} of {length} tokens")
        rounds = _rounds(engine, length, count, sizes.num_rounds)
        runs = in_turn(list(ways.values()), rounds, sizes.num_generated)
        found[length, count] = dict(zip(ways, runs, strict=True))
    print(_ways_table(found))
    for name in ("generate_batch", "generate"):
        ratios = {cell: _pairs(runs["kvd_infer"], runs[name]) for cell, runs in found.items()}
        yield row(
            f"infer_vs_{name}",
            min(pairs.ratio for pairs in ratios.values()),
            "x",
            f"{what}: tokens a second from the prompts, all new, to the last of "
            f"{sizes.num_generated} tokens, over those of transformers' {name}; the worst of "
            + "; ".join(
                f"{count} of {length} tokens {pairs.ratio:.3g} x ({pairs}; "
                f"{_same(found[length, count]['kvd_infer'], found[length, count][name])})"
                for (length, count), pairs in ratios.items()
            ),
        )


def _ways_table(found: Mapping[tuple[int, int], Mapping[str, list[Run]]]) -> str:
    return _table(
        "Prompt tokens | Sequences | By | First token | Tokens a second, generating | In all",
        (
            f"{length} | {count} | {name} | {seconds(median(run.first for run in runs))} | "
            f"{median(run.rate for run in runs):.1f} | "
            f"{median(run.rate_of_all for run in runs):.1f}"
            for (length, count), ways in found.items()
            for name, runs in ways.items()
        ),
    )


# --- what they share ---


def _step_by_step(
    engines: Sequence[Engine], rounds: Sequence[Prompts], sizes: Sizes
) -> list[tuple[Run, ...]]:
    """The runs of each engine, a run for each round."""
    runs = [by_engines(engines, prompts, sizes.num_generated) for prompts in rounds]
    return list(zip(*runs, strict=True))


def _rounds(engine: Engine, length: int, count: int, num_rounds: int) -> list[Prompts]:
    """Prompts for each round of which nothing is cached."""
    seeds = range(2, 2 + num_rounds)
    return [random_prompts(engine.model.vocabulary_size, length, count, seed) for seed in seeds]


def _store(engine: Engine, prompts: Prompts) -> None:
    """Have prompts of whole blocks cached, with KV of ones: what it says costs the same."""
    assert engine.namespace is not None
    for prompt in prompts:
        store(engine.namespace, np.array(prompt, np.uint32))


def _pairs(ours: Sequence[Run], theirs: Sequence[Run]) -> Pairs:
    return Pairs([run.seconds for run in ours], [run.seconds for run in theirs])


def _same(ours: Sequence[Run], theirs: Sequence[Run]) -> str:
    same = [
        one == its
        for our, their in zip(ours, theirs, strict=True)
        for one, its in zip(our.tokens, their.tokens, strict=True)
    ]
    return f"{sum(same)} of {len(same)} outputs are the same"


def _table(head: str, lines: Iterable[str]) -> str:
    """As Markdown."""
    rule = re.sub(r"[^|]+", "---", head)
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {line} |" for line in lines)])
