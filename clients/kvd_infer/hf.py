"""Hugging Face: a Cache whose keys and values lie in pages leased from kvd.

    model.set_attn_implementation("kvd")
    with Client() as client:
        namespace = client.open(identity_of(model), layout_of(model))
        generation = generate(model, namespace, input_ids, max_new_tokens=64, do_sample=False)

or, where more is to be done between the steps, what `generate` does for the caller:

        with KvdCache(namespace, model, input_ids) as cache:
            output = model.generate(input_ids, **cache.as_kwargs(), max_new_tokens=64)
            cache.commit(output)

Importing this module registers the attention implementation "kvd". With a KvdCache it attends to
the pages in place; without one it is transformers' own "sdpa", masks and all.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from kvd_client import (
    BadRequest,
    KvdError,
    Layout,
    Lease,
    LeaseEnded,
    Namespace,
    PagesInUse,
    Unsupported,
)
from kvd_infer.attention import KeysValues, attend
from kvd_infer.hf_model import identity_of, layout_of

__all__ = ["NAME", "Generation", "KvdCache", "generate", "identity_of", "layout_of"]

logger = logging.getLogger(__name__)

NAME = "kvd"

# Pages that are not there soon are not worth the wait: there is private memory.
RESERVE_SECONDS = 1.0
CHUNK_TOKENS = 256
# A generation whose lease ended is done again; the last time in private memory.
MAX_ATTEMPTS = 4

# What an attention layer may ask for and `attend` does not do.
_UNKNOWN_TO_ATTEND = ("softcap", "s_aux", "position_bias", "sliding_window")


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What `generate` made: `output` is transformers' own answer, `sequences` the ids in it.

    Of `prompt_tokens`, `reused_tokens` came from kvd; `committed_tokens` of the whole sequence lie
    there now. `attempts` is 1 unless leases ended on the way.
    """

    output: Any
    sequences: Tensor
    prompt_tokens: int
    reused_tokens: int
    committed_tokens: int
    attempts: int


def generate(
    model: PreTrainedModel,
    namespace: Namespace | None,
    input_ids: Tensor,
    *,
    streamer: BaseStreamer | None = None,
    **arguments: Any,
) -> Generation:
    """`model.generate` with what kvd knows of the prompt; what is computed is committed there.

    Whatever becomes of the daemon, the caller gets the tokens: where a lease ends under way, what
    was computed is dropped and done again, with the same random numbers; where there is no daemon
    or no page, private memory is used. A streamer gets each token once.

    `input_ids` is `[1, tokens]`, without padding. Raises Unsupported for more than one sequence,
    beams, assisted decoding and models that kvd cannot hold.
    """
    if arguments.get("inputs_embeds") is not None:
        raise Unsupported("kvd knows prompts by their token ids: leave inputs_embeds out")
    random_state = torch.get_rng_state()
    if streamer is not None:
        arguments["streamer"] = streamer = _OnceStreamer(streamer)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        where = namespace if attempt < MAX_ATTEMPTS else None
        try:
            with KvdCache(where, model, input_ids) as cache:
                call: Any = model.generate
                output = call(input_ids, **cache.as_kwargs(), **arguments)
                sequences = output if isinstance(output, Tensor) else output.sequences
                return Generation(
                    output=output,
                    sequences=sequences,
                    prompt_tokens=input_ids.shape[1],
                    reused_tokens=cache.reused_tokens,
                    committed_tokens=cache.commit(sequences),
                    attempts=attempt,
                )
        except LeaseEnded as error:
            logger.warning("generating again, attempt %d was void: %s", attempt, error)
            torch.set_rng_state(random_state)
            if streamer is not None:
                streamer.begin_again()
    raise AssertionError("private memory has no lease that could end")


