"""Finds tiers by entry point: ours use the same door as everybody's."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.config import convert
from kvd.protocol.errors import ConfigError, KvdError
from kvd.tiers.base import StoreTier

if TYPE_CHECKING:
    from kvd.tiers.base import Tier

GROUP = "kvd.tiers"


def load_tier(section: Mapping[str, Any], directory: Path, data_directory: Path) -> Tier:
    """Make the tier that a configuration's section describes: `type` and the plugin's own keys.

    A memory tier gets `directory`, on shared memory; a store tier `data_directory`.
    """
    kind = section.get("type")
    known = {point.name: point for point in entry_points(group=GROUP)}
    if kind not in known:
        raise ConfigError(
            f"tiers: unknown type {kind!r}; known here: {', '.join(sorted(known)) or 'none'}"
        )
    try:
        tier_class: type[Tier] = known[kind].load()
    except Exception as error:  # whatever a plugin's module does when it is imported
        raise ConfigError(f"tiers, type {kind}: cannot be imported: {error}") from error
    own = {key: value for key, value in section.items() if key != "type"}
    try:
        config = convert(own, tier_class.Config, f"tiers, type {kind}")
        return tier_class(
            config, data_directory if issubclass(tier_class, StoreTier) else directory
        )
    except KvdError:
        raise
    except Exception as error:  # a place that no file system can have, a method that is missing
        raise ConfigError(f"tiers, type {kind}: cannot be made: {error}") from error
