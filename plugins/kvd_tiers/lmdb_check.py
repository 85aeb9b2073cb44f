"""Whether an LMDB environment is whole, told by a process that may die of the answer.

A damaged file ends who maps it by SIGBUS or SIGABRT, so nothing is mapped here before every page of
every tree was looked at: `python -m kvd_tiers.lmdb_check FOLDER`, exit status 0 if it is whole.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lmdb.verify import VerifyError, verify

# Two GiB of records take less than a second; what takes so much longer is as good as damaged.
BASE_SECONDS = 60.0
BYTES_A_SECOND = 1 << 30


def damage(folder: Path) -> str:
    """What a child process found wrong with an environment; empty if it is whole."""
    size = (folder / "data.mdb").stat().st_size
    patience = BASE_SECONDS + size / BYTES_A_SECOND
    command = [sys.executable, "-m", "kvd_tiers.lmdb_check", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return f"its check did not end within {patience:.0f} seconds"
    if done.returncode == 0:
        return ""
    return done.stdout.strip() or f"its check ended with status {done.returncode}: {done.stderr}"


def main() -> int:
    try:
        problems = verify(sys.argv[1])
    except (OSError, VerifyError) as error:
        problems = [str(error)]
    if problems:
        print(f"{problems[0]} ({len(problems)} in all)")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
