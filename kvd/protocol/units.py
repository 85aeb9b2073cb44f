"""Sizes as people write them: "8GiB"."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_FACTORS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


# The largest that whoever is told of it can read, in whatever language.
MAX_INTEGER = (1 << 63) - 1


class ByteSize(int):
    """A number of bytes; in a configuration also written as "512MiB"."""

    def __str__(self) -> str:
        return format_bytes(self)


def parse_bytes(text: str) -> ByteSize:
    """Raises ValueError, saying what is understood."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 8GiB")
    return ByteSize(Fraction(found[1]) * _FACTORS[found[2].upper()])


def format_bytes(size: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= (factor := _FACTORS[unit.upper()]):
            return f"{size / factor:.4g}{unit}"
    return f"{int(size)}B"


def decode_size(kind: type, value: Any) -> Any:
    """The hook by which msgspec reads ByteSize from a configuration."""
    if kind is not ByteSize:
        raise NotImplementedError(f"{kind} cannot be read")
    size = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MAX_INTEGER:
        return ByteSize(size)
    raise ValueError(f"{value!r} is not a size such as 512MiB or 8GiB")
