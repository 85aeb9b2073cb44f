"""Several sequences in one forward pass, one behind the other: what an engine asks of models.

No padding and no mask: `position_ids` say where each token stands, a cache that attends itself
knows whose it is, and `logits_to_keep` picks the rows that are sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from demo import models
from kvd_infer.attention import KeysValues, Plan
from kvd_infer.hf import layout_of
from kvd_infer.hf_attention import Unmasked, check_attention, current_cache
from kvd_infer.hf_model import windows_of
from tests.infer.conftest import as_kwargs, plain_logits
from tests.infer.runs import (
    attending,
    difference,
    prompt,
    tiny_gpt2,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": tiny_gpt2,
    "llama": models.tiny_llama,
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
}
TOLERANCE = 1e-4
CAPACITY = 64

pytestmark = pytest.mark.usefixtures("one_thread")


class PackedCache(Cache):
    """The least that an engine needs: memory for each sequence, and a step at a time."""

    def __init__(self, model: PreTrainedModel, num_sequences: int) -> None:
        super().__init__(layers=[])
        layout = layout_of(model)
        shape = layout.num_layers, 2, CAPACITY, layout.num_kv_heads, layout.head_size
        self.written = [0] * num_sequences
        self._no_layer = [False] * layout.num_layers
        self._windows = windows_of(model)
        self._memory = [torch.zeros(shape) for _ in range(num_sequences)]

    def begin(self, lengths: list[int]) -> Tensor:
        """The next step has so many tokens of each sequence; their positions."""
        starts = self.written
        self.written = [start + count for start, count in zip(starts, lengths, strict=True)]
        spans = list(zip(self._memory, starts, self.written, strict=True))
        self._targets = [memory[:, :, start:stop] for memory, start, stop in spans]
        parts = [
            [KeysValues(memory[:, 0, :stop], memory[:, 1, :stop])] for memory, _, stop in spans
        ]
        self._plans = {window: Plan(lengths, parts, window) for window in self._windows}
        self._lengths = lengths
        return torch.cat([torch.arange(start, stop) for _, start, stop in spans])

    @property
    def is_sliding(self) -> list[bool]:
        return self._no_layer

    is_linear = is_dummy = is_sliding

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, Unmasked(0)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for plane, states in enumerate((keys, values)):
            rows = states[0].transpose(0, 1).split(self._lengths)
            for target, its_rows in zip(self._targets, rows, strict=True):
                target[layer_idx, plane] = its_rows
        self._keys, self._layer = keys, layer_idx
        current_cache.set(self)
        return keys, values

    def awaits(self, keys: Tensor) -> bool:
        return self._keys is keys

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        **asked: Any,
    ) -> Tensor:
        window = self._windows[self._layer]
        check_attention(module, query, mask, window, asked)
        rows = query[0].transpose(0, 1)
        return self._plans[window].attend(rows, self._layer, scale=scaling)[None].contiguous()


def step(
    model: PreTrainedModel, cache: PackedCache, pieces: list[Tensor], **arguments: Any
) -> Tensor:
    """The logits of one packed pass over the next tokens of each sequence."""
    positions = cache.begin([piece.shape[1] for piece in pieces])
    with torch.no_grad():
        output = model(
            torch.cat(pieces, 1),
            position_ids=positions[None],
            **as_kwargs(model, cache),
            **arguments,
        )
    return output.logits[0]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Callable[[], PreTrainedModel]:
    return FAMILIES[request.param]


def test_packed_prefills_and_decodes_are_those_of_each_sequence_alone(
    family: Callable[[], PreTrainedModel],
) -> None:
    model, plain, ids = attending(family()), family(), [prompt(40), prompt(23), prompt(31, seed=1)]
    cache = PackedCache(model, len(ids))
    for lengths in ([30, 1, 20], [9, 21, 1], [1, 1, 10]):
        starts = cache.written
        spans = list(zip(ids, starts, lengths, strict=True))
        pieces = [its_ids[:, start : start + count] for its_ids, start, count in spans]
        logits = step(model, cache, pieces).split(lengths)
        for its_logits, (its_ids, start, count) in zip(logits, spans, strict=True):
            expected = plain_logits(plain, its_ids[:, : start + count])[0, start:]
            assert difference(its_logits, expected) <= TOLERANCE


def test_logits_of_chosen_rows_alone_are_computed(
    family: Callable[[], PreTrainedModel],
) -> None:
    model, pieces = attending(family()), [prompt(20), prompt(7), prompt(1)]
    every = step(model, PackedCache(model, 3), pieces)
    last = torch.tensor([19, 26, 27])
    chosen = step(model, PackedCache(model, 3), pieces, logits_to_keep=last)
    assert chosen.shape[0] == 3
    assert difference(chosen, every[last]) <= TOLERANCE


def test_positions_of_their_own_would_be_noticed(family: Callable[[], PreTrainedModel]) -> None:
    model, ids = attending(family()), [prompt(20), prompt(9)]
    rests = [prompt(3, seed=1), prompt(2, seed=1)]
    right, wrong = PackedCache(model, 2), PackedCache(model, 2)
    step(model, right, ids)
    step(model, wrong, ids)
    wrong.begin([3, 2])
    with torch.no_grad():  # counted from the cache's length, which is 0, through both sequences
        logits = model(torch.cat(rests, 1), **as_kwargs(model, wrong)).logits[0]
    assert difference(logits, step(model, right, rests)) > 100 * TOLERANCE
