"""The LMDB tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.protocol.units import ByteSize
from kvd.testing.tier_suite import MakeStoreTier, StoreTierSuite
from kvd_tiers.lmdb import LmdbConfig, LmdbTier

NO_FLOOR = ByteSize(0)


def make(directory: Path, capacity_bytes: int) -> LmdbTier:
    return LmdbTier(LmdbConfig(ByteSize(capacity_bytes), free_floor_bytes=NO_FLOOR), directory)


def make_plain(directory: Path, capacity_bytes: int) -> LmdbTier:
    config = LmdbConfig(ByteSize(capacity_bytes), writemap=False, nosync=True)
    return LmdbTier(config, directory)


class TestTheSuite(StoreTierSuite):
    @pytest.fixture(params=[make, make_plain], ids=["synced by map", "plain"])
    def make_tier(self, request: pytest.FixtureRequest) -> MakeStoreTier:
        make_tier: MakeStoreTier = request.param
        return make_tier
