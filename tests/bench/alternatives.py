"""alternatives: a prefix stored by one process and used by another: kvd, Redis, files in memory."""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvd.arena.base import NUMPY_DTYPES, Array
from kvd_client import Client, Lease
from tests.bench.common import (
    IDENTITY,
    LAYOUT_8B,
    SHARED_MEMORY,
    Bench,
    Row,
    capacity_for,
    describe,
    fitting_tokens,
    in_process,
    one_thread,
    random_tokens,
    row,
    running_daemon,
    seconds,
    stop,
    timed,
)

NUM_TOKENS = 8 << 10
# Commands under way at once: the replies of more pile up in the server, which makes it slower.
PIPELINE = 8

Blocks = NDArray[np.uint8]  # `[blocks, page_bytes]`


class Loads(msgspec.Struct, frozen=True):
    """What a second process measured: seconds until it has the KV, and until it read it all."""

    have: list[float]
    read: list[float]
    total: int


class Times(msgspec.Struct, frozen=True):
    store: list[float]
    loads: Loads


def alternatives(bench: Bench) -> Iterator[Row]:
    wanted = bench.pick(NUM_TOKENS, 256)
    num_tokens = fitting_tokens(wanted, LAYOUT_8B, copies=3)
    count = bench.pick(5, 2)
    blocks = _random_blocks(num_tokens // LAYOUT_8B.block_size)
    told = describe(num_tokens, LAYOUT_8B, wanted)
    bench.say(f"kvd: {told}")
    kvd = _measure_kvd(blocks, num_tokens, count)
    if shutil.which("redis-server"):
        bench.say("Redis over its unix socket")
        with _redis_server() as path:
            found = _measure(Redis, path, blocks, count)
        yield from _rows("redis", found, kvd, told)
    else:
        bench.say("Redis: skipped, since there is no redis-server here")
    bench.say(f"files in {SHARED_MEMORY}")
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=SHARED_MEMORY) as folder:
        found = _measure(Files, Path(folder), blocks, count)
    yield from _rows("files", found, kvd, told)


def _rows(name: str, theirs: Times, ours: Times, told: str) -> Iterator[Row]:
    def compare(figure: str, their: list[float], our: list[float], what: str) -> Row:
        slow, fast = statistics.median(their), statistics.median(our)
        return row(
            f"alternatives_{name}_{figure}",
            slow / fast,
            "x",
            f"{told}, {what}: {name} {seconds(slow)}, kvd {seconds(fast)}, medians of {len(our)}; "
            f"the first time {seconds(their[0])} and {seconds(our[0])}",
        )

    yield compare(
        "load",
        theirs.loads.have,
        ours.loads.have,
        f"until a second process has it: {name} block by block into a touched buffer, kvd leased "
        "as tensors",
    )
    yield compare(
        "read",
        theirs.loads.read,
        ours.loads.read,
        "until a second process has it and has read every byte once",
    )
    yield compare("store", theirs.store, ours.store, "stored from private memory under new keys")


