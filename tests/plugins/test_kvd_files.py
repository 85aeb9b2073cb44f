"""The worked example of a plugin: it passes the suite, and is found by its name once installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.protocol.units import ByteSize
from kvd.testing.tier_suite import MakeStoreTier, StoreTierSuite
from tests.plugins.installing import install

if TYPE_CHECKING:
    from kvd.tiers.base import StoreTier

PLUGIN = Path(__file__).parent / "kvd_files"
LOAD = """
import sys
from pathlib import Path
from kvd.tiers.registry import load_tier
tier = load_tier({"type": "files", "capacity_bytes": "1MiB"}, Path("/nowhere"), Path(sys.argv[1]))
tier.open(1)
print(type(tier).__module__, tier.name, tier.capacity_bytes)
"""
SMALLER = """
import pytest
from kvd_files import FilesConfig, FilesTier
from kvd.protocol.units import ByteSize
from kvd.testing.tier_suite import StoreTierSuite
class TestSmaller(StoreTierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda directory, _: FilesTier(FilesConfig(ByteSize(1 << 20)), directory)
"""


def make(directory: Path, capacity_bytes: int) -> StoreTier:
    from kvd_files import FilesConfig, FilesTier  # only there while the folder is on the path

    return FilesTier(FilesConfig(ByteSize(capacity_bytes)), directory)


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(PLUGIN)
    yield
    sys.modules.pop("kvd_files", None)


class TestTheSuite(StoreTierSuite):
    @pytest.fixture
    def make_tier(self) -> MakeStoreTier:
        return make


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder into which the plugin is installed."""
    folder = tmp_path / "installed"
    source = tmp_path / "source"
    source.mkdir()
    for path in PLUGIN.glob("*.*"):
        (source / path.name).write_bytes(path.read_bytes())
    install(source, folder)
    return folder


def test_it_is_found_by_its_name_once_it_is_installed(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=":")
    data = tmp_path / "data"
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(data)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["kvd_files", "files", "1MiB"]
    assert (data / "files" / "files.lock").exists()


def test_what_the_suite_finds_is_shown_with_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN), prepend=":")
    (tmp_path / "test_smaller.py").write_text(SMALLER)
    command = [sys.executable, "-m", "pytest", "-k", "it_says_what_it_is", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "assert 1048576 == 16777216" in done.stdout
