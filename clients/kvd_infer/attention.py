"""Paged attention over leased runs of pages, where they lie.

A sequence's keys and values lie in runs of consecutive pages (PagedAttention, Kwon 2023). In one
layer a run is one strided tensor, so the fused CPU kernel (FlashAttention, Dao 2022) reads it in
place: one call a run. The kernel also returns the log-sum-exp of each row's scores, and with it
results over disjoint keys merge exactly (online softmax, Milakov & Gimelshein 2018; FlashInfer
calls it cascade). Nothing is gathered or masked: causality comes from how we cut. So do sliding
windows, and only where one leaves keys behind are these copied, in the opposite order.

Pages of a GPU are attended where they lie too, by the kernels that `attention_cuda` finds there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvd_infer import attention_cuda

# How many keys at the lower edge of a window are cut at a time: they are copied.
TILE_TOKENS = 256

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class KeysValues:
    """The keys and values of consecutive positions, usually views of one run.

    Both are `[layers, tokens, kv_heads, head_size]`, or without the layers where there is one, in
    one dtype (float32, bfloat16, float16, float64), on the CPU or on a GPU; any strides do, except
    that the last must be 1. Zero tokens are allowed. The memory is the caller's: it is read by
    each call of attention, never kept.

    Raises ValueError where that does not hold; the kernel itself would answer wrong numbers.
    """

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        keys, values = self.keys, self.values
        if keys.shape != values.shape or keys.dtype != values.dtype:
            raise ValueError(f"keys are {_describe(keys)}, but values {_describe(values)}")
        _check_tensor("keys", keys, (3, 4))
        _check_tensor("values", values, (3, 4))

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[-3]

    def slice(self, first: int, end: int) -> KeysValues:
        """Tokens first to end (excluded) of these, as views."""
        if first == 0 and end == self.num_tokens:
            return self
        return KeysValues(self.keys[..., first:end, :, :], self.values[..., first:end, :, :])

    def layer(self, number: int) -> KeysValues:
        """One layer alone, as views."""
        return self if self.keys.ndim == 3 else KeysValues(self.keys[number], self.values[number])


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
        self._waves = _waves(lengths, sequences, window)

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
        _check_tensor("query", query, (3,))
        if query.shape[0] != sum(self._lengths):
            raise ValueError(
                f"lengths {self._lengths} do not add up to {query.shape[0]} query rows"
            )
        if (keys := self._like) is None:
            return
        *_, kv_heads, head_size = keys.shape
        is_like = (query.dtype, query.device) == (keys.dtype, keys.device)
        if not is_like or query.shape[1] % kv_heads or query.shape[2] != head_size:
            raise ValueError(f"query {_describe(query)} does not fit keys {_describe(keys)}")


class _Sees(Enum):
    """Which keys of a piece a row sees; where not all, there are as many as rows.

    The kernel knows the first two. With rows and keys in the opposite order, the third is the
    second.
    """

    ALL = auto()
    UP_TO_ITS_OWN = auto()
    FROM_ITS_OWN = auto()


class _Piece(NamedTuple):
    """One call of the kernel for each layer: these rows of the batch over these keys.

    Keys and values are as the kernel wants them, for each layer `[1, kv_heads, tokens, head_size]`.
    """

    rows: range
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    sees: _Sees

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, in the opposite order where the kernel needs it."""
        keys, values = self.keys[layer], self.values[layer]
        if self.sees is _Sees.FROM_ITS_OWN:
            return keys.flip(2), values.flip(2)
        return keys, values


class _Group(NamedTuple):
    """Pieces of one kind and of equally many rows, which are `rows`, one piece behind the other."""

    pieces: list[_Piece]
    rows: slice | Tensor


class _Wave(NamedTuple):
    """Groups that have no row in common, in the order of their rows, which are `rows`."""

    groups: list[_Group]
    rows: slice | Tensor


class _Partial(NamedTuple):
    """What rows have from some of their keys.

    The output is `[rows, heads, head_size]`, the log-sum-exp `[rows, heads]`.
    """

    output: Tensor
    lse: Tensor


def _waves(
    lengths: Sequence[int], sequences: Sequence[Sequence[KeysValues]], window: int | None
) -> list[_Wave]:
    """Cut a batch into as many waves as its rows have pieces; the first has all rows."""
    waves: defaultdict[int, list[_Piece]] = defaultdict(list)
    start = 0
    for num_queries, parts in zip(lengths, sequences, strict=True):
        for number, piece in _cut(start, num_queries, parts, window):
            waves[number].append(piece)
        start += num_queries
    return [_wave(pieces) for _, pieces in sorted(waves.items())]


def _wave(pieces: list[_Piece]) -> _Wave:
    pieces.sort(key=lambda piece: piece.rows.start)
    alike = groupby(pieces, key=lambda piece: (piece.sees, len(piece.rows)))
    groups = [list(group) for _, group in alike]
    return _Wave([_Group(group, _rows_of(group)) for group in groups], _rows_of(pieces))


def _rows_of(pieces: list[_Piece]) -> slice | Tensor:
    rows = [row for piece in pieces for row in piece.rows]
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=pieces[0].keys[0].device)


