"""Part `infer`: two engines on a pool too small for all; one is killed, the other does its work.

What they generate must be what the model alone would, token by token, and in the end every page is
given back.
"""

from __future__ import annotations

from queue import Queue
from random import Random
from typing import TYPE_CHECKING, Any

from demo.models import tiny_llama
from kvd.testing.daemons import running_daemon
from kvd_client import Client
from kvd_infer.hf_model import layout_of
from tests.e2e.support import capacity_of, eventually
from tests.infer.engines import assert_best
from tests.stress.clients import expect_exact_books, is_quiet
from tests.stress.crash import PATIENCE_SECONDS, Worker
from tests.stress.infer_worker import GOES_ON, SAVE_EVERY, request_of

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from tests.stress.common import Stress
    from tests.stress.crash import Heard

WORKER = "tests.stress.infer_worker"
# The longest request takes most of them.
NUM_PAGES = 128
# Each engine has so many requests to do at a time; more than run.
UNDER_WAY = 8
# Of the requests that end, one in so many has another cancelled.
OVER_PER_CANCEL = 10


def infer(stress: Stress) -> None:
    """Requests from one token to two thousand, half of which begin as others do."""
    with running_daemon(settings(NUM_PAGES)) as daemon:
        engines = Engines(stress, daemon, num_requests=stress.pick(200, 20))
        try:
            engines.run()
        finally:
            for worker in engines.workers:
                worker.end()
            stress.expect("reason=" not in daemon.log, f"the daemon failed: {daemon.log}")
        engines.audit(daemon)
    engines.judge()
    # In a short run the one or the other may come too late.
    least = stress.pick(1, 0)
    stress.expect_at_least({"length": 10, "resumed": least, "preempted": least, "cancelled": least})


def settings(num_pages: int) -> dict[str, Any]:
    capacity_bytes = capacity_of(num_pages, layout_of(tiny_llama()))
    return {
        "tiers": [{"type": "host", "capacity_bytes": capacity_bytes}],
        "sessions": {"heartbeat_seconds": 0.1, "sweep_seconds": 0.05},
        "cache": {"high_watermark": 0.95, "low_watermark": 0.9, "back_ahead_bytes": 1},
    }


class Engines:
    """Both engines, what each was told to do, and what all said of each request."""

    def __init__(self, stress: Stress, daemon: RunningDaemon, num_requests: int) -> None:
        self.stress = stress
        self.rng = Random(f"{stress.seed}/engines")
        self.to_do = list(range(num_requests))
        self.kill_at = num_requests // 3
        self.said: dict[int, list[int]] = {}
        self.over: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.client = Client(daemon.endpoint, timeout=30.0, name="auditor")
        self.heard: Queue[Heard] = Queue()
        self.workers = [
            Worker(WORKER, daemon.endpoint, stress.seed, heard=self.heard) for _ in range(2)
        ]
        self.killed: Worker | None = None
        self.under_way: dict[Worker, set[int]] = {worker: set() for worker in self.workers}

    def run(self) -> None:
        for worker in self.workers:
            self._do_more(worker)
        while self.under_way:
            self._note(*self.heard.get(timeout=PATIENCE_SECONDS))

    # --- what they are told ---

    def _do_more(self, worker: Worker) -> None:
        while self.to_do and len(self.under_way[worker]) < UNDER_WAY:
            self._do(worker, self.to_do.pop(), "add {}")
        if not any(self.under_way.values()):
            for each in self.under_way:
                each.tell_no_more()

    def _do(self, worker: Worker, number: int, order: str) -> None:
        self.said[number] = []
        self.under_way[worker].add(number)
        self._tell(worker, order.format(number))

    def _cancel_one(self) -> None:
        worker = self.rng.choice(list(self.under_way))
        if numbers := sorted(self.under_way[worker]):
            self.cancelled.add(number := self.rng.choice(numbers))
            self._tell(worker, f"cancel {number}")

    def _tell(self, worker: Worker, order: str) -> None:
        """Who was killed hears nothing: the other is told, later."""
        if worker is not self.killed:
            worker.tell(order)

    def _kill(self, worker: Worker) -> None:
        self.killed = worker
        worker.process.kill()

    # --- what they say ---

    def _note(self, worker: Worker, line: str) -> None:
        match line.split():
            case ["preempted", count]:
                self.stress.counts["preempted"] += int(count)
            case [number, reason, *tokens]:
                self.said[int(number)] += map(int, tokens)
                if reason != GOES_ON:
                    self._note_end(worker, int(number), reason)
            case []:
                self._note_exit(worker)

    def _note_end(self, worker: Worker, number: int, reason: str) -> None:
        self.under_way[worker].remove(number)
        self.over[number] = reason
        self.stress.counts[reason] += 1
        if len(self.over) == self.kill_at:
            self._kill(max(self.workers, key=self._num_saved))
        if self.rng.randrange(OVER_PER_CANCEL) == 0:
            self._cancel_one()
        self._do_more(worker)

    def _num_saved(self, worker: Worker) -> int:
        return sum(len(self.said[number]) > SAVE_EVERY for number in self.under_way[worker])

    def _note_exit(self, worker: Worker) -> None:
        left = self.under_way.pop(worker)
        if worker is self.killed:
            self._hand_over(left)
        elif left:
            raise AssertionError(f"an engine ended: exit status {worker.process.wait()}")

    def _hand_over(self, numbers: set[int]) -> None:
        """Have the other go on with what was saved, and begin anew with the rest."""
        (other,) = self.under_way
        saved = {each.sequence for each in self.client.sequences().sequences}
        for number in sorted(numbers):
            is_saved = f"{number}/0" in saved
            self.stress.counts["resumed"] += is_saved
            self._do(other, number, "resume {}/0" if is_saved else "add {}")
            if number in self.cancelled:
                self._tell(other, f"cancel {number}")
        self._do_more(other)

    # --- what came of all ---

    def audit(self, daemon: RunningDaemon) -> None:
        """Nobody is there any more: every page was given back."""
        with self.client as client:
            eventually(lambda: is_quiet(client, daemon.directory))
            expect_exact_books(self.stress, client.status(), NUM_PAGES)
            saved = client.sequences().num_sequences
            self.stress.expect(saved == 0, f"all are over, and {saved} are saved")

    def judge(self) -> None:
        """Each has the best tokens that there are, as many as were asked for."""
        plain = tiny_llama()
        for number, reason in self.over.items():
            request, said = request_of(self.stress.seed, number), self.said[number]
            if reason != "cancelled":
                self.stress.expect(
                    reason == "length" and len(said) == request.params.max_tokens,
                    f"request {number} ended by {reason} after {len(said)} tokens",
                )
            elif number not in self.cancelled:
                self.stress.expect(False, f"request {number} was cancelled by nobody")
            if said:
                assert_best(plain, request.tokens, said)
