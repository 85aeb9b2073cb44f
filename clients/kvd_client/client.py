"""Client: for engines that are synchronous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeVar

from kvd_client.base import ClientBase
from kvd_client.lease import LeaseBase
from kvd_client.namespace import NamespaceBase
from kvd_client.session import Answered, LinkChanged, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

    def open(
        self, identity: Identity, layout: Layout, salt: str = "", *, extras: bool = False
    ) -> Namespace:
        """The namespace of a model's KV. It is bound to the daemon at each first use.

        With `extras`, positions are told apart by more than their tokens: see `Namespace.match`.
        Raises BadRequest.
        """
        return Namespace(self, identity, layout, salt, extras=extras)

    def status(self) -> StatusReply:
        """How the daemon stands. Raises DaemonUnavailable or DeadlineExceeded."""
        return self.run(self._status())

    def leases(self, limit: int = 1000) -> LeasesReply:
        """Who holds what: leases and pins, the oldest of each. Raises as `status`."""
        return self.run(self._leases_of_all(limit))

    def checkpoint(self, *, timeout: float | None = None) -> int:
        """Have all blocks that shall survive the machine copied and synced; how many were copied.

        Raises TierFailed where a tier took not all, DaemonUnavailable, and DeadlineExceeded, after
        which it goes on.
        """
        return self.run(self._checkpoint(timeout))

    def verify(
        self,
        progress: Callable[[VerifyReply], None] | None = None,
        *,
        timeout: float | None = None,
    ) -> VerifyReply:
        """Have all blocks compared with their checksums; what was found, when that is done.

        Bad ones are removed, with what follows them. It takes as long as reading all of them;
        `progress` is told meanwhile how far it has come. Raises DaemonUnavailable, and
        DeadlineExceeded, after which it goes on.
        """
        return self.run(self._verify(progress, timeout))

    def config(self) -> ConfigReply:
        """What the daemon goes by, and where each value comes from. Raises as `status`."""
        return self.run(self._config())

    def reload(self, *, timeout: float | None = None) -> ReloadReply:
        """Have the daemon read its configuration anew; what is another now, and what waits.

        Raises ConfigError, and nothing has changed, where the configuration is not good;
        Unsupported where the daemon has none to read; DaemonUnavailable or DeadlineExceeded.
        """
        return self.run(self._reload(timeout))

    def tree(
        self, namespace: int, tokens: TokenIds = (), *, depth: int = 100, limit: int = 1000
    ) -> TreeReply:
        """The biggest nodes of a namespace's tree, below these tokens. Raises as `status`."""
        return self.run(self._tree(namespace, tokens, depth, limit))

    def explain(self, namespace: int, tokens: TokenIds, *, extras: ExtraItems = ()) -> ExplainReply:
        """Why a match of these tokens ends where it ends. Raises as `status`."""
        return self.run(self._explain(namespace, tokens, extras))

    def drain(self, *, undo: bool = False) -> None:
        """Have kvd take no new sessions, or take them again. Raises as `status`."""
        self.run(self._drain(undo=undo))

    def pin(
        self,
        namespace: int,
        tokens: TokenIds,
        seconds: float,
        *,
        owner: str | None = None,
        extras: ExtraItems = (),
    ) -> PinResult:
        """As `Namespace.pin`, for a namespace that is known by its number."""
        return self.run(self._pin(namespace, tokens, seconds, owner, extras, self.deadline(None)))

    def unpin(self, *, owner: str | None = None, pins: Sequence[int] = ()) -> int:
        """End the owner's pins, those with these numbers or all; how many there were."""
        return self.run(self._unpin(owner, pins))

    def drop(
        self,
        namespace: int,
        tokens: TokenIds = (),
        *,
        from_token: int = 0,
        extras: ExtraItems = (),
    ) -> DropResult:
        """As `Namespace.drop`, for a namespace that is known by its number."""
        return self.run(self._drop_from(namespace, tokens, from_token, extras, self.deadline(None)))

    def sequences(
        self, *, namespace_key: bytes | None = None, sequence: str | None = None, limit: int = 1000
    ) -> SequencesReply:
        """The saved sequences, the oldest first: of a namespace or a name, or all."""
        return self.run(self._sequences(namespace_key, sequence, limit))

    def discard(self, namespace_key: bytes, sequence: str, *, generation: int = 0) -> bool:
        """As `Namespace.discard`, for a namespace that is known by its key."""
        return self.run(self._discard(namespace_key, sequence, generation))

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
            return self.connection.wait(wish.call, wish.deadline)
        return self.connection.await_link(wish.seen, wish.deadline)


