"""AsyncClient: the same operations for tasks, and what is left when they are cancelled."""

from __future__ import annotations

import asyncio
import itertools
import threading
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from kvd.testing.daemons import running_daemon
from kvd_client import BadRequest, DaemonUnavailable, DeadlineExceeded, LeaseEnded, OutOfPages
from kvd_client.aio import AsyncClient, AsyncLease, AsyncNamespace
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    eventually,
    holds,
    pages_in,
    settings,
    tokens_of,
    write,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.testing.daemons import RunningDaemon
    from kvd_client.client import Client

TOKENS = tokens_of(1, 4)


@pytest.fixture
def maps() -> bool:
    return True


@pytest.fixture
async def engine(
    daemon: RunningDaemon, connect: Callable[[], Client], maps: bool
) -> AsyncIterator[AsyncClient]:
    """A client that is closed before `connect` looks whether anything is left of it."""
    async with AsyncClient(daemon.endpoint, timeout=30.0, name="engine", maps=maps) as client:
        assert await client.wait_attached(30.0)
        yield client


@pytest.fixture
def kv(engine: AsyncClient, request: pytest.FixtureRequest) -> AsyncNamespace:
    """This test's own namespace."""
    return engine.open(IDENTITY, LAYOUT, salt=request.node.name)


async def compute(lease: AsyncLease, tokens: list[int]) -> None:
    """Write and commit what follows the lease's prefix."""
    start = lease.num_committed
    await lease.reserve(len(tokens))
    write(lease, tokens, start, len(tokens))
    await lease.commit(tokens[start:])


async def cycle(namespace: AsyncNamespace, tokens: list[int]) -> bool:
    """Store a sequence and find it; whether it was the right one."""
    async with await namespace.match(tokens) as lease:
        await compute(lease, tokens)
    with await namespace.match(tokens) as lease:
        return lease.num_tokens == len(tokens) and holds(lease, tokens)


# --- what it does ---


async def test_what_one_task_commits_another_finds(kv: AsyncNamespace) -> None:
    assert await cycle(kv, TOKENS)


