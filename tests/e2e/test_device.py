"""A daemon whose pages lie on a device, here "cpu"; a GPU's is in tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import LeaseEnded, PagesInUse, Unsupported
from kvd_client.client import Client
from tests.client import test_orders as orders
from tests.e2e.conftest import PROLOGUE
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    LAYOUTS,
    PAGE_FIRST,
    SESSIONS,
    capacity_of,
    eventually,
    holds,
    kv_of,
    pages_in,
    store,
    tokens_of,
)

if TYPE_CHECKING:
    from kvd_client import Layout
    from kvd_client.client import Lease, Namespace
    from tests.arena.conftest import Child

TOKENS = tokens_of(1, 8)

# What a program begins with: the test's namespace, and what computes or reads a sequence.
TENSORS = """
from tests.e2e.test_device import TOKENS, compute_on_device, holds_on_device
namespace = client.open(IDENTITY, LAYOUT, sys.argv[2])
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """One for all these tests, which takes a while to import torch."""
    tier = {"type": "torch", "device": "cpu", "capacity_bytes": capacity_of(768), "layouts": 3}
    with running_daemon({"tiers": [tier], "sessions": SESSIONS}) as daemon:
        yield daemon


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def namespace(client: Client, salt: str) -> Namespace:
    return client.open(IDENTITY, LAYOUT, salt)


def write_on_device(lease: Lease, tokens: list[int], start: int) -> None:
    """Fill the pages of these tokens from `start` on; no view of them is left."""
    views = lease.write_tensors(start, len(tokens))
    kv = torch.tensor(kv_of(tokens))[:, :, start:]
    for view, rows in zip(views, kv.split([view.shape[2] for view in views], 2), strict=True):
        view.copy_(rows)


def compute_on_device(lease: Lease, tokens: list[int]) -> None:
    start = lease.num_tokens
    lease.reserve(len(tokens))
    write_on_device(lease, tokens, start)
    lease.commit(tokens[lease.num_committed :])


def read_on_device(lease: Lease, stop: int) -> Tensor:
    return torch.cat(lease.read_tensors(0, stop), 2).cpu()


def holds_on_device(lease: Lease, tokens: list[int]) -> bool:
    return torch.equal(read_on_device(lease, len(tokens)), torch.tensor(kv_of(tokens)))


def compute_pages(lease: Lease, tokens: list[int]) -> None:
    """As `compute_on_device`, by whole pages, which every order has."""
    start = lease.num_committed
    lease.reserve(len(tokens))
    write_pages(lease, tokens, start)
    lease.commit(tokens[start:])


def write_pages(lease: Lease, tokens: list[int], start: int) -> None:
    data = bytearray(orders.pages_for(tokens, lease.layout))
    at = start // BLOCK * lease.layout.page_bytes
    for pages in lease.write_pages(start, len(tokens)):
        size = pages.numel() * pages.element_size()
        pages.copy_(torch.frombuffer(data[at : at + size], dtype=pages.dtype).view(pages.shape))
        at += size


def holds_pages(lease: Lease, tokens: list[int]) -> bool:
    read = [bytes_of(pages) for pages in lease.read_pages(0, len(tokens))]
    return b"".join(read) == orders.pages_for(tokens, lease.layout)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().flatten().view(torch.uint8).numpy().tobytes()


def test_what_one_process_computes_another_has(
    program: Callable[..., Child], namespace: Namespace, salt: str
) -> None:
    compute = "compute_on_device(namespace.match(TOKENS), TOKENS)\nprint('done')"
    writer = program(TENSORS + compute, salt)
    assert writer.says() == "done"
    reader = program(
        TENSORS
        + "lease = namespace.match(TOKENS)\n"
        + "print(lease.num_tokens, holds_on_device(lease, TOKENS))\nlease.check()",
        salt,
    )
    assert reader.says() == f"{len(TOKENS)} True"
    with namespace.match(TOKENS) as lease:
        assert holds_on_device(lease, TOKENS)


def test_there_are_tensors_and_no_arrays(namespace: Namespace) -> None:
    with namespace.match(TOKENS, reserve_tokens=BLOCK) as lease:
        with pytest.raises(Unsupported, match="read_tensors and write_tensors"):
            lease.write_arrays(0, BLOCK)
        with pytest.raises(Unsupported, match="the pages lie on"):
            lease.read_arrays(0, BLOCK)


def test_nothing_is_committed_while_a_tensor_could_write_it(namespace: Namespace) -> None:
    with namespace.match(TOKENS, reserve_tokens=BLOCK) as lease:
        views = lease.write_tensors(0, BLOCK)
        with pytest.raises(PagesInUse):
            lease.commit(TOKENS[:BLOCK])
        views.clear()
        assert lease.commit(TOKENS[:BLOCK]) == BLOCK


def test_a_tail_is_copied_on_the_device(namespace: Namespace) -> None:
    with namespace.match(TOKENS) as lease:
        compute_on_device(lease, TOKENS)
    prompt = [*TOKENS[:-2], 7, 8]
    with namespace.match(prompt, exact_tail=True) as lease:
        assert (lease.num_tokens, lease.num_committed) == (len(TOKENS) - 2, len(TOKENS) - BLOCK)
        compute_on_device(lease, prompt)
        assert holds_on_device(lease, prompt)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.order)
