"""A sequence as a daemon keeps it."""

from __future__ import annotations

from kvd.actors.sequences import SavedSequence
from kvd.cache.sequences import SequenceContent, SequenceInfo
from kvd.protocol.keys import NamespaceInfo
from tests.e2e.support import IDENTITY, LAYOUT

SPACE = NamespaceInfo(IDENTITY, LAYOUT)
CHAT, OTHER = (SPACE.key, "chat"), (SPACE.key, "other")


def sequence(name: str = "chat", generation: int = 1, size: int = 40) -> SavedSequence:
    content = SequenceContent(bytes(size), ((0, b"x" * 32),), b"tail", b"state")
    info = SequenceInfo(SPACE, name, size // 4, content.num_bytes, 1, generation, 0.0)
    return SavedSequence(info, content)
