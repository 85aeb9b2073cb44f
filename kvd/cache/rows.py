"""Rows: what tells one token position from another, as bytes that the tree compares.

A row is the token's id. In a namespace with extras a digest follows it, of what else stands at that
position (an image, say), so that equal ids with other content are other blocks: by comparison of
the whole digest, never folded into the id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.protocol.codec import TOKEN_BYTES, Tokens
from kvd.protocol.errors import BadRequest, LimitExceeded
from kvd.protocol.messages import EXTRA_BYTES

if TYPE_CHECKING:
    from kvd.protocol.messages import Extras

NO_EXTRA = bytes(EXTRA_BYTES)
MAX_ROWS_BYTES = 64 << 20


def row_bytes(*, extras: bool) -> int:
    return TOKEN_BYTES + EXTRA_BYTES if extras else TOKEN_BYTES


def rows_of(tokens: Tokens, extras: Extras, first: int, width: int) -> bytes:
    """Tokens, the first of which is number `first` of its sequence, as rows of `width` bytes.

    Raises BadRequest for extras where the namespace has none, outside of the tokens, or twice, and
    LimitExceeded for more tokens than may be widened at once.
    """
    if width == TOKEN_BYTES:
        if extras:
            raise BadRequest("extras: the namespace was opened without them")
        return tokens
    if len(tokens) // TOKEN_BYTES * width > MAX_ROWS_BYTES:
        raise LimitExceeded(f"at most {MAX_ROWS_BYTES // width} tokens a request, with extras")
    rows = np.zeros((len(tokens) // TOKEN_BYTES, width), np.uint8)
    rows[:, :TOKEN_BYTES] = np.frombuffer(tokens, np.uint8).reshape(-1, TOKEN_BYTES)
    seen: set[int] = set()
    for position, digest in extras:
        place = position - first
        if not 0 <= place < len(rows) or place in seen:
            raise BadRequest(f"extras: position {position} is outside of the tokens or named twice")
        if digest == NO_EXTRA:
            raise BadRequest(f"extras: the digest at {position} is all zeros, which means none")
        seen.add(place)
        rows[place, TOKEN_BYTES:] = np.frombuffer(digest, np.uint8)
    return rows.tobytes()
