"""attention_vs_contiguous, attention_vs_gather: attention over a leased prefix where it lies.

attention_step: a step of many short sequences, where calls cost as much as reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from kvd_client import Client, Layout, Namespace
from tests.bench.common import (
    IDENTITY,
    Bench,
    Pairs,
    Row,
    capacity_for,
    describe,
    fitting_tokens,
    one_thread,
    pairs,
    random_tokens,
    row,
    running_daemon,
    timed,
)

if TYPE_CHECKING:
    from torch import Tensor

NUM_TOKENS = 32 << 10
NUM_RUNS = 4
QUERY_HEADS = 32
# Four layers, taken in turn: more than the processor's caches hold, on either side.
LAYOUT = Layout(num_layers=4, num_kv_heads=8, head_size=128, dtype="bfloat16")
DTYPES: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
QUERIES = (1, 16)

# A step: heads and layers of SmolLM2-135M.
STEP_LAYOUT = Layout(num_layers=30, num_kv_heads=3, head_size=64, dtype="float32")
STEP_QUERY_HEADS = 9
STEP_SEQUENCES = 16

KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


def attention_vs_contiguous(bench: Bench) -> Iterator[Row]:
    plain, packed, token_major, what = {}, {}, {}, ""
    for name, prefix in _variants(bench):
        layers = [prefix.layer(number) for number in range(LAYOUT.num_layers)]
        private = [_head_major(layer) for layer in layers]
        bench.say(f"{name}: over the lease and over private tensors in turn")
        plain[name] = prefix.compare(lambda n, q, own=private: _kernel(_plain(q), *own[n]))  # type: ignore[misc]
        packed[name] = prefix.compare(lambda n, q, own=private: _kernel(_packed(q), *own[n]))  # type: ignore[misc]
        token_major[name] = prefix.compare(
            lambda n, q, own=layers: _kernel(_packed(q), *_as_heads(own[n]))  # type: ignore[misc]
        )
        what = prefix.what
    ours = f"attend() over one layer of {what}, one thread, against aten.{KERNEL}, unmasked, on"
    contiguous = f"private contiguous [1, {LAYOUT.num_kv_heads}, tokens, {LAYOUT.head_size}]"
    yield _row(
        "attention_vs_contiguous",
        plain,
        f"{ours} {contiguous}, called plainly: a query of [1, {QUERY_HEADS}, queries, 128]",
    )
    yield _row(
        "attention_vs_contiguous_packed",
        packed,
        f"{ours} {contiguous}, the query packed as attend() does it: the heads of one KV head are "
        "rows. What is left is the arena's storage order, token by token instead of head by head",
    )
    yield _row(
        "attention_vs_token_major",
        token_major,
        f"{ours} private [tokens, {LAYOUT.num_kv_heads}, {LAYOUT.head_size}], packed likewise, "
        "in the storage order of the arena. What is left is the cost of sharing and of runs",
    )


def attention_vs_gather(bench: Bench) -> Iterator[Row]:
    fresh, reused, what = {}, {}, ""
    for name, prefix in _variants(bench):
        bench.say(f"{name}: over the lease and after gathering in turn")
        fresh[name] = prefix.compare(prefix.gather)
        reused[name] = prefix.compare(prefix.gather_into_buffers)
        what = prefix.what
    ours = f"attend() over one layer of {what}, one thread, against"
    then = f"and aten.{KERNEL} on the result, packed as attend() does it"
    yield _row("attention_vs_gather", fresh, f"{ours} pages[block_table] of K and V {then}")
    yield _row(
        "attention_vs_gather_reused",
        reused,
        f"{ours} index_select of K and V into buffers touched before {then}",
    )


def attention_step(bench: Bench) -> Iterator[Row]:
    """One token of each sequence through all layers, from the plan on, over the bare calls."""
    import torch

    from kvd_infer.attention import KeysValues, Plan

    runs = _step_runs()
    query = torch.randn(STEP_SEQUENCES, STEP_QUERY_HEADS, STEP_LAYOUT.head_size)
    shape = 1, STEP_LAYOUT.num_kv_heads, -1, STEP_LAYOUT.head_size
    calls = [
        (one.reshape(shape), *_as_heads(run[layer].unbind()))
        for layer in range(STEP_LAYOUT.num_layers)
        for one, its_runs in zip(query, runs, strict=True)
        for run in its_runs
    ]

    def ours() -> None:
        parts = [[KeysValues(run[:, 0], run[:, 1]) for run in its_runs] for its_runs in runs]
        plan = Plan([1] * STEP_SEQUENCES, parts)
        for layer in range(STEP_LAYOUT.num_layers):
            plan.attend(query, layer)

    def bare() -> None:
        for call in calls:
            _kernel(*call)

    with one_thread():
        found = pairs(lambda: timed(ours), lambda: timed(bare), bench.pick(21, 2))
    yield row(
        "attention_step",
        found.ratio,
        "x",
        f"aten.{KERNEL} alone, over a Plan made for the step: a token of each of {STEP_SEQUENCES} "
        f"sequences of 300 to 1000 tokens in 1 to 3 runs, {len(calls)} calls of the kernel in "
        f"{STEP_LAYOUT.num_layers} layers, one thread; {found}",
    )


def _step_runs() -> list[list[Tensor]]:
    """The runs of each sequence, in one arena."""
    import torch

    rng = np.random.default_rng(0)
    lengths = rng.integers(300, 1001, STEP_SEQUENCES)
    shape = STEP_LAYOUT.num_layers, 2, int(lengths.sum()), STEP_LAYOUT.num_kv_heads
    arena = torch.randn(*shape, STEP_LAYOUT.head_size)
    sequences = arena.split(lengths.tolist(), dim=2)
    return [list(its_rows.tensor_split(int(rng.integers(1, 4)), dim=2)) for its_rows in sequences]


def _row(name: str, found: dict[str, Pairs], detail: str) -> Row:
    worst = min(pair.ratio for pair in found.values())
    return row(name, worst, "x", f"{detail}; the worst of {_told(found)}")


def _told(found: dict[str, Pairs]) -> str:
    return "; ".join(f"{name} {pair.ratio:.3g} x ({pair})" for name, pair in found.items())


def _variants(bench: Bench) -> Iterator[tuple[str, _Prefix]]:
    import torch

    with one_thread():
        for dtype in DTYPES:
            layout = msgspec.structs.replace(LAYOUT, dtype=dtype)
            wanted = bench.pick(NUM_TOKENS, 512)
            num_tokens = fitting_tokens(wanted, layout, copies=3)
            bench.say(f"{dtype}: storing {describe(num_tokens, layout, wanted)}")
            with _leased(layout, num_tokens) as runs:
                scaled = f" (scaled down from {wanted}: memory)" if num_tokens < wanted else ""
                what = f"{num_tokens} tokens{scaled} in {len(runs)} runs"
                # What gathers has a private pool of the same pages and a block table.
                pages = torch.cat(runs, dim=2).unflatten(2, (-1, layout.block_size))
                for queries in QUERIES:
                    yield (
                        f"{dtype}, {queries} queries",
                        _Prefix(runs, pages, queries, bench.pick(9, 2), what),
                    )


@contextmanager
def _leased(layout: Layout, num_tokens: int) -> Iterator[list[Tensor]]:
    """The runs of a leased prefix, touched."""
    with (
        running_daemon(capacity_for(2 * num_tokens, layout)) as daemon,
        Client(daemon.endpoint, timeout=60) as client,
    ):
        namespace = client.open(IDENTITY, layout)
        tokens = random_tokens(num_tokens, seed=0)
        _store_in_runs(namespace, tokens)
        with namespace.match(tokens) as lease:
            assert lease.num_tokens == num_tokens
            yield lease.read_tensors(0, num_tokens)


def _store_in_runs(
    namespace: Namespace, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]
) -> None:
    """Have the tokens cached in NUM_RUNS runs, by reserving for another sequence in between."""
    rng = np.random.default_rng(0)
    step = len(tokens) // NUM_RUNS
    other = random_tokens(len(tokens), seed=1)
    with namespace.match(tokens) as lease, namespace.match(other) as between:
        for number in range(NUM_RUNS):
            lease.reserve((number + 1) * step)
            between.reserve((number + 1) * 256)
        for start in range(0, len(tokens), 1024):
            _fill(lease.write_tensors(start, min(start + 1024, len(tokens))), rng)
        lease.commit(tokens)


def _fill(targets: list[Tensor], rng: np.random.Generator) -> None:
    import torch

    for target in targets:
        target.copy_(torch.from_numpy(rng.standard_normal(target.shape, np.float32)))


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A leased prefix and the queries that attend over it, layer by layer in turn."""

    runs: list[Tensor]
    pages: Tensor  # [layers, planes, pages, block_size, heads, head_size]
    queries: int
    num_pairs: int
    what: str

    def compare(self, other: Callable[[int, Tensor], Tensor]) -> Pairs:
        """attend() over the lease against another way to the same result."""
        import torch

        shape = (self.queries, QUERY_HEADS, LAYOUT.head_size)
        query = torch.randn(shape).to(self.pages.dtype)
        self._check(self._attend(0, query), other(0, query))
        turns = (count(), count())

        def measure(turn: Iterator[int], function: Callable[[int, Tensor], Tensor]) -> float:
            number = next(turn) % LAYOUT.num_layers
            return timed(lambda: function(number, query))

        return pairs(
            lambda: measure(turns[0], self._attend),
            lambda: measure(turns[1], other),
            self.num_pairs,
        )

    @property
    def block_table(self) -> Tensor:
        import torch

        return torch.arange(self.pages.shape[2])

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer as they lie, gathered: `[tokens, heads, head_size]`."""
        keys, values = (
            self.pages[number, plane][self.block_table].flatten(0, 1) for plane in (0, 1)
        )
        return keys, values

    def gather(self, number: int, query: Tensor) -> Tensor:
        return _kernel(_packed(query), *_as_heads(self.layer(number)))

    def gather_into_buffers(self, number: int, query: Tensor) -> Tensor:
        import torch

        gathered = []
        for plane, buffer in enumerate(_buffers(self.pages, self.pages.shape[2])):
            torch.index_select(self.pages[number, plane], 0, self.block_table, out=buffer)
            gathered.append(buffer.flatten(0, 1))
        return _kernel(_packed(query), *_as_heads(gathered))

    def _attend(self, number: int, query: Tensor) -> Tensor:
        from kvd_infer.attention import KeysValues, attend

        return attend(query, [KeysValues(run[number, 0], run[number, 1]) for run in self.runs])

    def _check(self, ours: Tensor, theirs: Tensor) -> None:
        """The last query sees every key either way; the others are masked in ours alone."""
        import torch

        theirs = theirs.reshape(QUERY_HEADS, self.queries, LAYOUT.head_size)
        torch.testing.assert_close(ours[-1], theirs[:, -1], rtol=0.02, atol=0.02)


def _packed(query: Tensor) -> Tensor:
    """As attend() passes an unmasked query: up to 32 rows, the kernel's least block, a head."""
    heads = max(LAYOUT.num_kv_heads, query.shape[0] * QUERY_HEADS // 32)
    return query.transpose(0, 1).reshape(1, heads, -1, LAYOUT.head_size)


def _plain(query: Tensor) -> Tensor:
    return query.transpose(0, 1).unsqueeze(0)


def _as_heads(layer: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.transpose(0, 1).unsqueeze(0) for tensor in layer]


def _head_major(layer: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in _as_heads(layer)]


def _kernel(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    import torch

    output: Tensor = getattr(torch.ops.aten, KERNEL)(query, keys, values, 0.0, False)[0]
    return output


_kept: dict[tuple[int, str], list[Tensor]] = {}


def _buffers(pages: Tensor, num_pages: int) -> list[Tensor]:
    """Two touched buffers for so many pages, kept from call to call."""
    import torch

    key = (num_pages, str(pages.dtype))
    if key not in _kept:
        _kept.clear()
        shape = (num_pages, *pages.shape[3:])
        _kept[key] = [torch.ones(shape, dtype=pages.dtype) for _ in range(2)]
    return _kept[key]
