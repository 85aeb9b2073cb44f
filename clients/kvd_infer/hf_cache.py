"""KvdCache: what a Hugging Face model takes for its cache, over rows that lie in kvd."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvd_client import BadRequest, LeaseEnded, Namespace, Unsupported
from kvd_infer.attention import KeysValues, Plan
from kvd_infer.hf_attention import NAME, Unmasked, check_attention, current_cache
from kvd_infer.hf_model import layout_of, windows_of
from kvd_infer.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class KvdCache(Cache):
    """The KV of one sequence, made for its prompt: in pages of kvd as far as there are any.

    What kvd knows of the prompt is there from the start (`reused_tokens`, to the token, never the
    whole prompt). Each forward pass writes behind it; prompt blocks are committed as soon as the
    last layer has attended, generated ones by `commit`. Where pages run out or the daemon is away,
    the rest lies in private memory and nothing is raised. A forward pass raises LeaseEnded if its
    pages may have been another's meanwhile: what was computed is void, make a new cache.

    Pass it to `generate` or to the model by `**cache.as_kwargs()`, with the full prompt to
    `generate` and the tokens that follow `get_seq_length()` to the model. Only under no_grad, for
    one sequence, without padding. Close it, or use it in a `with`.

    The KV is the caller's word: a pass over other ids than the prompt's, over embeddings or token
    types, or with hooks that change what the layers compute is committed as the prompt's all the
    same.
    """

    def __init__(self, namespace: Namespace | None, model: PreTrainedModel, input_ids: Tensor):
        """Match the prompt, `[1, tokens]`; without a namespace all lies in private memory.

        Raises Unsupported and BadRequest, for models and prompts that cannot be.
        """
        super().__init__(layers=[])
        layout = layout_of(model, block_size=namespace.layout.block_size if namespace else 16)
        if namespace and namespace.layout != layout:
            difference = namespace.layout.difference(layout)
            raise BadRequest(
                f"the namespace has another layout than this model needs: {difference}"
            )
        if (used := model.config._attn_implementation) != NAME:
            raise Unsupported(
                f'attention is {used!r}: call model.set_attn_implementation("kvd"), and use models '
                "that let themselves be set"
            )
        parameters = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in parameters else "past_key_values"
        self._layout = layout
        self._windows = windows_of(model)
        self._rows = Rows(namespace, layout, _only_sequence(input_ids))
        self._pass: _Pass | None = None
        self._takes_candidates = False
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._is_closed = True
        self._drop_pass()
        self._rows.close(kind)

    def __len__(self) -> int:
        return self._layout.num_layers

    @property
    def reused_tokens(self) -> int:
        """Tokens whose KV came from kvd, and is still held."""
        return self._rows.reused_tokens

    def as_kwargs(self) -> dict[str, KvdCache]:
        """This cache under the name that the model's forward has for it."""
        return {self._argument: self}

    def commit(self, output_ids: Tensor) -> int:
        """Commit the full blocks of the sequence so far; how many of its tokens are committed.

        `output_ids` are the prompt and what was generated, all of it, whether or not the last has
        its KV yet. Without the daemon nothing happens. Raises BadRequest for other ids.
        """
        self._drop_pass()
        try:
            self._rows.commit(_only_sequence(output_ids))
        except LeaseEnded as error:  # every pass was checked: what it computed holds
            logger.info("nothing more is committed: %s", error)
        return self._rows.num_committed

    def close(self) -> None:
        """Release the pages. Idempotent."""
        self.__exit__(None)

    # --- what transformers asks ---

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._rows.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """`update` returns the new tokens alone, which need no mask: a `Plan` knows the rest."""
        return query_length, Unmasked(self._rows.length)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def _no_layer(self) -> list[bool]:
        """For each layer: where there is none, 5.24 takes all of them for linear ones."""
        return [False] * self._layout.num_layers

    is_sliding = is_linear = is_dummy = _no_layer

    @property
    def is_croppable(self) -> bool:
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last n tokens, for -n; for a positive n, all but the first n.

        What follows may be anything: of the prompt too, blocks behind the crop are committed by
        `commit` alone. Raises LeaseEnded as a forward pass does.
        """
        self._check_open()
        self._drop_pass()
        length = self._rows.length
        keep = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        if keep < length:
            self._rows.crop(max(keep, 0))

    def activate_past_recording(self) -> None:
        """Begin cold: assisted decoding, which asks for this, passes the whole prompt anyway.

        It does so in its first pass, whatever the cache has, and with candidates behind the prompt.
        """
        self._check_open()
        self._drop_pass()
        self._rows.begin_anew()
        self._takes_candidates = True

    def reset(self) -> None:
        raise Unsupported("a KvdCache is made for one prompt: make a new one instead of a reset")

    def _refuse_batch(self, *args: Any, **kwargs: Any) -> None:
        raise Unsupported(
            "a KvdCache holds one sequence: use num_beams=1 and num_return_sequences=1, and one "
            "cache for each prompt"
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens' K and V, each `[1, kv_heads, tokens, head_size]`, of one layer."""
        self._check_states(key_states, value_states)
        if self._pass is not None and self._pass.keys is not None:
            raise Unsupported(
                "a layer did not attend through kvd, which alone knows the cached tokens: call "
                'model.set_attn_implementation("kvd"), and use models that hand to attention what '
                "the cache's update returned"
            )
        if layer_idx == 0:
            self._pass = self._begin(key_states.shape[2])
        elif self._pass is None or layer_idx != self._pass.next_layer:
            raise Unsupported(
                f"layer {layer_idx} came out of turn: kvd needs a model whose layers run in order"
            )
        self._pass.write(layer_idx, key_states, value_states)
        current_cache.set(self)
        return key_states, value_states

    # --- one forward pass ---

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        **asked: Any,
    ) -> Tensor:
        """Attention of one layer over all tokens so far; the last layer ends the pass."""
        assert self._pass is not None
        # No name for the pass here: it holds writable views, which must be gone at commit.
        output = self._pass.attend(module, query, mask, scaling, asked)
        if self._pass.next_layer == self._layout.num_layers:
            stop, self._pass = self._pass.stop, None
            self._rows.written(stop)
        return output

    def awaits(self, keys: Tensor) -> bool:
        """Whether these are the very keys that the last `update` returned."""
        return self._pass is not None and self._pass.keys is keys

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadRequest("the cache is closed: make a new one for each prompt")

    def _begin(self, num_tokens: int) -> _Pass:
        self._check_open()
        start, known = self._rows.length, self._rows.num_known
        stop = start + num_tokens
        if start < known < stop and not self._takes_candidates:
            raise Unsupported(
                f"got tokens {start} to {stop} for a prompt of {known}: make the cache for the "
                "very input_ids"
            )
        return _Pass(start, stop, *self._rows.extend(stop), self._windows)

    def _drop_pass(self) -> None:
        """Let go of every view that a pass under way has."""
        if self._pass is not None:
            self._pass.forget()  # a traceback may hold the pass
            self._pass = None
        if current_cache.get() is self:
            current_cache.set(None)

    def _check_states(self, keys: Tensor, values: Tensor) -> None:
        if keys.shape[0] != 1:
            self._refuse_batch()
        wanted = (1, self._layout.num_kv_heads, keys.shape[2], self._layout.head_size)
        for states in (keys, values):
            is_typed = str(states.dtype).removeprefix("torch.") == self._layout.dtype
            if states.shape != wanted or not is_typed:
                raise Unsupported(
                    f"a layer gave {states.dtype} {list(states.shape)} where the layout has "
                    f"{self._layout.dtype} {list(wanted)}"
                )


