"""Loaded: a Config, and where each of its values comes from."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvd.config import Config, flat, nearest, parse, reason, type_of
from kvd.protocol.errors import ConfigError
from kvd.protocol.units import decode_size

# config/, by a link: so it is found in a checkout and in what was installed.
PROFILES = Path(__file__).parent / "profiles"
PREFIX = "KVD_"
DEFAULT = "default"
# All but the lists, which stand in files alone.
KEYS = [key for key, value in flat(Config()).items() if not isinstance(value, tuple)]


@dataclass(frozen=True, slots=True)
class Loaded:
    """`origins` are those of keys that anything names; `source` is all of it in short.

    `again` loads it anew. Without that a program made it, and no reload changes it.
    """

    config: Config
    origins: dict[str, str] = field(default_factory=dict)
    source: str = ""
    again: Callable[[], Loaded] | None = None

    @contextmanager
    def naming_source(self) -> Iterator[None]:
        """Of what is wrong in it, where it stands is said."""
        try:
            yield
        except ConfigError as error:
            if error.message.startswith(self.source):  # there is none, or it is said already
                raise
            raise ConfigError(f"{self.source}: {error}") from error

    def origin(self, key: str) -> str:
        return self.origins.get(key, DEFAULT)


def profiles() -> list[str]:
    """The names of the configurations that come with kvd."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def find(name: str) -> Path:
    """The file that is meant: one that comes with kvd, by its name, or a path."""
    return PROFILES / f"{name}.toml" if name in profiles() else Path(name)


def load(
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    """Read a configuration: a file, over it the environment, over that `flags`, values by key.

    Raises ConfigError, naming where it stands, the key and what it may be.
    """
    document = _read(path) if path else {}
    origins = dict.fromkeys(_keys(document), f"file {path}")
    sources = [str(path)] if path else []
    for name, key, value in _overrides(environment or {}):
        # Where clients and daemon meet if nobody says where: any file knows better.
        if key != "endpoint" or key not in origins:
            put(document, key, value)
            origins[key] = f"environment {name}"
            sources.append(name)
    for key, value in (flags or {}).items():
        put(document, key, value)
        origins[key] = "command line"
    source = ", ".join(sources)
    return Loaded(parse(document, source), origins, source, partial(load, path, environment, flags))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8").removeprefix("\ufeff"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    parse(document, str(path))  # what is wrong in a file is said of it alone
    return document


def _overrides(environment: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """The variables that name a key: KVD_CACHE__HIGH_WATERMARK is cache.high_watermark.

    Refuses those that are meant so and do not; others beginning with KVD_ are somebody else's.
    """
    known = {PREFIX + key.upper().replace(".", "__"): key for key in KEYS}
    for name, text in environment.items():
        if name in known:
            if text or name != "KVD_ENDPOINT":
                yield name, known[name], _typed(name, known[name], text)
        elif name.startswith(PREFIX) and _is_meant(name):
            raise ConfigError(f"{name} names no key of the configuration{nearest(name, known)}")


def _is_meant(name: str) -> bool:
    section, separator, _ = name.removeprefix(PREFIX).lower().partition("__")
    return bool(separator) or section in Config.__struct_fields__


def _typed(name: str, key: str, text: str) -> Any:
    """What a variable says, as the Struct has it."""
    kind = type_of(Config, key)
    try:
        text.encode()
        return msgspec.convert(text, kind, strict=False, dec_hook=decode_size)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {reason(error, kind)}") from error
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not UTF-8") from error


def _keys(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def put(document: dict[str, Any], key: str, value: Any) -> None:
    """Set a key such as "cache.high_watermark" in a document."""
    *sections, name = key.split(".")
    for section in sections:
        document = document.setdefault(section, {})
    document[name] = value
