"""Keys for TCP: files as zmq.auth and its kin in other languages have them.

A pair is NAME.key, which may be shown to everybody, and NAME.key_secret, which holds both halves.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from kvd.protocol.errors import ConfigError

# Thirty-two bytes in Z85, and what a pair may be called.
KEY_PATTERN = r"^[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$"
NAME_PATTERN = r"^[0-9A-Za-z][0-9A-Za-z._-]{0,63}$"

PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both halves, in Z85."""

    public: str
    secret: str = field(repr=False)


def load_pair(path: Path) -> KeyPair:
    """Read a secret file. Raises ConfigError, also where somebody else could read or change it."""
    _, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{path} has no secret key: name the {SECRET_SUFFIX} file")
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} must belong to user {os.geteuid()} and to nobody else: chown, chmod 600"
        )
    return KeyPair(zmq.curve_public(secret).decode(), secret.decode())


def load_public(path: Path) -> str:
    """Read the half that may be shown, from either file. Raises ConfigError."""
    return _load(path)[0].decode()


def make_pair(directory: Path, name: str) -> KeyPair:
    """Make both files of a new pair. Raises ConfigError for a name that is taken or cannot be."""
    if not re.match(NAME_PATTERN, name):
        raise ConfigError(f"{name!r} is no name of a key: letters, digits, dots and dashes")
    public, secret = (directory / f"{name}{suffix}" for suffix in (PUBLIC_SUFFIX, SECRET_SUFFIX))
    if public.exists():
        raise ConfigError(f"{public} is there already")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Nobody else may read it when the secret is written.
        os.close(os.open(secret, os.O_CREAT | os.O_EXCL, 0o600))
        zmq.auth.create_certificates(directory, name)
    except OSError as error:
        raise ConfigError(f"{secret} cannot be made: {error.strerror}") from error
    return load_pair(secret)


def list_public(directory: Path) -> dict[str, str]:
    """The shown halves in a directory by name. Raises ConfigError for a file that is none."""
    paths = sorted(directory.glob(f"*{PUBLIC_SUFFIX}"))
    return {path.stem: load_public(path) for path in paths}


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no key that can be read: {error}") from error
    for half in (public, secret or public):
        try:
            zmq.curve_public(half)  # which reads any key
        except (zmq.ZMQError, ValueError) as error:
            raise ConfigError(f"{path} holds what is no key") from error
    return public, secret
