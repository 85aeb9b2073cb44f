"""Config and its sections; load(). Each default is written once, here."""

from __future__ import annotations

import difflib
import hashlib
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvd.protocol.endpoint import check_local, default_endpoint, socket_path
from kvd.protocol.errors import ConfigError
from kvd.protocol.events import Encoding
from kvd.protocol.units import ByteSize, decode_size

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1)]


MIN_REQUEST_BYTES = 64 << 10
MAX_REQUEST_BYTES = 1 << 40


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Eviction starts in the background above `high_watermark` and stops at `low_watermark`.

    Above `demote_watermark` blocks are copied to the tiers below, so that eviction only forgets:
    with `admission` all of them, or those that were matched again. Every `checkpoint_seconds` the
    rest is copied to the tiers that survive. `back_ahead_bytes` of free memory are kept ready, so
    that a reserve seldom waits for it. `scrub_bytes` a second are compared with their checksums.
    """

    high_watermark: Fraction = 0.98
    low_watermark: Fraction = 0.95
    demote_watermark: Fraction = 0.75
    admission: Literal["all", "reused"] = "all"
    checkpoint_seconds: Seconds = 300.0
    scrub_bytes: ByteSize = ByteSize(32 << 20)
    back_ahead_bytes: ByteSize = ByteSize(64 << 20)


class SessionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients send a heartbeat every `heartbeat_seconds`.

    A session that maps memory ends when its processes are gone, looked for every `sweep_seconds`;
    one that does not ends when it was silent for `silent_seconds`.
    """

    heartbeat_seconds: Seconds = 2.0
    silent_seconds: Seconds = 10.0
    sweep_seconds: Seconds = 0.5


class LimitConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What clients may send and hold. `wait_seconds` bounds a request without a deadline.

    Of the capacity, a session may hold `session_reserved_fraction` in pages that it has not
    committed; pins may hold `pinned_fraction` in all and `owner_pinned_fraction` for one owner.
    Namespaces and layouts that nobody uses make place for others. Of saved sequences there may be
    so many, and all together may have `sequence_bytes`.
    """

    sessions: Count = 1024
    session_leases: Count = 4096
    session_reserved_fraction: Fraction = 0.9
    namespaces: Count = 1024
    session_namespaces: Count = 256
    layouts: Count = 64
    pins: Count = 1024
    pinned_fraction: Fraction = 0.5
    owner_pinned_fraction: Fraction = 0.25
    sequences: Count = 1000
    sequence_bytes: ByteSize = ByteSize(256 << 20)
    session_waiting: Count = 32
    batch_items: Count = 256
    request_bytes: ByteSize = ByteSize(8 << 20)
    wait_seconds: Seconds = 60.0


class QuotaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each namespace of a model and a salt keeps at least and gets at most (0: no bound).

    Empty names mean any; of several quotas the first that fits counts.
    """

    model: str = ""
    salt: str = ""
    guaranteed_bytes: ByteSize = ByteSize(0)
    max_bytes: ByteSize = ByteSize(0)

    def __post_init__(self) -> None:
        if self.max_bytes and self.guaranteed_bytes > self.max_bytes:
            raise ConfigError("quotas: guaranteed_bytes is above max_bytes")


class EventConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where kvd publishes what comes to its tiers and leaves them, in the form of vLLM's KV events.

    Nowhere without `endpoint`. At `replay_endpoint` whoever missed some asks for them: so many
    batches are kept, of so many bytes. `media` says by a tier's name how events call it. Endpoints
    are ipc, or tcp on 127.0.0.1. Without `topic_instance` topics have the name of the machine.
    """

    endpoint: str = ""
    replay_endpoint: str = ""
    encoding: Encoding = "map"
    topic_instance: str = ""
    media: dict[str, str] = {}
    buffer_batches: Count = 10_000
    buffer_bytes: ByteSize = ByteSize(64 << 20)

    def __post_init__(self) -> None:
        for endpoint in filter(None, (self.endpoint, self.replay_endpoint)):
            check_local(endpoint)
        if self.replay_endpoint and not self.endpoint:
            raise ConfigError("events: replay_endpoint without endpoint: nothing is published")

    @property
    def instance(self) -> str:
        return self.topic_instance or os.uname().nodename


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a Daemon is made from.

    `endpoint`: where it listens; empty: KVD_ENDPOINT, else in the user's runtime directory, else in
    one under the temporary one. `directory`: its files in shared memory; empty: under /dev/shm, by
    user and endpoint. `data_directory`: its files on disk; empty: in the user's cache directory, by
    endpoint. `grace_seconds`: how long a stop may take. `hang_seconds`: at the start, a tier below
    memory that was not heard of for so long is done without.
    """

    endpoint: str = ""
    directory: str = ""
    data_directory: str = ""
    grace_seconds: Seconds = 5.0
    hang_seconds: Seconds = 60.0
    cache: CacheConfig = CacheConfig()
    sessions: SessionConfig = SessionConfig()
    limits: LimitConfig = LimitConfig()
    events: EventConfig = EventConfig()
    log: LogConfig = LogConfig()
    tiers: tuple[dict[str, Any], ...] = ({"type": "host"}, {"type": "lmdb"})
    quotas: tuple[QuotaConfig, ...] = ()

    def __post_init__(self) -> None:
        if self.cache.low_watermark > self.cache.high_watermark:
            raise ConfigError("cache: low_watermark is above high_watermark")
        if not MIN_REQUEST_BYTES <= self.limits.request_bytes <= MAX_REQUEST_BYTES:
            raise ConfigError(
                f"limits: request_bytes is {self.limits.request_bytes}; it may be from "
                f"{MIN_REQUEST_BYTES} to {MAX_REQUEST_BYTES}"
            )
        for name in ("directory", "data_directory"):
            if (path := getattr(self, name)) and not Path(path).is_absolute():
                raise ConfigError(f"{name} {path!r} is not an absolute path")
        if not self.tiers:
            raise ConfigError("tiers: there must be one at least, with what clients map")

    @property
    def resolved_endpoint(self) -> str:
        endpoint = self.endpoint or default_endpoint()
        socket_path(endpoint)
        return endpoint

    @property
    def resolved_directory(self) -> Path:
        if self.directory:
            return Path(self.directory)
        return Path("/dev/shm") / f"kvd-{os.getuid()}" / self._endpoint_name

    @property
    def resolved_data_directory(self) -> Path:
        if self.data_directory:
            return Path(self.data_directory)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "kvd" / self._endpoint_name

    @property
    def _endpoint_name(self) -> str:
        return hashlib.sha256(self.resolved_endpoint.encode()).hexdigest()[:12]


def load(path: Path | None = None) -> Config:
    """Read a configuration file; without one, the defaults. Raises ConfigError, naming the key."""
    if path is None:
        return Config()
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return parse(document, str(path))


def parse(document: dict[str, Any], source: str = "configuration") -> Config:
    """Turn a document's plain values into a Config; raises ConfigError, naming the key."""
    _check_keys(document, Config, "", source)
    try:
        return msgspec.convert(document, Config, dec_hook=decode_size)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def _check_keys(
    section: dict[str, Any], kind: type[msgspec.Struct], prefix: str, source: str
) -> None:
    """Refuse unknown keys with the nearest known one, which msgspec does not name."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for key, value in section.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise ConfigError(f"{source}: unknown key {prefix}{key}{hint}")
        default = fields[key].default
        if isinstance(default, msgspec.Struct) and isinstance(value, dict):
            _check_keys(value, type(default), f"{prefix}{key}.", source)
