"""Turns: work in the background that goes on whatever becomes of one turn of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVarTuple

import anyio

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

# After a fault, so long until the next turn.
FAULT_PAUSE_SECONDS = 1.0


async def again_and_again(turn: Callable[[*Ts], Coroutine[Any, Any, None]], *args: *Ts) -> None:
    """Take turns for ever; a fault of one is said and ends nothing but it."""
    while True:
        try:
            await turn(*args)
        except Exception:
            logger.exception("reason=internal a turn of work in the background failed")
            await anyio.sleep(FAULT_PAUSE_SECONDS)
