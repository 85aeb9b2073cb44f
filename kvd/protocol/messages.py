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

from kvd.protocol.keys import KEY_BYTES, Identity
from kvd.protocol.layout import Layout
from kvd.protocol.units import MAX_INTEGER

PROTOCOL_VERSION = 2
MIN_PROTOCOL_VERSION = 1
NO_REPLY = 0

# What one load or store moves at most, unless a single slice of a page is larger. Measured: pieces
# of 2 MiB cost 4.5 times a memcpy, frames of 32 MiB 8 to 22 times.
MAX_PIECE_BYTES = 2 << 20
# What else identifies a position, beside its token: a digest of the image there, say.
EXTRA_BYTES = 32
# What a client may keep of its own beside a sequence: its sampler's state, say.
MAX_STATE_BYTES = 64 << 10
# Of a tree so many nodes are listed at most, and so many levels.
MAX_TREE_NODES = 1000
MAX_TREE_DEPTH = 100

Unsigned: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
LeaseId: TypeAlias = Unsigned
SessionName: TypeAlias = Annotated[str, Meta(max_length=64)]
Owner: TypeAlias = Annotated[str, Meta(max_length=64)]
SequenceId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
Saver: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
NamespaceKey: TypeAlias = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
PinSeconds: TypeAlias = Annotated[float, Meta(gt=0, le=365 * 86_400)]
Extra: TypeAlias = Annotated[bytes, Meta(min_length=EXTRA_BYTES, max_length=EXTRA_BYTES)]
Extras: TypeAlias = tuple[tuple[Unsigned, Extra], ...]


class Run(Struct, frozen=True, array_like=True):
    """Consecutive pages: `first` to `first + count - 1`."""

    first: Unsigned
    count: Unsigned


Runs: TypeAlias = Annotated[tuple[Run, ...], Meta(max_length=1 << 15)]


class Failure(Struct, tag="failure", frozen=True, omit_defaults=True):
    """What became of an item that could not be done: an error's code, message and details."""

    code: str
    message: str
    details: dict[str, Any] = {}


# --- requests ---


