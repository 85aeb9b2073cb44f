"""Signal and Want: tell tasks that something changed, or that there is something to do."""

from __future__ import annotations

import anyio


class Signal:
    """Whoever waits goes on at the next `set`; where nobody waits it costs nothing."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def set(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


class Want:
    """The one task that waits goes on at the next `set`, or at once where one came before."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event = anyio.Event()