def _cut(
    start: int, num_queries: int, parts: Sequence[KeysValues], window: int | None
) -> Iterator[tuple[int, _Piece]]:
    """Cut what a sequence sees into rectangles and triangles, each with the number of its wave.

    keys:             prefix      part A      part B
    queries in A      rectangle   square
    queries in B      rectangle   rectangle   square

    Of a square each row sees the keys up to its own. Where a window leaves keys behind, within the
    queries' reach, they are cut into tiles, and below a tile's rectangle is a square again:

    keys:               tile
    queries up to       rectangle    they see all of it
    the next            square       one key less with each row

    No row of a piece sees no key: its log-sum-exp would come back wrong. Squares on the diagonal
    have every row once and are the first wave.
    """
    num_tokens = sum(part.num_tokens for part in parts)
    reach = num_tokens if window is None else min(window, num_tokens)

    def piece(part: KeysValues, rows: range, sees: _Sees) -> _Piece:
        rows = range(start + rows.start, start + rows.stop)
        return _Piece(rows, _as_heads(part.keys), _as_heads(part.values), sees)

    # Positions are counted from the first query. From the last part backwards: waves are counted
    # from the diagonal.
    backwards = reversed(_slices(num_queries, parts, reach))
    for number, (part, first, end) in enumerate(backwards):
        # A lone query sees every key, its own too: decoding needs no square.
        is_own = num_queries > 1 and first >= 0
        if is_own:
            yield 0, piece(part, range(first, end), _Sees.UP_TO_ITS_OWN)
        if seeing_all := range(end if is_own else 0, min(first + reach, num_queries)):
            yield number, piece(part, seeing_all, _Sees.ALL)
        if leaving := range(first + reach, min(end - 1 + reach, num_queries)):
            rest = part.slice(1, part.num_tokens)
            yield number, piece(rest, leaving, _Sees.FROM_ITS_OWN)


def _slices(
    num_queries: int, parts: Sequence[KeysValues], reach: int
) -> list[tuple[KeysValues, int, int]]:
    """The parts, cut where another query begins to see or to leave keys, with their positions."""
    if num_queries == 0:
        return []
    seen, kept = 1 - reach, num_queries - reach  # by any query, by all to the last
    tiles = range(seen, kept, min(reach, TILE_TOKENS))
    edges = {*tiles, kept, 0} if num_queries > 1 else {seen}
    slices = []
    end = num_queries - sum(part.num_tokens for part in parts)
    for part in parts:
        begin, end = end, end + part.num_tokens
        inner = {edge for edge in edges if begin < edge < end}
        for first, stop in pairwise(sorted({begin, end} | inner)):
            if first >= seen:
                slices.append((part.slice(first - begin, stop - begin), first, stop))
    return slices


def _as_heads(tensor: Tensor) -> Sequence[Tensor]:
    layers = tensor if tensor.ndim == 4 else tensor[None]
    return layers.transpose(1, 2).unsqueeze(1).unbind()


def _attend_wave(query: Tensor, wave: _Wave, layer: int, scale: float | None) -> _Partial:
    partials = [_attend_group(query[group.rows], group, layer, scale) for group in wave.groups]
    if len(partials) == 1:
        return partials[0]
    outputs, lses = zip(*partials, strict=True)
    return _Partial(torch.cat(outputs), torch.cat(lses))


def _attend_group(query: Tensor, group: _Group, layer: int, scale: float | None) -> _Partial:
    """Attention of a group's rows, `[rows, heads, head_size]`; its pieces are reshaped together."""
    pieces, sees = group.pieces, group.pieces[0].sees
    by_heads = query.unflatten(0, (len(pieces), -1)).transpose(1, 2)
    if sees is _Sees.FROM_ITS_OWN:
        by_heads = by_heads.flip(2)
    heads = _heads_for(by_heads, pieces[0].keys[layer], sees)
    packed = by_heads.reshape(len(pieces), 1, heads, -1, query.shape[2])
    results = [
        _flash(rows, *piece.of(layer), is_causal=sees is not _Sees.ALL, scale=scale)
        for rows, piece in zip(packed, pieces, strict=True)
    ]
    outputs, lses = map(torch.cat, zip(*results, strict=True))
    # The kernel's log-sum-exp has strides of its own: reshape, never view.
    output, lse = outputs.reshape(by_heads.shape), lses.reshape(by_heads.shape[:3])
    if sees is _Sees.FROM_ITS_OWN:
        output, lse = output.flip(2), lse.flip(2)
    return _Partial(output.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1))


def _heads_for(queries: Tensor, keys: Tensor, sees: _Sees) -> int:
    """As how many heads queries `[pieces, heads, rows, head_size]` are presented."""
    _, query_heads, num_rows, _ = queries.shape
    if sees is not _Sees.ALL:
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
            raise ValueError(f"keys {_describe(keys)} do not fit keys {_describe(first)}")
    return first


def _but_tokens(keys: Tensor) -> tuple[object, ...]:
    """All that the keys of a plan have in common."""
    return *keys.shape[:-3], *keys.shape[-2:], keys.dtype, keys.device


def _check_scale(scale: float | None) -> None:
    # The kernel multiplies its mask's -inf by the scale: less than this would come back as NaN.
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")


def _check_tensor(name: str, tensor: Tensor, dimensions: tuple[int, ...]) -> None:
    is_whole = tensor.ndim in dimensions and 0 not in tensor.shape[-2:]
    is_shaped = is_whole and tensor.stride(-1) == 1
    is_known = tensor.dtype in _DTYPES and tensor.device.type in ("cpu", "cuda")
    if not is_shaped or not is_known:
        wanted = "floats [tokens, heads, head_size] on CPU or GPU with a last stride of 1"
        raise ValueError(f"{name} must be {wanted}, got {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    shape, strides = list(tensor.shape), list(tensor.stride())
    return f"{tensor.dtype} {shape} with strides {strides} on {tensor.device}"
