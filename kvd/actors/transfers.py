"""Transfers: pages that are being sent where they lie, held until ZeroMQ is done with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvd.actors.manager import Manager
    from kvd.cache.leases import Lease


class Tracker(Protocol):
    """What tells of a message whether it has left: `zmq.MessageTracker`."""

    @property
    def done(self) -> bool: ...


class Transfers:
    """Messages under way whose frames are page memory: each holds a lease of the daemon's own."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._sending: list[tuple[int, Tracker]] = []

    def begin(self, lease: Lease, tracker: Tracker) -> None:
        """Hold the blocks of a lease, whatever becomes of it, until the message has left."""
        self.end_done()
        if not tracker.done:
            self._sending.append((self._manager.hold(lease), tracker))

    def end_done(self) -> None:
        """Let go of what has left, or whose client is gone."""
        sending, self._sending = self._sending, []
        for hold, tracker in sending:
            if tracker.done:
                self._manager.let_go(hold)
            else:
                self._sending.append((hold, tracker))
