"""Together: several things at once, each of which is done whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from anyio import create_task_group

from kvd.protocol.errors import KvdError


async def together(*calls: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Make these calls beside each other, however long one takes; raises the first error."""
    errors: list[KvdError] = []

    async def tried(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await call()
        except KvdError as error:
            errors.append(error)

    async with create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(tried, call)
    for error in errors:
        raise error