class Request(Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    """The envelope of every request.

    `id` comes back in the reply; NO_REPLY asks for none where the answer would only be "done".
    `deadline_ns` is absolute on the machine's CLOCK_MONOTONIC, 0 for none; over TCP, where clocks
    differ, it counts from the receipt. `epoch` is the daemon start the client speaks to, 0 before
    it knows. `trace` is a W3C traceparent or empty.
    """

    id: Unsigned
    epoch: Unsigned = 0
    deadline_ns: Unsigned = 0
    trace: Annotated[str, Meta(max_length=128)] = ""

    @property
    def verb(self) -> str:
        tag = self.__struct_config__.tag
        assert isinstance(tag, str)
        return tag


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

    With `extras`, blocks are told apart by what match and commit say of their positions, beside
    their tokens; this is another namespace than the one without.
    Room for groups of namespaces and for namespaces keyed by the client: refused when used.
    """

    identity: Identity
    layout: Layout
    salt: Annotated[str, Meta(max_length=1024)] = ""
    maps: bool = True
    extras: bool = False
    group: Annotated[str, Meta(max_length=1024)] = ""
    keyed: bool = False


class CloseRequest(Request, frozen=True, tag="close"):
    """Close a namespace: its leases are released and its arena will not be mapped any more."""

    namespace: Unsigned


class MatchItem(Struct, frozen=True, omit_defaults=True):
    """Lease the longest resident prefix of the next `num_tokens` tokens as `lease`.

    `reserve` asks for that many pages behind it, and `ahead` more that need no waiting. With
    `exact_tail`, a block that agrees only in its first tokens is leased too, until the lease's next
    commit: the client copies those rows into a page of its own. `extras` say what else identifies
    a position: a digest of the image there, say.
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


class ForkItem(Struct, frozen=True, omit_defaults=True):
    """Lease the committed blocks of the lease `source` a second time, as `lease`."""

    lease: LeaseId
    source: LeaseId
    reserve: Unsigned = 0
    ahead: Unsigned = 0


class ForkRequest(Request, frozen=True, tag="fork"):
    """Answered as a match is."""

    items: tuple[ForkItem, ...]


class ExtendItem(Struct, frozen=True, omit_defaults=True):
    """Lease what came to memory since a match of the next `num_tokens` tokens as `lease`.

    The lease must not have committed anything. Waits, within the deadline, while more is on its
    way.
    """

    lease: LeaseId
    num_tokens: Unsigned
    extras: Extras = ()


class ExtendRequest(Request, frozen=True, tag="extend"):
    """Answered as a match is."""

    items: tuple[ExtendItem, ...]


class PrefetchItem(Struct, frozen=True, omit_defaults=True):
    """Bring to memory what stores have of the next `num_tokens` tokens; nobody waits for it."""

    namespace: Unsigned
    num_tokens: Unsigned
    extras: Extras = ()


class PrefetchRequest(Request, frozen=True, tag="prefetch"):
    """Answered by done when it has begun."""

    items: tuple[PrefetchItem, ...]


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
    """End leases; no writable view of their pages remains. An unknown id is remembered as ended.

    With `keep_blocks`, the leases stay, with so many of their blocks at most and no other page.
    """

    leases: tuple[LeaseId, ...]
    keep_blocks: Unsigned = 0


class LoadRequest(Request, frozen=True, tag="load"):
    """Send the bytes of a lease's blocks, for a client that does not map: one piece of them.

    Of each page the slices (layer by layer, in each plane by plane) from `first_slice` on.
    """

    lease: LeaseId
    pages: Runs
    first_slice: Unsigned
    num_slices: Unsigned


class StoreRequest(Request, frozen=True, tag="store"):
    """Write a raw frame of bytes into pages that the lease reserved; they lie as load sends them.

    Slice by slice, and within each page by page; page by page where those are contiguous.
    """

    lease: LeaseId
    pages: Runs
    first_slice: Unsigned
    num_slices: Unsigned


class PinItem(Struct, frozen=True, omit_defaults=True):
    """Keep the resident prefix of the next `num_tokens` tokens for so long, whatever else goes.

    A pin belongs to `owner`, a name, and not to the session: it outlives it. The same owner's pin
    of the same tokens is renewed.
    """

    namespace: Unsigned
    num_tokens: Unsigned
    seconds: PinSeconds
    owner: Owner = ""
    extras: Extras = ()


class PinRequest(Request, frozen=True, tag="pin"):
    items: tuple[PinItem, ...]


class UnpinRequest(Request, frozen=True, tag="unpin"):
    """End an owner's pins: those named, or all of them."""

    owner: Owner = ""
    pins: tuple[Unsigned, ...] = ()


class DropItem(Struct, frozen=True, omit_defaults=True):
    """Remove blocks everywhere: of the next tokens' path those from `from_block` on.

    With them goes all that follows them; without tokens, all blocks of the namespace.
    """

    namespace: Unsigned
    num_tokens: Unsigned = 0
    from_block: Unsigned = 0
    extras: Extras = ()


class DropRequest(Request, frozen=True, tag="drop"):
    items: tuple[DropItem, ...]


class SaveRequest(Request, frozen=True, tag="save"):
    """Keep a sequence of the lease's namespace: its tokens, all of them, the saver's own state.

    `tail_page`, which the lease reserved, has the rows of the tokens behind the last whole block.
    `generation` is that of the saver's last save or resume, 0 for a new sequence. `saver` is a
    number that the client chose at random: its first save, said again, is the same save.
    """

    sequence: SequenceId
    lease: LeaseId
    num_tokens: Unsigned
    saver: Saver
    generation: Unsigned = 0
    tail_page: Unsigned | None = None
    extras: Extras = ()
    state: Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)] = b""


class ResumeRequest(Request, frozen=True, tag="resume"):
    """Take a sequence over: who saved it before can save it no more."""

    namespace_key: NamespaceKey
    sequence: SequenceId


class SequencesRequest(Request, frozen=True, tag="sequences"):
    """The saved sequences, the oldest `limit`: all, of a namespace, or of one name."""

    namespace_key: NamespaceKey | None = None
    sequence: SequenceId | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1000


class DiscardRequest(Request, frozen=True, tag="discard"):
    """Forget a saved sequence; with `generation`, only if it is still that."""

    namespace_key: NamespaceKey
    sequence: SequenceId
    generation: Unsigned = 0


