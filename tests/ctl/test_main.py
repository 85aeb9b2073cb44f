"""How `kvd-ctl` ends: 0, 1 with one line where kvd does not answer or refuses, 2 for usage."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.testing.daemons import running_daemon
from kvd_client import Client
from kvd_ctl.__main__ import app
from kvd_ctl.machine import keys_app
from tests.ctl.conftest import complaint, run, run_here
from tests.e2e.support import IDENTITY, LAYOUT, settings, store, tokens_of, with_store

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon

COMMANDS = [
    f"{prefix}{command.name or command.callback.__name__}"
    for prefix, commands in (("", app), ("keys ", keys_app))
    for command in commands.registered_commands
]
TOKENS = tokens_of(1, 4)
PROMPT = "prompt.json"
# What the examples take for granted, in their order; not those that change the machine.
EXAMPLES = [
    *("ping", "status", "tiers", "checkpoint", "verify", "sessions", "namespaces", "leases"),
    *("pins", "sequences", "pin", "unpin", "tree", "explain", "prefetch", "top", "bench"),
    *("doctor", "purge", "drop", "discard", "drain"),
]


def example_of(command: str) -> list[str]:
    """The example in a command's help, as far as it is `kvd-ctl` itself."""
    (info,) = (one for one in app.registered_commands if one.callback.__name__ == command)
    return shlex.split(info.epilog.removeprefix("Example: kvd-ctl ").partition(" |")[0])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = run_here(*command.split(), "--help")
    assert done.exit_code == 0
    assert f"Example: kvd-ctl {command}" in done.stdout


def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(PROMPT).write_text(str(TOKENS))
    with running_daemon(with_store()) as daemon, Client(daemon.endpoint, timeout=30.0) as client:
        namespace = client.open(IDENTITY, LAYOUT)
        store(namespace, TOKENS)
        namespace.match([]).save("chat-7", TOKENS)
        for command in EXAMPLES:
            done = run_here(*example_of(command), "--timeout", 60, KVD_ENDPOINT=daemon.endpoint)
            assert done.exit_code == 0, (command, done.output)


