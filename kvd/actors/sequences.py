"""Sequences: saved, resumed and discarded, in files that outlive the daemon.

What is written lies in shared memory, where it survives the daemon, and is copied to the disk by
checkpoints, where it survives the machine's end. As long as the machine runs, the files in shared
memory are what counts: one that is missing there was discarded.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio import to_thread

from kvd.actors.patience import Patience
from kvd.arena.checksum import SUM_BYTES, with_sum, without_sum
from kvd.arena.files import replace_file, sync_directory
from kvd.arena.owner import private_directory
from kvd.cache.rows import rows_of
from kvd.cache.sequences import (
    SequenceContent,
    SequenceInfo,
    SequenceTable,
    check_generation,
)
from kvd.protocol.errors import TierFailed, UnknownSequence
from kvd.protocol.messages import SequenceStatus

if TYPE_CHECKING:
    from kvd.cache.memory import Namespace
    from kvd.cache.sequences import SequenceKey
    from kvd.config import Config, LimitConfig
    from kvd.protocol.codec import Tokens
    from kvd.protocol.messages import SaveRequest

logger = logging.getLogger(__name__)


class SavedSequence(msgspec.Struct, frozen=True, tag="kvd.sequence.1"):
    """What a file holds, but for its checksum, which stands at its end."""

    info: SequenceInfo
    content: SequenceContent


class SequenceFiles:
    """One file per sequence in shared memory, and copies on disk as of the last checkpoint.

    All of it blocks, and may raise TierFailed. Sequences are written, read and removed from one
    thread at a time; `checkpoint` may run beside that, but not twice at once.
    """

    def __init__(self, directory: Path, data_directory: Path) -> None:
        self._memory = directory / "sequences"
        self._disk = data_directory / "sequences"
        # Names of files that are other in memory than on disk.
        self._changed: set[str] = set()

    def begin(self) -> list[SequenceInfo]:
        """Make ready; all sequences that can be read, damaged files set aside."""
        with _failing("saved sequences cannot be read"):
            if not self._memory.exists():
                self._restore()
            for half in self._memory.glob("*.new"):
                half.unlink()
            found = [self._found(name) for name in _names(self._memory)]
            names = {*_names(self._memory), *_names(self._disk)}
            self._changed = {
                name for name in names if _sum(self._memory / name) != _sum(self._disk / name)
            }
        return [saved.info for saved in found if saved]

    def write(self, key: SequenceKey, saved: SavedSequence) -> None:
        """Keep a sequence in the place of what was kept of it."""
        name, content = _name(key), with_sum(msgspec.msgpack.encode(saved))
        with _failing("a sequence cannot be saved"):
            replace_file(self._memory / name, content)
        self._changed.add(name)

    def read(self, key: SequenceKey) -> SavedSequence | None:
        """A sequence, as of the last checkpoint where its file is damaged; None where both are."""
        with _failing("a saved sequence cannot be read"):
            return self._read(_name(key))

    def remove(self, key: SequenceKey) -> None:
        """Forget a sequence."""
        name = _name(key)
        with _failing("a sequence cannot be discarded"):
            (self._memory / name).unlink(missing_ok=True)
        self._changed.add(name)

    def checkpoint(self) -> None:
        """Copy to the disk what changed since the last one. Raises ConfigError, too."""
        if not self._changed:
            return
        private_directory(self._disk.parent, 0o700)
        private_directory(self._disk, 0o700)
        # What was discarded makes room for the others.
        names = sorted(self._changed, key=lambda name: (self._memory / name).exists())
        try:
            with _failing("sequences cannot be kept on disk"):
                for name in names:
                    self._changed.discard(name)  # first: it may be written again meanwhile
                    self._copy_to_disk(name)
                sync_directory(self._disk)
        except TierFailed:
            self._changed.update(names)
            raise

    def _copy_to_disk(self, name: str) -> None:
        try:
            content = (self._memory / name).read_bytes()
        except FileNotFoundError:
            (self._disk / name).unlink(missing_ok=True)
        else:
            replace_file(self._disk / name, content, lasting=True)

    def _restore(self) -> None:
        """Take over all that is on disk, or nothing: half of it would be believed to be all.

        A link stands for a file that cannot be read: one without a name here was discarded.
        """
        half = self._memory.with_suffix(".new")
        private_directory(half, 0o700)
        for name in _names(self._disk):
            try:
                content = (self._disk / name).read_bytes()
            except OSError:
                (half / name).unlink(missing_ok=True)
                (half / name).symlink_to(self._disk / name)
            else:
                replace_file(half / name, content)
        half.rename(self._memory)

    def _found(self, name: str) -> SavedSequence | None:
        """As `_read`; what cannot be read is left where it is."""
        try:
            return self._read(name)
        except OSError as error:
            path = (self._memory / name).resolve()
            logger.error("reason=sequence_unread path=%s is left out: %s", path, error)
            return None

    def _read(self, name: str) -> SavedSequence | None:
        path, copy = self._memory / name, self._disk / name
        if (saved := _read(path)) is None and (saved := _read(copy)) is not None:
            replace_file(path, copy.read_bytes())
        return saved


class Sequences:
    """Serves the verbs of sequences, one after the other: each is done when its file is written."""

    def __init__(self, files: SequenceFiles, limits: LimitConfig) -> None:
        self._files = files
        self._table = SequenceTable(limits)
        self._lock = anyio.Lock()
        self._copying = anyio.Lock()
        self._disk = Patience("the disk of saved sequences")

    def configure(self, config: Config) -> None:
        """Go by another configuration; more than it allows stays."""
        self._table.limits = config.limits

    def __len__(self) -> int:
        return len(self._table)

    async def begin(self, hang_seconds: float = math.inf) -> None:
        """Know what an earlier start kept; more than today's limits allow stays, too.

        Generations go on behind any that an earlier start gave, though it be discarded since: they
        are microseconds, and no start gives one each. Raises TierFailed, also where the disk does
        not answer for so long.
        """
        self._table.begin(time.time_ns() // 1000)
        for info in await self._disk.call(self._files.begin, still_seconds=hang_seconds):
            self._table.put(info.key, info)

    async def save(
        self, namespace: Namespace, request: SaveRequest, tokens: Tokens, tail: bytes
    ) -> int:
        """Keep a sequence; its generation."""
        rows_of(tokens, request.extras, 0, namespace.tree.row_bytes)  # refuses wrong extras
        content = SequenceContent(tokens, request.extras, tail, request.state)
        info = SequenceInfo(
            namespace=namespace.info,
            id=request.sequence,
            num_tokens=request.num_tokens,
            num_bytes=content.num_bytes,
            saver=request.saver,
            generation=request.generation,
            saved_at=time.time(),
        )
        key = (namespace.key, request.sequence)
        async with self._lock:
            saved = SavedSequence(self._table.saved(key, info), content)
            await to_thread.run_sync(self._files.write, key, saved)
            self._table.put(key, saved.info)
        return saved.info.generation

    async def resume(self, key: SequenceKey) -> SavedSequence:
        """What was saved, in a new generation."""
        async with self._lock:
            self._table.get(key)
            if (found := await to_thread.run_sync(self._files.read, key)) is None:
                self._table.remove(key)
                raise UnknownSequence(f"what was saved of sequence {key[1]!r} is damaged")
            saved = SavedSequence(self._table.resumed(found.info), found.content)
            await to_thread.run_sync(self._files.write, key, saved)
            self._table.put(key, saved.info)
        return saved

    async def discard(self, key: SequenceKey, generation: int) -> bool:
        """Forget a sequence; whether there was one."""
        async with self._lock:
            if (info := self._table.find(key)) is None:
                return False
            if generation:
                check_generation(info, generation)
            await to_thread.run_sync(self._files.remove, key)
            self._table.remove(key)
        return True

    def listed(self, namespace_key: bytes | None, sequence: str | None) -> list[SequenceStatus]:
        """Those of a namespace and of a name, or of any; the oldest first."""
        found = [
            (key, info)
            for key, info in self._table
            if namespace_key in (None, key[0]) and sequence in (None, key[1])
        ]
        found.sort(key=lambda each: each[1].saved_at)
        return [_status(*each) for each in found]

    async def checkpoint(self) -> None:
        """As `SequenceFiles.checkpoint`: what is saved survives the machine's end."""
        async with self._copying:
            await self._disk.call(self._files.checkpoint)

    def end_checkpoints(self, end: float) -> None:
        """Whoever has copies made waits until then, and no longer."""
        self._disk.end_at(end)