class LeasesRequest(Request, frozen=True, tag="leases"):
    """Who holds what: leases and pins, the oldest `limit` of each."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 1000


class StatusRequest(Request, frozen=True, tag="status"):
    """How the daemon stands."""


class CheckpointRequest(Request, frozen=True, tag="checkpoint"):
    """Copy down all that a tier that survives shall have and has not; answered when it is synced.

    It goes on when its deadline is over. Those that ask meanwhile are answered by the next one.
    """


class VerifyRequest(Request, frozen=True, tag="verify"):
    """Compare all blocks with their checksums; answered at once by how far that has come.

    To `start`, a round begins, unless one is under way.
    """

    start: bool = False


class ConfigRequest(Request, frozen=True, tag="config"):
    """What the daemon goes by."""


class ReloadRequest(Request, frozen=True, tag="reload"):
    """Read the configuration anew and go by it; refused as a whole where it is not good."""


class TreeRequest(Request, frozen=True, tag="tree"):
    """The nodes of a namespace's tree below these tokens, or below its root.

    Again and again the biggest of those whose parent was taken: `depth` levels of them, and `limit`
    in all, at most.
    """

    namespace: Unsigned
    num_tokens: Unsigned = 0
    depth: Annotated[int, Meta(ge=1, le=MAX_TREE_DEPTH)] = MAX_TREE_DEPTH
    limit: Annotated[int, Meta(ge=1, le=MAX_TREE_NODES)] = MAX_TREE_NODES


class ExplainRequest(Request, frozen=True, tag="explain"):
    """Why a match of these tokens ends where it ends; nothing is leased, and nothing touched."""

    namespace: Unsigned
    num_tokens: Unsigned
    extras: Extras = ()


class DrainRequest(Request, frozen=True, tag="drain"):
    """Take no new sessions; those that there are go on, and may attach anew. Or, to `undo`, do."""

    undo: bool = False


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
    | ForkRequest
    | ExtendRequest
    | PrefetchRequest
    | LoadRequest
    | StoreRequest
    | PinRequest
    | UnpinRequest
    | DropRequest
    | LeasesRequest
    | SaveRequest
    | ResumeRequest
    | SequencesRequest
    | DiscardRequest
    | CheckpointRequest
    | VerifyRequest
    | ConfigRequest
    | ReloadRequest
    | TreeRequest
    | ExplainRequest
    | DrainRequest
)


# --- replies ---


class Reply(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The envelope of every reply: the request's id and the daemon's epoch."""

    id: int
    epoch: int


class ErrorReply(Reply, frozen=True, tag="error"):
    code: str
    message: str
    details: dict[str, Any] = {}


class DoneReply(Reply, frozen=True, tag="done"):
    """The answer to heartbeat, detach, close, abort, release, store, prefetch and drain.

    It is so now.
    """


class AttachReply(Reply, frozen=True, tag="attach"):
    """A session. Who maps takes a shared lock on `lock_path` first and keeps it.

    `session` is the client's secret: by it the client names this session when it attaches again.
    """

    version: int
    session: str
    heartbeat_seconds: Annotated[float, Meta(gt=0, le=86_400)]
    max_request_bytes: int
    header_path: str
    lock_path: str


class DeviceMemory(Struct, frozen=True, omit_defaults=True):
    """By what a process of the same machine imports memory of a device.

    `device` is the UUID of a GPU, and the rest are the fields of a CUDA IPC handle as torch has
    them; or it is "cpu", for memory that is the arena's file.
    """

    device: str
    handle: bytes = b""
    size_bytes: int = 0
    offset_bytes: int = 0
    counter_handle: bytes = b""
    counter_offset: int = 0
    event_handle: bytes = b""
    event_sync_required: bool = False


class OpenReply(Reply, frozen=True, tag="open"):
    """A namespace and the arena to map: the file, or what lies on a `device`."""

    namespace: int
    arena_path: str
    num_pages: int
    device: DeviceMemory | None = None


class Shortage(Struct, frozen=True, omit_defaults=True):
    """Why pages could not be had: how the pages of the arena stand, and who holds most of them.

    `max_pages` is what the namespace may have by its quota, or the session without committing,
    where that is what falls short; `holders` are sessions with the pages that their leases hold.
    """

    num_wanted: int
    num_free: int
    num_locked: int
    num_reserved: int
    num_quarantined: int
    num_pages: int
    max_pages: int = 0
    holders: dict[str, int] = {}


class Tail(Struct, frozen=True):
    """A block that agrees with the prompt in its first `num_tokens` tokens only."""

    page: int
    num_tokens: int


class MatchResult(Struct, tag="match", frozen=True, omit_defaults=True):
    """A lease: its first `num_tokens` tokens are resident in `runs`.

    `reserved` are the pages behind them, or `shortage` says why there are none. The lease holds
    while `generation` stands in its `slot` of the shared header. `tokens_by_tier` says where its
    tokens were when they were asked for; `pending_tokens` behind them are still on their way.
    """

    num_tokens: int
    runs: Runs
    slot: int
    generation: int
    reserved: Runs = ()
    shortage: Shortage | None = None
    tokens_by_tier: dict[str, int] = {}
    pending_tokens: int = 0
    tail: Tail | None = None


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


