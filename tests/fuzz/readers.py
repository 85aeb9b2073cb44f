"""What reads frames of others, at both ends: it takes any bytes and never fails otherwise."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvd.arena.header import create_header
from kvd.arena.membership import create_session_file
from kvd.protocol.codec import decode_reply, decode_request, request_id
from kvd.protocol.errors import BadRequest, LimitExceeded
from kvd.protocol.messages import StatusRequest
from kvd_client.session import Call, Core
from tests.fuzz.hostile import Hostile

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random


class Readers:
    """The decoders and a client's core, which attaches wherever `directory` says."""

    def __init__(self, directory: Path, rng: Random) -> None:
        self.hostile = Hostile(rng)
        header, lock = directory / "header", directory / "session"
        if not header.exists():
            create_header(header)
            create_session_file(lock)
        self.hostile.facts.learn(header_path=str(header), lock_path=str(lock), epoch=1)
        self._core = Core("reader", lambda link: None)

    def read(self, frame: bytes) -> None:
        """Raises only where a reader does what it must not."""
        assert isinstance(request_id(frame), int)
        for decode in (decode_request, decode_reply):
            with suppress(BadRequest, LimitExceeded):
                decode(frame)
        self._core.send(Call(StatusRequest(id=1)))
        self._core.receive(frame)
