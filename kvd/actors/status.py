"""What a status tells of tiers, namespaces, sessions, clients, leases and pins."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvd.actors.sessions import session_name
from kvd.protocol.messages import (
    ClientStatus,
    LeaseStatus,
    NamespaceStatus,
    PinStatus,
    SessionStatus,
    TierStatus,
)

if TYPE_CHECKING:
    from kvd.actors.sessions import Session, SessionTable
    from kvd.actors.store import StoreActor
    from kvd.cache.memory import Namespace
    from kvd.cache.state import CacheState
    from kvd.config import ClientConfig
    from kvd.tiers.base import MemoryTier, TierArena


def memory_status(
    tier: MemoryTier, arenas: Iterable[TierArena], state: CacheState, trouble: str
) -> TierStatus:
    capacity_bytes = state.memory.capacity_bytes
    backed_bytes = sum(arena.backed_bytes for arena in arenas)
    return TierStatus(
        tier.name,
        capacity_bytes,
        backed_bytes,
        state.memory.pages_by_state(),
        num_blocks=sum(space.tree.num_blocks for space in state.namespaces.values()),
        used_bytes=backed_bytes,
        usable_bytes=capacity_bytes,
        survives=tier.survives,
        trouble=trouble,
    )


def store_status(actor: StoreActor, state: CacheState) -> TierStatus:
    return TierStatus(
        actor.name,
        actor.tier.capacity_bytes,
        actor.used_bytes,
        {},
        kind="store",
        num_blocks=state.stores.num_blocks(actor.state),
        used_bytes=actor.used_bytes,
        usable_bytes=actor.tier.usable_bytes,
        survives=actor.tier.survives,
        trouble=actor.trouble,
        waiting_bytes=state.stores.num_unsaved_bytes(actor.state),
        **actor.counters,
    )


def summary(tiers: Sequence[TierStatus], counters: Mapping[str, int]) -> str:
    """All of it in a line: blocks by tier, the share of tokens that were there, what is wrong."""
    parts = [", ".join(f"{tier.num_blocks} blocks in {tier.name}" for tier in tiers)]
    if asked := counters.get("tokens_requested"):
        parts.append(f"hit rate {counters['tokens_matched'] / asked:.0%}")
    parts += [f"{tier.name} is degraded: {tier.trouble}" for tier in tiers if tier.trouble]
    return "; ".join(parts)


def namespace_status(state: CacheState) -> tuple[NamespaceStatus, ...]:
    leases = Counter(lease.namespace.id for lease in state.leases)
    return tuple(_namespace_status(n, leases[n.id]) for n in state.namespaces.values())


def session_status(sessions: SessionTable, state: CacheState) -> tuple[SessionStatus, ...]:
    return tuple(_session_status(session, state) for session in sessions)


def client_status(
    clients: Iterable[ClientConfig], sessions: SessionTable
) -> tuple[ClientStatus, ...]:
    """The clients that a configuration knows."""
    return tuple(
        ClientStatus(client.name, client.key, client.verbs, sessions.count_of(client))
        for client in clients
    )


def lease_status(state: CacheState, limit: int, clients: dict[int, str]) -> tuple[LeaseStatus, ...]:
    """The oldest leases; `clients` has the names of the sessions' clients."""
    now = time.monotonic()
    oldest = heapq.nsmallest(limit, state.leases, key=lambda lease: lease.since)
    return tuple(
        LeaseStatus(
            session_name(lease.session),
            clients.get(lease.session, "kvd"),
            lease.id,
            lease.namespace.id,
            lease.num_blocks,
            len(lease.reserved),
            sum(node.num_blocks for node in lease.node.path() if node.detached),
            round(now - lease.since, 3),
        )
        for lease in oldest
    )


def pin_status(state: CacheState, limit: int) -> tuple[PinStatus, ...]:
    now = time.monotonic()
    return tuple(
        PinStatus(
            pin.id,
            pin.owner,
            pin.namespace.id,
            pin.num_blocks * pin.namespace.arena.layout.block_size,
            pin.num_bytes,
            round(pin.expires - now, 3),
        )
        for pin in list(state.pins)[:limit]
    )


def _namespace_status(namespace: Namespace, num_leases: int) -> NamespaceStatus:
    identity, layout = namespace.identity, namespace.arena.layout
    return NamespaceStatus(
        namespace=namespace.id,
        model=identity.model,
        revision=identity.revision,
        salt=namespace.salt,
        block_size=layout.block_size,
        page_bytes=layout.page_bytes,
        num_blocks=namespace.tree.num_blocks,
        num_nodes=namespace.tree.num_nodes,
        adapter=identity.adapter,
        shard_rank=identity.shard_rank,
        shard_size=identity.shard_size,
        positions=identity.positions,
        extras=namespace.has_extras,
        layout=layout,
        num_pages=namespace.num_pages,
        guaranteed_bytes=namespace.quota.guaranteed_bytes,
        max_bytes=namespace.quota.max_bytes,
        num_leases=num_leases,
        num_sessions=len(namespace.sessions),
        generation=namespace.generation,
    )


def _session_status(session: Session, state: CacheState) -> SessionStatus:
    leases = state.leases.of_session(session.id)
    p50, p99 = session.percentiles_us()
    return SessionStatus(
        session.name,
        session.client,
        session.pid,
        session.maps,
        round(time.monotonic() - session.last_seen, 3),
        len(leases),
        sum(len(lease.reserved) for lease in leases),
        session.num_requests,
        p50,
        p99,
    )
