"""Models whose layers attend within a window compute with kvd what they compute without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from kvd_infer.hf import KvdCache
from tests.infer.conftest import OpenFor, page_of, plain_logits, tolerance_of
from tests.infer.runs import (
    STEPS,
    WINDOW,
    assert_greedy,
    attending,
    difference,
    greedy,
    logits_with_kvd,
    prompt,
    tiny_mistral,
    tiny_qwen2,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Make = Callable[[], PreTrainedModel]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize("make", [tiny_mistral, tiny_qwen2], ids=["all layers", "one layer"]),
]

LENGTHS = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 16, 17, 33, 60]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_logits_are_those_of_a_run_without_kvd(
    make: Make, open_for: OpenFor, num_tokens: int
) -> None:
    model, plain, ids = attending(make()), make(), prompt(num_tokens)
    expected, tolerance = plain_logits(plain, ids), tolerance_of(plain, prompt(60))
    cold, none_reused = logits_with_kvd(model, namespace := open_for(model), ids)
    warm, reused = logits_with_kvd(model, namespace, ids)
    assert (none_reused, reused) == (0, min(num_tokens - 1, num_tokens // 16 * 16))
    assert difference(cold, expected) <= tolerance
    assert difference(warm, expected[:, reused:]) <= tolerance


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_greedy_tokens_are_those_of_a_run_without_kvd(
    make: Make, open_for: OpenFor, num_tokens: int
) -> None:
    model, plain, ids = attending(make()), make(), prompt(num_tokens)
    expected = plain.generate(ids, max_new_tokens=STEPS, do_sample=False)
    for reused in (0, num_tokens - 1):
        generation = greedy(model, open_for(model), ids)
        assert generation.reused_tokens == reused
        assert generation.sequences.equal(expected)


def test_prompt_may_be_computed_in_chunks(make: Make, open_for: OpenFor) -> None:
    model = attending(make())
    chunked = greedy(model, open_for(model), prompt(60), prefill_chunk_size=11)
    assert_greedy(make(), chunked.sequences, 60)


@pytest.mark.parametrize("kept", [1, WINDOW, 20, 32, 49])
def test_cropped_cache_goes_on_as_if_the_rest_had_never_been(
    make: Make, open_for: OpenFor, kept: int
) -> None:
    model, plain, ids, rest = attending(make()), make(), prompt(50), prompt(30, seed=1)
    with KvdCache(open_for(model), model, ids) as cache, torch.no_grad():
        model(ids, **cache.as_kwargs())
        cache.crop(kept - 50)
        logits = model(rest, **cache.as_kwargs()).logits
    expected = plain_logits(plain, torch.cat([ids[:, :kept], rest], 1))[:, kept:]
    assert difference(logits, expected) <= tolerance_of(plain, ids)


def test_what_has_left_the_window_is_kept_and_not_read(make: Make, open_for: OpenFor) -> None:
    model, ids = attending(make()), prompt(48)
    namespace, expected = open_for(model), plain_logits(make(), ids, 47)
    logits_with_kvd(model, namespace, ids)
    with namespace.match(ids[0].numpy()) as lease:
        first, *_, last = (page_of(namespace, int(page)) for page in lease.pages)
    first[-1] = 0  # the last layer, which has a window in both models
    assert difference(logits_with_kvd(model, namespace, ids)[0], expected) <= 1e-4
    last[-1] = 0
    assert difference(logits_with_kvd(model, namespace, ids)[0], expected) > 1e-2
