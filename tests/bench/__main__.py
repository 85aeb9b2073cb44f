"""`python -m tests.bench`: run the benchmarks, show the figures, write bench.json."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.bench.alternatives import alternatives
from tests.bench.attention import (
    attention_step,
    attention_vs_contiguous,
    attention_vs_gather,
)
from tests.bench.common import BUDGETS, Bench, Part, Row
from tests.bench.cycles import cycles
from tests.bench.disk import disk
from tests.bench.first_touch import hit_first_touch
from tests.bench.flood import flood
from tests.bench.hit import hit_vs_copy
from tests.bench.index import index
from tests.bench.infer import infer
from tests.bench.machine import describe_machine
from tests.bench.match import match_vs_echo
from tests.bench.recovery import recovery
from tests.bench.replay import replay
from tests.bench.runs import median_run_tokens
from tests.bench.start import start_memory_mib, start_seconds
from tests.bench.store import store_vs_copy

PARTS: dict[str, Part] = {
    part.__name__: part
    for part in (
        hit_vs_copy,
        hit_first_touch,
        match_vs_echo,
        cycles,
        flood,
        store_vs_copy,
        disk,
        attention_vs_contiguous,
        attention_vs_gather,
        attention_step,
        median_run_tokens,
        replay,
        index,
        recovery,
        start_seconds,
        start_memory_mib,
        alternatives,
        infer,
    )
}
RESULTS = Path(__file__).parent / "results"
OUTPUT = Path("bench.json")


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    console = Console(highlight=False)
    rows: list[Row] = []
    for name in args.parts or PARTS:
        rows += run_part(name, console, tiny=args.tiny)
    OUTPUT.write_bytes(_json(rows))
    _show(rows, console, tiny=args.tiny)
    if args.record:
        path = RESULTS / f"{args.record}.json"
        path.write_bytes(_json({"machine": describe_machine(), "figures": rows}))
        console.print(f"recorded in {path}")
    return int(args.check and not all(row.met for row in rows))


def run_part(name: str, console: Console, *, tiny: bool) -> list[Row]:
    start = time.monotonic()

    def say(line: str) -> None:
        console.print(
            f"[dim]{time.monotonic() - start:6.1f} s[/]  {name}: {escape(line)}", soft_wrap=True
        )

    rows = list(PARTS[name](Bench(say, tiny)))
    for row in rows:
        say(f"{row.name} = {_figure(row)}")
    return rows


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="Measure kvd, each figure as a ratio within this run; writes bench.json here.",
        epilog="Example: python -m tests.bench hit_vs_copy match_vs_echo --check",
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"all unless said; one of {', '.join(PARTS)}"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a budget is missed")
    parser.add_argument(
        "--record", metavar="NAME", help="keep figures and machine as results/NAME.json"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="prove that all works, in seconds; figures mean nothing"
    )
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return args


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _show(rows: Sequence[Row], console: Console, *, tiny: bool) -> None:
    for row in rows:
        console.print(f"\n[bold]{row.name}[/]: {escape(row.detail)}")
    table = Table("figure", "value", "budget", "")
    for row in rows:
        budget = BUDGETS.get(row.name)
        verdict = "" if budget is None else "[green]met[/]" if row.met else "[red]missed[/]"
        table.add_row(row.name, _figure(row), str(budget or ""), verdict)
    console.print(table)
    missed = [row.name for row in rows if not row.met]
    if tiny:
        console.print("These sizes are tiny: the figures mean nothing.")
    elif missed:
        console.print(f"[red]{len(missed)} missed their budget: {', '.join(missed)}[/]")
    else:
        console.print("Every figure that has a budget met it.")


def _figure(row: Row) -> str:
    return f"{row.value:{',.0f' if row.value >= 1000 else '.3g'}} {row.unit}"


if __name__ == "__main__":
    sys.exit(main())
