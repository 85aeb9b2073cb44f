"""start_seconds and start_memory_mib: how soon an idle daemon is ready, and what it takes."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.bench.common import Bench, Row, row, running_daemon, seconds

CAPACITY = 1 << 30
KVD = Path(sys.executable).with_name("kvd")


def start_seconds(bench: Bench) -> Iterator[Row]:
    found = []
    for number in range(bench.pick(9, 2)):
        bench.say(f"start {number + 1}")
        with running_daemon(CAPACITY, command=(str(KVD),)) as daemon:
            found.append(daemon.seconds_to_ready)
    total, packages = _import_seconds()
    largest = sorted(packages.items(), key=lambda item: -item[1])[:5]
    told = ", ".join(f"{name} {seconds(spent)}" for name, spent in largest)
    yield row(
        "start_seconds",
        statistics.median(found),
        "s",
        f"from exec of kvd to its ready line, median of {len(found)} (fastest "
        f"{seconds(min(found))}, slowest {seconds(max(found))}); imports take "
        f"{seconds(total)} under -X importtime, most of it {told}",
    )


def start_memory_mib(bench: Bench) -> Iterator[Row]:
    bench.say("starting a daemon that nobody uses")
    with running_daemon(CAPACITY, command=(str(KVD),)) as daemon:
        process = Path(f"/proc/{daemon.pid}")
        status = (process / "status").read_text()
        has_torch = "torch" in (process / "maps").read_text()
    memory = {name: int(size) / 1024 for name, size in re.findall(r"(\w+):\s+(\d+) kB", status)}
    yield row(
        "start_memory_mib",
        memory["RssAnon"],
        "MiB",
        f"RssAnon of an idle daemon; beside it {memory['RssFile']:.0f} MiB of mapped files and "
        f"{memory['RssShmem']:.1f} MiB of shared memory; torch is "
        f"{'IMPORTED, which it never should be' if has_torch else 'not imported'}",
    )


def _import_seconds() -> tuple[float, dict[str, float]]:
    """Seconds of imports of the `kvd` command in all, and by package."""
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import kvd.__main__, kvd_tiers.host"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    packages: dict[str, float] = defaultdict(float)
    for spent, name in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", told):
        packages[name.split(".")[0]] += int(spent) * 1e-6
    return sum(packages.values()), packages
