"""Whether an LMDB environment is whole, told by a process that may die of the answer.

A damaged file ends who maps it by SIGBUS or SIGABRT, so nothing is mapped here before every page of
every tree was looked at: `python -m kvd_tiers.lmdb_check FOLDER`, exit status 0 if it is whole.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

from lmdb.verify import VerifyError, verify

from kvd.protocol.errors import TierFailed

# Two GiB of records take less than a second; what takes so much longer is as good as damaged.
BASE_SECONDS = 60.0
BYTES_A_SECOND = 1 << 30
LOOK_SECONDS = 1.0
UNREADABLE = 2  # the exit status of who cannot tell


def damage(folder: Path, moved: Callable[[], None] = lambda: None) -> str:
    """What a child process found wrong with an environment; empty if it is whole.

    `moved` is told meanwhile that there is hope. Raises TierFailed where it cannot be read.
    """
    size = (folder / "data.mdb").stat().st_size
    patience = BASE_SECONDS + size / BYTES_A_SECOND
    command = [sys.executable, "-m", "kvd_tiers.lmdb_check", str(folder)]
    end = time.monotonic() + patience
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as child:
        while True:
            try:
                said, complaint = child.communicate(timeout=min(LOOK_SECONDS, patience))
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    child.kill()
                    return f"its check did not end within {patience:.0f} seconds"
                moved()
    if child.returncode == UNREADABLE:
        raise TierFailed(f"{folder} cannot be looked through: {said.strip()}")
    if child.returncode == 0:
        return ""
    return said.strip() or f"its check ended with status {child.returncode}: {complaint}"


def main() -> int:
    try:
        problems = verify(sys.argv[1])
    except OSError as error:
        print(error)
        return UNREADABLE
    except VerifyError as error:
        problems = [str(error)]
    if problems:
        print(f"{problems[0]} ({len(problems)} in all)")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
