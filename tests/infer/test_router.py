"""Router: many threads and tasks before one engine, and nobody left waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvd_client import BadRequest, LimitExceeded
from kvd_infer.engine import Engine
from kvd_infer.router import EngineFailed, Router, Stream
from kvd_infer.sampler import SamplingParams
from tests.e2e.support import eventually
from tests.infer.conftest import PATIENCE_SECONDS
from tests.infer.engines import STEPS, alone, greedy, ids, model_of, reference

LONG = SamplingParams(max_tokens=2000, temperature=0)
SHORT = SamplingParams(max_tokens=STEPS, temperature=0)


@pytest.fixture
def engine(one_thread: None) -> Engine:
    return Engine(model_of("r1"))


@pytest.fixture
def router(engine: Engine) -> Iterator[Router]:
    with Router(engine, max_requests=4) as router:
        yield router


def tokens_of(stream: Stream) -> list[int]:
    return [token.id for output in stream for token in output.tokens]


def reason_of(stream: Stream) -> str | None:
    *_, last = stream
    return last.reason


def in_threads(count: int, do: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * count

    def work(number: int) -> None:
        results[number] = do(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    return results


def test_threads_have_each_the_tokens_of_its_own(router: Router) -> None:
    results = in_threads(4, lambda number: tokens_of(router.submit(ids(30 + number), SHORT)))
    assert results == [alone(reference(), ids(30 + number), STEPS) for number in range(4)]


async def test_tasks_have_each_the_tokens_of_its_own(router: Router) -> None:
    async def tokens_of(number: int) -> list[int]:
        stream = router.submit(ids(30 + number), SHORT)
        return [token.id async for output in stream for token in output.tokens]

    results = await asyncio.gather(*map(tokens_of, range(4)))
    assert results == [alone(reference(), ids(30 + number), STEPS) for number in range(4)]


def test_stream_has_all_samples(router: Router) -> None:
    params = SamplingParams(max_tokens=3, seed=1, n=3)
    ended = [output.sample for output in router.submit(ids(5), params) if output.reason]
    assert sorted(ended) == [0, 1, 2]


def test_too_many_are_refused(router: Router) -> None:
    streams = [router.submit(ids(5), LONG) for _ in range(4)]
    with pytest.raises(LimitExceeded, match="4 requests"):
        router.submit(ids(5), SHORT)
    streams[0].cancel()
    assert reason_of(streams[0]) == "cancelled"
    assert tokens_of(router.submit(ids(5), SHORT, timeout=PATIENCE_SECONDS))


def test_who_waits_for_a_place_gets_it(router: Router) -> None:
    results = in_threads(
        12, lambda _: tokens_of(router.submit(ids(5), SHORT, timeout=PATIENCE_SECONDS))
    )
    assert results == [alone(reference(), ids(5), STEPS)] * 12
    assert router.num_requests == 0


@pytest.mark.parametrize("tokens", [(), ("x",), (1.5,), (1 << 70,)])
def test_what_is_wrong_with_a_request_is_told_at_once(router: Router, tokens: Any) -> None:
    with pytest.raises(BadRequest, match="at least one token"):
        router.submit(tokens, SHORT)
    assert router.num_requests == 0


def test_of_several_requests_all_or_none_are_begun(router: Router) -> None:
    good = [greedy(str(number), ids(5 + number)) for number in range(3)]
    for bad in (greedy("bad", ids(2040)), greedy("0", ids(5))):
        with pytest.raises(BadRequest):
            router.submit_all([*good, bad])
    with pytest.raises(LimitExceeded):
        router.submit_all([*good, greedy("3", ids(5)), greedy("4", ids(5))])
    assert router.num_requests == 0
    tokens = [tokens_of(stream) for stream in router.submit_all(good)]
    assert tokens == [alone(reference(), request.tokens, STEPS) for request in good]


def test_fault_of_the_engine_when_a_request_comes_is_raised_by_its_stream(
    router: Router, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine, "add", fail)
        with pytest.raises(MemoryError):
            next(iter(router.submit(ids(5), SHORT)))
    assert tokens_of(router.submit(ids(5), SHORT))


def test_id_under_way_is_refused_and_is_free_again(router: Router) -> None:
    stream = router.submit(ids(5), SHORT, id="one")
    with pytest.raises(BadRequest, match="under way"):
        router.submit(ids(5), SHORT, id="one")
    assert tokens_of(stream) == alone(reference(), ids(5), STEPS)
    other = router.submit(ids(5), SHORT, id="two")
    tokens_of(other)
    assert tokens_of(router.submit(ids(6), SHORT, id="one")) == alone(reference(), ids(6), STEPS)


# --- who lets go ---


def test_who_stops_reading_cancels(router: Router) -> None:
    for _ in router.submit(ids(5), LONG, id="one"):
        break
    assert tokens_of(router.submit(ids(5), SHORT))
    assert is_free(router, "one")


def test_stream_that_is_dropped_unread_cancels(router: Router) -> None:
    for number in range(8):  # twice as many as there are places
        router.submit(ids(5), LONG, id=str(number), timeout=PATIENCE_SECONDS)
    assert is_free(router, "7")


def test_request_has_its_place_until_it_is_read(router: Router) -> None:
    streams = [router.submit(ids(5 + number), SHORT) for number in range(4)]
    eventually(lambda: all(stream._feed.is_over for stream in streams))
    with pytest.raises(LimitExceeded, match="4 requests"):
        router.submit(ids(5), SHORT)
    assert tokens_of(streams[2]) == alone(reference(), ids(7), STEPS)
    assert tokens_of(router.submit(ids(5), SHORT))
    assert tokens_of(streams[0]) == alone(reference(), ids(5), STEPS)


async def test_task_that_is_cancelled_cancels(router: Router) -> None:
    stream, has_begun = router.submit(ids(5), LONG, id="one"), asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            has_begun.set()

    task = asyncio.create_task(read())
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_free(router, "one")


def is_free(router: Router, id: str) -> bool:
    """Wait until no request of this id is under way."""
    with router._lock:
        return router._lock.wait_for(lambda: id not in router._feeds, PATIENCE_SECONDS)


def test_request_is_cancelled_from_another_thread(router: Router) -> None:
    stream = router.submit(ids(5), LONG)
    outputs = iter(stream)
    next(outputs)
    in_threads(3, lambda _: stream.cancel())
    *_, last = outputs
    assert last.reason == "cancelled"


def test_loop_that_was_closed_ends_nobody_else(router: Router) -> None:
    loop = asyncio.new_event_loop()
    stream = router.submit(ids(5), LONG).__aiter__()
    loop.run_until_complete(stream.__anext__())
    loop.close()
    assert tokens_of(router.submit(ids(5), SHORT)) == alone(reference(), ids(5), STEPS)


# --- ends ---


def test_close_lets_go_on_within_its_grace(engine: Engine) -> None:
    router = Router(engine)
    stream = router.submit(ids(5), SHORT)
    router.close(grace=PATIENCE_SECONDS)
    assert tokens_of(stream) == alone(reference(), ids(5), STEPS)


def test_close_ends_who_is_not_done(engine: Engine) -> None:
    router = Router(engine)
    outputs = iter(router.submit(ids(5), LONG))
    next(outputs)
    router.close()
    *_, last = outputs
    assert last.reason == "cancelled"


def test_close_refuses_who_waits_and_who_comes(engine: Engine) -> None:
    router = Router(engine, max_requests=0)
    waiting = threading.Event()

    def submit() -> None:
        waiting.set()
        router.submit(ids(5), SHORT, timeout=PATIENCE_SECONDS)

    closer = threading.Thread(target=lambda: waiting.wait() and router.close())
    closer.start()
    with pytest.raises(LimitExceeded, match="closed"):
        submit()
    closer.join()
    with pytest.raises(LimitExceeded, match="closed"):
        router.submit(ids(5), SHORT)
    router.close()


def test_step_that_fails_is_told_to_all_and_the_next_works(
    router: Router, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [router.submit(ids(5), LONG, id=str(number)) for number in range(3)]
    begun = [iter(stream) for stream in streams]
    for outputs in begun:
        next(outputs)
    forward = engine.model.forward

    def fail(*args: object) -> None:
        monkeypatch.setattr(engine.model, "forward", forward)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.model, "forward", fail)
    for outputs in begun:
        with pytest.raises(EngineFailed, match="out of memory"):
            list(outputs)
    tokens = tokens_of(router.submit(ids(5), SHORT, id="0", timeout=PATIENCE_SECONDS))
    assert tokens == alone(reference(), ids(5), STEPS)


def test_a_thread_that_dies_leaves_nobody_waiting(
    router: Router, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = router.submit(ids(5), LONG)

    def fail() -> None:
        raise ValueError("worse than a step")

    monkeypatch.setattr(engine, "step", fail)  # as is the one that would tell of the end
    with pytest.raises(EngineFailed):
        list(stream)
    eventually(lambda: not router.is_alive)
    with pytest.raises(LimitExceeded, match="closed"):
        router.submit(ids(5), SHORT)


def test_a_stream_that_is_over_ends_again(router: Router) -> None:
    stream = router.submit(ids(5), SHORT)
    assert len(tokens_of(stream)) == STEPS
    assert tokens_of(stream) == []
