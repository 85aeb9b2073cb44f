"""`kvd-ctl drain`: no new sessions, and when all leases have ended all is saved, and kvd stops."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time

from kvd_client import BadRequest, Client, DeadlineExceeded, to_json
from kvd_ctl import render

POLL_SECONDS = 0.1
# pid, uid and gid of who listens, as the kernel tells them.
CREDENTIALS = struct.Struct("3i")


def undo_drain(client: Client, *, as_json: bool) -> None:
    """Have kvd take sessions again."""
    client.drain(undo=True)
    if as_json:
        print(to_json({"is_draining": False}))
    else:
        render.console.print("draining is over: kvd takes new sessions")


def begin_drain(client: Client, *, stop: bool, as_json: bool) -> None:
    """Wait until all leases have ended, have all saved and, to `stop`, end kvd.

    Raises DeadlineExceeded where that takes too long; then kvd drains on. Raises BadRequest where
    it is not ours to stop.
    """
    deadline = time.monotonic() + client.timeout
    daemon = _process(client) if stop else -1
    try:
        client.drain()
        _wait_for_leases(client, deadline)
        num_blocks = client.checkpoint(timeout=max(0.0, deadline - time.monotonic()))
        if stop:
            _stop(daemon, deadline)
    finally:
        if stop:
            os.close(daemon)
    if as_json:
        print(to_json({"is_draining": True, "num_blocks": num_blocks, "is_stopped": stop}))
    else:
        done = "and kvd has stopped" if stop else "and kvd takes no new sessions: see --undo"
        render.console.print(f"no leases are left; blocks copied: {num_blocks}; {done}")


def _wait_for_leases(client: Client, deadline: float) -> None:
    most = 0
    with render.bar("leases that end") as tell:
        while num_leases := sum(one.num_leases for one in client.status().sessions):
            most = max(most, num_leases)
            tell(most - num_leases, most)
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{num_leases} leases did not end in time; kvd goes on draining: see --undo"
                )
            time.sleep(POLL_SECONDS)


def _process(client: Client) -> int:
    """A descriptor of the daemon's process, which stays its own whatever becomes of the number.

    Raises BadRequest where who listens is not the daemon itself, or cannot be seen from here.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(client.endpoint.removeprefix("ipc://"))
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    listener, _, _ = CREDENTIALS.unpack(credentials)
    if listener != client.status().pid:
        raise BadRequest("kvd was started by something else, systemd perhaps: stop it there")
    return os.pidfd_open(listener)


def _stop(daemon: int, deadline: float) -> None:
    try:
        signal.pidfd_send_signal(daemon, signal.SIGTERM)
    except PermissionError as error:
        raise BadRequest("kvd belongs to another user: it drains, but does not stop") from error
    if not select.select([daemon], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise DeadlineExceeded("kvd was asked to stop, and is still at it")
