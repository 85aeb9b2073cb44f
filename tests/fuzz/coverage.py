"""`python -m tests.fuzz.coverage`: fuzzing led by coverage; libFuzzer's own options behind it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["kvd", "kvd_client"]):
    from tests.fuzz.readers import Readers


def main() -> None:
    logging.disable(logging.WARNING)
    with TemporaryDirectory() as directory:
        here = Path(directory)
        readers = Readers(here, Random(0))
        seeds = here / "seeds"
        seeds.mkdir()
        for number in range(500):
            (seeds / f"request-{number}").write_bytes(readers.hostile.request()[0])
            (seeds / f"reply-{number}").write_bytes(readers.hostile.reply())
        atheris.Setup([*sys.argv, str(seeds)], readers.read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
