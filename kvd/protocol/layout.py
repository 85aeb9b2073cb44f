"""Layout: how one block lies in bytes."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from kvd.protocol.errors import BadRequest

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

DType = Literal["float64", "float32", "bfloat16", "float16"]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of one block of KV, for all layers of one shard.

    An arena in the order `layer_first` is stored `[layer, plane, page, token, head, dim]`, so that
    the K (or V) of a run of pages in one layer is one strided tensor `[tokens, heads, dim]`.
    """

    num_layers: Count
    num_kv_heads: Count
    head_size: Count
    dtype: DType
    block_size: Count = 16
    num_planes: Annotated[int, msgspec.Meta(ge=1, le=2)] = 2
    order: Literal["layer_first"] = "layer_first"

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def slice_bytes(self) -> int:
        """Bytes of one page in one layer and plane."""
        return self.block_size * self.num_kv_heads * self.head_size * self.item_bytes

    @property
    def num_slices(self) -> int:
        return self.num_layers * self.num_planes

    @property
    def page_bytes(self) -> int:
        return self.num_slices * self.slice_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token, all layers and planes."""
        return self.page_bytes // self.block_size

    def extent_pages(self, granule_bytes: int, at_least: int) -> int:
        """The least multiple of `at_least` pages whose every slice is whole granules of memory."""
        pages = granule_bytes // math.gcd(self.slice_bytes, granule_bytes)
        return math.lcm(pages, at_least)

    def difference(self, other: Layout) -> str:
        """The fields in which two layouts differ, for an error message."""
        return ", ".join(
            f"{name} {getattr(self, name)} against {getattr(other, name)}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        )


def check_layout(layout: Layout) -> None:
    """Refuse sizes that are each in bounds but not together (BadRequest)."""
    if layout.page_bytes > MAX_PAGE_BYTES:
        raise BadRequest(
            f"a page of {layout.page_bytes} bytes is larger than {MAX_PAGE_BYTES}: "
            "use a smaller block_size"
        )


MAX_PAGE_BYTES = 1 << 30
