"""Without a cache that attends, "kvd" is sdpa; its windows are those of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from tests.infer.conftest import plain_logits
from tests.infer.runs import prompt
from tests.infer.samples import lower_right

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def test_plain_generate_with_padding_is_that_of_sdpa(
    model: LlamaForCausalLM, plain: LlamaForCausalLM
) -> None:
    ids, mask = prompt(40).view(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    assert model.generate(ids, **arguments).equal(plain.generate(ids, **arguments))


def test_plain_cache_with_a_prefix_is_that_of_sdpa(
    model: LlamaForCausalLM, plain: LlamaForCausalLM
) -> None:
    assert plain_logits(model, prompt(40), 16).equal(plain_logits(plain, prompt(40), 16))


def test_a_window_is_that_of_transformers() -> None:
    sees, positions = sliding_window_causal_mask_function(3), torch.arange(9)
    assert torch.equal(sees(0, 0, positions[:, None], positions[None]), lower_right(9, 9, 3))
