"""Where daemon and clients meet when nobody says where."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from kvd.protocol.errors import ConfigError, Forbidden

SYSTEM_SOCKET = Path("/run/kvd.sock")
MAX_PORT = 65_535
MAX_IPC_PATH = 107  # sun_path holds 108 bytes, the last one zero


def default_endpoint() -> str:
    """KVD_ENDPOINT, else the user's runtime directory, else one of our own under the temporary."""
    if given := os.environ.get("KVD_ENDPOINT"):
        return given
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return f"ipc://{runtime}/kvd/kvd.sock"
    return f"ipc://{tempfile.gettempdir()}/kvd-{os.getuid()}/kvd.sock"


def is_default(endpoint: str) -> bool:
    """Whether this is a place of our own choice, where nobody said one."""
    return not os.environ.get("KVD_ENDPOINT") and endpoint == default_endpoint()


def client_endpoint() -> str:
    """Where a client looks: as the daemon does, and then at the system's service.

    Makes a default place where there is none. Refuses one that belongs to another user, who would
    be trusted with our memory (ConfigError).
    """
    endpoint = default_endpoint()
    if not is_default(endpoint):
        return endpoint
    path = socket_path(endpoint)
    # By os.path, for which what may not be seen is not there.
    if not os.path.exists(path) and SYSTEM_SOCKET.exists():
        return f"ipc://{SYSTEM_SOCKET}"
    with suppress(OSError):  # before another user does, and listens there
        path.parent.mkdir(mode=0o700)
    if os.path.lexists(path.parent) and path.parent.lstat().st_uid != os.getuid():
        raise ConfigError(f"{path.parent} belongs to another user: set KVD_ENDPOINT")
    return endpoint


def is_remote(endpoint: str) -> bool:
    """Whether this is TCP: another machine, perhaps, with other memory and another clock.

    Refuses one without address and port (ConfigError).
    """
    if not endpoint.startswith("tcp://"):
        return False
    _, _, port = endpoint.rpartition(":")
    if not re.fullmatch(r"tcp://[^/\s]+:[0-9]{1,5}", endpoint) or int(port) > MAX_PORT:
        raise ConfigError(f"{endpoint!r} is not tcp:// with an address and a port")
    return True


def check_local(endpoint: str) -> None:
    """Refuse where other machines could reach what is said there without a key (ConfigError)."""
    if not re.fullmatch(r"tcp://127\.0\.0\.1:([0-9]+|\*)", endpoint):
        socket_path(endpoint)
    elif not endpoint.endswith("*"):
        is_remote(endpoint)  # refuses a port that cannot be


def socket_path(endpoint: str) -> Path:
    """The file of an ipc endpoint; refuses what ZeroMQ could not bind (ConfigError)."""
    kind, _, name = endpoint.partition("://")
    if kind != "ipc" or not name.startswith("/"):
        raise ConfigError(
            f"{endpoint!r} is not ipc:// with an absolute path; "
            "TCP needs keys, and is served beside it: see tcp.endpoint"
        )
    if not name.isprintable():  # as are bytes that are no UTF-8
        raise ConfigError(f"the path of {endpoint!r} has what cannot be printed")
    if len(os.fsencode(name)) > MAX_IPC_PATH:
        raise ConfigError(
            f"the path of {endpoint!r} has {len(os.fsencode(name))} bytes; "
            f"the system allows {MAX_IPC_PATH}: use a shorter one"
        )
    return Path(name)


def check_socket(path: Path) -> None:
    """Refuse what is there and is no socket: ZeroMQ would remove it (ConfigError)."""
    if path.exists() and not path.is_socket():
        raise ConfigError(f"{path} is there and is no socket")


def not_for_us(endpoint: str) -> Forbidden:
    """What whoever may not connect is told."""
    return Forbidden(f"{endpoint} is for its user, and for the group of ipc.group")


@contextmanager
def connected(endpoint: str, timeout: float = 0.0) -> Iterator[socket.socket]:
    """A connection to who listens on an ipc endpoint, of which nothing more is asked.

    Raises OSError: ConnectionRefusedError where nobody does, BlockingIOError where he is too busy.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(socket_path(endpoint)))
        yield connection


def local_address(endpoint: str) -> tuple[str, int]:
    """The address and port of "127.0.0.1:9464"; refuses what others can reach (ConfigError)."""
    try:
        parts = urlsplit(f"//{endpoint}")
        host, port = ip_address(parts.hostname or ""), parts.port
    except ValueError as error:
        raise ConfigError(f"{endpoint!r} is not an address and a port: {error}") from error
    if not host.is_loopback or not port:
        raise ConfigError(
            f"{endpoint!r} is not a port of this machine alone, such as 127.0.0.1:9464"
        )
    return str(host), port
