"""Awaiting: an AsyncClient for code that waits; many of its calls are cancelled, and repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from inspect import iscoroutinefunction
from random import Random
from threading import Thread
from typing import Any, Self

from kvd_client.aio import AsyncClient, AsyncLease, AsyncNamespace

# Of the calls so many are cancelled, if they are not done within this time, drawn anew each time.
CANCELLED = 0.3
MOMENT_SECONDS = 0.001

Call = Callable[[], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Awaiting:
    """A client, namespace or lease whose coroutines are tasks of one loop in another thread."""

    inner: Any
    note: Callable[[str], None]
    loop: asyncio.AbstractEventLoop

    @classmethod
    def client(cls, endpoint: str, *, note: Callable[[str], None], **options: Any) -> Any:
        """It may be used as a Client; `note` is told of each call that was cancelled."""
        return cls(AsyncClient(endpoint, **options), note, _loop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.inner.__exit__(*exc)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        # An operand is what it stands for.
        args = tuple(arg.inner if isinstance(arg, Awaiting) else arg for arg in args)
        call = partial(method, *args, **kw)
        result = self._run(call) if iscoroutinefunction(method) else call()
        if isinstance(result, AsyncNamespace | AsyncLease):
            return Awaiting(result, self.note, self.loop)
        return result

    def _run(self, call: Call) -> Any:
        future = asyncio.run_coroutine_threadsafe(self._done(call), self.loop)
        try:
            return future.result()
        except BaseException:
            # By an interrupt: the task ends before anybody goes on with what it used.
            if future.cancel():
                asyncio.run_coroutine_threadsafe(_all_done(), self.loop).result()
            raise

    async def _done(self, call: Call) -> Any:
        """Cancel it after a moment, perhaps, and do it again: nothing is left of the first time."""
        if _rng.random() < CANCELLED:
            task = asyncio.ensure_future(call())
            try:
                await asyncio.wait({task}, timeout=_rng.random() * MOMENT_SECONDS)
            finally:
                task.cancel()
            try:
                return await task
            except asyncio.CancelledError:
                self.note("cancelled")
        return await call()


# Which moments are chosen is not repeated: the loop is in a thread of its own.
_rng = Random()


async def _all_done() -> None:
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="loop", daemon=True).start()
    return loop
