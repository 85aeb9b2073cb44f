"""kvd as a service of the system: the files in `data` are put in place, and taken away again."""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvd.arena.files import replace_file
from kvd.loading import find
from kvd_client import KvdError, to_json

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

SYSTEM = Path("/")
CONFIGURATION = Path("etc/kvd/kvd.toml")
UNITS = Path("etc/systemd/system")
# Asked to stop together, or a client would start the service again through its socket.
RUNNING = ("kvd.socket", "kvd.service", "run-kvd-pages.mount")
GPU = UNITS / "kvd.service.d/gpu.conf"
# What was put in place, by its digest: what differs was changed by hand.
LIST = Path("etc/kvd/installed.json")
DATA = (Path("dev/shm/kvd"), Path("var/lib/kvd"))
# The service sees other directories there, or none.
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")


class InstallFailed(KvdError):
    """Raised when a file cannot be put in place or taken away, or systemd refuses."""

    code = "install_failed"


@dataclass(frozen=True)
class Step:
    """One thing to do: write, keep, remove or run something."""

    verb: str
    what: str
    do: Callable[[], object] = lambda: None


def install(root: Path, *, gpu: bool, dry_run: bool, as_json: bool) -> None:
    """Put kvd in place below `root`; where that is this very system, systemd learns of it.

    What was changed by hand stays. Raises InstallFailed.
    """
    with _foreign_errors():
        _carry_out(_plan_install(root, gpu=gpu), root, dry_run=dry_run, as_json=as_json)


def uninstall(root: Path, *, purge_data: bool, dry_run: bool, as_json: bool) -> None:
    """Take away what `install` put in place, where it was not changed by hand.

    What is cached goes only where that is wanted. Raises InstallFailed.
    """
    with _foreign_errors():
        steps = _plan_uninstall(root, purge_data=purge_data)
        _carry_out(steps, root, dry_run=dry_run, as_json=as_json)


def configuration() -> Path | None:
    """What the service of this system goes by, where it is installed and we may read that."""
    path = SYSTEM / CONFIGURATION
    is_installed = (SYSTEM / UNITS / "kvd.service").exists()
    return path if is_installed and os.access(path, os.R_OK) else None


@contextmanager
def _foreign_errors() -> Iterator[None]:
    """Raise them as ours."""
    try:
        yield
    except OSError as error:
        raise InstallFailed(f"{error.filename}: {error.strerror}") from error


def _plan_install(root: Path, *, gpu: bool) -> list[Step]:
    known = _known(root)
    steps, listed = [], dict(known)
    for name, content in _files():
        if name == GPU and not gpu:
            continue
        path, digest = _place(root, name), _digest(content)
        if path.exists() and _digest(path.read_bytes()) not in (digest, known.get(str(name))):
            steps.append(Step("keep", f"{path}, which was changed by hand"))
        else:
            steps.append(Step("write", str(path), partial(_write, path, content)))
            listed[str(name)] = digest
    steps.append(Step("write", str(root / LIST), partial(_write, root / LIST, _encoded(listed))))
    if root == SYSTEM:
        steps += [
            _command("systemd-sysusers", "kvd.conf"),
            _command("systemd-tmpfiles", "--create", "kvd.conf"),
            _command("systemctl", "daemon-reload"),
        ]
    return steps


def _plan_uninstall(root: Path, *, purge_data: bool) -> list[Step]:
    if not (known := _known(root)):
        raise InstallFailed(f"there is nothing to uninstall: {root / LIST} is not there")
    steps = []
    if root == SYSTEM and (units := [name for name in RUNNING if (root / UNITS / name).exists()]):
        steps.append(_command("systemctl", "disable", "--now", *units))
    for name, digest in known.items():
        path = _place(root, Path(name))
        if path.exists() and _digest(path.read_bytes()) != digest:
            steps.append(Step("keep", f"{path}, which was changed by hand"))
        else:
            steps.append(Step("remove", str(path), partial(_remove, path)))
    steps.append(Step("remove", str(root / LIST), partial(_remove, root / LIST)))
    for place in filter(Path.exists, (_place(root, name) for name in DATA)):
        if purge_data:
            steps.append(Step("remove", str(place), partial(shutil.rmtree, place)))
        else:
            steps.append(Step("keep", f"{place}, which has what is cached"))
    if root == SYSTEM:
        steps.append(_command("systemctl", "daemon-reload"))
    return steps


def _carry_out(steps: list[Step], root: Path, *, dry_run: bool, as_json: bool) -> None:
    """Do one step after the other and tell of each; in a dry run only tell."""
    if root == SYSTEM and not dry_run:
        _check_system()
    for step in steps:
        if not as_json:
            print(f"{step.verb} {step.what}", flush=True)
        if not dry_run:
            step.do()
    if as_json:
        print(to_json({"steps": [{"verb": step.verb, "what": step.what} for step in steps]}))


def _check_system() -> None:
    """Whether this user may change the system, whose service can run what lies here."""
    if os.geteuid() != 0:
        raise InstallFailed("only root may change services: try sudo, --dry-run or --root DIR")
    for place in (sys.prefix, sys.base_prefix, __file__):
        if any(Path(place).resolve().is_relative_to(hidden) for hidden in HIDDEN):
            raise InstallFailed(
                f"the service would not see {place}: install kvd[daemon,ctl] in a virtual "
                "environment elsewhere, as /opt/kvd, and use the kvd-ctl there"
            )


# --- files ---


def _files() -> Iterator[tuple[Path, bytes]]:
    """Where each file belongs, below the root, and what stands in it."""
    yield CONFIGURATION, find("server").read_bytes()
    bin_directory = str(Path(sys.executable).parent).encode()
    for name, content in _tree(importlib.resources.files("kvd_ctl") / "data", Path()):
        yield name, content.replace(b"@BIN@", bin_directory)


def _tree(folder: Traversable, name: Path) -> Iterator[tuple[Path, bytes]]:
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            yield from _tree(each, name / each.name)
        else:
            yield name / each.name, each.read_bytes()


def _place(root: Path, name: Path) -> Path:
    """Where a file is below the root. Raises InstallFailed where links lead out of it."""
    path = root / name
    if not path.parent.resolve().is_relative_to(root.resolve()):
        raise InstallFailed(f"{path.parent} leads to {path.parent.resolve()}, out of {root}")
    return path


def _known(root: Path) -> dict[str, str]:
    """What was installed, and its digests. Raises InstallFailed where that cannot have been."""
    path = _place(root, LIST)
    try:
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise InstallFailed(f"{path} cannot be read: {error}: remove it") from error
    for name in known:
        if not _is_ours(Path(name)):
            raise InstallFailed(f"{path} names {name!r}, which was never installed: remove it")
    return known


def _is_ours(name: Path) -> bool:
    """Whether this kvd, or one of before, can have put a file there."""
    first, *rest = name.parts or ("",)
    return first == "etc" and ".." not in rest and any("kvd" in part for part in rest)


def _encoded(listed: dict[str, str]) -> bytes:
    return f"{to_json(listed)}\n".encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)  # half of a file would be taken for one that was changed by hand
    path.chmod(0o644)


def _remove(path: Path) -> None:
    """Remove a file, and its directory where that is ours and empty."""
    path.unlink(missing_ok=True)
    if path.parent.name.startswith("kvd"):
        with suppress(OSError):
            path.parent.rmdir()


# --- systemd ---


def _command(*args: str) -> Step:
    return Step("run", " ".join(args), partial(_run, *args))


def _run(*args: str) -> None:
    done = subprocess.run(args, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise InstallFailed(f"{' '.join(args)}: {done.stderr.strip()}")
