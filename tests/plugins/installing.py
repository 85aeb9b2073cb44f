"""Plugins are built and installed, without an index of packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def install(source: Path, target: Path) -> None:
    """Install the package in one folder into another; building leaves files beside its own."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(target), str(source)]
    subprocess.run(command, check=True)
