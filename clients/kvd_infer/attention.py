"""Paged attention over leased runs of pages, where they lie.

A sequence's keys and values lie in runs of consecutive pages (PagedAttention, Kwon 2023). In one
layer a run is one strided tensor, so the fused CPU kernel (FlashAttention, Dao 2022) reads it in
place: one call a run. The kernel also returns the log-sum-exp of each row's scores, and with it
results over disjoint keys merge exactly (online softmax, Milakov & Gimelshein 2018; FlashInfer
calls it cascade). Nothing is gathered, copied or masked: causality comes from how we cut.

Pages of a GPU are attended where they lie too, by the kernels that `attention_cuda` finds there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvd_infer import attention_cuda

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class KeysValues:
    """The keys and values of consecutive positions in one layer, usually views of one run.

    Both are `[tokens, kv_heads, head_size]` in one dtype (float32, bfloat16, float16, float64),
    on the CPU or on a GPU; any strides do, except that the last must be 1. Zero tokens are
    allowed. The memory is the caller's: it is read by each call of attention, never copied or
    kept.

    Raises ValueError where that does not hold; the kernel itself would answer wrong numbers.
    """

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        keys, values = self.keys, self.values
        if keys.shape != values.shape or keys.dtype != values.dtype:
            raise ValueError(f"keys are {_describe(keys)}, but values {_describe(values)}")
        _check_tensor("keys", keys)
        _check_tensor("values", values)

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[0]

    def slice(self, first: int, end: int) -> KeysValues:
        """Tokens first to end (excluded) of these, as views."""
        if first == 0 and end == self.num_tokens:
            return self
        return KeysValues(self.keys[first:end], self.values[first:end])


@torch.no_grad()
def paged_attention(
    query: Tensor,
    lengths: Sequence[int],
    sequences: Sequence[Sequence[KeysValues]],
    *,
    scale: float | None = None,
) -> Tensor:
    """Causal attention for a ragged batch: prefills and decodes of several sequences together.

    `query` is `[sum(lengths), query_heads, head_size]`: the last `lengths[i]` positions of
    sequence i, one sequence behind the other; `sequences[i]` are its parts as for `attend`.
    Returns a new tensor like `query`. Raises ValueError as `attend` does, and where the numbers
    of sequences or rows disagree.
    """
    if len(lengths) != len(sequences):
        raise ValueError(f"got {len(lengths)} lengths for {len(sequences)} sequences")
    if min(lengths, default=0) < 0 or sum(lengths) != query.shape[0]:
        raise ValueError(f"lengths {list(lengths)} do not add up to {query.shape[0]} query rows")
    rows = list(lengths)
    if query.is_cuda:
        for its_query, parts in zip(query.split(rows), sequences, strict=True):
            _check_query(its_query, parts)
        _check_scale(scale)
        if (together := attention_cuda.attend_pages(query, rows, sequences, scale)) is not None:
            return together
    output = torch.empty_like(query)
    batch = zip(output.split(rows), query.split(rows), sequences, strict=True)
    for its_output, its_query, parts in batch:
        its_output.copy_(attend(its_query, parts, scale=scale))
    return output


@torch.no_grad()
def attend(query: Tensor, parts: Sequence[KeysValues], *, scale: float | None = None) -> Tensor:
    """Causal attention of the last positions of one sequence over all its positions.

    `query` is `[num_queries, query_heads, head_size]`, its dtype that of the parts; `query_heads`
    is a multiple of `kv_heads` (MHA, GQA, MQA). `parts`, in order, cover positions 0 to n - 1;
    the queries are positions n - num_queries to n - 1, each of which sees all up to itself.
    `scale`, positive, is 1 / sqrt(head_size) where None. Returns the output in the shape and
    dtype of `query`, not necessarily contiguous, without autograd. Results of several parts are
    merged in float32 (float64 for float64).

    Raises ValueError where shapes, dtypes, devices or strides do not fit, or where the parts have
    fewer tokens than there are queries (such a query would see no key); RuntimeError where this
    torch's kernel is missing or answers wrongly.
    """
    _check_query(query, parts)
    _check_scale(scale)
    _check_kernel(query.dtype, query.device)
    if query.shape[0] == 0:
        return torch.empty_like(query)
    if query.is_cuda:
        together = attention_cuda.attend_pages(query, [query.shape[0]], [parts], scale)
        if together is not None:
            return together
    partials = [_attend_piece(query, piece, scale) for piece in _cut(query.shape[0], parts)]
    return partials[0].output if len(partials) == 1 else _merge(query, partials)


class _Piece(NamedTuple):
    """One call of the kernel: these rows of the query over this part."""

    part: KeysValues
    rows: slice
    is_causal: bool


class _Partial(NamedTuple):
    """A piece's result: output `[rows, heads, head_size]`, log-sum-exp `[rows, heads]`."""

    rows: slice
    output: Tensor
    lse: Tensor


