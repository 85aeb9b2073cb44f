"""Verbs by name, and who has need of which."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, get_args

from kvd.protocol.errors import ConfigError
from kvd.protocol.messages import AnyRequest

Verb: TypeAlias = type[AnyRequest]


def verb_name(verb: Verb) -> str:
    """A verb as it is called on the wire and in a configuration."""
    return str(verb.__struct_config__.tag)


VERBS: dict[str, Verb] = {verb_name(verb): verb for verb in get_args(AnyRequest)}

# What an engine asks, of its own namespaces. Every other verb, also one that comes later, is the
# operators' alone.
INFERENCE: frozenset[Verb] = frozenset(
    VERBS[name]
    for name in (
        *("attach", "heartbeat", "detach", "open", "close"),
        *("match", "extend", "prefetch", "fork", "reserve", "commit", "abort", "release"),
        *("load", "store", "pin", "unpin"),
        *("save", "resume", "sequences", "discard"),
    )
)
OPERATOR: frozenset[Verb] = frozenset(VERBS.values())

_SETS = {"inference": INFERENCE, "operator": OPERATOR}


def verbs_named(names: Iterable[str]) -> frozenset[Verb]:
    """The verbs that are named, one by one or as "inference" or "operator".

    Raises ConfigError for a name that is neither.
    """
    verbs: frozenset[Verb] = frozenset()
    for name in names:
        if name in _SETS:
            verbs |= _SETS[name]
        elif name in VERBS:
            verbs |= {VERBS[name]}
        else:
            known = ", ".join((*_SETS, *VERBS))
            raise ConfigError(f"there is no verb {name!r}; there are {known}")
    return verbs
