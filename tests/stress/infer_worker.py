"""One engine of part `infer`: `python -m tests.stress.infer_worker ENDPOINT SEED`.

Each line that it reads is an order: `add 7`, `cancel 7`, `resume 7/0`. For each output it says the
number of the request, why it is over or `-`, and its new tokens. When there are no more orders it
does what is left, and says how many sequences were preempted.
"""

from __future__ import annotations

import faulthandler
import sys
from queue import SimpleQueue
from random import Random
from threading import Thread
from typing import TYPE_CHECKING

from demo.models import tiny_llama
from kvd_client import Client
from kvd_infer.engine import Engine
from kvd_infer.model import Model
from kvd_infer.sampler import SamplingParams
from kvd_infer.scheduler import Limits
from kvd_infer.sequence import Request

if TYPE_CHECKING:
    from kvd_infer.engine import Output

GOES_ON = "-"
LIMITS = Limits(step_tokens=256, sequences=6)
SAVE_EVERY = 4
MAX_PROMPT, MAX_SHARED, MAX_GENERATED = 1800, 1000, 200
NUM_FAMILIES = 5
# No step may take so long.
HANG_SECONDS = 60


def request_of(seed: int, number: int) -> Request:
    """Half of them begin as others do."""
    rng = Random(f"{seed}/request {number}")
    shared = _tokens(Random(f"{seed}/family {rng.randrange(NUM_FAMILIES)}"), MAX_SHARED)
    own = _tokens(rng, MAX_PROMPT - MAX_SHARED)
    tokens = shared + own if rng.randrange(2) else own
    params = SamplingParams(max_tokens=rng.randint(1, MAX_GENERATED), temperature=0)
    return Request(str(number), tokens, params, priority=rng.randrange(3))


def _tokens(rng: Random, most: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(_length(rng, most)))


def _length(rng: Random, most: int) -> int:
    """From 1 on; of ten and of a hundred there are as many."""
    return int(most ** rng.random())


class Worker:
    def __init__(self, endpoint: str, seed: int) -> None:
        self.seed = seed
        client = Client(endpoint, timeout=30.0)
        assert client.wait_attached(30.0)
        self.engine = Engine(
            Model(tiny_llama(), "stress"), client, limits=LIMITS, save_every=SAVE_EVERY
        )
        self.orders: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.orders.put(line)
        self.orders.put("")

    def work(self) -> None:
        is_told = True
        while is_told or self.engine.has_work:
            while is_told and not (self.engine.has_work and self.orders.empty()):
                is_told = self.obey(self.orders.get())
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            for output in self.engine.step():
                say(output)
            faulthandler.cancel_dump_traceback_later()
        print("preempted", self.engine.scheduler.num_preempted, flush=True)

    def obey(self, order: str) -> bool:
        """Whether more orders will come."""
        match order.split():
            case ["add", number]:
                self.engine.add(request_of(self.seed, int(number)))
            case ["resume", name]:
                self.engine.resume(name)
            case ["cancel", number]:
                self.engine.cancel(number)
        return order != ""


def say(output: Output) -> None:
    tokens = [token.id for token in output.tokens]
    print(output.request, output.reason or GOES_ON, *tokens, flush=True)


def main(endpoint: str, seed: str) -> None:
    import torch

    torch.set_num_threads(1)
    Worker(endpoint, int(seed)).work()


if __name__ == "__main__":
    main(*sys.argv[1:])
