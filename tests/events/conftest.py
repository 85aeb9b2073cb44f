"""What a reader of events has at the end: of each medium the blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvd.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    hashes_of,
)
from kvd_client import Client
from kvd_client.events import Follower
from tests.e2e.support import faultless_daemon, with_store

if TYPE_CHECKING:
    from kvd.actors.feed import Message
    from kvd.cache.state import CacheState
    from kvd.protocol.events import Event
    from kvd.testing.daemons import RunningDaemon


class Map:
    """As a router keeps it; what it would leave out or misread is refused."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {}

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case BlockStored(hashes, parent, tokens, size, _, medium):
                    assert medium
                    there = self.blocks.setdefault(medium, set())
                    assert parent is None or parent in there
                    assert len(tokens) == size * len(hashes) == size * len({*hashes} - {parent})
                    there.update(hashes)
                case BlockRemoved(hashes, medium):
                    assert medium
                    self.blocks.setdefault(medium, set()).difference_update(hashes)
                case AllBlocksCleared():
                    self.blocks.clear()

    def read(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.apply(decode_batch(message.payload)[1])

    def count(self, medium: str) -> int:
        return len(self.blocks.get(medium, ()))


def truth(state: CacheState, *media: str) -> dict[str, set[int]]:
    """What a map should have, by the trees."""
    found: dict[str, set[int]] = {}
    for space in state.namespaces.values():
        for came in space.tree.present():
            found.setdefault(media[came.tier], set()).update(hashes_of(came.keys))
    return found


@contextmanager
def publishing(**events: Any) -> Iterator[tuple[RunningDaemon, Client]]:
    """A daemon with memory and a disk that tells of both, and a client that computes."""
    with tempfile.TemporaryDirectory() as place:
        where = {"endpoint": f"ipc://{place}/events", "replay_endpoint": f"ipc://{place}/replay"}
        document = with_store(events=where | events)
        with faultless_daemon(document) as daemon, Client(daemon.endpoint, timeout=30.0) as client:
            yield daemon, client


def follow(client: Client, **options: Any) -> Follower:
    """A follower of the client's daemon, which tells of events."""
    status = client.status().events
    assert status
    return Follower(status.endpoint, status.replay_endpoint, timeout=1.0, **options)


def agrees(known: Map, follower: Follower, client: Client) -> bool:
    """Whether a map has as many blocks as the tiers, when all that comes now is read."""
    while batch := follower.next(0.02):
        known.apply(batch.events)
    host, disk = client.status().tiers
    return (known.count("CPU"), known.count("DISK")) == (host.num_blocks, disk.num_blocks)
