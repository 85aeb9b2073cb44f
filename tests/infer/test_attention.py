"""Attention over runs where they lie agrees with plain attention over contiguous memory."""

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kvd_infer import attention
from kvd_infer.attention import KeysValues, Plan, attend, paged_attention
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


@pytest.fixture(autouse=True)
def seed_and_threads() -> Iterator[None]:
    """One thread: waking a second one costs more than these small calls."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def split(keys: Tensor, values: Tensor, cuts: Sequence[int]) -> list[KeysValues]:
    edges = [0, *sorted(cuts), len(keys)]
    return [KeysValues(keys[first:end], values[first:end]) for first, end in pairwise(edges)]


def plain(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Torch's own attention over contiguous tensors."""
    query, keys, values = (t.transpose(0, 1)[None].contiguous() for t in (query, keys, values))
    mask = lower_right(query.shape[2], keys.shape[2])
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return output[0].transpose(0, 1)


def check(case: Sample) -> None:
    actual = attend(case.query, case.parts)
    assert actual.shape == case.query.shape
    assert actual.dtype == case.query.dtype
    assert close(actual, textbook(case.query, case.keys, case.values))
    assert close(actual, plain(case.query, case.keys, case.values))


# Agreement


@DTYPES
@pytest.mark.parametrize("num_queries", [1, 5, 100], ids=["decode", "suffix", "cold"])
def test_every_dtype_agrees_with_plain_attention(dtype: torch.dtype, num_queries: int) -> None:
    check(sample(num_queries, 100, dtype=dtype))


@HEADS
@pytest.mark.parametrize("head_size", [16, 64, 128])
@pytest.mark.parametrize("num_queries", [1, 3, 40])
def test_every_kind_of_head_agrees(
    query_heads: int, kv_heads: int, head_size: int, num_queries: int
) -> None:
    check(sample(num_queries, 70, query_heads=query_heads, kv_heads=kv_heads, head_size=head_size))


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("num_queries", [1, 2, 15])
def test_lengths_around_block_edges_agree(edge: int, blocks: int, num_queries: int) -> None:
    check(sample(num_queries, blocks * BLOCK_SIZE + edge, pages_per_run=1))


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("num_prefix", [16, 32, 48])
def test_hits_around_block_edges_agree(edge: int, num_prefix: int) -> None:
    check(sample(100 - num_prefix - edge, 100, pages_per_run=1))


def test_a_full_hit_computes_one_token_over_the_whole_prefix() -> None:
    check(sample(1, 8 * BLOCK_SIZE))


def test_a_sequence_of_one_token_is_its_value() -> None:
    case = sample(1, 1, query_heads=2)
    assert close(attend(case.query, case.parts), case.values)


@pytest.mark.parametrize("num_queries", [8, 64, 192, 250])
def test_prefills_larger_than_the_kernels_blocks_agree(num_queries: int) -> None:
    check(sample(num_queries, 700, pages_per_run=20))


@HEADS
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_the_number_of_threads_changes_no_result(
    query_heads: int, kv_heads: int, threads: int, num_queries: int
) -> None:
    torch.set_num_threads(threads)
    check(sample(num_queries, 100, query_heads=query_heads, kv_heads=kv_heads))


@pytest.mark.parametrize("scale", [0.05, 1.0, 3.0])
def test_the_scale_of_the_scores_can_be_given(scale: float) -> None:
    case = sample(5, 50)
    expected = textbook(case.query, case.keys, case.values, scale)
    assert close(attend(case.query, case.parts, scale=scale), expected)


def test_a_ragged_batch_of_prefills_and_decodes_agrees() -> None:
    cases = [sample(*shape) for shape in ((1, 40), (33, 33), (7, 60), (1, 1), (16, 64))]
    query = torch.cat([case.query for case in cases])
    lengths = [len(case.query) for case in cases]
    actual = paged_attention(query, lengths, [case.parts for case in cases])
    for rows, case in zip(actual.split(lengths), cases, strict=True):
        assert close(rows, textbook(case.query, case.keys, case.values))


