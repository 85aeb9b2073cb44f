"""A KvdCache between forward passes: cropped, closed, and what it refuses."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import DynamicCache

from kvd_client import BadRequest, LeaseEnded, Unsupported
from kvd_infer.hf import KvdCache, identity_of, layout_of
from tests.infer.conftest import OpenFor, as_kwargs, attached, plain_logits, tolerance_of
from tests.infer.runs import (
    STEPS,
    At,
    assert_greedy,
    attending,
    difference,
    greedy,
    logits_with_kvd,
    num_leases,
    prompt,
    tiny_qwen2,
    with_kvd,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from kvd.testing.daemons import RunningDaemon

# --- crop ---


def logits_behind_a_crop(plain: LlamaForCausalLM, ids: Tensor, kept: int, rest: Tensor) -> Tensor:
    cache = DynamicCache(config=plain.config)
    with torch.no_grad():
        plain(ids, **as_kwargs(plain, cache))
        cache.crop(kept - ids.shape[1])
        return plain(rest, **as_kwargs(plain, cache)).logits


@pytest.mark.parametrize("kept", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49])
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_cropped_cache_goes_on_as_a_plain_one(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor, kept: int, is_warm: bool
) -> None:
    ids, rest, namespace = prompt(50), prompt(30, seed=1), open_for(model)
    tolerance = tolerance_of(plain, ids)
    if is_warm:
        logits_with_kvd(model, namespace, ids)
    with KvdCache(namespace, model, ids) as cache, torch.no_grad():
        model(ids[:, cache.reused_tokens :], **cache.as_kwargs())
        cache.crop(kept - 50)
        assert cache.get_seq_length() == kept
        logits = model(rest, **cache.as_kwargs()).logits
        changed = torch.cat([ids[:, :kept], rest], 1)
        cache.commit(changed)
    assert difference(logits, logits_behind_a_crop(plain, ids, kept, rest)) <= tolerance
    # What was committed of either is right.
    for each, found in ((ids, max(kept, 48)), (changed, (kept + 29) // 16 * 16)):
        warm, reused = logits_with_kvd(model, namespace, each)
        assert reused == found
        assert difference(warm, plain_logits(plain, each, reused)) <= tolerance


def test_generation_goes_on_behind_a_crop(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor
) -> None:
    ids = prompt(50)
    changed = torch.cat([ids[:, :20], prompt(30, seed=1)], 1)
    arguments = {"max_new_tokens": STEPS, "do_sample": False}
    with KvdCache(open_for(model), model, ids) as cache:
        cache.commit(model.generate(ids, **cache.as_kwargs(), **arguments))
        cache.crop(20)
        output = model.generate(changed, **cache.as_kwargs(), **arguments)
        assert cache.commit(output) == 64
    assert_greedy(plain, output, 50)


def test_crop_takes_a_length_too(model: LlamaForCausalLM) -> None:
    with KvdCache(None, model, prompt(50)) as cache, torch.no_grad():
        model(prompt(50), **cache.as_kwargs())
        for tokens, length in ((60, 50), (0, 50), (30, 30), (-10, 20), (-60, 0)):
            cache.crop(tokens)
            assert cache.get_seq_length() == length


def test_crop_forgets_a_pass_that_failed(model: LlamaForCausalLM, open_for: OpenFor) -> None:
    ids = prompt(50)

    def fail() -> None:
        raise RuntimeError("as if")

    with KvdCache(open_for(model), model, ids) as cache, torch.no_grad():
        model(ids, **cache.as_kwargs())
        with pytest.raises(RuntimeError) as error, closing(At(model, 0, 1, fail)):
            model(ids[:, :5], **cache.as_kwargs())
        cache.crop(-10)
        assert cache.get_seq_length() == 40
        assert error.value.args == ("as if",)  # the traceback is still there


# --- the end of a cache ---


def test_closed_cache_holds_nothing(model: LlamaForCausalLM, open_for: OpenFor) -> None:
    namespace = open_for(model)
    cache = KvdCache(namespace, model, prompt(40))
    with torch.no_grad():
        model(prompt(40), **cache.as_kwargs())
    assert num_leases(namespace) == 1
    cache.close()
    cache.close()
    assert num_leases(namespace) == 0
    for use in (lambda: model(prompt(40), **cache.as_kwargs()), lambda: cache.crop(-20)):
        with pytest.raises(BadRequest, match="closed"), torch.no_grad():
            use()


def test_forward_that_fails_leaves_nothing_behind(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor
) -> None:
    ids, namespace = prompt(40), open_for(model)

    def fail() -> None:
        raise RuntimeError("as if")

    with pytest.raises(RuntimeError), closing(At(model, 0, 1, fail)):
        greedy(model, namespace, ids)
    assert num_leases(namespace) == 0
    assert difference(plain_logits(model, ids, 16), plain_logits(plain, ids, 16)) == 0
    generation = greedy(model, namespace, ids)
    assert generation.reused_tokens == 0
    assert_greedy(plain, generation.sequences, 40)


def test_forward_that_failed_can_be_done_again(
    model: LlamaForCausalLM, plain: LlamaForCausalLM, open_for: OpenFor
) -> None:
    ids = prompt(40)

    def fail() -> None:
        raise RuntimeError("as if")

    with KvdCache(open_for(model), model, ids) as cache, torch.no_grad():
        with pytest.raises(RuntimeError), closing(At(model, 0, 1, fail)):
            model(ids, **cache.as_kwargs())
        logits = model(ids, **cache.as_kwargs()).logits
    assert difference(logits, plain_logits(plain, ids)) <= tolerance_of(plain, ids)


def test_commit_wants_the_cache_s_own_prompt(model: LlamaForCausalLM, open_for: OpenFor) -> None:
    with KvdCache(open_for(model), model, prompt(40)) as cache, pytest.raises(BadRequest):
        cache.commit(prompt(41))


def test_forward_raises_when_its_lease_has_ended(
    model: LlamaForCausalLM, daemon: RunningDaemon
) -> None:
    ids = prompt(40)
    with attached(daemon) as client:
        namespace = client.open(identity_of(model), layout_of(model))
        with KvdCache(namespace, model, ids) as cache, torch.no_grad():
            model(ids, **cache.as_kwargs())
            daemon.restart()
            with pytest.raises(LeaseEnded):
                model(ids[:, :1], **cache.as_kwargs())


# --- refusals ---


def test_forward_refuses_other_positions(model: LlamaForCausalLM) -> None:
    with KvdCache(None, model, prompt(20)) as cache, torch.no_grad():
        positions = torch.arange(1, 21)[None]
        with pytest.raises(Unsupported, match="position_ids"):
            model(prompt(20), position_ids=positions, **cache.as_kwargs())


def test_forward_refuses_gradients(model: LlamaForCausalLM) -> None:
    with KvdCache(None, model, prompt(20)) as cache, pytest.raises(Unsupported, match="no_grad"):
        model(prompt(20), **cache.as_kwargs())


def test_forward_refuses_more_tokens_than_the_prompt_has(model: LlamaForCausalLM) -> None:
    with KvdCache(None, model, prompt(20)) as cache, torch.no_grad(), pytest.raises(Unsupported):
        model(prompt(21), **cache.as_kwargs())


def test_layer_with_another_window_than_its_config_is_noticed() -> None:
    model = attending(tiny_qwen2())
    model.model.layers[1].self_attn.sliding_window = None
    noticed = pytest.raises(Unsupported, match="window of None, its config for 8")
    with KvdCache(None, model, prompt(20)) as cache, torch.no_grad(), noticed:
        model(prompt(20), **cache.as_kwargs())


def test_attention_that_does_not_go_through_kvd_is_noticed(
    model: LlamaForCausalLM, plain: LlamaForCausalLM
) -> None:
    with pytest.raises(Unsupported, match="set_attn_implementation"):
        KvdCache(None, plain, prompt(20))
    noticed = pytest.raises(Unsupported, match="set_attn_implementation")
    with KvdCache(None, model, prompt(20)) as cache, torch.no_grad(), noticed:
        plain(prompt(20), **cache.as_kwargs())


def test_cache_is_of_one_prompt_and_one_model(model: LlamaForCausalLM, open_for: OpenFor) -> None:
    with pytest.raises(Unsupported, match="one KvdCache for each prompt"):
        KvdCache(None, model, prompt(20).view(2, 10))
    with pytest.raises(BadRequest, match="num_kv_heads 2 against 4"):
        KvdCache(open_for(model), with_kvd(num_key_value_heads=4), prompt(20))
    namespace = open_for(model)
    page_first = replace(namespace.layout, order="page_first")
    with pytest.raises(BadRequest, match="order page_first against layer_first"):
        KvdCache(namespace.client.open(namespace.identity, page_first), model, prompt(20))
    with KvdCache(None, model, prompt(20)) as cache, pytest.raises(Unsupported):
        cache.reset()
