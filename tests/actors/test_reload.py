"""A reload: what becomes another, what stays, and that nobody goes by what was before."""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest
from blockbuster import BlockBuster

from kvd.actors.reload import AT_START, HIDDEN
from kvd.config import Config, flat, parse
from kvd.daemon import Daemon
from kvd.loading import Loaded, load
from kvd.protocol.errors import ConfigError, Unsupported
from kvd.testing.daemons import to_toml
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import settings

# Each key that a reload may change, and another value for it. A new key stands here, when its part
# reads it as it needs it, or in AT_START.
CHANGES: dict[str, Any] = {
    "grace_seconds": 4.0,
    "cache.high_watermark": 0.9,
    "cache.low_watermark": 0.8,
    "cache.demote_watermark": 0.7,
    "cache.admission": "reused",
    "cache.checkpoint_seconds": 200.0,
    "cache.scrub_bytes": 1 << 20,
    "cache.back_ahead_bytes": 1 << 20,
    "sessions.heartbeat_seconds": 1.0,
    "sessions.silent_seconds": 5.0,
    "sessions.sweep_seconds": 0.4,
    "limits.sessions": 100,
    "limits.session_leases": 100,
    "limits.session_reserved_fraction": 0.8,
    "limits.namespaces": 100,
    "limits.session_namespaces": 100,
    "limits.layouts": 10,
    "limits.pins": 100,
    "limits.pinned_fraction": 0.4,
    "limits.owner_pinned_fraction": 0.2,
    "limits.sequences": 100,
    "limits.sequence_bytes": 1 << 20,
    "limits.session_waiting": 10,
    "limits.batch_items": 100,
    "limits.wait_seconds": 30.0,
    "log.level": "debug",
    "log.format": "json",
    "quotas": [{"max_bytes": 1 << 20}],
    "clients": [{"name": "engine", "key": "k" * 40, "salts": ["a"]}],
}


def document(base: Path, **sections: Any) -> dict[str, Any]:
    places = {"endpoint": f"ipc://{base}/kvd.sock", "directory": f"{base}/kvd"}
    return (
        settings(cache={}, sessions={}, limits={}, data_directory=f"{base}/data", **places)
        | sections
    )


