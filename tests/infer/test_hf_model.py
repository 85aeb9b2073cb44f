"""Which KV a model makes: its identity, its layout, and the models that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from demo import models
from kvd_client import Unsupported
from kvd_infer.hf import identity_of, layout_of
from kvd_infer.hf_model import windows_of
from tests.infer.runs import WINDOW, tiny_mistral, tiny_qwen2

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def test_revision_is_given_or_a_digest(plain: LlamaForCausalLM) -> None:
    assert identity_of(plain, "r1").revision == "r1"
    assert len(identity_of(plain).revision) == 64
    plain.config._commit_hash = "c0ffee"  # says where the weights came from, not what they are now
    assert len(identity_of(plain).revision) == 64


def test_layers_with_an_adapter_around_them_are_refused_until_it_is_named(
    plain: LlamaForCausalLM,
) -> None:
    plain.model.layers[0].lora_A = torch.nn.Linear(2, 2)
    with pytest.raises(Unsupported, match="adapter"):
        identity_of(plain)
    assert identity_of(plain, adapter="mine@3").adapter == "mine@3"


def test_digest_tells_weights_apart(plain: LlamaForCausalLM, model: LlamaForCausalLM) -> None:
    assert identity_of(plain) == identity_of(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] += 1e-3
    assert identity_of(plain) != identity_of(model)


def test_a_folder_is_one_model_wherever_it_lies(plain: LlamaForCausalLM, tmp_path: Path) -> None:
    found = []
    for place in ("here", "there"):
        folder = tmp_path / place / "tiny"
        folder.mkdir(parents=True)
        plain.config.name_or_path = str(folder)
        found.append((identity_of(plain), identity_of(plain, "r1").model))
    (one, one_path), (other, other_path) = found
    assert one == other
    assert one_path != other_path  # a revision that is named need not tell them apart


def test_positions_tell_rotary_settings_apart(plain: LlamaForCausalLM) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    other = models.tiny_llama(rope_parameters=rope)
    assert identity_of(plain, "r").positions != identity_of(other, "r").positions


def test_adapter_needs_a_name(plain: LlamaForCausalLM) -> None:
    plain._hf_peft_config_loaded = True
    with pytest.raises(Unsupported, match="adapter"):
        identity_of(plain)
    assert identity_of(plain, adapter="lora@1").adapter == "lora@1"


def test_windows_are_told_for_each_layer(plain: LlamaForCausalLM) -> None:
    assert windows_of(plain) == [None, None]
    assert windows_of(tiny_mistral()) == [WINDOW, WINDOW]
    assert windows_of(tiny_qwen2()) == [None, WINDOW]


def test_positions_tell_windows_apart() -> None:
    one, other = (tiny_mistral(sliding_window=window) for window in (8, 9))
    assert identity_of(one, "r").positions != identity_of(other, "r").positions


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])
def test_layers_of_other_kinds_are_refused(plain: LlamaForCausalLM, kind: str) -> None:
    plain.config.layer_types = ["full_attention", kind]
    plain.config.attention_chunk_size = 8
    with pytest.raises(Unsupported, match=kind):
        layout_of(plain)


def test_keys_that_depend_on_the_prompt_s_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(Unsupported, match="rope_type"):
        layout_of(models.tiny_llama(rope_parameters=rope))


def test_models_that_read_more_than_ids_are_refused() -> None:
    config = GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, add_cross_attention=True)
    with pytest.raises(Unsupported, match="token ids alone"):
        layout_of(GPT2LMHeadModel(config))
