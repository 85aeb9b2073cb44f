"""One family of errors, each class with its own code."""

from __future__ import annotations

import pytest

from kvd.protocol import errors
from kvd.protocol.errors import ERRORS, KvdError, LeaseEnded, PagesInUse, error_from_wire


def family() -> list[type[KvdError]]:
    values = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in values if issubclass(value, KvdError)]


def test_each_class_has_its_own_code() -> None:
    codes = [kind.code for kind in family()]
    assert len(set(codes)) == len(codes)
    assert {kind.code: kind for kind in family()} == ERRORS


@pytest.mark.parametrize("kind", family())
def test_a_class_says_when_it_is_raised(kind: type[KvdError]) -> None:
    assert (kind.__doc__ or "").startswith(("Raised when", "Raised at", "Raised by", "Base"))


def test_an_error_carries_message_and_details() -> None:
    error = LeaseEnded("lease 3 has ended", lease=3)
    assert (str(error), error.message, error.details) == (
        "lease 3 has ended",
        "lease 3 has ended",
        {"lease": 3},
    )


def test_a_code_of_a_newer_daemon_is_a_plain_error() -> None:
    error = error_from_wire("from_the_future", "what", {"n": 1})
    assert type(error) is KvdError
    assert (error.message, error.details) == ("what", {"n": 1})


@pytest.mark.parametrize("name", ["message", "self", "details", "code", "not an identifier"])
def test_details_may_have_any_name(name: str) -> None:
    error = error_from_wire("lease_ended", "why", {name: "x"})
    assert (error.message, error.details) == ("why", {name: "x"})


def test_pages_in_use_is_caught_as_the_buffer_error_that_it_is() -> None:
    with pytest.raises(BufferError):
        raise PagesInUse("a writable view is exported", lease=1)
