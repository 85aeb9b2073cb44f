"""Places: where the files and sockets of a daemon are to be, which no other may use meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.arena.membership import is_held
from kvd.arena.owner import (
    OWNER_LOCK,
    OwnerLock,
    check_group,
    check_place,
    check_private,
    give,
    lock_of,
    make_directory,
    private_directory,
    share,
)
from kvd.config import choosing, naming
from kvd.protocol.certificates import load_pair
from kvd.protocol.endpoint import check_socket, connected, is_default, socket_path
from kvd.protocol.errors import ConfigError

if TYPE_CHECKING:
    from kvd.config import Config


class Places:
    """The endpoints and the directories of one configuration."""

    def __init__(self, config: Config, listeners: Mapping[str, int]) -> None:
        """At endpoints that `listeners` names somebody else listens for us. Raises ConfigError."""
        self.endpoints = config.endpoints
        self.directory = config.resolved_directory
        self.data_directory = config.resolved_data_directory
        self._by_key = config.places | config.endpoints
        self._has_default_directory = not config.directory
        self._ipc = config.ipc
        self._server_key = config.tcp.server_key if config.tcp.endpoint else ""
        self._listeners = listeners
        if listeners:
            self._check_listeners()

    # --- looking ---

    def check(self) -> None:
        """Refuse what a start could not use, as far as that shows beforehand (ConfigError)."""
        self._check_different()
        if self._ipc.group:
            check_group(self._ipc.group)
        if self._server_key:
            with naming("tcp.server_key"):
                load_pair(Path(self._server_key))
        for key, endpoint in self._sockets():
            with choosing(key):
                _check_socket(endpoint)
        with choosing("directory"):
            if self._has_default_directory:
                check_private(self.directory.parent)
            check_private(self.directory)
        with choosing("data_directory"):
            check_private(self.data_directory)

    def taken(self) -> list[str]:
        """What others use now, as a daemon that runs, so that no start could have it."""
        found = [endpoint for _, endpoint in self._sockets() if _is_served(endpoint)]
        found += [
            str(directory)
            for directory in (self.directory, self.data_directory)
            if (lock := directory / OWNER_LOCK).exists() and is_held(lock)
        ]
        return found

    def _check_listeners(self) -> None:
        """What others listen on for us must be where we would listen, our endpoint among them."""
        ours = self.endpoints
        wanted = {ours.get(key) for key in ("endpoint", "operator.endpoint", "tcp.endpoint")}
        if ours["endpoint"] not in self._listeners or self._listeners.keys() - wanted:
            raise ConfigError(
                f"endpoint: it is {ours['endpoint']}, and what was given listens on "
                f"{', '.join(self._listeners)}: make them one"
            )

    def _check_different(self) -> None:
        keys: dict[str, str] = {}
        for key, place in self._by_key.items():
            # A port may stand there with a scheme or without; of "any port" each is another one.
            name = os.path.normpath(place.removeprefix("tcp://"))
            if (other := keys.setdefault(name, key)) != key and not name.endswith("*"):
                raise ConfigError(f"{key} is {place}, and so is {other}: set one of them")

    def _sockets(self) -> Iterator[tuple[str, str]]:
        """The files that we bind; who listens for us sees to it that we are alone."""
        for key, endpoint in self.endpoints.items():
            if endpoint.startswith("ipc://") and endpoint not in self._listeners:
                yield key, endpoint

    # --- having ---

    def own_endpoints(self) -> ExitStack:
        """Their locks: all of them, or none. Raises AlreadyRunning, ConfigError."""
        with ExitStack() as locks:
            for key, endpoint in self._sockets():
                locks.enter_context(closing(self._own_endpoint(key, endpoint)))
            return locks.pop_all()

    def _own_endpoint(self, key: str, endpoint: str) -> OwnerLock:
        path = socket_path(endpoint)
        # A place that we chose must be ours alone; one that we were given is the giver's business.
        with choosing(key):
            if is_default(endpoint):
                private_directory(path.parent, 0o700)
            elif make_directory(path.parent, 0o750):
                share(path.parent, self._ipc.group, 0o750)
            return OwnerLock(lock_of(path), endpoint)

    def own_data_directory(self) -> OwnerLock:
        """Raises AlreadyRunning, ConfigError."""
        with choosing("data_directory"):
            private_directory(self.data_directory, 0o700)
            return OwnerLock(self.data_directory / OWNER_LOCK, str(self.data_directory))

    def own_directory(self) -> OwnerLock:
        """Raises AlreadyRunning, ConfigError."""
        with choosing("directory"):
            if self._has_default_directory:
                private_directory(self.directory.parent)
            private_directory(self.directory)
            self._share_directory()
            return OwnerLock(self.directory / OWNER_LOCK, str(self.directory))

    def _share_directory(self) -> None:
        """Let whoever may use the endpoint map what lies there, and nobody else."""
        if self._ipc.mode == "0600":
            share(self.directory, "", 0o700)
        elif self._ipc.group:
            if self._has_default_directory:
                share(self.directory.parent, "", 0o711)
            # With set-group-id, so that what is made there has the group.
            share(self.directory, self._ipc.group, 0o2750)
            for found in self.directory.iterdir():
                give(found, self._ipc.group)


def _check_socket(endpoint: str) -> None:
    path = socket_path(endpoint)
    if _is_served(endpoint):
        return
    if is_default(endpoint):
        check_private(path.parent)
    check_place(lock_of(path))
    check_socket(path)


def _is_served(endpoint: str) -> bool:
    try:
        with connected(endpoint):
            return True
    except BlockingIOError:  # somebody is, and is busy
        return True
    except OSError:
        return False
