"""Config and its sections. Each default is written once, here."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import fields

from kvd.protocol.certificates import KEY_PATTERN, NAME_PATTERN
from kvd.protocol.endpoint import (
    check_local,
    default_endpoint,
    is_remote,
    local_address,
    socket_path,
)
from kvd.protocol.errors import ConfigError
from kvd.protocol.events import Encoding
from kvd.protocol.units import MAX_INTEGER, ByteSize, decode_size
from kvd.protocol.verbs import verbs_named

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
# What the system is asked for: it ends such texts at a zero byte.
Name = Annotated[str, Meta(pattern="^[^\0]*$")]
S = TypeVar("S", bound=msgspec.Struct)

MIN_REQUEST_BYTES = 64 << 10
MAX_REQUEST_BYTES = 1 << 40


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Of what is wrong, the key is told first."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


@contextmanager
def choosing(key: str) -> Iterator[None]:
    """Of a place that cannot be used, the key is told that chooses it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}: set {key}") from error


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


class IpcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may use the endpoint and map memory: its user, and a `group` with mode 0660.

    An empty group is the one that the daemon's files have anyway.
    """

    mode: Literal["0600", "0660"] = "0660"
    group: Name = ""


class OperatorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where operators ask, for the daemon's user alone; empty: where everybody does."""

    endpoint: Name = ""

    def __post_init__(self) -> None:
        if self.endpoint:
            with naming("operator.endpoint"):
                socket_path(self.endpoint)


class TcpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where clients of other machines come, encrypted, with a key of `clients`; empty: nowhere.

    `server_key` is the secret file of the daemon's own key.
    """

    endpoint: Name = ""
    server_key: Name = ""


class ClientConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whoever has the secret half of `key` may ask these `verbs`, of these namespaces.

    `verbs` are "inference", "operator", or single ones by name. `models` and `salts` say which
    namespaces; no models mean any, and only an operator may have any salt. At once it may have
    `sessions`, each with `reserved_fraction` of the capacity in pages that it has not committed.
    """

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    key: Annotated[str, Meta(pattern=KEY_PATTERN)]
    verbs: tuple[str, ...] = ("inference",)
    models: tuple[str, ...] = ()
    salts: tuple[str, ...] = ()
    sessions: Count = 64
    reserved_fraction: Fraction = 0.25

    def __post_init__(self) -> None:
        with naming(f"clients: {self.name}"):
            verbs_named(self.verbs)
        if not self.salts and "operator" not in self.verbs:
            raise ConfigError(
                f"clients: {self.name} has no salts, so that it could open nothing; "
                'namespaces without a salt have the salt ""'
            )


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
        for name in ("endpoint", "replay_endpoint"):
            if endpoint := getattr(self, name):
                with naming(f"events.{name}"):
                    check_local(endpoint)
        if self.replay_endpoint and not self.endpoint:
            raise ConfigError("events: replay_endpoint without endpoint: nothing is published")

    @property
    def instance(self) -> str:
        return self.topic_instance or os.uname().nodename


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`endpoint`: the address and port of /healthz, /readyz and /metrics; empty: none."""

    endpoint: str = ""

    def __post_init__(self) -> None:
        if self.endpoint:
            with naming("http.endpoint"):
                local_address(self.endpoint)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a Daemon is made from.

    `endpoint`: where it listens; empty: KVD_ENDPOINT, else in the user's runtime directory, else in
    one under the temporary one. `directory`: its files in shared memory; empty: under /dev/shm, by
    user and endpoint. `data_directory`: its files on disk; empty: in the user's cache directory, by
    endpoint. `grace_seconds`: how long a stop may take. `hang_seconds`: at the start, a tier below
    memory that was not heard of for so long is done without.
    """

    endpoint: Name = ""
    directory: Name = ""
    data_directory: Name = ""
    grace_seconds: Seconds = 5.0
    hang_seconds: Seconds = 60.0
    cache: CacheConfig = CacheConfig()
    sessions: SessionConfig = SessionConfig()
    limits: LimitConfig = LimitConfig()
    ipc: IpcConfig = IpcConfig()
    operator: OperatorConfig = OperatorConfig()
    tcp: TcpConfig = TcpConfig()
    events: EventConfig = EventConfig()
    log: LogConfig = LogConfig()
    http: HttpConfig = HttpConfig()
    tiers: tuple[dict[str, Any], ...] = ({"type": "host"}, {"type": "lmdb"})
    quotas: tuple[QuotaConfig, ...] = ()
    clients: tuple[ClientConfig, ...] = ()

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
        self._check_tcp()

    def _check_tcp(self) -> None:
        """TCP with keys on both ends, or none."""
        for what in ("name", "key"):
            if len({getattr(client, what) for client in self.clients}) < len(self.clients):
                raise ConfigError(f"clients: two have the same {what}")
        if not self.tcp.endpoint:
            return
        with naming("tcp.endpoint"):
            if not is_remote(self.tcp.endpoint):
                raise ConfigError(f"{self.tcp.endpoint!r} is not tcp://")
        if not Path(self.tcp.server_key).is_absolute():
            raise ConfigError(
                f"tcp: server_key {self.tcp.server_key!r} is no absolute path of a secret key: "
                "kvd-ctl keys new makes one"
            )
        if not self.clients:
            raise ConfigError("tcp: without any [[clients]] nobody could come")

    @property
    def endpoints(self) -> dict[str, str]:
        """All that it listens at, by the keys that say so."""
        found = {
            "endpoint": self.resolved_endpoint,
            "operator.endpoint": self.operator.endpoint,
            "tcp.endpoint": self.tcp.endpoint,
            "http.endpoint": self.http.endpoint,
            "events.endpoint": self.events.endpoint,
            "events.replay_endpoint": self.events.replay_endpoint,
        }
        return {key: endpoint for key, endpoint in found.items() if endpoint}

    @property
    def places(self) -> dict[str, str]:
        """Where it is, by the keys that say so; what is empty there has its default here."""
        return {
            "endpoint": self.resolved_endpoint,
            "directory": str(self.resolved_directory),
            "data_directory": str(self.resolved_data_directory),
        }

    @property
    def resolved_endpoint(self) -> str:
        endpoint = self.endpoint or default_endpoint()
        with naming("endpoint"):
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
        if not cache.is_absolute():
            raise ConfigError(f"XDG_CACHE_HOME {str(cache)!r} is not an absolute path")
        return cache / "kvd" / self._endpoint_name

    @property
    def _endpoint_name(self) -> str:
        return hashlib.sha256(self.resolved_endpoint.encode()).hexdigest()[:12]


