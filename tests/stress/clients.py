"""Part `clients`: clients at once on a pool that is too small, killed and stopped as the seed says.

Whatever they read must be what was computed for exactly their tokens, and nobody may wait for ever.
When all are gone, the books must be exact and every block that still matches must be right.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from queue import Empty, Queue
from random import Random
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgspec

from kvd.testing.daemons import running_daemon
from kvd_client import Client
from tests.e2e.support import capacity_of, eventually
from tests.stress.content import (
    DOMAINS,
    NARROW,
    blocks_of,
    extras_of,
    ids_of,
    prompts_of,
    verify,
)

if TYPE_CHECKING:
    from kvd.protocol.messages import StatusReply
    from kvd.testing.daemons import RunningDaemon
    from tests.stress.common import Stress
    from tests.stress.content import Domain, Tokens

ROOT = Path(__file__).parents[2]

# Pages of both layouts have the same size.
PAGE_BYTES = NARROW.page_bytes
# Of what the daemon counts, this is told.
COUNTERS = (
    "blocks_committed",
    "blocks_dropped",
    "blocks_duplicate",
    "blocks_evicted",
    "pages_quarantined",
    "pages_unbacked",
)
# The states of pages that somebody has, or could write still.
USED = ("reserved", "detached", "quarantined")
# A worker that hangs ends itself before.
PATIENCE_SECONDS = 120
# Each kind of signal comes once in so many operations of a client, on the average.
OPERATIONS_PER_SIGNAL = 150
# A stopped client goes on when the others have done so many operations, at most.
MAX_OPERATIONS_STOPPED = 600


def clients(stress: Stress) -> None:
    """Ten clients, a thousand operations each."""
    num_clients, num_operations = stress.pick(10, 4), stress.pick(1000, 100)
    num_pages = stress.pick(2048, 256)
    prompts = prompts_of(stress.seed)
    working_set = sum(len(all_blocks(domain, prompts)) for domain in DOMAINS)
    stress.expect(working_set > 2 * num_pages, f"a working set of only {working_set} pages")
    with running_daemon(settings(num_pages)) as daemon:
        try:
            num_pages = count_pages(daemon.endpoint)
            Crowd(stress, daemon.endpoint, num_clients, num_operations).run()
            audit(stress, daemon, prompts, num_pages)
        finally:
            stress.expect("reason=" not in daemon.log, f"the daemon failed: {daemon.log}")
    expect_enough(stress, num_clients, num_operations)


def settings(num_pages: int) -> dict[str, Any]:
    """Fast, since clients end and pages run short all the time."""
    return {
        "tiers": [{"type": "host", "capacity_bytes": capacity_of(num_pages, NARROW)}],
        "quotas": [
            {"model": "large", "guaranteed_bytes": num_pages // 8 * PAGE_BYTES},
            {"salt": "tenant", "max_bytes": num_pages // 8 * PAGE_BYTES},
        ],
        "sessions": {"heartbeat_seconds": 0.1, "sweep_seconds": 0.05, "silent_seconds": 2.0},
        "cache": {"high_watermark": 0.95, "low_watermark": 0.9, "back_ahead_bytes": 1},
    }


class Member:
    """One place in the crowd: a client and, where that was killed, the next one."""

    def __init__(self, number: int, signals: dict[int, Signals]) -> None:
        self.number = number
        self.signals = signals
        self.num_done = 0
        self.process: subprocess.Popen[str] | None = None
        # When it goes on, counted in operations of all; None while it runs.
        self.stopped_until: int | None = None

    def send(self, signal: Signals) -> None:
        """Send it, unless the process has ended meanwhile."""
        assert self.process is not None
        self.process.send_signal(signal)

    def wait(self) -> int:
        """How the process ended, once it has."""
        assert self.process is not None
        status = self.process.wait()
        self.process = self.stopped_until = None
        return status


class Crowd:
    """The clients, and the signals that the seed has in store for each of them.

    One thread decides, whatever comes; beside it, one for each process hands on what that says.
    """

    def __init__(
        self, stress: Stress, endpoint: str, num_clients: int, num_operations: int
    ) -> None:
        self.stress = stress
        self.endpoint = endpoint
        self.num_operations = num_operations
        self.rng = Random(f"{stress.seed}/signals")
        self.members = [Member(number, self._draw_signals()) for number in range(num_clients)]
        # What a member's process said; an empty line is its end.
        self.heard: Queue[tuple[Member, str]] = Queue()

    @property
    def num_done(self) -> int:
        """Operations, of all members."""
        return self.stress.counts["operations"]

    def run(self) -> None:
        """Go on until every member has done all its operations; raises where one cannot."""
        try:
            for member in self.members:
                self._start(member)
            while self._running():
                self._hear()
        finally:
            for member in self._running():
                member.send(SIGKILL)
                member.wait()

    def _hear(self) -> None:
        try:
            member, line = self.heard.get(timeout=PATIENCE_SECONDS)
        except Empty:
            raise TimeoutError(f"nobody did anything for {PATIENCE_SECONDS} s") from None
        if line:
            self._note(member, line)
        else:
            self._see_end(member)
        self._wake()

    # --- what the processes say ---

    def _note(self, member: Member, line: str) -> None:
        """An operation is done: count what happened in it, and send what is due."""
        self.stress.counts.update(msgspec.json.decode(line))
        self.stress.counts["operations"] += 1
        member.num_done += 1
        if self.num_done % (self.num_operations * len(self.members) // 10) == 0:
            self.stress.say(f"{self.num_done} operations, {self.stress.counts['kills']} kills")
        match member.signals.pop(member.num_done, None):
            case Signals.SIGKILL:
                member.send(SIGKILL)
            case Signals.SIGSTOP:
                self._stop(member)

    def _see_end(self, member: Member) -> None:
        """The process is gone: done with its work, replaced, or at fault."""
        status = member.wait()
        if status == -SIGKILL:
            self.stress.counts["kills"] += 1
        elif status:
            raise AssertionError(
                f"client {member.number} ended with status {status} in operation {member.num_done}"
            )
        if member.num_done < self.num_operations:
            self._start(member)

    # --- what is done to them ---

    def _start(self, member: Member) -> None:
        numbers = (self.stress.seed, member.number, member.num_done, self.num_operations)
        member.process = subprocess.Popen(
            [sys.executable, "-m", "tests.stress.worker", self.endpoint, *map(str, numbers)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        Thread(target=self._listen, args=(member, member.process), daemon=True).start()

    def _listen(self, member: Member, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.heard.put((member, line))
        self.heard.put((member, ""))

    def _stop(self, member: Member) -> None:
        assert member.process is not None
        member.process.send_signal(SIGSTOP)
        seen = os.waitid(os.P_PID, member.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if seen is not None and seen.si_code == os.CLD_STOPPED:
            self.stress.counts["stops"] += 1
            member.stopped_until = self.num_done + self.rng.randint(1, MAX_OPERATIONS_STOPPED)

    def _wake(self) -> None:
        """Let go on whose time has come, or everybody where nobody runs. Some never wake."""
        stopped = [member for member in self.members if member.stopped_until is not None]
        all_stand = len(stopped) == len(self._running())
        for member in stopped:
            assert member.stopped_until is not None
            if all_stand or member.stopped_until <= self.num_done:
                member.stopped_until = None
                member.send(SIGKILL if self.rng.random() < 0.2 else SIGCONT)

    def _running(self) -> list[Member]:
        return [member for member in self.members if member.process is not None]

    def _draw_signals(self) -> dict[int, Signals]:
        """When which signal comes, counted in operations of its receiver."""
        signals = [SIGKILL, SIGSTOP] * max(1, self.num_operations // OPERATIONS_PER_SIGNAL)
        places = self.rng.sample(range(1, self.num_operations * 9 // 10), len(signals))
        return dict(zip(places, signals, strict=True))


# --- before and after ---


def count_pages(endpoint: str) -> int:
    """All pages of both layouts, with memory or without."""
    with Client(endpoint, timeout=30.0) as client:
        assert client.wait_attached(30.0)
        for domain in DOMAINS:
            domain.open(client).match([]).release()
        tier, *_ = client.status().tiers
        return sum(tier.pages.values())


def audit(stress: Stress, daemon: RunningDaemon, prompts: list[Tokens], num_pages: int) -> None:
    """Nobody is there any more: the books are exact, and what still matches is right."""
    with Client(daemon.endpoint, timeout=30.0, name="auditor") as client:
        try:
            eventually(lambda: is_quiet(client, daemon.directory))
        finally:
            stress.say(f"in the end: {client.status()}")
        spaces = client.status().namespaces
        in_use = [space for space in spaces if space.num_sessions]
        stress.expect(not in_use, f"nobody is there, and namespaces are open: {in_use}")
        num_found = read_back(client, prompts)
        status = client.status()
        num_blocks = expect_exact_books(stress, status, num_pages)
        stress.expect(num_found == num_blocks, f"{num_found} blocks found of {num_blocks}")
        stress.counts["read_back"] = num_found
        for name in COUNTERS:
            stress.counts[name] = status.counters.get(name, 0)


def expect_exact_books(stress: Stress, status: StatusReply, num_pages: int) -> int:
    """Nobody is there: of all pages those of blocks are taken, no other; how many that is."""
    tier, *_ = status.tiers
    num_blocks = sum(space.num_blocks for space in status.namespaces)
    num_held = sum(space.num_pages for space in status.namespaces)
    used = sum(tier.pages[state] for state in USED)
    stress.expect(used == 0, f"nobody is there, and pages are in use: {tier.pages}")
    stress.expect(sum(tier.pages.values()) == num_pages, f"pages are lost: {tier.pages}")
    stress.expect(tier.pages["committed"] == num_blocks, f"{num_blocks} blocks: {tier.pages}")
    stress.expect(num_held == num_blocks, f"{num_blocks} blocks: {status.namespaces}")
    return num_blocks


def is_quiet(client: Client, directory: Path) -> bool:
    """Whether the auditor is alone, and nothing is left of those who were there."""
    status, leases = client.status(), client.leases()
    tier, *_ = status.tiers
    alone = [session.client for session in status.sessions] == ["auditor"]
    num_files = len(list(directory.glob("*.session")))
    num_used = sum(tier.pages[state] for state in USED)
    return alone and num_files == 1 and num_used == leases.num_leases == leases.num_pins == 0


def read_back(client: Client, prompts: list[Tokens]) -> int:
    """Compare every byte of all that matches; how many blocks that is."""
    num_blocks = 0
    for domain in DOMAINS:
        namespace = domain.open(client)
        found: set[Tokens] = set()
        for tokens in domain.sequences(prompts):
            with namespace.match(ids_of(tokens), extras=extras_of(tokens)) as lease:
                verify(lease, domain, tokens)
                found |= blocks_of(domain, tokens[: lease.num_tokens])
        num_blocks += len(found)
    return num_blocks


def all_blocks(domain: Domain, prompts: list[Tokens]) -> set[Tokens]:
    return set().union(*(blocks_of(domain, tokens) for tokens in domain.sequences(prompts)))


def expect_enough(stress: Stress, num_clients: int, num_operations: int) -> None:
    counts, total = stress.counts, num_clients * num_operations
    counts["refusals"] = counts["OutOfPages"] + counts["shortages"]
    num_signals = num_clients * max(1, num_operations // OPERATIONS_PER_SIGNAL)
    stress.expect_at_least(
        {
            "kills": num_signals // 2,
            "stops": num_signals // 2,
            "hits": total // 10,
            "refusals": total // 400,
            "blocks_evicted": total // 10,
            "pages_quarantined": total // 100,
            "read_back": total // 200,
            "tails": total // 100,
            "forks": total // 50,
            "keeps": total // 100,
            "pins": total // 500,
            "drops": total // 500,
            "blocks_dropped": total // 1000,
            "copies": total // 50,
            "cancelled": total // 50,
            "pages_unbacked": total // 50,
        }
    )
