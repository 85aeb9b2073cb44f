"""Every request, reply and their parts; PROTOCOL_VERSION.

One tagged union each way. A new field has a default and no field changes its type, so that both
ends can be upgraded one after the other. Every verb takes a batch: `items` of a request and
`results` of its reply agree by position, and a failed item is a `Failure` in its place.

Token ids never stand inside a message: those of all items of a request travel, one after the
other, as one raw frame of little-endian uint32 behind it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from kvd.protocol.keys import Identity
from kvd.protocol.layout import Layout

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
NO_REPLY = 0

Unsigned: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
LeaseId: TypeAlias = Unsigned
SessionName: TypeAlias = Annotated[str, Meta(max_length=64)]
Extras: TypeAlias = tuple[
    tuple[Unsigned, Annotated[bytes, Meta(min_length=32, max_length=32)]], ...
]


class Run(Struct, frozen=True, array_like=True):
    """Consecutive pages: `first` to `first + count - 1`."""

    first: Unsigned
    count: Unsigned


Runs: TypeAlias = tuple[Run, ...]


class Failure(Struct, tag="failure", frozen=True, omit_defaults=True):
    """What became of an item that could not be done: an error's code, message and details."""

    code: str
    message: str
    details: dict[str, Any] = {}


# --- requests --------------------------------------------------------------------------------


