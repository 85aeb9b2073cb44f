"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvd_client import StatusReply, format_bytes

console = Console()


def status(reply: StatusReply) -> None:
    """The daemon, its tiers, namespaces and sessions, as tables."""
    console.print(
        f"kvd {reply.version}, pid {reply.pid}, up {reply.uptime_seconds:.0f} s, {reply.endpoint}"
    )
    _tiers(reply)
    _hits(reply)
    _namespaces(reply)
    _sessions(reply)


def _tiers(reply: StatusReply) -> None:
    states = sorted({state for tier in reply.tiers for state in tier.pages})
    table = Table("tier", "capacity", "backed", *states, title="Pages by state")
    for tier in reply.tiers:
        counts = [str(tier.pages.get(state, 0)) for state in states]
        table.add_row(
            tier.name, format_bytes(tier.capacity_bytes), format_bytes(tier.backed_bytes), *counts
        )
    console.print(table)


def _hits(reply: StatusReply) -> None:
    count = reply.counters.get
    requested, matched = count("tokens_requested", 0), count("tokens_matched", 0)
    table = Table("matches", "hits", "misses", "tokens requested", "tokens matched", "hit rate")
    table.title = "Matches"
    rate = f"{matched / requested:.1%}" if requested else "-"
    numbers = [count(name, 0) for name in ("matches", "match_hits", "match_misses")]
    table.add_row(*map(str, [*numbers, requested, matched]), rate)
    console.print(table)


def _namespaces(reply: StatusReply) -> None:
    table = Table("id", "model", "revision", "salt", "block size", "page", "blocks", "nodes")
    table.title = "Namespaces"
    for space in reply.namespaces:
        table.add_row(
            str(space.namespace),
            space.model,
            space.revision,
            space.salt,
            str(space.block_size),
            format_bytes(space.page_bytes),
            str(space.num_blocks),
            str(space.num_nodes),
        )
    console.print(table)


def _sessions(reply: StatusReply) -> None:
    table = Table("session", "client", "pid", "maps", "silent for", "leases", "reserved pages")
    table.title = "Sessions"
    for session in reply.sessions:
        table.add_row(
            session.session,
            session.client,
            str(session.pid),
            "yes" if session.maps else "no",
            f"{session.stale_seconds:.1f} s",
            str(session.num_leases),
            str(session.num_reserved),
        )
    console.print(table)
