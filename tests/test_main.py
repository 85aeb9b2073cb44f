"""The `kvd` command: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import kvd
from kvd.check import check
from kvd.loading import load
from kvd.protocol.units import format_bytes
from kvd.testing.daemons import DaemonFailed, running_daemon
from kvd.testing.faults import Faults, set_faults
from kvd_client import Client, TierFailed
from tests.arena.conftest import shm  # noqa: F401 - a fixture
from tests.e2e.support import (
    IDENTITY,
    LAYOUT,
    PATIENCE_SECONDS,
    capacity_of,
    settings,
    store,
    tokens_of,
    with_store,
)


def run(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvd", *map(str, args)]
    environment = os.environ | environment
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a kvd that did not start, for its configuration."""
    assert (done.returncode, done.stdout) == (os.EX_CONFIG, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvd: ")
    return line


def test_help_tells_the_flags() -> None:
    done = run("--help")
    assert done.returncode == 0
    for flag in ("--config FILE", "--log-level", "--log-format", "--check", "--version"):
        assert flag in done.stdout


@pytest.mark.parametrize("name", ["kvd", "kvd-ctl", "kvd-infer"])
def test_the_version_of_each_command_is_that_of_the_package(name: str) -> None:
    command = [sys.executable, "-m", name.replace("-", "_"), "--version"]
    assert subprocess.check_output(command, text=True) == f"{name} {kvd.__version__}\n"


def test_an_unknown_flag_is_a_usage_error() -> None:
    done = run("--nonesuch")
    assert done.returncode == 2
    assert "--nonesuch" in done.stderr


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.toml"
    assert str(path) in complaint(run("--config", path))


def test_json_goes_with_check() -> None:
    done = run("--json")
    assert done.returncode == 2
    assert "--json goes with --check" in done.stderr


# --- a check ---


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kvd.toml"
    places = f'endpoint = "ipc://{tmp_path}/kvd.sock"\ndirectory = "{tmp_path}/kvd"\n'
    path.write_text(f'{places}[[tiers]]\ntype = "host"\ncapacity_bytes = "1MiB"\n')
    return path


def test_a_check_tells_what_kvd_would_do_and_does_nothing(path: Path) -> None:
    done = run("--config", path, "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "configuration is good",
        f"endpoint: ipc://{path.parent}/kvd.sock",
        f"directory: {path.parent}/kvd",
        *(line for line in done.stdout.splitlines() if line.startswith("data_directory: ")),
        "host tier: up to 1MiB",
    ]
    assert list(path.parent.iterdir()) == [path]


def test_a_check_tells_of_every_door(path: Path) -> None:
    path.write_text(path.read_text() + '[http]\nendpoint = "127.0.0.1:9464"\n')
    assert "http.endpoint: 127.0.0.1:9464" in run("--config", path, "--check").stdout.splitlines()


def test_a_check_as_json_has_every_value_with_its_origin(path: Path) -> None:
    done = run("--config", path, "--check", "--json", KVD_LIMITS__PINS="7")
    said = json.loads(done.stdout)
    assert said["tiers"] == [{"name": "host", "capacity_bytes": 1 << 20}]
    origins = {each["key"]: (each["value"], each["origin"]) for each in said["values"]}
    assert origins["limits.pins"] == (7, "environment KVD_LIMITS__PINS")
    assert origins["endpoint"] == (f"ipc://{path.parent}/kvd.sock", f"file {path}")


def test_a_check_finds_what_a_start_would_refuse(path: Path) -> None:
    path.write_text('[[tiers]]\ntype = "lmdb"\nnosink = true')
    message = f"{path}: tiers, type lmdb: unknown key nosink; did you mean nosync?"
    assert complaint(run("--config", path, "--check")) == f"kvd: {message}"
    done = run("--config", path, "--check", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (os.EX_CONFIG, {"error": message})


def test_a_check_that_nobody_can_read_is_one_line(path: Path) -> None:
    command = [sys.executable, "-m", "kvd", "--check", "--config", str(path)]
    path.touch()
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "kvd: [Errno 28] No space left on device\n")


def test_a_profile_is_checked_by_its_name() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make what this profile names")
    done = run("--config", "server", "--check")
    assert "endpoint: ipc:///run/kvd.sock" in done.stdout


def test_a_check_beside_a_daemon_that_runs_says_so() -> None:
    with running_daemon(settings()) as daemon:
        done = run("--config", daemon.config_path, "--check")
        used = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
        places = daemon.endpoint, daemon.directory, daemon.data_directory
        assert used == [f"note: somebody uses {place} now" for place in places]
    assert done.returncode == 0


def test_a_check_sees_who_listens_also_where_he_is_busy(path: Path, tmp_path: Path) -> None:
    place = tmp_path / "kvd.sock"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(str(place))
        busy.listen(0)
        first.connect(str(place))
        done = run("--config", path, "--check", "--json")
    assert f"somebody uses ipc://{place} now" in json.loads(done.stdout)["notes"]


def test_a_check_says_what_hinders_traces(path: Path) -> None:
    collector = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    done = run("--config", path, "--check", OTEL_EXPORTER_OTLP_PROTOCOL="http/json", **collector)
    assert done.stdout.count("note: OTEL_EXPORTER_OTLP_PROTOCOL is http/json") == 2


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_a_port_for_metrics_needs_its_extra(path: Path, flags: list[str]) -> None:
    path.write_text(path.read_text() + '[http]\nendpoint = "127.0.0.1:9464"\n')
    code = "import runpy, sys; sys.modules['opentelemetry.exporter'] = None; "
    code += "runpy.run_module('kvd', run_name='__main__')"
    command = [sys.executable, "-c", code, "--config", str(path), *flags]
    line = complaint(subprocess.run(command, capture_output=True, text=True))
    assert "http.endpoint: " in line
    assert line.endswith(": install kvd[telemetry]")


# --- what cannot be used ---

KEY = "x" * 40
TCP = f'clients = [{{name = "a", key = "{KEY}", salts = [""]}}]\n[tcp]\nendpoint = "tcp://*:1"\n'


def written(tmp_path: Path, text: str) -> Path:
    """A file that says this, and names places of its own where it says none."""
    path = tmp_path / "kvd.toml"
    places = {"endpoint": "ipc://{}/kvd.sock", "directory": "{}/kvd", "data_directory": "{}/data"}
    own = [
        f'{key} = "{place.format(tmp_path)}"'
        for key, place in places.items()
        if f"\n{key} = " not in f"\n{text}"
    ]
    path.write_text("\n".join([*own, text]))
    return path


# What stands in a configuration that cannot be used, and a part of the line that says why.
UNUSABLE = [
    ("a = ", "cannot be read"),
    ("endpiont = 1", "did you mean endpoint?"),
    ('endpoint = "tcp://*:1"', "tcp://*:1"),
    ('tiers = [{type = "nonesuch"}]', "known here: faulty, host, lmdb"),
    ('tiers = [{type = "host", capacity_bites = 1}]', "capacity_bites"),
    ('tiers = [{type = "host", directory = "x"}]', "not absolute"),
    ('tiers = [{type = "host", capacity_bytes = "1024TiB"}]', "1024TiB"),
    ('directory = "/a\\u0000b"', "directory: Expected"),
    ('data_directory = "/a\\u0000b"', "data_directory: Expected"),
    ('ipc.group = "a\\u0000b"', "ipc.group: Expected"),
    ('tiers = [{type = "host"}, {type = "lmdb", directory = "/a\\u0000b"}]', "null byte"),
    (f'directory = "/{"x" * 300}"', "File name too long"),
    ('operator.endpoint = "tcp://127.0.0.1:1"', "operator.endpoint: 'tcp://127.0.0.1:1' is not"),
    ('events.endpoint = "tcp://1.2.3.4:1"', "events.endpoint: 'tcp://1.2.3.4:1' is not"),
    ('http.endpoint = "0.0.0.0:1"', "http.endpoint: '0.0.0.0:1' is not a port of this machine"),
    (f"tiers = {'[' * 10_000}", "recursion"),
    ("tiers = [{}]", "known here: faulty, host, lmdb"),
    ('tiers = [{type = "host", capacity_bytes = 1}]', "set capacity_bytes to 64KiB"),
    ('directory = "/etc/passwd"', "/etc/passwd is no directory: set directory"),
    ('data_directory = "/etc/passwd"', "/etc/passwd is no directory: set data_directory"),
    ('endpoint = "ipc:///etc/passwd/kvd.sock"', "is no directory: set endpoint"),
    ('endpoint = "ipc:///etc/passwd"', "/etc/passwd is there and is no socket: set endpoint"),
    ('directory = "/dev/null/kvd"', "/dev/null is no directory: set directory"),
    (f'endpoint = "ipc:///{"x" * 107}"', "has 108 bytes; the system allows 107"),
    ('ipc.group = "nonesuch"', "there is no group 'nonesuch': set ipc.group"),
    ('endpoint = "ipc:///a"\noperator.endpoint = "ipc:///a"', "so is endpoint: set one of"),
    ('events.endpoint = "ipc:///a"\nevents.replay_endpoint = "ipc:///a"', "set one of them"),
    ('directory = "/a"\ndata_directory = "/a/"', "and so is directory: set one of them"),
    ('tiers = [{type = "host"}, {type = "lmdb", capacity_bytes = "1024TiB"}]', "1024TiB"),
    (f"{TCP}server_key = '/nonesuch'", "/nonesuch is no key that can be read"),
    (f"{TCP}server_key = '/etc/passwd'", "/etc/passwd is no key that can be read"),
    ('tiers = [{type = "host"}, {type = "host"}]', "host-2 and host have one directory"),
    ('tiers = [{type = "host", directory = "/etc/passwd"}]', "host: /etc/passwd is no directory"),
    ('events = {endpoint = "ipc:///a", media = {host = "DISK"}}', "set events.media"),
    ('tiers = [{type = "torch", capacity_bytes = 1, device = "cuda:99"}]', "cuda:99 is none of"),
]
# What only shows when it is tried.
FOUND_AT_START = [
    ('directory = "/proc/kvd"', "/proc/kvd"),
    ('directory = "/proc"', "No such file or directory: set directory"),
    ('endpoint = "ipc:///proc/kvd/kvd.sock"', "/proc/kvd"),
]


@pytest.mark.parametrize(("text", "message"), UNUSABLE)
def test_a_start_and_a_check_refuse_it_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path, said = written(tmp_path, text), []
    assert check(lambda: load(path, os.environ), said.append, as_json=True) == os.EX_CONFIG
    line = complaint(run("--config", path))
    assert line == f"kvd: {json.loads(said[0])['error']}"
    assert line.startswith(f"kvd: {path}")
    assert message in line
    assert line.count(": set ") <= 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("text", "message"), FOUND_AT_START)
