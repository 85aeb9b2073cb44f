"""Checksums: xxh3, of blocks over their bytes in page order, and of small files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvd.arena.runs import Pages
    from kvd.protocol.layout import Layout

# Copying and hashing let other threads run, for which they must stop: so seldom that it costs
# little, and so often that the scratch memory is small.
SCRATCH_BYTES = 4 << 20
# What a small file ends with.
SUM_BYTES = 8


class Copied(Protocol):
    """An arena whose pages can be copied, be it the daemon's own mapping or a tier's."""

    @property
    def layout(self) -> Layout: ...

    def copy_out(self, pages: Pages, out: memoryview) -> None: ...


def block_checksums(arena: Copied, pages: Pages) -> NDArray[np.uint64]:
    """The checksum of each page. For a thread of its own."""
    page_bytes = arena.layout.page_bytes
    step = max(1, SCRATCH_BYTES // page_bytes)
    scratch = memoryview(bytearray(min(step, len(pages)) * page_bytes))
    sums: list[int] = []
    for start in range(0, len(pages), step):
        piece = pages[start : start + step]
        arena.copy_out(piece, scratch[: len(piece) * page_bytes])
        sums += [
            checksum_of(scratch[place : place + page_bytes])
            for place in range(0, len(piece) * page_bytes, page_bytes)
        ]
    return np.array(sums, np.uint64)


def checksum_of(block: memoryview) -> int:
    """Never 0, which stands for none."""
    return xxhash.xxh3_64_intdigest(block) or 1


def with_sum(content: bytes) -> bytes:
    """What a small file holds, and behind it the checksum."""
    return content + xxhash.xxh3_64_digest(content)


def without_sum(written: bytes) -> bytes | None:
    """What `with_sum` was given; None where that is damaged."""
    content, checksum = written[:-SUM_BYTES], written[-SUM_BYTES:]
    return content if xxhash.xxh3_64_digest(content) == checksum else None
