"""`kvd-ctl doctor`: whether this machine has what kvd needs, and what to do where it has not."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvd import __version__
from kvd.arena.host import default_capacity, file_system_bytes, huge_page_bytes
from kvd.protocol.endpoint import socket_path
from kvd.protocol.units import ByteSize, decode_size
from kvd_client import (
    ConfigError,
    DaemonUnavailable,
    Forbidden,
    KvdError,
    StatusReply,
    TierStatus,
    format_bytes,
    to_json,
)
from kvd_ctl import render

if TYPE_CHECKING:
    from kvd.config import Config
    from kvd_ctl.settings import Settings

Level = Literal["ok", "warn", "bad"]

# The tiers that lie in shared memory; others have memory of a GPU, or a disk.
HOST = "host"
SMALL_BYTES = 1 << 30
# Each client takes a few, beside those of the tiers.
FEW_DESCRIPTORS = 4096
# No clock of a machine that can run this shows an earlier time: 2024-01-01.
EARLIEST = 1_704_067_200
SUBPROCESS_SECONDS = 30.0
JUMP_SECONDS = 0.01
GROUP_LIMITS = ("memory.max", "memory.limit_in_bytes")


@dataclass(frozen=True)
class Finding:
    """What was looked at and found, and what to do about it where it is not well."""

    level: Level
    what: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Wanted:
    """What a daemon has of this machine, or wants yet; of the disk 0 where nobody says how much."""

    directory: Path
    data_directory: Path
    memory_directory: Path
    memory_bytes: int
    memory_left_bytes: int
    disk_bytes: int


def examine(settings: Settings, *, as_json: bool) -> bool:
    """Look at everything, by what the daemon answered, if it did; whether nothing is bad."""
    findings = list(_findings(settings))
    if as_json:
        print(to_json(findings))
    else:
        for one in findings:
            render.console.print(f"{one.level:4} {one.what}: {render.printable(one.found)}")
            if one.advice:
                render.console.print(f"     -> {one.advice}")
    return not any(one.level == "bad" for one in findings)


def _findings(settings: Settings) -> Iterator[Finding]:
    answer, config = settings.answer, settings.config
    status = answer if isinstance(answer, StatusReply) else None
    yield daemon(answer)
    yield Finding("ok", "configuration", settings.source)
    wanted = wants(config, status)
    yield shared_memory(wanted.memory_directory, wanted.memory_bytes, wanted.memory_left_bytes)
    yield huge_pages(wanted.memory_directory)
    yield memory_limit(control_groups(status.pid if status else None), wanted.memory_bytes)
    yield disk(wanted.data_directory, wanted.disk_bytes)
    yield from permissions(wanted, socket_path(config.resolved_endpoint))
    yield from descriptors(status)
    yield locked_memory()
    yield from tier_troubles(status)
    yield from libraries()
    yield gpu()
    yield from clocks()


def daemon(answer: StatusReply | KvdError) -> Finding:
    match answer:
        case StatusReply(version=other) if other != __version__:
            found = f"kvd {other}, pid {answer.pid}, answers, and this is kvd-ctl {__version__}"
            return Finding("warn", "daemon", found, "start it anew, or use its own kvd-ctl")
        case StatusReply():
            return Finding("ok", "daemon", f"kvd {answer.version}, pid {answer.pid}, answers")
        case DaemonUnavailable():
            return Finding("warn", "daemon", str(answer), "start it: kvd, or systemctl start kvd")
        case Forbidden():
            return Finding("bad", "daemon", str(answer), "be in that group, or ask as that user")
        case _:
            return Finding("bad", "daemon", str(answer), "see its log, and whether it is stopped")


def wants(config: Config, status: StatusReply | None) -> Wanted:
    """By the running daemon, or else by the configuration, whose capacities may be wrong.

    Raises ConfigError.
    """
    directory, data_directory = config.resolved_directory, config.resolved_data_directory
    memory_directory = _memory_directory(config)
    if status is not None:
        hosts = [tier for tier in status.tiers if tier.name.startswith(HOST)]
        disks = [tier for tier in status.tiers if tier.survives and tier not in hosts]
        return Wanted(
            directory,
            data_directory,
            memory_directory,
            memory_bytes=sum(tier.capacity_bytes for tier in hosts),
            memory_left_bytes=sum(max(0, _left(tier)) for tier in hosts),
            disk_bytes=sum(max(0, _left(tier)) for tier in disks),
        )
    default = default_capacity(file_system_bytes(memory_directory))
    memory_bytes = sum(_capacity(tier) or default for tier in config.tiers if _is_host(tier))
    disk_bytes = sum(_capacity(tier) for tier in config.tiers if not _is_host(tier))
    return Wanted(
        directory, data_directory, memory_directory, memory_bytes, memory_bytes, disk_bytes
    )


def _memory_directory(config: Config) -> Path:
    """Where the pages of the first tier in shared memory lie."""
    first = next(filter(_is_host, config.tiers), {})
    return Path(first.get("directory") or config.resolved_directory)


def _left(tier: TierStatus) -> int:
    return tier.capacity_bytes - tier.used_bytes


def _is_host(tier: dict[str, Any]) -> bool:
    return bool(tier.get("type") == HOST)


def _capacity(tier: dict[str, Any]) -> int:
    try:
        return int(decode_size(ByteSize, tier.get("capacity_bytes", 0)))
    except ValueError as error:
        raise ConfigError(f"tiers: {error}") from error


def _existing(path: Path) -> Path:
    """The nearest directory above that is there."""
    return next(one for one in (path, *path.parents) if os.path.exists(one))


# --- room ---


def shared_memory(directory: Path, wanted_bytes: int, left_bytes: int) -> Finding:
    """Whether the memory tier fits, and what it has yet to take is there."""
    place = _existing(directory)
    size, free = file_system_bytes(place), shutil.disk_usage(place).free
    found = (
        f"{format_bytes(free)} of {format_bytes(size)} are free at {place}; "
        f"memory tiers have {format_bytes(wanted_bytes)}"
    )
    if wanted_bytes > size:
        advice = "enlarge it (a container: --shm-size=8g), or lower capacity_bytes of the host tier"
        return Finding("bad", "shared memory", found, advice)
    if free < left_bytes:
        return Finding(
            "warn", "shared memory", found, "others have filled it: see df, kvd-ctl purge"
        )
    if size < SMALL_BYTES:
        return Finding("warn", "shared memory", found, "it is small: --shm-size=8g in a container")
    return Finding("ok", "shared memory", found)


def huge_pages(directory: Path) -> Finding:
    size = huge_page_bytes(_existing(directory))
    found = f"memory comes in pages of {format_bytes(size)}"
    if size > resource.getpagesize():
        return Finding("ok", "huge pages", found)
    advice = "a first touch costs more so: mount -o remount,huge=within_size /dev/shm"
    return Finding("warn", "huge pages", found, advice)


def memory_limit(groups: Iterable[Path], wanted_bytes: int) -> Finding:
    """Whether the control groups allow what memory tiers want, which counts as a process's own."""
    for path in (group / name for group in groups for name in GROUP_LIMITS):
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
        if limit < wanted_bytes:
            found = f"{format_bytes(limit)}; memory tiers have {format_bytes(wanted_bytes)}"
            advice = f"raise {path}, or lower capacity_bytes: shared memory counts, too"
            return Finding("bad", "memory limit", found, advice)
    return Finding("ok", "memory limit", "no control group has one that matters")


