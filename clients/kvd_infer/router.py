"""Router: takes requests from any thread or task, and brings each the tokens of its own.

    with Router(engine) as router:
        for output in router.submit(tokens, SamplingParams(max_tokens=64)): ...

One thread steps the engine as long as there is work. Where too many wait, who comes is refused,
or waits as long as he says.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Self, TypeAlias

from kvd_client import BadRequest, LimitExceeded
from kvd_infer.sequence import Request

if TYPE_CHECKING:
    from kvd_infer.engine import Engine, Output
    from kvd_infer.sampler import SamplingParams

logger = logging.getLogger(__name__)

# Outputs in order, the error that ended them, or None: there are no more.
Item: TypeAlias = "Output | Exception | None"


class EngineFailed(Exception):
    """A fault of the engine ended the request; its log says which."""


class _Feed:
    """What came of a request and is not read yet; the router has this, and its reader a stream.

    So the router keeps nobody's stream alive: one that its owner forgets is seen to be dropped.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.items: SimpleQueue[Item] = SimpleQueue()
        self.wake: Callable[[], object] = _nobody
        self.is_let_go = False  # by its reader, who has read it to its end or reads no more
        self._num_left = request.params.n

    @property
    def is_over(self) -> bool:
        return self._num_left == 0

    def put(self, item: Output | Exception) -> None:
        """By the router's thread."""
        self.items.put(item)
        if isinstance(item, Exception):
            self._num_left = 0
        elif item.reason:
            self._num_left -= 1
        if self.is_over:
            self.items.put(None)
        self.wake()


class Stream:
    """The outputs of one request, of all its sequences, as they come.

    Iterate over it, or `async for` where it was submitted from a task. What is not read yet waits
    in memory, one output for each token at most, and meanwhile the request has its place among
    those under way. Whoever lets go of the stream before its end cancels the request.
    """

    def __init__(self, router: Router, feed: _Feed) -> None:
        self._router = router
        self._feed = feed

    def __del__(self) -> None:
        self.cancel()

    @property
    def request(self) -> Request:
        return self._feed.request

    def __iter__(self) -> Iterator[Output]:
        items = self._feed.items
        try:
            while (item := items.get()) is not None:
                yield _checked(item)
            items.put(None)  # for who asks again
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Output]:
        loop, arrived, items = asyncio.get_running_loop(), asyncio.Event(), self._feed.items

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(arrived.set)

        self._feed.wake = wake
        try:
            while True:
                arrived.clear()
                while not items.empty():
                    if (item := items.get()) is None:
                        items.put(None)
                        return
                    yield _checked(item)
                await arrived.wait()
        finally:
            self._feed.wake = _nobody
            self.cancel()

    def cancel(self) -> None:
        """End the request where it stands, and give back its place; what came can be read still."""
        self._router._let_go(self._feed)


class Router:
    """A queue before an engine, and the thread that steps it. For any threads and tasks.

    `engine` is the thread's alone from then on, and `self._lock` guards all else: what is to be
    done with the engine, the feeds, and how many there are.
    """

    def __init__(self, engine: Engine, *, max_requests: int = 256) -> None:
        """Begin. Of more requests than `max_requests` at once the others are refused."""
        self._engine = engine
        self.max_requests = max_requests
        self._lock = threading.Condition()
        self._todo: deque[Callable[[], None]] = deque()
        self._feeds: dict[str, _Feed] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvd-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def num_requests(self) -> int:
        """Those under way: not over, or not read to their end."""
        return len(self._feeds)

    @property
    def is_alive(self) -> bool:
        """Whether there is somebody who steps the engine."""
        return self._thread.is_alive()

    def submit(
        self,
        tokens: list[int] | tuple[int, ...],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float = math.inf,
        id: str | None = None,
        timeout: float = 0.0,
    ) -> Stream:
        """Have a prompt continued; `deadline` is as time.monotonic() has it.

        Waits `timeout` seconds for its turn where too many are under way, then raises
        LimitExceeded. Raises BadRequest for one that cannot be, or has the id of one under way.
        """
        request = Request(id or new_id(), tuple(tokens), params, priority, deadline)
        return self.submit_all([request], timeout)[0]

    def submit_all(self, requests: Sequence[Request], timeout: float = 0.0) -> list[Stream]:
        """As `submit`, all of them or none."""
        for request in requests:
            self._engine.check(request)
        end = time.monotonic() + timeout
        with self._lock:
            while len(self._feeds) + len(requests) > self.max_requests or self._is_closing:
                if self._is_closing or not self._lock.wait(end - time.monotonic()):
                    raise LimitExceeded(self._why_not())
            ids = [request.id for request in requests]
            for id in ids:
                if id in self._feeds or ids.count(id) > 1:
                    raise BadRequest(f"request {id} is under way already")
            feeds = [_Feed(request) for request in requests]
            for feed in feeds:
                self._feeds[feed.request.id] = feed
                self._do(partial(copy_context().run, self._add, feed))  # under the caller's span
        return [Stream(self, feed) for feed in feeds]

    def close(self, grace: float = 0.0) -> None:
        """Take no more requests, let those under way go on for so long, and end the others."""
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: all(feed.is_over for feed in self._all()), timeout=grace)
            self._do(self._engine.close)
        self._thread.join()

    def _why_not(self) -> str:
        if self._is_closing:
            return "the engine is being closed"
        return f"{self.max_requests} requests are under way: try again later"

    def _all(self) -> list[_Feed]:
        return list(self._feeds.values())

    def _let_go(self, feed: _Feed) -> None:
        with self._lock:
            feed.is_let_go = True
            if not feed.is_over:
                self._do(lambda: self._engine.cancel(feed.request.id))
            self._forget()

    def _forget(self) -> None:
        """What is over and let go of has no place any more. With the lock."""
        for feed in self._all():
            if feed.is_over and feed.is_let_go:
                self._feeds.pop(feed.request.id, None)  # a stream may be dropped within this line
        self._lock.notify_all()

    def _do(self, what: Callable[[], None]) -> None:
        """Have the thread do this before its next step."""
        self._todo.append(what)
        self._lock.notify_all()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
        except BaseException:
            logger.exception("reason=internal the engine's thread ended")
        finally:
            with self._lock:
                self._is_closing = True
                self._fail(list(self._feeds), "the engine ended")
                self._forget()

    def _step(self) -> None:
        try:
            for output in self._engine.step():
                self._feeds[output.request].put(output)
        except Exception as error:
            logger.exception("reason=internal a step failed")
            self._engine.close()
            ended = {output.request for output in self._engine.step()}
            self._fail(ended, f"a step failed: {error!r}")
        with self._lock:
            self._forget()

    def _fail(self, ids: Iterable[str], why: str) -> None:
        """End these, each by an error of its own: what its traceback holds is nobody else's."""
        for id in ids:
            if not self._feeds[id].is_over:
                self._feeds[id].put(EngineFailed(why))

    def _wait(self) -> bool:
        """Do what is to be done, and wait for work; False when all is over."""
        while True:
            with self._lock:
                while not (self._todo or self._engine.has_work or self._is_closing):
                    self._lock.wait()
                if not self._todo:
                    return self._engine.has_work
                what = self._todo.popleft()
            what()

    def _add(self, feed: _Feed) -> None:
        try:
            self._engine.add(feed.request)
        except Exception as error:
            feed.put(error)
            with self._lock:
                self._forget()


def new_id() -> str:
    return uuid.uuid4().hex


def _checked(item: Output | Exception) -> Output:
    if isinstance(item, Exception):
        raise item
    return item


def _nobody() -> None:
    """Nobody waits in a task."""
