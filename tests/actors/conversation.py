"""Conversations: what a client and a daemon of one version said, recorded and said again.

`messages` are the frames in their order, in hex, each with who sent it. `varies` names the fields
whose values are not the same with every daemon, and what they tell: what a client sends refers so
to what today's daemon answered. To an empty kind nobody refers. The name of a field may have the
type of its message in front.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import zmq
from msgspec.msgpack import decode as unpack
from msgspec.msgpack import encode as pack

from kvd.arena.membership import SessionLock
from kvd.protocol.codec import pack_tokens
from kvd.protocol.messages import (
    PROTOCOL_VERSION,
    AnyRequest,
    AttachRequest,
    CloseRequest,
    CommitItem,
    CommitRequest,
    HeartbeatRequest,
    MatchItem,
    MatchRequest,
    ReserveItem,
    ReserveRequest,
    Run,
)
from kvd_client.client import Client
from kvd_client.session import Call
from tests.actors.wire import soon
from tests.e2e.support import BLOCK, IDENTITY, LAYOUT, PATIENCE_SECONDS, tokens_of, write

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.testing.daemons import RunningDaemon
    from kvd_client.client import Namespace
    from tests.actors.wire import Wire

VARIES = {
    "epoch": "epoch",
    "attach.session": "session",
    "status.session": "",  # which is not what its client calls it by
    "namespace": "namespace",
    "runs": "pages",
    "reserved": "pages",
    "pages": "pages",
    "deadline_ns": "deadline",
    "message": "",
    "status.version": "",
    "pid": "",
    "endpoint": "",
    "header_path": "",
    "lock_path": "",
    "arena_path": "",
    "heartbeat_seconds": "",
    "max_request_bytes": "",
    "uptime_seconds": "",
    "stale_seconds": "",
    "num_requests": "",
    "request_p50_us": "",
    "request_p99_us": "",
    "capacity_bytes": "",
    "backed_bytes": "",
    "used_bytes": "",
    "usable_bytes": "",
    "num_pages": "",
    "num_nodes": "",
    "slot": "",
    "generation": "",
    "counters": "",
}
TOKENS = tokens_of(1, 16)


# --- recording ---


class Tap:
    """Stands between one client and a daemon, and notes what passes."""

    def __init__(self, daemon: RunningDaemon, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/tap.sock"
        self.messages: list[dict[str, list[str]]] = []
        self._context = zmq.Context()
        self._client = self._context.socket(zmq.DEALER)
        self._client.bind(self.endpoint)
        self._daemon = self._context.socket(zmq.DEALER)
        self._daemon.connect(daemon.endpoint)
        threading.Thread(target=self._run).start()

    def close(self) -> None:
        self._context.term()

    def _run(self) -> None:
        with self._client, self._daemon, suppress(zmq.ContextTerminated):
            while True:
                readable, _, _ = zmq.select([self._client, self._daemon], [], [])
                if self._client in readable:
                    self._pass_on("client", self._client, self._daemon)
                if self._daemon in readable:
                    self._pass_on("daemon", self._daemon, self._client)

    def _pass_on(self, name: str, source: zmq.Socket[bytes], target: zmq.Socket[bytes]) -> None:
        frames = source.recv_multipart()
        self.messages.append({name: [frame.hex() for frame in frames]})
        target.send_multipart(frames)


def record(daemon: RunningDaemon, directory: Path) -> dict[str, Any]:
    """A conversation of today's client, which does everything once, with today's daemon."""
    with (
        closing(Tap(daemon, directory)) as tap,
        Client(tap.endpoint, timeout=PATIENCE_SECONDS, name="recorded") as client,
    ):
        assert client.wait_attached(PATIENCE_SECONDS)
        work(client, client.open(IDENTITY, LAYOUT))
        be_refused(client)
        say(client, CloseRequest, namespace=1)
    return {"version": PROTOCOL_VERSION, "varies": VARIES, "messages": tap.messages}


def work(client: Client, namespace: Namespace) -> None:
    namespace.match(TOKENS).release()
    with namespace.match(TOKENS, reserve_tokens=len(TOKENS)) as first:
        write(first, TOKENS, 0, len(TOKENS))
        first.commit(TOKENS)
        with namespace.match(TOKENS) as second:
            assert second.num_tokens == len(TOKENS)
            second.reserve(2 * len(TOKENS))
            say(client, HeartbeatRequest, leases=tuple(client.connection.core.living))
            client.status()
            namespace.prefetch(TOKENS)
            assert second.extend() == len(TOKENS)
            second.abort()


def be_refused(client: Client) -> None:
    tokens = pack_tokens(TOKENS)
    say(client, HeartbeatRequest, epoch=1, leases=())
    say(client, ReserveRequest, items=(ReserveItem(999, 0, 1),))
    say(client, CommitRequest, tokens, items=(CommitItem(999, 0, (Run(0, 16),), len(TOKENS)),))
    say(client, MatchRequest, tokens[:-BLOCK], items=(MatchItem(1, 999, len(TOKENS)),))
    say(client, MatchRequest, tokens[:-1], items=(MatchItem(1, 999, len(TOKENS)),))
    say(client, MatchRequest, tokens, items=(MatchItem(77, 999, len(TOKENS)),))
    say(client, AttachRequest, version=99, min_version=98)


def say(client: Client, kind: type[AnyRequest], tokens: bytes | None = None, **fields: Any) -> None:
    """Send what the library would not, over its connection, and wait for the answer."""
    assert client.connection.core.session is not None
    envelope = {"id": client.next_id(), "epoch": client.connection.core.session.epoch}
    call = Call(kind(**envelope | fields), tokens)
    client.connection.send(call)
    assert client.connection.wait(call, time.monotonic() + PATIENCE_SECONDS)


# --- saying it again ---


class Replay:
    """Says what a recorded client said, and compares what comes back."""

    def __init__(self, wire: Wire, conversation: dict[str, Any]) -> None:
        self._wire = wire
        self._varies: dict[str, str] = conversation["varies"]
        self._messages: list[dict[str, Any]] = conversation["messages"]
        # By what it tells and its recorded value: today's value.
        self._today: dict[tuple[str, bytes], Any] = {}

    def run(self) -> None:
        for message in self._messages:
            if "client" in message:
                self._say(*map(bytes.fromhex, message["client"]))
            else:
                self._hear(*map(bytes.fromhex, message["daemon"]))

    def _say(self, header: bytes, *tokens: bytes) -> None:
        self._wire.send(pack(self._filled(unpack(header))), *tokens)

    def _hear(self, header: bytes) -> None:
        new, old = unpack(self._wire.receive_frame()), unpack(header)
        self._compare(new, old, new["type"])
        if new["type"] == "attach":
            self._wire.lock = SessionLock(new["lock_path"])

    def _filled(self, value: Any) -> Any:
        """What a client sent, with the values that today's daemon gave."""
        if isinstance(value, dict):
            return {name: self._value_today(name, old) for name, old in value.items()}
        return [self._filled(one) for one in value] if isinstance(value, list) else value

    def _value_today(self, name: str, old: Any) -> Any:
        kind = self._varies.get(name)
        if kind == "deadline":
            return soon(PATIENCE_SECONDS)
        return self._today.get((kind, pack(old)), old) if kind else self._filled(old)

    def _compare(self, new: Any, old: Any, message: str) -> None:
        """Each field that was there is there, and says the same unless it varies."""
        assert type(new) is type(old)
        if isinstance(old, dict):
            assert new.keys() >= old.keys()
            for name, value in old.items():
                self._compare_field(name, new[name], value, message)
        elif isinstance(old, list):
            for one, other in zip(new, old, strict=True):
                self._compare(one, other, message)
        else:
            assert new == old

    def _compare_field(self, name: str, new: Any, old: Any, message: str) -> None:
        kind = self._varies.get(name, self._varies.get(f"{message}.{name}"))
        if kind is None:
            self._compare(new, old, message)
            return
        assert type(new) is type(old), name
        if isinstance(old, dict):
            assert new.keys() >= old.keys(), name
        if kind:
            assert self._today.setdefault((kind, pack(old)), new) == new, name