def test_where_no_socket_is_it_fails_at_once(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kvd.sock"
    line = complaint(run("status", "--endpoint", endpoint, "--timeout", 86_400))
    assert line.endswith(f"{endpoint}: No such file or directory")


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-"])
def test_a_stream_that_is_closed_is_done_without(daemon: RunningDaemon, redirection: str) -> None:
    verify = f"{sys.executable} -m kvd_ctl verify --endpoint {daemon.endpoint} {redirection}"
    done = subprocess.run(["sh", "-c", verify], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_finds_no_room_is_one_line(daemon: RunningDaemon) -> None:
    config = f"{sys.executable} -m kvd_ctl config --endpoint {daemon.endpoint} > /dev/full"
    done = subprocess.run(["sh", "-c", config], capture_output=True, text=True)
    assert complaint(done).endswith("No space left on device")


def test_where_nobody_said_a_place_that_of_the_service_is_named(tmp_path: Path) -> None:
    place = {"KVD_ENDPOINT": "", "XDG_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / "kvd").mkdir()
    (tmp_path / "kvd/kvd.sock").touch()
    line = complaint(run("ping", **place))
    assert f"{tmp_path}/kvd/kvd.sock: Connection refused" in line
    assert line.endswith("as a service it listens on ipc:///run/kvd.sock")


def test_where_nobody_listens_any_more_it_fails_at_once() -> None:
    with running_daemon(settings()) as daemon:
        daemon.kill()
        line = complaint(run("ping", "--endpoint", daemon.endpoint, "--timeout", 86_400))
    assert f"{daemon.endpoint}: Connection refused" in line


def test_a_frozen_daemon_is_waited_for_as_long_as_told(daemon: RunningDaemon) -> None:
    daemon.pause()
    try:
        done = run("sessions", "--endpoint", daemon.endpoint, "--timeout", 0.3)
    finally:
        daemon.resume()
    assert "no answer" in complaint(done)


def test_an_endpoint_that_cannot_be_is_one_line() -> None:
    assert "udp://localhost:1" in complaint(run("ping", "--endpoint", "udp://localhost:1"))


@pytest.mark.parametrize(
    "args",
    [
        ["pin", 9999, "1,2,3", "--for", "1h"],
        ["drop", 9999, "1,2,3"],
        ["drop", 9999, "--yes"],
        ["tree", 9999],
        ["explain", 9999, "1,2,3"],
        ["prefetch", 9999, "1,2,3"],
    ],
)
def test_an_unknown_namespace_is_one_line(daemon: RunningDaemon, args: list[object]) -> None:
    assert "namespace 9999" in complaint(run(*args, KVD_ENDPOINT=daemon.endpoint))


def test_an_unknown_sequence_is_one_line(daemon: RunningDaemon) -> None:
    done = run("discard", "nonesuch", KVD_ENDPOINT=daemon.endpoint)
    assert "no sequence 'nonesuch' is saved" in complaint(done)


def test_a_daemon_that_takes_no_more_sessions_is_one_line() -> None:
    with running_daemon(settings(limits={"sessions": 1})) as daemon, Client(daemon.endpoint) as one:
        assert one.wait_attached(30.0)
        done = run("unpin", "--timeout", 30, KVD_ENDPOINT=daemon.endpoint)
    assert "all 1 sessions are in use" in complaint(done)


@pytest.mark.parametrize(
    "args",
    [
        ["nonesuch"],
        ["pin", 1, "1,2,3"],
        ["pin", 1, "1,2,3", "--for", "1w"],
        ["pin", "first", "1,2,3", "--for", "1h"],
        ["pin", 1, "", "--for", "1h"],
        ["unpin", "first"],
        ["drop", 1],
        ["drop", 1, ""],
        ["drop", 1, "--yes", "--from-token", 3],
        ["leases", "--limit", 0],
        ["discard"],
        ["status", "--timeout", 0],
        ["tree", 1, "--limit", 1001],
        ["tree", 1, "--tokenizer", "/nowhere"],
        ["explain", 1],
        ["explain", 1, "1,2", "--text", "a"],
        ["prefetch", 1, "--text", "a"],
        ["drain", "--stop", "--undo"],
    ],
)
def test_wrong_usage_is_told_before_kvd_is_asked(args: list[object]) -> None:
    done = run_here(*args, KVD_ENDPOINT="ipc:///nowhere/kvd.sock")
    assert (done.exit_code, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("kvd_ctl", "typer", "kvd[ctl]"),
        ("kvd_ctl", "rich.table", "kvd[ctl]"),
        ("kvd", "anyio", "kvd[daemon]"),
        ("kvd", "uvloop", "kvd[daemon]"),
        ("kvd", "xxhash", "kvd[daemon]"),
    ],
)
def test_without_its_extra_a_command_says_what_to_install(
    command: str, module: str, extra: str
) -> None:
    hidden = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_module({command!r})"
    code = f"{hidden[:-1]}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"install {extra}")


def test_a_shell_completes_commands_and_options() -> None:
    for typed, found in (("kvd-ctl pi", {"pin", "ping", "pins"}), ("kvd-ctl pin --o", {"--owner"})):
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        done = run(_KVD_CTL_COMPLETE="complete_bash", **words)
        assert set(done.stdout.split()) == found


def test_it_knows_the_shell_that_it_is_to_teach() -> None:
    show = f"{sys.executable} -m kvd_ctl --show-completion; true"  # or bash would be replaced by it
    done = subprocess.run(["bash", "-c", show], capture_output=True, text=True)
    assert "complete -o default -F _kvd_ctl_completion kvd-ctl" in done.stdout


def test_who_may_not_ask_is_told_who_may(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    command = [sys.executable, "-c", AS_NOBODY, "ping", "--endpoint", f"ipc://{tmp_path}/kvd.sock"]
    line = complaint(subprocess.run(command, capture_output=True, text=True))
    assert line.endswith("is for its user, and for the group of ipc.group")


# Imports all it can as root, who alone may read this Python perhaps.
AS_NOBODY = """
import os, zoneinfo
from kvd_ctl.__main__ import main
os.setuid(65534)
main()
"""


# --- Ctrl-C ---


@pytest.mark.parametrize(
    ("command", "module"), [("kvd_ctl", "typer"), ("kvd", "anyio"), ("kvd_infer", "typer")]
)
def test_an_interrupt_of_an_import_ends_a_command_without_a_word(command: str, module: str) -> None:
    code = INTERRUPTED_IMPORT.format(module=module, command=command)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


INTERRUPTED_IMPORT = """
import runpy, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
runpy.run_module("{command}", run_name="__main__")
"""


def test_an_interrupt_of_a_command_that_waits_ends_it_without_a_word(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/kvd.sock")
        silent.listen()
        command = [sys.executable, "-m", "kvd_ctl", "ping", "--timeout", "60"]
        command += ["--endpoint", f"ipc://{tmp_path}/kvd.sock"]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as waiting:
            silent.accept()[0].close()  # it looks whether anybody listens
            with silent.accept()[0]:
                waiting.send_signal(signal.SIGINT)
                assert waiting.communicate() == ("", "")
                assert waiting.returncode == 130
