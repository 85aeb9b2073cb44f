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
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
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


class Stream:
    """The outputs of one request, of all its sequences, as they come.

    Iterate over it, or `async for` where it was submitted from a task. Whoever lets go of it before
    its end cancels the request.
    """

    def __init__(self, router: Router, request: Request, num_sequences: int) -> None:
        self.request = request
        self._router = router
        self._num_left = num_sequences
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._wake: Callable[[], object] = _nobody

    def __iter__(self) -> Iterator[Output]:
        try:
            while (item := self._items.get()) is not None:
                yield _checked(item)
            self._items.put(None)  # for who asks again
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Output]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(arrived.set)

        self._wake = wake
        try:
            while True:
                arrived.clear()
                while not self._items.empty():
                    if (item := self._items.get()) is None:
                        self._items.put(None)
                        return
                    yield _checked(item)
                await arrived.wait()
        finally:
            self._wake = _nobody
            self.cancel()

    def cancel(self) -> None:
        """End the request where it stands; once it is over that does nothing."""
        if self._num_left:
            self._router.cancel(self.request.id)

    def put(self, item: Item) -> None:
        """By the router's thread."""
        self._items.put(item)
        if item is None or isinstance(item, Exception):
            self._num_left = 0
        elif item.reason:
            self._num_left -= 1
        if not self._num_left:
            self._items.put(None)
        self._wake()

    @property
    def is_over(self) -> bool:
        return self._num_left == 0


class Router:
    """A queue before an engine, and the thread that steps it. For any threads and tasks.

    `engine` is the thread's alone from then on, and `self._lock` guards all else: what is to be
    done with the engine, the streams, and how many there are.
    """

    def __init__(self, engine: Engine, *, max_requests: int = 256) -> None:
        """Begin. Of more requests than `max_requests` at once the others are refused."""
        self._engine = engine
        self.max_requests = max_requests
        self._lock = threading.Condition()
        self._todo: deque[Callable[[], None]] = deque()
        self._streams: dict[str, Stream] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvd-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def num_requests(self) -> int:
        return len(self._streams)

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
        LimitExceeded. Raises BadRequest for the id of a request that is under way; what else is
        wrong with it is raised by its stream.
        """
        request = Request(id or uuid.uuid4().hex, tuple(tokens), params, priority, deadline)
        stream = Stream(self, request, params.n)
        end = time.monotonic() + timeout
        with self._lock:
            while len(self._streams) >= self.max_requests or self._is_closing:
                if self._is_closing or not self._lock.wait(end - time.monotonic()):
                    raise LimitExceeded(self._why_not())
            if request.id in self._streams:
                raise BadRequest(f"request {request.id} is under way already")
            self._streams[request.id] = stream
            self._do(partial(copy_context().run, self._add, stream))  # under the caller's span
        return stream

    def cancel(self, id: str) -> None:
        with self._lock:
            self._do(lambda: self._engine.cancel(id))

    def close(self, grace: float = 0.0) -> None:
        """Take no more requests, let those under way go on for so long, and end the others."""
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._streams, timeout=grace)
            self._do(self._engine.close)
        self._thread.join()

    def _why_not(self) -> str:
        if self._is_closing:
            return "the engine is being closed"
        return f"{self.max_requests} requests are under way: try again later"

    def _do(self, what: Callable[[], None]) -> None:
        """Have the thread do this before its next step."""
        self._todo.append(what)
        self._lock.notify_all()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
                self._forget()
        except BaseException:
            logger.exception("reason=internal the engine's thread ended")
        finally:
            with self._lock:
                self._is_closing = True
                self._fail(list(self._streams), "the engine ended")
                self._streams.clear()
                self._lock.notify_all()

    def _step(self) -> None:
        try:
            for output in self._engine.step():
                if (stream := self._streams.get(output.request)) is not None:
                    stream.put(output)
        except Exception as error:
            logger.exception("reason=internal a step failed")
            self._engine.close()
            ended = {output.request for output in self._engine.step()}
            self._fail(ended, f"a step failed: {error!r}")

    def _fail(self, ids: Iterable[str], why: str) -> None:
        """End these, each by an error of its own: what its traceback holds is nobody else's."""
        for id in ids:
            if (stream := self._streams.get(id)) is not None and not stream.is_over:
                stream.put(EngineFailed(why))

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

    def _add(self, stream: Stream) -> None:
        try:
            self._engine.add(stream.request)
        except Exception as error:
            stream.put(error)
            self._forget()

    def _forget(self) -> None:
        with self._lock:
            if over := [id for id, stream in self._streams.items() if stream.is_over]:
                for id in over:
                    del self._streams[id]
                self._lock.notify_all()


def _checked(item: Output | Exception) -> Output:
    if isinstance(item, Exception):
        raise item
    return item


def _nobody() -> None:
    """Nobody waits in a task."""
