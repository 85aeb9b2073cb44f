"""Reloader: the configuration of a running daemon, and another one in its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgspec

from kvd.config import Config, flat
from kvd.protocol.errors import KvdError, Unsupported
from kvd.protocol.messages import ConfigChange, ConfigValue

if TYPE_CHECKING:
    from kvd.loading import Loaded

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)

# What a daemon goes by from its start to its end, keys and whole sections. All else may change.
AT_START = frozenset(
    {
        "endpoint",
        "events",
        "directory",
        "data_directory",
        "hang_seconds",
        "http",
        "ipc",
        "limits.request_bytes",
        "operator",
        "tcp",
        "tiers",
    }
)
# Of a plugin's keys, those whose value is nobody's business.
SECRETS = ("password", "secret", "token")
HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload changed, and what differs and cannot change before the next start."""

    changed: tuple[ConfigChange, ...]
    needs_restart: tuple[ConfigChange, ...]


class Reloader:
    """Gives the parts of a daemon another configuration while they run.

    Each part has its own sections in attributes that it reads when it needs a value, and
    `parts` has its `configure`, which sets them and makes anew what it made of a value. So a part
    says what it goes by, as at its start, where one holder of the whole would have to be asked by
    all of them, the plain classes of the cache included. All are called in one turn of the loop:
    nobody sees half of it, and no request is served between. What a start would refuse, `check`
    refuses before; after that only the first part may, while nothing has changed yet.
    """

    def __init__(self, loaded: Loaded, check: Callable[[Loaded], object]) -> None:
        self._loaded = loaded
        self._check = check
        self.parts: Sequence[Callable[[Config], None]] = ()
        self._reloading = anyio.Lock()

    @property
    def config(self) -> Config:
        return self._loaded.config

    def listed(self) -> tuple[ConfigValue, ...]:
        """Every key with its value, and where that comes from."""
        values = flat(self.config) | self.config.places
        return tuple(ConfigValue(k, _shown(v), self._loaded.origin(k)) for k, v in values.items())

    async def reload(self) -> Reloaded:
        """Load the configuration anew and go by it. Where it is refused, nothing changes.

        Raises ConfigError, and Unsupported where there is nothing to load it from.
        """
        async with self._reloading:
            try:
                loaded = await anyio.to_thread.run_sync(self._load, abandon_on_cancel=True)
                done = self._go_by(loaded)
            except Exception as error:
                fault = None if isinstance(error, KvdError) else error
                logger.error("reason=not_reloaded %s", error, exc_info=fault)
                raise
        logger.info("reloaded; changed: %s", _names(done.changed))
        if done.needs_restart:
            logger.warning("reason=needs_restart for: %s", _names(done.needs_restart))
        return done

    def _load(self) -> Loaded:
        if self._loaded.again is None:
            raise Unsupported("this kvd was configured by the program that it runs in")
        loaded = self._loaded.again()
        with loaded.naming_source():
            self._check(loaded)
        return loaded

    def _go_by(self, loaded: Loaded) -> Reloaded:
        before, wanted = self.config, loaded.config
        config = _without_restart(before, wanted)
        with loaded.naming_source():
            for configure in self.parts:
                configure(config)
        done = Reloaded(_changes(before, config), _changes(config, wanted))
        kept = {change.key: self._loaded.origin(change.key) for change in done.needs_restart}
        self._loaded = replace(loaded, config=config, origins=loaded.origins | kept)
        return done


def _without_restart(before: S, after: S, prefix: str = "") -> S:
    """The configuration `after`, but for what stays as it was at the start."""

    def choose(name: str) -> Any:
        key, old, new = prefix + name, getattr(before, name), getattr(after, name)
        if key in AT_START:
            return old
        return _without_restart(old, new, f"{key}.") if isinstance(new, msgspec.Struct) else new

    return type(after)(**{name: choose(name) for name in after.__struct_fields__})


def _changes(before: Config, after: Config) -> tuple[ConfigChange, ...]:
    old, new = flat(before), flat(after)
    return tuple(
        ConfigChange(key, _shown(old[key]), _shown(new[key])) for key in new if old[key] != new[key]
    )


def _names(changes: Sequence[ConfigChange]) -> str:
    return ", ".join(change.key for change in changes) or "nothing"


def _shown(value: Any) -> Any:
    """A value as others may see it; only plugins have keys of which that is not all."""
    match value:
        case dict():
            return {key: HIDDEN if _is_secret(key) else _shown(each) for key, each in value.items()}
        case list() | tuple():
            return [_shown(each) for each in value]
        case _:
            return value


def _is_secret(key: str) -> bool:
    return any(word in key.lower() for word in SECRETS)