def control_groups(pid: int | None) -> Iterator[Path]:
    """Those of the daemon or, where there is none, of who would start it; and those above them."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/cgroup").read_text().splitlines()
    except OSError:  # it runs in another container
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup", controllers)
            group = root / name.lstrip("/")
            yield from (one for one in (group, *group.parents) if one.is_relative_to(root))


def disk(directory: Path, wanted_bytes: int) -> Finding:
    free = shutil.disk_usage(_existing(directory)).free
    found = f"{format_bytes(free)} are free at {_existing(directory)}"
    if wanted_bytes:
        found += f"; disk tiers may take {format_bytes(wanted_bytes)} more"
    if free < max(wanted_bytes, SMALL_BYTES):
        advice = "make room, lower capacity_bytes of the lmdb tier, or set data_directory"
        return Finding("warn", "disk", found, advice)
    return Finding("ok", "disk", found)


# --- rights and limits ---


def permissions(wanted: Wanted, endpoint: Path) -> Iterator[Finding]:
    """Whether nobody else can write where kvd trusts what it finds."""
    places = (wanted.directory, wanted.memory_directory, wanted.data_directory, endpoint)
    for path in dict.fromkeys(places):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Finding("warn", "permissions", f"{path}: {error.strerror}")
            continue
        found = f"{stat.filemode(mode)} {path}"
        if mode & stat.S_IWOTH:
            yield Finding("bad", "permissions", found, f"anybody may write there: chmod o-w {path}")
        else:
            yield Finding("ok", "permissions", found)


def descriptors(status: StatusReply | None) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"a process may open {hard}"
    if hard < FEW_DESCRIPTORS:
        advice = "raise it: ulimit -Hn, or LimitNOFILE= of a service"
        yield Finding("warn", "file descriptors", found, advice)
    else:
        yield Finding("ok", "file descriptors", found)
    if status is not None:
        yield from _open_files(status.pid)


def _open_files(pid: int) -> Iterator[Finding]:
    """How many the daemon has open, where we may see that."""
    try:
        count = len(os.listdir(f"/proc/{pid}/fd"))
        soft, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    except OSError:  # another user's, or in another container
        return
    found = f"kvd has {count} open, and may have {soft}"
    if count > 0.8 * soft:
        yield Finding("bad", "file descriptors", found, "raise its limit, and start it anew")
    else:
        yield Finding("ok", "file descriptors", found)


def locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("ok", "locked memory", "without a limit")
    found = f"{format_bytes(soft)} at most"
    if not _nvidia():
        return Finding("ok", "locked memory", f"{found}, which is of no account without a GPU")
    advice = "too little for an engine that pins kvd's memory for its GPU: ulimit -l unlimited"
    return Finding("warn", "locked memory", found, advice)


def tier_troubles(status: StatusReply | None) -> Iterator[Finding]:
    for tier in status.tiers if status else ():
        if tier.trouble:
            yield Finding("bad", f"tier {tier.name}", tier.trouble, "see kvd's log")


# --- libraries, devices, clocks ---


def libraries() -> Iterator[Finding]:
    """What is installed here, where the daemon may not run."""
    yield _library("pyzmq", "import zmq; print('libzmq', zmq.zmq_version())")
    yield _library("lmdb", "import lmdb; print('LMDB', '.'.join(map(str, lmdb.version())))")
    try:
        yield Finding("ok", "library torch", version("torch"))
    except PackageNotFoundError:
        yield Finding("ok", "library torch", "not installed; the GPU tier and engines need it")


def _library(name: str, code: str) -> Finding:
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Finding("warn", f"library {name}", "not installed", "pip install 'kvd[daemon]'")
    said = _output(sys.executable, "-c", code)
    if said is None:
        return Finding("bad", f"library {name}", f"{installed} cannot be used", f"reinstall {name}")
    return Finding("ok", f"library {name}", f"{installed}, {said}")


def gpu() -> Finding:
    """By a process of its own: it may hang, and torch takes gigabytes."""
    if not (program := _nvidia()):
        return Finding("ok", "GPU", "none that nvidia-smi knows of")
    listed = _output(program, "--query-gpu=name,memory.total", "--format=csv,noheader")
    if listed is None:
        return Finding("bad", "GPU", "nvidia-smi fails", "see what it says, and the driver")
    has_cuda = _output(sys.executable, "-c", "import torch; print(torch.cuda.is_available())")
    if has_cuda != "True":
        return Finding("warn", "GPU", listed, "torch cannot use it from here: the GPU tier cannot")
    return Finding("ok", "GPU", listed)


def _nvidia() -> str | None:
    return shutil.which("nvidia-smi")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBPROCESS_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ") if done.returncode == 0 else None


def clocks() -> Iterator[Finding]:
    """Deadlines are of the monotonic clock, ages on disk of the other one."""
    before = time.time() - time.monotonic()
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    time.sleep(5 * JUMP_SECONDS)
    jump = time.time() - time.monotonic() - before
    if time.time() < EARLIEST or abs(jump) > JUMP_SECONDS:
        found = f"{time.ctime()}, {jump:+.3f} s in an instant"
        yield Finding("warn", "clock", found, "ages of sequences are wrong so: set up NTP")
    elif asleep > 1:
        found = f"this machine has slept {asleep:.0f} s"
        yield Finding("warn", "clock", found, "times that pins are kept do not count that")
    else:
        yield Finding("ok", "clock", "real and monotonic time go together")
