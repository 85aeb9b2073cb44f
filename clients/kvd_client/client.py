"""Client: for engines that are synchronous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeVar

from kvd_client.base import ClientBase, NamespaceBase
from kvd_client.lease import LeaseBase
from kvd_client.session import Answered, LinkChanged, Operation

if TYPE_CHECKING:
    from kvd.protocol.codec import TokenIds
    from kvd.protocol.keys import Identity
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import StatusReply

T = TypeVar("T")


class Client(ClientBase):
    """A client of one daemon, for any number of threads.

    Every call ends within `timeout` seconds. When the daemon does not answer, a match is a miss at
    the cost of at most one such time, and then of nothing until the daemon is back: this client
    looks for it in the background and attaches again by itself. A forked child attaches anew.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_attached(self, seconds: float) -> bool:
        """Wait until the daemon answers, for so many seconds at most."""
        return self.run(self._attaching(seconds))

    def open(self, identity: Identity, layout: Layout, salt: str = "") -> Namespace:
        """The namespace of a model's KV. It is bound to the daemon at each first use."""
        return Namespace(self, identity, layout, salt)

    def status(self) -> StatusReply:
        """How the daemon stands. Raises DaemonUnavailable or DeadlineExceeded."""
        return self.run(self._status())

    def close(self) -> None:
        """Detach. Leases that are still open end; their pages are freed when no view is left.

        Other processes of the session must have let go of its pages before.
        """
        self._let_go()
        self._finalizer()

    def run(self, operation: Operation[T]) -> T:
        """Carry out an operation; this thread waits where it must."""
        try:
            wish = next(operation)
            while True:
                try:
                    came = self._wait(wish)
                except BaseException as error:
                    wish = operation.throw(error)
                else:
                    wish = operation.send(came)
        except StopIteration as done:
            result: T = done.value
            return result

    def _wait(self, wish: Answered | LinkChanged) -> bool:
        if isinstance(wish, Answered):
            return self.connection.ask(wish.call, wish.deadline)
        return self.connection.await_link(wish.seen, wish.deadline)


class Lease(LeaseBase):
    """A lease of a `Client`, for one thread at a time."""

    _client: Client

    def reserve(self, num_tokens: int, *, timeout: float | None = None) -> None:
        """Have pages for `num_tokens` tokens of the sequence in all, and some ahead.

        Waits its turn within the timeout. Raises OutOfPages, LeaseEnded, DaemonUnavailable.
        """
        self._client.run(self._reserve(num_tokens, timeout))

    def commit(self, tokens: TokenIds, *, timeout: float | None = None) -> int:
        """Make the next blocks matchable; how many tokens of the sequence are committed now.

        `tokens` are those that follow `num_committed`; the full blocks among them, every row of
        which must have been written, are committed and never written again. A block that somebody
        else committed meanwhile stays, and its page stands in `pages` from then on; views of this
        lease's own copy stay good until the lease ends. Raises PagesInUse, LeaseEnded,
        DaemonUnavailable, DeadlineExceeded; after the last, commit again.
        """
        return self._client.run(self._commit(tokens, timeout))


class Namespace(NamespaceBase[Lease]):
    """The KV of one model for one client; made by `Client.open`."""

    _lease_class = Lease
    _client: Client

    @property
    def client(self) -> Client:
        return self._client

    def match(
        self, tokens: TokenIds, *, reserve_tokens: int = 0, timeout: float | None = None
    ) -> Lease:
        """Lease the longest cached prefix of `tokens`, with pages for `reserve_tokens` tokens more.

        An engine computes at least one token itself, so it matches `prompt[:-1]`. Pages that could
        not be had are said in the lease's `shortage`. Without a daemon the lease is a miss, whose
        `is_open` is False. Raises BadRequest, LimitExceeded.
        """
        return self._client.run(self._match(tokens, reserve_tokens, timeout))
