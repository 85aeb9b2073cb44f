"""Attention on the pages of a GPU, against the textbook in float64."""

from __future__ import annotations

import pytest
import torch

from kvd_infer import attention_cuda
from kvd_infer.attention import KeysValues, attend, paged_attention
from tests.infer.samples import DTYPES, Sample, close, sample, textbook


def on_gpu(case: Sample) -> Sample:
    """The same sample, its parts views of the arena on the GPU."""
    arena = case.arena.cuda()

    def moved(part: KeysValues) -> KeysValues:
        keys, values = (
            arena.view(-1).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            for tensor in (part.keys, part.values)
        )
        return KeysValues(keys, values)

    return Sample(arena, case.query.cuda(), tuple(map(moved, case.parts)))


def check(case: Sample, window: int | None = None) -> None:
    expected = textbook(case.query, case.keys, case.values, window=window)
    moved = on_gpu(case)
    actual = attend(moved.query, moved.parts, window=window)
    assert actual.device == moved.query.device
    assert actual.dtype == case.query.dtype
    assert close(actual.cpu(), expected)


@DTYPES
@pytest.mark.parametrize("num_queries", [1, 5, 100], ids=["decode", "suffix", "cold"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_every_dtype_agrees_with_the_textbook(
    dtype: torch.dtype, num_queries: int, head_size: int
) -> None:
    check(sample(num_queries, 100, dtype=dtype, head_size=head_size))


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(2, 2), (6, 2), (8, 1), (32, 8)])
@pytest.mark.parametrize("num_queries", [1, 40])
def test_every_kind_of_head_agrees(query_heads: int, kv_heads: int, num_queries: int) -> None:
    heads = {"query_heads": query_heads, "kv_heads": kv_heads, "head_size": 64}
    check(sample(num_queries, 700, dtype=torch.bfloat16, pages_per_run=16, **heads))


@pytest.mark.parametrize("window", [1, 20, 300])
@pytest.mark.parametrize("num_queries", [1, 40, 700])
def test_windows_agree(window: int, num_queries: int) -> None:
    check(sample(num_queries, 700, head_size=64, pages_per_run=16), window)


def test_private_memory_behind_pages_agrees() -> None:
    """There is no table for it: run by run, and merged."""
    case = sample(9, 100, dtype=torch.bfloat16, head_size=64)
    moved = on_gpu(case)
    *parts, last = moved.parts
    private = KeysValues(last.keys.clone(), last.values.clone())
    actual = attend(moved.query, [*parts, private])
    assert close(actual.cpu(), textbook(case.query, case.keys, case.values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_ragged_batch_over_one_arena_agrees(dtype: torch.dtype) -> None:
    case = sample(33, 300, dtype=dtype, head_size=64, pages_per_run=4)
    moved = on_gpu(case)
    lengths, sizes = [33, 1, 7], [len(case.parts), 1, 3]
    query = torch.cat([moved.query[-length:] for length in lengths])
    actual = paged_attention(query, lengths, [moved.parts[:size] for size in sizes])
    for rows, size in zip(actual.split(lengths), sizes, strict=True):
        keys, values = (
            torch.cat([getattr(p, n) for p in case.parts[:size]]) for n in ("keys", "values")
        )
        assert close(rows.cpu(), textbook(case.query[-len(rows) :], keys, values))


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_the_scale_of_the_scores_can_be_given(scale: float) -> None:
    case = sample(5, 50, dtype=torch.float16, head_size=64)
    moved = on_gpu(case)
    expected = textbook(case.query, case.keys, case.values, scale)
    assert close(attend(moved.query, moved.parts, scale=scale).cpu(), expected)


def test_a_query_on_another_device_than_its_pages_is_refused() -> None:
    case = sample(1, 50)
    with pytest.raises(ValueError, match="does not fit"):
        attend(case.query, on_gpu(case).parts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_fused_kernel_serves(dtype: torch.dtype, gpu: torch.device) -> None:
    kernel = attention_cuda._kernel_for(dtype, gpu, 128)
    assert kernel is not attention_cuda._plain
    print(dtype, kernel.__name__)


@pytest.mark.parametrize("kernel", [attention_cuda._flash, attention_cuda._flashinfer])
def test_each_kernel_gives_the_logarithms_of_the_textbook(
    kernel: attention_cuda.Kernel,
) -> None:
    query, keys, values = torch.randn(3, 1, 4, 48, 64, device="cuda").half()
    try:
        output, lse = kernel(query, keys[:, :2], values[:, :2], True, None)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"not here: {error}")
    expected = attention_cuda._plain(query.double(), keys[:, :2], values[:, :2], True, None)
    assert torch.allclose(output.double(), expected[0], atol=5e-3)
    assert torch.allclose(lse.double(), expected[1].double(), atol=5e-3)


@pytest.mark.parametrize("kernel", [attention_cuda._varlen, attention_cuda._flashinfer_paged])
@pytest.mark.parametrize("page_tokens", [16, 256])
def test_each_paged_kernel_agrees_with_the_textbook_where_it_serves(
    kernel: attention_cuda.PagedKernel, page_tokens: int
) -> None:
    keys, values = torch.randn(2, 8, page_tokens, 2, 64, device="cuda").half()
    table = attention_cuda.Table(keys, values, [[5, 0, 3], [2]], [2 * page_tokens + 3, 9])
    query = torch.randn(12, 8, 64, device="cuda").half()
    try:
        output = kernel(query, [4, 8], table, None)
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"not here: {error}")
    expected = attention_cuda._by_the_book(query, [4, 8], table)
    assert torch.allclose(output.double(), expected, atol=5e-3)