def test_the_scale_reaches_every_sequence_of_a_batch() -> None:
    case = sample(2, 20)
    query = case.query.repeat(2, 1, 1)
    actual = paged_attention(query, [2, 2], [case.parts] * 2, scale=0.1)
    expected = textbook(case.query, case.keys, case.values, 0.1)
    assert close(actual, expected.repeat(2, 1, 1))


def test_sequences_of_a_batch_share_the_pages_of_a_prefix() -> None:
    prefix, query = sample(1, 64), torch.randn(2, 6, 16)
    actual = paged_attention(query, [1, 1], [prefix.parts, prefix.parts])
    for row in range(2):
        expected = textbook(query[row : row + 1], prefix.keys, prefix.values)
        assert close(actual[row : row + 1], expected)


@pytest.mark.parametrize("num_queries", [1, 9])
def test_large_scores_do_not_overflow_the_merge(num_queries: int) -> None:
    case = sample(num_queries, 100)
    query = case.query * 300
    actual = attend(query, case.parts)
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(
        actual.double(), textbook(query, case.keys, case.values), rtol=1e-3, atol=1e-3
    )


# Splits


@pytest.mark.parametrize("num_splits", [2, 3, 7, 20])
@pytest.mark.parametrize("num_queries", [1, 6, 50])
def test_any_split_gives_the_unsplit_result(num_splits: int, num_queries: int) -> None:
    query, keys, values = torch.randn(num_queries, 4, 16), *torch.randn(2, 50, 2, 16)
    cuts = random.Random(num_splits).choices(range(51), k=num_splits - 1)
    whole = attend(query, [KeysValues(keys, values)])
    assert close(attend(query, split(keys, values, cuts)), whole)


def test_a_merge_of_many_parts_loses_nothing_to_a_short_dtype() -> None:
    query, keys = torch.randn(1, 4, 16).bfloat16(), torch.randn(300, 2, 16).bfloat16()
    parts = split(keys, torch.ones_like(keys), range(1, 300))
    assert torch.equal(attend(query, parts), torch.ones_like(query))


def test_a_lone_query_may_see_its_parts_in_any_order() -> None:
    query, keys, values = torch.randn(1, 4, 16), *torch.randn(2, 50, 2, 16)
    parts = split(keys, values, [3, 16, 17, 40])
    assert close(attend(query, parts[::-1]), attend(query, parts))


def test_several_queries_need_their_parts_in_order() -> None:
    query, keys, values = torch.randn(30, 4, 16), *torch.randn(2, 50, 2, 16)
    parts = split(keys, values, [25])
    assert not close(attend(query, parts[::-1]), attend(query, parts))


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_random_sequences_in_random_runs_agree(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 90), label="num_tokens")
    num_queries = data.draw(st.integers(1, num_tokens), label="num_queries")
    cuts = data.draw(st.lists(st.integers(0, num_tokens), max_size=6), label="cuts")
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (1, 8), (2, 3), (3, 1)]), label="heads")
    query = torch.randn(num_queries, kv_heads * group, 16)
    keys, values = torch.randn(2, num_tokens, kv_heads, 16)
    actual = attend(query, split(keys, values, cuts))
    assert close(actual, textbook(query, keys, values))


# Windows


@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_random_windows_over_random_runs_agree(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 90), label="num_tokens")
    num_queries = data.draw(st.integers(1, num_tokens), label="num_queries")
    window = data.draw(st.integers(1, num_tokens + 5), label="window")
    cuts = data.draw(st.lists(st.integers(0, num_tokens), max_size=6), label="cuts")
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (1, 8), (2, 3), (3, 1)]), label="heads")
    query = torch.randn(num_queries, kv_heads * group, 16, dtype=torch.float64)
    keys, values = torch.randn(2, num_tokens, kv_heads, 16, dtype=torch.float64)
    actual = attend(query, split(keys, values, cuts), window=window)
    assert close(actual, textbook(query, keys, values, window=window))


