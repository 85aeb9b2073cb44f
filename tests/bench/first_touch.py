"""hit_first_touch: leasing a prefix and touching every page of it through a fresh mapping."""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec

from kvd.arena.host import huge_page_bytes
from kvd_client import Client, Lease
from tests.bench.common import (
    IDENTITY,
    LAYOUT_8B,
    SHARED_MEMORY,
    Bench,
    Pairs,
    Row,
    capacity_for,
    copy_all,
    describe,
    fitting_tokens,
    in_process,
    like,
    one_thread,
    random_tokens,
    row,
    running_daemon,
    store,
    timed,
)
from tests.bench.store import unpopulated, wait_populated

NUM_TOKENS = 32 << 10

CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18


class FirstTouch(msgspec.Struct, frozen=True):
    """Seconds through fresh mappings, populated by the library or by reading; and of copies."""

    populate: list[float]
    read: list[float]
    copy: list[float]
    granule: int
    huge_bytes: int


def hit_first_touch(bench: Bench) -> Iterator[Row]:
    wanted = bench.pick(NUM_TOKENS, 1024)
    num_tokens = fitting_tokens(wanted, LAYOUT_8B, copies=2)
    count = bench.pick(5, 1)
    bench.say("huge pages: a tmpfs of its own in a private mount namespace")
    try:
        huge = in_process(_measure_on_huge_pages, num_tokens, count)
    except OSError as error:
        bench.say(f"huge pages: skipped, since they cannot be had here: {error}")
    else:
        if huge.huge_bytes:
            yield _row("hit_first_touch", huge, num_tokens, wanted)
        else:
            bench.say("huge pages: skipped, since the kernel mapped none on huge=within_size")
    bench.say(f"pages as {SHARED_MEMORY} has them")
    plain = in_process(_measure, num_tokens, count, None)
    yield _row("hit_first_touch_4k", plain, num_tokens, wanted)


def _row(name: str, found: FirstTouch, num_tokens: int, wanted: int) -> Row:
    ways = {"MADV_POPULATE_READ": Pairs(found.populate, found.copy)}
    ways["reading"] = Pairs(found.read, found.copy)
    told = "; ".join(f"by {way} {pair.ratio:.3g} x ({pair})" for way, pair in ways.items())
    return row(
        name,
        min(pair.ratio for pair in ways.values()),
        "x",
        f"open, match and first touch of {describe(num_tokens, LAYOUT_8B, wanted)} in a fresh "
        f"process and mapping, in steps of {found.granule >> 10} KiB, against a copy on one "
        f"thread: {told}; {found.huge_bytes >> 20} MiB are mapped by huge pages (smaps)",
    )


def _measure_on_huge_pages(num_tokens: int, count: int) -> FirstTouch:
    """Of a process of its own: it leaves the mounts that it shared with others."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        size = capacity_for(num_tokens, LAYOUT_8B) + (64 << 20)
        _mount_privately(folder, f"huge=within_size,mode=0700,size={size}")
        try:
            return _measure(num_tokens, count, Path(folder) / "pages")
        finally:
            _libc().umount2(folder.encode(), 2)


def _measure(num_tokens: int, count: int, directory: Path | None) -> FirstTouch:
    with running_daemon(capacity_for(num_tokens, LAYOUT_8B), directory) as daemon:
        with Client(daemon.endpoint, timeout=60) as client:
            store(client.open(IDENTITY, LAYOUT_8B), random_tokens(num_tokens, seed=0))
        granule = huge_page_bytes(directory or SHARED_MEMORY)
        return in_process(_touch, daemon.endpoint, num_tokens, count, granule)


def _touch(endpoint: str, num_tokens: int, count: int, granule: int) -> FirstTouch:
    """Of a fresh process: each client in turn maps the arena anew."""
    found = FirstTouch([], [], [], granule, 0)
    with one_thread():
        for number in range(2 * count):
            huge_bytes = _touch_once(endpoint, num_tokens, found, by_reading=number % 2 == 1)
            found = msgspec.structs.replace(found, huge_bytes=huge_bytes)
    return found


def _touch_once(endpoint: str, num_tokens: int, found: FirstTouch, *, by_reading: bool) -> int:
    tokens = random_tokens(num_tokens, seed=0)
    with Client(endpoint, timeout=60) as client, unpopulated() if by_reading else nullcontext():
        assert client.wait_attached(10)
        namespace = client.open(IDENTITY, LAYOUT_8B)
        leases: list[Lease] = []

        def hit() -> None:
            leases.append(namespace.match(tokens))
            if by_reading:
                _read(leases[0], found.granule)
            else:
                wait_populated()

        (found.read if by_reading else found.populate).append(timed(hit))
        with leases.pop() as lease:
            assert lease.num_tokens == num_tokens
            huge_bytes = _mapped_by_huge_pages()
            if not by_reading:
                leased = lease.read_tensors(0, num_tokens)
                private = like(leased)
                copy_all(private, leased)
                found.copy.append(timed(lambda: copy_all(private, leased)))
        return huge_bytes


def _read(lease: Lease, granule: int) -> int:
    """Read one byte of every OS page."""
    total = 0
    for array in lease.read_arrays(0, lease.num_tokens):
        for plane in array.reshape(-1, *array.shape[2:], copy=False):
            total += int(plane.reshape(-1, copy=False).view("u1")[::granule].sum())
    return total


def _mapped_by_huge_pages() -> int:
    found = re.findall(r"ShmemPmdMapped:\s+(\d+) kB", Path("/proc/self/smaps").read_text())
    return sum(map(int, found)) << 10


def _mount_privately(folder: str, options: str) -> None:
    """Mount a tmpfs that this process and its children alone see; raises OSError."""
    libc = _libc()
    _check(libc.unshare(CLONE_NEWNS), "unshare")
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "making mounts private")
    _check(libc.mount(b"kvd", folder.encode(), b"tmpfs", 0, options.encode()), "mounting a tmpfs")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(status: int, what: str) -> None:
    if status:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
