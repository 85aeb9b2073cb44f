"""Logs: what a line tells apart, as text or as JSON, and no storm of lines that tell the same.

A warning or an error begins with pairs of a name and a value, of which the first is its reason:
`logger.error("reason=tier_failed tier=%s cannot be read: %s", name, error)`. So it says all to who
formats it otherwise, and config/OPERATING.md tells of each reason. No line has tokens or contents.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

from opentelemetry import trace

# Of lines that tell the same, one is written in so long.
STORM_SECONDS = 10.0

_PAIR = re.compile(r"(\w+)=(%?\w+):? ")


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        beside = (f" {name}={value}" for name, value in _beside(record).items())
        return super().formatMessage(record) + "".join(beside)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= pairs(record) | _errno(record) | _beside(record) | line
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class StormFilter(logging.Filter):
    """Of warnings and errors that tell the same, lets one through in STORM_SECONDS.

    The same are those of one logger and level whose pairs are the same, or of one wording without
    any. The next one that goes through has the number of those that did not, as `suppressed`; where
    none comes, a line of its own has it, as soon as anything is logged.
    """

    def __init__(self) -> None:
        super().__init__()
        # When each was let through last, and how many were not since.
        self._told: dict[tuple[Any, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "suppressed"):  # our own
            return True
        if record.levelno >= logging.WARNING:
            key = record.levelno, record.name, *(pairs(record) or {"": str(record.msg)}).items()
            told, suppressed = self._told.get(key, (-STORM_SECONDS, 0))
            if record.created - told < STORM_SECONDS:
                self._told[key] = told, suppressed + 1
                return False
            self._told[key] = record.created, 0
            record.suppressed = suppressed
        self._end_storms(record.created)
        return True

    def _end_storms(self, now: float) -> None:
        for key, (told, _) in list(self._told.items()):
            if now - told >= STORM_SECONDS:
                _, suppressed = self._told.pop(key, (told, 0))
                if suppressed:
                    _tell_suppressed(*key, suppressed=suppressed)


def _tell_suppressed(level: int, name: str, *told: tuple[str, object], suppressed: int) -> None:
    text = " ".join(f"{pair}=%s" if pair else "%s" for pair, _ in told)
    values = [value for _, value in told]
    logging.getLogger(name).log(
        level, f"{text} and others like it", *values, extra={"suppressed": suppressed}
    )


def pairs(record: logging.LogRecord) -> dict[str, object]:
    """What a message begins with, as "reason=tier_failed tier=%s ", with the values it has."""
    found: dict[str, object] = {}
    values = iter(record.args if isinstance(record.args, tuple) else ())
    at, text = 0, str(record.msg)
    while pair := _PAIR.match(text, at):
        name, value = pair.groups()
        found[name] = str(next(values, value)) if value.startswith("%") else value
        at = pair.end()
    return found


def _errno(record: logging.LogRecord) -> dict[str, object]:
    """Of the error of the system's behind what a line tells of, its name."""
    args = record.args if isinstance(record.args, tuple) else ()
    raised = record.exc_info[1] if record.exc_info else None
    for error in _with_causes((*args, raised)):
        if isinstance(error, OSError) and error.errno:
            return {"errno": errno.errorcode.get(error.errno, str(error.errno))}
    return {}


def _with_causes(values: Iterable[object]) -> Iterator[BaseException]:
    for value in values:
        while isinstance(value, BaseException):
            yield value
            value = value.__cause__


def _beside(record: logging.LogRecord) -> dict[str, object]:
    """The trace that a line belongs to, and how many lines like it were left out before."""
    beside: dict[str, object] = {}
    if (context := trace.get_current_span().get_span_context()).is_valid:
        beside["trace_id"] = trace.format_trace_id(context.trace_id)
    if suppressed := getattr(record, "suppressed", 0):
        beside["suppressed"] = suppressed
    return beside
