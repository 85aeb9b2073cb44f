"""Runs inside a box: commands come as lines of JSON, and what became of them goes back so."""

from __future__ import annotations

import json
import subprocess
import sys


def main() -> None:
    for line in sys.stdin:
        done = subprocess.run(json.loads(line), capture_output=True, text=True)
        print(json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)


if __name__ == "__main__":
    main()
