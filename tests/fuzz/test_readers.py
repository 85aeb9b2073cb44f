"""Frames that are hostile or broken are read or refused."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.readers import Readers

if TYPE_CHECKING:
    from random import Random

randoms = st.randoms(use_true_random=False)


@given(randoms)
def test_requests_and_replies_are_read_or_refused(rng: Random) -> None:
    with TemporaryDirectory() as directory:
        readers = Readers(Path(directory), rng)
        for frame in (*readers.hostile.request(), readers.hostile.reply(), readers.hostile.reply()):
            readers.read(frame)