class Request(Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    """The envelope of every request.

    `id` comes back in the reply; NO_REPLY asks for none where the answer would only be "done".
    `deadline_ns` is absolute on the machine's CLOCK_MONOTONIC, 0 for none. `epoch` is the daemon
    start the client speaks to, 0 before it knows. `trace` is a W3C traceparent or empty.
    """

    id: Unsigned
    epoch: Unsigned = 0
    deadline_ns: Unsigned = 0
    trace: Annotated[str, Meta(max_length=128)] = ""


class AttachRequest(Request, frozen=True, tag="attach"):
    """Open a session. `previous` names the session that this client had before."""

    version: int
    min_version: int
    client: Annotated[str, Meta(max_length=256)] = ""
    pid: Unsigned = 0
    previous: SessionName = ""


class HeartbeatRequest(Request, frozen=True, tag="heartbeat"):
    """The session lives, with these leases; what it holds beside them is released."""

    leases: tuple[LeaseId, ...]


class DetachRequest(Request, frozen=True, tag="detach"):
    """End the session; its leases end with it."""


class OpenRequest(Request, frozen=True, tag="open"):
    """Open a namespace. `maps` says that the client will map its arena.

    Room for groups of namespaces and for namespaces keyed by the client: refused when used.
    """

    identity: Identity
    layout: Layout
    salt: Annotated[str, Meta(max_length=1024)] = ""
    maps: bool = True
    group: Annotated[str, Meta(max_length=1024)] = ""
    keyed: bool = False


class CloseRequest(Request, frozen=True, tag="close"):
    """Close a namespace: its leases are released and its arena will not be mapped any more."""

    namespace: Unsigned


class MatchItem(Struct, frozen=True, omit_defaults=True):
    """Lease the longest resident prefix of the next `num_tokens` tokens as `lease`.

    `reserve` asks for that many pages behind it, and `ahead` more that need no waiting. Room for
    extras and the exact tail: refused.
    """

    namespace: Unsigned
    lease: LeaseId
    num_tokens: Unsigned
    reserve: Unsigned = 0
    ahead: Unsigned = 0
    exact_tail: bool = False
    extras: Extras = ()


class MatchRequest(Request, frozen=True, tag="match"):
    items: tuple[MatchItem, ...]


class ReserveItem(Struct, frozen=True, omit_defaults=True):
    """Pages for a lease, by place: it knows of `start` pages so far and wants `stop` in all.

    `ahead` are as many more, if nobody need wait for them.
    """

    lease: LeaseId
    start: Unsigned
    stop: Unsigned
    ahead: Unsigned = 0


class ReserveRequest(Request, frozen=True, tag="reserve"):
    items: tuple[ReserveItem, ...]


class CommitItem(Struct, frozen=True, omit_defaults=True):
    """Make blocks matchable: those from `first_block` on, which lie in `pages`.

    The next `num_tokens` tokens (whole blocks) are theirs.
    """

    lease: LeaseId
    first_block: Unsigned
    pages: Runs
    num_tokens: Unsigned
    extras: Extras = ()


class CommitRequest(Request, frozen=True, tag="commit"):
    items: tuple[CommitItem, ...]


class AbortRequest(Request, frozen=True, tag="abort"):
    """Give back the uncommitted pages of leases; the leases stay."""

    leases: tuple[LeaseId, ...]


class ReleaseRequest(Request, frozen=True, tag="release"):
    """End leases; no writable view of their pages remains. An unknown id is remembered as ended."""

    leases: tuple[LeaseId, ...]


class StatusRequest(Request, frozen=True, tag="status"):
    """How the daemon stands."""


AnyRequest: TypeAlias = (
    AttachRequest
    | HeartbeatRequest
    | DetachRequest
    | OpenRequest
    | CloseRequest
    | MatchRequest
    | ReserveRequest
    | CommitRequest
    | AbortRequest
    | ReleaseRequest
    | StatusRequest
)


# --- replies ---------------------------------------------------------------------------------


class Reply(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The envelope of every reply: the request's id and the daemon's epoch."""

    id: int
    epoch: int


class ErrorReply(Reply, frozen=True, tag="error"):
    code: str
    message: str
    details: dict[str, Any] = {}


class DoneReply(Reply, frozen=True, tag="done"):
    """The answer to heartbeat, detach, close, abort and release: it is so now."""


class AttachReply(Reply, frozen=True, tag="attach"):
    """A session. Who maps takes a shared lock on `lock_path` first and keeps it."""

    version: int
    session: str
    heartbeat_seconds: float
    max_request_bytes: int
    header_path: str
    lock_path: str


class OpenReply(Reply, frozen=True, tag="open"):
    """A namespace and the arena to map."""

    namespace: int
    arena_path: str
    num_pages: int


class Shortage(Struct, frozen=True):
    """Why pages could not be had: how the pages of the arena stand."""

    num_wanted: int
    num_free: int
    num_locked: int
    num_reserved: int
    num_quarantined: int
    num_pages: int


class MatchResult(Struct, tag="match", frozen=True, omit_defaults=True):
    """A lease: its first `num_tokens` tokens are resident in `runs`.

    `reserved` are the pages behind them, or `shortage` says why there are none. The lease holds
    while `generation` stands in its `slot` of the shared header.
    """

    num_tokens: int
    runs: Runs
    slot: int
    generation: int
    reserved: Runs = ()
    shortage: Shortage | None = None
    tokens_by_tier: dict[str, int] = {}


class MatchReply(Reply, frozen=True, tag="matched"):
    results: tuple[MatchResult | Failure, ...]


class ReserveResult(Struct, tag="reserve", frozen=True):
    runs: Runs


class ReserveReply(Reply, frozen=True, tag="reserved"):
    results: tuple[ReserveResult | Failure, ...]


class CommitResult(Struct, tag="commit", frozen=True):
    """The pages that now hold the blocks; `num_duplicates` of them were there before."""

    runs: Runs
    num_duplicates: int


class CommitReply(Reply, frozen=True, tag="committed"):
    results: tuple[CommitResult | Failure, ...]


class TierStatus(Struct, frozen=True):
    """One tier: bytes, and its pages by state over all layouts."""

    name: str
    capacity_bytes: int
    backed_bytes: int
    pages: dict[str, int]


class NamespaceStatus(Struct, frozen=True):
    namespace: int
    model: str
    revision: str
    salt: str
    block_size: int
    page_bytes: int
    num_blocks: int
    num_nodes: int


class SessionStatus(Struct, frozen=True):
    """One session; `stale_seconds` since its last message. Only one that maps outlives silence."""

    session: str
    client: str
    pid: int
    maps: bool
    stale_seconds: float
    num_leases: int
    num_reserved: int


class StatusReply(Reply, frozen=True, tag="status"):
    version: str
    pid: int
    endpoint: str
    uptime_seconds: float
    tiers: tuple[TierStatus, ...]
    namespaces: tuple[NamespaceStatus, ...]
    sessions: tuple[SessionStatus, ...]
    counters: dict[str, int]


AnyReply: TypeAlias = (
    ErrorReply
    | DoneReply
    | AttachReply
    | OpenReply
    | MatchReply
    | ReserveReply
    | CommitReply
    | StatusReply
)
