"""The operator's page and the container's recipe: what they say is so."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from kvd.actors.reload import AT_START
from kvd.daemon import Daemon
from kvd.loading import load
from kvd.testing.daemons import RunningDaemon, running_daemon

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "config/OPERATING.md").read_text()
RECIPE = (ROOT / "config/Dockerfile").read_text()
COMMANDS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
# What belongs to other programs, needs what is not here or ends the daemon is not run here.
OTHERS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon({"tiers": [{"type": "host", "capacity_bytes": "16MiB"}]}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`kvd` and `kvd-ctl`, from this checkout, whatever is installed."""
    folder = tmp_path_factory.mktemp("bin")
    for name, module in (("kvd", "kvd"), ("kvd-ctl", "kvd_ctl")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        script.chmod(0o755)
    return folder


@pytest.mark.parametrize("commands", COMMANDS)
def test_every_command_of_the_page_runs(
    daemon: RunningDaemon, scripts: Path, commands: str
) -> None:
    commands = commands.replace("/etc/kvd/kvd.toml", str(daemon.config_path))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        env=os.environ
        | {"KVD_ENDPOINT": daemon.endpoint, "PATH": f"{scripts}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done


def test_only_commands_of_other_programs_are_not_run() -> None:
    lines = [line.split("#")[0].rstrip() for block in OTHERS for line in block.splitlines()]
    ours = [line for line in lines if line.split()[0] not in ("pip", "sudo", "docker")]
    assert ours == [
        "kvd --config server --check",
        "kvd --config gpu --check",
        "kvd-ctl explain 1 @prompt.json",
        'kvd-ctl explain 1 --text "You are ..." --tokenizer MODEL_DIR',
        "kvd-ctl pin 1 @prompt.json --for 2h",
        "kvd-ctl prefetch 1 @prompt.json",
        "kvd-ctl drop 1 @prompt.json --from-token 512",
        "kvd-ctl drain --stop --timeout 300",
        "OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 kvd",
        "kvd-ctl events",
        "kvd-ctl events --since 0 --json",
    ]


def test_what_waits_for_a_restart_is_on_the_page() -> None:
    assert [key for key in AT_START - {"tiers"} if f"`{key}`" not in PAGE] == []


def test_the_recipe_of_the_container_has_nothing_but_instructions() -> None:
    lines = [line for line in RECIPE.splitlines() if line and not line.startswith("#")]
    instructions = {line.split()[0] for line in lines}
    assert instructions == {"FROM", "COPY", "RUN", "ENV", "USER", "HEALTHCHECK", "CMD"}


def test_the_recipe_of_the_container_installs_extras_and_runs_commands_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"pip install .*\[(.*)\]", RECIPE)
    commands = {json.loads(each)[0] for each in re.findall(r"CMD (\[.*\])$", RECIPE, re.MULTILINE)}
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert commands == {"kvd", "kvd-ctl"} <= project["scripts"].keys()


def files_of_a_wheel(source: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    monkeypatch.chdir(source)
    with zipfile.ZipFile(folder / build_wheel(str(folder))) as wheel:
        return set(wheel.namelist())


def test_what_the_recipe_of_the_container_copies_is_what_kvd_is_built_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, folder = tmp_path / "context", tmp_path / "wheels"
    context.mkdir()
    folder.mkdir()
    for name in re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE):
        subprocess.run(["cp", "-a", ROOT / name, context], check=True)
    everything = files_of_a_wheel(ROOT, monkeypatch, folder)
    assert files_of_a_wheel(context, monkeypatch, folder) == everything


def test_the_recipe_of_the_container_configures_kvd() -> None:
    environment = dict(re.findall(r"^ENV (\w+)=(.*)$", RECIPE, re.MULTILINE))
    daemon = Daemon(load(environment=environment))
    assert daemon.endpoint == environment["KVD_ENDPOINT"]
    assert str(daemon.directory) == environment["KVD_DIRECTORY"]
    assert str(daemon.data_directory) == environment["KVD_DATA_DIRECTORY"]


def test_the_page_and_the_recipe_name_the_same_places() -> None:
    for place in ("ipc:///run/kvd/kvd.sock", "/dev/shm/kvd", "/var/lib/kvd"):
        assert place in RECIPE
        assert place in PAGE
