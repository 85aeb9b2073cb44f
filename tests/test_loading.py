"""Loading: a file, the environment and the command line, and what is said of each value."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_sdist, build_wheel

from kvd.config import flat
from kvd.daemon import Daemon
from kvd.loading import find, load, profiles
from kvd.protocol.errors import ConfigError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kvd.toml"
    path.write_text('grace_seconds = 7\n[log]\nlevel = "error"\nformat = "json"\n')
    return path


# --- what counts ---


def test_the_environment_counts_more_than_a_file_and_flags_more_than_both(path: Path) -> None:
    environment = {"KVD_LOG__LEVEL": "warning", "KVD_LOG__FORMAT": "text"}
    loaded = load(path, environment, {"log.level": "debug"})
    assert loaded.config.grace_seconds == 7
    assert (loaded.config.log.level, loaded.config.log.format) == ("debug", "text")


def test_every_value_has_an_origin(path: Path) -> None:
    loaded = load(path, {"KVD_LOG__LEVEL": "warning"}, {"log.format": "text"})
    assert loaded.origin("grace_seconds") == f"file {path}"
    assert loaded.origin("log.level") == "environment KVD_LOG__LEVEL"
    assert loaded.origin("log.format") == "command line"
    assert loaded.origin("cache.high_watermark") == "default"


def test_a_file_that_is_not_there_is_told_in_few_words() -> None:
    with pytest.raises(ConfigError, match=r"^nonesuch cannot be read: No such file or directory$"):
        load(Path("nonesuch"))


def test_loading_again_reads_what_is_there_now(path: Path) -> None:
    loaded = load(path, {"KVD_LOG__LEVEL": "warning"})
    path.write_text("grace_seconds = 8")
    assert loaded.again is not None
    again = loaded.again()
    assert (again.config.grace_seconds, again.config.log.format) == (8, "text")
    assert again.config.log.level == "warning"


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("KVD_CACHE__HIGH_WATERMARK", "0.97", "cache.high_watermark", 0.97),
        ("KVD_CACHE__SCRUB_BYTES", "1MiB", "cache.scrub_bytes", 1 << 20),
        ("KVD_CACHE__ADMISSION", "reused", "cache.admission", "reused"),
        ("KVD_LIMITS__SESSIONS", "3", "limits.sessions", 3),
        ("KVD_GRACE_SECONDS", "3", "grace_seconds", 3.0),
        ("KVD_DIRECTORY", "/dev/shm/x", "directory", "/dev/shm/x"),
    ],
)
def test_a_variable_has_the_type_of_its_key(name: str, text: str, key: str, value: object) -> None:
    assert flat(load(None, {name: text}).config)[key] == value


def test_the_endpoint_of_the_environment_counts_where_a_file_has_none(path: Path) -> None:
    environment = {"KVD_ENDPOINT": "ipc:///tmp/environment.sock"}
    assert load(path, environment).config.endpoint == "ipc:///tmp/environment.sock"
    path.write_text('endpoint = "ipc:///tmp/file.sock"')
    assert load(path, environment).config.endpoint == "ipc:///tmp/file.sock"


@pytest.mark.parametrize("name", ["KVD_ENDPOINTS", "KVD_STRESS", "KVD_HOME", "OTHER_CACHE__X"])
def test_variables_of_others_are_left_alone(name: str) -> None:
    assert not load(None, {name: "x"}).origins


def test_a_mark_of_an_editor_is_no_part_of_a_file(path: Path) -> None:
    path.write_text("grace_seconds = 7", "utf-8-sig")
    assert load(path).config.grace_seconds == 7


# --- what is refused ---


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("KVD_CACHE__HIGH_WATERMRK", "1", r"mean KVD_CACHE__HIGH_WATERMARK\?"),
        ("KVD_CASH__HIGH_WATERMARK", "1", r"mean KVD_CACHE__HIGH_WATERMARK\?"),
        ("KVD_CACHE", "{}", "KVD_CACHE names no key"),
        ("KVD_TIERS", "[]", "KVD_TIERS names no key"),
        ("KVD_TIERS__TYPE", "host", "KVD_TIERS__TYPE names no key"),
        ("KVD_CACHE__HIGH_WATERMARK", "1.1", "KVD_CACHE__HIGH_WATERMARK: .*<= 1.0"),
        ("KVD_CACHE__SCRUB_BYTES", "lots", "KVD_CACHE__SCRUB_BYTES: 'lots' is not a size"),
        ("KVD_LIMITS__SESSIONS", "many", "KVD_LIMITS__SESSIONS: .*int"),
        ("KVD_DIRECTORY", "/\udcff", "KVD_DIRECTORY is not UTF-8"),
        ("KVD_LOG__LEVEL", "loud", "KVD_LOG__LEVEL: .*'loud'; it may be debug, info, warn"),
        ("KVD_CACHE__LOW_WATERMARK", "0.99", "KVD_CACHE__LOW_WATERMARK: cache: low_watermark is"),
    ],
)
def test_a_variable_that_cannot_be_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, {name: text})


def test_what_only_file_and_variable_together_make_wrong_names_both(path: Path) -> None:
    path.write_text("[cache]\nhigh_watermark = 0.96")
    with pytest.raises(ConfigError, match=f"{path}, KVD_CACHE__LOW_WATERMARK: cache"):
        load(path, {"KVD_CACHE__LOW_WATERMARK": "0.97"})


def test_what_a_tier_refuses_names_the_file(path: Path) -> None:
    path.write_text('[[tiers]]\ntype = "host"\ncapacity_bites = 1')
    mistake = f"{path}: tiers, type host: unknown key capacity_bites; did you mean capacity_bytes"
    with pytest.raises(ConfigError, match=mistake):
        Daemon(load(path))


# --- what comes with kvd ---


@pytest.mark.parametrize("name", profiles())
def test_a_profile_is_a_good_configuration(name: str) -> None:
    assert Daemon(load(find(name))).config


def test_a_profile_is_found_by_its_name_and_a_file_by_its_path(tmp_path: Path) -> None:
    assert find("server") == ROOT / "kvd/profiles/server.toml"
    assert find("./server") == Path("server")
    assert find(str(tmp_path / "x.toml")) == tmp_path / "x.toml"


def test_what_is_installed_has_the_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [f"kvd/profiles/{name}.toml" for name in ("dev", "gpu", "kvd", "server")]
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        assert set(wanted) <= set(wheel.namelist())
    with tarfile.open(tmp_path / build_sdist(str(tmp_path))) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    assert set(wanted) <= names
