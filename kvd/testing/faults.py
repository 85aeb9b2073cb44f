"""FaultyStoreTier: any store tier, with the faults of a bad disk.

As a plugin it is the type "faulty", with the section of the tier that it spoils inside:

    [[tiers]]
    type = "faulty"
    seed = 7
    tier = { type = "lmdb", capacity_bytes = "64MiB" }

`set_faults(directory, Faults.SOME)` says from when on, in whatever process the tier runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvd.protocol.errors import ConfigError, TierFailed, TierFull
from kvd.tiers.base import Record, Store, StoreTier
from kvd.tiers.registry import load_tier

if TYPE_CHECKING:
    from kvd.protocol.keys import BlockKey
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Deliver

SWITCH = "faults"
STUCK_SECONDS = 0.01


class Faults(StrEnum):
    """What is wrong: nothing, something now and then, no room for anything, nothing goes at all.

    Where it is STUCK, every call waits until something else is wrong, or nothing.
    """

    NONE = "none"
    SOME = "some"
    STUCK = "stuck"
    FULL = "full"
    GONE = "gone"


def set_faults(directory: Path, faults: Faults) -> None:
    """Switch the faulty tier whose directory this is: a store tier's is the data directory."""
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f"{SWITCH}.new"
    fresh.write_text(faults)
    fresh.rename(directory / SWITCH)


class FaultyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tier`: the section of the tier to spoil. `fraction` of its calls have each kind of fault."""

    tier: dict[str, Any]
    seed: int = 0
    fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    delay_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.02


class Trouble:
    """Decides by seed which call has which fault."""

    def __init__(self, config: FaultyConfig, directory: Path) -> None:
        self._config = config
        self._switch = directory / SWITCH
        self._random = random.Random(config.seed)

    @property
    def faults(self) -> Faults:
        try:
            return Faults(self._switch.read_text())
        except FileNotFoundError:
            return Faults.NONE

    def meet(self, what: str) -> None:
        """Before a call: nothing, a delay, or TierFailed."""
        self.meet_stuck()
        if self.faults == Faults.GONE:
            raise TierFailed(f"{what}: the tier is gone")
        if self._strikes():
            time.sleep(self._config.delay_seconds)
        if self._strikes():
            raise TierFailed(f"{what}: an injected fault")

    def meet_stuck(self) -> None:
        while self.faults == Faults.STUCK:
            time.sleep(STUCK_SECONDS)

    def meet_write(self) -> None:
        self.meet("write")
        if self.faults == Faults.FULL:
            raise TierFull("write: the tier is full")

    def spoil(self, data: bytes) -> bytes:
        """As it is, cut short, or with a bit flipped."""
        if self._strikes():
            data = data[: self._random.randrange(len(data) + 1)]
        if data and self._strikes():
            bit = self._random.randrange(8 * len(data))
            byte = data[bit // 8] ^ 1 << bit % 8
            data = data[: bit // 8] + bytes([byte]) + data[bit // 8 + 1 :]
        return data

    def _strikes(self) -> bool:
        return self.faults == Faults.SOME and self._random.random() < self._config.fraction


class FaultyStore(Store):
    """A store whose calls meet trouble."""

    def __init__(self, inner: Store, trouble: Trouble) -> None:
        self.inner = inner
        self.layout = inner.layout
        self.data_bytes = inner.data_bytes
        self.record_bytes = inner.record_bytes
        self._trouble = trouble

    @property
    def used_bytes(self) -> int:
        return self.inner.used_bytes

    @property
    def most_bytes(self) -> int:
        return self.inner.most_bytes

    def write(self, records: Sequence[Record]) -> None:
        self._trouble.meet_write()
        self.inner.write(records)

    def read(self, keys: Sequence[BlockKey], deliver: Deliver) -> None:
        self._trouble.meet("read")

        def deliver_spoilt(place: int, data: memoryview) -> None:
            deliver(place, memoryview(self._trouble.spoil(bytes(data))))

        self.inner.read(keys, deliver_spoilt)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._trouble.meet("delete")
        self.inner.delete(keys)

    def scan(self) -> Iterator[Sequence[tuple[BlockKey, bytes]]]:
        self._trouble.meet("scan")
        for batch in self.inner.scan():
            yield [(key, self._trouble.spoil(about)) for key, about in batch]

    def write_note(self, name: bytes, value: bytes) -> None:
        self._trouble.meet_write()
        self.inner.write_note(name, value)

    def delete_notes(self, names: Sequence[bytes]) -> None:
        self._trouble.meet("delete_notes")
        self.inner.delete_notes(names)

    def notes(self) -> dict[bytes, bytes]:
        self._trouble.meet("notes")
        return self.inner.notes()

    def sync(self) -> None:
        self._trouble.meet("sync")
        self.inner.sync()


class FaultyStoreTier(StoreTier):
    """A store tier around another one, which it lets see only some of the calls."""

    Config = FaultyConfig
    survives = True
    name = "faulty"

    def __init__(self, config: FaultyConfig, directory: Path) -> None:
        inner = load_tier(config.tier, directory, directory)
        if not isinstance(inner, StoreTier):
            raise ConfigError(f"tiers, type faulty: {inner.name} is not a store tier")
        self.inner = inner
        self.capacity_bytes = inner.capacity_bytes
        self._trouble = Trouble(config, directory)
        self._stores: list[FaultyStore] = []

    def check(self) -> None:
        self.inner.check()

    def open(self, epoch: int) -> None:
        self._trouble.meet("open")
        self.inner.moved = self.moved
        self.inner.open(epoch)
        self._stores = [FaultyStore(store, self._trouble) for store in self.inner.stores()]

    def close(self) -> None:
        self._trouble.meet_stuck()
        self.inner.close()

    @property
    def usable_bytes(self) -> int:
        return self.inner.usable_bytes

    def stores(self) -> list[Store]:
        return list(self._stores)

    def create_store(self, layout: Layout, data_bytes: int) -> FaultyStore:
        self._trouble.meet_write()
        store = FaultyStore(self.inner.create_store(layout, data_bytes), self._trouble)
        self._stores.append(store)
        return store

    def crowding(self, store: Store) -> FaultyStore | None:
        assert isinstance(store, FaultyStore)
        other = self.inner.crowding(store.inner)
        return next((one for one in self._stores if one.inner is other), None)

    def remove_store(self, store: Store) -> None:
        self._trouble.meet("remove_store")
        assert isinstance(store, FaultyStore)
        self.inner.remove_store(store.inner)
        self._stores.remove(store)
