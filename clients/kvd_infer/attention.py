"""Paged attention over leased runs of pages, where they lie.

A sequence's keys and values lie in runs of consecutive pages (PagedAttention, Kwon 2023). In one
layer a run is one strided tensor, so the fused CPU kernel (FlashAttention, Dao 2022) reads it in
place: one call a run. The kernel also returns the log-sum-exp of each row's scores, and with it
results over disjoint keys merge exactly (online softmax, Milakov & Gimelshein 2018; FlashInfer
calls it cascade). Nothing is gathered or masked: causality comes from how we cut (`cuts`). Sliding
windows come from it too; only keys that one leaves behind are copied, in the opposite order.

Pages of a GPU are attended where they lie too, by the kernels that `attention_cuda` finds there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvd_infer import attention_cuda
from kvd_infer.cuts import Group, KeysValues, Sees, Wave, check_tensor, describe, waves_of

__all__ = ["KeysValues", "Plan", "attend", "paged_attention"]


def paged_attention(
    query: Tensor,
    lengths: Sequence[int],
    sequences: Sequence[Sequence[KeysValues]],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention for a ragged batch in one layer; for several, make one `Plan`."""
    return Plan(lengths, sequences, window).attend(query, scale=scale)


def attend(
    query: Tensor,
    parts: Sequence[KeysValues],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of one sequence in one layer: a `Plan` of its own."""
    return Plan([query.shape[0]], [parts], window).attend(query, scale=scale)


class Plan:
    """Causal attention for a ragged batch, checked and cut once for all layers of a step.

    Prefills and decodes may be together: `lengths[i]` queries of sequence i, whose parts are
    `sequences[i]`. The parts, in order, cover positions 0 to n - 1; the queries are positions
    n - lengths[i] to n - 1, each of which sees all up to itself or, with a window, itself and the
    window - 1 before it. Parts that nobody sees are not read.

    Raises ValueError where lengths, shapes, dtypes or devices do not fit, and where the parts have
    fewer tokens than there are queries (such a query would see no key). A plan has views of its
    parts: drop it with them.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sequences: Sequence[Sequence[KeysValues]],
        window: int | None = None,
    ) -> None:
        if len(lengths) != len(sequences):
            raise ValueError(f"got {len(lengths)} lengths for {len(sequences)} sequences")
        if window is not None and window < 1:
            raise ValueError(f"a window is one token at least, got {window}")
        for num_queries, parts in zip(lengths, sequences, strict=True):
            _check_length(num_queries, parts)
        self._lengths = list(lengths)
        self._sequences = sequences
        self._window = window
        self._like = _checked_alike([part for parts in sequences for part in parts])
        self._waves = waves_of(lengths, sequences, window)

    @torch.no_grad()
    def attend(self, query: Tensor, layer: int = 0, *, scale: float | None = None) -> Tensor:
        """Attention in one layer.

        `query` is `[sum(lengths), query_heads, head_size]`, one sequence behind the other, its
        dtype that of the parts; `query_heads` is a multiple of `kv_heads` (MHA, GQA, MQA).
        `scale`, positive, is 1 / sqrt(head_size) where None. Returns a new tensor like `query`,
        without autograd. Results of several parts are merged in float32 (float64 for float64).

        Raises ValueError where the query does not fit; RuntimeError where this torch's kernel is
        missing or answers wrongly.
        """
        self._check_query(query)
        _check_scale(scale)
        if query.shape[0] == 0:
            return torch.empty_like(query)
        _check_kernel(query.dtype, query.device)
        if query.is_cuda and self._window is None:
            sequences = [[part.layer(layer) for part in parts] for parts in self._sequences]
            together = attention_cuda.attend_pages(query, self._lengths, sequences, scale)
            if together is not None:
                return together
        first, *others = self._waves
        merged = _attend_wave(query, first, layer, scale)
        for wave in others:
            merged = _merge(merged, _attend_wave(query, wave, layer, scale), wave.rows)
        return merged.output.to(query.dtype)

    def _check_query(self, query: Tensor) -> None:
        check_tensor("query", query, (3,))
        if query.shape[0] != sum(self._lengths):
            raise ValueError(
                f"lengths {self._lengths} do not add up to {query.shape[0]} query rows"
            )
        if (keys := self._like) is None:
            return
        *_, kv_heads, head_size = keys.shape
        is_like = (query.dtype, query.device) == (keys.dtype, keys.device)
        if not is_like or query.shape[1] % kv_heads or query.shape[2] != head_size:
            raise ValueError(f"query {describe(query)} does not fit keys {describe(keys)}")


class _Partial(NamedTuple):
    """What rows have from some of their keys.

    The output is `[rows, heads, head_size]`, the log-sum-exp `[rows, heads]`.
    """

    output: Tensor
    lse: Tensor


def _attend_wave(query: Tensor, wave: Wave, layer: int, scale: float | None) -> _Partial:
    partials = [_attend_group(query[group.rows], group, layer, scale) for group in wave.groups]
    if len(partials) == 1:
        return partials[0]
    outputs, lses = zip(*partials, strict=True)
    return _Partial(torch.cat(outputs), torch.cat(lses))


