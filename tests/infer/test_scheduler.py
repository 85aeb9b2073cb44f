"""Scheduler: whose turn it is, within the budget, and that no page is ever lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING

import pytest

from kvd.testing.daemons import running_daemon
from kvd_client import Identity, Layout
from kvd_infer.engine import Engine
from kvd_infer.sampler import SamplingParams
from kvd_infer.scheduler import Limits, Part, Scheduler
from kvd_infer.sequence import Request, Sequence
from tests.infer.conftest import PATIENCE_SECONDS, attached
from tests.infer.engines import (
    BLOCK,
    Heard,
    assert_all_given_back,
    assert_as_alone,
    greedy,
    ids,
    model_of,
    pool,
)
from tests.infer.runs import num_leases

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client import Client, Namespace

LAYOUT = Layout(num_layers=2, num_kv_heads=2, head_size=32, dtype="float32", block_size=BLOCK)


@pytest.fixture(scope="module")
def small_daemon() -> Iterator[RunningDaemon]:
    """It has 32 pages."""
    with running_daemon(pool(32)) as daemon:
        yield daemon


@pytest.fixture
def small(small_daemon: RunningDaemon) -> Iterator[Client]:
    with attached(small_daemon) as client:
        yield client


@pytest.fixture
def namespace(shared_daemon: RunningDaemon, salt: str) -> Iterator[Namespace]:
    with attached(shared_daemon) as client:
        yield client.open(Identity("numbers", "r1"), LAYOUT, salt)


class Bench:
    """A scheduler, and what computes its plans: rows that nobody reads."""

    def __init__(self, limits: Limits, namespace: Namespace | None = None) -> None:
        self.scheduler = Scheduler(namespace, LAYOUT, limits)
        self.num_added = 0

    def add(self, tokens: tuple[int, ...], max_tokens: int = 100, priority: int = 0) -> Sequence:
        self.num_added += 1
        request = greedy(str(self.num_added), tokens, max_tokens, priority=priority)
        sequence = Sequence(request, 0, self.num_added)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """How many tokens of which sequence were computed."""
        parts = self.scheduler.plan()
        for part in parts:
            self._compute(part)
        return {part.sequence.request.id: part.num_tokens for part in parts}

    def _compute(self, part: Part) -> None:
        is_last = part.is_last
        part.sequence.chunk(part.num_tokens).forget()
        part.sequence.written(part.num_tokens)
        if is_last:
            part.sequence.append(0)


def test_prompts_share_what_those_that_generate_leave_of_the_budget() -> None:
    bench = Bench(Limits(step_tokens=10))
    bench.add(ids(4))
    bench.add(ids(20, 1))
    assert bench.step() == {"1": 4, "2": 6}
    assert bench.step() == {"1": 1, "2": 9}
    bench.add(ids(20, 2))
    assert bench.step() == {"1": 1, "2": 5, "3": 4}
    assert bench.step() == {"1": 1, "2": 1, "3": 8}


def test_budget_too_small_for_all_that_generate_goes_to_those_before() -> None:
    bench = Bench(Limits(step_tokens=2))
    for number in range(3):
        bench.add(ids(1, number))
    assert bench.step() == {"1": 1, "2": 1}
    assert bench.step() == {"1": 1, "2": 1}


def test_urgent_prompt_is_computed_before_those_that_were_begun() -> None:
    bench = Bench(Limits(step_tokens=10))
    bench.add(ids(30))
    bench.step()
    bench.add(ids(15, 1), priority=1)
    assert bench.step() == {"1": 10}
    bench.scheduler._limits = Limits(step_tokens=15)
    assert bench.step() == {"1": 10, "2": 5}
    assert bench.step() == {"2": 10, "1": 1}


def test_no_more_sequences_run_than_may() -> None:
    bench = Bench(Limits(sequences=2))
    first, *_ = [bench.add(ids(5, number)) for number in range(3)]
    assert bench.step() == {"1": 5, "2": 5}
    bench.scheduler.remove(first)
    assert bench.step() == {"2": 1, "3": 5}


def test_private_memory_bounds_how_many_run() -> None:
    bench = Bench(Limits(private_tokens=50))
    for number in range(3):
        bench.add(ids(20, number))
    assert bench.step() == {"1": 20, "2": 20}


def test_last_sequence_gives_way_when_private_memory_is_short() -> None:
    bench = Bench(Limits(private_tokens=50))
    first, second = bench.add(ids(20)), bench.add(ids(20, 1))
    for _ in range(6):
        assert set(bench.step()) == {"1", "2"}
    for _ in range(60):  # also when it alone has more
        assert bench.step() == {"1": 1}
    bench.scheduler.remove(first)
    assert bench.step() == {"2": second.num_prompt + 6}


def test_private_memory_bounds_those_whose_daemon_dies(daemon: RunningDaemon) -> None:
    with attached(daemon) as client:
        namespace = client.open(Identity("numbers", "r1"), LAYOUT)
        bench = Bench(Limits(private_tokens=60), namespace)
        for number in range(3):
            bench.add(ids(20, number), max_tokens=600)
        bench.step()
        daemon.kill()
        while len(bench.scheduler.running) > 1:
            bench.step()
            rows = [sequence.rows for sequence in bench.scheduler.running]
            assert sum(max(each.length - each.capacity, 0) for each in rows if each) <= 60
    assert bench.scheduler.num_preempted == 2


def test_sequence_alone_runs_whatever_private_memory_it_takes() -> None:
    bench = Bench(Limits(private_tokens=10))
    bench.add(ids(20))
    assert bench.step() == {"1": 20}


def test_sequence_waits_for_blocks_that_another_computes(namespace: Namespace) -> None:
    bench = Bench(Limits(step_tokens=32), namespace)
    bench.add(ids(64))
    bench.add(ids(64) + ids(5, 1))
    bench.add(ids(5, 2))
    assert bench.step() == {"1": 32}
    assert bench.step() == {"1": 32}
    assert bench.step() == {"1": 1, "2": 5, "3": 5}


def test_urgent_sequence_waits_for_nobody(namespace: Namespace) -> None:
    bench = Bench(Limits(step_tokens=32), namespace)
    bench.add(ids(40))
    bench.step()
    bench.scheduler._limits = Limits(step_tokens=64)
    bench.add(ids(64)[:33] + ids(20, 1), priority=1)
    assert set(bench.step()) == {"1", "2"}


def test_preempted_sequence_goes_on_behind_what_it_committed(namespace: Namespace) -> None:
    bench = Bench(Limits(), namespace)
    sequence = bench.add(ids(40))
    bench.step()
    bench.scheduler.preempt(sequence)
    assert (sequence.rows, bench.scheduler.waiting) == (None, [sequence])
    assert bench.step() == {"1": 40 + 1 - 32}


# --- random runs ---

LIMITS = Limits(step_tokens=64, sequences=5)
# Some grow over the sixteen pages that they are given at first, of which two may have all.
PROMPTS = [ids(num_tokens, seed) for seed in range(3) for num_tokens in (3, 90, 230)]
PROMPTS += [PROMPTS[2][:100] + tokens[:130] for tokens in PROMPTS[5::3]]


class RandomRun:
    """An engine under random requests; after each step the books are compared."""

    def __init__(self, seed: int, client: Client) -> None:
        self.rng = Random(seed)
        self.engine = Engine(model_of(f"random run {seed}"), client, limits=LIMITS)
        self.heard = Heard()
        self.requests: list[Request] = []
        self.cancelled: set[str] = set()

    def go(self, num_requests: int, between: Callable[[Random], object]) -> None:
        """`between` is called before each step."""
        while len(self.requests) < num_requests or self.engine.has_work:
            if len(self.requests) < num_requests and self.rng.random() < 0.3:
                self.add()
            if self.requests and self.rng.random() < 0.02:
                self.cancel()
            between(self.rng)
            self.step()

    def add(self) -> None:
        rng = self.rng
        params = SamplingParams(
            max_tokens=rng.choice((1, 50, 50)), temperature=0, n=rng.choice((1, 1, 3))
        )
        id = str(len(self.requests))
        self.requests.append(Request(id, rng.choice(PROMPTS), params, priority=rng.randrange(3)))
        self.engine.add(self.requests[-1])

    def cancel(self) -> None:
        request = self.rng.choice(self.requests)
        names = {f"{request.id}/{sample}" for sample in range(request.params.n)}
        self.cancelled |= names - set(self.heard.reasons)
        self.engine.cancel(request.id)

    def step(self) -> None:
        before = self.engine.num_computed
        self.heard.take(self.engine.step())
        assert self.engine.num_computed - before <= LIMITS.step_tokens
        scheduler = self.engine.scheduler
        assert len(scheduler.running) <= LIMITS.sequences
        assert all(sequence.rows is None for sequence in scheduler.waiting)
        under_way = [each for all in self.engine._requests.values() for each in all]
        followers = [each for all in self.engine._followers.values() for each in all]
        known = [*scheduler.running, *scheduler.waiting, *followers]
        assert sorted(known, key=id) == sorted(under_way, key=id)

    def check(self) -> None:
        """All is over: as it would have been alone, and every page was given back."""
        cancelled = {name for name, why in self.heard.reasons.items() if why == "cancelled"}
        assert cancelled == self.cancelled
        not_done = {name.partition("/")[0] for name in cancelled}
        assert_as_alone(self.heard, *(each for each in self.requests if each.id not in not_done))
        assert_all_given_back(self.engine.namespace)


@pytest.mark.parametrize("seed", range(3))
def test_books_are_exact_after_each_step_of_a_random_run(
    one_thread: None, small: Client, seed: int
) -> None:
    run = RandomRun(seed, small)

    def compare_leases(_: Random) -> None:
        assert num_leases(run.engine.namespace) == len(run.engine.scheduler.running)

    run.go(20, compare_leases)
    assert run.engine.scheduler.num_preempted > 0
    run.check()


@pytest.mark.parametrize("seed", range(2))
def test_daemon_that_comes_and_goes_changes_nothing_in_a_random_run(
    one_thread: None, seed: int
) -> None:
    with running_daemon(pool(32)) as daemon, attached(daemon) as client:

        def come_or_go(rng: Random) -> None:
            if rng.random() < 0.04:
                (daemon.kill if daemon.is_running else daemon.start)()

        run = RandomRun(seed, client)
        run.go(12, come_or_go)
        if not daemon.is_running:
            daemon.start()
        assert client.wait_attached(PATIENCE_SECONDS)
        run.check()
