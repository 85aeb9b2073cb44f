"""Model: a Hugging Face model, unchanged, over the rows of many sequences at once.

The tokens of all sequences lie one behind the other, as one sequence for everything in the model
but attention. There each layer hands us its queries and the new keys and values, positions applied;
we write these to where each sequence has its rows, and attend to all of them in place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

from kvd_client import BadRequest, Identity, KvdError, Layout, Unsupported
from kvd_infer import telemetry
from kvd_infer.attention import KeysValues, Plan
from kvd_infer.hf_attention import check_attention
from kvd_infer.hf_model import identity_of, layout_of, windows_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvd_infer.sequence import Chunk

NAME = "kvd-batch"


class Model:
    """A causal model and what kvd has to know of it. One thread at a time."""

    def __init__(self, model: PreTrainedModel, revision: str | None = None) -> None:
        """Take a model over: from then on it attends by this class alone.

        Raises Unsupported for what kvd cannot hold.
        """
        self.layout: Layout = layout_of(model)
        self.identity: Identity = identity_of(model, revision)
        self.max_tokens: int = getattr(model.config, "max_position_embeddings", 1 << 20)
        self.vocabulary_size: int = model.config.vocab_size
        self.end_ids = _end_ids(model)
        self._windows = windows_of(model)
        model.set_attn_implementation(NAME)
        self._model: Any = model.eval()

    @classmethod
    def load(cls, directory: str | Path, dtype: torch.dtype = torch.float32) -> Self:
        """From a local folder with safetensors; nothing is downloaded, and no code of it runs.

        Raises BadRequest where there is no such model, Unsupported for what kvd cannot hold.
        """
        path = Path(directory)
        if not any(path.glob("*.safetensors")):
            raise BadRequest(f"{path} has no *.safetensors: give the folder of a local model")
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
            model, info = loaded
            if missing := info["missing_keys"]:  # which would be random
                raise BadRequest(f"the model in {path} has no {', '.join(sorted(missing))}")
            return cls(model)
        except KvdError:
            raise
        except Exception as error:  # of its files, transformers raises whatever comes of them
            raise BadRequest(f"the model in {path} cannot be loaded: {error!r}") from error

    @torch.no_grad()
    def forward(self, chunks: Sequence[Chunk], wanted: Sequence[int]) -> Tensor:
        """Compute the rows of these chunks; the logits of the last token of those `wanted`.

        `wanted` are places in `chunks`; returns `[wanted, vocabulary]`. No view of a page is left.
        """
        batch = _Batch.of(chunks, self._windows)
        token = _current.set(batch)
        try:
            output = self._model(
                input_ids=torch.cat([chunk.tokens for chunk in chunks]).unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.ends[list(wanted)],
            )
        finally:
            _current.reset(token)
            for chunk in chunks:
                chunk.forget()
            telemetry.attention_latency.record(batch.seconds)
            batch.forget()
        logits: Tensor = output.logits[0]
        return logits


@dataclass(slots=True)
class _Batch:
    """One forward pass: where its tokens stand, where their rows go, and how they attend.

    `positions` are of all tokens, `ends` the place of each chunk's last one among them. `targets`
    are by layer, those of the keys before those of the values, of `sizes` tokens; `plans` are by
    the layers' windows.
    """

    positions: Tensor
    ends: Tensor
    sizes: list[int]
    targets: list[list[Tensor]]
    windows: list[int | None]
    plans: dict[int | None, Plan]
    seconds: float = 0.0

    @classmethod
    def of(cls, chunks: Sequence[Chunk], windows: list[int | None]) -> Self:
        lengths = [len(chunk.tokens) for chunk in chunks]
        spans = zip((chunk.start for chunk in chunks), lengths, strict=True)
        parts = [[KeysValues(part[:, 0], part[:, 1]) for part in chunk.parts] for chunk in chunks]
        targets = [target for chunk in chunks for target in chunk.targets]
        planes = [target[:, plane].unbind() for plane in (0, 1) for target in targets]
        return cls(
            torch.cat([torch.arange(start, start + length) for start, length in spans]),
            torch.tensor(lengths).cumsum(0) - 1,
            [target.shape[2] for target in targets],
            list(map(list, zip(*planes, strict=True))),
            windows,
            {window: Plan(lengths, parts, window) for window in set(windows)},
        )

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float | None
    ) -> Tensor:
        """All are `[1, heads, tokens, head_size]`, the output `[1, tokens, heads, head_size]`."""
        started = time.perf_counter()
        key_rows, value_rows = (
            states[0].transpose(0, 1).split_with_sizes(self.sizes) for states in (keys, values)
        )
        torch._foreach_copy_(self.targets[layer], [*key_rows, *value_rows])
        plan = self.plans[self.windows[layer]]
        output = plan.attend(query[0].transpose(0, 1), layer, scale=scale)
        self.seconds += time.perf_counter() - started
        return output.unsqueeze(0)

    def forget(self) -> None:
        """Let go of all views of pages."""
        self.targets.clear()
        self.plans.clear()


def _end_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a text, as `generate` has them."""
    config = model.generation_config or model.config
    ids = getattr(config, "eos_token_id", None)
    return frozenset([ids] if isinstance(ids, int) else ids or ())


_current: ContextVar[_Batch | None] = ContextVar("kvd_batch", default=None)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    batch = _current.get()
    if batch is None:
        raise Unsupported("this model belongs to an engine of kvd: load it again for other uses")
    layer: Any = module.layer_idx
    asked = {"dropout": dropout, **kwargs}
    check_attention(module, query, attention_mask, batch.windows[layer], asked)
    with telemetry.tracer.start_span(telemetry.ATTENTION, attributes={"layer": layer}):
        return batch.attend(layer, query, key, value, scaling), None


def _no_mask(**kwargs: Any) -> None:
    """Where each sequence begins and ends the batch knows, and attention is causal."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
