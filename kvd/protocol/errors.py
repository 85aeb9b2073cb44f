"""KvdError and its family; each class has one code on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class KvdError(Exception):
    """Base of every error that kvd raises or sends.

    `details` holds plain values (numbers, strings) that say more than the message; they cross the
    wire with it.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class BadRequest(KvdError):
    """Raised when a request cannot be decoded or its fields contradict each other."""

    code = "bad_request"


class VersionMismatch(KvdError):
    """Raised at attach when client and daemon share no protocol version; it names both."""

    code = "version_mismatch"


class NotAttached(KvdError):
    """Raised when a request comes over a connection that has no session."""

    code = "not_attached"


class Forbidden(KvdError):
    """Raised when a client asks what it may not, there or with its key."""

    code = "forbidden"


class StaleEpoch(KvdError):
    """Raised when a request carries the epoch of an earlier daemon start."""

    code = "stale_epoch"


class SessionLockMissing(KvdError):
    """Raised when a session wants to map an arena while no process holds its session lock."""

    code = "session_lock_missing"


class UnknownNamespace(KvdError):
    """Raised when a request names a namespace that its session has not opened."""

    code = "unknown_namespace"


class LeaseEnded(KvdError):
    """Raised when a lease was released, revoked, or ended with its session or the daemon."""

    code = "lease_ended"


class Dropped(KvdError):
    """Raised at a commit when the blocks it follows, or its namespace's, were dropped meanwhile.

    The pages stay the lease's own: what was computed is good, but nobody else will match it.
    """

    code = "dropped"


class OutOfPages(KvdError):
    """Raised when pages could not be had within the deadline.

    `details` are the fields of `Shortage`: how the pages stand, and who holds most of them.
    """

    code = "out_of_pages"


class UnknownSequence(KvdError):
    """Raised when a sequence was never saved, or was discarded."""

    code = "unknown_sequence"


class SequenceTaken(KvdError):
    """Raised when a sequence is of another generation: another client saved or resumed it."""

    code = "sequence_taken"


class LimitExceeded(KvdError):
    """Raised when a bound of the daemon would be passed; the message names bound and value."""

    code = "limit_exceeded"


class DeadlineExceeded(KvdError):
    """Raised when the answer did not come, or could not be given, before the deadline."""

    code = "deadline_exceeded"


class Unsupported(KvdError):
    """Raised when a request uses what the protocol has room for but this daemon does not do."""

    code = "unsupported"


class DaemonUnavailable(KvdError):
    """Raised when no daemon answers, or it takes no new clients, and the call needs one."""

    code = "unavailable"


class PagesInUse(KvdError, BufferError):
    """Raised by the client at commit, abort or release while a writable view is still exported."""

    code = "pages_in_use"


class ConfigError(KvdError):
    """Raised when a configuration cannot be used; the message names the key and what to do."""

    code = "config"


class AlreadyRunning(KvdError):
    """Raised when another daemon owns the endpoint or the directory."""

    code = "already_running"


class TierFailed(KvdError):
    """Raised when a tier could not do what was asked of it."""

    code = "tier_failed"


class TierFull(TierFailed):
    """Raised when a tier has no room for what it should keep, and kept none of it."""

    code = "tier_full"


def _family(root: type[KvdError]) -> dict[str, type[KvdError]]:
    classes = {root.code: root}
    for child in root.__subclasses__():
        classes |= _family(child)
    return classes


ERRORS: dict[str, type[KvdError]] = _family(KvdError)


def error_from_wire(code: str, message: str, details: dict[str, Any]) -> KvdError:
    """The error that a reply carries; an unknown code (a newer daemon's) becomes KvdError."""
    return ERRORS.get(code, KvdError)(message, **details)


@contextmanager
def needing_extra(extra: str, key: str) -> Iterator[None]:
    """What is imported inside comes with an extra. Raises ConfigError where that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key}: {error}: install kvd[{extra}]") from error
