"""CallQueue: calls that are made one after the other, in the order in which they came."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import anyio

from kvd.actors.signal import Want
from kvd.protocol.errors import TierFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_Call: TypeAlias = tuple[Callable[..., Coroutine[Any, Any, None]], tuple[Any, ...]]


class CallQueue:
    """What is to be done with a tier's memory: it is taken before it is given."""

    def __init__(self, tier: str) -> None:
        """`tier` is the name under which failures are told."""
        self._tier = tier
        self._calls: deque[_Call] = deque()
        self._new = Want()

    async def run(self) -> None:
        """Make the calls; one that fails is told of and ends nothing but it."""
        while True:
            await self._new.wait()
            while self._calls:
                function, args = self._calls.popleft()
                try:
                    await function(*args)
                except TierFailed as error:
                    logger.error("reason=tier_failed tier=%s %s", self._tier, error)
                except Exception:
                    logger.exception("reason=internal work on memory failed")

    def put(self, function: Callable[[*Ts], Coroutine[Any, Any, None]], *args: *Ts) -> None:
        """Have it called after all that was put before; nobody waits for it."""
        self._calls.append((function, args))
        self._new.set()

    async def call(self, function: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
        """Call it after all that was put before, and wait for it; raises what it raises."""
        done, results, errors = anyio.Event(), list[T](), list[Exception]()

        async def work() -> None:
            try:
                results.append(await function(*args))
            except Exception as error:
                errors.append(error)
            finally:
                done.set()

        self.put(work)
        await done.wait()
        if errors:
            raise errors[0]
        return results[0]
