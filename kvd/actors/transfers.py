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
    """Messages under way whose frames are page memory: each has a lease of the daemon's own."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._sending: list[tuple[int, Tracker]] = []

    def hold(self, lease: Lease) -> int:
        """Hold the blocks of a lease, whatever becomes of it; before anything of them is sent.

        Raises LimitExceeded where no lease is to be had for it.
        """
        self.end_done()
        return self._manager.hold(lease)

    def let_go(self, hold: int) -> None:
        """Nothing was sent."""
        self._manager.let_go(hold)

    def sent(self, hold: int, tracker: Tracker) -> None:
        """Let go when the message has left, or its client is gone."""
        if tracker.done:
            self._manager.let_go(hold)
        else:
            self._sending.append((hold, tracker))

    def end_done(self) -> None:
        """Let go of what has left meanwhile."""
        sending, self._sending = self._sending, []
        for hold, tracker in sending:
            self.sent(hold, tracker)