@pytest.mark.parametrize("window", [1, 255, 256, 257, 500])
@pytest.mark.parametrize("num_queries", [1, 2, 300, 700])
def test_windows_around_the_size_of_a_tile_agree(window: int, num_queries: int) -> None:
    case = sample(num_queries, 700, pages_per_run=20, dtype=torch.float64)
    expected = textbook(case.query, case.keys, case.values, window=window)
    assert close(attend(case.query, case.parts, window=window), expected)


@DTYPES
def test_every_dtype_agrees_within_a_window(dtype: torch.dtype) -> None:
    case = sample(60, 100, dtype=dtype)
    expected = textbook(case.query, case.keys, case.values, window=20)
    assert close(attend(case.query, case.parts, window=20), expected)


def test_a_ragged_batch_has_one_window() -> None:
    cases = [sample(*shape) for shape in ((1, 40), (33, 33), (7, 60), (1, 1), (16, 64))]
    query, lengths = torch.cat([case.query for case in cases]), [len(case.query) for case in cases]
    actual = paged_attention(query, lengths, [case.parts for case in cases], window=10)
    for rows, case in zip(actual.split(lengths), cases, strict=True):
        assert close(rows, textbook(case.query, case.keys, case.values, window=10))


@pytest.mark.parametrize("num_queries", [1, 20])
def test_what_lies_before_every_window_is_not_read(num_queries: int) -> None:
    query, keys, values = torch.randn(num_queries, 4, 16), *torch.randn(2, 64, 2, 16)
    expected = textbook(query, keys, values, window=10)
    for tensor in (keys, values):
        tensor[: 64 - num_queries - 9] = torch.nan
    assert close(attend(query, split(keys, values, [16, 32, 48]), window=10), expected)


def test_a_lone_query_in_a_window_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sample(1, 64, pages_per_run=4)
    expected = textbook(case.query, case.keys, case.values, window=10)
    monkeypatch.delattr(attention, "_merge")
    assert close(attend(case.query, case.parts, window=10), expected)


@pytest.mark.parametrize("window", [0, -3])
def test_windows_that_see_nothing_are_refused(window: int) -> None:
    with pytest.raises(ValueError, match="one token at least"):
        attend(torch.randn(1, 6, 16), sample(1, 20).parts, window=window)


# Layers


@pytest.mark.parametrize("window", [None, 10])
def test_one_plan_serves_every_layer(window: int | None) -> None:
    lengths, num_tokens = [1, 20, 1], [40, 50, 30]
    runs = [torch.randn(3, 2, count, 2, 16) for count in num_tokens]  # [layers, planes, …]
    plan = Plan(lengths, [halves(run) for run in runs], window)
    for layer in range(3):
        query = torch.randn(22, 6, 16)
        attended = plan.attend(query, layer).split(lengths)
        for rows, actual, run in zip(query.split(lengths), attended, runs, strict=True):
            assert close(actual, textbook(rows, *run[layer], window=window))


def halves(run: Tensor) -> list[KeysValues]:
    return [KeysValues(half[:, 0], half[:, 1]) for half in run.tensor_split(2, dim=2)]


def test_a_plan_is_of_its_batch_alone() -> None:
    case = sample(3, 20)
    plan = Plan([3], [case.parts])
    with pytest.raises(ValueError, match=r"\[3\] do not add up to 2"):
        plan.attend(case.query[:2])
    with pytest.raises(IndexError):
        plan.attend(case.query, 1)


def test_parts_of_one_layer_and_of_several_do_not_fit() -> None:
    case = sample(1, 20)
    several = KeysValues(torch.zeros(2, 20, 2, 16), torch.zeros(2, 20, 2, 16))
    with pytest.raises(ValueError, match="do not fit"):
        Plan([1], [[*case.parts, several]])


# Rows