def _random_blocks(count: int) -> Blocks:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 63, (count, LAYOUT_8B.page_bytes // 8), dtype=np.uint64)
    return words.view(np.uint8)


def _total(array: Array) -> int:
    """Read every byte; the same for the same bytes in whatever order of words."""
    return int(array.view(np.uint64).sum(dtype=np.uint64))


# --- kvd ---


def _measure_kvd(blocks: Blocks, num_tokens: int, count: int) -> Times:
    layout = LAYOUT_8B
    shape = (layout.num_layers, layout.num_planes, num_tokens, layout.num_kv_heads)
    kv = blocks.view(NUMPY_DTYPES[layout.dtype]).reshape(*shape, layout.head_size)
    with running_daemon(capacity_for(num_tokens, layout)) as daemon:
        with Client(daemon.endpoint, timeout=60) as client:
            namespace = client.open(IDENTITY, layout)

            def store(seed: int) -> None:
                tokens = random_tokens(num_tokens, seed)
                with namespace.match(tokens, reserve_tokens=num_tokens) as lease:
                    assert lease.shortage is None
                    _write(lease, kv)
                    lease.commit(tokens)

            stored = [timed(partial(store, seed)) for seed in range(count)]
        loads = in_process(_load_kvd, daemon.endpoint, num_tokens, count)
    assert loads.total == _total(blocks)
    return Times(stored, loads)


def _write(lease: Lease, kv: Array) -> None:
    at = 0
    for target in lease.write_arrays(0, kv.shape[2]):
        target[...] = kv[:, :, at : at + target.shape[2]]
        at += target.shape[2]


def _load_kvd(endpoint: str, num_tokens: int, count: int) -> Loads:
    tokens = random_tokens(num_tokens, seed=count - 1)  # the last that was stored
    with one_thread(), Client(endpoint, timeout=60) as client:
        namespace = client.open(IDENTITY, LAYOUT_8B)

        def have() -> None:
            with namespace.match(tokens) as lease:
                assert lease.read_tensors(0, num_tokens)

        def read() -> int:
            with namespace.match(tokens) as lease:
                return sum(map(_total, lease.read_arrays(0, num_tokens))) % (1 << 64)

        return _loads(have, read, count)


def _loads(have: Callable[[], object], read: Callable[[], int], count: int) -> Loads:
    times_to_have, times_to_read = [], []
    for _ in range(count):
        times_to_have.append(timed(have))
        times_to_read.append(timed(read))
    return Loads(times_to_have, times_to_read, read())


# --- others ---


class Other(Protocol):
    """A store of blocks by number, for one process; what it stored, others can load."""

    def __init__(self, place: Path) -> None: ...
    def store(self, blocks: Blocks) -> None: ...
    def load(self, blocks: Blocks) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


def _measure(kind: type[Other], place: Path, blocks: Blocks, count: int) -> Times:
    stored = []
    with closing(kind(place)) as other:
        for _ in range(count):
            other.clear()
            stored.append(timed(lambda: other.store(blocks)))
    loads = in_process(_load, kind, place, blocks.shape, count)
    assert loads.total == _total(blocks)
    return Times(stored, loads)


def _load(kind: type[Other], place: Path, shape: tuple[int, int], count: int) -> Loads:
    buffer = np.ones(shape, np.uint8)
    with closing(kind(place)) as other:

        def read() -> int:
            other.load(buffer)
            return _total(buffer)

        return _loads(lambda: other.load(buffer), read, count)


class Files:
    """One file a block in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def store(self, blocks: Blocks) -> None:
        for number, block in enumerate(blocks):
            with (self._folder / str(number)).open("wb", buffering=0) as file:
                assert file.write(block) == len(block)

    def load(self, blocks: Blocks) -> None:
        for number, block in enumerate(blocks):
            with (self._folder / str(number)).open("rb", buffering=0) as file:
                assert file.readinto(block) == len(block)

    def clear(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()

    def close(self) -> None:
        """Nothing stays open."""


class Redis:
    """One value a block, in a few lines of its protocol."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))

    def store(self, blocks: Blocks) -> None:
        for number, block in enumerate(blocks):
            self._socket.sendall(b"*3\r\n$3\r\nSET\r\n%b$%d\r\n" % (_bulk(number), len(block)))
            self._socket.sendall(block)
            self._socket.sendall(b"\r\n")
        self._expect(b"+OK\r\n" * len(blocks))

    def load(self, blocks: Blocks) -> None:
        for start in range(0, len(blocks), PIPELINE):
            batch = blocks[start : start + PIPELINE]
            keys = range(start, start + len(batch))
            self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n" + _bulk(key) for key in keys))
            for block in batch:
                self._expect(b"$%d\r\n" % len(block))
                assert self._socket.recv_into(block, 0, socket.MSG_WAITALL) == len(block)
                self._expect(b"\r\n")

    def clear(self) -> None:
        self._socket.sendall(b"*1\r\n$8\r\nFLUSHALL\r\n")
        self._expect(b"+OK\r\n")

    def close(self) -> None:
        self._socket.close()

    def _expect(self, reply: bytes) -> None:
        assert self._socket.recv(len(reply), socket.MSG_WAITALL) == reply


def _bulk(number: int) -> bytes:
    key = b"%d" % number
    return b"$%d\r\n%b\r\n" % (len(key), key)


@contextmanager
def _redis_server() -> Iterator[Path]:
    """The socket of a Redis of one's own, in memory alone."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        path = Path(folder) / "redis.sock"
        where = ["--port", "0", "--unixsocket", str(path), "--dir", folder]
        process = subprocess.Popen(
            ["redis-server", *where, "--save", "", "--appendonly", "no"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            if not any("eady to accept connections" in line for line in process.stdout):
                raise RuntimeError(f"redis-server did not start: exit {process.wait()}")
            yield path
        finally:
            stop(process)
