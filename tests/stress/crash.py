"""Parts `crash` and `crash_without_memory`: the daemon is killed again and again under its clients.

These go on by themselves. What they were told is committed must be found again, each byte of it,
and nothing else may ever be read; the books are exact after each start, and when all are gone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from random import Random
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeAlias

from kvd.testing.daemons import running_daemon
from kvd_client import Client
from tests.e2e.support import eventually
from tests.stress.clients import count_pages, expect_exact_books, is_quiet
from tests.stress.content import DOMAINS, extras_of, ids_of, verify
from tests.stress.crash_worker import OUTAGE, sequence_of

if TYPE_CHECKING:
    from kvd.protocol.messages import StatusReply
    from kvd.testing.daemons import RunningDaemon
    from tests.stress.common import Stress

ROOT = Path(__file__).parents[2]
WORKER = "tests.stress.crash_worker"
# Far more than is asked for: eviction is no excuse.
CAPACITY_BYTES = 2 << 30
HOST = {"type": "host", "capacity_bytes": CAPACITY_BYTES}
DISK = {"type": "lmdb", "capacity_bytes": CAPACITY_BYTES}
SESSIONS = {"heartbeat_seconds": 0.1, "sweep_seconds": 0.05}
# A worker that hangs ends itself before.
PATIENCE_SECONDS = 120
# After each start so many of the last sequences are read, and as many of all before.
MAX_READ = 200


def crash(stress: Stress) -> None:
    """Host memory outlives the daemon: nothing that was confirmed is lost."""
    with _crashing(stress, HOST, DISK) as crashes:
        for _ in range(stress.rounds):
            crashes.hear_commits()
            crashes.kill()
            crashes.start()


def crash_without_memory(stress: Stress) -> None:
    """Host memory goes with the daemon: what was confirmed before a checkpoint is not lost."""
    with _crashing(stress, HOST, DISK) as crashes:
        for _ in range(stress.rounds):
            crashes.hear_commits()
            crashes.checkpoint()
            crashes.hear_commits()
            crashes.kill()
            crashes.lose_memory()
            crashes.start()


@contextmanager
def _crashing(stress: Stress, *tiers: Mapping[str, Any]) -> Iterator[Crashes]:
    """A daemon with clients at work; in the end these are gone, and all is read once more."""
    with tempfile.TemporaryDirectory(prefix="kvd-stress-") as data_directory:
        document = {"data_directory": data_directory, "tiers": tiers, "sessions": SESSIONS}
        with running_daemon(document) as daemon:
            crashes = Crashes(stress, daemon)
            try:
                yield crashes
                crashes.end()
            finally:
                for worker in crashes.workers:
                    worker.end()
                stress.expect("reason=" not in daemon.log, f"the daemon failed: {daemon.log}")
    least = {"kills": 1, "outages": 1, "commits": 10, "sequences_read": 10}
    stress.expect_at_least({name: count * stress.rounds for name, count in least.items()})


class Worker:
    """A process that computes; what it says is put where all are heard, an empty line last."""

    def __init__(self, module: str, endpoint: str, *numbers: int, heard: Queue[Heard]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, endpoint, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._thread = Thread(target=self._listen, args=(heard,), daemon=True)
        self._thread.start()

    def _listen(self, heard: Queue[Heard]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                heard.put((self, line.rstrip()))
        heard.put((self, ""))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def tell_no_more(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> None:
        """End it, as it stands; all that it said was put."""
        self.process.terminate()
        self.process.wait()
        self.tell_no_more()
        self._thread.join()


Heard: TypeAlias = tuple[Worker, str]


class Crashes:
    """One daemon, the workers, and what is owed to these."""

    def __init__(self, stress: Stress, daemon: RunningDaemon) -> None:
        self.stress = stress
        self.daemon = daemon
        self.rng = Random(f"{stress.seed}/crashes")
        self.num_pages = count_pages(daemon.endpoint)
        # How many tokens of which sequence must be found; what was told last stands last.
        self.owed: dict[int, int] = {}
        # The same when the last checkpoint began.
        self.kept: dict[int, int] = {}
        self.heard: Queue[Heard] = Queue()
        count = stress.pick(4, 2)
        self.workers = [
            Worker(WORKER, daemon.endpoint, stress.seed, number, count, heard=self.heard)
            for number in range(count)
        ]

    # --- a round ---

    def hear_commits(self) -> None:
        """Let the workers commit, from now on, as often as the seed says."""
        self._hear_what_is_said()
        counts = self.stress.counts
        stop = counts["commits"] + self.rng.randint(1, self.stress.pick(400, 50))
        while counts["commits"] < stop:
            self._hear()

    def checkpoint(self) -> None:
        self.kept = dict(self.owed)
        with self._auditor() as client:
            client.checkpoint()

    def kill(self) -> None:
        self._hear_what_is_said()
        self.daemon.kill()
        self.stress.counts["kills"] += 1

    def lose_memory(self) -> None:
        """Nothing is left of the daemon but its disk. All workers know before it is back."""
        unaware = set(self.workers)
        while unaware:
            worker, line = self._hear()
            if line == OUTAGE:
                unaware.discard(worker)
        shutil.rmtree(self.daemon.directory)
        self.owed = dict(self.kept)

    def start(self) -> None:
        """Start it again; what was told last is read, and some of what was told before."""
        self._hear_what_is_said()
        self.daemon.start()
        numbers = list(self.owed)
        before, last = numbers[:-MAX_READ], numbers[-MAX_READ:]
        with self._auditor() as client:
            self._read(client, [*self.rng.sample(before, min(len(before), MAX_READ)), *last])
            self._take_stock(client.status())
        counts = self.stress.counts
        self.stress.say(f"{counts['kills']} kills, {counts['commits']} commits")

    def _take_stock(self, status: StatusReply) -> None:
        """The books agree while all are at work, and nothing had to go."""
        tier, *_ = status.tiers
        num_blocks = sum(space.num_blocks for space in status.namespaces)
        num_pages = count_pages(self.daemon.endpoint)
        self.stress.expect(tier.pages["committed"] == num_blocks, f"{num_blocks} blocks: {tier}")
        self.stress.expect(num_pages == self.num_pages, f"{num_pages} pages of {self.num_pages}")
        self.stress.expect(
            tier.backed_bytes < tier.capacity_bytes // 2, f"eviction may be an excuse: {tier}"
        )

    def end(self) -> None:
        """The workers went on, and are gone: all is there, and nothing is in use."""
        self.hear_commits()
        for worker in self.workers:
            worker.end()
        while not self.heard.empty():
            self._note(self.heard.get()[1])
        with self._auditor() as client:
            eventually(lambda: is_quiet(client, self.daemon.directory))
            self._read(client, self.owed)
            expect_exact_books(self.stress, client.status(), self.num_pages)

    # --- what the workers say ---

    def _hear_what_is_said(self) -> None:
        while not self.heard.empty():
            self._hear()

    def _hear(self) -> Heard:
        try:
            worker, line = self.heard.get(timeout=PATIENCE_SECONDS)
        except Empty:
            raise TimeoutError(f"nobody did anything for {PATIENCE_SECONDS} s") from None
        if not line:
            raise AssertionError(f"a client ended: exit status {worker.process.wait()}")
        self._note(line)
        return worker, line

    def _note(self, line: str) -> None:
        match line.split():
            case [number, num_tokens]:
                before = self.owed.pop(int(number), 0)
                self.owed[int(number)] = max(before, int(num_tokens))
                self.stress.counts["commits"] += 1
            case [_]:
                self.stress.counts["outages"] += 1

    # --- what is found ---

    @contextmanager
    def _auditor(self) -> Iterator[Client]:
        with Client(self.daemon.endpoint, timeout=30.0, name="auditor") as client:
            assert client.wait_attached(30.0)
            yield client

    def _read(self, client: Client, numbers: Iterable[int]) -> None:
        """Compare every byte of these sequences, and see that all is there that is owed."""
        namespaces = {domain: domain.open(client) for domain in DOMAINS}
        num_owed = num_lost = 0
        for number in numbers:
            domain, tokens = sequence_of(self.stress.seed, number)
            tokens = tokens[: self.owed[number]]
            with namespaces[domain].match(ids_of(tokens), extras=extras_of(tokens)) as lease:
                verify(lease, domain, tokens)
                num_lost += len(tokens) - lease.num_tokens
            num_owed += len(tokens)
            self.stress.counts["sequences_read"] += 1
        self.stress.counts["tokens_lost"] += num_lost
        self.stress.expect(
            num_lost == 0,
            f"after {self.stress.counts['kills']} kills {num_lost} tokens of {num_owed} are lost",
        )
