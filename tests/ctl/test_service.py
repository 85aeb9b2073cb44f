"""`kvd-ctl install` and `uninstall`, below a directory; of a real system: tests/systemd."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvd.config import parse
from tests.ctl.conftest import complaint, run, run_here

SERVICE = "etc/systemd/system/kvd.service"
CONFIG = "etc/kvd/kvd.toml"
GPU = "etc/systemd/system/kvd.service.d/gpu.conf"


def ctl(*args: object) -> str:
    done = run_here(*args)
    assert (done.exit_code, done.stderr) == (0, ""), done
    return done.stdout


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_what_is_installed_is_uninstalled(tmp_path: Path) -> None:
    ctl("install", "--root", tmp_path, "--gpu")
    assert {SERVICE, CONFIG, GPU} < files(tmp_path)
    ctl("uninstall", "--root", tmp_path)
    assert files(tmp_path) == set()


def test_a_dry_run_only_tells(tmp_path: Path) -> None:
    told = ctl("install", "--root", tmp_path, "--dry-run")
    assert files(tmp_path) == set()
    assert ctl("install", "--root", tmp_path) == told
    told = ctl("uninstall", "--root", tmp_path, "--dry-run")
    assert SERVICE in files(tmp_path)
    assert ctl("uninstall", "--root", tmp_path) == told


def test_each_step_is_told(tmp_path: Path) -> None:
    steps = json.loads(ctl("install", "--root", tmp_path, "--json"))["steps"]
    assert {"verb": "write", "what": f"{tmp_path}/{SERVICE}"} in steps
    assert {step["what"] for step in steps} == {f"{tmp_path}/{name}" for name in files(tmp_path)}


def test_the_service_runs_the_kvd_beside_this_python(tmp_path: Path) -> None:
    ctl("install", "--root", tmp_path)
    beside = Path(sys.executable).parent
    assert f"\nExecStart={beside}/kvd --config /{CONFIG}\n" in (tmp_path / SERVICE).read_text()


def test_its_configuration_is_one(tmp_path: Path) -> None:
    ctl("install", "--root", tmp_path)
    config = parse(tomllib.loads((tmp_path / CONFIG).read_text()))
    assert config.resolved_directory == Path("/dev/shm/kvd")


def test_the_gpu_is_let_in_only_where_it_is_asked_for(tmp_path: Path) -> None:
    ctl("install", "--root", tmp_path)
    assert GPU not in files(tmp_path)


def test_what_was_changed_by_hand_stays(tmp_path: Path) -> None:
    ctl("install", "--root", tmp_path)
    (tmp_path / CONFIG).write_text("grace_seconds = 1.0\n")
    assert f"keep {tmp_path}/{CONFIG}" in ctl("install", "--root", tmp_path)
    assert f"keep {tmp_path}/{CONFIG}" in ctl("uninstall", "--root", tmp_path)
    assert files(tmp_path) == {CONFIG}
    assert (tmp_path / CONFIG).read_text() == "grace_seconds = 1.0\n"


def test_what_an_earlier_kvd_installed_is_made_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctl("install", "--root", tmp_path)
    monkeypatch.setattr(sys, "executable", "/opt/new/bin/python")
    ctl("install", "--root", tmp_path)
    assert "ExecStart=/opt/new/bin/kvd " in (tmp_path / SERVICE).read_text()


def test_what_is_cached_is_removed_only_where_it_is_asked_for(tmp_path: Path) -> None:
    cached = tmp_path / "var/lib/kvd/data"
    cached.parent.mkdir(parents=True)
    cached.touch()
    for options, is_there in (((), True), (("--purge-data",), False)):
        ctl("install", "--root", tmp_path)
        ctl("uninstall", "--root", tmp_path, *options)
        assert cached.exists() == is_there


def test_where_nothing_is_installed_there_is_nothing_to_uninstall(tmp_path: Path) -> None:
    assert "nothing to uninstall" in complaint(run("uninstall", "--root", tmp_path))


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "etc").touch()
    done = run("install", "--root", tmp_path, "--json")
    assert "Not a directory" in complaint(done)


def test_what_a_full_disk_did_not_take_is_told_and_made_whole_the_next_time(tmp_path: Path) -> None:
    program = f"ulimit -f 1; {sys.executable} -m kvd_ctl install --json --root {tmp_path}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert f"{tmp_path}/{SERVICE}: File too large" in complaint(done)
    assert "by hand" not in ctl("install", "--root", tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}'])
def test_a_list_that_cannot_be_read_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "etc/kvd/installed.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    for command in ("install", "uninstall"):
        assert f"{path} cannot be read" in complaint(run(command, "--root", tmp_path))


@pytest.mark.parametrize(
    "name", ["../kept", "etc/kvd/../../../kept", "{}/kept", "etc/passwd", "usr/bin/kvd", ""]
)
def test_only_what_was_installed_is_uninstalled(tmp_path: Path, name: str) -> None:
    root, kept = tmp_path / "root", tmp_path / "kept"
    kept.touch()
    ctl("install", "--root", root)
    listed = {name.format(tmp_path): hashlib.sha256(b"").hexdigest()}
    (root / "etc/kvd/installed.json").write_text(json.dumps(listed))
    assert "which was never installed" in complaint(run("uninstall", "--root", root))
    assert kept.exists()
    assert SERVICE in files(root)


def test_links_lead_neither_out_of_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "etc").mkdir(parents=True)
    outside.mkdir()
    (root / "etc/systemd").symlink_to(outside)
    assert f"leads to {outside}" in complaint(run("install", "--root", root))
    assert files(outside) == set()