def with_changes(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (document.setdefault(section, {}) if section else document)[name] = value
    return document


@asynccontextmanager
async def running(base: Path, then: dict[str, Any], **options: Any) -> AsyncGenerator[Daemon]:
    """A daemon with defaults that is to load another configuration."""

    def again() -> Loaded:
        return Loaded(parse(then), again=again)

    async with Daemon(Loaded(parse(document(base)), again=again), **options) as daemon:
        yield daemon


def test_of_every_key_it_is_said_whether_a_reload_changes_it() -> None:
    at_start = {key for key in flat(Config()) if {key, key.partition(".")[0]} & AT_START}
    assert set(CHANGES) | at_start == set(flat(Config()))
    assert not set(CHANGES) & at_start


async def test_all_that_may_change_does(shm: Path) -> None:  # noqa: F811
    wanted = with_changes(document(shm), CHANGES)
    async with running(shm, wanted) as daemon:
        done = await daemon.reload()
        assert daemon.config == parse(wanted)
    assert {change.key for change in done.changed} == set(CHANGES)
    assert not done.needs_restart


async def test_no_part_keeps_a_section_of_before(shm: Path) -> None:  # noqa: F811
    async with running(shm, with_changes(document(shm), CHANGES)) as daemon:
        before = [daemon.config.cache, daemon.config.sessions, daemon.config.limits]
        await daemon.reload()
        gc.collect()
        holders = [each for each in gc.get_referrers(*before) if each is not before]
        assert [each for each in holders if not isinstance(each, FrameType)] == []


async def test_what_was_made_of_a_value_is_made_anew(shm: Path) -> None:  # noqa: F811
    changes = {"limits.pins": 7, "limits.pinned_fraction": 0.25, "cache.admission": "reused"}
    wanted = with_changes(document(shm), changes)
    wanted["tiers"] = [*wanted["tiers"], {"type": "lmdb", "capacity_bytes": "16MiB"}]
    start = document(shm, tiers=wanted["tiers"])
    async with Daemon(Loaded(parse(start), again=lambda: Loaded(parse(wanted)))) as daemon:
        await daemon.reload()
        state = daemon._manager.state
        assert state.pins.max_pins == 7
        assert state.pins.max_bytes == int(state.memory.capacity_bytes * 0.25)
        assert [store.admission for store in state.stores] == ["reused"]


async def test_what_needs_a_restart_stays_and_is_named(shm: Path) -> None:  # noqa: F811
    tiers = [{"type": "host", "capacity_bytes": "1MiB", "directory": f"{shm}/other"}]
    changes = {"limits.request_bytes": 1 << 20, "limits.pins": 3, "hang_seconds": 9.0}
    wanted = with_changes(document(shm, tiers=tiers), changes)
    async with running(shm, wanted) as daemon:
        done = await daemon.reload()
        assert daemon.config == parse(with_changes(document(shm), {"limits.pins": 3}))
    assert {each.key for each in done.needs_restart} == {
        "tiers",
        "limits.request_bytes",
        "hang_seconds",
    }
    assert [(each.key, each.before, each.after) for each in done.changed] == [
        ("limits.pins", 1024, 3)
    ]


async def test_origins_are_those_of_what_is_gone_by(shm: Path) -> None:  # noqa: F811
    wanted = with_changes(document(shm), {"limits.pins": 3, "hang_seconds": 9.0})
    origins = {"limits.pins": "file x", "hang_seconds": "file x"}
    start = Loaded(parse(document(shm)), again=lambda: Loaded(parse(wanted), origins))
    async with Daemon(start) as daemon:
        await daemon.reload()
        listed = {each.key: (each.value, each.origin) for each in daemon.listed()}
    assert listed["limits.pins"] == (3, "file x")
    assert listed["hang_seconds"] == (60.0, "default")


@pytest.mark.parametrize(
    "changes",
    [
        {"tiers": [{"type": "nonesuch"}]},
        {"tiers": [{"type": "host", "capacity_bites": 1}]},
        {"endpoint": "ipc://nowhere"},
    ],
)
async def test_what_a_start_would_refuse_changes_nothing(
    shm: Path,  # noqa: F811
    changes: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(shm, document(shm, limits={"pins": 3}, **changes)) as daemon:
        with pytest.raises(ConfigError) as refused:
            await daemon.reload()
        assert daemon.config == parse(document(shm))
    assert f"reason=not_reloaded {refused.value}" in caplog.text


async def test_the_program_around_it_does_its_own_part(shm: Path) -> None:  # noqa: F811
    told: list[Config] = []
    wanted = with_changes(document(shm), {"log.level": "debug"})
    async with running(shm, wanted, on_reload=told.append) as daemon:
        await daemon.reload()
    assert [config.log.level for config in told] == ["debug"]


async def test_what_a_program_made_is_not_loaded_anew(shm: Path) -> None:  # noqa: F811
    async with Daemon(parse(document(shm))) as daemon:
        with pytest.raises(Unsupported, match="the program that it runs in"):
            await daemon.reload()


async def test_reloads_come_one_after_the_other(
    shm: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvd")
    wanted = with_changes(document(shm), {"limits.pins": 3})
    async with running(shm, wanted) as daemon, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(daemon.reload)
    assert caplog.messages.count("reloaded; changed: limits.pins") == 1
    assert caplog.messages.count("reloaded; changed: nothing") == 2


async def test_a_reload_never_blocks_the_loop(shm: Path) -> None:  # noqa: F811
    path = shm / "kvd.toml"
    path.write_text(to_toml(document(shm)))
    async with Daemon(load(path)) as daemon:
        path.write_text(to_toml(with_changes(document(shm), CHANGES)))
        detector = BlockBuster("kvd")
        detector.activate()
        try:
            assert len((await daemon.reload()).changed) == len(CHANGES)
        finally:
            detector.deactivate()


def test_of_a_plugin_what_is_secret_is_not_told(shm: Path) -> None:  # noqa: F811
    disk = {"type": "lmdb", "api_token": "hush", "key_path": "/etc/kvd/key"}
    daemon = Daemon(parse(document(shm)))
    daemon._reloader._loaded = Loaded(
        parse(document(shm, tiers=[{"type": "faulty", "tier": disk}]))
    )
    (tier,) = next(each.value for each in daemon.listed() if each.key == "tiers")
    assert tier["tier"] == {"type": "lmdb", "api_token": HIDDEN, "key_path": "/etc/kvd/key"}
