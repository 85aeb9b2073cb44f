"""Mob: hostile clients of one daemon, and beside them one that behaves."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import closing, suppress
from random import Random
from typing import TYPE_CHECKING

from kvd.arena.membership import SessionLock
from kvd.protocol.codec import encode
from kvd.protocol.errors import Dropped, LeaseEnded, OutOfPages
from kvd.protocol.messages import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AttachReply,
    AttachRequest,
    DrainRequest,
    ErrorReply,
    OpenRequest,
)
from kvd_client.client import Client
from tests.actors.wire import Wire, soon
from tests.e2e.support import (
    EXTENT_PAGES,
    IDENTITY,
    LAYOUT,
    PATIENCE_SECONDS,
    SESSIONS,
    UNUSED,
    anonymous_bytes,
    compute,
    eventually,
    holds,
    settings,
    tokens_of,
)
from tests.fuzz.hostile import Hostile

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon

NUM_FOES = 4
SETTINGS = settings(
    8 * EXTENT_PAGES,
    sessions=SESSIONS | {"silent_seconds": 0.5},
    limits={
        "sessions": 32,
        "session_leases": 64,
        "batch_items": 512,
        "request_bytes": "1MiB",
        "wait_seconds": 0.1,
    },
)
MAX_GROWTH_BYTES = 64 << 20


class Citizen:
    """A client that behaves, in a thread of its own, and looks at every result."""

    def __init__(self, endpoint: str) -> None:
        self.num_hits = self.num_full = self.num_dropped = 0
        self.faults: list[str] = []
        self._client = Client(endpoint, timeout=PATIENCE_SECONDS, name="citizen")
        self._namespace = self._client.open(IDENTITY, LAYOUT, salt="citizen")
        assert self._client.wait_attached(PATIENCE_SECONDS)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._client.close()

    def _live(self) -> None:
        turn = 0
        while not self._is_over.is_set() and not self.faults:
            turn += 1
            try:
                self._match(tokens_of(turn % 7, 4))
            except OutOfPages:
                self.num_full += 1
            except Dropped:  # anybody may drop what is cached
                self.num_dropped += 1
            except Exception as error:
                self.faults.append(repr(error))

    def _match(self, tokens: list[int]) -> None:
        with self._namespace.match(tokens) as lease:
            assert holds(lease, tokens, lease.num_tokens), "matched KV of other tokens"
            self.num_hits += lease.num_tokens > 0
            compute(lease, tokens)
            assert holds(lease, tokens), "committed KV is not what was written"
            lease.check()


class Foe:
    """One bare connection, and what its client knows: it attaches again whenever it can."""

    def __init__(self, endpoint: str, rng: Random) -> None:
        self.hostile = Hostile(rng)
        self.wire = Wire(endpoint)
        # How often each error and each result was answered.
        self.outcomes: Counter[str] = Counter()
        facts = self.hostile.facts
        facts.learn(version=PROTOCOL_VERSION, min_version=MIN_PROTOCOL_VERSION)
        facts.learn(identity=IDENTITY, layout=LAYOUT, salt="")
        for number in (0, 1, 4, 16):  # what a request of some use would say
            facts.learn(reserve=number, ahead=number, start=0, stop=number, first_block=0)
        self._attaching = False
        self._attach()

    def hear(self, milliseconds: int) -> None:
        """Learn from what was answered, or is so within so long."""
        for reply in self.wire.pending(milliseconds):
            self.hostile.facts.read(reply)
            for result in getattr(reply, "results", (reply,)):
                self.outcomes[getattr(result, "code", type(result).__name__)] += 1
            if isinstance(reply, AttachReply):
                self._enter(reply)
            elif isinstance(reply, ErrorReply) and reply.code == "not_attached":
                self._attach()
            elif isinstance(reply, ErrorReply) and reply.code == "unavailable":  # it drains
                self._attaching = False

    def _attach(self) -> None:
        if self._attaching:
            return
        self._attaching = True
        self.wire.send(encode(AttachRequest(id=1, version=PROTOCOL_VERSION, min_version=1)))

    def _enter(self, reply: AttachReply) -> None:
        self._attaching = False
        self.hostile.facts.learn(previous=reply.session)
        if self.wire.lock is not None:
            self.wire.lock.close()
        with suppress(LeaseEnded):
            self.wire.lock = SessionLock(reply.lock_path)
        request = OpenRequest(id=2, epoch=reply.epoch, identity=IDENTITY, layout=LAYOUT)
        self.wire.send(encode(request))


class Mob:
    """Some foes, who say everything that should not be said."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self._endpoint = endpoint
        self._rng = Random(seed)
        self._foes = [Foe(endpoint, self._rng) for _ in range(NUM_FOES)]
        self._num_acts = 0
        # The last that was said, for whoever must find out what did it.
        self.said: deque[list[bytes]] = deque(maxlen=50)
        self.outcomes: Counter[str] = Counter()

    def close(self) -> None:
        while self._foes:
            self._drop(self._foes.pop())

    def act(self) -> None:
        """Say one thing on one connection, perhaps often, and hear what was answered."""
        self._num_acts += 1
        if self._rng.random() < 0.005:
            self._drop(self._foes.pop(0))
            self._foes.append(Foe(self._endpoint, self._rng))
        foe = self._rng.choice(self._foes)
        foe.hostile.facts.learn(
            deadline_ns=self._rng.choice([0, soon(0.1), soon(3600)]), lease=self._num_acts // 8
        )
        # Now and then with what another one knows: its leases, pages and namespaces.
        author = foe if self._rng.random() < 0.9 else self._rng.choice(self._foes)
        frames = author.hostile.request()
        for _ in range(20 if self._rng.random() < 0.05 else 1):
            self.said.append(frames)
            foe.wire.send(*frames)
        foe.hear(self._rng.choice([0, 3, 3]))

    def _drop(self, foe: Foe) -> None:
        foe.wire.close()
        self.outcomes += foe.outcomes


def riot(daemon: RunningDaemon, seed: int, turns: Iterable[int]) -> Counter[str]:
    """A hostile act in each turn while a citizen works, and no harm is done.

    What was answered, and how often. Of a fault the error tells what was said before.
    """
    observer, mob = Wire(daemon.endpoint), Mob(daemon.endpoint, seed)
    # A mob begins to drain again and again, which nobody could enter any more.
    undo_drain = DrainRequest(id=1, undo=True)
    observer.ask(undo_drain)
    before = anonymous_bytes(daemon.pid)
    try:
        with closing(Citizen(daemon.endpoint)) as citizen:
            for turn in turns:
                mob.act()
                if turn % 100 == 0:
                    observer.status()
                    observer.ask(undo_drain)
        assert citizen.faults == []
        assert citizen.num_hits > 0
        mob.close()
        assert "reason=internal" not in daemon.log, daemon.log
        eventually(lambda: not observer.status().sessions)
        eventually(lambda: observer.pages().keys() <= UNUSED | {"committed"})
        assert anonymous_bytes(daemon.pid) < before + MAX_GROWTH_BYTES
    except Exception as error:
        frames = [[frame.hex() for frame in said] for said in mob.said]
        error.add_note(f"seed {seed}; the last that was said: {frames}")
        raise
    finally:
        mob.close()
        observer.close()
    return mob.outcomes