async def test_many_tasks_share_a_client(kv: AsyncNamespace) -> None:
    sequences = [tokens_of(seed, 4) for seed in range(8)]
    assert all(await asyncio.gather(*(cycle(kv, tokens) for tokens in sequences)))
    (session,) = (await kv.client.status()).sessions
    assert (session.num_leases, session.num_reserved) == (0, 0)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_each_loop_and_thread_has_its_client(
    daemon: RunningDaemon, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def work(seed: int) -> None:
        async with AsyncClient(daemon.endpoint, timeout=30.0) as client:
            namespace = client.open(IDENTITY, LAYOUT, salt="loops")
            right.append(await cycle(namespace, tokens_of(seed, 2)))

    def run(seed: int) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(work(seed))

    right: list[bool] = []
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4


async def test_an_operator_looks_at_the_tree_and_drains(
    engine: AsyncClient, kv: AsyncNamespace
) -> None:
    lease = await kv.match(TOKENS)
    await compute(lease, TOKENS)
    spaces = (await engine.status()).namespaces
    (number,) = (each.namespace for each in spaces if each.salt == kv.salt)
    (node,) = (await engine.tree(number)).nodes
    (stretch,) = (await engine.explain(number, TOKENS)).stretches
    assert (node.num_blocks * BLOCK, stretch.num_tokens) == (len(TOKENS), len(TOKENS))
    await engine.drain()
    assert (await engine.status()).is_draining
    await engine.drain(undo=True)
    lease.release()


async def test_an_operator_asks_for_checkpoints_and_verifications(
    engine: AsyncClient, kv: AsyncNamespace
) -> None:
    assert await cycle(kv, TOKENS)
    assert await engine.checkpoint() == 0
    (memory,) = (await engine.verify()).tiers
    assert (memory.num_bad, memory.num_missing) == (0, 0)


async def test_a_match_is_extended_by_what_another_task_commits(kv: AsyncNamespace) -> None:
    lease = await kv.match(TOKENS)
    await cycle(kv, TOKENS)
    assert await lease.extend() == len(TOKENS)
    assert holds(lease, TOKENS)


async def test_a_slow_call_hinders_no_other_task(kv: AsyncNamespace) -> None:
    all_of_it = await kv.match([], reserve_tokens=128 * BLOCK)
    slow = asyncio.create_task(kv.match(TOKENS, reserve_tokens=BLOCK))
    for seed in range(20):
        assert (await kv.match(tokens_of(seed, 1))).is_open
    assert not slow.done()
    all_of_it.release()
    assert len((await slow).pages) > 0


async def test_errors_are_those_of_the_other_client(kv: AsyncNamespace) -> None:
    lease = await kv.match(TOKENS)
    with pytest.raises(OutOfPages):
        await lease.reserve(129 * BLOCK)
    with pytest.raises(BadRequest):
        await lease.commit(TOKENS)
    lease.release()
    with pytest.raises(LeaseEnded):
        await lease.reserve(BLOCK)


async def test_without_a_daemon_a_match_is_a_miss(tmp_path: Path) -> None:
    async with AsyncClient(f"ipc://{tmp_path}/kvd.sock", timeout=0.2) as client:
        assert not (await client.open(IDENTITY, LAYOUT).match(TOKENS)).is_open
        assert not await client.wait_attached(0.0)
        with pytest.raises((DaemonUnavailable, DeadlineExceeded)):
            await client.status()


async def test_after_close_nothing_waits(kv: AsyncNamespace) -> None:
    lease = await kv.match(TOKENS)
    await kv.client.close()
    assert not lease.is_open
    assert not (await kv.match(TOKENS)).is_open
    with pytest.raises(DaemonUnavailable):
        await kv.client.status()


async def test_calls_under_way_end_with_the_daemon_and_the_next_one_serves() -> None:
    with running_daemon(settings()) as daemon:
        async with AsyncClient(daemon.endpoint, timeout=30.0) as engine:
            namespace = engine.open(IDENTITY, LAYOUT)
            all_of_it = await namespace.match([], reserve_tokens=128 * BLOCK)
            lease = await namespace.match([])
            waiting = asyncio.create_task(lease.reserve(BLOCK, timeout=3600.0))
            await engine.status()
            await asyncio.to_thread(daemon.kill)
            with pytest.raises(DaemonUnavailable):
                await waiting
            assert not (await namespace.match(TOKENS)).is_open
            await asyncio.to_thread(daemon.start)
            assert await engine.wait_attached(30.0)
            assert not all_of_it.is_open
            assert await cycle(namespace, TOKENS)


# --- cancelled ---


def mine(observer: Client) -> tuple[int, int]:
    """Leases and reserved pages of the engine's session."""
    (session,) = [one for one in observer.status().sessions if one.client == "engine"]
    return session.num_leases, session.num_reserved


@types.coroutine
def cancelled_at(
    work: Coroutine[Any, Any, Any], turn: int, answered: bool
) -> Generator[Any, None, bool]:
    """Await `work` and cancel it where it waits for the n-th time, before or after the answer.

    False where it did not wait so often: an answer may be there at once.
    """
    for count in itertools.count(1):
        try:
            waits_for = work.send(None)
        except StopIteration:
            return False
        if count < turn or answered:
            yield waits_for
        if count == turn:
            with pytest.raises(asyncio.CancelledError):
                work.throw(asyncio.CancelledError())
            return True
    raise AssertionError


async def match(namespace: AsyncNamespace, lease: AsyncLease, tokens: list[int]) -> None:
    namespace.unbind()
    found = await namespace.match(TOKENS[:6], reserve_tokens=BLOCK, exact_tail=True)
    assert holds(found, TOKENS, 6)
    found.release()


async def replace(namespace: AsyncNamespace, lease: AsyncLease, tokens: list[int]) -> None:
    await lease.replace(TOKENS, reserve_tokens=BLOCK)
    assert holds(lease, TOKENS)


async def fork(namespace: AsyncNamespace, lease: AsyncLease, tokens: list[int]) -> None:
    (await lease.fork(reserve_tokens=BLOCK)).release()


async def extend(namespace: AsyncNamespace, lease: AsyncLease, tokens: list[int]) -> None:
    assert await lease.extend() == 0


async def prefetch(namespace: AsyncNamespace, lease: AsyncLease, tokens: list[int]) -> None:
    await namespace.prefetch(tokens)


async def reserve(namespace: AsyncNamespace, lease: AsyncLease, tokens: list[int]) -> None:
    await lease.reserve(32 * BLOCK)


async def commit(namespace: AsyncNamespace, lease: AsyncLease, tokens: list[int]) -> None:
    assert await lease.commit(tokens) == len(tokens)
    assert holds(lease, tokens)


async def pin(namespace: AsyncNamespace, lease: AsyncLease, tokens: list[int]) -> None:
    await namespace.pin(TOKENS, 60.0)
    await namespace.client.unpin()


async def drop(namespace: AsyncNamespace, lease: AsyncLease, tokens: list[int]) -> None:
    await namespace.drop(tokens)


async def status(namespace: AsyncNamespace, lease: AsyncLease, tokens: list[int]) -> None:
    await namespace.client.status()


WAITS = [(match, 2), (replace, 1), (fork, 1), (reserve, 1), (commit, 1)]
WAITS += [(extend, 1), (prefetch, 1), (pin, 2), (drop, 1), (status, 1)]
# Without a mapping there are bytes to wait for.
WAITS_OF_COPIES = [(match, 4), (replace, 2), (commit, 2)]


def turns(waits: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    return [(operation, turn + 1) for operation, count in waits for turn in range(count)]


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("operation", "turn"), turns(WAITS))
async def test_a_cancelled_operation_can_be_repeated_and_leaves_nothing(
    kv: AsyncNamespace, client: Client, operation: Any, turn: int, answered: bool
) -> None:
    assert await cycle(kv, TOKENS)
    for seed in itertools.count(2):
        tokens = tokens_of(seed, 4)
        lease = await kv.match(tokens, reserve_tokens=16 * BLOCK)
        write(lease, tokens, 0, len(tokens))
        was_cancelled = await cancelled_at(operation(kv, lease, tokens), turn, answered)
        if was_cancelled:
            await operation(kv, lease, tokens)
        lease.release()
        await asyncio.to_thread(eventually, lambda: mine(client) == (0, 0))
        if was_cancelled:
            break


@pytest.mark.parametrize("maps", [False])
@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("operation", "turn"), turns(WAITS_OF_COPIES))
async def test_a_cancelled_copy_can_be_repeated_and_leaves_nothing(
    kv: AsyncNamespace, client: Client, operation: Any, turn: int, answered: bool
) -> None:
    await test_a_cancelled_operation_can_be_repeated_and_leaves_nothing(
        kv, client, operation, turn, answered
    )


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("turn", [1, 2, 3])
async def test_a_client_that_is_cancelled_while_it_begins_leaves_no_session(
    daemon: RunningDaemon, client: Client, turn: int, answered: bool
) -> None:
    """Its first match waits to attach, to open, and for the match."""
    was_cancelled = False
    while not was_cancelled:
        async with AsyncClient(daemon.endpoint, timeout=30.0) as other:
            namespace = other.open(IDENTITY, LAYOUT)
            work = namespace.match(TOKENS, reserve_tokens=BLOCK)
            was_cancelled = await cancelled_at(work, turn, answered)
            # One that closes while it attaches leaves a session that ends by silence alone.
            assert await other.wait_attached(30.0)
    await asyncio.to_thread(eventually, lambda: len(client.status().sessions) == 1)
    assert pages_in(client, "reserved") == 0


async def test_a_match_that_waits_for_pages_is_cancelled_by_a_timeout(
    kv: AsyncNamespace, client: Client
) -> None:
    with await kv.match([], reserve_tokens=128 * BLOCK), pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await kv.match(TOKENS, reserve_tokens=BLOCK)
    await asyncio.to_thread(eventually, lambda: pages_in(client, "reserved") == 0)
    assert (await kv.match(TOKENS)).is_open
