"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvd_client import (
    Layout,
    LeasesReply,
    SequencesReply,
    StatusReply,
    TierStatus,
    VerifyReply,
    format_bytes,
)
from kvd_ctl.notation import format_duration

STDOUT, STDERR = 1, 2  # which may be closed
# A table that is piped is as wide as what it has to say.
PIPED_WIDTH = 10_000
REVISION_CHARACTERS = 12
# Of a namespace's key as many as tell it from others.
KEY_CHARACTERS = 12
# On a narrow terminal these columns are folded, and no other: what people chose can be long.
FOLDED = {
    "client",
    "owner",
    "sequence",
    "model",
    "salt",
    "adapter",
    "positions",
    "layout",
    "trouble",
    "value",
    "before",
    "after",
    "begins with",
}
# But not to nothing.
FOLDED_WIDTH = 6

# What is printed are names of others: nothing in them is markup.
console = Console(
    width=None if os.isatty(STDOUT) else PIPED_WIDTH, markup=False, emoji=False, highlight=False
)


def status(reply: StatusReply) -> None:
    """The daemon, its pages by state, hits, and the counters that tell of trouble."""
    console.print(
        f"kvd {reply.version}, pid {reply.pid}, up {format_duration(reply.uptime_seconds)}, "
        f"{reply.endpoint}"
    )
    if reply.is_draining:
        console.print("draining: it takes no new sessions")
    for tier in reply.tiers:
        _tier(tier)
    num_leases = sum(session.num_leases for session in reply.sessions)
    console.print(
        f"namespaces: {len(reply.namespaces)}; sessions: {len(reply.sessions)}; "
        f"leases: {num_leases}"
    )
    _counters(Counter(reply.counters))


def _tier(tier: TierStatus) -> None:
    used, capacity = format_bytes(tier.used_bytes), format_bytes(tier.capacity_bytes)
    blocks = f", {tier.num_blocks} blocks" if tier.kind == "store" else ""
    trouble = f"; trouble: {printable(tier.trouble)}" if tier.trouble else ""
    console.print(f"{tier.name} tier: {used} of {capacity} used{blocks}{trouble}")
    if tier.kind == "memory":
        rows = [{"state": state, "pages": count} for state, count in tier.pages.items() if count]
        table(f"pages of {tier.name}", rows)


def tiers(every: Sequence[TierStatus]) -> None:
    """What each tier holds, what waits for it, and how it fares."""
    table(
        "tiers",
        [
            {
                "tier": tier.name,
                "kind": tier.kind,
                "blocks": tier.num_blocks,
                "used": format_bytes(tier.used_bytes),
                "usable": format_bytes(tier.usable_bytes),
                "capacity": format_bytes(tier.capacity_bytes),
                "survives": "yes" if tier.survives else "no",
                "waiting": format_bytes(tier.waiting_bytes) if tier.waiting_bytes else "",
                "failed\nwrites": tier.write_failures or "",
                "failed\nreads": tier.read_failures or "",
                "trouble": tier.trouble,
            }
            for tier in every
        ],
    )


def checks(reply: VerifyReply) -> None:
    """What was found in each tier."""
    table(
        "blocks",
        [
            {
                "tier": tier.name,
                "blocks": tier.num_blocks,
                "checked": tier.num_checked,
                "bad": tier.num_bad,
                "missing": tier.num_missing,
                "trouble": tier.trouble,
            }
            for tier in reply.tiers
        ],
    )


@contextmanager
def progress(title: str) -> Iterator[Callable[[VerifyReply], None]]:
    """A bar on the terminal, if there is one, for as long as it is told how far it has come."""
    with bar(title) as tell:
        yield lambda reply: tell(
            sum(tier.num_checked for tier in reply.tiers),
            sum(tier.num_blocks for tier in reply.tiers),
        )


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal, if there is one, that is told how many of how many are done."""
    with Progress(
        console=Console(stderr=True), transient=True, disable=not os.isatty(STDERR)
    ) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _counters(counters: Counter[str]) -> None:
    requested, matched = counters["tokens_requested"], counters["tokens_matched"]
    rate = f" ({matched / requested:.1%})" if requested else ""
    console.print(
        f"matches: {counters['matches']}, hits {counters['match_hits']}, "
        f"misses {counters['match_misses']}; tokens: {matched} of {requested} matched{rate}"
    )
    console.print(
        f"blocks: committed {counters['blocks_committed']}, "
        f"duplicate {counters['blocks_duplicate']}, evicted {counters['blocks_evicted']}, "
        f"dropped {counters['blocks_dropped']}; pages: quarantined {counters['pages_quarantined']}"
    )
    console.print(
        f"between tiers: copied down {counters['blocks_demoted']}, "
        f"up {counters['blocks_promoted']}, lost before a copy {counters['pressure_drops']}; "
        f"verified {counters['blocks_verified']}, bad {counters['checksum_failures']}, "
        f"missing {counters['blocks_missing']}"
    )
    console.print(
        f"requests: {counters['requests']}, refused {counters['errors']}, "
        f"answers undeliverable {counters['replies_undeliverable']}"
    )


def sessions(reply: StatusReply) -> None:
    """Who is attached, and how long the daemon took for its last requests."""
    table(
        "sessions",
        [
            {
                "session": each.session,
                "client": each.client,
                "pid": each.pid,
                "maps": "yes" if each.maps else "no",
                "silent\nfor": format_duration(each.stale_seconds),
                "leases": each.num_leases,
                "reserved\npages": each.num_reserved,
                "requests": each.num_requests,
                "µs\np50/p99": f"{each.request_p50_us}/{each.request_p99_us}",
            }
            for each in reply.sessions
        ],
    )


def namespaces(reply: StatusReply) -> None:
    """Which model's KV they are, and then what each of them holds: together they are too wide."""
    table(
        "namespaces",
        [
            {
                "namespace": each.namespace,
                "model": each.model,
                "revision": each.revision[:REVISION_CHARACTERS],
                "salt": each.salt,
                "adapter": each.adapter,
                "shard": f"{each.shard_rank} of {each.shard_size}" if each.shard_size > 1 else "",
                "positions": each.positions,
                "extras": "yes" if each.extras else "",
            }
            for each in reply.namespaces
        ],
    )
    if reply.namespaces:
        _holdings(reply)