@pytest.mark.parametrize(
    ("threads", "num_rows", "kv_heads", "packed"),
    [
        pytest.param(1, 1, 8, 8, id="decode reads K and V once"),
        pytest.param(4, 1, 1, 4, id="each thread has a head"),
        pytest.param(64, 1, 8, 32, id="more threads than heads"),
        pytest.param(1, 16, 8, 16, id="no more rows than pay"),
        pytest.param(1, 64, 8, 8, id="large blocks of rows"),
        pytest.param(1, 1, 32, 32, id="nothing shared, nothing packed"),
    ],
)
def test_query_heads_are_packed_while_that_saves_reading(
    threads: int, num_rows: int, kv_heads: int, packed: int
) -> None:
    assert attention._packed_heads(num_rows, 32, kv_heads, threads) == packed


# Memory


def interleaved(keys: Tensor, values: Tensor) -> Sequence[Tensor]:
    return torch.stack([keys, values], dim=2).unbind(2)  # [tokens, heads, 2, head_size]


def joined(keys: Tensor, values: Tensor) -> Sequence[Tensor]:
    return torch.cat([keys, values], dim=-1).chunk(2, dim=-1)  # [tokens, heads, 2 x head_size]


def head_major(keys: Tensor, values: Tensor) -> Sequence[Tensor]:
    return [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (keys, values)]


@pytest.mark.parametrize("lay", [interleaved, joined, head_major])
@pytest.mark.parametrize("num_queries", [1, 20])
def test_keys_and_values_may_be_strided_like_any_layout(
    lay: Callable[[Tensor, Tensor], Sequence[Tensor]], num_queries: int
) -> None:
    query, keys, values = torch.randn(num_queries, 6, 16), *torch.randn(2, 50, 2, 16)
    laid_keys, laid_values = lay(keys, values)
    actual = attend(query, split(laid_keys, laid_values, [16, 40]))
    assert close(actual, textbook(query, keys, values))


def test_a_query_may_be_a_slice_of_a_fused_projection() -> None:
    case = sample(9, 50)
    fused = torch.randn(9, 10, 16)
    fused[:, 1:7] = case.query
    assert close(attend(fused[:, 1:7], case.parts), attend(case.query, case.parts))


@pytest.mark.parametrize("num_queries", [1, 20])
def test_pages_are_read_where_they_lie(num_queries: int) -> None:
    case = sample(num_queries, 64)
    storage = case.arena.untyped_storage().data_ptr()
    assert {part.keys.untyped_storage().data_ptr() for part in case.parts} == {storage}
    before = attend(case.query, case.parts)
    case.arena[1] += 1  # every value grows by one, so every average of values does
    assert close(attend(case.query, case.parts), before + 1)


