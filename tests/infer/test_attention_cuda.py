"""What of the attention on GPUs needs none: block tables, and the textbook. The rest: tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvd_infer.attention import KeysValues
from kvd_infer.attention_cuda import (
    Kernel,
    Table,
    _by_the_book,
    _efficient,
    _flash,
    _plain,
    _varlen,
    attend_pages,
    attend_run,
    table_of,
)
from tests.infer.samples import (
    BLOCK_SIZE,
    DTYPES,
    HEADS,
    Sample,
    close,
    lower_right,
    sample,
    textbook,
)


def gathered(memory: Tensor, table: Table) -> list[Tensor]:
    """Each sequence's rows, as its pages have them."""
    return [
        memory[pages].flatten(0, 1)[:count]
        for pages, count in zip(table.pages, table.num_tokens, strict=True)
    ]


def check_table(*cases: Sample) -> Table:
    table = table_of([case.parts for case in cases])
    assert table is not None
    for keys, values, case in zip(
        gathered(table.keys, table), gathered(table.values, table), cases, strict=True
    ):
        assert torch.equal(keys, case.keys)
        assert torch.equal(values, case.values)
    return table


# --- block tables ---


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100, 128])
def test_the_pages_of_a_table_hold_the_rows_of_its_parts(num_tokens: int) -> None:
    table = check_table(sample(1, num_tokens))
    assert table.keys.untyped_storage().data_ptr() == table.values.untyped_storage().data_ptr()


def test_pages_are_as_large_as_the_runs_allow() -> None:
    case = sample(1, 2048, pages_per_run=64)  # 64 pages of 65, so one block apart
    assert check_table(case).page_tokens == BLOCK_SIZE
    assert check_table(Sample(case.arena, case.query, case.parts[:1])).page_tokens == 256


def test_sequences_of_one_arena_share_a_table() -> None:
    case = sample(1, 100)
    prefix = Sample(case.arena, case.query, case.parts[:2])
    table = check_table(case, prefix)
    assert table.pages[1] == table.pages[0][: len(table.pages[1])]


def test_parts_without_tokens_have_no_pages() -> None:
    case = sample(1, 100)
    first = case.parts[0]
    table = table_of([[first.slice(0, 0), *case.parts, first.slice(3, 3)]])
    assert table is not None
    assert torch.equal(gathered(table.keys, table)[0], case.keys)


def test_private_memory_behind_pages_has_no_table() -> None:
    case = sample(1, 64)
    private = KeysValues(*torch.randn(2, 8, 2, 16))
    assert table_of([[*case.parts, private]]) is None


def test_rows_that_begin_within_a_page_have_no_table() -> None:
    first, second, *_ = sample(1, 100).parts
    assert table_of([[first, second.slice(3, 20)]]) is None
    assert table_of([[first.slice(0, 5), second]]) is None


def test_keys_and_values_that_lie_differently_have_no_table() -> None:
    first, second, *_ = sample(1, 100).parts
    assert table_of([[first, KeysValues(second.values, second.keys)]]) is None


def test_a_page_that_would_end_behind_the_memory_is_none() -> None:
    keys, values = torch.randn(2, 20, 2, 16)
    assert table_of([[KeysValues(keys, values)]]) is None


def test_nothing_has_no_table() -> None:
    assert table_of([]) is None
    assert table_of([[]]) is None


# --- kernels ---


@DTYPES
@HEADS
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_textbook_agrees_with_the_other(
    dtype: torch.dtype, query_heads: int, kv_heads: int, is_causal: bool
) -> None:
    case = sample(20, 20, query_heads=query_heads, kv_heads=kv_heads, dtype=dtype)
    query, keys, values = (t.transpose(0, 1)[None] for t in (case.query, case.keys, case.values))
    output, lse = _plain(query, keys, values, is_causal, None)
    scores = query.double() @ keys.double().repeat_interleave(query_heads // kv_heads, 1).mT / 4
    if is_causal:
        scores = scores.masked_fill(~lower_right(20, 20), -torch.inf)
        assert close(output[0].transpose(0, 1), textbook(case.query, case.keys, case.values))
    assert output.dtype == dtype
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-5)


def test_the_book_of_a_table_agrees_with_the_other() -> None:
    cases = sample(3, 50), sample(1, 7)
    table = check_table(cases[0])
    expected = textbook(cases[0].query, cases[0].keys, cases[0].values)
    assert close(_by_the_book(cases[0].query, [3], table), expected)


@pytest.mark.parametrize("kernel", [_flash, _efficient])
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_are_called_as_this_torch_has_them(kernel: Kernel, is_causal: bool) -> None:
    query, keys = torch.empty(1, 6, 5, 16, device="meta"), torch.empty(1, 2, 9, 16, device="meta")
    output, lse = kernel(query, keys, keys, is_causal, 0.5)
    assert output.shape == query.shape
    assert lse.shape == query.shape[:3]


def test_the_kernel_of_tables_is_called_as_this_torch_has_it() -> None:
    keys, values = torch.empty(2, 8, 16, 2, 64, device="meta")
    query = torch.empty(12, 8, 64, device="meta")
    table = Table(keys, values, [[5, 0, 3], [2]], [35, 9])
    assert _varlen(query, [4, 8], table, None).shape == query.shape


@pytest.mark.parametrize("kernel", [_flash, _efficient])
def test_kernels_of_gpus_say_that_there_is_none(kernel: Kernel) -> None:
    query = torch.randn(1, 2, 4, 16)
    with pytest.raises((RuntimeError, AttributeError)):
        kernel(query, query, query, True, None)


def test_what_no_kernel_serves_goes_by_the_book() -> None:
    query = torch.randn(1, 2, 4, 16)
    output, lse = attend_run(query, query, query, True, None)
    expected = _plain(query, query, query, True, None)
    assert torch.equal(output, expected[0])
    assert torch.equal(lse, expected[1])


def test_a_table_that_no_kernel_serves_goes_run_by_run() -> None:
    case = sample(3, 50)
    assert attend_pages(case.query, [3], [case.parts], None) is None