def _holdings(reply: StatusReply) -> None:
    table(
        "what they hold",
        [
            {
                "namespace": each.namespace,
                "layout": _layout(each.layout),
                "block\nsize": each.block_size,
                "blocks": each.num_blocks,
                "bytes": format_bytes(each.num_pages * each.page_bytes),
                "quota\nmin/max": _quota(each.guaranteed_bytes, each.max_bytes),
                "leases": each.num_leases,
                "sessions": each.num_sessions,
                "generation": each.generation,
            }
            for each in reply.namespaces
        ],
    )


def _layout(layout: Layout | None) -> str:
    """In short: layers, heads, head size, type, order, and what packs an opaque one."""
    if layout is None:
        return ""
    shape = f"{layout.num_layers}x{layout.num_kv_heads}x{layout.head_size} {layout.dtype}"
    packed = f", packed by {layout.packing}" if layout.is_opaque else ""
    return f"{shape} {layout.order}{packed}"


def _quota(guaranteed_bytes: int, max_bytes: int) -> str:
    bounds = [format_bytes(size) if size else "-" for size in (guaranteed_bytes, max_bytes)]
    return "/".join(bounds) if guaranteed_bytes or max_bytes else ""


def leases(reply: LeasesReply) -> None:
    """Who holds which lease, and what of it."""
    rows = [
        {
            "session": each.session,
            "client": each.client,
            "lease": each.lease,
            "namespace": each.namespace,
            "blocks": each.num_blocks,
            "reserved": each.num_reserved,
            "detached": each.num_detached,
            "age": format_duration(each.age_seconds),
        }
        for each in reply.leases
    ]
    table("leases", rows)
    more(reply.num_leases - len(rows))


def pins(reply: LeasesReply) -> None:
    """Whose pins keep what, and for how long yet."""
    rows = [
        {
            "pin": each.pin,
            "owner": each.owner,
            "namespace": each.namespace,
            "tokens": each.num_tokens,
            "bytes": format_bytes(each.num_bytes),
            "left": format_duration(each.left_seconds),
        }
        for each in reply.pins
    ]
    table("pins", rows)
    more(reply.num_pins - len(rows))


def sequences(reply: SequencesReply) -> None:
    """Which sequences are saved, and for whom."""
    rows = [
        {
            "sequence": each.sequence,
            "namespace": each.namespace_key.hex()[:KEY_CHARACTERS],
            "model": each.model,
            "salt": each.salt,
            "tokens": each.num_tokens,
            "bytes": format_bytes(each.num_bytes),
            "generation": each.generation,
            "age": format_duration(each.age_seconds),
        }
        for each in reply.sequences
    ]
    table("sequences", rows)
    more(reply.num_sequences - len(rows))


def printable(text: str) -> str:
    """A name that somebody chose, without what would speak to the terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def more(count: int) -> None:
    """Say how many there are beside those that were listed."""
    if count:
        console.print(f"and {count} more: see --limit")


def table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print a title and a table of its rows.

    Nothing is cut off: where folding is not enough, lines are longer than the terminal is wide.
    """
    if rows:
        made = made_table(rows)
        least = sum(1 + (column.min_width or 0) for column in made.columns)
        if least > console.width:
            made.width = least
        console.print(f"{title}:")
        console.print(made, crop=False)
    else:
        console.print(f"{title}: none")


def made_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """A column for each key of the rows, but for those that are empty in all of them."""
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    columns = {
        name: [printable(str(row[name])) for row in rows] for name in (rows[0] if rows else ())
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    for name, cells in shown.items():
        width = max(map(len, [*name.split("\n"), *cells]))
        made.add_column(
            name,
            justify="right" if isinstance(rows[0][name], int) else "left",
            overflow="fold",
            no_wrap=name not in FOLDED,
            min_width=min(width, FOLDED_WIDTH) if name in FOLDED else width,
        )
    for each in zip(*shown.values(), strict=True):
        made.add_row(*each)
    return made
