"""How many bytes a block has, and how many pages whole granules of memory have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from kvd.protocol.errors import BadRequest, Unsupported
from kvd.protocol.layout import ITEM_BYTES, MAX_PAGE_BYTES, Layout, check_layout, check_rows

LLAMA_8B = Layout(32, 8, 128, "bfloat16")
SMALL = Layout(30, 3, 64, "float16")  # a slice of 6,144 bytes
OPAQUE = replace(LLAMA_8B, order="opaque", layer_bytes=5000, packing="an engine's, on x86")

KIB, MIB = 1 << 10, 1 << 20


def test_a_page_holds_keys_and_values_of_all_layers() -> None:
    assert LLAMA_8B.slice_bytes == 16 * 8 * 128 * 2
    assert LLAMA_8B.page_bytes == 32 * 2 * LLAMA_8B.slice_bytes == 2 * MIB
    assert LLAMA_8B.token_bytes == 128 * KIB
    assert LLAMA_8B.num_slices == 64


def test_a_latent_has_one_plane() -> None:
    assert Layout(2, 1, 576, "bfloat16", num_planes=1).page_bytes == 2 * 16 * 576 * 2


@pytest.mark.parametrize(("dtype", "size"), ITEM_BYTES.items())
def test_a_page_has_the_bytes_of_its_dtype(dtype: Any, size: int) -> None:
    assert Layout(1, 1, 1, dtype, block_size=1, num_planes=1).page_bytes == size


@pytest.mark.parametrize(
    ("layout", "granule", "pages"),
    [
        (SMALL, 4 * KIB, 16),  # two pages are three granules
        (SMALL, 2 * MIB, 1024),
        (LLAMA_8B, 4 * KIB, 16),
        (LLAMA_8B, 2 * MIB, 64),
        (Layout(1, 1, 1, "float16"), 4 * KIB, 128),
        (Layout(1, 1, 65, "float16"), 4 * KIB, 128),
        (Layout(1, 1, 5, "float16", block_size=3), 4 * KIB, 2048),
    ],
)
def test_an_extent_has_whole_granules_in_every_slice(
    layout: Layout, granule: int, pages: int
) -> None:
    assert layout.extent_pages(granule, 16) == pages
    assert pages * layout.slice_bytes % granule == 0


@given(
    st.builds(
        Layout,
        st.just(1),
        st.integers(1, 32),
        st.integers(1, 256),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.integers(1, 64),
    ),
    st.sampled_from([4 * KIB, 64 * KIB, 2 * MIB]),
)
def test_no_smaller_extent_would_do(layout: Layout, granule: int) -> None:
    pages = layout.extent_pages(granule, 16)
    assert pages * layout.slice_bytes % granule == 0
    assert [n for n in range(16, pages, 16) if n * layout.slice_bytes % granule == 0] == []


@pytest.mark.parametrize(
    ("layout", "granule", "pages"),
    [
        (replace(LLAMA_8B, order="page_first"), 4 * KIB, 16),
        (replace(LLAMA_8B, order="page_first"), 2 * MIB, 16),
        (replace(SMALL, order="page_first"), 2 * MIB, 256),
        (replace(OPAQUE, layer_bytes=100), 4 * KIB, 32),
    ],
)
def test_an_extent_of_contiguous_pages_is_whole_granules(
    layout: Layout, granule: int, pages: int
) -> None:
    assert layout.extent_pages(granule, 16) == pages
    assert pages * layout.page_bytes % granule == 0


def test_an_opaque_page_has_the_bytes_of_its_layers() -> None:
    assert OPAQUE.page_shape == (32, 5000)
    assert OPAQUE.page_bytes == 32 * 5000
    assert (OPAQUE.num_slices, OPAQUE.slice_bytes) == (32, 5000)


@pytest.mark.parametrize(
    "layout",
    [
        replace(LLAMA_8B, order="opaque"),
        replace(OPAQUE, packing=UNSET),
        replace(OPAQUE, layer_bytes=UNSET),
        replace(OPAQUE, order="page_first"),
        replace(LLAMA_8B, packing="an engine's"),
    ],
    ids=str,
)
def test_an_opaque_layout_and_no_other_says_its_bytes_and_what_packs_them(layout: Layout) -> None:
    check_layout(OPAQUE)
    with pytest.raises(BadRequest, match=r"layer_bytes .*, packing .*opaque"):
        check_layout(layout)


def test_an_opaque_layout_has_no_rows() -> None:
    check_rows(replace(LLAMA_8B, order="page_first"))
    with pytest.raises(Unsupported, match="whole blocks"):
        check_rows(OPAQUE)


def test_what_only_opaque_layouts_have_is_sent_of_them_alone() -> None:
    assert msgspec.to_builtins(OPAQUE).keys() - msgspec.to_builtins(LLAMA_8B).keys() == {
        "layer_bytes",
        "packing",
    }
    assert msgspec.convert(msgspec.to_builtins(OPAQUE), Layout) == OPAQUE


def test_a_difference_names_the_fields_and_both_values() -> None:
    other = replace(LLAMA_8B, num_layers=16, dtype="float16")
    assert LLAMA_8B.difference(other) == "num_layers 32 against 16, dtype bfloat16 against float16"
    assert LLAMA_8B.difference(LLAMA_8B) == ""


def test_a_page_that_is_too_large_is_refused_with_both_sizes() -> None:
    largest = Layout(1, 1, MAX_PAGE_BYTES // 2048, "float16", block_size=1024, num_planes=1)
    check_layout(largest)
    with pytest.raises(BadRequest, match=f"{2 * MAX_PAGE_BYTES}.*{MAX_PAGE_BYTES}"):
        check_layout(replace(largest, num_planes=2))


@pytest.mark.parametrize(
    "field",
    [
        {"num_layers": 0},
        {"block_size": 0},
        {"num_planes": 3},
        {"dtype": "int8"},
        {"order": "sideways"},
        {"head_size": (1 << 20) + 1},
        {"layer_bytes": 0},
        {"packing": ""},
        {"num_layers": True},
    ],
    ids=repr,
)
def test_a_layout_out_of_bounds_is_not_read(field: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(field))):
        msgspec.convert(msgspec.to_builtins(LLAMA_8B) | field, Layout)
