"""running_daemon(): a kvd of one's own, in a process of its own, for as long as a test needs it.

with running_daemon({"tiers": [{"type": "host", "capacity_bytes": "64MiB"}]}) as daemon:
    client = Client(daemon.endpoint)
    daemon.kill()
    daemon.start()
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvd.config import parse
from kvd.protocol.errors import KvdError
from kvd.testing.places import own_place

# Generous: what it bounds is a daemon that hangs, on however busy a machine.
PATIENCE_SECONDS = 60.0


class DaemonFailed(KvdError):
    """Raised when a daemon did not start, or did not stop, as it should; tells what it logged."""

    code = "daemon_failed"


class RunningDaemon:
    """`python -m kvd` as a subprocess, with an endpoint and a directory that nobody else uses."""

    def __init__(self, document: Mapping[str, Any], base: Path) -> None:
        """Made by `running_daemon`; `base` is a directory that this daemon has for itself."""
        own = {
            "endpoint": f"ipc://{base}/kvd.sock",
            "directory": f"{base}/kvd",
            "data_directory": f"{base}/data",
            "tiers": [{"type": "host"}, {"type": "lmdb", "capacity_bytes": "256MiB"}],
        }
        document = own | dict(document)
        self.base = base
        config = parse(document)
        self.endpoint = config.resolved_endpoint
        self.directory = config.resolved_directory
        self.data_directory = config.resolved_data_directory
        self.config_path = base / "kvd.toml"
        self.config_path.write_text(to_toml(document))
        self.log_path = base / "kvd.log"
        self.ready_line = ""
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The process, whether it still runs or has ended."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """All that was written to stderr, over every start."""
        return self.log_path.read_text()

    def start(self) -> None:
        """Start it, again or for the first time, and wait until it is ready.

        Raises DaemonFailed where it is not.
        """
        assert not self.is_running
        self._close_pipe()
        with self.log_path.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvd", "--config", str(self.config_path)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.ready_line = self._read_line()
        if not self.ready_line:
            status = self.kill()
            raise DaemonFailed(f"kvd did not become ready (exit status {status}): {self.log}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop, and wait until it has; its exit status."""
        assert self._process is not None
        self.resume()
        self._process.send_signal(number)
        try:
            return self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise DaemonFailed(f"kvd did not stop: {self.log}") from error

    def kill(self) -> int:
        """End it by SIGKILL, as a crash would; its exit status."""
        assert self._process is not None
        self._process.kill()
        return self._process.wait()

    def restart(self) -> None:
        """Kill it and start it again: what its clients see of a crash."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze it by SIGSTOP, and return when it stands."""
        os.kill(self.pid, signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, self.pid, os.WSTOPPED)
        assert stopped is not None

    def resume(self) -> None:
        """Let it go on after `pause`; it does nothing to one that runs."""
        if self.is_running:
            os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it without further ado, if it still runs."""
        if self._process is not None:
            self.kill()
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def _read_line(self) -> str:
        """The first line on stdout; empty if it ended, or said nothing for too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if selector.select(deadline - time.monotonic()):
                return self._process.stdout.readline().strip()
        return ""


@contextmanager
def running_daemon(document: Mapping[str, Any] | None = None) -> Iterator[RunningDaemon]:
    """A daemon that is ready; stopped, and everything of it removed, at the end.

    `document` is what would stand in the configuration file. Endpoint and directory are private
    unless it names them. Raises ConfigError or DaemonFailed, also where the daemon, if it still
    runs at the end, does not stop with exit status 0.
    """
    with own_place() as base:
        daemon = RunningDaemon(document or {}, base)
        try:
            daemon.start()
            yield daemon
            if daemon.is_running and (status := daemon.stop()):
                raise DaemonFailed(f"kvd stopped with exit status {status}: {daemon.log}")
        finally:
            daemon.close()


def to_toml(document: Mapping[str, Any]) -> str:
    """Plain values as TOML: a key a line, what lies deeper in line."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in document.items())


def _value(value: Any) -> str:
    match value:
        case Mapping():
            return "{" + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            return json.dumps(value)  # strings, numbers and booleans are written alike