class KvdCache(Cache):
    """The KV of one sequence, made for its prompt: in pages of kvd as far as there are any.

    What kvd knows of the prompt is there from the start (`reused_tokens`, whole blocks, never the
    whole prompt). Each forward pass writes behind it; prompt blocks are committed as soon as the
    last layer has attended, generated ones by `commit`. Where pages run out or the daemon is away,
    the rest lies in private memory and nothing is raised. A forward pass raises LeaseEnded if its
    pages may have been another's meanwhile: what was computed is void, make a new cache.

    Pass it to `generate` or to the model by `**cache.as_kwargs()`, with the full prompt to
    `generate` and the tokens that follow `get_seq_length()` to the model. Only under no_grad, for
    one sequence, without padding; it cannot be cropped. Close it, or use it in a `with`.

    The KV is the caller's word: a pass over other ids than the prompt's, over embeddings, or with
    hooks that change what the layers compute is committed as the prompt's all the same.
    """

    def __init__(self, namespace: Namespace | None, model: PreTrainedModel, input_ids: Tensor):
        """Match the prompt, `[1, tokens]`; without a namespace all lies in private memory.

        Raises Unsupported and BadRequest, for models and prompts that cannot be.
        """
        super().__init__(layers=[])
        layout = layout_of(model, block_size=namespace.layout.block_size if namespace else 16)
        if namespace and namespace.layout != layout:
            difference = namespace.layout.difference(layout)
            raise BadRequest(f"the namespace is another model's: {difference}")
        if (used := model.config._attn_implementation) != NAME:
            raise Unsupported(f'attention is {used!r}: call model.set_attn_implementation("kvd")')
        self._argument = "cache" if "cache" in _parameters(model) else "past_key_values"
        self._layout = layout
        self._namespace = namespace
        self._prompt = _only_sequence(input_ids)
        self._lease = self._match()
        self._memory = _PrivateMemory(layout)
        # Once a token has no page, none behind it gets one: commits are contiguous.
        self._pages_end = False
        self._length = self.reused_tokens = self._lease.num_tokens if self._lease else 0
        self._pass: _Pass | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._forget()
        if self._lease is not None:
            self._lease.__exit__(kind, *exc)

    def __len__(self) -> int:
        return self._layout.num_layers

    def as_kwargs(self) -> dict[str, KvdCache]:
        """This cache under the name that the model's forward has for it."""
        return {self._argument: self}

    def commit(self, output_ids: Tensor) -> int:
        """Commit the full blocks of the sequence so far; how many of its tokens are committed.

        `output_ids` are the prompt and what was generated. Without the daemon nothing happens.
        """
        tokens = _only_sequence(output_ids)
        if not torch.equal(tokens[: len(self._prompt)], self._prompt):
            raise BadRequest("output_ids do not begin with the prompt that the cache was made for")
        self._pass = None
        try:
            self._commit(tokens)
        except LeaseEnded as error:  # every pass was checked: what it computed holds
            logger.info("nothing more is committed: %s", error)
        return self._lease.num_committed if self._lease else 0

    def close(self) -> None:
        """Release the pages. Idempotent."""
        self.__exit__(None, None, None)

    # --- what transformers asks ---

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """`update` returns the new tokens alone, which need no mask: attend knows the rest."""
        return query_length, self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def _no_layer(self) -> list[bool]:
        """For each layer: where there is none, 5.24 takes all of them for linear ones."""
        return [False] * self._layout.num_layers

    is_sliding = is_linear = is_dummy = _no_layer

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise Unsupported("a KvdCache cannot be cropped: use it without assisted decoding")

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
        _current.set(self)
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
            self._end()
        return output

    def awaits(self, keys: Tensor) -> bool:
        """Whether these are the very keys that the last `update` returned."""
        return self._pass is not None and self._pass.keys is keys

    def _begin(self, num_tokens: int) -> _Pass:
        start, stop = self._length, self._length + num_tokens
        if self._is_closed:
            raise BadRequest("the cache is closed: make a new one for each prompt")
        if start < len(self._prompt) < stop:
            raise Unsupported(
                f"got tokens {start} to {stop} for a prompt of {len(self._prompt)}: make the cache "
                "for the very input_ids, and use it without assisted decoding"
            )
        lease = self._lease
        if lease is None:
            return _Pass(
                start, stop, self._memory.tensors(start, stop), self._memory.tensors(0, stop)
            )
        lease.check()
        self._reserve(lease, stop)
        # tokens:   0 ……… start ……… paged ……… stop
        # lie in:   pages  pages    private memory, as of token `capacity`
        capacity = lease.capacity_tokens
        paged = min(stop, capacity)
        targets = lease.write_tensors(start, paged) if start < paged else []
        parts = lease.read_tensors(0, paged)
        if stop > capacity:
            targets += self._memory.tensors(max(start - capacity, 0), stop - capacity)
            parts += self._memory.tensors(0, stop - capacity)
        return _Pass(start, stop, targets, parts)

    def _end(self) -> None:
        assert self._pass is not None
        start, stop = self._pass.start, self._pass.stop
        self._pass = None
        if self._lease is not None:
            self._lease.check()
        self._length = stop
        if start < len(self._prompt):
            self._commit(self._prompt)

    # --- the daemon ---

    def _match(self) -> Lease | None:
        """A lease of what kvd knows of the prompt; None where there is none to be had."""
        if self._namespace is None:
            return None
        with _going_on():
            # An engine computes at least one token itself.
            lease = self._namespace.match(self._prompt[:-1].numpy())
            if lease.is_open or lease.capacity_tokens > 0:
                return lease
            logger.info("no kvd answers on %s", self._namespace.client.endpoint)
        return None

    def _reserve(self, lease: Lease, num_tokens: int) -> None:
        if not self._pages_end and num_tokens > lease.capacity_tokens:
            self._pages_end = True
            with _going_on():
                lease.reserve(num_tokens, timeout=RESERVE_SECONDS)
                self._pages_end = False

    def _commit(self, tokens: Tensor) -> None:
        """Commit the whole blocks of these tokens whose rows are written, and lie in pages."""
        if (lease := self._lease) is not None:
            stop = min(len(tokens), self._length, lease.capacity_tokens)
            with _going_on():
                lease.commit(tokens[lease.num_committed : stop].numpy())

    def _forget(self) -> None:
        """Let go of every view of pages, and of private memory."""
        self._is_closed = True
        if self._pass is not None:
            self._pass.forget()  # a traceback may hold the pass
            self._pass = None
        self._memory = _PrivateMemory(self._layout)
        if _current.get() is self:
            _current.set(None)

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

    `targets` and `parts` are `[layers, planes, tokens, heads, head_size]`, in the tokens' order.
    `keys` are those of the layer that is written and has not attended yet.
    """

    def __init__(self, start: int, stop: int, targets: list[Tensor], parts: list[Tensor]) -> None:
        self.start = start
        self.stop = stop
        self.next_layer = 0
        self.keys: Tensor | None = None
        self._targets = targets
        self._parts = parts

    def forget(self) -> None:
        self._targets, self._parts = [], []

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
        _check_attention(module, query, mask, asked)
        layer = self.next_layer
        self.next_layer += 1
        if layer == 0 and (positions := asked.get("position_ids")) is not None:
            self._check_positions(positions)
        parts = [KeysValues(part[layer, 0], part[layer, 1]) for part in self._parts]
        output = attend(query[0].transpose(0, 1), parts, scale=scaling)
        return output.unsqueeze(0).contiguous()

    def _check_positions(self, positions: Tensor) -> None:
        # Keys carry their rotary positions: other ones would poison the prefix for everyone.
        if not torch.equal(positions.flatten(), torch.arange(self.start, self.stop)):
            raise Unsupported(
                "position_ids do not follow the cached tokens: leave them out, and give "
                "`generate` the full input_ids"
            )


class _PrivateMemory:
    """The KV of tokens that have no page, in the shape of leased runs; grows by chunks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._chunks: list[Tensor] = []

    def tensors(self, start: int, stop: int) -> list[Tensor]:
        """Views of tokens `start` to `stop - 1`, one per chunk."""
        self._grow(stop)
        views, at = [], 0
        for chunk in self._chunks:
            size = chunk.shape[2]
            first, end = max(start - at, 0), min(stop - at, size)
            if first < end:
                views.append(chunk[:, :, first:end])
            at += size
        return views

    def _grow(self, num_tokens: int) -> None:
        missing = num_tokens - sum(chunk.shape[2] for chunk in self._chunks)
        if missing > 0:
            layout = self._layout
            shape = (
                layout.num_layers,
                layout.num_planes,
                max(missing, CHUNK_TOKENS),
                layout.num_kv_heads,
                layout.head_size,
            )
            self._chunks.append(torch.empty(shape, dtype=getattr(torch, layout.dtype)))


