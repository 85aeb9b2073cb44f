"""Key files: those of zmq.auth, of which the secret one is its user's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth

from kvd.protocol.certificates import KeyPair, list_public, load_pair, load_public, make_pair
from kvd.protocol.errors import ConfigError


@pytest.fixture
def pair(tmp_path: Path) -> KeyPair:
    return make_pair(tmp_path / "keys", "engine")


def test_a_pair_is_read_as_it_was_made(pair: KeyPair, tmp_path: Path) -> None:
    assert load_pair(tmp_path / "keys/engine.key_secret") == pair
    assert load_public(tmp_path / "keys/engine.key") == pair.public
    assert zmq.curve_public(pair.secret.encode()).decode() == pair.public


def test_others_tools_read_the_files(pair: KeyPair, tmp_path: Path) -> None:
    read = zmq.auth.load_certificate(tmp_path / "keys/engine.key_secret")
    assert read == (pair.public.encode(), pair.secret.encode())


def test_a_secret_is_its_users_alone_and_is_not_shown(pair: KeyPair, tmp_path: Path) -> None:
    secret = tmp_path / "keys/engine.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    assert pair.secret not in repr(pair)
    assert pair.secret not in (tmp_path / "keys/engine.key").read_text()


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    secret = tmp_path / "keys/engine.key_secret"
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=f"{secret} must belong to user .*chmod 600"):
        load_pair(secret)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.usefixtures("pair")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "keys/engine.key_secret"
    os.chown(secret, 65534, -1)
    with pytest.raises(ConfigError, match="must belong to user 0"):
        load_pair(secret)


@pytest.mark.usefixtures("pair")
def test_a_public_file_has_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name the .key_secret file"):
        load_pair(tmp_path / "keys/engine.key")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no key",
        'public-key = "short"',
        f'public-key = "{"~" * 40}"',
        f'public-key = "{"#" * 40}"',
    ],
)
def test_what_is_no_key_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "engine.key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        load_public(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_pair(tmp_path / "engine.key_secret")


def test_keys_are_listed_by_name(pair: KeyPair, tmp_path: Path) -> None:
    other = make_pair(tmp_path / "keys", "another")
    assert list_public(tmp_path / "keys") == {"another": other.public, "engine": pair.public}
    assert list_public(tmp_path / "nowhere") == {}


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("missing", [".key", ".key_secret"])
def test_a_key_is_never_overwritten(tmp_path: Path, missing: str) -> None:
    (tmp_path / f"keys/engine{missing}").unlink()
    before = {path: path.read_text() for path in (tmp_path / "keys").iterdir()}
    with pytest.raises(ConfigError):
        make_pair(tmp_path / "keys", "engine")
    assert {path: path.read_text() for path in (tmp_path / "keys").iterdir()} == before


@pytest.mark.parametrize("name", ["", "../engine", "a/b", ".hidden", "x" * 65, "a b"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name of a key"):
        make_pair(tmp_path, name)
    assert list(tmp_path.iterdir()) == []
