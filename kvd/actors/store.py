"""StoreActor: one store tier: its threads, and its health."""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio
import msgspec

from kvd.actors.patience import Patience
from kvd.actors.signal import Want
from kvd.actors.tier import as_failed
from kvd.protocol.errors import (
    AlreadyRunning,
    BadRequest,
    ConfigError,
    KvdError,
    TierFailed,
    TierFull,
)
from kvd.tiers.copying import Writer, data_bytes

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from kvd.actors.signal import Signal
    from kvd.cache.stores import StoreState
    from kvd.protocol.keys import BlockKey, NamespaceInfo
    from kvd.protocol.layout import Layout
    from kvd.tiers.base import Store, StoreTier

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# A store that failed is tried again after the first of these, and later at most after the second.
FIRST_PAUSE_SECONDS = 1.0
LAST_PAUSE_SECONDS = 60.0
# A tier that serves and of whose calls none returned for so long is done without until one does.
SILENT_SECONDS = 5.0
# So many reads at once; the writer is one more.
NUM_READERS = 2
# Beside its records a store has what its namespaces are, by their keys.
NAMESPACE_NOTE = b"namespace "


@dataclass(slots=True)
class Job:
    """Work for a store's writer, and how it went."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    then: Callable[[Any], None] | None
    otherwise: Callable[[], None] | None
    done: anyio.Event = field(default_factory=anyio.Event)
    result: Any = None
    error: TierFailed | None = None


@dataclass(eq=False, slots=True)
class _Kept:
    """What a tier has of a layout: a store, once it is made, or else why that could not be.

    `unprepared` are namespaces to be noted, by their keys; `undeleted` is what the store still has
    though it should not.
    """

    store: Store | None = None
    why: str = ""
    unprepared: dict[bytes, NamespaceInfo] = field(default_factory=dict)
    undeleted: dict[BlockKey, None] = field(default_factory=dict)

    @property
    def is_lacking(self) -> bool:
        """Whether a namespace should be noted and could not be."""
        return bool(self.why and self.unprepared)

    def delete_again(self) -> None:
        """In the writer's thread: what was written before it stays."""
        assert self.store is not None
        self.store.delete(list(self.undeleted))
        self.undeleted.clear()


