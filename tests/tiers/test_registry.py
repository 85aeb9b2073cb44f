"""Tiers by entry point: ours use the same door as everybody's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvd.config import parse
from kvd.daemon import Daemon
from kvd.protocol.errors import ConfigError
from kvd.testing.daemons import running_daemon
from kvd.tiers.registry import load_tier
from kvd_client.client import Client
from kvd_tiers.host import HostTier
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import IDENTITY, LAYOUT, settings, store, tokens_of

PLUGIN = '''
"""A tier of somebody else's: ours under another name, with a key of its own."""
import msgspec
from kvd.protocol.errors import ConfigError
from kvd.tiers.base import StoreTier
from kvd_tiers.host import HostConfig, HostTier

class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    colour: str
    capacity_bytes: int = 65536

class PaintedTier(HostTier):
    Config = Config
    name = "painted"

    def __init__(self, config, directory):
        if config.colour == "none":
            raise ConfigError("a tier without colour")
        super().__init__(HostConfig(config.capacity_bytes), directory)
        self.colour = config.colour

    def check(self):
        if self.colour == "unseen":
            raise OSError("no light")

class HalfTier(StoreTier):
    Config = Config
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with an entry point."""
    (tmp_path / "painted_tier.py").write_text(PLUGIN)
    (tmp_path / "broken_tier.py").write_text("import nonesuch_library\n")
    info = tmp_path / "painted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: painted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvd.tiers]\npainted = painted_tier:PaintedTier\nbroken = broken_tier:Tier\n"
        "half = painted_tier:HalfTier\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_our_tier_comes_through_the_door(shm: Path) -> None:  # noqa: F811
    tier = load_tier({"type": "host", "capacity_bytes": "1MiB"}, shm, shm)
    assert type(tier) is HostTier
    assert tier.capacity_bytes == 1 << 20


def test_somebody_elses_tier_comes_through_the_same_door(plugin: Path, shm: Path) -> None:  # noqa: F811
    tier = load_tier({"type": "painted", "colour": "red"}, shm, shm)
    assert (tier.name, tier.capacity_bytes) == ("painted", 1 << 16)


def test_a_daemon_runs_with_somebody_elses_tier(
    plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(plugin), prepend=":")
    document = settings() | {"tiers": [{"type": "painted", "colour": "red"}]}
    with running_daemon(document) as daemon, Client(daemon.endpoint, timeout=30.0) as client:
        assert "painted tier: up to 64KiB" in daemon.ready_line
        namespace = client.open(IDENTITY, LAYOUT)
        store(namespace, tokens_of(1, 4))
        assert namespace.match(tokens_of(1, 4)).tokens_by_tier == {"painted": 16}


def test_an_unknown_type_is_answered_with_the_known_ones(plugin: Path, tmp_path: Path) -> None:
    for section in ({"type": "nonesuch"}, {}, {"type": 3}, {"type": None}):
        with pytest.raises(
            ConfigError, match="known here: broken, faulty, half, host, lmdb, painted"
        ):
            load_tier(section, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "host", "capacity": 1}, "tiers, type host: .*capacity"),
        ({"type": "host", "capacity_bytes": "much"}, "tiers, type host: .*not a size"),
        ({"type": "host", "capacity_bytes": -1}, "not a size"),
        ({"type": "host", "directory": "relative"}, "'relative' is not absolute"),
        ({"type": "painted"}, "tiers, type painted: .*colour"),
        ({"type": "painted", "colour": 3}, "tiers, type painted: .*colour"),
        ({"type": "painted", "colour": "none"}, "a tier without colour"),
    ],
)
def test_keys_that_a_tier_cannot_use_are_refused_by_name(
    plugin: Path, tmp_path: Path, section: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        load_tier(section, tmp_path, tmp_path)


def test_a_check_that_fails_is_told_of_with_the_tier(plugin: Path, tmp_path: Path) -> None:
    config = parse(
        {"directory": f"{tmp_path}/kvd", "tiers": [{"type": "painted", "colour": "unseen"}]}
    )
    with pytest.raises(ConfigError, match="tiers, painted: cannot be checked: OSError: no light"):
        Daemon(config).check()


def test_of_a_plugin_that_lacks_something_it_is_said_what(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"type half: cannot be made: .*create_store"):
        load_tier({"type": "half", "colour": "red"}, tmp_path, tmp_path)


def test_a_plugin_that_cannot_be_imported_is_named(plugin: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="broken"):
        load_tier({"type": "broken"}, tmp_path, tmp_path)