def test_what_a_start_alone_finds_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    line = complaint(run("--config", path))
    assert line.startswith(f"kvd: {path}")
    assert message in line


def test_an_endpoint_that_is_a_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "kvd.sock").mkdir()
    assert "kvd.sock" in complaint(run("--config", written(tmp_path, "")))
    assert (tmp_path / "kvd.sock").is_dir()


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("precious")
    with pytest.raises(DaemonFailed), running_daemon(settings(endpoint=f"ipc://{data}")):
        pass
    assert data.read_text() == "precious"


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make a directory of another user")
    (tmp_path / "data").mkdir()
    os.chown(tmp_path / "data", 65534, 65534)
    line = complaint(run("--config", written(tmp_path, ""), "--check"))
    assert line.endswith("data belongs to user 65534, and this is 0: set data_directory")


def test_a_default_place_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make a directory of another user")
    place = tmp_path / "kvd-0"
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)
    done = run(TMPDIR=str(tmp_path), XDG_RUNTIME_DIR="", KVD_ENDPOINT="")
    assert str(place) in complaint(done)


def test_the_ready_line_tells_where_and_how_much() -> None:
    with running_daemon(settings()) as daemon:
        assert daemon.ready_line == (
            f"kvd {kvd.__version__} is ready on {daemon.endpoint}; host tier: "
            f"up to {format_bytes(capacity_of(128))} in {daemon.directory}"
        )