class StoreActor:
    """One store tier. What changes it is done in the order in which it was submitted.

    While it fails it is left alone for longer and longer pauses; nobody waits for it.
    """

    def __init__(
        self,
        tier: StoreTier,
        state: StoreState,
        changed: Signal,
        hang_seconds: float,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is told when the tier works again.

        At the start, a tier hangs that was not heard of for `hang_seconds`; whenever it is heard
        of, `moved` is told, in any thread.
        """
        self.tier = tier
        self.state = state
        self.writer = Writer()
        # What is wrong with it, in words; nothing while it works.
        self.trouble = ""
        self.is_off = False
        self.counters = {"write_failures": 0, "read_failures": 0}
        # Asked for in the writer's thread: of a disk that hangs, status still tells.
        self.used_bytes = 0
        self.hang_seconds = hang_seconds
        self._changed = changed
        self._moved = moved
        self._layouts: dict[Layout, _Kept] = {}
        # Of these the tier still has a store though it should not.
        self._unremoved: set[Layout] = set()
        self._most_bytes: dict[Layout, int] = {}
        self._jobs: deque[Job] = deque()
        self._new_job = Want()
        self._is_closing = False
        self._readers = anyio.CapacityLimiter(NUM_READERS)
        self._reading = Patience(f"tier {tier.name}")
        self._writing = Patience(f"tier {tier.name}")
        self._failed = Want()

    # --- life ---

    async def open(self, epoch: int) -> None:
        """Begin; where the tier cannot be opened, or hangs, without it.

        Raises AlreadyRunning, and ConfigError where its place cannot be.
        """
        self.tier.moved = functools.partial(self._heard, self._writing)
        try:
            await self._writing.call(
                self._measured, self.tier.open, epoch, still_seconds=self.hang_seconds
            )
        except (AlreadyRunning, ConfigError):
            raise
        except Exception as error:  # as of every other call
            self.switch_off(as_failed(self.name, error))
            return
        for store in self.tier.stores():
            self._know(self._layouts.setdefault(store.layout, _Kept()), store)

    def switch_off(self, error: TierFailed) -> None:
        """Use the tier no more before the next start: what it has is not known here."""
        logger.error("reason=tier_failed tier=%s is off until the next start: %s", self.name, error)
        self.trouble = str(error)
        self.is_off = True
        self.state.may_write = self.state.may_read = False
        self._layouts.clear()
        self.state.record_bytes.clear()

    @property
    def name(self) -> str:
        return self.tier.name

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until `close`; the tier is closed when nothing works on it any more.

        One that hangs is not: it stays as a kill would leave it.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._recover)
                tasks.start_soon(self._listen)
                task_status.started()
                while not self._is_closing or self._jobs:
                    await self._new_job.wait()
                    while self._jobs:
                        await self._do(self._jobs.popleft())
                tasks.cancel_scope.cancel()
        finally:
            try:
                self._reading.check()
                await self._writing.call(self.tier.close)
            except Exception as error:  # as of every other call
                logger.error(
                    "reason=not_closed tier=%s is looked through at its next start: %s",
                    self.name,
                    as_failed(self.name, error),
                )

    def close(self, end: float = math.inf) -> None:
        """Finish what was submitted, until then, and nothing more."""
        self._writing.end_at(end)
        self._is_closing = True
        self._new_job.set()

    def end_reads(self, end: float) -> None:
        """Whoever reads waits until then, and no longer."""
        self._reading.end_at(end)

    @property
    def stores(self) -> Sequence[Store]:
        return [kept.store for kept in self._layouts.values() if kept.store is not None]

    @property
    def num_waiting(self) -> int:
        """Jobs that are not begun."""
        return len(self._jobs)

    # --- work ---

    def submit(
        self,
        function: Callable[[*Ts], T],
        *args: *Ts,
        then: Callable[[T], None] | None = None,
        otherwise: Callable[[], None] | None = None,
    ) -> Job:
        """Have something done in the writer's thread after all that was submitted before.

        Where that went well, `then` is called with its result, else `otherwise`, on the event loop.
        """
        job = Job(function, args, then, otherwise)
        self._jobs.append(job)
        self._new_job.set()
        return job

    async def finish(self, job: Job) -> Any:
        """A job's result; raises what it raised."""
        await job.done.wait()
        if job.error is not None:
            raise job.error
        return job.result

    async def settle(self) -> None:
        """When it returns, all that was submitted before is done, or has failed."""
        await self.submit(lambda: None).done.wait()

    async def _do(self, job: Job) -> None:
        try:
            job.result = await self._writing.call(self._measured, job.function, *job.args)
            self.state.most_bytes = self._most_bytes
            if job.then is not None:
                job.then(job.result)
        except Exception as error:  # it is the submitter's, and the writer goes on
            job.error = as_failed(self.name, error)
            if job.otherwise is not None:
                job.otherwise()
            self.counters["write_failures"] += 1
            self._note(job.error, reads=False)
        finally:
            job.done.set()

    def _measured(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        result = function(*args)
        stores = self.tier.stores()
        self.used_bytes = sum(store.used_bytes for store in stores)
        self._most_bytes = {store.layout: store.most_bytes for store in stores}
        return result

    async def read(
        self,
        function: Callable[[Store, *Ts], T],
        store: Store,
        *args: *Ts,
        still_seconds: float = math.inf,
    ) -> T:
        """Have something read from a store, beside the writer. Raises TierFailed.

        Also where it stands still for so long, which it does not if it calls `moved`.
        """
        try:
            return await self._reading.call(
                function, store, *args, still_seconds=still_seconds, limiter=self._readers
            )
        except Exception as error:
            if self.store(store.layout) is not store:
                raise TierFailed(f"tier {self.name} gave up this store meanwhile") from error
            self.counters["read_failures"] += 1
            failed = as_failed(self.name, error)
            self._note(failed, reads=True)
            raise failed from error

    def moved(self) -> None:
        """Told in the thread of a long read at the start."""
        self._heard(self._reading)

    def _heard(self, patience: Patience) -> None:
        patience.moved(self.hang_seconds)
        self._moved()

    # --- stores ---

    def store(self, layout: Layout) -> Store | None:
        kept = self._layouts.get(layout)
        return kept.store if kept else None

    def prepare(self, info: NamespaceInfo) -> None:
        """Have a namespace noted, in the store of its layout, before any block of it comes."""
        if not self.is_off:
            kept = self._layouts.setdefault(info.layout, _Kept())
            kept.unprepared[info.key] = info
            self._submit_prepare(kept, info)

    def _submit_prepare(self, kept: _Kept, info: NamespaceInfo) -> Job:
        then = functools.partial(self._prepared, kept, info)
        return self.submit(self._prepare, info, then=then)

    def _prepare(self, info: NamespaceInfo) -> Store | KvdError:
        layout = info.layout
        try:
            store = self._made(layout) or self.tier.create_store(layout, data_bytes(layout))
            store.write_note(NAMESPACE_NOTE + info.key, msgspec.msgpack.encode(info))
        except (BadRequest, TierFailed) as error:
            return error
        return store

    def _made(self, layout: Layout) -> Store | None:
        """In the writer's thread: what there is then."""
        return next((store for store in self.tier.stores() if store.layout == layout), None)

    def _prepared(self, kept: _Kept, info: NamespaceInfo, made: Store | KvdError) -> None:
        """Where there is no room for one layout, the others go on; it is tried again later."""
        if self._layouts.get(info.layout) is not kept:  # its removal follows
            return
        if info.layout in self._unremoved:
            kept.why = "what was removed is still there"
            return
        if isinstance(made, TierFailed):
            kept.why = made.message
            self._note(made, reads=False, writes=False)
            return
        kept.unprepared.pop(info.key, None)
        kept.why = ""
        if isinstance(made, KvdError):
            logger.warning(
                "reason=layout_refused tier=%s keeps no blocks of a layout: %s", self.name, made
            )
            return
        self._know(kept, made)
        self._changed.set()

    def _know(self, kept: _Kept, store: Store) -> None:
        kept.store = store
        self.state.record_bytes[store.layout] = store.record_bytes
        self.state.usable_bytes = self.tier.usable_bytes

    def forget_namespaces(self, layout: Layout, keys: Sequence[bytes]) -> None:
        """Have the notes of namespaces removed of which no blocks are left."""
        if (kept := self._layouts.get(layout)) is None:
            return
        for key in keys:
            kept.unprepared.pop(key, None)
        self.submit(self._delete_notes, kept, layout, keys)

    def _delete_notes(self, kept: _Kept, layout: Layout, keys: Sequence[bytes]) -> None:
        store = self._made(layout)
        # Of records that could not be deleted the next start must know what they are.
        if store is not None and not kept.undeleted:
            store.delete_notes([NAMESPACE_NOTE + key for key in keys])

    def forget(self, layout: Layout, keys: Sequence[BlockKey]) -> None:
        """Have blocks forgotten, which may be on their way or not be there.

        Where that fails it is tried again later, but for what was written meanwhile.
        """
        kept = self._layouts.get(layout)
        if kept is None or kept.store is None:
            return
        again = functools.partial(kept.undeleted.update, dict.fromkeys(keys))
        self.submit(kept.store.delete, keys, otherwise=again)

    def wrote(self, store: Store, keys: Sequence[BlockKey]) -> None:
        """A store has these records, whatever was to be deleted before; told by the write's job."""
        kept = self._layouts.get(store.layout)
        if kept is not None and kept.store is store:
            for key in keys:
                kept.undeleted.pop(key, None)

    def remove_store(self, layout: Layout) -> None:
        """Nobody uses a layout any more."""
        if self._layouts.pop(layout, None) is not None:
            self.state.record_bytes.pop(layout, None)
            self.state.unknown_bytes.pop(layout, None)
            self._submit_remove(layout)

    def _submit_remove(self, layout: Layout) -> Job:
        return self.submit(
            self._remove_made,
            layout,
            then=lambda _: self._unremoved.discard(layout),
            otherwise=lambda: self._unremoved.add(layout),
        )

    def _remove_made(self, layout: Layout) -> None:
        if (store := self._made(layout)) is not None:
            self.tier.remove_store(store)

    async def crowding(self, layout: Layout) -> Layout | None:
        """Another layout that has the room which this one lacks, and cannot give it back."""
        if (store := self.store(layout)) is None:
            return None
        other: Store | None = await self.finish(self.submit(self.tier.crowding, store))
        return other.layout if other else None

    async def sync(self) -> None:
        """When it returns, all that was submitted before survives a power loss; raises TierFailed.

        What could not be deleted yet is not so, nor what lies in a tier that is off.
        """
        if self.is_off:
            raise TierFailed(f"tier {self.name} is off: {self.trouble}")
        jobs = [self.submit(store.sync) for store in self.stores]
        for job in jobs:
            await self.finish(job)
        if self._unremoved or any(kept.undeleted for kept in self._layouts.values()):
            raise TierFailed(f"tier {self.name} could not forget all blocks: {self.trouble}")

    def check_layouts(self) -> None:
        """Raises TierFailed where a layout should have a store and has none."""
        for kept in self._layouts.values():
            if kept.is_lacking:
                raise TierFailed(f"tier {self.name} has no store of a layout: {kept.why}")

    # --- health ---

    def _note(self, error: TierFailed, *, reads: bool, writes: bool = True) -> None:
        if not self.trouble:
            logger.error(
                "reason=tier_failed tier=%s is left alone for a while: %s", self.name, error
            )
        self.trouble = str(error)
        if writes:
            self.state.may_write = False
        if reads and not isinstance(error, TierFull):
            self.state.may_read = False
        self._failed.set()

    async def _listen(self) -> None:
        """Note that a tier hangs, which raises nothing; that it does no more is seen as ever."""
        while True:
            await anyio.sleep(SILENT_SECONDS / 8)
            for patience in (self._reading, self._writing):
                if not self.is_off and (seconds := patience.silent_seconds) > SILENT_SECONDS:
                    error = TierFailed(f"tier {self.name} has not answered for {seconds:.0f} s")
                    self._note(error, reads=patience is self._reading)

    async def _recover(self) -> None:
        """After a failure, see again and again whether it works."""
        while True:
            await self._failed.wait()
            pause = FIRST_PAUSE_SECONDS
            while self.trouble and not self.is_off:
                await anyio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_SECONDS)
                if await self._works():
                    logger.warning("reason=works_again tier=%s works again", self.name)
                    self.trouble = ""

    async def _works(self) -> bool:
        layouts = list(self._layouts.values())
        jobs = [self._submit_remove(layout) for layout in self._unremoved]
        jobs += [self.submit(kept.delete_again) for kept in layouts if kept.undeleted]
        jobs += [self.submit(store.write_note, b"probe", b"") for store in self.stores]
        for job in jobs:
            await job.done.wait()
        works = all(job.error is None for job in jobs) and await self._can_be_read()
        if works and not self.state.may_write:
            # Layouts that have a store go on, whatever becomes of the others.
            self.state.may_write = self.state.may_read = True
            self._changed.set()
        jobs = [
            self._submit_prepare(kept, info)
            for kept in self._layouts.values()
            for info in kept.unprepared.values()
        ]
        for job in jobs:
            await job.done.wait()
        return works and not any(kept.is_lacking for kept in self._layouts.values())

    async def _can_be_read(self) -> bool:
        try:
            for store in self.stores if not self.state.may_read else ():
                await self.read(lambda each: each.notes(), store)
        except TierFailed:
            return False
        return True
