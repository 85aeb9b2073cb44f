"""What a line of the log tells, and that no storm of failures fills it."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace

from kvd.logs import STORM_SECONDS, JsonFormatter, StormFilter, TextFormatter, pairs

ROOT = Path(__file__).parent.parent
FAILING = {"warning", "error", "exception", "critical"}
TRACE = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, False, trace.TraceFlags(1)))


def record(message: str, *args: object, at: float = 1000.0, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("kvd.test", logging.ERROR, __file__, 1, message, args, None)
    made.created = at
    made.__dict__ |= more
    return made


def in_json(made: logging.LogRecord) -> dict[str, str]:
    line: dict[str, str] = json.loads(JsonFormatter().format(made))
    return line


def let_through(storm: StormFilter, *records: logging.LogRecord) -> list[bool]:
    return [bool(storm.filter(each)) for each in records]


# --- what a line tells ---


def test_the_pairs_that_a_message_begins_with_are_told_apart() -> None:
    line = in_json(record("reason=tier_failed tier=%s is off: %s", "my disk", "why=x y"))
    assert (line["reason"], line["tier"]) == ("tier_failed", "my disk")
    assert line["message"] == "reason=tier_failed tier=my disk is off: why=x y"
    assert "why" not in line
    assert pairs(record("tier=%s without its value")) == {"tier": "%s"}


def test_the_errno_is_that_of_the_error_behind() -> None:
    failed = RuntimeError("no room")
    failed.__cause__ = OSError(28, "No space left on device")
    assert in_json(record("reason=tier_failed tier=%s: %s", "disk", failed))["errno"] == "ENOSPC"
    assert "errno" not in in_json(record("reason=tier_failed tier=%s: %s", "disk", "no error"))


def test_no_pair_takes_the_place_of_what_every_line_has() -> None:
    line = in_json(record("level=low time=%s beside", "noon"))
    assert (line["level"], line["logger"]) == ("error", "kvd.test")


@pytest.mark.parametrize("message", ["plain", "100%", "a=b", "reason=x", "(a=%s b)"])
def test_a_message_without_pairs_is_as_it_is(message: str) -> None:
    assert in_json(record(message))["message"] == message
    assert pairs(record(message)) == {}


def test_a_line_within_a_span_names_its_trace() -> None:
    with trace.use_span(TRACE):
        assert in_json(record("told"))["trace_id"] == f"{0xABC:032x}"
        assert TextFormatter().format(record("told")).endswith(f" told trace_id={0xABC:032x}")
    assert "trace_id" not in in_json(record("told"))


# --- storms ---


def test_of_equal_failures_one_is_told_with_the_number_of_the_others() -> None:
    storm = StormFilter()
    equal = [record("reason=x tier=%s: %d", "disk", number) for number in range(100)]
    late = record("reason=x tier=%s: %d", "disk", 100, at=1000.0 + STORM_SECONDS)
    assert let_through(storm, *equal, late) == [True, *[False] * 99, True]
    assert TextFormatter().format(late).endswith(" suppressed=99")
    assert json.loads(JsonFormatter().format(late))["suppressed"] == 99


@pytest.mark.parametrize(
    ("message", "args"),
    [
        ("reason=y tier=%s: %d", ("disk", 1)),
        ("reason=x tier=%s: %d", ("other", 1)),
        ("no reason %d", (1,)),
    ],
)
def test_what_differs_in_its_pairs_is_told(message: str, args: tuple[object, ...]) -> None:
    storm = StormFilter()
    first = record("reason=x tier=%s: %d", "disk", 1)
    assert let_through(storm, first, record(message, *args)) == [True, True]


def test_what_is_no_failure_is_always_told() -> None:
    storm = StormFilter()
    told = record("session %s ended", 1, levelno=logging.INFO)
    assert let_through(storm, told, told, told) == [True] * 3


@pytest.mark.parametrize("message", ["reason=x tier=disk: gone", "it is gone"])
def test_a_storm_that_ends_is_told_of_with_what_comes_next(
    caplog: pytest.LogCaptureFixture, message: str
) -> None:
    storm = StormFilter()
    info = record("session ended", at=1000.0 + STORM_SECONDS, levelno=logging.INFO)
    let_through(storm, *[record(message) for _ in range(100)])
    assert let_through(storm, info, info) == [True, True]
    (told,) = caplog.records
    assert (told.name, told.levelno) == ("kvd.test", logging.ERROR)
    assert (pairs(told), vars(told)["suppressed"]) == (pairs(record(message)), 99)
    assert let_through(storm, told) == [True]


def test_what_is_over_is_forgotten() -> None:
    storm = StormFilter()
    for number in range(1000):
        at = 1000.0 + number * STORM_SECONDS
        assert let_through(storm, record("reason=x path=%s: gone", number, at=at)) == [True]
    assert len(storm._told) == 1


# --- reasons ---


def failures() -> Iterator[tuple[str, str]]:
    """Where a warning or an error is logged, and the message, as it stands in the source."""
    for path in sorted((*ROOT.glob("kvd/**/*.py"), *ROOT.glob("plugins/**/*.py"))):
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(func=ast.Attribute(ast.Name("logger"), name), args=args) if (
                    name in FAILING or name == "log"
                ):
                    message = args[1] if name == "log" else args[0]
                    assert isinstance(message, ast.Constant)
                    yield f"{path.relative_to(ROOT)}:{call.lineno}", message.value


def known_reasons() -> set[str]:
    section = (
        (ROOT / "config/OPERATING.md").read_text().split("## Traces and logs")[1].split("\n## ")[0]
    )
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_every_failure_has_a_reason_that_operators_are_told_of() -> None:
    reasons = {
        place: found[1] if (found := re.match(r"reason=(\w+) ", message)) else message
        for place, message in failures()
    }
    known = known_reasons()
    assert {place: reason for place, reason in reasons.items() if reason not in known} == {}
    assert known == set(reasons.values())
