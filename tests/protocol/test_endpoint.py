"""Where daemon and clients meet when nobody says where."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvd.protocol.endpoint import (
    MAX_IPC_PATH,
    client_endpoint,
    default_endpoint,
    is_default,
    is_remote,
    local_address,
    socket_path,
)
from kvd.protocol.errors import ConfigError


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVD_ENDPOINT", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def test_what_the_environment_says_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    monkeypatch.setenv("KVD_ENDPOINT", "ipc:///elsewhere/kvd.sock")
    assert default_endpoint() == client_endpoint() == "ipc:///elsewhere/kvd.sock"


def test_the_runtime_directory_comes_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert default_endpoint() == "ipc:///run/user/1000/kvd/kvd.sock"


def test_a_directory_of_the_user_comes_last() -> None:
    expected = f"ipc://{tempfile.gettempdir()}/kvd-{os.getuid()}/kvd.sock"
    assert default_endpoint() == expected


def test_a_client_looks_where_the_daemon_listens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "kvd").mkdir()
    (tmp_path / "kvd/kvd.sock").touch()
    assert client_endpoint() == default_endpoint() == f"ipc://{tmp_path}/kvd/kvd.sock"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "ipc:///run/kvd.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/1"}, "ipc:///run/kvd.sock"),
        ({"KVD_ENDPOINT": "ipc:///elsewhere"}, "ipc:///elsewhere"),
        ({"KVD_ENDPOINT": ""}, "ipc:///run/kvd.sock"),  # as if it was not there
    ],
    ids=repr,
)
def test_a_client_finds_the_service_of_the_system(said: dict[str, str], expected: str) -> None:
    """In a mount namespace of its own, where /run holds kvd.sock and nothing else."""
    look = "from kvd.protocol.endpoint import client_endpoint; print(client_endpoint())"
    script = f"mount -t tmpfs none /run && touch /run/kvd.sock && {sys.executable} -c '{look}'"
    unshare = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*unshare, "mount -t tmpfs none /run"], capture_output=True).returncode:
        pytest.skip("needs to be allowed to mount a tmpfs in a namespace of its own")
    found = subprocess.run(
        [*unshare, script],
        env={"PATH": os.environ["PATH"], "TMPDIR": "/nowhere", **said},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("listens", [True, False])
def test_a_default_place_of_another_user_is_refused(
    listens: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one where nobody listens yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("kvd.protocol.endpoint.SYSTEM_SOCKET", tmp_path / "nonesuch")
    (tmp_path / "kvd").mkdir()
    if listens:
        (tmp_path / "kvd/kvd.sock").touch()
    os.chown(tmp_path / "kvd", 65534, 65534)
    with pytest.raises(ConfigError, match=r"another user.*KVD_ENDPOINT"):
        client_endpoint()


def test_a_default_place_where_nobody_is_becomes_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody else can listen there later, who would be trusted."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("kvd.protocol.endpoint.SYSTEM_SOCKET", tmp_path / "nonesuch")
    assert client_endpoint() == f"ipc://{tmp_path}/kvd-{os.getuid()}/kvd.sock"
    assert (tmp_path / f"kvd-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_a_place_that_was_said_is_not_our_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_default(default_endpoint())
    assert not is_default("ipc:///elsewhere/kvd.sock")
    monkeypatch.setenv("KVD_ENDPOINT", "ipc:///said/kvd.sock")
    assert not is_default("ipc:///said/kvd.sock")
    monkeypatch.setenv("KVD_ENDPOINT", "")
    assert is_default(default_endpoint())


def test_a_path_of_107_bytes_is_the_longest() -> None:
    longest = "/" + "x" * 106
    assert MAX_IPC_PATH == 107
    assert socket_path(f"ipc://{longest}") == Path(longest)
    with pytest.raises(ConfigError, match=r"108 bytes.*107"):
        socket_path(f"ipc://{longest}x")


def test_a_path_is_measured_in_bytes_and_not_in_letters() -> None:
    with pytest.raises(ConfigError, match="201 bytes"):
        socket_path("ipc:///" + "\N{LATIN SMALL LETTER E WITH ACUTE}" * 100)


@pytest.mark.parametrize("path", ["/a\0b", "/a\nb", "/\udcff"])
def test_a_path_can_be_printed(path: str) -> None:
    with pytest.raises(ConfigError, match="printed"):
        socket_path(f"ipc://{path}")


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "kvd.sock",
        "/run/kvd.sock",
        "ipc://kvd.sock",
        "ipc://@abstract",
        "ipc://",
        "tcp://127.0.0.1:5555",
        "ipc:/run/kvd.sock",
    ],
)
def test_what_is_no_absolute_ipc_path_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        socket_path(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("ipc:///run/kvd.sock", False), ("tcp://host:7654", True), ("tcp://[::1]:7654", True)],
)
def test_tcp_is_remote(endpoint: str, expected: bool) -> None:
    assert is_remote(endpoint) == expected


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://host:70000",
        "tcp://host:\u0663\u0663",  # digits, of another script
        "tcp://host:" + "9" * 5000,
    ],
)
def test_tcp_has_an_address_and_a_port(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="an address and a port"):
        is_remote(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [("127.0.0.1:9464", ("127.0.0.1", 9464)), ("[::1]:9464", ("::1", 9464))],
)
def test_a_port_of_this_machine_is_an_address_and_a_number(
    endpoint: str, address: tuple[str, int]
) -> None:
    assert local_address(endpoint) == address