class LoadReply(Reply, frozen=True, tag="loaded"):
    """Behind it one raw frame for each slice and, within it, each run of the request's pages."""


class PinResult(Struct, tag="pin", frozen=True):
    """The pin's number, and how much of the tokens was resident and is pinned."""

    pin: int
    num_tokens: int
    num_bytes: int


class PinReply(Reply, frozen=True, tag="pinned"):
    results: tuple[PinResult | Failure, ...]


class UnpinReply(Reply, frozen=True, tag="unpinned"):
    num_pins: int


class DropResult(Struct, tag="drop", frozen=True):
    """Blocks that left the index, by tier; `num_detached` of them are still held by leases."""

    blocks_by_tier: dict[str, int]
    num_detached: int


class DropReply(Reply, frozen=True, tag="dropped"):
    results: tuple[DropResult | Failure, ...]


class LeaseStatus(Struct, frozen=True):
    """One lease. `num_detached` of its blocks were dropped under it."""

    session: str
    client: str
    lease: int
    namespace: int
    num_blocks: int
    num_reserved: int
    num_detached: int
    age_seconds: float


class PinStatus(Struct, frozen=True):
    """One pin, and how long it still holds."""

    pin: int
    owner: str
    namespace: int
    num_tokens: int
    num_bytes: int
    left_seconds: float


class LeasesReply(Reply, frozen=True, tag="leases"):
    """`num_leases` and `num_pins` there are; the oldest are listed."""

    leases: tuple[LeaseStatus, ...]
    pins: tuple[PinStatus, ...]
    num_leases: int
    num_pins: int


class SaveReply(Reply, frozen=True, tag="saved"):
    """It is kept, whatever becomes of the daemon; the next save names this generation."""

    generation: int


class ResumeReply(Reply, frozen=True, tag="resumed"):
    """What was saved. Behind it two raw frames: its tokens, and the rows of its tail.

    The rows are `[layers, planes, tokens, heads, head_size]`; there may be none.
    """

    generation: int
    extras: Extras = ()
    state: bytes = b""


class SequenceStatus(Struct, frozen=True, omit_defaults=True):
    """One saved sequence; `num_bytes` are its tokens, its tail and its state."""

    sequence: str
    namespace_key: bytes
    model: str
    revision: str
    salt: str
    num_tokens: int
    num_bytes: int
    generation: int
    age_seconds: float


class SequencesReply(Reply, frozen=True, tag="sequences"):
    """Of those that were asked for there are `num_sequences`; the oldest are listed."""

    sequences: tuple[SequenceStatus, ...]
    num_sequences: int


class DiscardReply(Reply, frozen=True, tag="discarded"):
    """Whether there was such a sequence; there is none now."""

    was_there: bool


class TierStatus(Struct, frozen=True):
    """One tier, of kind "memory" or "store": bytes, and its pages by state over all layouts.

    `used_bytes` are really taken, `usable_bytes` what blocks may take. `trouble` says in words what
    is wrong; `waiting_bytes` are blocks in memory that a store shall have and has not.
    """

    name: str
    capacity_bytes: int
    backed_bytes: int
    pages: dict[str, int]
    kind: str = "memory"
    num_blocks: int = 0
    used_bytes: int = 0
    usable_bytes: int = 0
    survives: bool = False
    trouble: str = ""
    write_failures: int = 0
    read_failures: int = 0
    waiting_bytes: int = 0


class NamespaceStatus(Struct, frozen=True, omit_defaults=True):
    """One namespace. `num_pages` are all that it holds: blocks, and pages that its leases have.

    `guaranteed_bytes` and `max_bytes` are its quota, 0 where it has none.
    """

    namespace: int
    model: str
    revision: str
    salt: str
    block_size: int
    page_bytes: int
    num_blocks: int
    num_nodes: int
    adapter: str = ""
    shard_rank: int = 0
    shard_size: int = 1
    positions: str = ""
    extras: bool = False
    layout: Layout | None = None
    num_pages: int = 0
    guaranteed_bytes: int = 0
    max_bytes: int = 0
    num_leases: int = 0
    num_sessions: int = 0
    generation: int = 0


class SessionStatus(Struct, frozen=True, omit_defaults=True):
    """One session; `stale_seconds` since its last message. Only one that maps outlives silence.

    `request_p50_us` and `request_p99_us`: how long its last requests took the daemon, from when it
    began to read until the answer was sent.
    """

    session: str
    client: str
    pid: int
    maps: bool
    stale_seconds: float
    num_leases: int
    num_reserved: int
    num_requests: int = 0
    request_p50_us: int = 0
    request_p99_us: int = 0


