"""Attention on the pages of a GPU: over a block table in one call, or run by run.

Which kernels there are depends on torch, on what else is installed and on the GPU. So they are
tried rather than looked up by version: the first that serves the shape is used for it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvd_infer.cuts import KeysValues

# Query `[1, heads, rows, head_size]`, keys and values likewise, causal or not, scale; gives the
# output and the log-sum-exp, to base e, `[1, heads, rows]`.
Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool, float | None], tuple[Tensor, Tensor]]

MIN_PAGE_TOKENS = 16
MAX_PAGE_TOKENS = 256
# What FlashInfer wants for its own use.
WORKSPACE_BYTES = 128 << 20
TOLERANCE = 3e-2


# --- run by run ---


def attend_run(
    query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """A `Kernel`: the first that serves this dtype and head size."""
    kernel = _kernel_for(query.dtype, query.device, query.shape[-1])
    return kernel(query, keys, values, is_causal, scale)


@cache
def _kernel_for(dtype: torch.dtype, device: torch.device, head_size: int) -> Kernel:
    query = torch.zeros(1, 2, 4, head_size, dtype=dtype, device=device)
    for kernel in (_flash, _flashinfer, _efficient):
        try:
            kernel(query, query[:, :1], query[:, :1], True, None)
        except (AttributeError, ImportError, RuntimeError, TypeError, ValueError):
            continue
        return kernel
    return _plain


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention
    output, lse, *_ = kernel(query, keys, values, 0.0, is_causal, scale=scale)
    return output, lse


def _flashinfer(
    query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    flashinfer: Any = importlib.import_module("flashinfer")
    output, lse = flashinfer.single_prefill_with_kv_cache(
        query[0].transpose(0, 1).contiguous(),
        keys[0].transpose(0, 1),
        values[0].transpose(0, 1),
        causal=is_causal,
        sm_scale=scale,
        return_lse=True,
    )
    # Its logarithms are to base 2.
    return output.transpose(0, 1)[None], lse.transpose(0, 1)[None] * math.log(2)


def _efficient(
    query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    keys, values = _repeated(query, keys, values)
    kernel: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    output, lse, *_ = kernel(query, keys, values, None, True, 0.0, is_causal, scale=scale)
    return output, lse[:, :, : query.shape[2]]  # it is padded


def _plain(
    query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The textbook, for what has no kernel."""
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = _repeated(query, keys.to(wide), values.to(wide))
    scores = query.to(wide) @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ values).to(query.dtype), scores.logsumexp(-1)


def _repeated(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each of the query's."""
    group = query.shape[1] // keys.shape[1]
    if group == 1:
        return keys, values
    return keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)


# --- over a block table ---


class Table(NamedTuple):
    """Sequences as pages of one memory.

    `keys` and `values` are `[pages, page_tokens, kv_heads, head_size]`, views of all pages;
    `pages` has those of each sequence, which hold its `num_tokens`.
    """

    keys: Tensor
    values: Tensor
    pages: list[list[int]]
    num_tokens: list[int]

    @property
    def page_tokens(self) -> int:
        return self.keys.shape[1]


# Query `[rows, heads, head_size]`, how many rows each sequence has, and its pages.
PagedKernel: TypeAlias = Callable[[Tensor, Sequence[int], Table, float | None], Tensor]


def attend_pages(
    query: Tensor,
    lengths: Sequence[int],
    sequences: Sequence[Sequence[KeysValues]],
    scale: float | None,
) -> Tensor | None:
    """Causal attention of a ragged batch in one call; None where it must go run by run."""
    if min(lengths, default=0) == 0 or (table := table_of(sequences)) is None:
        return None
    kernel = _paged_kernel_for(
        query.dtype, query.device, query.shape[1], *table.keys.shape[2:], table.page_tokens
    )
    return None if kernel is None else kernel(query, lengths, table, scale)


