"""A store tier that keeps each block in a file, and each batch in a folder: a worked example.

    directory/
      LAYOUT/               one store; its name is a digest of its layout
        layout.json         what it holds; written last, so that what has none is unfinished
        notes/NAME          the daemon's notes
        00000007/KEY        a batch of records: about's size, about, data

A batch is written into a folder that ends in .new, whose renaming makes all of it visible at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvd.arena.owner import OwnerLock, private_directory
from kvd.protocol.errors import ConfigError, TierFailed, TierFull
from kvd.protocol.keys import BlockKey
from kvd.protocol.layout import Layout
from kvd.protocol.units import ByteSize
from kvd.tiers.base import Deliver, Record, Store, StoreTier, most_about_bytes

SIZE_BYTES = 4
DISK_BLOCK = 4096
SCAN_KEYS = 256


class FilesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    capacity_bytes: ByteSize


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layout: Layout
    data_bytes: int


class FilesStore(Store):
    """A folder of folders of files. Where a key's file lies is kept in memory."""

    def __init__(self, folder: Path, tier: FilesTier) -> None:
        found = msgspec.json.decode((folder / "layout.json").read_bytes(), type=Description)
        self.folder = folder
        self.layout = found.layout
        self.data_bytes = found.data_bytes
        # Its file, and in the worst case a folder of its own.
        self.record_bytes = DISK_BLOCK + on_disk(
            SIZE_BYTES + most_about_bytes(self.layout) + self.data_bytes
        )
        self._tier = tier
        self._files: dict[BlockKey, Path] = {}
        self._num_batches = 0
        for unfinished in folder.glob("*.new"):
            shutil.rmtree(unfinished)
        for batch in sorted(folder.glob("[0-9]*")):
            self._adopt(batch)

    @property
    def used_bytes(self) -> int:
        return bytes_of(self.folder)

    def write(self, records: Sequence[Record]) -> None:
        if not records:
            return
        self._tier.check_room(len(records) * self.record_bytes)
        batch = self.folder / f"{self._num_batches:08}"
        fresh = batch.with_suffix(".new")
        try:
            fresh.mkdir()
            for record in records:
                size = len(record.about).to_bytes(SIZE_BYTES, "little")
                (fresh / record.key.hex()).write_bytes(size + record.about + record.data)
            fresh.rename(batch)
        except OSError as error:
            shutil.rmtree(fresh, ignore_errors=True)
            raise TierFailed(f"{batch} cannot be written: {error}") from error
        self._adopt(batch)

    def read(self, keys: Sequence[BlockKey], deliver: Deliver) -> None:
        for place, key in enumerate(keys):
            try:
                content = self._files[key].read_bytes()
            except (KeyError, FileNotFoundError):  # never there, or deleted meanwhile
                continue
            start = SIZE_BYTES + int.from_bytes(content[:SIZE_BYTES], "little")
            deliver(place, memoryview(content)[start:])

    def delete(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if path := self._files.pop(key, None):
                _remove(path)

    def scan(self) -> Iterator[Sequence[tuple[BlockKey, bytes]]]:
        keys = list(self._files)
        for start in range(0, len(keys), SCAN_KEYS):
            yield [(key, self._about(key)) for key in keys[start : start + SCAN_KEYS]]

    def write_note(self, name: bytes, value: bytes) -> None:
        fresh = self.folder / "note.tmp"
        fresh.write_bytes(value)
        fresh.rename(self.folder / "notes" / name.hex())

    def delete_notes(self, names: Sequence[bytes]) -> None:
        for name in names:
            (self.folder / "notes" / name.hex()).unlink(missing_ok=True)

    def notes(self) -> dict[bytes, bytes]:
        return {
            bytes.fromhex(path.name): path.read_bytes()
            for path in (self.folder / "notes").iterdir()
        }

    def sync(self) -> None:
        os.sync()  # all that was written lies in many files; a real tier would know which

    def _about(self, key: BlockKey) -> bytes:
        with self._files[key].open("rb") as file:
            return file.read(int.from_bytes(file.read(SIZE_BYTES), "little"))

    def _adopt(self, batch: Path) -> None:
        """Its records are found from now on, in place of older ones."""
        self._num_batches = int(batch.name) + 1
        for path in batch.iterdir():
            key = BlockKey(bytes.fromhex(path.name))
            if older := self._files.get(key):
                _remove(older)
            self._files[key] = path


class FilesTier(StoreTier):
    Config = FilesConfig
    survives = True
    name = "files"

    def __init__(self, config: FilesConfig, directory: Path) -> None:
        if not config.capacity_bytes:
            raise ConfigError("tiers, type files: capacity_bytes must be set")
        self.directory = directory / "files"
        self.capacity_bytes = config.capacity_bytes
        self._stores: list[FilesStore] = []
        self._lock: OwnerLock | None = None

    def open(self, epoch: int) -> None:
        private_directory(self.directory, 0o700)
        self._lock = OwnerLock(self.directory / "files.lock", f"the files in {self.directory}")
        for folder in filter(Path.is_dir, self.directory.iterdir()):
            if (folder / "layout.json").exists():
                self._stores.append(FilesStore(folder, self))
            else:
                shutil.rmtree(folder)

    def close(self) -> None:
        self._stores = []
        if self._lock:
            self._lock.close()

    @property
    def usable_bytes(self) -> int:
        return self.capacity_bytes * 15 // 16

    def check_room(self, size: int) -> None:
        if bytes_of(self.directory) + size > self.capacity_bytes:
            raise TierFull(f"{self.directory} has no room: raise capacity_bytes")

    def stores(self) -> list[Store]:
        return list(self._stores)

    def create_store(self, layout: Layout, data_bytes: int) -> FilesStore:
        name = hashlib.sha256(msgspec.json.encode(layout)).hexdigest()[:16]
        folder = self.directory / name
        (folder / "notes").mkdir(parents=True)
        fresh = folder / "layout.tmp"
        fresh.write_bytes(msgspec.json.encode(Description(layout, data_bytes)))
        fresh.rename(folder / "layout.json")
        self._stores.append(FilesStore(folder, self))
        return self._stores[-1]

    def remove_store(self, store: Store) -> None:
        assert isinstance(store, FilesStore)
        self._stores.remove(store)
        (store.folder / "layout.json").unlink()
        shutil.rmtree(store.folder)


def bytes_of(folder: Path) -> int:
    """What a folder takes on disk, with all in it."""
    return sum(path.lstat().st_blocks * 512 for path in (folder, *folder.rglob("*")))


def on_disk(size: int) -> int:
    return -(-size // DISK_BLOCK) * DISK_BLOCK


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    if not any(path.parent.iterdir()):
        path.parent.rmdir()