class ClientStatus(Struct, frozen=True):
    """A client that may come by TCP with its key, and how many sessions it has."""

    name: str
    key: str
    verbs: tuple[str, ...]
    num_sessions: int


class EventStatus(Struct, frozen=True):
    """Where events are published and replayed, if they are; the number of the next batch."""

    endpoint: str
    replay_endpoint: str
    next_seq: int


class StatusReply(Reply, frozen=True, tag="status"):
    """How it stands; while `is_draining`, it takes no new sessions."""

    version: str
    pid: int
    endpoint: str
    uptime_seconds: float
    tiers: tuple[TierStatus, ...]
    namespaces: tuple[NamespaceStatus, ...]
    sessions: tuple[SessionStatus, ...]
    counters: dict[str, int]
    is_draining: bool = False
    clients: tuple[ClientStatus, ...] = ()
    events: EventStatus | None = None


class CheckpointReply(Reply, frozen=True, tag="checkpointed"):
    """So many blocks were copied for it; what was there before, survives too."""

    num_blocks: int


class TierCheck(Struct, frozen=True):
    """Of a tier's blocks when the round began: how many were looked at, bad and not there.

    `trouble` says in words why it was left before its end.
    """

    name: str
    num_blocks: int
    num_checked: int = 0
    num_bad: int = 0
    num_missing: int = 0
    trouble: str = ""


class VerifyReply(Reply, frozen=True, tag="verified"):
    """How far the last round has come; no tiers where there was none."""

    tiers: tuple[TierCheck, ...]
    is_done: bool


class ConfigValue(Struct, frozen=True):
    """One key: what it is, and where that comes from.

    That is "default", "command line", or begins with "file" or "environment" and names it. What
    is secret has another value.
    """

    key: str
    value: Any
    origin: str


class ConfigReply(Reply, frozen=True, tag="config"):
    values: tuple[ConfigValue, ...]


class ConfigChange(Struct, frozen=True):
    key: str
    before: Any
    after: Any


class ReloadReply(Reply, frozen=True, tag="reloaded"):
    """What is another than before; and what would be, were the daemon started anew."""

    changed: tuple[ConfigChange, ...]
    needs_restart: tuple[ConfigChange, ...]


class TreeNode(Struct, frozen=True, omit_defaults=True):
    """A run of blocks, without a branch, that are in the same `tiers`.

    It follows the node at place `parent` of the list, or what was asked for (-1). `tokens` are its
    first ids as little-endian uint32. `hits` are the matches that went through it, as far as nodes
    that were joined or cut in two can tell; `age_touches` leases ended since its own last one did.
    """

    parent: int
    num_blocks: int
    num_children: int
    tiers: tuple[str, ...]
    tokens: bytes
    hits: int = 0
    age_touches: int = 0
    is_locked: bool = False


class TreeReply(Reply, frozen=True, tag="tree"):
    """Nodes, parents before their children; the whole tree has `num_nodes`.

    They lie below `num_tokens` of what was asked for: as much as is there.
    """

    nodes: tuple[TreeNode, ...]
    num_nodes: int
    num_tokens: int
    block_size: int
    page_bytes: int


class Stretch(Struct, frozen=True):
    """Consecutive tokens whose blocks are in the same tiers."""

    num_tokens: int
    tiers: tuple[str, ...]


class NearMiss(Struct, frozen=True):
    """Another namespace, in which more of the same tokens are there."""

    namespace: int
    num_tokens: int


class ExplainReply(Reply, frozen=True, tag="explained"):
    """The tokens' whole blocks that are there, from the first on, as `stretches`.

    Of the block behind them `num_common_tokens` agree with one that is there; it and those that
    follow, `num_evicted_tokens` in all, were evicted not long ago, by this start of the daemon.
    `near` are other namespaces, the best first.
    """

    stretches: tuple[Stretch, ...]
    num_common_tokens: int
    num_evicted_tokens: int
    block_size: int
    near: tuple[NearMiss, ...] = ()


AnyReply: TypeAlias = (
    ErrorReply
    | DoneReply
    | AttachReply
    | OpenReply
    | MatchReply
    | ReserveReply
    | CommitReply
    | StatusReply
    | LoadReply
    | PinReply
    | UnpinReply
    | DropReply
    | LeasesReply
    | SaveReply
    | ResumeReply
    | SequencesReply
    | DiscardReply
    | CheckpointReply
    | VerifyReply
    | ConfigReply
    | ReloadReply
    | TreeReply
    | ExplainReply
)
