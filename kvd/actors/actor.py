"""Actor: a bounded mailbox, served one call at a time in a worker thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(slots=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    done: anyio.Event = field(default_factory=anyio.Event)
    result: Any = None
    error: BaseException | None = None


class Actor:
    """Blocking work behind a mailbox; callers see typed methods, never the mailbox."""

    def __init__(self, mailbox_size: int = 256) -> None:
        self._outbox, self._inbox = anyio.create_memory_object_stream[_Call](mailbox_size)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve calls until close(), and then what still lies in the mailbox."""
        async with self._inbox:
            task_status.started()
            async for call in self._inbox:
                await self._serve(call)

    def close(self) -> None:
        """Take no new calls."""
        self._outbox.close()

    async def _ask(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """The function's result, or its error, from the actor's thread."""
        call = _Call(function, args)
        await self._outbox.send(call)
        await call.done.wait()
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    async def _serve(self, call: _Call) -> None:
        try:
            call.result = await anyio.to_thread.run_sync(call.function, *call.args)
        except Exception as error:  # it is the caller's, and the actor goes on
            call.error = error
        finally:
            call.done.set()
