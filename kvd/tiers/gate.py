"""Gate: between those who read from a store and who takes its memory away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Readers come and go; who must be alone waits for them and keeps others out meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._is_taken = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken)
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken)
            self._is_taken = True
            self._changed.wait_for(lambda: not self._num_readers)
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()
