"""The oracles themselves: they are right on intact KV, and they see damage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from demo import models, recall

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import DynamicCache, LlamaForCausalLM

    Damage = Callable[[DynamicCache, DynamicCache], None]

DAMAGED = slice(2 * recall.BLOCK_SIZE, 3 * recall.BLOCK_SIZE)  # block 2
OTHER = slice(4 * recall.BLOCK_SIZE, 5 * recall.BLOCK_SIZE)  # block 4


@pytest.fixture(scope="module")
def recall_model(recall_dir: Path) -> LlamaForCausalLM:
    return models.load(recall_dir)


def errors(model: LlamaForCausalLM, damage: Damage | None = None) -> list[float]:
    ids = recall.prompts(16, seed=2)
    cache = recall.prefill(model, ids)
    if damage:
        damage(cache, recall.prefill(model, recall.prompts(16, seed=3)))
    return recall.errors_by_block(recall.logits_behind(model, ids, cache), ids)


def test_recall_model_reads_every_block_of_an_intact_prefix(recall_model: LlamaForCausalLM) -> None:
    first, *others = errors(recall_model)
    assert first < 0.25
    assert max(others) < 0.05


def zeroed(cache: DynamicCache, another: DynamicCache) -> None:
    for layer in cache.layers:
        layer.keys[:, :, DAMAGED] = 0
        layer.values[:, :, DAMAGED] = 0


def zeroed_values_of_last_layer(cache: DynamicCache, another: DynamicCache) -> None:
    cache.layers[-1].values[:, :, DAMAGED] = 0


def stale(cache: DynamicCache, another: DynamicCache) -> None:
    for layer, old in zip(cache.layers, another.layers, strict=True):
        layer.keys[:, :, DAMAGED] = old.keys[:, :, DAMAGED]
        layer.values[:, :, DAMAGED] = old.values[:, :, DAMAGED]


def keys_and_values_exchanged(cache: DynamicCache, another: DynamicCache) -> None:
    for layer in cache.layers:
        keys = layer.keys[:, :, DAMAGED].clone()
        layer.keys[:, :, DAMAGED] = layer.values[:, :, DAMAGED]
        layer.values[:, :, DAMAGED] = keys


def layers_exchanged(cache: DynamicCache, another: DynamicCache) -> None:
    first, second = cache.layers
    for one, two in ((first.keys, second.keys), (first.values, second.values)):
        kept = one[:, :, DAMAGED].clone()
        one[:, :, DAMAGED] = two[:, :, DAMAGED]
        two[:, :, DAMAGED] = kept


def heads_exchanged(cache: DynamicCache, another: DynamicCache) -> None:
    for layer in cache.layers:
        layer.keys[:, :, DAMAGED] = layer.keys[:, :, DAMAGED].flip(1)
        layer.values[:, :, DAMAGED] = layer.values[:, :, DAMAGED].flip(1)


def values_shifted_by_one_token(cache: DynamicCache, another: DynamicCache) -> None:
    for layer in cache.layers:
        layer.values[:, :, DAMAGED] = layer.values[:, :, DAMAGED].roll(1, dims=2)


@pytest.mark.parametrize(
    "damage",
    [
        zeroed,
        zeroed_values_of_last_layer,
        stale,
        keys_and_values_exchanged,
        layers_exchanged,
        heads_exchanged,
        values_shifted_by_one_token,
    ],
)
def test_damage_shows_as_errors_in_its_block(
    recall_model: LlamaForCausalLM, damage: Damage
) -> None:
    by_block = errors(recall_model, damage)
    assert by_block[2] > 0.9
    assert max(by_block[3:]) < 0.15


def test_exchanged_keys_show_in_both_blocks(recall_model: LlamaForCausalLM) -> None:
    def keys_of_two_blocks_exchanged(cache: DynamicCache, another: DynamicCache) -> None:
        for layer in cache.layers:
            kept = layer.keys[:, :, DAMAGED].clone()
            layer.keys[:, :, DAMAGED] = layer.keys[:, :, OTHER]
            layer.keys[:, :, OTHER] = kept

    by_block = errors(recall_model, keys_of_two_blocks_exchanged)
    assert min(by_block[2], by_block[4]) > 0.9
    assert max(by_block[1], by_block[3], by_block[5]) < 0.15


def test_recall_model_is_made_once(recall_dir: Path) -> None:
    said: list[str] = []
    assert models.recall_dir(said.append) == recall_dir
    assert said == []


def test_interrupted_making_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def interrupted(folder: Path, progress: models.Progress) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    def whole(folder: Path, progress: models.Progress) -> None:
        (folder / "whole").touch()

    with pytest.raises(KeyboardInterrupt):
        models._made_once("model", interrupted, print)
    made = models._made_once("model", whole, print)
    assert [file.name for file in made.iterdir()] == ["whole"]


def test_missing_package_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "SMOLLM2_PACKAGES", ("no_such_package",))
    with pytest.raises(models.ModelUnavailable, match="no_such_package: pip install"):
        models.smollm2_dir(print)


def test_tiny_llama_is_the_same_each_time_and_disturbs_no_generator() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, two = models.tiny_llama(), models.tiny_llama()
    assert torch.equal(torch.rand(3), expected)
    ids = torch.arange(40).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(one(ids).logits, two(ids).logits)


def test_tiny_llama_takes_overrides() -> None:
    assert models.tiny_llama(num_key_value_heads=1).config.num_key_value_heads == 1


@pytest.mark.parametrize("offset", [0, 1])
def test_tiny_llama_shows_positions_that_are_off(tiny_llama: LlamaForCausalLM, offset: int) -> None:
    ids = recall.prompts(1, seed=4)
    split = recall.BLOCK_SIZE
    positions = torch.arange(split, ids.shape[1]).unsqueeze(0) + offset
    with torch.inference_mode():
        whole = tiny_llama(ids).logits[:, split:]
    cache = recall.prefill(tiny_llama, ids[:, :split])
    rest = recall.logits_behind(tiny_llama, ids[:, split:], cache, position_ids=positions)
    moved = float((rest - whole).abs().max())
    assert (moved < 1e-4) if offset == 0 else (moved > 0.5)


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    answer = models.load(smollm2_dir).generate(**prompt, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == "The capital of France is Paris."
