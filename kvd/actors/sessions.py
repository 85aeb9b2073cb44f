"""Sessions: who is attached, and who is gone."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.arena.membership import create_session_file, lock_unheld, remove_locked
from kvd.protocol.errors import LimitExceeded, NotAttached, TierFailed

if TYPE_CHECKING:
    from kvd.actors.access import Access
    from kvd.config import ClientConfig, Config, LimitConfig, SessionConfig


# A session's latency is that of so many of its last requests.
NUM_TIMED = 256


@dataclass(eq=False, slots=True)
class Session:
    """One attached client. `identity` is its connection; `secret` is known to it alone.

    `client` is what it calls itself, or the name of its key. `silent_seconds` are as they were when
    it attached and heard how often to speak.
    """

    id: int
    identity: bytes
    client: str
    pid: int
    secret: str
    access: Access
    silent_seconds: float
    maps: bool = False
    last_seen: float = field(default_factory=time.monotonic)
    num_requests: int = 0
    num_waiting: int = 0
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMED))

    @property
    def name(self) -> str:
        return session_name(self.id)

    def took(self, seconds: float) -> None:
        """Note how long a request of this session has held the daemon."""
        self.num_requests += 1
        self._seconds.append(seconds)

    def percentiles_us(self) -> tuple[int, int]:
        """The median and the 99th percentile of its last requests, in microseconds."""
        ordered = sorted(self._seconds)
        if not ordered:
            return 0, 0
        middle, late = (ordered[int(len(ordered) * part)] for part in (0.5, 0.99))
        return int(middle * 1e6), int(late * 1e6)


class SessionTable:
    """The attached sessions by connection, and the files by which their processes are known.

    A session that maps is over only with its processes; one that does not, when it falls silent.
    The file of a session that has ended stays until no process holds it.
    """

    def __init__(self, directory: Path, config: SessionConfig, limits: LimitConfig) -> None:
        self.directory = directory
        self._config = config
        self._limits = limits
        self._by_identity: dict[bytes, Session] = {}
        self._ended: dict[int, Path] = {}
        # While it is so, who has no session gets none.
        self.is_draining = False
        # Of an earlier epoch, whose processes may live.
        self.earlier: set[int] = set()

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_identity.values())

    def __len__(self) -> int:
        return len(self._by_identity)

    def configure(self, config: Config) -> None:
        """Go by another configuration."""
        self._config, self._limits = config.sessions, config.limits

    def begin(self) -> None:
        """Make the directory ready; the files of an earlier epoch are watched like ended ones."""
        self.directory.mkdir(mode=0o750, exist_ok=True)
        for path in self.directory.glob("[0-9a-f]" * 16 + ".session"):
            self._ended[int(path.stem, 16)] = path
        self.earlier = set(self._ended)

    def path(self, session: int) -> Path:
        return self.directory / f"{session_name(session)}.session"

    def attach(self, identity: bytes, client: str, pid: int, access: Access) -> Session:
        """Open a session for a connection that has none."""
        if len(self._by_identity) >= self._limits.sessions:
            raise LimitExceeded(f"all {self._limits.sessions} sessions are in use")
        if (known := access.client) is not None:
            client = known.name
            if self.count_of(known) >= known.sessions:
                raise LimitExceeded(f"all {known.sessions} sessions of {client} are in use")
        number = secrets.randbits(63) | 1
        secret = f"{session_name(number)}-{secrets.token_hex(16)}"
        silent = self._config.silent_seconds
        session = Session(number, identity, client, pid, secret, access, silent)
        try:
            create_session_file(self.path(session.id))
        except OSError as error:
            raise TierFailed(f"no room for a session in {self.directory}: {error}") from error
        self._by_identity[identity] = session
        return session

    def get(self, identity: bytes) -> Session:
        """The session of a connection, which is alive since it speaks; raises NotAttached."""
        session = self._by_identity.get(identity)
        if session is None:
            raise NotAttached("this connection has no session: attach first")
        session.last_seen = time.monotonic()
        return session

    def count_of(self, client: ClientConfig) -> int:
        """How many sessions whoever has this key has."""
        return sum(session.access.client == client for session in self)

    def find(self, identity: bytes) -> Session | None:
        return self._by_identity.get(identity)

    def known_as(self, secret: str) -> Session | None:
        if not secret:
            return None
        return next((s for s in self if s.secret == secret), None)

    def end(self, session: Session) -> None:
        """Forget the connection; the file stays until no process holds it."""
        del self._by_identity[session.identity]
        self._ended[session.id] = self.path(session.id)

    def silent(self, now: float) -> list[Session]:
        """Sessions without a mapping that have not been heard of for too long."""
        silent = (s for s in self if now - s.last_seen > s.silent_seconds)
        return [s for s in silent if not s.maps]

    def watched(self) -> dict[int, Path]:
        """The files whose lock tells something: of sessions that map and of those that ended."""
        mapping = {s.id: self.path(s.id) for s in self if s.maps}
        return mapping | self._ended

    def gone(self, session_id: int) -> Session | None:
        """Note that no process of a session is left; the session, if it had not ended before."""
        self._ended.pop(session_id, None)
        self.earlier.discard(session_id)
        session = next((s for s in self if s.id == session_id), None)
        if session is not None:
            del self._by_identity[session.identity]
        return session


def session_name(session: int) -> str:
    """A session's public name: that of its file."""
    return f"{session:016x}"


def sweep(watched: dict[int, Path]) -> dict[int, int]:
    """The sessions of which no process is left, and the descriptors that lock them. Blocking."""
    found = {session: lock_unheld(path) for session, path in watched.items()}
    return {session: fd for session, fd in found.items() if fd is not None}


def remove_swept(watched: dict[int, Path], swept: dict[int, int]) -> None:
    """Remove the files of sessions that a sweep found, once nothing is theirs. Blocking."""
    for session, fd in swept.items():
        remove_locked(watched[session], fd)
