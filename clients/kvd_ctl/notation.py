"""How tokens and durations are written on a command line."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer

from kvd.protocol.codec import TOKEN_BYTES, pack_tokens
from kvd_client import format_bytes

SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
MAX_DAYS = 365
# Far more than a request may have: what is read may be endless.
MAX_BYTES = 256 << 20

_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]])


def parse_tokens(text: str) -> bytes:
    """Token ids as little-endian uint32, from "1,2,3", "@file" or "-", which is stdin.

    A file whose name ends in .bin has them as they are, any other a list as in JSON. Raises
    BadParameter, also for no tokens at all: to kvd they would mean every block.
    """
    tokens = _read(text)
    if not tokens:
        raise typer.BadParameter("there are no tokens in it")
    return tokens


def _read(text: str) -> bytes:
    if text == "-":
        return _packed(_all_of(sys.stdin.buffer, "stdin"))
    if not text.startswith("@"):
        return _packed(os.fsencode(text))
    path = Path(text[1:])
    try:
        with path.open("rb") as file:
            content = _all_of(file, text[1:])
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from error
    if path.suffix != ".bin":
        return _packed(content)
    if len(content) % TOKEN_BYTES:
        raise typer.BadParameter(f"{path}: {len(content)} bytes are no whole number of uint32")
    return content


def _all_of(file: BinaryIO, name: str) -> bytes:
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise typer.BadParameter(f"{name}: more than {format_bytes(MAX_BYTES)} are no prompt")
    return content


def _packed(text: bytes) -> bytes:
    try:
        ids = _ids.decode(text if text.lstrip().startswith(b"[") else b"[%b]" % text)
    except msgspec.MsgspecError as error:
        raise typer.BadParameter(f"not a list of token ids: {error}") from error
    return pack_tokens(ids)


def parse_duration(text: str) -> float:
    """Seconds, from "90s", "30m", "2h" or "7d". Raises BadParameter."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not found:
        raise typer.BadParameter(f"{text!r} is not a duration such as 90s, 30m, 2h or 7d")
    seconds = float(found[1]) * SECONDS[found[2]]
    if not 0 < seconds <= MAX_DAYS * SECONDS["d"]:
        raise typer.BadParameter(f"{text!r} is not more than 0s and at most {MAX_DAYS}d")
    return seconds


def format_duration(seconds: float) -> str:
    unit = next((unit for unit, factor in SECONDS.items() if seconds >= factor), "s")
    return f"{seconds / SECONDS[unit]:.1f}{unit}"
