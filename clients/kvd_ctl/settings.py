"""What a daemon of this machine goes by, or would: as it says, or as it would read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvd.config import Config, parse
from kvd.loading import find, load, put
from kvd.protocol.endpoint import is_remote
from kvd_client import BadRequest, Client, KvdError, StatusReply
from kvd_ctl import service
from kvd_ctl.app import NAME, check_listening

if TYPE_CHECKING:
    from kvd.protocol.messages import ConfigValue


@dataclass(frozen=True)
class Settings:
    """`source` says where they are from, `answer` is what the daemon there said."""

    config: Config
    source: str
    answer: StatusReply | KvdError


def find_settings(path: Path | None, endpoint: str | None, timeout: float) -> Settings:
    """Those of a file that is named; else of the daemon that answers, of its service, or defaults.

    Raises BadRequest for an endpoint of another machine, ConfigError.
    """
    if endpoint and is_remote(endpoint):
        raise BadRequest(f"this looks at the machine that it runs on, not at {endpoint}")
    if path is None:
        with suppress(KvdError), _client(endpoint, timeout) as client:
            status = _status(client)
            config = _as_told(client.config().values)
            return Settings(config, f"what kvd, pid {status.pid}, says", status)
    config, source = _read(path, endpoint)
    try:
        with _client(config.resolved_endpoint, timeout) as client:
            return Settings(config, source, _status(client))
    except KvdError as error:
        return Settings(config, source, error)


def _client(endpoint: str | None, timeout: float) -> Client:
    return Client(endpoint, timeout=timeout, name=NAME, maps=False)


def _status(client: Client) -> StatusReply:
    check_listening(client.endpoint)
    return client.status()


def _as_told(values: Iterable[ConfigValue]) -> Config:
    document: dict[str, Any] = {}
    for each in values:
        put(document, each.key, each.value)
    return parse(document, "what kvd says")


def _read(path: Path | None, endpoint: str | None) -> tuple[Config, str]:
    """As a daemon would: what a file says comes first."""
    if path is None and (installed := service.configuration()):
        config = load(installed).config
        if endpoint in (None, config.endpoint):
            return config, f"{installed}, the service's"
    config = load(find(str(path)) if path else None, os.environ).config
    source = str(path) if path else "defaults, since no kvd answers"
    return replace(config, endpoint=config.endpoint or endpoint or ""), source