def _cut(num_queries: int, parts: Sequence[KeysValues]) -> Iterator[_Piece]:
    """Cut the causal triangle into unmasked rectangles and causal squares, part by part.

    keys:             prefix      part A      part B
    queries in A      rectangle   square
    queries in B      rectangle   rectangle   square

    The kernel's causal mask is right for squares only, and a row that sees no key would come back
    with a wrong log-sum-exp; no piece has either.
    """
    # A lone query sees every key, so all are prefix: decoding needs no square.
    num_masked = num_queries if num_queries > 1 else 0
    end = num_masked - sum(part.num_tokens for part in parts)  # counted from the first query
    for part in parts:
        first, end = end, end + part.num_tokens
        split = min(max(-first, 0), part.num_tokens)
        if split > 0:
            yield _Piece(part.slice(0, split), slice(0, num_queries), is_causal=False)
        if split < part.num_tokens:
            rest = part.slice(split, part.num_tokens)
            yield _Piece(rest, slice(first + split, end), is_causal=True)
            if end < num_queries:
                yield _Piece(rest, slice(end, num_queries), is_causal=False)


def _attend_piece(query: Tensor, piece: _Piece, scale: float | None) -> _Partial:
    rows = query[piece.rows].transpose(0, 1)
    query_heads, num_rows, head_size = rows.shape
    heads = query_heads
    if not piece.is_causal:
        kv_heads = piece.part.keys.shape[1]
        heads = kv_heads if query.is_cuda else _packed_heads(num_rows, query_heads, kv_heads)
    packed = rows.reshape(1, heads, -1, head_size)
    output, lse = _flash(packed, piece.part, is_causal=piece.is_causal, scale=scale)
    output = output.reshape(query_heads, num_rows, head_size).transpose(0, 1)
    # The kernel's log-sum-exp has strides of its own: reshape, never view.
    return _Partial(piece.rows, output, lse.reshape(query_heads, num_rows).transpose(0, 1))


def _packed_heads(num_rows: int, query_heads: int, kv_heads: int) -> int:
    """As how many heads an unmasked call on the CPU best presents its queries.

    Without a mask no row differs from another, so query heads that share a KV head can be passed
    as more rows of fewer heads. The kernel goes through K and V once per head and block of rows,
    and each such pass is work for one thread: we want the fewest that leave no thread idle.
    """

    def cost(heads: int) -> tuple[int, int, int]:
        rows = query_heads // heads * num_rows
        passes = heads * math.ceil(rows / (256 if rows >= 768 else 64 if rows >= 192 else 32))
        idle_threads = max(torch.get_num_threads() - passes, 0)
        return idle_threads, passes, -heads

    ways = range(kv_heads, query_heads + 1, kv_heads)
    return min((heads for heads in ways if query_heads % heads == 0), key=cost)


def _merge(query: Tensor, partials: Sequence[_Partial]) -> Tensor:
    """Weigh each partial by its share of a row's exponentials: a softmax over the partials."""
    dtype = partials[0].lse.dtype  # float32, or float64 for float64
    lse = torch.full(
        (len(partials), *query.shape[:2]), -torch.inf, dtype=dtype, device=query.device
    )
    for index, partial in enumerate(partials):
        lse[index, partial.rows] = partial.lse
    shares = lse.softmax(dim=0).unsqueeze(-1)
    output = torch.zeros(query.shape, dtype=dtype, device=query.device)
    for index, partial in enumerate(partials):
        output[partial.rows].add_(shares[index, partial.rows] * partial.output)
    return output.to(query.dtype)


def _flash(
    query: Tensor, part: KeysValues, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The fused kernel: query `[1, heads, rows, head_size]` → output, log-sum-exp."""
    if part.num_tokens == 0:  # the kernel would divide by zero and kill the process
        raise ValueError("the kernel was given no keys")
    assert not is_causal or query.shape[2] == part.num_tokens, "causal pieces are square"
    keys, values = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (part.keys, part.values))
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
    part = KeysValues(keys[:, :1].to(dtype), values[:, :1].to(dtype))
    packed = query.to(dtype).transpose(0, 1).unsqueeze(0)
    try:
        plain, causal = (_flash(packed, part, is_causal=c, scale=None) for c in (False, True))
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


def _check_query(query: Tensor, parts: Sequence[KeysValues]) -> None:
    _check_tensor("query", query)
    num_queries, query_heads, head_size = query.shape
    kv_heads = parts[0].keys.shape[1] if parts else 1
    for keys in (part.keys for part in parts):
        fits = keys.shape[1:] == (kv_heads, head_size) and query_heads % kv_heads == 0
        if not fits or keys.dtype != query.dtype or keys.device != query.device:
            raise ValueError(f"query {_describe(query)} does not fit keys {_describe(keys)}")
    num_tokens = sum(part.num_tokens for part in parts)
    if num_tokens < num_queries:
        raise ValueError(f"{num_queries} queries, but the parts have {num_tokens} tokens")


def _check_scale(scale: float | None) -> None:
    # The kernel multiplies its mask's -inf by the scale: less than this would come back as NaN.
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")


def _check_tensor(name: str, tensor: Tensor) -> None:
    is_shaped = tensor.ndim == 3 and 0 not in tensor.shape[1:] and tensor.stride(-1) == 1
    is_known = tensor.dtype in _DTYPES and tensor.device.type in ("cpu", "cuda")
    if not is_shaped or not is_known:
        wanted = "floats [tokens, heads, head_size] on CPU or GPU with a last stride of 1"
        raise ValueError(f"{name} must be {wanted}, got {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    shape, strides = list(tensor.shape), list(tensor.stride())
    return f"{tensor.dtype} {shape} with strides {strides} on {tensor.device}"
