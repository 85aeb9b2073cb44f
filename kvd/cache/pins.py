"""Pins: what an owner keeps resident, for a time and within a quota."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.protocol.errors import LimitExceeded
from kvd.protocol.units import format_bytes

if TYPE_CHECKING:
    from kvd.cache.memory import Namespace
    from kvd.cache.radix import Node


@dataclass(eq=False, slots=True)
class Pin:
    """One pin. Its path, from the root to the end of `node`, is locked until `expires`."""

    id: int
    owner: str
    namespace: Namespace
    asked: bytes
    node: Node
    num_blocks: int
    expires: float

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.namespace.arena.layout.page_bytes


class PinTable:
    """The pins of all owners; bytes that two pins share count for each."""

    def __init__(self, max_pins: int, max_bytes: int, max_owner_bytes: int) -> None:
        self.bound(max_pins, max_bytes, max_owner_bytes)
        self._pins: dict[int, Pin] = {}
        self._ids = itertools.count(1)

    def bound(self, max_pins: int, max_bytes: int, max_owner_bytes: int) -> None:
        """From here on so much; what is pinned above it stays."""
        self.max_pins = max_pins
        self.max_bytes = max_bytes
        self.max_owner_bytes = max_owner_bytes

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    def __len__(self) -> int:
        return len(self._pins)

    def find(self, owner: str, namespace: Namespace, asked: bytes) -> Pin | None:
        return next(
            (
                pin
                for pin in self
                if pin.owner == owner and pin.namespace is namespace and pin.asked == asked
            ),
            None,
        )

    def of_owner(self, owner: str) -> list[Pin]:
        return [pin for pin in self if pin.owner == owner]

    def check_room(self, owner: str, num_bytes: int, renewed: Pin | None) -> None:
        """Raises LimitExceeded where a pin of so many bytes, in place of `renewed`, is too much."""
        others = [pin for pin in self if pin is not renewed]
        if len(others) >= self.max_pins:
            raise LimitExceeded(f"all {self.max_pins} pins are in use: unpin one")
        owned = sum(pin.num_bytes for pin in others if pin.owner == owner) + num_bytes
        if owned > self.max_owner_bytes:
            raise LimitExceeded(
                f"{owner!r} would pin {format_bytes(owned)}; an owner may pin "
                f"{format_bytes(self.max_owner_bytes)}"
            )
        total = sum(pin.num_bytes for pin in others) + num_bytes
        if total > self.max_bytes:
            raise LimitExceeded(
                f"all owners would pin {format_bytes(total)}; they may pin "
                f"{format_bytes(self.max_bytes)} together"
            )

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, pin: Pin) -> None:
        self._pins[pin.id] = pin

    def remove(self, pin: Pin) -> None:
        del self._pins[pin.id]

    def expired(self, now: float) -> list[Pin]:
        return [pin for pin in self if pin.expires <= now]

    def next_expiry(self) -> float | None:
        return min((pin.expires for pin in self), default=None)
