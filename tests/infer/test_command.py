"""`kvd-infer` prints what a model generates, and in one line how that went or what is wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kvd.testing.daemons import running_daemon
from kvd_infer.__main__ import app
from tests.e2e.support import eventually
from tests.infer.conftest import SETTINGS
from tests.infer.servers import PROMPT, plain_text
from tests.otlp import running_collector

if TYPE_CHECKING:
    from click.testing import Result

GREEDY = ("--temperature", 0, "--max-tokens", 24)
COMMAND = [sys.executable, "-m", "kvd_infer"]


def generate(folder: Path, *options: object, stdin: str | bytes = "", **environment: str) -> Result:
    """`kvd-infer generate` in this process, which has torch already."""
    arguments = ["generate", "--model", str(folder), *map(str, options)]
    return CliRunner().invoke(app, arguments, input=stdin, env=environment)


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> str:
    return plain_text(tiny_dir, PROMPT, 24)


def test_text_is_printed_and_nothing_else(tiny_dir: Path, expected: str) -> None:
    done = generate(tiny_dir, PROMPT, *GREEDY, "--no-kvd")
    assert (done.exit_code, done.stdout) == (0, expected)
    assert done.stderr.startswith("24 tokens (length), 0 of 50 prompt tokens cached, first token")
    assert done.stderr.count("\n") == 1


def test_a_prompt_is_read_from_stdin(tiny_dir: Path, expected: str) -> None:
    assert generate(tiny_dir, "-", *GREEDY, "--no-kvd", stdin=PROMPT).stdout == expected


def test_the_same_seed_prints_the_same(tiny_dir: Path) -> None:
    once, again, other = (
        generate(tiny_dir, PROMPT, "--max-tokens", 24, "--no-kvd", "--seed", seed).stdout
        for seed in (7, 7, 8)
    )
    assert once == again != other


def test_a_prompt_is_cached_for_the_next_time(tiny_dir: Path, expected: str) -> None:
    with running_daemon(SETTINGS) as daemon:
        first, second = (
            json.loads(generate(tiny_dir, PROMPT, *GREEDY, "--json", **env).stdout)
            for env in [{"KVD_ENDPOINT": daemon.endpoint}] * 2
        )
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 49)
    assert first["text"] == second["text"] == expected
    assert (second["reason"], second["tokens"], second["prompt_tokens"]) == ("length", 24, 50)


def test_without_a_daemon_everything_is_computed(
    tiny_dir: Path, expected: str, tmp_path: Path
) -> None:
    done = generate(tiny_dir, PROMPT, *GREEDY, "--endpoint", f"ipc://{tmp_path}/none.sock")
    assert (done.exit_code, done.stdout) == (0, expected)


def test_its_spans_and_those_of_kvd_are_of_one_trace(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        with running_daemon(SETTINGS) as daemon:
            command = [*COMMAND, "generate", "--model", tiny_dir, PROMPT, "--max-tokens", "1"]
            subprocess.run([*command, "--endpoint", daemon.endpoint], check=True)
            (served,) = eventually(lambda: collector.named("kvd.request.MatchRequest"))
    (match,) = collector.named("kvd_infer.match")
    assert (match.service, served.service) == ("kvd-infer", "kvd")
    assert (match.id, match.trace) == (served.parent, served.trace)


def test_an_interrupt_ends_with_what_was_generated(tiny_dir: Path) -> None:
    command = [*COMMAND, "generate", "--model", tiny_dir, PROMPT, "--temperature", "0", "--no-kvd"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "1900"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(SIGINT)
    text, told = process.communicate()
    assert process.returncode == 130
    assert plain_text(tiny_dir, PROMPT, 24).encode().startswith((first + text)[:20])
    assert b" tokens (cancelled), " in told
    assert told.count(b"\n") == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--temperature", -1], "temperature is -1.0: it must be"),
        (["--max-tokens", 4000], "more than the 2048 of the model"),
        (["--endpoint", "udp://host:1"], "udp://host:1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tiny_dir: Path, options: list[object], complaint: str
) -> None:
    done = generate(tiny_dir, PROMPT, *options)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("kvd-infer: ")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_prompt_on_stdin_that_is_no_utf_8_is_refused(tiny_dir: Path) -> None:
    done = generate(tiny_dir, "-", "--no-kvd", stdin=b"B\xe4r")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("kvd-infer: 'utf-8' codec can't decode")
    assert done.stderr.count("\n") == 1


def test_a_folder_without_a_model_is_said_to_be_none(tmp_path: Path) -> None:
    done = generate(tmp_path, PROMPT)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "has no tokenizer.json" in done.stderr


def test_a_port_that_is_taken_is_said_to_be(tiny_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["serve", "--model", str(tiny_dir), "--no-kvd", "--port", port]
        done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr


@pytest.mark.parametrize("command", [[], ["generate"], ["serve"]])
def test_help_is_there_without_torch(command: list[str]) -> None:
    source = (
        "import sys, kvd_infer.__main__ as main\n"
        "try: main.main()\n"
        "finally: assert not {'torch', 'transformers', 'starlette'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, *command, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Example: kvd-infer" in done.stdout


def test_text_that_finds_no_room_is_one_line(tiny_dir: Path) -> None:
    command = [*COMMAND, "generate", "--model", str(tiny_dir), PROMPT, "--no-kvd"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kvd-infer: [Errno 28]")
    assert "Traceback" not in done.stderr
