"""`kvd-ctl keys`: made, listed and shown; and every command by TCP."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.config import parse
from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import Client
from tests.ctl.conftest import run, run_here
from tests.e2e.support import free_port


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def document(directory: Path) -> str:
    """What `keys new` prints, as a configuration."""
    lines = []
    for args in (("server", "--server"), ("engine",)):
        done = run_here("keys", "new", *args, "--directory", directory)
        assert done.exit_code == 0, done.stderr
        lines.append(done.stdout.partition("\n\n")[2])
    return "\n".join(lines).replace(":7654", f":{free_port()}")


@pytest.fixture(scope="module")
def daemon(document: str) -> Iterator[RunningDaemon]:
    made = tomllib.loads(document)
    made["clients"][0]["verbs"] = ["operator"]
    with running_daemon(made) as daemon:
        yield daemon


def test_what_is_printed_for_a_new_key_is_a_configuration(document: str) -> None:
    config = parse(tomllib.loads(document))
    assert (config.clients[0].name, config.clients[0].salts) == ("engine", ("",))
    assert Path(config.tcp.server_key).exists()


@pytest.mark.usefixtures("document")
def test_a_key_is_shown(directory: Path) -> None:
    shown = run_here("keys", "show", "engine", "--directory", directory)
    as_json = run_here("keys", "show", "engine", "--directory", directory, "--json")
    assert json.loads(as_json.stdout) == {"name": "engine", "key": shown.stdout.strip()}


def test_a_name_that_is_taken_is_one_line(directory: Path, document: str) -> None:
    done = run_here("keys", "new", "engine", "--directory", directory)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"kvd-ctl: {directory}/engine.key is there already\n"


def test_keys_are_listed_with_who_comes_by_them(daemon: RunningDaemon, directory: Path) -> None:
    done = run_here("keys", "list", "--directory", directory, KVD_ENDPOINT=daemon.endpoint)
    assert [line.split()[:3] for line in done.stdout.splitlines()[2:]] == [
        ["engine", "operator", "0"],
        ["server", done.stdout.split()[-1]],
    ]


@pytest.mark.usefixtures("document")
def test_without_kvd_the_files_alone_are_listed(directory: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kvd.sock"
    done = run_here("keys", "list", "--directory", directory, "--json", KVD_ENDPOINT=endpoint)
    assert (done.exit_code, done.stderr.count("\n")) == (0, 1)
    assert json.loads(done.stdout)["files"].keys() == {"engine", "server"}


def test_a_command_goes_by_tcp(daemon: RunningDaemon, directory: Path, document: str) -> None:
    endpoint = tomllib.loads(document)["tcp"]["endpoint"]
    files = ("--key", directory / "engine.key_secret", "--server-key", directory / "server.key")
    done = run(*files, "ping", "--endpoint", endpoint, "--timeout", 30)
    assert f"(pid {daemon.pid}) answers on {endpoint}" in done.stdout


def test_by_tcp_nobody_stops_kvd(daemon: RunningDaemon, directory: Path, document: str) -> None:
    endpoint = tomllib.loads(document)["tcp"]["endpoint"]
    files = ("--key", directory / "engine.key_secret", "--server-key", directory / "server.key")
    done = run(*files, "drain", "--stop", "--endpoint", endpoint, "--timeout", 30)
    assert (done.returncode, done.stdout) == (1, "")
    assert "stop it on its machine" in done.stderr
    with Client(daemon.endpoint) as client:
        assert not client.status().is_draining


def test_by_tcp_without_a_key_is_one_line() -> None:
    done = run("ping", "--endpoint", "tcp://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvd-ctl: by TCP a client needs a key: ")
