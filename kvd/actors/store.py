"""StoreActor: one store tier: its threads, and its health."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio

from kvd.protocol.errors import KvdError, TierFailed, TierFull

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from kvd.cache.stores import StoreState
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Store, StoreTier

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# A store that failed is tried again after the first of these, and later at most after the second.
FIRST_PAUSE_SECONDS = 1.0
LAST_PAUSE_SECONDS = 60.0
# So many reads at once; the writer is one more.
NUM_READERS = 2


@dataclass(slots=True)
class Job:
    """Work for a store's writer, and how it went."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    done: anyio.Event = field(default_factory=anyio.Event)
    result: Any = None
    error: Exception | None = None


class StoreActor:
    """One store tier. What changes it is done in the order in which it was submitted.

    While it fails it is left alone for longer and longer pauses; nobody waits for it.
    """

    def __init__(self, tier: StoreTier, state: StoreState) -> None:
        self.tier = tier
        self.state = state
        # What is wrong with it, in words; nothing while it works.
        self.trouble = ""
        self.counters = {"write_failures": 0, "read_failures": 0}
        self._stores: dict[Layout, Store] = {}
        self._jobs: deque[Job] = deque()
        self._new_job = anyio.Event()
        self._readers = anyio.CapacityLimiter(NUM_READERS)
        self._failed = anyio.Event()

    # --- life ---

    async def open(self, epoch: int) -> None:
        """Raises AlreadyRunning, TierFailed."""
        await anyio.to_thread.run_sync(self.tier.open, epoch)
        for store in self.tier.stores():
            self._know(store)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._recover)
            task_status.started()
            while True:
                await self._new_job.wait()
                self._new_job = anyio.Event()
                while self._jobs:
                    await self._do(self._jobs.popleft())

    @property
    def stores(self) -> Sequence[Store]:
        return list(self._stores.values())

    @property
    def num_waiting(self) -> int:
        """Jobs that are not begun."""
        return len(self._jobs)

    # --- work ---

    def submit(self, function: Callable[[*Ts], T], *args: *Ts) -> Job:
        """Have something done after all that was submitted before."""
        job = Job(function, args)
        self._jobs.append(job)
        self._new_job.set()
        return job

    async def finish(self, job: Job) -> Any:
        """A job's result; raises what it raised."""
        await job.done.wait()
        if job.error is not None:
            raise job.error
        return job.result

    async def _do(self, job: Job) -> None:
        try:
            job.result = await anyio.to_thread.run_sync(job.function, *job.args)
        except Exception as error:  # it is the submitter's, and the writer goes on
            job.error = error
            self.counters["write_failures"] += 1
            self._note(error, reads=False)
        finally:
            job.done.set()

    async def read(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Have something read, beside the writer. Raises TierFailed."""
        try:
            return await anyio.to_thread.run_sync(function, *args, limiter=self._readers)
        except KvdError as error:
            self.counters["read_failures"] += 1
            self._note(error, reads=True)
            raise

    # --- stores ---

    def store(self, layout: Layout) -> Store | None:
        return self._stores.get(layout)

    async def make_store(self, layout: Layout, data_bytes: int) -> None:
        """See that there is a store of a layout; raises TierFailed."""
        if layout not in self._stores:
            job = self.submit(self._make_store, layout, data_bytes)
            self._know(await self.finish(job))

    def _make_store(self, layout: Layout, data_bytes: int) -> Store:
        return self._stores.get(layout) or self.tier.create_store(layout, data_bytes)

    def _know(self, store: Store) -> None:
        self._stores[store.layout] = store
        self.state.record_bytes[store.layout] = store.record_bytes

    def remove_store(self, layout: Layout) -> None:
        """Nobody uses a layout any more."""
        if (store := self._stores.pop(layout, None)) is not None:
            del self.state.record_bytes[layout]
            self.submit(self.tier.remove_store, store)

    async def sync(self) -> None:
        """When it returns, all that was submitted before survives a power loss."""
        for store in self.stores:
            await self.finish(self.submit(store.sync))

    # --- health ---

    def _note(self, error: Exception, *, reads: bool) -> None:
        if not isinstance(error, TierFailed):
            logger.error("reason=internal tier %s: %r", self.tier.name, error)
        if not self.trouble:
            logger.error("reason=tier_failed tier %s: %s", self.tier.name, error)
        self.trouble = str(error)
        self.state.may_write = False
        if reads and not isinstance(error, TierFull):
            self.state.may_read = False
        self._failed.set()

    async def _recover(self) -> None:
        """After a failure, see again and again whether it works."""
        while True:
            await self._failed.wait()
            pause = FIRST_PAUSE_SECONDS
            while self.trouble:
                await anyio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_SECONDS)
                if await self._works():
                    logger.warning("tier %s works again", self.tier.name)
                    self.trouble = ""
                    self.state.may_write = self.state.may_read = True
            self._failed = anyio.Event()

    async def _works(self) -> bool:
        jobs = [self.submit(store.write_note, b"probe", b"") for store in self.stores]
        for job in jobs:
            await job.done.wait()
        return all(job.error is None for job in jobs)
