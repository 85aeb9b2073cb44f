"""`kvd-ctl events`: what comes to the tiers and leaves them, as it happens."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict

from kvd_client import Client, Unsupported
from kvd_client.events import AllBlocksCleared, BlockRemoved, BlockStored, Follower
from kvd_ctl import render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd_client import EventStatus
    from kvd_client.events import Batch, Event


def status_of_events(client: Client, since: int | None) -> EventStatus:
    """Where the events are. Raises Unsupported where kvd publishes none, or replays none."""
    status = client.status().events
    if status is None:
        raise Unsupported("this kvd publishes no events: set events.endpoint")
    if since is not None and not status.replay_endpoint:
        raise Unsupported("this kvd replays no events: set events.replay_endpoint")
    return status


def follow(
    status: EventStatus, since: int | None, count: int | None, timeout: float, *, as_json: bool
) -> None:
    """Print events, `count` of them or until an interrupt."""
    with (
        suppress(KeyboardInterrupt),
        Follower(status.endpoint, status.replay_endpoint, since=since, timeout=timeout) as follower,
    ):
        for line in islice(_lines(follower, as_json=as_json), count):
            print(line, flush=True)


def _lines(follower: Follower, *, as_json: bool) -> Iterator[str]:
    for batch in follower:
        if batch.num_missed:
            print(f"{batch.num_missed} batches before number {batch.seq} are lost", file=sys.stderr)
        for event in batch.events:
            yield _json(batch, event) if as_json else render.printable(_text(batch, event))


def _json(batch: Batch, event: Event) -> str:
    place = {"seq": batch.seq, "time": batch.seconds, "topic": batch.topic}
    named = place | {"type": type(event).__name__} | asdict(event)
    return msgspec.json.encode(named).decode()


def _text(batch: Batch, event: Event) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(batch.seconds))
    return f"{clock} {batch.seq} {batch.topic} {_said(event)}"


def _said(event: Event) -> str:
    match event:
        case BlockStored():
            parent = _name(event.parent_block_hash) if event.parent_block_hash else "the root"
            return f"{event.medium} has {_names(event.block_hashes)} behind {parent}"
        case BlockRemoved():
            return f"{event.medium} has no more {_names(event.block_hashes)}"
        case AllBlocksCleared():
            return "nothing told before counts any more"


def _names(hashes: list[int]) -> str:
    first, last = _name(hashes[0]), _name(hashes[-1])
    return first if len(hashes) == 1 else f"{len(hashes)} blocks {first} to {last}"


def _name(number: int) -> str:
    return f"{number:016x}"