def _status(key: SequenceKey, info: SequenceInfo) -> SequenceStatus:
    identity = info.namespace.identity
    return SequenceStatus(
        sequence=info.id,
        namespace_key=key[0],
        model=identity.model,
        revision=identity.revision,
        salt=info.namespace.salt,
        num_tokens=info.num_tokens,
        num_bytes=info.num_bytes,
        generation=info.generation,
        age_seconds=round(time.time() - info.saved_at, 3),
    )


@contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierFailed(f"{what}: {error}") from error


def _name(key: SequenceKey) -> str:
    namespace, name = key
    return f"{hashlib.sha256(namespace + name.encode()).hexdigest()[:32]}.sequence"


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("*.sequence")]


def _sum(path: Path) -> bytes:
    """The checksum in a file; nothing of one that is not there."""
    try:
        with path.open("rb") as file:
            file.seek(-SUM_BYTES, os.SEEK_END)
            return file.read()
    except OSError:
        return b""


def _read(path: Path) -> SavedSequence | None:
    """What a file holds; None where there is none, or it is damaged and set aside."""
    try:
        encoded = without_sum(path.read_bytes())
    except FileNotFoundError:
        return None
    try:
        if encoded is not None:
            saved = msgspec.msgpack.decode(encoded, type=SavedSequence)
            if _name(saved.info.key) == path.name:  # else it is another's
                return saved
    except msgspec.MsgspecError:
        pass  # of another version
    aside = path.with_suffix(".damaged")
    path.rename(aside)
    logger.error("reason=sequence_damaged path=%s is set aside: it cannot be read", aside)
    return None
