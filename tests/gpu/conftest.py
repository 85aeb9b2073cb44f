"""What needs a GPU: `tests/gpu/check.sh` runs it all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvd.arena.device import use_plain_segments
from kvd.arena.membership import create_session_file
from tests.arena.conftest import child, shm  # noqa: F401 - fixtures


@pytest.fixture(autouse=True, scope="session")
def gpu() -> torch.device:
    """The GPU of these tests, of which all are skipped without one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    use_plain_segments()
    return torch.device("cuda", 0)


@pytest.fixture
def session(shm: Path) -> Path:  # noqa: F811
    create_session_file(shm / "session")
    return shm / "session"
