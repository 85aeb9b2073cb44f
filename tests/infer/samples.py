"""Sequences in runs of an arena and in one piece, and what a textbook says of attention to them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvd_infer.attention import KeysValues

BLOCK_SIZE = 16
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
HEADS = pytest.mark.parametrize(
    ("query_heads", "kv_heads"), [(2, 2), (6, 2), (8, 1), (16, 2), (1, 1)]
)


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence twice: its query and contiguous keys and values, and its parts in an arena."""

    arena: Tensor  # [2, pages, BLOCK_SIZE, kv_heads, head_size]
    query: Tensor
    parts: tuple[KeysValues, ...]

    @property
    def keys(self) -> Tensor:
        return torch.cat([part.keys for part in self.parts])

    @property
    def values(self) -> Tensor:
        return torch.cat([part.values for part in self.parts])


def sample(
    num_queries: int,
    num_tokens: int,
    *,
    query_heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 16,
    dtype: torch.dtype = torch.float32,
    pages_per_run: int = 2,
) -> Sample:
    """Runs in shuffled order within one arena, with pages of others before, between and behind."""
    num_runs = -(-num_tokens // (BLOCK_SIZE * pages_per_run))
    stride = pages_per_run + 1
    num_pages = num_runs * stride + 1
    arena = torch.randn(2, num_pages, BLOCK_SIZE, kv_heads, head_size).to(dtype)
    order = random.Random(0).sample(range(num_runs), num_runs)
    parts = []
    for index, place in enumerate(order):
        first = place * stride + 1
        run = arena[:, first : first + pages_per_run].flatten(1, 2)
        left = num_tokens - index * BLOCK_SIZE * pages_per_run
        parts.append(KeysValues(run[0, :left], run[1, :left]))
    query = torch.randn(num_queries, query_heads, head_size).to(dtype)
    return Sample(arena, query, tuple(parts))


def lower_right(num_queries: int, num_tokens: int, window: int | None = None) -> Tensor:
    seen = torch.ones(num_queries, num_tokens, dtype=torch.bool).tril(num_tokens - num_queries)
    return seen if window is None else seen.triu(num_tokens - num_queries - window + 1)


def textbook(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V in float64, KV heads repeated."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys)
    scores = scores * (query.shape[2] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~lower_right(len(query), len(keys), window), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[actual.dtype]
    return torch.allclose(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)