class Lease(LeaseBase):
    """A lease of a `Client`, for one thread at a time."""

    _client: Client

    def reserve(self, num_tokens: int, *, timeout: float | None = None) -> None:
        """Have pages for `num_tokens` tokens of the sequence in all, and some ahead.

        Waits its turn within the timeout. Raises OutOfPages, LeaseEnded, DaemonUnavailable.
        """
        self._client.run(self._reserve(num_tokens, timeout))

    def extend(self, *, timeout: float | None = None) -> int:
        """Lease what more of the tokens of a match is in memory now; how many are leased then.

        Waits within the timeout while more is on its way. `pages` then has the new blocks behind
        those that were matched, and behind both what was reserved: other tokens' pages than before,
        so nothing may have been written to them. Raises BadRequest where something was committed,
        or copied for an exact tail, PagesInUse while a writable view lives, LeaseEnded,
        DaemonUnavailable, DeadlineExceeded; after the last, extend again.
        """
        return self._client.run(self._extend(timeout))

    def commit(
        self, tokens: TokenIds, *, extras: ExtraItems = (), timeout: float | None = None
    ) -> int:
        """Make the next blocks matchable; how many tokens of the sequence are committed now.

        `tokens` are those that follow `num_committed`; the full blocks among them, every row of
        which must have been written, are committed and never written again. A block that somebody
        else committed meanwhile stays, and its page stands in `pages` from then on; views of this
        lease's own copy stay good until the lease ends. Where pages lie on a device, its work is
        waited for before. `extras` as in `Namespace.match`, with positions in the sequence. Raises
        PagesInUse, LeaseEnded, DaemonUnavailable, DeadlineExceeded; after the last, commit again.
        Raises Dropped where blocks before these were dropped: what is written stays this lease's
        alone.
        """
        return self._client.run(self._commit(tokens, extras, timeout))

    def save(
        self,
        sequence: str,
        tokens: TokenIds,
        state: bytes = b"",
        *,
        generation: int = 0,
        extras: ExtraItems = (),
        timeout: float | None = None,
    ) -> int:
        """Keep a sequence by its name, so that any process goes on with it by `Namespace.resume`.

        `tokens` are all of it, every row of which is written; what has none yet (the token that was
        just sampled) belongs to `state`, 64 KiB of your own. Blocks that are not committed, or are
        evicted later, will have to be computed again, and so has what is behind the last whole
        block of an opaque layout. `generation` is what the last save or resume
        gave, and 0 for a new sequence; the answer is for the next save. When it returns, the
        sequence survives this process and the daemon. After DeadlineExceeded or DaemonUnavailable
        it may be saved; saving again does no harm.

        Raises SequenceTaken where another client saved or resumed it, UnknownSequence where it was
        discarded, TierFailed where there is no room for it, LimitExceeded, LeaseEnded,
        DaemonUnavailable, DeadlineExceeded.
        """
        return self._client.run(self._save(sequence, tokens, state, generation, extras, timeout))

    def fork(self, *, reserve_tokens: int = 0, timeout: float | None = None) -> Self:
        """Another lease of the committed blocks, with pages behind them for so many tokens more.

        Rows of a block that is not full are copied by `copy_rows`. Raises LeaseEnded,
        DaemonUnavailable, DeadlineExceeded.
        """
        fork = type(self)(self._namespace)
        self._client.run(self._fork(fork, reserve_tokens, timeout))
        return fork

    def replace(
        self,
        tokens: TokenIds,
        *,
        reserve_tokens: int = 0,
        exact_tail: bool = False,
        extras: ExtraItems = (),
        timeout: float | None = None,
    ) -> None:
        """Release what this lease stands for, and match anew. Raises PagesInUse, and as `match`."""
        match = self._namespace._match(self, tokens, reserve_tokens, exact_tail, extras, timeout)
        self._client.run(self._replace(match))


