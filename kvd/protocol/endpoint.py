"""Where daemon and clients meet when nobody says where."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from kvd.protocol.errors import ConfigError

SYSTEM_SOCKET = Path("/run/kvd.sock")
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

    Refuses a default place that belongs to another user, who would be trusted with our memory
    (ConfigError).
    """
    endpoint = default_endpoint()
    if not is_default(endpoint):
        return endpoint
    path = socket_path(endpoint)
    if not path.exists():
        return f"ipc://{SYSTEM_SOCKET}" if SYSTEM_SOCKET.exists() else endpoint
    if path.parent.stat().st_uid != os.getuid():
        raise ConfigError(f"{path.parent} belongs to another user: set KVD_ENDPOINT")
    return endpoint


def check_local(endpoint: str) -> None:
    """Refuse where other machines could reach what is said there without a key (ConfigError)."""
    if not re.fullmatch(r"tcp://127\.0\.0\.1:(\d{1,5}|\*)", endpoint):
        socket_path(endpoint)


def socket_path(endpoint: str) -> Path:
    """The file of an ipc endpoint; refuses what ZeroMQ could not bind (ConfigError)."""
    kind, _, name = endpoint.partition("://")
    if kind != "ipc" or not name.startswith("/"):
        raise ConfigError(
            f"endpoint {endpoint!r} is not ipc:// with an absolute path; "
            "other transports need keys and are not served yet"
        )
    if len(os.fsencode(name)) > MAX_IPC_PATH:
        raise ConfigError(
            f"the path of {endpoint!r} has {len(os.fsencode(name))} bytes; "
            f"the system allows {MAX_IPC_PATH}: use a shorter one"
        )
    return Path(name)
