"""The recall model: a small Llama that can only go on by reading its KV cache.

It is trained to repeat a sequence of distinct ids. When the same ids come a second time, the
right continuation stands nowhere but in the cached KV of the first copy: each position of the
second copy tests one position of the first, and a damaged block shows as errors in that block.

It is blind to two things: whole blocks in another order (in any RoPE model the order of cached
blocks does not matter) and a suffix whose positions are off. Compare logits for those.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable

RECIPE_VERSION = 1  # counts changes of what follows: trained models are cached under it

NUM_IDS = 256
NUM_THREADS = 2
NUM_STEPS = 1000
WARM_UP_STEPS = 50
LEARNING_RATE = 2e-3
# (until this share of the steps, length, batch): first short and broad, then long.
STAGES = ((0.60, 96, 16), (0.85, 256, 6), (1.00, 512, 3))

BLOCK_SIZE = 32
PREFIX_TOKENS = 192


def build() -> LlamaForCausalLM:
    """The untrained model; seeds torch's global generator."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_IDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def train(progress: Callable[[str], None]) -> LlamaForCausalLM:
    """Train the model; about a minute on two cores, the same weights on every run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            return _train(progress)
    finally:
        torch.set_num_threads(threads)


def _train(progress: Callable[[str], None]) -> LlamaForCausalLM:
    model = build()
    model.train()
    data = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step in range(NUM_STEPS):
        ids, targets = _batch(step, data)
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, NUM_IDS), targets[:, 1:].reshape(-1), ignore_index=-100
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            progress(f"recall model: step {step + 1} of {NUM_STEPS}, loss {loss.item():.2f}")
    model.eval()
    return model


def _batch(step: int, data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that repeat a permutation, and the targets: all from the second copy on."""
    length, batch = next((n, b) for end, n, b in STAGES if step < end * NUM_STEPS)
    ids = torch.empty(batch, length, dtype=torch.long)
    targets = torch.full_like(ids, -100)
    for row in range(batch):
        n = int(torch.randint(8, length // 2 + 1, (1,), generator=data))
        segment = torch.randperm(NUM_IDS, generator=data)[:n]
        ids[row] = segment.repeat(math.ceil(length / n))[:length]
        targets[row, n + 1 :] = ids[row, n + 1 :]
    return ids, targets


def _learning_rate(step: int) -> float:
    if step < WARM_UP_STEPS:
        return LEARNING_RATE * (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / (NUM_STEPS - WARM_UP_STEPS)
    return LEARNING_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def prompts(count: int, *, seed: int, num_tokens: int = PREFIX_TOKENS) -> torch.Tensor:
    """Permutations as ids `[count, num_tokens]`; each is a prefix and, again, its suffix."""
    data = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(NUM_IDS, generator=data)[:num_tokens] for _ in range(count)])


def prefill(model: LlamaForCausalLM, ids: torch.Tensor) -> DynamicCache:
    """The KV of a prefix, as transformers keeps it."""
    cache = DynamicCache(config=model.config)
    logits_behind(model, ids, cache)
    return cache


@torch.no_grad()
def logits_behind(
    model: LlamaForCausalLM, ids: torch.Tensor, cache: DynamicCache, **more: torch.Tensor
) -> torch.Tensor:
    """The logits `[count, num_tokens, vocabulary]` of ids that follow the cached KV."""
    # transformers 5.24 calls it `cache`, and warns of the name that it had before.
    renamed = "cache" in inspect.signature(model.forward).parameters
    argument: dict[str, Any] = {"cache" if renamed else "past_key_values": cache}
    logits: torch.Tensor = model(input_ids=ids, **argument, **more).logits
    return logits


def errors_by_block(
    logits: torch.Tensor, ids: torch.Tensor, *, block_size: int = BLOCK_SIZE
) -> list[float]:
    """The share of wrong ids in each block of the prefix, from the logits of the same ids again.

    The suffix's position i foretells id i + 1, which is read from position i + 1 of the prefix:
    the error counts in that position's block. Nothing foretells id 0. An intact cache shows about
    0.1 in block 0 (position 0 is an attention sink) and less than 0.05 in every other.
    """
    wrong = (logits[:, :-1].argmax(-1) != ids[:, 1:]).float().mean(0)
    first, *others = torch.cat([wrong[:1] * torch.nan, wrong]).split(block_size)
    return [float(first[1:].mean()), *(float(block.mean()) for block in others)]


def clean_accuracy(model: LlamaForCausalLM) -> float:
    """The lowest share of right ids in any block but the first, on fresh permutations."""
    ids = prompts(16, seed=1)
    errors = errors_by_block(logits_behind(model, ids, prefill(model, ids)), ids)
    return 1 - max(errors[1:])