def table_of(sequences: Sequence[Sequence[KeysValues]]) -> Table | None:
    """The parts as pages, as large as can be; None where they do not lie so."""
    filled = [[part for part in parts if part.num_tokens] for parts in sequences]
    parts = [part for its_parts in filled for part in its_parts]
    if not parts or not all(_lies_like(parts[0], part) for part in parts):
        return None
    keys, values, stride = parts[0].keys, parts[0].values, parts[0].keys.stride(0)
    apart = int(values.storage_offset() - keys.storage_offset())
    base = int(min(part.keys.storage_offset() for part in parts))
    # In tokens, from the first of all: of a sequence, only the last part may end within a page.
    starts = [(part.keys.storage_offset() - base) / stride for part in parts]
    if not all(start.is_integer() for start in starts):
        return None
    common = math.gcd(
        *map(int, starts), *(part.num_tokens for parts in filled for part in parts[:-1])
    )
    page_tokens = min(common & -common or MAX_PAGE_TOKENS, MAX_PAGE_TOKENS)
    end = int(max(start + part.num_tokens for start, part in zip(starts, parts, strict=True)))
    while -(-end // page_tokens) * page_tokens > _num_tokens(keys, base + max(apart, 0)):
        page_tokens //= 2  # the last page would end behind the memory
    if page_tokens < MIN_PAGE_TOKENS:
        return None

    def pages_of(part: KeysValues) -> range:
        first = int(part.keys.storage_offset() - base) // stride // page_tokens
        return range(first, first - (-part.num_tokens // page_tokens))

    shape = -(-end // page_tokens), page_tokens, *keys.shape[1:]
    strides = page_tokens * stride, *keys.stride()
    return Table(
        keys.as_strided(shape, strides, base),
        values.as_strided(shape, strides, base + apart),
        [[page for part in parts for page in pages_of(part)] for parts in filled],
        [sum(part.num_tokens for part in parts) for parts in filled],
    )


def _num_tokens(tensor: Tensor, offset: int) -> int:
    """How many rows like the tensor's there are in its memory from an offset on."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize - offset
    row = sum((n - 1) * step for n, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    return (size - row - 1) // tensor.stride(0) + 1


def _lies_like(first: KeysValues, part: KeysValues) -> bool:
    """Whether a part lies in the same memory, its values as far from its keys."""
    memory = first.keys.untyped_storage().data_ptr()
    tensors = part.keys, part.values
    apart = part.values.storage_offset() - part.keys.storage_offset()
    return (
        all(tensor.untyped_storage().data_ptr() == memory for tensor in tensors)
        and all(tensor.stride() == first.keys.stride() for tensor in tensors)
        and apart == first.values.storage_offset() - first.keys.storage_offset()
        and first.keys.stride(0) > 0
    )


@cache
def _paged_kernel_for(
    dtype: torch.dtype,
    device: torch.device,
    query_heads: int,
    kv_heads: int,
    head_size: int,
    page_tokens: int,
) -> PagedKernel | None:
    """The first that answers a small question of this shape rightly."""
    numbers = torch.arange(8 * page_tokens * kv_heads * head_size, device=device).double().sin()
    keys, values = numbers.reshape(2, 4, page_tokens, kv_heads, head_size).to(dtype)
    table = Table(keys, values, [[2, 0], [3]], [page_tokens + 1, 5])
    rows = numbers.repeat(query_heads)[: 4 * query_heads * head_size]
    query = rows.reshape(4, query_heads, head_size).to(dtype)
    wanted = _by_the_book(query, [1, 3], table)
    for kernel in (_varlen, _flashinfer_paged):
        try:
            got = kernel(query, [1, 3], table, None)
        except (AttributeError, ImportError, RuntimeError, TypeError, ValueError):
            continue
        if torch.allclose(got.double(), wanted, rtol=0, atol=TOLERANCE):
            return kernel
    return None


def _by_the_book(query: Tensor, lengths: Sequence[int], table: Table) -> Tensor:
    """Causal attention of each sequence in float64, row by row."""
    output = []
    batch = zip(query.double().split(list(lengths)), table.pages, table.num_tokens, strict=True)
    for rows, pages, num_tokens in batch:
        for row, stop in enumerate(range(num_tokens - len(rows) + 1, num_tokens + 1)):
            keys, values = (
                memory[pages].flatten(0, 1)[:stop].transpose(0, 1)[None].double()
                for memory in (table.keys, table.values)
            )
            attended, _ = _plain(rows[row, :, None][None], keys, values, False, None)
            output.append(attended[0, :, 0])
    return torch.stack(output)


def _varlen(query: Tensor, lengths: Sequence[int], table: Table, scale: float | None) -> Tensor:
    """Torch's own, which takes block tables where it runs on FlashAttention 3."""
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    longest = max(map(len, table.pages))
    padded = [pages + [0] * (longest - len(pages)) for pages in table.pages]
    output: Tensor = varlen.varlen_attn(
        query,
        table.keys,
        table.values,
        _ints([0, *accumulate(lengths)], query.device),
        None,
        max(lengths),
        max(table.num_tokens),
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=_ints(table.num_tokens, query.device),
        block_table=_ints(padded, query.device),
    )
    return output


def _flashinfer_paged(
    query: Tensor, lengths: Sequence[int], table: Table, scale: float | None
) -> Tensor:
    flashinfer: Any = importlib.import_module("flashinfer")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(query.device), "NHD")
    device, size = query.device, table.page_tokens
    wrapper.plan(
        _ints([0, *accumulate(lengths)], device),
        _ints([0, *accumulate(map(len, table.pages))], device),
        _ints([page for pages in table.pages for page in pages], device),
        _ints([(count - 1) % size + 1 for count in table.num_tokens], device),
        query.shape[1],
        table.keys.shape[2],
        query.shape[2],
        size,
        causal=True,
        sm_scale=scale,
        q_data_type=query.dtype,
        kv_data_type=query.dtype,
    )
    output: Tensor = wrapper.run(query.contiguous(), (table.keys, table.values))
    return output


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _ints(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
