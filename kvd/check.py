"""`kvd --check`: what kvd would do with a configuration, without doing it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvd import sdk
from kvd.daemon import Daemon
from kvd.protocol.codec import to_json
from kvd.protocol.errors import KvdError
from kvd.protocol.units import format_bytes

if TYPE_CHECKING:
    from kvd.loading import Loaded


def check(load: Callable[[], Loaded], say: Callable[[str], None], *, as_json: bool) -> int:
    """Say whether what is loaded is good, and what would come of it; the exit status."""
    try:
        loaded = load()
        with loaded.naming_source():
            daemon = Daemon(loaded)
            daemon.check()
            notes = sdk.check(prometheus=bool(daemon.config.http.endpoint))
    except KvdError as error:
        if as_json:
            say(to_json({"error": error.message}))
        else:
            print(f"kvd: {error}", file=sys.stderr)
        return os.EX_CONFIG
    notes += [f"somebody uses {place} now" for place in daemon.places.taken()]
    found = _description(daemon) | {"notes": notes}
    say(to_json(found) if as_json else _text(found))
    return 0


def _description(daemon: Daemon) -> dict[str, Any]:
    tiers = daemon.tier, *daemon.stores
    return {
        "endpoints": daemon.places.endpoints,
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
    endpoints = [f"{key}: {endpoint}" for key, endpoint in found["endpoints"].items()]
    places = [f"{name}: {found[name]}" for name in ("directory", "data_directory")]
    notes = [f"note: {note}" for note in found["notes"]]
    return "\n".join(["configuration is good", *endpoints, *places, *tiers, *notes])
