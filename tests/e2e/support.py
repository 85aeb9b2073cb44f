"""What tests with a real daemon share: a small layout, its KV, and how to wait for an event."""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvd.arena.page_table import table_bytes
from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import Identity, Layout

if TYPE_CHECKING:
    from kvd_client.client import Client, Lease, Namespace

T = TypeVar("T")

IDENTITY = Identity("model", "main")
# A slice has 128 bytes, so that 32 pages fill whole pages of the system: an extent of 16 KiB.
LAYOUT = Layout(2, 1, 8, "float32", block_size=4)
PAGE_FIRST = replace(LAYOUT, order="page_first")
OPAQUE = replace(LAYOUT, order="opaque", layer_bytes=192, packing="a test's")
LAYOUTS = (LAYOUT, PAGE_FIRST, OPAQUE)
BLOCK = LAYOUT.block_size
EXTENT_PAGES = 32
NUM_PAGES = 4 * EXTENT_PAGES
PATIENCE_SECONDS = 30.0
UNUSED = {"unbacked", "free"}
_held: list[socket.socket] = []

# Fast, since tests wait for what happens at a heartbeat or a sweep.
SESSIONS = {"heartbeat_seconds": 0.1, "sweep_seconds": 0.05, "silent_seconds": 60.0}

# A small tier below memory, and one whose faults can be switched on.
LMDB = {"type": "lmdb", "capacity_bytes": "16MiB", "free_floor_bytes": 0}
FAULTY = {"type": "faulty", "tier": LMDB}


def settings(num_pages: int = NUM_PAGES, **sections: Any) -> dict[str, Any]:
    """A configuration whose host tier has so many pages of LAYOUT; all of them can be used."""
    tier = {"type": "host", "capacity_bytes": capacity_of(num_pages)}
    cache = {"high_watermark": 1.0, "low_watermark": 1.0}
    return {"tiers": [tier], "sessions": SESSIONS, "cache": cache} | sections


def with_store(num_pages: int = NUM_PAGES, **sections: Any) -> dict[str, Any]:
    """The same with a small LMDB tier below, which takes all as soon as it is there.

    Its faults can be switched on.
    """
    document = settings(num_pages, **sections)
    document["tiers"].append(FAULTY | {"tier": dict(LMDB)})  # copies: some tests change them
    document["cache"] = {"demote_watermark": 1e-6} | document["cache"]
    return document


@contextmanager
def faultless_daemon(document: dict[str, Any]) -> Iterator[RunningDaemon]:
    """A daemon whose log tells, at the end, of no fault of its own."""
    with running_daemon(document) as daemon:
        yield daemon
        assert "reason=internal" not in daemon.log, daemon.log
        assert "Traceback" not in daemon.log, daemon.log


def capacity_of(num_pages: int, layout: Layout = LAYOUT) -> int:
    """What so many pages take, and the table that is kept of them."""
    return num_pages * layout.page_bytes + table_bytes(layout, 4, num_pages)


def eventually(condition: Callable[[], T], patience: float = PATIENCE_SECONDS) -> T:
    """Ask again and again until the answer is true; the last answer where it never is."""
    deadline = time.monotonic() + patience
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"it never came true; the last answer was {answer!r}"
        time.sleep(0.005)
    return answer


def tokens_of(seed: int, num_blocks: int) -> list[int]:
    """A sequence that shares no block with that of another seed."""
    return [seed * 100_000 + place for place in range(num_blocks * BLOCK)]


def kv_of(tokens: Sequence[int], layout: Layout = LAYOUT) -> NDArray[np.float32]:
    """The KV that a model would compute: each row tells of all tokens up to its own.

    Shaped as the arrays of a lease, and exact in float32.
    """
    sums = np.empty(len(tokens), np.float32)
    crc = 0
    for place, token in enumerate(tokens):
        crc = zlib.crc32(token.to_bytes(4, "little"), crc)
        sums[place] = crc & 0xFFFF
    slices = np.arange(layout.num_slices, dtype=np.float32) * 0x10000
    rows = slices[:, None] + sums
    rows = rows.reshape(layout.num_layers, layout.num_planes, len(tokens), 1, 1)
    return np.broadcast_to(rows, (*rows.shape[:3], layout.num_kv_heads, layout.head_size))


def write(lease: Lease, tokens: Sequence[int], start: int, stop: int) -> None:
    """Fill the pages of these tokens of the sequence; no view of them is left."""
    kv, at = kv_of(tokens, lease.layout), start
    for array in lease.write_arrays(start, stop):
        size = array.shape[2]
        array[:] = kv[:, :, at : at + size]
        at += size


def compute(lease: Lease, tokens: Sequence[int]) -> None:
    """Write and commit what follows the lease's prefix, up to the end of these whole blocks."""
    start = lease.num_committed
    lease.reserve(len(tokens))
    write(lease, tokens, start, len(tokens))
    lease.commit(tokens[start:])


def store(namespace: Namespace, tokens: Sequence[int]) -> None:
    """Have these whole blocks in the cache."""
    with namespace.match(tokens) as lease:
        compute(lease, tokens)


def read(lease: Lease, start: int, stop: int) -> NDArray[Any]:
    """A copy of the KV of these tokens, in one piece."""
    arrays = lease.read_arrays(start, stop)
    return np.concatenate(arrays, axis=2) if arrays else kv_of([], lease.layout)


def holds(lease: Lease, tokens: Sequence[int], stop: int | None = None) -> bool:
    """Whether the lease's pages hold the KV of exactly these tokens."""
    stop = len(tokens) if stop is None else stop
    return bool(np.array_equal(read(lease, 0, stop), kv_of(tokens, lease.layout)[:, :, :stop]))


def pages(client: Client) -> dict[str, int]:
    """How many pages are in each state, where there are some."""
    tier = client.status().tiers[0]
    return {state: count for state, count in tier.pages.items() if count}


def held(client: Client) -> dict[str, int]:
    """How many pages are in each state in which they are of use or out of use."""
    return {state: count for state, count in pages(client).items() if state not in UNUSED}


def pages_in(client: Client, state: str) -> int:
    return pages(client).get(state, 0)


def free_port() -> int:
    """One of this machine's that nobody is given by chance for as long as this process lives."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # whoever names it may listen there
    _held.append(held)
    port: int = held.getsockname()[1]
    return port


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own, not shared."""
    with open(f"/proc/{pid}/status") as file:
        (line,) = [line for line in file if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10