class _Pass:
    """One forward pass: where the rows of its tokens go, and all rows that it attends to.

    `targets` and `runs` are `[layers, planes, tokens, heads, head_size]`, in the tokens' order;
    `windows` has one for each layer. `keys` are those of the layer that is written and has not
    attended yet.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        targets: list[Tensor],
        runs: list[Tensor],
        windows: Sequence[int | None],
    ) -> None:
        self.start = start
        self.stop = stop
        self.next_layer = 0
        self.keys: Tensor | None = None
        self._targets = targets
        self._windows = windows
        parts = [KeysValues(run[:, 0], run[:, 1]) for run in runs]
        self._plans = {window: Plan([stop - start], [parts], window) for window in set(windows)}

    def forget(self) -> None:
        self._targets, self._plans = [], {}

    @torch.no_grad()
    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        sizes = [target.shape[2] for target in self._targets]
        for plane, states in enumerate((keys, values)):
            rows = states[0].transpose(0, 1).split(sizes)
            for target, its_rows in zip(self._targets, rows, strict=True):
                target[layer, plane].copy_(its_rows)
        self.keys = keys

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        asked: dict[str, Any],
    ) -> Tensor:
        self.keys = None
        layer, window = self.next_layer, self._windows[self.next_layer]
        check_attention(module, query, mask, window, asked)
        self.next_layer += 1
        if layer == 0 and (positions := asked.get("position_ids")) is not None:
            self._check_positions(positions)
        output = self._plans[window].attend(query[0].transpose(0, 1), layer, scale=scaling)
        return output.unsqueeze(0).contiguous()

    def _check_positions(self, positions: Tensor) -> None:
        # Keys carry their rotary positions: other ones would poison the prefix for everyone.
        if not torch.equal(positions.flatten(), torch.arange(self.start, self.stop)):
            raise Unsupported(
                "position_ids do not follow the cached tokens: leave them out, give `generate` the "
                "full input_ids, and do not set use_cache=False"
            )


def _only_sequence(ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor):
        raise BadRequest(f"ids are {type(ids).__name__}, not a tensor: torch.tensor([ids])")
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise Unsupported(
            f"ids are {list(ids.shape)}, not [1, tokens]: use one KvdCache for each prompt"
        )
    return ids[0].detach().to("cpu", copy=True)
