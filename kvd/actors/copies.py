"""Copies of a lease's pages, in and out, for who cannot map them or keeps them elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.arena.runs import Pages, pages_of
from kvd.protocol.errors import BadRequest
from kvd.protocol.layout import check_rows

if TYPE_CHECKING:
    from kvd.arena.base import Arena
    from kvd.arena.device import DeviceArena
    from kvd.cache.leases import Lease
    from kvd.protocol.messages import Runs


def load(memory: Arena | DeviceArena, lease: Lease, runs: Runs, slices: range) -> list[memoryview]:
    """The bytes of pages that a lease holds, in the order of the arena, where they lie."""
    pages = pages_named(lease, runs)
    held = lease.node.path_pages().tolist()
    if lease.tail is not None:
        held.append(lease.tail.page)
    if not set(held).issuperset(pages.tolist()):
        raise BadRequest("a load may name the blocks of its lease alone")
    pieces = list(memory.slice_views(slices, runs))
    if lease.tail is not None and lease.tail.page in pages:
        # What is sent where it lies is held as the lease's path is; a tail is not part of it.
        return [memoryview(bytes(piece)) for piece in pieces]
    return pieces


def store(
    memory: Arena | DeviceArena, lease: Lease, runs: Runs, slices: range, data: memoryview
) -> None:
    """Write bytes, as load gives them, into pages that the lease reserved."""
    pages = pages_named(lease, runs)
    if not lease.reserved.issuperset(pages.tolist()):
        raise BadRequest("a store may name pages that its lease reserved alone")
    size = len(slices) * len(pages) * lease.namespace.arena.layout.slice_bytes
    if size != len(data):
        raise BadRequest(f"{len(data)} bytes do not fill {size}")
    memory.write_slices(slices, runs, data)


def rows(memory: Arena | DeviceArena, lease: Lease, page: int, num_rows: int) -> bytes:
    """A copy of the first rows of a page that a lease reserved, as its layout has a block."""
    if page not in lease.reserved:
        raise BadRequest("a save may name a page that its lease reserved alone")
    check_rows(lease.namespace.arena.layout)
    return memory.rows(page, num_rows)


def pages_named(lease: Lease, runs: Runs) -> Pages:
    """The pages that a request names; refuses what is none (BadRequest)."""
    if sum(run.count for run in runs) > lease.namespace.arena.pool.num_pages:
        raise BadRequest("a request names more pages than there are")
    if not all(run.count for run in runs):
        raise BadRequest("a run of no page says nothing")
    pages = pages_of(runs)
    if len(pages) and int(pages.max()) >= lease.namespace.arena.pool.num_pages:
        raise BadRequest("a request names pages that do not exist")
    return pages