class Namespace(NamespaceBase):
    """The KV of one model for one client; made by `Client.open`."""

    _client: Client

    @property
    def client(self) -> Client:
        return self._client

    def match(
        self,
        tokens: TokenIds,
        *,
        reserve_tokens: int = 0,
        exact_tail: bool = False,
        extras: ExtraItems = (),
        timeout: float | None = None,
    ) -> Lease:
        """Lease the longest cached prefix of `tokens`, with pages for `reserve_tokens` tokens more.

        An engine computes at least one token itself, so it matches `prompt[:-1]`. Pages that could
        not be had are said in the lease's `shortage`. What only stores have is brought to memory
        within the timeout; what is still on its way then is said in `pending_tokens`. Without a
        daemon the lease is a miss, whose `is_open` is False.

        With `exact_tail` the match is exact to the token: rows of a block that agrees only in its
        first tokens are copied into a page of the lease's own, and `num_tokens` counts them, while
        `num_committed` is of whole blocks. `extras` are `(position, 32 bytes)`, what else
        identifies a position (a digest of the image there), for namespaces opened with them.
        Raises BadRequest, LimitExceeded, and Unsupported for an exact tail of an opaque layout.
        """
        lease = Lease(self)
        self._client.run(self._match(lease, tokens, reserve_tokens, exact_tail, extras, timeout))
        return lease

    def prefetch(
        self, tokens: TokenIds, *, extras: ExtraItems = (), timeout: float | None = None
    ) -> None:
        """Have what stores hold of these tokens brought to memory, in the background.

        Returns when it has begun. It is a wish: without a daemon, or where very many are on their
        way, nothing comes of it. Raises BadRequest, LimitExceeded.
        """
        self._client.run(self._prefetch(tokens, extras, timeout))

    def pin(
        self,
        tokens: TokenIds,
        seconds: float,
        *,
        owner: str | None = None,
        extras: ExtraItems = (),
        timeout: float | None = None,
    ) -> PinResult:
        """Keep the resident prefix of these tokens for so long, whatever else goes.

        The pin belongs to `owner`, which is the client's name if not given, and outlives the
        client; the same owner's pin of the same tokens is renewed. Raises LimitExceeded,
        DaemonUnavailable, DeadlineExceeded.
        """
        return self._client.run(self._pin(tokens, seconds, owner, extras, timeout))

    def drop(
        self,
        tokens: TokenIds = (),
        *,
        from_token: int = 0,
        extras: ExtraItems = (),
        timeout: float | None = None,
    ) -> DropResult:
        """Remove the blocks of these tokens from `from_token` on, and all that follows them.

        Without tokens, all of the namespace. Leases keep what they have to themselves; what was
        computed before is not committed after. When it returns no store has any of it, whatever
        happens then. Raises TierFailed where that cannot be said: nobody finds it any more, and the
        store forgets it when it works again. Raises DaemonUnavailable, DeadlineExceeded.
        """
        return self._client.run(self._drop(tokens, from_token, extras, timeout))

    def resume(
        self, sequence: str, *, reserve_tokens: int = 0, timeout: float | None = None
    ) -> Resumed[Lease]:
        """Go on with a saved sequence; who saved it before can save it no more.

        Its lease has what is left of its KV, that of `lease.num_tokens` tokens, and pages behind
        for its tail and `reserve_tokens` more. Raises UnknownSequence, DaemonUnavailable,
        DeadlineExceeded; after the last, resume again. Raises BadRequest or LimitExceeded where the
        namespace cannot be opened, TierFailed where there is no room: who saved it before has it
        still.
        """
        return self._client.run(self._resume(Lease(self), sequence, reserve_tokens, timeout))

    def sequences(self, limit: int = 1000) -> SequencesReply:
        """The saved sequences of this namespace, the oldest first."""
        return self._client.run(self._client._sequences(self._key, None, limit))

    def discard(self, sequence: str, *, generation: int = 0) -> bool:
        """Forget a sequence; whether there was one.

        With a generation, raises SequenceTaken where it is of another.
        """
        return self._client.run(self._client._discard(self._key, sequence, generation))
