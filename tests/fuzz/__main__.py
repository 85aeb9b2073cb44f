"""`python -m tests.fuzz`: say what is hostile and broken to all that reads, for a given time."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from kvd.testing.daemons import running_daemon
from tests.fuzz.mob import SETTINGS, riot
from tests.fuzz.readers import Readers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="in all, three parts of it")
    parser.add_argument("--seed", type=int, default=0, help="the same seed says the same")
    args = parser.parse_args()
    seconds = args.seconds / 3
    read_frames(seconds, args.seed)
    status = read_with_coverage(seconds, args.seed)
    with running_daemon(SETTINGS) as daemon:
        outcomes = riot(daemon, args.seed, turns(seconds))
    print(f"riot: {outcomes.total()} answers: {dict(outcomes.most_common())}")
    return status


def turns(seconds: float) -> Iterator[int]:
    """Numbers, for so long."""
    end = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count())


def read_frames(seconds: float, seed: int) -> None:
    logging.disable(logging.WARNING)  # of a client that is refused again and again
    with TemporaryDirectory() as directory:
        readers = Readers(Path(directory), Random(seed))
        num_frames = 0
        for _ in turns(seconds):
            for frame in (*readers.hostile.request(), readers.hostile.reply()):
                num_frames += 1
                readers.read(frame)
    print(f"readers: {num_frames} frames")


def read_with_coverage(seconds: float, seed: int) -> int:
    """What leads into new places is tried further; its exit status."""
    if importlib.util.find_spec("atheris") is None:
        print("coverage: left out, atheris cannot be had for this Python")
        return 0
    command = [sys.executable, "-m", "tests.fuzz.coverage"]
    limits = [f"-max_total_time={max(1, int(seconds))}", f"-seed={seed + 1}"]  # 0 would be any
    return subprocess.run([*command, *limits]).returncode


if __name__ == "__main__":
    sys.exit(main())
