"""How attention over a ragged batch is cut into calls of the kernel, none of which needs a mask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# How many keys at the lower edge of a window are cut at a time: they are copied.
TILE_TOKENS = 256

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class KeysValues:
    """The keys and values of consecutive positions, usually views of one run.

    Both are `[layers, tokens, kv_heads, head_size]`, or without the layers where there is one, in
    one dtype (float32, bfloat16, float16, float64), on the CPU or on a GPU; any strides do, except
    that the last must be 1. Zero tokens are allowed. The memory is the caller's: it is read by
    each call of attention, never kept.

    Raises ValueError where that does not hold; the kernel itself would answer wrong numbers.
    """

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        keys, values = self.keys, self.values
        if keys.shape != values.shape or keys.dtype != values.dtype:
            raise ValueError(f"keys are {describe(keys)}, but values {describe(values)}")
        check_tensor("keys", keys, (3, 4))
        check_tensor("values", values, (3, 4))

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[-3]

    def slice(self, first: int, end: int) -> KeysValues:
        """Tokens first to end (excluded) of these, as views."""
        if first == 0 and end == self.num_tokens:
            return self
        return KeysValues(self.keys[..., first:end, :, :], self.values[..., first:end, :, :])

    def layer(self, number: int) -> KeysValues:
        """One layer alone, as views."""
        return self if self.keys.ndim == 3 else KeysValues(self.keys[number], self.values[number])


class Sees(Enum):
    """Which keys of a piece a row sees; where not all, there are as many as rows.

    The kernel knows the first two. With rows and keys in the opposite order, the third is the
    second.
    """

    ALL = auto()
    UP_TO_ITS_OWN = auto()
    FROM_ITS_OWN = auto()


class Piece(NamedTuple):
    """One call of the kernel for each layer: these rows of the batch over these keys.

    Keys and values are as the kernel wants them, for each layer `[1, kv_heads, tokens, head_size]`.
    """

    rows: range
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    sees: Sees

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, in the opposite order where the kernel needs it."""
        keys, values = self.keys[layer], self.values[layer]
        if self.sees is Sees.FROM_ITS_OWN:
            return keys.flip(2), values.flip(2)
        return keys, values


class Group(NamedTuple):
    """Pieces of one kind and of equally many rows, which are `rows`, one piece behind the other."""

    pieces: list[Piece]
    rows: slice | Tensor


class Wave(NamedTuple):
    """Groups that have no row in common, in the order of their rows, which are `rows`."""

    groups: list[Group]
    rows: slice | Tensor


def waves_of(
    lengths: Sequence[int], sequences: Sequence[Sequence[KeysValues]], window: int | None
) -> list[Wave]:
    """Cut a batch into as many waves as its rows have pieces; the first has all rows."""
    waves: defaultdict[int, list[Piece]] = defaultdict(list)
    start = 0
    for num_queries, parts in zip(lengths, sequences, strict=True):
        for number, piece in _cut(start, num_queries, parts, window):
            waves[number].append(piece)
        start += num_queries
    return [_wave(pieces) for _, pieces in sorted(waves.items())]


def _wave(pieces: list[Piece]) -> Wave:
    pieces.sort(key=lambda piece: piece.rows.start)
    alike = groupby(pieces, key=lambda piece: (piece.sees, len(piece.rows)))
    groups = [list(group) for _, group in alike]
    return Wave([Group(group, _rows_of(group)) for group in groups], _rows_of(pieces))


def _rows_of(pieces: list[Piece]) -> slice | Tensor:
    rows = [row for piece in pieces for row in piece.rows]
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=pieces[0].keys[0].device)


def _cut(
    start: int, num_queries: int, parts: Sequence[KeysValues], window: int | None
) -> Iterator[tuple[int, Piece]]:
    """Cut what a sequence sees into rectangles and triangles, each with the number of its wave.

    keys:             prefix      part A      part B
    queries in A      rectangle   square
    queries in B      rectangle   rectangle   square

    Of a square each row sees the keys up to its own. Where a window leaves keys behind, within the
    queries' reach, they are cut into tiles, and below a tile's rectangle is a square again:

    keys:               tile
    queries up to       rectangle    they see all of it
    the next            square       one key less with each row

    No row of a piece sees no key: its log-sum-exp would come back wrong. Squares on the diagonal
    have every row once and are the first wave.
    """
    num_tokens = sum(part.num_tokens for part in parts)
    reach = num_tokens if window is None else min(window, num_tokens)

    def piece(part: KeysValues, rows: range, sees: Sees) -> Piece:
        rows = range(start + rows.start, start + rows.stop)
        return Piece(rows, _as_heads(part.keys), _as_heads(part.values), sees)

    # Positions are counted from the first query. From the last part backwards: waves are counted
    # from the diagonal.
    backwards = reversed(_slices(num_queries, parts, reach))
    for number, (part, first, end) in enumerate(backwards):
        # A lone query sees every key, its own too: decoding needs no square.
        is_own = num_queries > 1 and first >= 0
        if is_own:
            yield 0, piece(part, range(first, end), Sees.UP_TO_ITS_OWN)
        if seeing_all := range(end if is_own else 0, min(first + reach, num_queries)):
            yield number, piece(part, seeing_all, Sees.ALL)
        if leaving := range(first + reach, min(end - 1 + reach, num_queries)):
            rest = part.slice(1, part.num_tokens)
            yield number, piece(rest, leaving, Sees.FROM_ITS_OWN)


def _slices(
    num_queries: int, parts: Sequence[KeysValues], reach: int
) -> list[tuple[KeysValues, int, int]]:
    """The parts, cut where another query begins to see or to leave keys, with their positions."""
    if num_queries == 0:
        return []
    seen, kept = 1 - reach, num_queries - reach  # by any query, by all to the last
    tiles = range(seen, kept, min(reach, TILE_TOKENS))
    edges = {*tiles, kept, 0} if num_queries > 1 else {seen}
    slices = []
    end = num_queries - sum(part.num_tokens for part in parts)
    for part in parts:
        begin, end = end, end + part.num_tokens
        inner = {edge for edge in edges if begin < edge < end}
        for first, stop in pairwise(sorted({begin, end} | inner)):
            if first >= seen:
                slices.append((part.slice(first - begin, stop - begin), first, stop))
    return slices


def _as_heads(tensor: Tensor) -> Sequence[Tensor]:
    layers = tensor if tensor.ndim == 4 else tensor[None]
    return layers.transpose(1, 2).unsqueeze(1).unbind()


def check_tensor(name: str, tensor: Tensor, dimensions: tuple[int, ...]) -> None:
    is_whole = tensor.ndim in dimensions and 0 not in tensor.shape[-2:]
    is_shaped = is_whole and tensor.stride(-1) == 1
    is_known = tensor.dtype in _DTYPES and tensor.device.type in ("cpu", "cuda")
    if not is_shaped or not is_known:
        wanted = "floats [tokens, heads, head_size] on CPU or GPU with a last stride of 1"
        raise ValueError(f"{name} must be {wanted}, got {describe(tensor)}")


def describe(tensor: Tensor) -> str:
    shape, strides = list(tensor.shape), list(tensor.stride())
    return f"{tensor.dtype} {shape} with strides {strides} on {tensor.device}"
