"""What the parts share: the seed, what is counted, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Stress:
    """One run of a part; `tiny` proves in seconds that all works."""

    seed: int
    say: Callable[[str], None]
    tiny: bool = False
    # How often the daemon dies, in the parts in which it does.
    rounds: int = 5
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures

    def pick(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def expect(self, holds: bool, otherwise: str) -> None:
        """Go on either way, and remember what does not hold."""
        if not holds:
            self.say(otherwise)
            self.failures.append(otherwise)

    def expect_at_least(self, least: Mapping[str, int]) -> None:
        """A run in which too little happened proves nothing."""
        for name, count in least.items():
            self.expect(
                self.counts[name] >= count, f"too few {name}: {self.counts[name]} of {count}"
            )


Part: TypeAlias = Callable[[Stress], None]
