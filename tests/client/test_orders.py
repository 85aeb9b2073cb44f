"""Layouts whose pages are contiguous, or opaque: mapped and copied, from match to restart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from kvd.protocol.messages import MAX_PIECE_BYTES
from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import BadRequest, Layout, LeaseEnded, PagesInUse, Unsupported
from kvd_client.aio import AsyncClient
from kvd_client.client import Client
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUTS,
    OPAQUE,
    PAGE_FIRST,
    capacity_of,
    eventually,
    settings,
    tokens_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd_client.client import Lease, Namespace
    from kvd_client.lease import LeaseBase

TOKENS = tokens_of(1, 40)

each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.order)


@pytest.fixture
def copier(daemon: RunningDaemon, connect: Callable[[], Client]) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout=30.0, maps=False) as client:
        assert client.wait_attached(30.0)
        yield client


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def pages_for(tokens: Sequence[int], layout: Layout) -> bytes:
    """What an engine would have in the pages of these blocks: each tells of all tokens so far."""
    prefix, blocks = hashlib.shake_128(), []
    for start in range(0, len(tokens), BLOCK):
        prefix.update(str(tokens[start : start + BLOCK]).encode())
        blocks.append(prefix.digest(layout.page_bytes))
    return b"".join(blocks)


def write(lease: LeaseBase, tokens: Sequence[int], start: int) -> None:
    data = pages_for(tokens, lease.layout)[start // BLOCK * lease.layout.page_bytes :]
    for pages in lease.write_pages(start, len(tokens)):
        pages[...] = np.frombuffer(data[: pages.nbytes], pages.dtype).reshape(pages.shape)
        data = data[pages.nbytes :]


def store(namespace: Namespace, tokens: Sequence[int]) -> None:
    with namespace.match(tokens, reserve_tokens=len(tokens)) as lease:
        write(lease, tokens, lease.num_committed)
        lease.commit(tokens[lease.num_committed :])


def holds(lease: Lease, tokens: Sequence[int]) -> bool:
    read = [pages.tobytes() for pages in lease.read_pages(0, len(tokens))]
    return b"".join(read) == pages_for(tokens, lease.layout)


def has(lease: LeaseBase, tokens: Sequence[int], num_tokens: int) -> bool:
    """Whether the lease has so many of these tokens, and their rows."""
    read = b"".join(pages.tobytes() for pages in lease.read_pages(0, num_tokens))
    rows = [rows_of(data, lease.layout) for data in (read, pages_for(tokens, lease.layout))]
    is_same = np.array_equal(rows[0][:num_tokens], rows[1][:num_tokens])
    return lease.num_tokens == num_tokens and is_same


def rows_of(pages: bytes, layout: Layout) -> NDArray[np.uint8]:
    """Pages token by token."""
    row_bytes = layout.slice_bytes // BLOCK
    by_slice = np.frombuffer(pages, np.uint8).reshape(-1, layout.num_slices, BLOCK, row_bytes)
    return by_slice.swapaxes(1, 2).reshape(-1, layout.token_bytes)


def kept_of(num_tokens: int, layout: Layout) -> int:
    """Of so many tokens of a sequence, those whose KV is kept."""
    return num_tokens // BLOCK * BLOCK if layout.is_opaque else num_tokens


@each_layout
def test_what_is_written_page_by_page_is_found_by_who_maps_and_who_does_not(
    layout: Layout, client: Client, copier: Client, salt: str
) -> None:
    mapped = client.open(IDENTITY, layout, salt=salt)
    copied = copier.open(IDENTITY, layout, salt=salt)
    store(mapped, TOKENS)
    store(copied, TOKENS + tokens_of(2, 20))
    for namespace in (mapped, copied):
        with namespace.match(TOKENS + tokens_of(2, 20)) as lease:
            assert lease.num_tokens == 60 * BLOCK
            assert holds(lease, TOKENS + tokens_of(2, 20))


@each_layout
def test_pages_that_come_again_have_the_bytes_of_their_blocks(
    layout: Layout, client: Client, copier: Client, salt: str
) -> None:
    """More is stored than there are pages: most of them come again with other blocks."""
    namespaces = [each.open(IDENTITY, layout, salt=salt) for each in (client, copier)]
    for seed in range(12):
        store(namespaces[seed % 2], tokens_of(seed, 20))
        with namespaces[(seed + 1) % 2].match(tokens_of(seed, 20)) as lease:
            assert holds(lease, tokens_of(seed, 20))


def test_orders_are_namespaces_that_never_meet(client: Client, salt: str) -> None:
    for layout in LAYOUTS:
        namespace = client.open(IDENTITY, layout, salt=salt)
        assert namespace.match(TOKENS).num_tokens == 0
        store(namespace, TOKENS)
    other = replace(OPAQUE, packing="another's")
    assert client.open(IDENTITY, other, salt=salt).match(TOKENS).num_tokens == 0


@pytest.mark.parametrize("layout", [PAGE_FIRST, OPAQUE], ids=lambda layout: layout.order)
@pytest.mark.parametrize("view", ["read_arrays", "read_tensors", "write_arrays", "write_tensors"])
def test_tokens_of_contiguous_pages_are_no_view(
    layout: Layout, view: str, client: Client, salt: str
) -> None:
    with client.open(IDENTITY, layout, salt=salt).match([], reserve_tokens=8) as lease:
        with pytest.raises(Unsupported, match=r"read_pages and write_pages"):
            getattr(lease, view)(0, 8)
        assert [pages.shape for pages in lease.read_pages(0, 8)] == [(2, *layout.page_shape)]


@each_layout
def test_pages_in_use_are_not_committed(layout: Layout, client: Client, salt: str) -> None:
    lease = client.open(IDENTITY, layout, salt=salt).match([], reserve_tokens=8)
    views = lease.write_pages(BLOCK + 1, 8)
    assert lease.commit(TOKENS[:BLOCK]) == BLOCK
    with pytest.raises(PagesInUse):
        lease.commit(TOKENS[BLOCK:8])
    del views
    lease.commit(TOKENS[BLOCK:8])
    with pytest.raises(BadRequest, match="committed"):
        lease.write_pages(4, 8)
    with pytest.raises(ValueError, match="read-only"):
        lease.read_pages(4, 8)[0][...] = 0


@pytest.mark.parametrize("maps", [True, False])
def test_a_page_first_layout_is_reused_to_the_token(
    maps: bool, client: Client, copier: Client, salt: str
) -> None:
    store(client.open(IDENTITY, PAGE_FIRST, salt=salt), TOKENS[:12])
    namespace = (client if maps else copier).open(IDENTITY, PAGE_FIRST, salt=salt)
    lease = namespace.match([*TOKENS[:10], 7, 7], reserve_tokens=12, exact_tail=True)
    assert lease.num_tokens == 10
    expected = np.frombuffer(pages_for(TOKENS[:12], PAGE_FIRST), np.float32)
    expected = expected.reshape(3, *PAGE_FIRST.page_shape)
    (tail,) = lease.read_pages(8, 10)
    assert tail[0, :, :, :2].tobytes() == expected[2, :, :, :2].tobytes()


@pytest.mark.parametrize("num_tokens", [0, 3, 7, 8])
@pytest.mark.parametrize("maps", [True, False])
@each_layout
def test_a_sequence_is_resumed_as_far_as_its_rows_are_told_apart(
    layout: Layout, maps: bool, num_tokens: int, client: Client, copier: Client, salt: str
) -> None:
    namespace = (client if maps else copier).open(IDENTITY, layout, salt=salt)
    with namespace.match([], reserve_tokens=8) as lease:
        write(lease, TOKENS[:8], 0)
        lease.commit(TOKENS[:num_tokens])
        generation = lease.save("chat", TOKENS[:num_tokens], b"state")
    resumed = namespace.resume("chat", reserve_tokens=8)
    with resumed.lease as lease:
        assert has(lease, TOKENS[:8], kept_of(num_tokens, layout))
        assert (resumed.tokens.tolist(), resumed.state) == (TOKENS[:num_tokens], b"state")
        lease.save("chat", TOKENS[:num_tokens], generation=resumed.generation)
    assert resumed.generation > generation


@pytest.mark.parametrize("num_tokens", [0, 3, 7, 8])
@pytest.mark.parametrize("maps", [True, False])
@each_layout
async def test_tasks_resume_sequences_of_each_order(
    layout: Layout, maps: bool, num_tokens: int, daemon: RunningDaemon, salt: str
) -> None:
    async with AsyncClient(daemon.endpoint, timeout=30.0, maps=maps) as client:
        namespace = client.open(IDENTITY, layout, salt=salt)
        async with await namespace.match([], reserve_tokens=8) as lease:
            write(lease, TOKENS[:8], 0)
            await lease.commit(TOKENS[:num_tokens])
            await lease.save("chat", TOKENS[:num_tokens])
        async with (await namespace.resume("chat")).lease as lease:
            assert has(lease, TOKENS[:8], kept_of(num_tokens, layout))


def test_rows_of_page_first_pages_are_copied(client: Client, salt: str) -> None:
    namespace = client.open(IDENTITY, PAGE_FIRST, salt=salt)
    store(namespace, TOKENS)
    one, two = namespace.match(TOKENS), namespace.match([], reserve_tokens=len(TOKENS))
    two.copy_rows(one, 0, 5)
    two.copy_rows(one, 5, len(TOKENS))
    assert holds(two, TOKENS)


def test_an_opaque_layout_has_whole_blocks_only(client: Client, salt: str) -> None:
    namespace = client.open(IDENTITY, OPAQUE, salt=salt)
    lease = namespace.match([], reserve_tokens=8)
    with pytest.raises(Unsupported, match="whole blocks"):
        namespace.match(TOKENS, exact_tail=True)
    with pytest.raises(Unsupported, match="whole blocks"):
        lease.copy_rows(lease, 0, 3)


@pytest.mark.parametrize("maps", [True, False])
@each_layout
def test_a_restart_leaves_none_of_it_wrong(layout: Layout, maps: bool) -> None:
    with (
        running_daemon(settings()) as daemon,
        Client(daemon.endpoint, timeout=30.0, maps=maps) as client,
    ):
        namespace = client.open(IDENTITY, layout)
        store(namespace, TOKENS)
        lease = namespace.match(TOKENS)
        daemon.restart()
        eventually(lambda: not lease.is_open)
        with pytest.raises(LeaseEnded):
            lease.check()
        eventually(lambda: namespace.match(TOKENS).is_open)
        store(namespace, TOKENS)
        with namespace.match(TOKENS) as lease:
            assert holds(lease, TOKENS)


def test_a_page_larger_than_a_message_is_copied_in_pieces() -> None:
    large = replace(OPAQUE, layer_bytes=MAX_PIECE_BYTES * 3 // 4)
    tier = {"type": "host", "capacity_bytes": capacity_of(16, large)}
    with (
        running_daemon(settings(tiers=[tier])) as daemon,
        Client(daemon.endpoint, timeout=30.0, maps=False) as copier,
        Client(daemon.endpoint, timeout=30.0) as client,
    ):
        store(copier.open(IDENTITY, large), TOKENS[: 2 * BLOCK])
        for each in (client, copier):
            with each.open(IDENTITY, large).match(TOKENS[: 2 * BLOCK]) as lease:
                assert holds(lease, TOKENS[: 2 * BLOCK])
