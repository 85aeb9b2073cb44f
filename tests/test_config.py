"""Config: what a file may say, and what is made of what it does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvd.config import Config, parse
from kvd.loading import load
from kvd.protocol.errors import ConfigError


def test_without_a_file_there_are_defaults() -> None:
    assert load().config == Config() == parse({})


def test_defaults_are_as_documented() -> None:
    config = Config()
    assert (config.grace_seconds, config.log.level, config.log.format) == (5.0, "info", "text")
    assert config.sessions.heartbeat_seconds < config.sessions.silent_seconds
    assert config.cache.low_watermark < config.cache.high_watermark < 1
    assert config.tiers == ({"type": "host"}, {"type": "lmdb"})


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text(
        'endpoint = "ipc:///tmp/x.sock"\ngrace_seconds = 1.5\n'
        '[cache]\nback_ahead_bytes = "1.5MiB"\nlow_watermark = 0.5\n'
        "[limits]\nsessions = 3\nrequest_bytes = 1048576\n"
        '[[tiers]]\ntype = "host"\ncapacity_bytes = "8GiB"\n'
    )
    config = load(path).config
    assert (config.endpoint, config.grace_seconds) == ("ipc:///tmp/x.sock", 1.5)
    assert (config.cache.back_ahead_bytes, config.cache.low_watermark) == (3 << 19, 0.5)
    assert (config.limits.sessions, config.limits.request_bytes) == (3, 1 << 20)
    assert config.tiers == ({"type": "host", "capacity_bytes": "8GiB"},)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"limits": {"pins": 1 << 63}}, "limits.pins"),
        ({"cache": {"scrub_bytes": 1 << 63}}, "cache.scrub_bytes"),
        ({"cache": {"scrub_bytes": "8388608TiB"}}, "cache.scrub_bytes"),
    ],
)
def test_what_no_reader_could_be_told_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(document)


UNKNOWN = [
    ({"endpiont": "x"}, r"unknown key endpiont; did you mean endpoint\?"),
    ({"cache": {"high_watermrk": 1}}, r"cache.high_watermrk; did you mean cache.high_watermark\?"),
    ({"limits": {"session": 1}}, r"limits.session; did you mean limits.sessions\?"),
    ({"log": {"levl": "info"}}, r"log.levl; did you mean log.level\?"),
    ({"quotas": [{}, {"max_byte": 1}]}, r"quotas\[1\].max_byte; .* mean quotas\[1\].max_bytes\?"),
    ({"tier": []}, r"unknown key tier; did you mean tiers\?"),
    ({"zzz": 1}, "unknown key zzz$"),
    ({"sessions": {"zzz": 1}}, "unknown key sessions.zzz$"),
    ({"cache": {"nonsense": 1}}, "unknown key cache.nonsense$"),
]


@pytest.mark.parametrize(("document", "message"), UNKNOWN)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    document: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(document)


BAD = [
    ({"grace_seconds": 0}, "grace_seconds"),
    ({"grace_seconds": -1}, "grace_seconds"),
    ({"grace_seconds": 86_401}, "grace_seconds"),
    ({"grace_seconds": "5"}, "grace_seconds"),
    ({"grace_seconds": float("nan")}, "grace_seconds"),
    ({"grace_seconds": float("inf")}, "grace_seconds"),
    ({"cache": {"high_watermark": 1.1}}, "high_watermark"),
    ({"cache": {"low_watermark": 0}}, "low_watermark"),
    ({"cache": {"low_watermark": 0.99}}, "low_watermark is above high_watermark"),
    ({"cache": {"high_watermark": float("nan")}}, "high_watermark"),
    ({"cache": {"back_ahead_bytes": "lots"}}, "'lots' is not a size such as 512MiB"),
    ({"cache": {"back_ahead_bytes": "8 GB"}}, "not a size"),
    ({"cache": {"back_ahead_bytes": -1}}, "not a size"),
    ({"cache": {"back_ahead_bytes": True}}, "not a size"),
    ({"cache": {"back_ahead_bytes": 1.5}}, "not a size"),
    ({"cache": 3}, "cache"),
    ({"limits": {"sessions": 0}}, "sessions"),
    ({"limits": {"batch_items": 1.5}}, "batch_items"),
    ({"limits": {"request_bytes": 0}}, "request_bytes"),
    ({"limits": {"request_bytes": 1 << 63}}, "request_bytes"),
    ({"sessions": {"heartbeat_seconds": 0}}, "heartbeat_seconds"),
    ({"log": {"level": "loud"}}, "log.level: .*'loud'; it may be debug, info, warning, error"),
    ({"quotas": [{"max_bytes": "lots"}]}, r"quotas\[0\].max_bytes: 'lots' is not a size"),
    ({"quotas": [{"max_bytes": 1, "guaranteed_bytes": 2}]}, "guaranteed_bytes is above max_bytes"),
    ({"log": {"format": "xml"}}, "format"),
    ({"http": {"endpoint": "0.0.0.0:9464"}}, "not a port of this machine alone"),
    ({"http": {"endpoint": "127.0.0.1"}}, "not a port of this machine alone"),
    ({"http": {"endpoint": "localhost:9464"}}, "not an address and a port"),
    ({"http": {"endpoint": "127.0.0.1:99999"}}, "not an address and a port"),
    ({"endpoint": 5}, "endpoint"),
    ({"directory": "relative/path"}, "not an absolute path"),
    ({"tiers": []}, "one at least"),
    ({"tiers": ["host"]}, "tiers"),
    ({"tiers": {"type": "host"}}, "tiers"),
]


@pytest.mark.parametrize(("document", "message"), BAD)
def test_a_value_out_of_bounds_is_refused_by_name(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(document)


@pytest.mark.parametrize("text", [b"= 1", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "kvd.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=str(path)):
        load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.toml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load(path)


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text("grace_seconds = 0")
    with pytest.raises(ConfigError, match=f"{path}.*grace_seconds"):
        load(path)


# --- places ---


def test_the_endpoint_is_the_configured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_ENDPOINT", "ipc:///tmp/environment.sock")
    assert Config(endpoint="ipc:///tmp/x.sock").resolved_endpoint == "ipc:///tmp/x.sock"
    assert Config().resolved_endpoint == "ipc:///tmp/environment.sock"


@pytest.mark.parametrize("endpoint", ["tcp://*:1", "ipc://x", "ipc:///" + "x" * 107])
def test_an_endpoint_that_cannot_be_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        _ = Config(endpoint=endpoint).resolved_endpoint


def test_the_directory_goes_by_user_and_endpoint() -> None:
    one, two = Config(endpoint="ipc:///tmp/1.sock"), Config(endpoint="ipc:///tmp/2.sock")
    assert one.resolved_directory.parent == Path(f"/dev/shm/kvd-{os.getuid()}")
    assert one.resolved_directory != two.resolved_directory
    assert one.resolved_directory == Config(endpoint="ipc:///tmp/1.sock").resolved_directory
    assert Config(directory="/dev/shm/x").resolved_directory == Path("/dev/shm/x")
