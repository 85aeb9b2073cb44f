"""Follow what a kvd tells of the blocks in its tiers: for routers, and whoever keeps such a map.

    with Follower(events.endpoint, events.replay_endpoint) as follower:
        for batch in follower:
            for event in batch.events:
                ...

`client.status().events` has the endpoints. A kvd tells in batches, numbered from 0 at each start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import zmq

from kvd.protocol.events import (
    END_OF_REPLAY,
    SEQ_BYTES,
    TOPIC_PREFIX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    decode_batch,
)

__all__ = ["AllBlocksCleared", "Batch", "BlockRemoved", "BlockStored", "Event", "Follower"]

# After so long without a batch, the follower asks whether it missed the last ones.
QUIET_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Some events of one model (none for those that clear all), told at Unix time `seconds`.

    `num_missed` batches before it are lost, where there is no endpoint to ask for them.
    """

    topic: str
    seq: int
    seconds: float
    events: list[Event]
    num_missed: int = 0

    @property
    def epoch(self) -> int:
        """The start of the daemon that told it; 0 where the events are arrays."""
        return self.events[0].epoch


class Follower:
    """Every batch of a kvd, in order: who applies their events to a map has what the kvd has.

    A batch that is missed is asked for, and so is all that there is after a restart, wherever the
    connection was meanwhile; what cannot be had any more is replaced by `AllBlocksCleared` and what
    is there now. An event can come twice then: blocks are stored that were stored, or removed that
    were not there. Without `replay_endpoint` batches can be missing. A follower belongs to one
    thread.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        since: int | None = 0,
        timeout: float = 5.0,
    ) -> None:
        """Begin with batch number `since`, or with the next one that comes.

        What is asked for is asked again where nothing comes within `timeout` seconds.
        """
        self._replay_endpoint = replay_endpoint
        self._timeout = timeout
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(TOPIC_PREFIX)
        self._live.connect(endpoint)
        # While something was asked for, it is read before what is published.
        self._replay: zmq.Socket[bytes] | None = None
        self._replayed: list[list[bytes]] = []
        self._waiting: Iterator[Batch] = iter(())
        # What the next batch is, as far as that is known; and when to ask for it.
        self._epoch: int | None = None
        self._next = since
        self._due = math.inf if since is None or not replay_endpoint else 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._context.destroy(linger=0)

    def __iter__(self) -> Iterator[Batch]:
        """All batches from here on; it never ends."""
        while True:
            if batch := self.next():
                yield batch

    def next(self, seconds: float = math.inf) -> Batch | None:
        """The next batch; None where there is none within so long."""
        end = time.monotonic() + seconds
        while (batch := next(self._waiting, None) or self._receive(end)) is None:
            if time.monotonic() >= end:
                return None
        self._epoch, self._next = batch.epoch, batch.seq + 1
        return batch

    def _receive(self, end: float) -> Batch | None:
        """Wait for a message, until then or until something is to be asked for; a batch if so."""
        now = time.monotonic()
        if now >= self._due:
            self._ask()
        socket = self._replay or self._live
        wait = max(0.0, min(end, self._due) - now)
        if not socket.poll(None if math.isinf(wait) else math.ceil(1000 * wait)):
            return None
        frames = socket.recv_multipart()
        if self._replay is None:
            self._ask_in(QUIET_SECONDS)
            return self._expected(_batch(frames))
        self._ask_in(self._timeout)
        self._collect(frames)
        return None

    def _expected(self, batch: Batch) -> Batch | None:
        """A batch that was published, if it is the next one; else what came before is asked for."""
        expected = self._next if self._epoch in (None, batch.epoch) else 0
        # Number 0 is a start; of arrays, which have no epoch, nothing else tells of one.
        if expected is None or batch.seq in (expected, 0):
            return batch
        if batch.seq < expected:
            return None
        if self._replay_endpoint:
            self._ask()
            return None
        return replace(batch, num_missed=batch.seq - expected)

    # --- replay ---

    def _ask_in(self, seconds: float) -> None:
        if self._replay_endpoint:
            self._due = time.monotonic() + seconds

    def _ask(self) -> None:
        """Ask for what is next, behind the last batch: whether that is still the same, says it."""
        self._end_replay()
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(self._replay_endpoint)
        first = (self._next or 0) - (self._epoch is not None)
        self._replay.send_multipart((b"", first.to_bytes(SEQ_BYTES, "big")))
        self._ask_in(self._timeout)

    def _collect(self, frames: list[bytes]) -> None:
        """Nothing of a replay counts before its end: it may not be what was expected."""
        _, *message = frames
        if tuple(message) != END_OF_REPLAY:
            self._replayed.append(message)
            return
        messages = self._replayed
        self._end_replay()
        self._ask_in(QUIET_SECONDS)
        if self._epoch is not None:
            first = _batch(messages[0]) if messages else None
            if first is None or first.epoch != self._epoch:
                self._epoch, self._next = None, 0  # the daemon was started anew
                self._ask()
                return
            if first.seq + 1 == self._next:
                del messages[0]
        self._waiting = map(_batch, messages)

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(linger=0)
        self._replay, self._replayed = None, []


def _batch(frames: list[bytes]) -> Batch:
    topic, seq, payload = frames
    return Batch(topic.decode(), int.from_bytes(seq, "big"), *decode_batch(payload))