@pytest.mark.parametrize(
    "redirection", [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full"]
)
def test_it_runs_whatever_becomes_of_what_it_says(path: Path, redirection: str) -> None:
    path.write_text(f'data_directory = "{path.parent}/data"\n{path.read_text()}')
    kvd = f"exec {sys.executable} -m kvd --config {path} {redirection}"
    with subprocess.Popen(["sh", "-c", kvd]) as daemon:
        with Client(f"ipc://{path.parent}/kvd.sock") as client:
            assert client.wait_attached(PATIENCE_SECONDS)
        daemon.terminate()
        assert daemon.wait() == 0


def test_the_ready_line_names_every_door(tmp_path: Path) -> None:
    events = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/again"}
    doors = {"operator": {"endpoint": f"ipc://{tmp_path}/operator"}, "events": events}
    with running_daemon(settings(**doors)) as daemon:
        assert daemon.ready_line.partition(";")[0].endswith(
            f"{daemon.endpoint}, operator ipc://{tmp_path}/operator, "
            f"events ipc://{tmp_path}/events, events.replay ipc://{tmp_path}/again"
        )


def test_the_ready_line_names_every_tier() -> None:
    (memory,) = settings()["tiers"]
    disk = {"type": "lmdb", "capacity_bytes": "16MiB"}
    with running_daemon(settings(tiers=[memory, disk])) as daemon:
        data = daemon.directory.parent / "data"
        assert daemon.ready_line.endswith(
            f"in {daemon.directory}, lmdb tier: up to 16MiB in {data}"
        )


def test_an_override_by_a_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_LOG__FORMAT", "json")
    with running_daemon(settings()) as daemon:
        daemon.stop()
        assert all(map(json.loads, daemon.log.splitlines()))


def test_a_log_in_json_is_json() -> None:
    with running_daemon(settings(log={"format": "json", "level": "debug"})) as daemon:
        daemon.stop()
        lines = [json.loads(line) for line in daemon.log.splitlines()]
        assert {"time", "level", "logger", "message"} <= lines[-1].keys()
        assert (lines[-1]["logger"], lines[-1]["message"]) == ("kvd", "SIGTERM: stopping")


def test_no_log_has_tokens_or_salts() -> None:
    with running_daemon(with_store(log={"level": "debug"})) as daemon:
        with Client(daemon.endpoint, timeout=30.0) as client:
            store(client.open(IDENTITY, LAYOUT, salt="a secret"), tokens_of(77, 8))
            set_faults(daemon.data_directory, Faults.GONE)
            with pytest.raises(TierFailed):
                client.checkpoint()
        assert "reason=tier_failed" in daemon.log
        assert re.findall(r"a secret|\b77000\d\d\b", daemon.log) == []


# Imports all it can as root, who alone may read this Python perhaps, and is nobody then.
AS_NOBODY = """
import codecs, os, signal
codecs.lookup("unicode_escape")
import anyio._backends._asyncio, uvloop, kvd_tiers.host
from kvd.__main__ import main
os.setgid(65534)
os.setuid(65534)
signal.alarm(60)
main()
"""


def test_it_runs_as_a_user_whose_directory_lies_in_somebody_elses(shm: Path) -> None:  # noqa: F811
    """As a service does: /dev/shm, or /run, belongs to root."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    shm.chmod(0o755)
    own = shm / "nobodys"
    own.mkdir()
    os.chown(own, 65534, 65534)
    config = own / "kvd.toml"
    config.write_text(
        f'endpoint = "ipc://{own}/kvd.sock"\ndirectory = "{own}"\ndata_directory = "{own}/data"\n'
    )
    command = [sys.executable, "-c", AS_NOBODY, "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        assert it.stdout
        assert it.stderr
        line = it.stdout.readline()
        it.terminate()
        assert "is ready" in line, it.stderr.read()
        assert it.wait() == 0
