"""`kvd --check`: what kvd would do with a configuration, without doing it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvd.daemon import Daemon
from kvd.protocol.codec import to_json
from kvd.protocol.errors import KvdError
from kvd.protocol.units import format_bytes

if TYPE_CHECKING:
    from kvd.loading import Loaded


def check(load: Callable[[], Loaded], say: Callable[[str], None], *, as_json: bool) -> int:
    """Say whether what is loaded is good, and what would come of it; the exit status."""
    try:
        found = _description(Daemon(load()))
    except KvdError as error:
        if as_json:
            say(to_json({"error": error.message}))
        else:
            print(f"kvd: {error}", file=sys.stderr)
        return os.EX_CONFIG
    say(to_json(found) if as_json else _text(found))
    return 0


def _description(daemon: Daemon) -> dict[str, Any]:
    tiers = daemon.tier, *daemon.stores
    return {
        "endpoint": daemon.endpoint,
        "directory": str(daemon.directory),
        "data_directory": str(daemon.data_directory),
        "tiers": [{"name": tier.name, "capacity_bytes": tier.capacity_bytes} for tier in tiers],
        "values": daemon.listed(),
    }


def _text(found: dict[str, Any]) -> str:
    tiers = [
        f"{tier['name']} tier: up to {format_bytes(tier['capacity_bytes'])}"
        for tier in found["tiers"]
    ]
    places = [f"{name}: {found[name]}" for name in ("endpoint", "directory", "data_directory")]
    doors = [
        f"{each.key}: {each.value}"
        for each in found["values"]
        if each.key.endswith(".endpoint") and each.value
    ]
    return "\n".join(["configuration is good", *places, *doors, *tiers])
