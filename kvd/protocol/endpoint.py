"""Where daemon and clients meet when nobody says where."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvd.protocol.errors import ConfigError

MAX_IPC_PATH = 107  # sun_path holds 108 bytes, the last one zero


def default_endpoint() -> str:
    """KVD_ENDPOINT, else the user's runtime directory, else one of our own under the temporary."""
    if given := os.environ.get("KVD_ENDPOINT"):
        return given
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return f"ipc://{runtime}/kvd/kvd.sock"
    return f"ipc://{tempfile.gettempdir()}/kvd-{os.getuid()}/kvd.sock"


def client_endpoint() -> str:
    """Where a client looks: as the daemon does, and then at the system's service."""
    endpoint = default_endpoint()
    system = Path("/run/kvd.sock")
    if "KVD_ENDPOINT" not in os.environ and not socket_path(endpoint).exists() and system.exists():
        return f"ipc://{system}"
    return endpoint


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