def parse(document: Mapping[str, Any], source: str = "configuration") -> Config:
    """Turn a document's plain values into a Config; raises ConfigError as `convert`."""
    return convert(document, Config, source)


def convert(section: Mapping[str, Any], kind: type[S], source: str) -> S:
    """Turn plain values into a Struct.

    Raises ConfigError, naming the source, the key and what it may be.
    """
    with naming(source):
        _check_keys(section, kind, "")
        try:
            return msgspec.convert(section, kind, dec_hook=decode_size)
        except msgspec.ValidationError as error:
            raise ConfigError(reason(error, kind)) from error


def type_of(kind: Any, key: str) -> Any:
    """What a key such as "cache.high_watermark" holds; without a key, `kind` itself."""
    for name in re.findall(r"\w+(?=[.[]|$)", key):
        kind = next(each.type for each in fields(_item(kind)) if each.encode_name == name)
    return kind


def flat(section: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """All values by key; what is a list stays one."""
    found: dict[str, Any] = {}
    for name in section.__struct_fields__:
        value, key = getattr(section, name), prefix + name
        found |= flat(value, f"{key}.") if isinstance(value, msgspec.Struct) else {key: value}
    return found


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """To be said of an unknown name: the known one that may be meant, and `prefix` before it."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _check_keys(section: Mapping[str, Any], kind: type[msgspec.Struct], prefix: str) -> None:
    """Refuse unknown keys with the nearest known one, which msgspec does not name."""
    types = {field.encode_name: field.type for field in fields(kind)}
    for name, value in section.items():
        key = prefix + name
        if name not in types:
            raise ConfigError(f"unknown key {key}{nearest(name, types, prefix)}")
        inner = _item(types[name])
        if not (isinstance(inner, type) and issubclass(inner, msgspec.Struct)):
            continue
        if isinstance(value, Mapping):
            _check_keys(value, inner, f"{key}.")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                if isinstance(item, Mapping):
                    _check_keys(item, inner, f"{key}[{number}].")


def _item(kind: Any) -> Any:
    """Of a list's type that of its items, else the type itself."""
    return next(iter(get_args(kind)), kind)


def reason(error: msgspec.ValidationError, kind: Any) -> str:
    """Why a value is none of this type: the key, what is wrong, what it may be."""
    text, _, place = str(error).partition(" - at `$")
    key = place.strip("`.")
    if text.startswith("Invalid enum value"):  # msgspec does not say which there are
        text += f"; it may be {', '.join(map(str, get_args(type_of(kind, key))))}"
    return f"{key}: {text}" if key else text
