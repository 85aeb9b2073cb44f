"""Token ids with what else stands at their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.rows import NO_EXTRA, row_bytes, rows_of
from kvd.protocol.codec import TOKEN_BYTES
from kvd.protocol.errors import BadRequest
from kvd.protocol.messages import EXTRA_BYTES

if TYPE_CHECKING:
    from kvd.protocol.messages import Extras

PLAIN, WIDE = row_bytes(extras=False), row_bytes(extras=True)
CAT, DOG = bytes([1]) * EXTRA_BYTES, bytes([2]) * EXTRA_BYTES


def packed(*tokens: int) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def test_without_extras_a_row_is_the_token() -> None:
    assert PLAIN == TOKEN_BYTES
    assert rows_of(packed(1, 2), (), 0, PLAIN) == packed(1, 2)


def test_an_extra_stands_behind_its_token() -> None:
    rows = rows_of(packed(1, 2, 3), ((1, CAT),), 0, WIDE)
    assert rows == packed(1) + NO_EXTRA + packed(2) + CAT + packed(3) + NO_EXTRA


def test_a_position_counts_from_the_beginning_of_the_sequence() -> None:
    assert rows_of(packed(7), ((5, CAT),), 5, WIDE) == packed(7) + CAT


def test_no_tokens_are_no_rows() -> None:
    assert rows_of(b"", (), 0, WIDE) == b""


@pytest.mark.parametrize("position", [4, 7])
def test_an_extra_outside_of_the_tokens_is_refused(position: int) -> None:
    with pytest.raises(BadRequest, match=f"position {position}"):
        rows_of(packed(1, 2), ((position, CAT),), 5, WIDE)


def test_a_position_with_two_extras_is_refused() -> None:
    with pytest.raises(BadRequest, match="named twice"):
        rows_of(packed(1), ((0, CAT), (0, DOG)), 0, WIDE)


def test_a_digest_of_zeros_is_refused() -> None:
    with pytest.raises(BadRequest, match="all zeros"):
        rows_of(packed(1), ((0, NO_EXTRA),), 0, WIDE)


def test_extras_where_there_are_none_are_refused() -> None:
    with pytest.raises(BadRequest, match="without them"):
        rows_of(packed(1), ((0, CAT),), 0, PLAIN)


digests = st.sampled_from([NO_EXTRA, CAT, DOG, bytes(31) + b"\1", b"\1" + bytes(31)])
sequences = st.lists(st.tuples(st.integers(0, 1), digests), max_size=4)


def rows(sequence: list[tuple[int, bytes]]) -> bytes:
    extras: Extras = tuple(
        (place, digest) for place, (_, digest) in enumerate(sequence) if digest != NO_EXTRA
    )
    return rows_of(packed(*(token for token, _ in sequence)), extras, 0, WIDE)


@given(sequences, sequences)
def test_rows_are_equal_where_tokens_and_digests_are(
    one: list[tuple[int, bytes]], other: list[tuple[int, bytes]]
) -> None:
    assert (rows(one) == rows(other)) == (one == other)
