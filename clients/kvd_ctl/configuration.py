"""What kvd goes by: showing it, and having it read anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvd_client import Client, ConfigChange, format_bytes, to_json
from kvd_ctl import render


def config(client: Client, *, as_json: bool) -> None:
    """Show every key with its value, and where that comes from."""
    values = client.config().values
    if as_json:
        print(to_json(values))
        return
    rows = [
        {"key": each.key, "value": _text(each.key, each.value), "origin": each.origin}
        for each in values
    ]
    render.table("configuration", rows)


def reload(client: Client, *, as_json: bool) -> None:
    """Have kvd read its configuration, and show what is another now."""
    reply = client.reload(timeout=client.timeout)
    if as_json:
        print(to_json({"changed": reply.changed, "needs_restart": reply.needs_restart}))
        return
    render.table("changed", _rows(reply.changed))
    if reply.needs_restart:
        render.table("changed at the next start of kvd", _rows(reply.needs_restart))


def _rows(changes: Sequence[ConfigChange]) -> list[dict[str, str]]:
    return [
        {
            "key": each.key,
            "before": _text(each.key, each.before),
            "after": _text(each.key, each.after),
        }
        for each in changes
    ]


def _text(key: str, value: Any) -> str:
    """A value as a configuration file has it, or shorter."""
    if key.endswith("_bytes"):
        return format_bytes(value)
    return value if isinstance(value, str) else json.dumps(value)
