"""Layout: how one block lies in bytes."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kvd.protocol.errors import BadRequest, Unsupported

MAX_PAGE_BYTES = 1 << 30
MAX_GROUP_PAGES = 16
GROUP_TOKENS = 256
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

DType = Literal["float64", "float32", "bfloat16", "float16"]
Order = Literal["layer_first", "page_first", "opaque"]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
ByteCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE_BYTES)]
Packing = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of one block of KV, for all layers of one shard.

    `order` says how an arena is stored. There are three cases:

    - `layer_first`, `[layer, plane, page, token, head, dim]`: the K (or V) of a run of pages in one
      layer is one strided tensor `[tokens, heads, dim]`, for attention where it lies.
    - `page_first`, `[page, layer, plane, token, head, dim]`: a page is one piece of consecutive
      memory, for big copies to and from an engine's own.
    - `opaque`, `[page, layer, bytes]`: an engine packs its pages in its own way, and nothing is
      known of their inside. `layer_bytes` are a page's in one layer, and `packing` says what packs
      them (platform, kernel, and whatever else changes the bytes).
    """

    num_layers: Count
    num_kv_heads: Count
    head_size: Count
    dtype: DType
    block_size: Count = 16
    num_planes: Annotated[int, msgspec.Meta(ge=1, le=2)] = 2
    order: Order = "layer_first"
    layer_bytes: ByteCount | UnsetType = UNSET
    packing: Packing | UnsetType = UNSET

    @property
    def is_opaque(self) -> bool:
        return self.order == "opaque"

    @property
    def is_contiguous(self) -> bool:
        """Whether a page is one piece of consecutive memory, its slices one after the other."""
        return self.order != "layer_first"

    @property
    def page_shape(self) -> tuple[int, ...]:
        """`[layers, planes, block_size, heads, head_size]`; of an opaque page `[layers, bytes]`."""
        if self.is_opaque:
            return self.num_layers, self.slice_bytes
        planes, heads = self.num_planes, self.num_kv_heads
        return self.num_layers, planes, self.block_size, heads, self.head_size

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def slice_bytes(self) -> int:
        """Bytes of one page in one layer and plane; where it is opaque, in one layer."""
        if self.layer_bytes is not UNSET:
            return self.layer_bytes
        return self.block_size * self.num_kv_heads * self.head_size * self.item_bytes

    @property
    def num_slices(self) -> int:
        return self.num_layers if self.is_opaque else self.num_layers * self.num_planes

    @property
    def page_bytes(self) -> int:
        return self.num_slices * self.slice_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token, all layers and planes."""
        return self.page_bytes // self.block_size

    @property
    def group_pages(self) -> int:
        """So many pages are handed out together, aligned, and reserved ahead.

        Runs of interleaved sequences then have as many, and not one: they have 256 tokens, from
        which fused attention pays off, but 16 pages at most. A power of two, so that groups of all
        layouts fit into extents.
        """
        pages = min(MAX_GROUP_PAGES, GROUP_TOKENS // self.block_size)
        return 1 << max(pages, 1).bit_length() - 1

    def extent_pages(self, granule_bytes: int, at_least: int) -> int:
        """The least multiple of `at_least` pages that are whole granules, wherever they lie."""
        piece_bytes = self.page_bytes if self.is_contiguous else self.slice_bytes
        pages = granule_bytes // math.gcd(piece_bytes, granule_bytes)
        return math.lcm(pages, at_least)

    def difference(self, other: Layout) -> str:
        """The fields in which two layouts differ, for an error message."""
        return ", ".join(
            f"{name} {getattr(self, name)} against {getattr(other, name)}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        )


def check_layout(layout: Layout) -> None:
    """Refuse fields that are each in bounds but not together (BadRequest)."""
    is_given = [value is not UNSET for value in (layout.layer_bytes, layout.packing)]
    if is_given != [layout.is_opaque] * 2:
        raise BadRequest(
            f"order {layout.order} with layer_bytes {layout.layer_bytes}, packing {layout.packing}:"
            " an opaque layout has both, any other neither"
        )
    if layout.page_bytes > MAX_PAGE_BYTES:
        raise BadRequest(
            f"a page of {layout.page_bytes} bytes is larger than {MAX_PAGE_BYTES}: "
            "use a smaller block_size"
        )


def check_rows(layout: Layout) -> None:
    """Refuse to tell the tokens of an opaque page apart (Unsupported)."""
    if layout.is_opaque:
        raise Unsupported(
            "an opaque layout has whole blocks only: no exact tail, no rows of single tokens"
        )
