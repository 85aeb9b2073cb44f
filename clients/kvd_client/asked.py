"""What callers ask for: tokens, extras, numbers of pages; what is none is refused."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvd.protocol.codec import TOKEN_BYTES, TokenIds, pack_tokens
from kvd.protocol.errors import BadRequest
from kvd.protocol.messages import EXTRA_BYTES

if TYPE_CHECKING:
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import Extras

# A position, and the EXTRA_BYTES that identify it beside its token.
ExtraItems: TypeAlias = Sequence[tuple[int, bytes]]

MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Asked:
    """What a match is of: packed tokens, and what else identifies their positions."""

    tokens: bytes
    extras: Extras

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


def asked_for(tokens: TokenIds, extras: ExtraItems) -> Asked:
    """Raises BadRequest for what are no tokens, or no extras of theirs."""
    packed = pack_tokens(tokens)
    return Asked(packed, pack_extras(extras, 0, len(packed) // TOKEN_BYTES))


def pages_for(num_tokens: int, layout: Layout) -> int:
    """Raises BadRequest for what is no number of tokens."""
    return -(-check_tokens(num_tokens) // layout.block_size)


def check_tokens(number: int) -> int:
    """A number of tokens; refuses what is none (BadRequest)."""
    if not 0 <= (tokens := whole(number)) <= MAX_TOKENS:
        raise BadRequest(f"{number} is no number of tokens up to {MAX_TOKENS}")
    return tokens


def whole(number: int) -> int:
    """Refuse what is no whole number (BadRequest)."""
    try:
        return operator.index(number)
    except TypeError as error:
        raise BadRequest(f"{number!r} is no whole number") from error


def pack_extras(extras: ExtraItems, start: int, stop: int) -> Extras:
    """Extras as on the wire; refuses what is none of a position in these tokens (BadRequest)."""
    if isinstance(extras, tuple) and not extras:
        return ()
    try:
        packed = tuple((operator.index(position), bytes(extra)) for position, extra in extras)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"extras are pairs of a position and {EXTRA_BYTES} bytes") from error
    for position, extra in packed:
        if not start <= position < stop or len(extra) != EXTRA_BYTES:
            raise BadRequest(
                f"an extra of {len(extra)} bytes at {position}: they have {EXTRA_BYTES} bytes and "
                f"stand at positions {start} to {stop - 1}"
            )
    return packed


def ahead_of(num_pages: int, layout: Layout) -> int:
    """How many pages to ask for beside these, so that runs are whole groups."""
    return -num_pages % layout.group_pages
