"""Where figures were taken: the machine, its memory settings, the versions that matter."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def describe_machine() -> dict[str, str | int | float]:
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "huge_pages": _chosen("enabled"),
        "huge_pages_shmem": _chosen("shmem_enabled"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "pyzmq": version("pyzmq"),
    }


def _chosen(setting: str) -> str:
    """The word in brackets of a setting of transparent huge pages."""
    path = HUGE_PAGES / setting
    chosen = re.search(r"\[(\w+)\]", path.read_text()) if path.exists() else None
    return chosen[1] if chosen else "none"
