"""`python -m tests.stress`: run a part; the last line says as JSON how it went."""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Sequence

import msgspec

from tests.stress.clients import clients
from tests.stress.common import Part, Stress
from tests.stress.crash import crash, crash_without_memory
from tests.stress.infer import infer

PARTS: dict[str, Part] = {
    part.__name__: part for part in (clients, crash, crash_without_memory, infer)
}


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    start = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {args.part}: {line}", flush=True)

    stress = Stress(args.seed, say, args.tiny, args.rounds)
    say(f"SEED={stress.seed}")
    try:
        PARTS[args.part](stress)
    except Exception as error:
        traceback.print_exc()
        stress.failures.append(f"{type(error).__name__}: {error}")
    print(_verdict(args.part, stress))
    return int(not stress.ok)


def _verdict(part: str, stress: Stress) -> str:
    verdict = {
        "ok": stress.ok,
        "seed": stress.seed,
        "part": part,
        "failures": stress.failures,
        "counts": dict(sorted(stress.counts.items())),
    }
    return msgspec.json.encode(verdict).decode()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stress",
        description="Do random work under random signals, and prove that nothing was mixed up.",
        epilog="Example: python -m tests.stress clients --seed 7",
    )
    parser.add_argument(
        "part", nargs="?", default="clients", choices=PARTS, help="clients unless said"
    )
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 32), help="repeats a run; random else"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often a daemon that crashes does so"
    )
    parser.add_argument("--tiny", action="store_true", help="prove in seconds that all works")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
