"""Sequences: what clients saved to go on with later, by namespace and name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec.structs import replace

from kvd.protocol.codec import Tokens
from kvd.protocol.errors import LimitExceeded, SequenceTaken, UnknownSequence
from kvd.protocol.keys import NamespaceInfo
from kvd.protocol.messages import Extras
from kvd.protocol.units import format_bytes

if TYPE_CHECKING:
    from kvd.config import LimitConfig

# The key of its namespace, and its name there.
SequenceKey: TypeAlias = tuple[bytes, str]


class SequenceInfo(msgspec.Struct, frozen=True):
    """What is known of a saved sequence. `saver` made it, and is 0 once it was resumed."""

    namespace: NamespaceInfo
    id: str
    num_tokens: int
    num_bytes: int
    saver: int
    generation: int
    saved_at: float

    @property
    def key(self) -> SequenceKey:
        return self.namespace.key, self.id


class SequenceContent(msgspec.Struct, frozen=True):
    """What a client saved. `tail` has the rows of the tokens behind the last whole block."""

    tokens: Tokens
    extras: Extras
    tail: bytes
    state: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) + len(self.tail) + len(self.state)


class SequenceTable:
    """The saved sequences, but for their content, which lies in files.

    `saved` and `resumed` decide and change nothing: their answer is noted by `put`, once it is
    written. Generations count over all sequences, so that one that was discarded and is saved anew
    has another.
    """

    def __init__(self, limits: LimitConfig) -> None:
        self.limits = limits
        self._infos: dict[SequenceKey, SequenceInfo] = {}
        self._last_generation = 0

    def begin(self, generation: int) -> None:
        """Give generations behind this one."""
        self._last_generation = max(self._last_generation, generation)

    def __iter__(self) -> Iterator[tuple[SequenceKey, SequenceInfo]]:
        return iter(self._infos.items())

    def __len__(self) -> int:
        return len(self._infos)

    def find(self, key: SequenceKey) -> SequenceInfo | None:
        return self._infos.get(key)

    def get(self, key: SequenceKey) -> SequenceInfo:
        """Raises UnknownSequence."""
        if info := self.find(key):
            return info
        raise UnknownSequence(f"no sequence {key[1]!r} is saved in this namespace")

    def put(self, key: SequenceKey, info: SequenceInfo) -> None:
        self._infos[key] = info
        self._last_generation = max(self._last_generation, info.generation)

    def remove(self, key: SequenceKey) -> None:
        del self._infos[key]

    def saved(self, key: SequenceKey, info: SequenceInfo) -> SequenceInfo:
        """A sequence as it is once it is saved; `info.generation` is what its saver names.

        Raises UnknownSequence, SequenceTaken or LimitExceeded.
        """
        there = self.find(key)
        # There are three cases: it goes on, it is new, or it is a first save said again, whose
        # answer was lost. The last is known by its saver.
        if info.generation or (there and there.saver != info.saver):
            check_generation(self.get(key), info.generation)
        self._check_room(key, info.num_bytes)
        if there is None:
            return replace(info, generation=self._last_generation + 1)
        return replace(info, generation=there.generation, saver=there.saver)

    def resumed(self, info: SequenceInfo) -> SequenceInfo:
        """A sequence as it is in other hands."""
        return replace(info, saver=0, generation=self._last_generation + 1)

    def _check_room(self, key: SequenceKey, num_bytes: int) -> None:
        most, most_bytes = self.limits.sequences, self.limits.sequence_bytes
        others = [info for other, info in self if other != key]
        if len(others) >= most:
            raise LimitExceeded(f"all {most} sequences are in use: discard one")
        if (total := sum(info.num_bytes for info in others) + num_bytes) > most_bytes:
            raise LimitExceeded(
                f"all sequences would have {format_bytes(total)}; they may have "
                f"{format_bytes(most_bytes)} together: discard some"
            )


def check_generation(info: SequenceInfo, generation: int) -> None:
    """Raises SequenceTaken where the sequence is of another one."""
    if info.generation != generation:
        raise SequenceTaken(
            f"sequence {info.id!r} is of generation {info.generation}, not {generation}: "
            "resume it to go on with it"
        )
