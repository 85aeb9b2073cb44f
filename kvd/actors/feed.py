"""Feed: what events say, and in which order: from changes of the cache to numbered batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kvd.actors.signal import Signal
from kvd.cache.changes import Came, Change, Went
from kvd.cache.rows import NO_EXTRA, row_bytes
from kvd.protocol.codec import TOKEN_BYTES
from kvd.protocol.events import (
    SEQ_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    encode_batch,
    hashes_of,
    topic,
)
from kvd.protocol.messages import EXTRA_BYTES

if TYPE_CHECKING:
    from kvd.cache.memory import Namespace
    from kvd.cache.state import CacheState
    from kvd.config import EventConfig

# A batch tells of so many blocks at most, and some more that the last of its events has: it takes
# about half a millisecond, and some 20 kB.
BATCH_BLOCKS = 256
LOCALITY, OWNERSHIP = "LOCAL", "kvd"

_Changes: TypeAlias = Sequence[tuple["Namespace", Change]]


class Message(NamedTuple):
    """A batch as it travels."""

    topic: bytes
    seq: bytes
    payload: bytes


class Feed:
    """All batches of one start of the daemon, the last ones of which are kept.

    Of a model's shards, which hold the same blocks, the first one's are told. `noted` tells that
    there is something new. Nothing here waits; batches are made when they are asked for.
    """

    def __init__(
        self, config: EventConfig, state: CacheState, media: Sequence[str], epoch: int
    ) -> None:
        self._config = config
        self._state = state
        self._media = media
        self._epoch = epoch
        self._changes: list[tuple[Namespace, Change]] = []
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0
        self.next_seq = 0
        self.noted = Signal()

    @property
    def first_seq(self) -> int:
        """The number of the first batch that is kept."""
        return self.next_seq - len(self._kept)

    @property
    def has_news(self) -> bool:
        return bool(self._changes)

    def begin(self) -> Iterator[Message]:
        """The first batches: nothing counts of what an earlier start told, and this is there.

        All that changes from now on comes behind them.
        """
        self._state.tell(self._note)
        return self._numbered(self._anew(self._present()))

    def news(self) -> Iterator[Message]:
        """The batches that tell of what changed since the last call."""
        changes, self._changes = self._changes, []
        return self._numbered(self._batches(changes))

    def kept(self, seq: int) -> Message:
        return self._kept[seq - self.first_seq]

    def snapshot(self) -> Iterator[Message]:
        """What is there now, for one who missed batches that are not kept any more.

        All have the number of the last batch; some of what they tell comes again behind it.
        """
        seq = self.next_seq - 1
        batches = self._anew(self._present())
        return (self._message(model, seq, events) for model, events in batches)

    # --- what changes ---

    def _note(self, space: Namespace, change: Change) -> None:
        if space.identity.shard_rank == 0:
            self._changes.append((space, change))
            self.noted.set()

    def _present(self) -> _Changes:
        """All that is there, in one piece: a tree that changes cannot be walked in several."""
        return [
            (space, came)
            for space in self._state.namespaces.values()
            if space.identity.shard_rank == 0
            for came in space.tree.present()
        ]

    # --- batches, each with the model that it tells of ---

    def _anew(self, present: _Changes) -> Iterator[tuple[str, list[Event]]]:
        """All that clears comes first, since it clears the models of other topics, too."""
        models = dict.fromkeys(space.identity.model for space, _ in present)
        for model in ("", *models):
            yield model, [AllBlocksCleared(self._epoch)]
        yield from self._batches(present)

    def _batches(self, changes: _Changes) -> Iterator[tuple[str, list[Event]]]:
        by_model: dict[str, list[tuple[Namespace, Change]]] = {}
        for space, change in changes:
            by_model.setdefault(space.identity.model, []).append((space, change))
        for model, told in by_model.items():
            batch: list[Event] = []
            num_blocks = 0
            for event in self._events(told):
                batch.append(event)
                num_blocks += len(event.block_hashes)
                if num_blocks >= BATCH_BLOCKS:
                    yield model, batch
                    batch, num_blocks = [], 0
            if batch:
                yield model, batch

    def _events(self, changes: _Changes) -> Iterator[BlockStored | BlockRemoved]:
        for space, change in changes:
            match change:
                case Came():
                    yield from self._stored(space, change)
                case Went():
                    yield from self._removed(change)

    def _stored(self, space: Namespace, came: Came) -> Iterator[BlockStored]:
        size = space.arena.layout.block_size
        hashes, extra_keys = hashes_of(came.keys), _extra_keys(space, came)
        words = np.frombuffer(came.rows, "<u4")
        tokens = words[:: space.tree.row_bytes // TOKEN_BYTES].tolist()
        parent = None if came.parent == space.key else hashes_of(came.parent)[0]
        for at in range(0, len(hashes), BATCH_BLOCKS):
            end = at + BATCH_BLOCKS
            yield BlockStored(
                block_hashes=hashes[at:end],
                parent_block_hash=parent,
                token_ids=tokens[at * size : end * size],
                block_size=size,
                lora_id=None,
                medium=self._media[came.tier],
                lora_name=space.identity.adapter or None,
                extra_keys=extra_keys[at:end] if extra_keys else None,
                locality=LOCALITY,
                ownership=OWNERSHIP,
                epoch=self._epoch,
            )
            parent = hashes[at:end][-1]

    def _removed(self, went: Went) -> Iterator[BlockRemoved]:
        hashes = hashes_of(b"".join(went.keys))
        for at in range(0, len(hashes), BATCH_BLOCKS):
            yield BlockRemoved(
                hashes[at : at + BATCH_BLOCKS],
                self._media[went.tier],
                LOCALITY,
                OWNERSHIP,
                self._epoch,
            )

    # --- messages ---

    def _numbered(self, batches: Iterable[tuple[str, list[Event]]]) -> Iterator[Message]:
        for model, events in batches:
            message = self._message(model, self.next_seq, events)
            self.next_seq += 1
            self._keep(message)
            yield message

    def _keep(self, message: Message) -> None:
        self._kept.append(message)
        self._kept_bytes += len(message.payload)
        most, most_bytes = self._config.buffer_batches, self._config.buffer_bytes
        # The last one always: by it a reader sees that it missed none.
        while len(self._kept) > most or (len(self._kept) > 1 and self._kept_bytes > most_bytes):
            self._kept_bytes -= len(self._kept.popleft().payload)

    def _message(self, model: str, seq: int, events: list[Event]) -> Message:
        payload = encode_batch(time.time(), events, self._config.encoding)
        name = topic(self._config.instance, model)
        return Message(name.encode(), seq.to_bytes(SEQ_BYTES, "big"), payload)


def _extra_keys(space: Namespace, came: Came) -> list[list[Any] | None] | None:
    """Of each block what tells it from others of the same tokens; None where nothing can."""
    adapter, width = space.identity.adapter, space.tree.block_bytes
    if not (adapter or space.salt or space.has_extras):
        return None
    keys: list[list[Any]] = []
    for at in range(0, len(came.rows), width):
        images = _images(came.rows[at : at + width]) if space.has_extras else []
        keys.append([adapter, *images] if adapter else images)
    if space.salt and came.parent == space.key:
        keys[0].append(space.salt)
    return [key or None for key in keys]


def _images(rows: bytes) -> list[list[Any]]:
    """Of a block with extras, each digest in hex and the position at which it begins."""
    images: list[list[Any]] = []
    last = NO_EXTRA
    for position, at in enumerate(range(TOKEN_BYTES, len(rows), row_bytes(extras=True))):
        digest = rows[at : at + EXTRA_BYTES]
        if digest not in (NO_EXTRA, last):
            images.append([digest.hex(), position])
        last = digest
    return images
