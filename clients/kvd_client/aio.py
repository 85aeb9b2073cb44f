"""AsyncClient: for engines that run on asyncio, or uvloop."""
# ruff: noqa: ASYNC109 - the daemon has to know of a timeout

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

from kvd_client.base import ClientBase
from kvd_client.lease import LeaseBase
from kvd_client.namespace import NamespaceBase
from kvd_client.session import Answered, LinkChanged, Operation

if TYPE_CHECKING:
    from kvd.protocol.codec import TokenIds
    from kvd.protocol.keys import Identity
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import (
        ConfigReply,
        DropResult,
        ExplainReply,
        LeasesReply,
        PinResult,
        ReloadReply,
        SequencesReply,
        StatusReply,
        TreeReply,
        VerifyReply,
    )
    from kvd_client.asked import ExtraItems
    from kvd_client.namespace import Resumed

T = TypeVar("T")


class AsyncClient(ClientBase):
    """As `Client`, for the tasks of one event loop.

    Cancelling a task leaves nothing behind: a match that is cancelled has no lease, and whatever
    else is cancelled can be done again, with the first answer.
    """

    _num_waiting = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def wait_attached(self, seconds: float) -> bool:
        """As `Client.wait_attached`."""
        return await self.run(self._attaching(seconds))

    def open(
        self, identity: Identity, layout: Layout, salt: str = "", *, extras: bool = False
    ) -> AsyncNamespace:
        """As `Client.open`; it does not wait."""
        return AsyncNamespace(self, identity, layout, salt, extras=extras)

    async def status(self) -> StatusReply:
        """As `Client.status`."""
        return await self.run(self._status())

    async def leases(self, limit: int = 1000) -> LeasesReply:
        """As `Client.leases`."""
        return await self.run(self._leases_of_all(limit))

    async def checkpoint(self, *, timeout: float | None = None) -> int:
        """As `Client.checkpoint`."""
        return await self.run(self._checkpoint(timeout))

    async def verify(
        self,
        progress: Callable[[VerifyReply], None] | None = None,
        *,
        timeout: float | None = None,
    ) -> VerifyReply:
        """As `Client.verify`."""
        return await self.run(self._verify(progress, timeout))

    async def config(self) -> ConfigReply:
        """As `Client.config`."""
        return await self.run(self._config())

    async def reload(self, *, timeout: float | None = None) -> ReloadReply:
        """As `Client.reload`."""
        return await self.run(self._reload(timeout))

    async def tree(
        self, namespace: int, tokens: TokenIds = (), *, depth: int = 100, limit: int = 1000
    ) -> TreeReply:
        """As `Client.tree`."""
        return await self.run(self._tree(namespace, tokens, depth, limit))

    async def explain(
        self, namespace: int, tokens: TokenIds, *, extras: ExtraItems = ()
    ) -> ExplainReply:
        """As `Client.explain`."""
        return await self.run(self._explain(namespace, tokens, extras))

    async def drain(self, *, undo: bool = False) -> None:
        """As `Client.drain`."""
        await self.run(self._drain(undo=undo))

    async def pin(
        self,
        namespace: int,
        tokens: TokenIds,
        seconds: float,
        *,
        owner: str | None = None,
        extras: ExtraItems = (),
    ) -> PinResult:
        """As `Client.pin`."""
        return await self.run(
            self._pin(namespace, tokens, seconds, owner, extras, self.deadline(None))
        )

    async def unpin(self, *, owner: str | None = None, pins: Sequence[int] = ()) -> int:
        """As `Client.unpin`."""
        return await self.run(self._unpin(owner, pins))

    async def drop(
        self,
        namespace: int,
        tokens: TokenIds = (),
        *,
        from_token: int = 0,
        extras: ExtraItems = (),
    ) -> DropResult:
        """As `Client.drop`."""
        return await self.run(
            self._drop_from(namespace, tokens, from_token, extras, self.deadline(None))
        )

    async def sequences(
        self, *, namespace_key: bytes | None = None, sequence: str | None = None, limit: int = 1000
    ) -> SequencesReply:
        """As `Client.sequences`."""
        return await self.run(self._sequences(namespace_key, sequence, limit))

    async def discard(self, namespace_key: bytes, sequence: str, *, generation: int = 0) -> bool:
        """As `Client.discard`."""
        return await self.run(self._discard(namespace_key, sequence, generation))

    async def close(self) -> None:
        """As `Client.close`."""
        self._let_go()
        await asyncio.get_running_loop().run_in_executor(None, self._finalizer)

    async def run(self, operation: Operation[T]) -> T:
        """Carry out an operation; this task waits where it must."""
        try:
            wish = next(operation)
            while True:
                try:
                    came = await self._wait(wish)
                except BaseException as error:
                    wish = operation.throw(error)
                else:
                    wish = operation.send(came)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _wait(self, wish: Answered | LinkChanged) -> bool:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(wish.deadline - time.monotonic(), _settle, came, False)
        try:
            with self._told(wish, _waker(loop, came)), self._reading(loop):
                return await came
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def _told(self, wish: Answered | LinkChanged, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called when the wish comes true."""
        connection = self.connection
        if isinstance(wish, Answered):
            wish.call.wake = wake
            try:
                if wish.call.is_answered:
                    wake()
                yield
            finally:
                connection.withdraw(wish.call)
        else:
            connection.watch(wake)
            try:
                if connection.core.link is not wish.seen:
                    wake()
                yield
            finally:
                connection.unwatch(wake)

    @contextlib.contextmanager
    def _reading(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """The loop reads the socket while any of its tasks waits."""
        connection = self.connection
        if self._num_waiting == 0:
            loop.add_reader(connection.fileno, connection.pump)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                loop.remove_reader(connection.fileno)


def _waker(loop: asyncio.AbstractEventLoop, came: asyncio.Future[bool]) -> Callable[[], None]:
    """Makes the future true, in whatever thread it is called."""
    own = threading.get_ident()

    def wake() -> None:
        if threading.get_ident() == own:
            _settle(came, True)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, came, True)

    return wake


def _settle(came: asyncio.Future[bool], value: bool) -> None:
    if not came.done():
        came.set_result(value)


class AsyncLease(LeaseBase):
    """A lease of an `AsyncClient`, for one task at a time; `abort` and `release` do not wait."""

    _client: AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.__exit__(kind, *exc)

    async def reserve(self, num_tokens: int, *, timeout: float | None = None) -> None:
        """As `Lease.reserve`."""
        await self._client.run(self._reserve(num_tokens, timeout))

    async def extend(self, *, timeout: float | None = None) -> int:
        """As `Lease.extend`."""
        return await self._client.run(self._extend(timeout))

    async def commit(
        self, tokens: TokenIds, *, extras: ExtraItems = (), timeout: float | None = None
    ) -> int:
        """As `Lease.commit`."""
        return await self._client.run(self._commit(tokens, extras, timeout))

    async def save(
        self,
        sequence: str,
        tokens: TokenIds,
        state: bytes = b"",
        *,
        generation: int = 0,
        extras: ExtraItems = (),
        timeout: float | None = None,
    ) -> int:
        """As `Lease.save`."""
        return await self._client.run(
            self._save(sequence, tokens, state, generation, extras, timeout)
        )

    async def fork(self, *, reserve_tokens: int = 0, timeout: float | None = None) -> Self:
        """As `Lease.fork`."""
        fork = type(self)(self._namespace)
        await self._client.run(self._fork(fork, reserve_tokens, timeout))
        return fork

    async def replace(
        self,
        tokens: TokenIds,
        *,
        reserve_tokens: int = 0,
        exact_tail: bool = False,
        extras: ExtraItems = (),
        timeout: float | None = None,
    ) -> None:
        """As `Lease.replace`."""
        match = self._namespace._match(self, tokens, reserve_tokens, exact_tail, extras, timeout)
        await self._client.run(self._replace(match))


class AsyncNamespace(NamespaceBase):
    """The KV of one model for one client; made by `AsyncClient.open`."""

    _client: AsyncClient

    @property
    def client(self) -> AsyncClient:
        return self._client

    async def match(
        self,
        tokens: TokenIds,
        *,
        reserve_tokens: int = 0,
        exact_tail: bool = False,
        extras: ExtraItems = (),
        timeout: float | None = None,
    ) -> AsyncLease:
        """As `Namespace.match`."""
        lease = AsyncLease(self)
        await self._client.run(
            self._match(lease, tokens, reserve_tokens, exact_tail, extras, timeout)
        )
        return lease

    async def prefetch(
        self, tokens: TokenIds, *, extras: ExtraItems = (), timeout: float | None = None
    ) -> None:
        """As `Namespace.prefetch`."""
        await self._client.run(self._prefetch(tokens, extras, timeout))

    async def pin(
        self,
        tokens: TokenIds,
        seconds: float,
        *,
        owner: str | None = None,
        extras: ExtraItems = (),
        timeout: float | None = None,
    ) -> PinResult:
        """As `Namespace.pin`."""
        return await self._client.run(self._pin(tokens, seconds, owner, extras, timeout))

    async def drop(
        self,
        tokens: TokenIds = (),
        *,
        from_token: int = 0,
        extras: ExtraItems = (),
        timeout: float | None = None,
    ) -> DropResult:
        """As `Namespace.drop`."""
        return await self._client.run(self._drop(tokens, from_token, extras, timeout))

    async def resume(
        self, sequence: str, *, reserve_tokens: int = 0, timeout: float | None = None
    ) -> Resumed[AsyncLease]:
        """As `Namespace.resume`."""
        return await self._client.run(
            self._resume(AsyncLease(self), sequence, reserve_tokens, timeout)
        )

    async def sequences(self, limit: int = 1000) -> SequencesReply:
        """As `Namespace.sequences`."""
        return await self._client.run(self._client._sequences(self._key, None, limit))

    async def discard(self, sequence: str, *, generation: int = 0) -> bool:
        """As `Namespace.discard`."""
        return await self._client.run(self._client._discard(self._key, sequence, generation))
