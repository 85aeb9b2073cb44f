"""What the parts share: rows and budgets, interleaved pairs, a daemon of one's own, a prefix."""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvd_client import Identity, Layout, Namespace

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")

IDENTITY = Identity(model="bench", revision="1")

# The KV of an 8B model with grouped queries: 128 KiB a token, 4 GiB for 32k tokens.
LAYOUT_8B = Layout(num_layers=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
# Where only the books matter: 1 KiB a page.
LAYOUT_SMALL = Layout(num_layers=1, num_kv_heads=1, head_size=16, dtype="bfloat16")

SHARED_MEMORY = Path("/dev/shm")
STOP_SECONDS = 15.0


# --- figures ---


@dataclass(frozen=True, slots=True)
class Budget:
    limit: float
    at_least: bool

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"

    def met_by(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


# Section 11 of the design, and of a replay how much of what could be found is found. A figure that
# is not here is shown beside one that is.
BUDGETS = {
    "hit_vs_copy": Budget(300, at_least=True),
    "hit_first_touch": Budget(10, at_least=True),
    "match_vs_echo": Budget(3, at_least=False),
    "cycles_vs_echo": Budget(0.5, at_least=True),
    "cycles_per_second": Budget(3000, at_least=True),
    "cycles_p99_over_p50": Budget(8, at_least=False),
    "flood_p99": Budget(8, at_least=False),
    "store_vs_copy": Budget(0.9, at_least=True),
    "disk_write": Budget(0.8, at_least=True),
    "disk_read": Budget(0.8, at_least=True),
    "attention_vs_contiguous": Budget(0.95, at_least=True),
    "attention_vs_gather": Budget(2, at_least=True),
    "median_run_tokens": Budget(256, at_least=True),
    "recovery_memory_per_second": Budget(100_000, at_least=True),
    "recovery_memory_growth": Budget(1.5, at_least=False),
    "recovery_disk_per_second": Budget(100_000, at_least=True),
    "recovery_disk_growth": Budget(1.5, at_least=False),
    "infer_warm_ttft": Budget(10, at_least=True),
    "infer_vs_private": Budget(0.97, at_least=True),
    "infer_vs_generate_batch": Budget(1, at_least=True),
    "replay_vs_lru": Budget(0.99, at_least=True),
    "replay_vs_ceiling": Budget(0.99, at_least=True),
    "start_seconds": Budget(1, at_least=False),
    "start_memory_mib": Budget(100, at_least=False),
}


class Row(msgspec.Struct, frozen=True):
    """One figure; without a budget there is nothing to miss."""

    name: str
    value: float
    unit: str
    budget: float | None
    met: bool
    detail: str


def row(name: str, value: float, unit: str, detail: str) -> Row:
    budget = BUDGETS.get(name)
    return Row(
        name,
        round(value, 4),
        unit,
        budget.limit if budget else None,
        budget.met_by(value) if budget else True,
        detail,
    )


@dataclass(frozen=True, slots=True)
class Bench:
    """How to run: `tiny` only proves that a part works; `say` is told how far it is."""

    say: Callable[[str], None]
    tiny: bool = False

    def pick(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full


Part = Callable[[Bench], Iterator[Row]]


# --- time ---


@dataclass(frozen=True, slots=True)
class Pairs:
    """Seconds of two things measured in turn, so that the machine's moods meet both."""

    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        """How many times as long theirs takes: the median over the pairs."""
        return statistics.median(
            theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)
        )

    def __str__(self) -> str:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        return f"{seconds(ours)} against {seconds(theirs)}, medians of {len(self.ours)} pairs"


def pairs(ours: Callable[[], float], theirs: Callable[[], float], count: int) -> Pairs:
    """Measure both `count` times, each first every other time; both return seconds."""
    found = Pairs([], [])
    turns = [(ours, found.ours), (theirs, found.theirs)]
    for number in range(count):
        for measure, results in turns if number % 2 else turns[::-1]:
            results.append(measure())
    return found


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


# --- processes ---


def in_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The function's result from a fresh process, which may have children of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(function, *args, **kwargs).result()


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()


# --- a daemon ---


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    endpoint: str
    pid: int
    seconds_to_ready: float


@contextmanager
def running_daemon(
    capacity_bytes: int, directory: Path | None = None, command: Sequence[str] = ()
) -> Iterator[RunningDaemon]:
    """A kvd with its own endpoint and files; pages in `directory`, else in /dev/shm."""
    own = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir=SHARED_MEMORY))
    sockets = Path(tempfile.mkdtemp(prefix="kvd-bench-"))
    config = sockets / "kvd.toml"
    config.write_text(
        f'endpoint = "ipc://{sockets}/kvd.sock"\n'
        f'directory = "{own}/daemon"\n'
        f'data_directory = "{own}/data"\n'
        "[log]\n"
        'level = "warning"\n'
        "[[tiers]]\n"
        'type = "host"\n'
        f"capacity_bytes = {capacity_bytes}\n"
        f'directory = "{directory or own / "pages"}"\n'
    )
    start = time.perf_counter()
    process = subprocess.Popen(
        [*(command or (sys.executable, "-m", "kvd")), "--config", config],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "is ready" not in line:
            raise RuntimeError(f"kvd did not start: {line or f'exit {process.wait()}'}")
        yield RunningDaemon(f"ipc://{sockets}/kvd.sock", process.pid, time.perf_counter() - start)
    finally:
        stop(process)
        shutil.rmtree(own, ignore_errors=True)
        shutil.rmtree(sockets, ignore_errors=True)


def capacity_for(num_tokens: int, layout: Layout) -> int:
    """A tier in which so many tokens lie well below the watermark, with whole extents to spare."""
    return int(num_tokens * layout.token_bytes * 1.25) + (512 << 20)


def fitting_tokens(wanted: int, layout: Layout, copies: int) -> int:
    """`wanted`, halved until `copies` of their KV fit into three quarters of the free memory."""
    free = min(_available_bytes(), shutil.disk_usage(SHARED_MEMORY).free)
    while wanted > layout.block_size and wanted * layout.token_bytes * copies > free * 3 // 4:
        wanted //= 2
    return wanted


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


# --- a prefix ---


def random_tokens(num_tokens: int, seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 128_000, num_tokens, dtype=np.uint32)


def store(namespace: Namespace, tokens: NDArray[np.uint32]) -> None:
    """Have these whole blocks cached, every byte of their pages written."""
    with namespace.match(tokens, reserve_tokens=len(tokens)) as lease:
        assert lease.shortage is None
        for array in lease.write_arrays(lease.num_tokens, len(tokens)):
            array.fill(1)
            del array
        assert lease.commit(tokens[lease.num_tokens :]) == len(tokens)


def like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Private tensors of the same shapes, contiguous and touched."""
    import torch

    return [torch.ones(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def copy_all(to: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
    for target, source in zip(to, of, strict=True):
        target.copy_(source)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: two of them on contended cores measure the scheduler."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe(num_tokens: int, layout: Layout, wanted: int) -> str:
    size = num_tokens * layout.token_bytes
    scaled = f" (scaled down from {wanted}: memory)" if num_tokens < wanted else ""
    return f"{num_tokens} tokens{scaled} = {size / (1 << 30):.3g} GiB of KV"
