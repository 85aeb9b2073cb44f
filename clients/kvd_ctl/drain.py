"""`kvd-ctl drain`: no new sessions, and when all leases have ended all is saved, and kvd stops."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from kvd.protocol.endpoint import connected
from kvd_client import BadRequest, Client, DaemonUnavailable, DeadlineExceeded, to_json
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

    Raises DeadlineExceeded where that takes too long; then kvd drains on. Raises DaemonUnavailable
    where it does so no more. Raises BadRequest, and does nothing, where it is not ours to stop.
    """
    deadline = time.monotonic() + client.timeout
    with _process(client) if stop else nullcontext() as process:
        client.drain()
        _wait_for_leases(client, deadline)
        num_blocks = client.checkpoint(timeout=deadline - time.monotonic())
        if process is not None:
            _stop(process, deadline)
    if as_json:
        print(to_json({"is_draining": True, "num_blocks": num_blocks, "is_stopped": stop}))
    else:
        done = "kvd has stopped" if stop else "kvd takes no new sessions until --undo"
        render.console.print(f"no leases are left; blocks copied: {num_blocks}; {done}")


def _wait_for_leases(client: Client, deadline: float) -> None:
    most = 0
    with render.bar("leases that end") as tell:
        while num_leases := _num_leases(client):
            most = max(most, num_leases)
            tell(most - num_leases, most)
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{num_leases} leases did not end in time; kvd goes on draining: see --undo"
                )
            time.sleep(POLL_SECONDS)


def _num_leases(client: Client) -> int:
    status = client.status()
    if not status.is_draining:
        raise DaemonUnavailable(
            "kvd was started anew or told to --undo, and takes new sessions: drain it again"
        )
    return sum(session.num_leases for session in status.sessions)


@contextmanager
def _process(client: Client) -> Iterator[int]:
    """A descriptor of the daemon's process, which stays its own whatever becomes of the number.

    Raises BadRequest where who listens is not the daemon itself, or cannot be seen from here.
    """
    if not client.endpoint.startswith("ipc://"):
        raise BadRequest("over TCP kvd drains, and does not stop: stop it on its machine")
    pid = client.status().pid
    try:
        with connected(client.endpoint, client.timeout) as probe:
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            listener, _, _ = CREDENTIALS.unpack(credentials)
            if listener != pid:
                raise BadRequest("something else listens for kvd, systemd perhaps: stop it there")
            process = os.pidfd_open(pid)
    except OSError as error:
        raise DaemonUnavailable(f"kvd, pid {pid}, is gone: {error.strerror}") from error
    try:
        yield process
    finally:
        os.close(process)


def _stop(process: int, deadline: float) -> None:
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError as error:
        raise BadRequest("kvd belongs to another user: it drains, and does not stop") from error
    if not select.select([process], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise DeadlineExceeded("kvd was asked to stop, and is still at it")
