#!/bin/sh
# Runs all that needs a GPU, in less than three minutes: tests/gpu/check.sh [pytest's arguments]
#
# With the Python in $PYTHON, else the one in .venv, else, where that has not all, one in .venv-gpu
# that is made here and needs a package index.
set -eu
cd "$(dirname "$0")/../.."

has_all() {
    "$1" -c '
import anyio, pytest, torch
from importlib.metadata import entry_points
entry_points(group="kvd.tiers")["torch"].load()
' 2>/dev/null
}

python=${PYTHON:-.venv/bin/python}
if ! has_all "$python"; then
    python=.venv-gpu/bin/python
    if ! has_all "$python"; then
        python3 -m venv .venv-gpu
        "$python" -m pip install --quiet --editable ".[dev]"
    fi
fi
"$python" -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.device_count(), "GPUs")'
exec timeout 180 "$python" -m pytest -rs -p no:cacheprovider tests/gpu "$@"
