"""until(): wait for something to become so, on either event loop."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from tests.e2e.support import PATIENCE_SECONDS


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for sends no event
            await anyio.sleep(0.001)
