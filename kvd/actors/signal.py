"""Signal: tells tasks that something changed."""

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
