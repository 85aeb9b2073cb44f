"""Patience: how long calls are waited for that may never return, as those of a disk that hangs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from anyio import CancelScope, current_time, from_thread, to_thread

from kvd.protocol.errors import TierFailed

if TYPE_CHECKING:
    from anyio import CapacityLimiter

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Patience:
    """Waits for calls in threads, whoever is cancelled meanwhile, and for ever until told an end.

    A call that did not return by then is left: its thread stays in it.
    """

    def __init__(self, what: str) -> None:
        """`what` is called, in words."""
        self._what = what
        self._end = math.inf
        self._scopes: set[CancelScope] = set()
        # When a call returned, or began where there was none.
        self._heard = -math.inf
        self._is_over = False

    def end_at(self, end: float) -> None:
        """Wait no longer than until then, be it for what was called before or later."""
        self._end = end
        self._renew(math.inf)

    def moved(self, still_seconds: float) -> None:
        """Told in the thread of a call that it goes on: it may stand still for so long again."""
        from_thread.run_sync(self._renew, still_seconds)

    @property
    def silent_seconds(self) -> float:
        """For how long calls that have no end have been waited for, and none returned."""
        is_waiting = any(scope.deadline == math.inf for scope in self._scopes)
        return current_time() - self._heard if is_waiting else 0.0

    async def call(
        self,
        function: Callable[[*Ts], T],
        *args: *Ts,
        still_seconds: float = math.inf,
        limiter: CapacityLimiter | None = None,
    ) -> T:
        """The function's result, from a thread, or its error; raises TierFailed where it is left.

        That it is, too, when it has stood still for so long, as `moved` tells.
        """
        self.check()
        with CancelScope(shield=True) as scope:
            if not self._scopes:
                self._heard = current_time()
            self._scopes.add(scope)
            self._renew(still_seconds)
            try:
                return await to_thread.run_sync(
                    function, *args, abandon_on_cancel=True, limiter=limiter
                )
            finally:
                self._scopes.remove(scope)
                self._heard = current_time()
        if not self._is_over:
            self._is_over = True
            logger.error("reason=left %s does not answer: its thread is left", self._what)
        raise self._failure

    def check(self) -> None:
        """Raises TierFailed where a call was left."""
        if self._is_over:
            raise self._failure

    @property
    def _failure(self) -> TierFailed:
        return TierFailed(f"{self._what} does not answer")

    def _renew(self, still_seconds: float) -> None:
        for scope in self._scopes:
            scope.deadline = min(self._end, current_time() + still_seconds)