@pytest.mark.parametrize("num_queries", [1, 20])
def test_the_kernel_is_given_the_arenas_own_memory(
    num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = sample(num_queries, 64)
    memory: set[int] = set()
    flash = attention._flash

    def spy(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        memory.update(tensor.untyped_storage().data_ptr() for tensor in (keys, values))
        return flash(query, keys, values, **options)

    monkeypatch.setattr(attention, "_flash", spy)
    attend(case.query, case.parts)
    assert memory == {case.arena.untyped_storage().data_ptr()}


def test_inputs_are_left_as_they_were() -> None:
    case = sample(20, 64)
    arena, query = case.arena.clone(), case.query.clone()
    attend(case.query, case.parts)
    assert torch.equal(case.arena, arena)
    assert torch.equal(case.query, query)


def test_decoding_over_one_run_is_one_call_and_no_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sample(1, 32)
    expected = textbook(case.query, case.keys, case.values)
    monkeypatch.delattr(attention, "_merge")
    assert len(case.parts) == 1
    assert close(attend(case.query, case.parts), expected)


def test_results_take_no_part_in_autograd() -> None:
    case = sample(3, 40)
    query = case.query.requires_grad_()
    output = attend(query, case.parts)
    assert not output.requires_grad
    assert not output.is_inference()


def test_the_global_random_state_is_left_alone() -> None:
    case = sample(3, 40)
    attention._check_kernel.cache_clear()
    before = torch.get_rng_state()
    attend(case.query, case.parts)
    assert torch.equal(torch.get_rng_state(), before)


# Damage must show: these would fail if the comparisons above compared nothing.


@pytest.mark.parametrize("num_queries", [1, 20, 64])
def test_a_zeroed_page_is_noticed(num_queries: int) -> None:
    case = sample(num_queries, 64)
    expected = textbook(case.query, case.keys, case.values)
    case.parts[0].keys[:BLOCK_SIZE] = 0
    case.parts[0].values[:BLOCK_SIZE] = 0
    assert not close(attend(case.query, case.parts), expected)


@pytest.mark.parametrize("num_queries", [1, 20, 64])
def test_keys_shifted_against_their_values_are_noticed(num_queries: int) -> None:
    case = sample(num_queries, 64)
    expected = textbook(case.query, case.keys, case.values)
    for part in case.parts:
        part.keys.copy_(part.keys.roll(1, dims=0))
    assert not close(attend(case.query, case.parts), expected)


def test_a_key_of_the_future_is_not_seen() -> None:
    case = sample(20, 64)
    before = attend(case.query, case.parts)
    case.parts[-1].keys[-1] += 5
    after = attend(case.query, case.parts)
    assert torch.equal(after[:-1], before[:-1])
    assert not close(after[-1:], before[-1:])


# Guards


def test_parts_without_tokens_are_passed_over() -> None:
    query, keys, values = torch.randn(6, 4, 16), *torch.randn(2, 50, 2, 16)
    whole = attend(query, [KeysValues(keys, values)])
    assert close(attend(query, split(keys, values, [0, 0, 44, 44, 50])), whole)


def test_no_queries_give_no_output() -> None:
    empty = torch.empty(0, 6, 16)
    assert attend(empty, sample(1, 20).parts).shape == (0, 6, 16)
    assert attend(empty, []).shape == (0, 6, 16)
    assert paged_attention(empty, [], []).shape == (0, 6, 16)
    assert paged_attention(empty, [0], [[]]).shape == (0, 6, 16)


EMPTY_KEYS = """
import torch
from kvd_infer import attention
none = torch.empty(0, 2, 16)
empty = attention.KeysValues(none, none)
as_heads = none.transpose(0, 1)[None]
for call in (
    lambda: attention.attend(torch.randn(1, 2, 16), [empty]),
    lambda: attention.attend(torch.randn(3, 2, 16), [empty, empty]),
    lambda: attention.attend(torch.randn(1, 2, 16), []),
    lambda: attention._flash(as_heads, as_heads, as_heads, is_causal=False, scale=None),
):
    try:
        call()
    except ValueError:
        print("refused")
"""


def test_empty_keys_never_reach_the_kernel_that_dies_of_them() -> None:
    path = [entry for entry in sys.path if entry]
    program = f"import sys; sys.path[:0] = {path!r}\n{EMPTY_KEYS}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 4), done.stderr


def test_more_queries_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="21 queries, but the parts have 20 tokens"):
        attend(torch.randn(21, 6, 16), sample(1, 20).parts)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        pytest.param((8, 2, 16), (9, 2, 16), id="tokens"),
        pytest.param((8, 2, 16), (8, 4, 16), id="heads"),
        pytest.param((8, 2, 16), (8, 2, 32), id="head size"),
        pytest.param((2, 16), (2, 16), id="two dimensions"),
        pytest.param((1, 1, 8, 2, 16), (1, 1, 8, 2, 16), id="five dimensions"),
        pytest.param((8, 0, 16), (8, 0, 16), id="no heads"),
        pytest.param((8, 2, 0), (8, 2, 0), id="no head size"),
    ],
)
def test_keys_and_values_of_wrong_shape_are_refused(
    keys: tuple[int, ...], values: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"keys .*\["):
        KeysValues(torch.zeros(keys), torch.zeros(values))


