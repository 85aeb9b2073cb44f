"""Frames that are hostile or broken are read or refused."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.readers import Readers


@given(st.integers(min_value=0, max_value=(1 << 32) - 1))
def test_requests_and_replies_are_read_or_refused(seed: int) -> None:
    with TemporaryDirectory() as directory:
        readers = Readers(Path(directory), Random(seed))
        for frame in (*readers.hostile.request(), readers.hostile.reply(), readers.hostile.reply()):
            readers.read(frame)
