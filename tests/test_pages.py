"""The pages for who writes clients and tiers: what they show runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import kvd_client
from kvd.testing.daemons import running_daemon
from kvd_client import KvdError
from tests.plugins.installing import install

ROOT = Path(__file__).parent.parent
CLIENTS = (ROOT / "CLIENTS.md").read_text()
PLUGINS = (ROOT / "PLUGINS.md").read_text()

BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
# A block that begins with the name of a file is that file, or stands in it.
FILE = re.compile(r"# ([\w/]+\.\w+)\b.*\n")


def blocks(page: str, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page) if kind == language]


def program(page: str) -> str:
    """The Python of a page, which builds on what stands before, each line where the page has it."""
    source = ""
    for block in BLOCK.finditer(page):
        if block[1] == "python" and not FILE.match(block[2]):
            at = page.count("\n", 0, block.start(2))
            source += "\n" * (at - source.count("\n")) + block[2]
    return source


def run(*command: str, folder: Path, environment: Mapping[str, str]) -> None:
    scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": scripts} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_python(source: str, folder: Path, environment: Mapping[str, str]) -> None:
    path = folder / "example.py"
    path.write_text(source)
    run(sys.executable, str(path), folder=folder, environment=environment)


def run_commands(page: str, folder: Path, environment: Mapping[str, str]) -> None:
    for commands in blocks(page, "sh"):
        run("bash", "-euo", "pipefail", "-c", commands, folder=folder, environment=environment)


# --- clients ---


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """In which clients find a kvd that publishes events."""
    folder = tmp_path_factory.mktemp("events")
    events = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    tiers = [{"type": "host", "capacity_bytes": "64MiB"}]
    with running_daemon({"tiers": tiers, "events": events}) as daemon:
        yield {"KVD_ENDPOINT": daemon.endpoint}


def test_the_examples_of_clients_run(environment: Mapping[str, str], tmp_path: Path) -> None:
    run_python(program(CLIENTS), tmp_path, environment)


def test_the_example_for_other_languages_needs_nothing_of_kvd(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    source = blocks(CLIENTS, "python")[-1]
    assert not re.search(r"(import|from) kvd", source)
    run_python(source, tmp_path, environment)


def test_the_commands_of_clients_run(environment: Mapping[str, str], tmp_path: Path) -> None:
    run_commands(CLIENTS, tmp_path, environment)


def test_it_is_said_of_every_error_what_a_client_does_then() -> None:
    exported = [getattr(kvd_client, name) for name in kvd_client.__all__]
    errors = [one for one in exported if isinstance(one, type) and issubclass(one, KvdError)]
    rows = "".join(re.findall(r"^\|([^|]*)\|", CLIENTS, re.MULTILINE))
    assert [one.__name__ for one in errors if f"`{one.__name__}`" not in rows] == ["KvdError"]


# --- tiers ---


def files(page: str) -> list[tuple[str, str]]:
    """What a page shows of files: the name, and what stands there."""
    found = [(FILE.match(text), text) for _, text in BLOCK.findall(page)]
    return [(name[1], text) for name, text in found if name]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page's own plugin, which is installed in `installed`."""
    folder = tmp_path_factory.mktemp("plugin")
    for name, text in files(PLUGINS):
        if "/" not in name:
            (folder / name).write_text(text)
    install(folder, folder / "installed")
    return folder


def test_the_commands_of_plugins_run(plugin: Path) -> None:
    run_commands(PLUGINS, plugin, {"PYTHONPATH": "installed"})


def test_the_examples_of_plugins_run(plugin: Path, tmp_path: Path) -> None:
    run_python(program(PLUGINS), tmp_path, {"PYTHONPATH": str(plugin / "installed")})


def test_what_is_shown_of_the_worked_example_stands_there() -> None:
    shown = [(name, text.partition("\n")[2]) for name, text in files(PLUGINS) if "/" in name]
    assert shown
    assert [text for name, text in shown if text not in (ROOT / name).read_text()] == []
