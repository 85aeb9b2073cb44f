"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvd.protocol.units import ByteSize, decode_size, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1KiB", 1 << 10),
        ("512MiB", 512 << 20),
        ("8GiB", 8 << 30),
        ("1.5 gib", 3 << 29),
        (" 2TiB ", 2 << 40),
    ],
)
def test_a_size_is_read_as_it_is_written(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "8GB", "8G", "-1GiB", "1e3", "1,5GiB", "8GiB!", "0x10"]
)
def test_what_is_no_size_is_refused_with_what_is_understood(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_bytes(text)


@given(st.integers(1, 999), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_a_round_size_comes_back_as_it_was_written(count: int, unit: str) -> None:
    text = f"{count}{unit}"
    assert format_bytes(parse_bytes(text)) == str(parse_bytes(text)) == text


@given(st.integers(0, 1 << 63))
@example((1 << 53) + 1)
def test_a_number_of_bytes_is_read_exactly(size: int) -> None:
    assert parse_bytes(str(size)) == size


class Section(msgspec.Struct):
    capacity_bytes: ByteSize


@pytest.mark.parametrize("value", ["1MiB", 1 << 20])
def test_a_configuration_may_say_a_number_or_a_text(value: Any) -> None:
    section = msgspec.convert({"capacity_bytes": value}, Section, dec_hook=decode_size)
    assert section.capacity_bytes == 1 << 20
    assert isinstance(section.capacity_bytes, ByteSize)


@pytest.mark.parametrize("value", [True, -1, 1.5, None, "many", ["1MiB"]])
def test_a_configuration_may_say_nothing_else(value: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match="capacity_bytes"):
        msgspec.convert({"capacity_bytes": value}, Section, dec_hook=decode_size)
