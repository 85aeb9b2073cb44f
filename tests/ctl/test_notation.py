from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import typer

from kvd_ctl.notation import format_duration, parse_duration, parse_tokens

ONE_TO_THREE = b"\1\0\0\0\2\0\0\0\3\0\0\0"


@pytest.mark.parametrize("text", ["1,2,3", "1, 2, 3", "[1,2,3]"])
def test_tokens_are_a_list(text: str) -> None:
    assert parse_tokens(text) == ONE_TO_THREE


def test_a_file_has_a_list(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text("[1,\n 2,\n 3]\n")
    assert parse_tokens(f"@{path}") == ONE_TO_THREE


def test_a_binary_file_has_the_tokens_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(ONE_TO_THREE)
    assert parse_tokens(f"@{path}") == ONE_TO_THREE


def test_stdin_has_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[1,2,3]\n")))
    assert parse_tokens("-") == ONE_TO_THREE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tokens"),
        ("[]", "no tokens"),
        ("1,x", "not a list of token ids"),
        ("1,-2", "not a list of token ids"),
        ("4294967296", "not a list of token ids"),
        ("1.5", "not a list of token ids"),
        ("@/nowhere/tokens", "/nowhere/tokens: No such file"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused(text: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        parse_tokens(text)


def test_a_binary_file_of_odd_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(ONE_TO_THREE[:-1])
    with pytest.raises(typer.BadParameter, match="11 bytes"):
        parse_tokens(f"@{path}")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("7d", 604_800), ("1.5m", 90)]
)
def test_a_duration_has_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "h", "-1s", "1w", "0s", "366d", "1h30m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (59.9, "59.9s"), (60, "1.0m"), (5400, "1.5h"), (9e6, "104.2d")],
)
def test_a_duration_is_told_in_its_largest_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_what_has_no_end_is_no_prompt() -> None:
    with pytest.raises(typer.BadParameter, match="more than 256MiB"):
        parse_tokens("@/dev/zero")