def test_whole_pages_are_tensors_in_every_order(
    layout: Layout, client: Client, daemon: RunningDaemon, salt: str
) -> None:
    namespace = client.open(IDENTITY, layout, salt)
    with namespace.match(TOKENS) as lease:
        compute_pages(lease, TOKENS)
    with namespace.match(TOKENS) as lease:
        (pages,) = lease.read_pages(0, len(TOKENS))
        assert pages.shape == (len(TOKENS) // BLOCK, *layout.page_shape)
        assert holds_pages(lease, TOKENS)
    with Client(daemon.endpoint, timeout=30.0, maps=False) as copier:
        assert orders.holds(copier.open(IDENTITY, layout, salt).match(TOKENS), TOKENS)


@pytest.mark.parametrize("layout", [LAYOUT, PAGE_FIRST], ids=lambda layout: layout.order)
def test_a_saved_sequence_goes_on_to_the_token(layout: Layout, client: Client, salt: str) -> None:
    namespace = client.open(IDENTITY, layout, salt)
    with namespace.match(TOKENS, reserve_tokens=len(TOKENS)) as lease:
        write_pages(lease, TOKENS, 0)
        saved = bytes_of(lease.read_pages(0, len(TOKENS))[0][-1, :, :, :-1])
        lease.commit(TOKENS[:-BLOCK])
        lease.save("chat", TOKENS[:-1])
    with namespace.resume("chat").lease as lease:
        assert lease.num_tokens == len(TOKENS) - 1
        assert holds_pages(lease, TOKENS[:-BLOCK])
        (tail,) = lease.read_pages(len(TOKENS) - BLOCK, len(TOKENS))
        assert bytes_of(tail[0, :, :, :-1]) == saved


def test_rows_are_copied_from_lease_to_lease(namespace: Namespace) -> None:
    with namespace.match(TOKENS, reserve_tokens=2 * BLOCK) as one:
        write_on_device(one, TOKENS[: 2 * BLOCK], 0)
        with namespace.match(TOKENS, reserve_tokens=2 * BLOCK) as other:
            other.copy_rows(one, 1, 2 * BLOCK - 1)
            copied = read_on_device(other, 2 * BLOCK)
    expected = torch.tensor(kv_of(TOKENS))
    assert torch.equal(copied[:, :, 1:-1], expected[:, :, 1 : 2 * BLOCK - 1])


def test_who_does_not_map_loads_and_stores(
    namespace: Namespace, daemon: RunningDaemon, salt: str
) -> None:
    with namespace.match(TOKENS) as lease:
        compute_on_device(lease, TOKENS)
    others = tokens_of(2, 8)
    with Client(daemon.endpoint, timeout=30.0, maps=False) as client:
        mirrored = client.open(IDENTITY, LAYOUT, salt)
        with mirrored.match(TOKENS) as lease:
            assert holds(lease, TOKENS)
        store(mirrored, others)
    with namespace.match(others) as lease:
        assert holds_on_device(lease, others)


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def test_who_has_no_torch_loads_and_stores(
    client: Client, child: Callable[..., Child], daemon: RunningDaemon
) -> None:
    tokens = tokens_of(3, 4)
    code = WITHOUT_TORCH + PROLOGUE + "store(namespace, tokens_of(3, 4))\nprint('done')"
    assert child(code, daemon.endpoint).says() == "done"
    with client.open(IDENTITY, LAYOUT).match(tokens) as lease:
        assert holds_on_device(lease, tokens)


def test_after_a_restart_a_client_maps_anew(
    namespace: Namespace, client: Client, daemon: RunningDaemon
) -> None:
    lease = namespace.match(TOKENS)
    compute_on_device(lease, TOKENS)
    daemon.restart()
    with pytest.raises(LeaseEnded):
        lease.check()
    assert client.wait_attached(30.0)
    with namespace.match(TOKENS) as again:
        assert again.num_tokens == 0  # this memory ended with the daemon
        compute_on_device(again, TOKENS)
        assert holds_on_device(again, TOKENS)


def test_a_tensor_outlives_the_daemon_that_dies(
    namespace: Namespace, client: Client, daemon: RunningDaemon
) -> None:
    lease = namespace.match(TOKENS)
    compute_on_device(lease, TOKENS)
    views = lease.read_tensors(0, len(TOKENS))
    daemon.restart()
    assert torch.equal(torch.cat(views, 2), torch.tensor(kv_of(TOKENS)))
    assert client.wait_attached(30.0)


def test_what_a_killed_process_reserved_is_free_again(
    program: Callable[..., Child], client: Client, salt: str
) -> None:
    code = "lease = namespace.match(TOKENS, reserve_tokens=8)\nviews = lease.write_tensors(0, 8)"
    killed = program(TENSORS + code + "\nprint('reserved')\ninput()", salt)
    assert killed.says() == "reserved"
    assert pages_in(client, "reserved") > 0
    killed.process.kill()
    eventually(lambda: not pages_in(client, "reserved") + pages_in(client, "quarantined"))
