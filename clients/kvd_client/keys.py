"""The keys of a client that comes by TCP."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvd.protocol.certificates import KeyPair, load_pair, load_public
from kvd.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Keys:
    """This client's pair, and the key by which it knows the daemon."""

    own: KeyPair
    server: str


def load_keys(key: str | None, server_key: str | None) -> Keys:
    """Read the keys of these files, or of those that KVD_KEY and KVD_SERVER_KEY name.

    Raises ConfigError where one is missing or cannot be used.
    """
    own = _named(key, "key", "KVD_KEY")
    server = _named(server_key, "server_key", "KVD_SERVER_KEY")
    return Keys(load_pair(own), load_public(server))


def _named(path: str | None, what: str, variable: str) -> Path:
    if path := path or os.environ.get(variable):
        return Path(path)
    raise ConfigError(f"by TCP a client needs a {what}: name a file, or set {variable}")
