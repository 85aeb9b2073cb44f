"""systemd, where it started us: sockets that it listens on for us, and what it is told.

Elsewhere, nothing: there are no sockets, and what would be told goes nowhere.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio

logger = logging.getLogger(__name__)

FIRST_LISTENER = 3  # the first descriptor after the standard ones
# systemd reads what it is told at once; should it not, so long is waited.
SEND_SECONDS = 1.0
STATUS_SECONDS = 5.0
# What a step may take beside what is waited for in it: reading a large arena, closing files.
MARGIN_SECONDS = 120.0


def take_listeners() -> dict[str, int]:
    """The descriptors of the sockets that systemd listens on for us, by their endpoints.

    They are the caller's from then on; no child inherits them, or takes them for its own.
    """
    names = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    pid, count, _ = [os.environ.pop(name, "") for name in names]
    if pid != str(os.getpid()):
        return {}
    descriptors = range(FIRST_LISTENER, FIRST_LISTENER + int(count))
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return {_endpoint_of(descriptor): descriptor for descriptor in descriptors}


def _endpoint_of(descriptor: int) -> str:
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        address = listener.getsockname()
        if listener.family == socket.AF_UNIX:
            return f"ipc://{address}"
    host, port, *_ = address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def notify(**states: object) -> None:
    """Tell systemd how it goes, as in `notify(READY=1)`. What it does not take is logged."""
    if not (path := os.environ.get("NOTIFY_SOCKET")):
        return
    lines = [f"{name}={str(value).replace(os.linesep, ' ')}" for name, value in states.items()]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(SEND_SECONDS)
        try:
            sender.sendto("\n".join(lines).encode(), re.sub("^@", "\0", path))
        except OSError as error:
            logger.warning("reason=not_told systemd takes no notice of %s: %s", lines[0], error)


def extend(seconds: float) -> None:
    """Have systemd wait for a start or a stop that may stand still for so long from now on."""
    notify(EXTEND_TIMEOUT_USEC=int((seconds + MARGIN_SECONDS) * 1e6))


@contextmanager
def reloading() -> Iterator[None]:
    """What is done inside is a reload: whoever asked systemd for one waits for its end."""
    notify(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)
    try:
        yield
    finally:
        notify(READY=1)


async def report(pulse: Callable[[], Awaitable[None]], summary: Callable[[], str]) -> None:
    """Keep the status current, and feed the watchdog for as long as `pulse` returns."""
    pause = min(STATUS_SECONDS, _watchdog_seconds() / 3)
    while True:
        await pulse()
        notify(WATCHDOG=1, STATUS=summary())
        await anyio.sleep(pause)


def _watchdog_seconds() -> float:
    """Without a sign for so long systemd ends us; it has patience where it does not watch."""
    if os.environ.get("WATCHDOG_PID") != str(os.getpid()):
        return math.inf
    return int(os.environ["WATCHDOG_USEC"]) / 1e6
