"""Runs of tiny models, with kvd and without, and what compares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from demo.models import tiny_llama
from kvd_infer.hf import Generation, KvdCache, generate
from tests.infer.conftest import plain_logits, tolerance_of

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from kvd_client import Namespace

ModelT = TypeVar("ModelT", bound=PreTrainedModel)

STEPS = 24
WINDOW = 8

_TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
    "attn_implementation": "sdpa",
}  # fmt: skip


def with_kvd(**overrides: Any) -> LlamaForCausalLM:
    return attending(tiny_llama(**overrides))


def attending(model: ModelT) -> ModelT:
    model.set_attn_implementation("kvd")
    return model


def tiny_gpt2() -> GPT2LMHeadModel:
    """A random GPT-2: a KV head for each query head, learned positions, Conv1D."""
    config = GPT2Config(
        vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=1024, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    return _random(GPT2LMHeadModel, config)


def tiny_mistral(**overrides: Any) -> MistralForCausalLM:
    """A random Mistral of two layers with a window."""
    return _random(MistralForCausalLM, MistralConfig(**_TINY | overrides))


def tiny_qwen2(**overrides: Any) -> Qwen2ForCausalLM:
    """A random Qwen2 whose second layer has a window."""
    windows = {"use_sliding_window": True, "max_window_layers": 1}
    return _random(Qwen2ForCausalLM, Qwen2Config(**_TINY | windows | overrides))


def tiny_qwen3() -> Qwen3ForCausalLM:
    """A random Qwen3, which norms queries and keys."""
    return _random(Qwen3ForCausalLM, Qwen3Config(**_TINY, head_dim=32))


def _random(kind: Callable[[Any], ModelT], config: Any) -> ModelT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config).eval()


def prompt(num_tokens: int, seed: int = 0) -> Tensor:
    data = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(0, 256, (1, num_tokens), generator=data)


def logits_with_kvd(
    model: PreTrainedModel, namespace: Namespace | None, ids: Tensor
) -> tuple[Tensor, int]:
    """Logits of the tokens that kvd did not have, and how many it had."""
    with KvdCache(namespace, model, ids) as cache, torch.no_grad():
        reused = cache.reused_tokens
        return model(ids[:, reused:], **cache.as_kwargs()).logits, reused


def greedy(
    model: PreTrainedModel, namespace: Namespace | None, ids: Tensor, **arguments: Any
) -> Generation:
    arguments = {"max_new_tokens": STEPS, "do_sample": False} | arguments
    return generate(model, namespace, ids, **arguments)


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def assert_greedy(plain: PreTrainedModel, sequences: Tensor, num_prompt: int) -> None:
    """Each token is the best one, by a model without kvd, after those before it.

    Two that are closer than the tolerance are equally good; what follows is judged by itself.
    """
    assert sequences.shape[1] == num_prompt + STEPS
    judged = plain_logits(plain, sequences)[0, num_prompt - 1 : -1]
    chosen = judged.gather(1, sequences[0, num_prompt:, None])[:, 0]
    assert float((judged.max(1).values - chosen).max()) <= tolerance_of(plain, sequences)


class At:
    """A hook that does something once, when a layer is reached for the n-th time."""

    def __init__(
        self, model: LlamaForCausalLM, layer: int, nth: int, do: Callable[[], object]
    ) -> None:
        self._left = nth
        self._do = do
        self._handle = model.model.layers[layer].register_forward_hook(self)

    def __call__(self, *args: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._do()

    def close(self) -> None:
        assert self._left <= 0, "the layer was not reached"
        self._handle.remove()


def num_leases(namespace: Namespace) -> int:
    session = namespace.client.connection.core.session
    assert session is not None
    (status,) = (s for s in namespace.client.status().sessions if s.session == session.name)
    return status.num_leases