class _OnceStreamer(BaseStreamer):
    """Passes on what the streamer has not had yet, however often generation begins again."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._num_passed = 0
        self._num_seen = 0

    def begin_again(self) -> None:
        self._num_seen = 0

    def put(self, value: Tensor) -> None:
        self._num_seen += 1
        if self._num_seen > self._num_passed:
            self._num_passed += 1
            self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


@contextmanager
def _going_on() -> Iterator[None]:
    """Inference goes on without what the daemon could not do, whatever the reason."""
    try:
        yield
    except (BadRequest, LeaseEnded, PagesInUse):  # mistakes, and what must be told
        raise
    except KvdError as error:
        logger.warning("going on without kvd: %s", error)


def _only_sequence(ids: Tensor) -> Tensor:
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise Unsupported(
            f"ids are {list(ids.shape)}, not [1, tokens]: use one KvdCache for each prompt"
        )
    return ids[0].detach().to("cpu", copy=True)


def _parameters(model: PreTrainedModel) -> Any:
    return inspect.signature(model.forward).parameters


# --- attention ---------------------------------------------------------------------------------

# The cache whose `update` was called last in this thread; the attention function is called next.
# Up to 5.23 transformers has no other way from the one to the other.
_current: ContextVar[KvdCache | None] = ContextVar("kvd_cache", default=None)


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
    """Attention of a KvdCache over its pages; every other call is transformers' sdpa.

    A call belongs to a cache when it brings the very keys that the cache's update returned, so
    that a forward pass which failed half-way leaves nothing behind for the next.
    """
    cache = _current.get()
    if cache is not None and cache.awaits(key):
        _current.set(None)
        output = cache.attend(module, query, attention_mask, scaling, dropout=dropout, **kwargs)
        return output, None
    sdpa = AttentionInterface()["sdpa"]
    return sdpa(  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )


def _mask(*, attention_mask: Tensor | None = None, kv_offset: Any = 0, **kwargs: Any) -> Any:
    """The mask of sdpa, which is None for a KvdCache: its new tokens are a causal square.

    Padding inside a matched prefix would escape it, so that is looked for here.
    """
    if attention_mask is not None and kv_offset and not attention_mask.all():
        raise Unsupported(_NO_MASKS)
    sdpa = AttentionMaskInterface()["sdpa"]
    return sdpa(attention_mask=attention_mask, kv_offset=kv_offset, **kwargs)


_NO_MASKS = (
    "a KvdCache takes no padding and no mask of one's own: pass one prompt without padding, and "
    "either no attention_mask or one of ones over cached and new tokens"
)


def _check_attention(
    module: torch.nn.Module, query: Tensor, mask: Tensor | None, asked: dict[str, Any]
) -> None:
    """Refuse what `attend` would leave out without a word."""
    if mask is not None:
        raise Unsupported(_NO_MASKS)
    if query.requires_grad:
        raise Unsupported("a KvdCache has no gradients: call the model under torch.no_grad()")
    unknown = [name for name in _UNKNOWN_TO_ATTEND if asked.get(name) is not None]
    if unknown or asked.get("dropout"):
        raise Unsupported(f"kvd's attention has no {', '.join(unknown) or 'dropout'}")
    if not getattr(module, "is_causal", True):
        raise Unsupported("kvd's attention is causal, and this layer's is not")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