def test_keys_and_values_of_two_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"keys are torch\.float32.*values torch\.bfloat16"):
        KeysValues(torch.zeros(8, 2, 16), torch.zeros(8, 2, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_dtypes_the_kernel_does_not_know_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"keys must be .*{dtype}"):
        KeysValues(*torch.zeros(2, 8, 2, 16).to(dtype))


def test_memory_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="on meta"):
        KeysValues(*torch.zeros(2, 8, 2, 16, device="meta"))


@pytest.mark.parametrize("which", ["keys", "values"])
def test_keys_and_values_with_a_last_stride_are_refused(which: str) -> None:
    tensors = {"keys": torch.zeros(8, 2, 16), "values": torch.zeros(8, 2, 16)}
    tensors[which] = torch.zeros(8, 16, 2).transpose(1, 2)
    with pytest.raises(ValueError, match=f"{which} must be .* last stride of 1"):
        KeysValues(**tensors)


def test_a_query_with_a_last_stride_is_refused() -> None:
    with pytest.raises(ValueError, match=r"query must be .* last stride of 1"):
        attend(torch.randn(1, 16, 6).transpose(1, 2), sample(1, 20).parts)


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(torch.zeros(1, 5, 16), id="heads"),
        pytest.param(torch.zeros(1, 1, 16), id="fewer heads"),
        pytest.param(torch.zeros(1, 6, 32), id="head size"),
        pytest.param(torch.zeros(1, 6, 16, dtype=torch.bfloat16), id="dtype"),
    ],
)
def test_a_query_that_does_not_fit_its_keys_is_refused(query: Tensor) -> None:
    with pytest.raises(ValueError, match=r"query torch\..* does not fit keys torch\.float32"):
        attend(query, sample(1, 20).parts)


@pytest.mark.parametrize(
    ("kv_heads", "dtype"), [(3, torch.float32), (2, torch.float64)], ids=["heads", "dtype"]
)
def test_parts_that_differ_from_each_other_are_refused(kv_heads: int, dtype: torch.dtype) -> None:
    case, other = sample(1, 20), sample(1, 20, kv_heads=kv_heads, dtype=dtype)
    with pytest.raises(ValueError, match="do not fit"):
        attend(case.query, [*case.parts, *other.parts])


@pytest.mark.parametrize("scale", [0.0, -0.3, float("inf"), float("nan")])
def test_scales_that_would_turn_the_kernels_mask_round_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        attend(torch.randn(5, 6, 16), sample(1, 20).parts, scale=scale)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1], "1 lengths for 2 sequences"),
        ([1, 1], "do not add up to 3"),
        ([4, -1], "-1 queries"),
    ],
)
def test_a_batch_whose_numbers_disagree_is_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(torch.randn(3, 6, 16), lengths, [sample(1, 20).parts] * 2)


@pytest.fixture
def forget_checks() -> None:
    attention._check_kernel.cache_clear()


@pytest.mark.usefixtures("forget_checks")
def test_a_torch_without_the_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace())
    case = sample(1, 20)
    with pytest.raises(RuntimeError, match=f"torch {re.escape(torch.__version__)} has no usable"):
        attend(case.query, case.parts)


@pytest.mark.usefixtures("forget_checks")
@pytest.mark.parametrize("damage", ["output", "lse", "mask", "nan"])
def test_a_kernel_that_answers_wrongly_is_never_used(
    damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, flash = sample(1, 20), attention._flash

    def wrong(
        query: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        is_causal = is_causal and damage != "mask"
        output, lse = flash(query, keys, values, is_causal=is_causal, scale=scale)
        worse = {
            "output": (output * 1.1, lse),
            "lse": (output, lse / 2),
            "nan": (output * torch.nan, lse),
        }
        return worse.get(damage, (output, lse))

    monkeypatch.setattr(attention, "_flash", wrong)
    with pytest.raises(RuntimeError, match="flash attention is wrong in"):
        attend(case.query, case.parts)
