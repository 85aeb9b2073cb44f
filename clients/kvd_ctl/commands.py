"""One function per command: ask the daemon, hand the answer to render."""

from __future__ import annotations

import time

from kvd_client import Client, to_json
from kvd_ctl import render


def ping(client: Client, *, as_json: bool) -> None:
    """Measure one round trip."""
    start = time.perf_counter()
    reply = client.status()
    milliseconds = (time.perf_counter() - start) * 1000
    if as_json:
        print(
            to_json({"endpoint": client.endpoint, "pid": reply.pid, "milliseconds": milliseconds})
        )
    else:
        render.console.print(
            f"kvd {reply.version} (pid {reply.pid}) answers on {client.endpoint} "
            f"in {milliseconds:.1f} ms"
        )


def status(client: Client, *, as_json: bool) -> None:
    """Show blocks by state, hits and misses, namespaces and sessions."""
    reply = client.status()
    if as_json:
        print(to_json(reply))
    else:
        render.status(reply)