def _attend_group(query: Tensor, group: Group, layer: int, scale: float | None) -> _Partial:
    """Attention of a group's rows, `[rows, heads, head_size]`; its pieces are reshaped together."""
    pieces, sees = group.pieces, group.pieces[0].sees
    by_heads = query.unflatten(0, (len(pieces), -1)).transpose(1, 2)
    if sees is Sees.FROM_ITS_OWN:
        by_heads = by_heads.flip(2)
    heads = _heads_for(by_heads, pieces[0].keys[layer], sees)
    packed = by_heads.reshape(len(pieces), 1, heads, -1, query.shape[2])
    results = [
        _flash(rows, *piece.of(layer), is_causal=sees is not Sees.ALL, scale=scale)
        for rows, piece in zip(packed.unbind(), pieces, strict=True)
    ]
    outputs, lses = map(torch.cat, zip(*results, strict=True))
    # The kernel's log-sum-exp has strides of its own: reshape, never view.
    output, lse = outputs.reshape(by_heads.shape), lses.reshape(by_heads.shape[:3])
    if sees is Sees.FROM_ITS_OWN:
        output, lse = output.flip(2), lse.flip(2)
    return _Partial(output.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1))


def _heads_for(queries: Tensor, keys: Tensor, sees: Sees) -> int:
    """As how many heads queries `[pieces, heads, rows, head_size]` are presented."""
    _, query_heads, num_rows, _ = queries.shape
    if sees is not Sees.ALL:
        return query_heads
    kv_heads = keys.shape[1]
    if queries.is_cuda:
        return kv_heads
    return _packed_heads(num_rows, query_heads, kv_heads, torch.get_num_threads())


@cache
def _packed_heads(num_rows: int, query_heads: int, kv_heads: int, threads: int) -> int:
    """As how many heads an unmasked call on the CPU best presents its queries.

    Without a mask no row differs from another, so query heads that share a KV head can be passed
    as more rows of fewer heads. The kernel goes through K and V once per head and block of rows,
    and each such pass is work for one thread: we want the fewest that leave no thread idle.
    """

    def cost(heads: int) -> tuple[int, int, int]:
        rows = query_heads // heads * num_rows
        passes = heads * math.ceil(rows / (256 if rows >= 768 else 64 if rows >= 192 else 32))
        idle_threads = max(threads - passes, 0)
        return idle_threads, passes, -heads

    ways = range(kv_heads, query_heads + 1, kv_heads)
    return min((heads for heads in ways if query_heads % heads == 0), key=cost)


def _merge(merged: _Partial, partial: _Partial, rows: slice | Tensor) -> _Partial:
    """Weigh what these rows have and what is new by their shares of the rows' exponentials."""
    output, lse = merged.output.to(merged.lse.dtype), merged.lse  # float32, or float64 for float64
    share = (partial.lse - lse[rows]).sigmoid_().unsqueeze(-1)
    output[rows] = output[rows].lerp(partial.output.to(lse.dtype), share)
    lse[rows] = lse[rows].logaddexp(partial.lse)
    return _Partial(output, lse)


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The fused kernel, all `[1, heads, tokens, head_size]` → output, log-sum-exp."""
    if keys.shape[2] == 0:  # the kernel would divide by zero and kill the process
        raise ValueError("the kernel was given no keys")
    assert not is_causal or query.shape[2] == keys.shape[2], "causal pieces are square"
    if query.is_cuda:
        return attention_cuda.attend_run(query, keys, values, is_causal, scale)
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = kernel(query, keys, values, 0.0, is_causal, scale=scale)
    return output, lse


@cache
def _check_kernel(dtype: torch.dtype, device: torch.device) -> None:
    """Compare the kernel, which is private to torch, with the textbook; once for each dtype."""
    # Two query heads on one KV head, token-major as in an arena; no random numbers are drawn.
    numbers = torch.arange(192, dtype=torch.float64, device=device).sin()
    query, keys, values = numbers.reshape(3, 4, 2, 8)
    packed, *part = (t.to(dtype).transpose(0, 1)[None] for t in (query, keys[:, :1], values[:, :1]))
    try:
        plain, causal = (_flash(packed, *part, is_causal=c, scale=None) for c in (False, True))
    except (AttributeError, RuntimeError, TypeError) as error:
        reason = f"torch {torch.__version__} has no usable flash attention on {device} in {dtype}"
        raise RuntimeError(reason) from error
    scores = torch.einsum("qhd,kd->hqk", query, keys[:, 0]) * 8**-0.5
    seen = scores + torch.full_like(scores[0], -torch.inf).triu(1)
    tolerance = 1e-4 if dtype.itemsize > 2 else 3e-2
    for (output, lse), exact in ((plain, scores), (causal, seen)):
        wanted = torch.cat([exact.softmax(-1) @ values[:, 0], exact.logsumexp(-1, True)], -1)
        got = torch.cat([output[0], lse[0].unsqueeze(-1)], -1).double()
        if not torch.allclose(got, wanted, rtol=0, atol=tolerance):
            raise RuntimeError(f"torch {torch.__version__}: flash attention is wrong in {dtype}")


def _check_length(num_queries: int, parts: Sequence[KeysValues]) -> None:
    num_tokens = sum(part.num_tokens for part in parts)
    if not 0 <= num_queries <= num_tokens:
        raise ValueError(f"{num_queries} queries, but the parts have {num_tokens} tokens")


def _checked_alike(parts: Sequence[KeysValues]) -> Tensor | None:
    """The keys of one part, like which all are; None where there is no part."""
    if not parts:
        return None
    first = parts[0].keys
    for keys in (part.keys for part in parts):
        if _but_tokens(keys) != _but_tokens(first):
            raise ValueError(f"keys {describe(keys)} do not fit keys {describe(first)}")
    return first


def _but_tokens(keys: Tensor) -> tuple[object, ...]:
    """All that the keys of a plan have in common."""
    return *keys.shape[:-3], *keys.shape[-2:], keys.dtype, keys.device


def _check_scale(scale: float | None) -> None:
    # The kernel multiplies its mask's -inf by the scale: less than this would come back as NaN.
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
