"""Tokens are chosen as transformers does, and drawn alike whatever else is in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as theirs

from kvd_client import BadRequest
from kvd_infer.sampler import Draw, SamplingParams, next_tokens, processed
from tests.infer.runs import prompt

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")
SOME = {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.3}


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, "seed": 0, **fields})


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(logits: Tensor, draws: list[Draw]) -> list[int]:
    return [token.id for token in next_tokens(logits, draws)]


# --- as transformers does ---


@pytest.mark.parametrize("left_out", [None, *SOME])
def test_scores_are_those_of_generate(plain: LlamaForCausalLM, left_out: str | None) -> None:
    fields = {name: value for name, value in SOME.items() if name != left_out}
    # What is not set here would come from transformers' own defaults.
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    output: Any = plain.generate(
        prompt(20), max_new_tokens=20, do_sample=True, return_dict_in_generate=True,
        output_logits=True, output_scores=True, **{**neutral, **fields},
    )  # fmt: skip
    for step, (logits, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        draw = Draw(params(**fields), 0, output.sequences[0, : 20 + step].tolist())
        assert torch.equal(processed(logits[0], draw), scores[0])


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    size=st.integers(1, 300),
    seed=st.integers(0, 1000),
    temperature=st.floats(0.01, 10),
    top_k=st.integers(0, 400),
    top_p=st.floats(1e-9, 1),
    penalty=st.floats(0.1, 10),
    tokens=st.lists(st.integers(0, 310), min_size=1, max_size=40),
)
def test_scores_are_those_of_transformers(
    size: int, seed: int, temperature: float, top_k: int, top_p: float, penalty: float,
    tokens: list[int],
) -> None:  # fmt: skip
    logits = random_logits(1, size, seed=seed)
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits)
    expected = theirs.TemperatureLogitsWarper(temperature)(None, expected)
    if top_k:
        expected = theirs.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = theirs.TopPLogitsWarper(top_p)(None, expected)
    asked = params(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty)
    assert torch.equal(processed(logits[0], Draw(asked, 0, tokens)), expected[0])


def test_equal_scores_at_the_edge_of_top_p_all_stay() -> None:
    scores = processed(torch.tensor([1.0, 2.0, 1.0, 0.0]), Draw(params(top_p=0.7), 0, []))
    assert scores.tolist() == [1, 2, 1, -torch.inf]


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy_is_what_generate_does(plain: LlamaForCausalLM, penalty: float) -> None:
    output = plain.generate(
        prompt(20), max_new_tokens=20, do_sample=False, repetition_penalty=penalty
    )
    tokens, asked = prompt(20)[0].tolist(), params(temperature=0, repetition_penalty=penalty)
    for _ in range(20):
        logits = plain(torch.tensor([tokens])).logits[:, -1].detach()
        tokens += ids(logits, [Draw(asked, 0, tokens)])
    assert tokens == output[0].tolist()


# --- drawn alike ---


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(order=st.permutations(range(12)), size=st.integers(1, 12))
def test_batch_changes_no_token(order: list[int], size: int) -> None:
    logits = random_logits(12, 50)
    asked = [params(temperature=0), params(), params(**SOME), params(seed=7, top_k=9, logprobs=2)]
    draws = [Draw(asked[i % 4], i // 4, list(range(i))) for i in range(12)]
    alone = [next_tokens(logits[i : i + 1], [draws[i]])[0] for i in range(12)]
    batch = order[:size]
    assert next_tokens(logits[batch], [draws[i] for i in batch]) == [alone[i] for i in batch]


def test_draws_are_the_same_in_every_process() -> None:
    logits = torch.zeros(8, 100)
    draws = [Draw(params(seed=2**64 - 1 - i), i, [0] * i) for i in range(8)]
    assert ids(logits, draws) == [99, 58, 72, 37, 97, 50, 72, 89]


@pytest.mark.parametrize("varied", ["seed", "sample", "position"])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.5, "top_k": 12, "top_p": 0.9}])
def test_draws_are_distributed_as_the_scores_say(varied: str, fields: dict[str, Any]) -> None:
    count, logits = 4000, random_logits(20)
    draws = [
        Draw(
            params(seed=i if varied == "seed" else 0, **fields),
            i if varied == "sample" else 0,
            range(i if varied == "position" else 0),
        )
        for i in range(count)
    ]
    seen = torch.bincount(torch.tensor(ids(logits.expand(count, -1), draws)), minlength=20)
    expected = count * processed(logits, draws[0]).softmax(dim=-1)
    possible = expected > 0
    assert not seen[~possible].any()
    assert chi_square_p(seen[possible], expected[possible]) > 0.01


def chi_square_p(seen: Tensor, expected: Tensor) -> float:
    """The probability that draws of the expected distribution differ as much from it."""
    chi_square = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2), chi_square / 2))


def test_samples_of_a_request_differ() -> None:
    logits = torch.zeros(1, 1000).expand(4, -1)
    drawn = {tuple(ids(logits, [Draw(params(), n, [0] * i) for i in range(4)])) for n in range(8)}
    assert len(drawn) == 8


def test_request_without_a_seed_gets_one() -> None:
    seedless = params(seed=None, top_k=3)
    one, other = seedless.seeded(), seedless.seeded()
    assert one.seed != other.seed
    assert one.seeded() == one == msgspec.structs.replace(seedless, seed=one.seed)


# --- what else is asked ---


@pytest.mark.parametrize("fields", [{"temperature": 0}, SOME])
def test_logprobs_are_the_model_s_own(fields: dict[str, Any]) -> None:
    logits = random_logits(1, 50)
    (token,) = next_tokens(logits, [Draw(params(logprobs=3, **fields), 0, [1, 2])])
    expected = logits[0].log_softmax(dim=-1)
    likeliest = expected.argsort(descending=True)[:3].tolist()
    assert token.logprobs == {i: float(expected[i]) for i in [*likeliest, token.id]}
    assert list(token.logprobs)[:3] == likeliest


def test_more_logprobs_than_tokens_are_all_of_them() -> None:
    (token,) = next_tokens(random_logits(1, 50), [Draw(params(logprobs=60), 0, [])])
    assert token.logprobs is not None
    assert len(token.logprobs) == 50


def test_zero_logprobs_are_the_chosen_token_s_alone() -> None:
    (token,) = next_tokens(random_logits(1, 50), [Draw(params(logprobs=0), 0, [])])
    assert token.logprobs is not None
    assert list(token.logprobs) == [token.id]


def test_logits_of_half_precision_are_computed_with_in_full() -> None:
    logits = random_logits(1, 50).bfloat16()
    draws = [Draw(params(logprobs=3, **SOME), 0, [1, 2])]
    assert next_tokens(logits, draws) == next_tokens(logits.float(), draws)


def test_logits_are_kept() -> None:
    logits = random_logits(2, 50)
    next_tokens(logits, 2 * [Draw(params(**SOME), 0, [1, 2])])
    assert torch.equal(logits, random_logits(2, 50))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0}, {"temperature": -1}, {"temperature": 1e-9}, {"temperature": torch.nan},
        {"temperature": 10**400}, {"temperature": torch.inf}, {"top_k": -1}, {"top_p": 0},
        {"top_p": 1.1}, {"repetition_penalty": 0}, {"repetition_penalty": 1e9}, {"seed": -1},
        {"seed": 2**64}, {"stop": ("a", "")}, {"stop_token_ids": (-1,)}, {"n": 0}, {"n": 129},
        {"logprobs": -1},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(BadRequest, match=f"^{name} is .*: it must be "):
        params(**fields)
