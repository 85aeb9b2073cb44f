"""A lease: pages, views of them, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import BadRequest, Layout, LeaseEnded, OutOfPages, PagesInUse
from kvd_client.binding import Populating
from kvd_client.client import Client
from tests.arena.conftest import Child
from tests.e2e.conftest import PROLOGUE
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    compute,
    eventually,
    holds,
    kv_of,
    pages_in,
    read,
    settings,
    store,
    tokens_of,
    write,
)

if TYPE_CHECKING:
    from kvd_client.client import Lease, Namespace

TOKENS = tokens_of(1, 16)


def mine(client: Client) -> tuple[int, int]:
    """Leases and reserved pages of the one session there is."""
    (session,) = client.status().sessions
    return session.num_leases, session.num_reserved


# --- what a lease says ---


def test_a_miss_is_an_open_lease_on_nothing(namespace: Namespace) -> None:
    lease = namespace.match(TOKENS)
    assert lease.is_open
    lease.check()
    assert (lease.num_tokens, lease.num_committed, lease.capacity_tokens) == (0, 0, 0)
    assert lease.tokens_by_tier == {}
    assert lease.shortage is None


def test_a_hit_says_how_much_and_from_where(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    lease = namespace.match(TOKENS + tokens_of(2, 1))
    assert (lease.num_tokens, lease.num_committed, lease.capacity_tokens) == (64, 64, 64)
    assert lease.tokens_by_tier == {"host": 64}


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 63, 64, 65, 127])
def test_a_match_is_of_whole_blocks(namespace: Namespace, num_tokens: int) -> None:
    store(namespace, TOKENS)
    asked = (TOKENS + tokens_of(2, 16))[:num_tokens]
    with namespace.match(asked) as lease:
        assert lease.num_tokens == min(num_tokens // BLOCK * BLOCK, 64)
        assert holds(lease, TOKENS, lease.num_tokens)


@pytest.mark.parametrize("at", [0, 1, 3, 4, 7, 8, 62, 63])
def test_a_match_ends_before_the_block_with_another_token(namespace: Namespace, at: int) -> None:
    store(namespace, TOKENS)
    asked = [*TOKENS[:at], 0, *TOKENS[at + 1 :]]
    assert namespace.match(asked).num_tokens == at // BLOCK * BLOCK


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 63, 64, 65])
def test_a_match_reserves_pages_for_at_least_so_many_tokens(
    namespace: Namespace, num_tokens: int
) -> None:
    lease = namespace.match([], reserve_tokens=num_tokens)
    assert lease.capacity_tokens >= num_tokens
    assert lease.capacity_tokens % (16 * BLOCK) == 0
    assert len(set(lease.pages.tolist())) == len(lease.pages)


# --- reserve ---


def test_reserve_gives_what_is_missing_and_keeps_what_there_is(lease: Lease) -> None:
    before = lease.pages.tolist()
    lease.reserve(64)
    assert lease.pages.tolist() == before
    lease.reserve(65)
    assert lease.pages.tolist()[:16] == before
    assert len(set(lease.pages.tolist())) == len(lease.pages) == 32


def test_reserve_of_less_than_there_is_does_nothing(lease: Lease) -> None:
    before = lease.pages.tolist()
    for num_tokens in (0, 1, 64):
        lease.reserve(num_tokens)
    assert lease.pages.tolist() == before


def test_reserve_behind_a_hit_continues_its_block_table(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    longer = TOKENS + tokens_of(2, 8)
    with namespace.match(longer) as lease:
        compute(lease, longer)
        assert holds(lease, longer)
    assert namespace.match(longer).num_tokens == len(longer)


def test_reserve_that_cannot_be_served_says_how_the_pages_stand(
    lease: Lease, namespace: Namespace
) -> None:
    other = namespace.match([])
    other.reserve(112 * BLOCK)
    with pytest.raises(OutOfPages, match="1 pages wanted, 0 free") as raised:
        lease.reserve(65, timeout=1.0)
    details = raised.value.details
    assert details["num_reserved"] == details["num_pages"] == 128
    assert (details["num_free"], details["num_locked"], details["num_quarantined"]) == (0, 0, 0)
    assert lease.is_open
    other.release()
    lease.reserve(65)


def test_a_match_that_falls_short_is_a_lease_with_its_shortage(
    lease: Lease, namespace: Namespace
) -> None:
    lease.reserve(128 * BLOCK)
    short = namespace.match(TOKENS, reserve_tokens=BLOCK, timeout=1.0)
    assert short.is_open
    assert short.shortage is not None
    assert (short.shortage.num_wanted, short.shortage.num_reserved) == (1, 128)
    assert len(short.pages) == 0


# --- extend ---


def test_extend_leases_what_others_committed_since(namespace: Namespace) -> None:
    store(namespace, TOKENS[:16])
    lease = namespace.match(TOKENS, reserve_tokens=64)
    matched, reserved = lease.pages[:4].tolist(), lease.pages[4:].tolist()
    store(namespace, TOKENS[:48])
    assert lease.extend() == lease.num_tokens == lease.num_committed == 48
    assert lease.pages[:4].tolist() == matched
    assert lease.pages[12:].tolist() == reserved
    assert lease.tokens_by_tier == {"host": 48}
    assert holds(lease, TOKENS, 48)


def test_an_extended_lease_goes_on_behind_what_it_has(namespace: Namespace) -> None:
    lease = namespace.match(TOKENS, reserve_tokens=64)
    store(namespace, TOKENS[:32])
    lease.extend()
    with pytest.raises(BadRequest, match="committed"):
        lease.write_arrays(31, 32)
    compute(lease, TOKENS)
    assert holds(lease, TOKENS)
    with namespace.match(TOKENS) as found:
        assert found.pages.tolist() == lease.pages[:16].tolist()


def test_extend_of_what_is_all_there_changes_nothing(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    lease = namespace.match(TOKENS, reserve_tokens=16)
    before = lease.pages.tolist()
    assert lease.extend() == lease.extend() == 64
    assert lease.pages.tolist() == before
    assert lease.pending_tokens == 0


def test_extend_waits_for_writable_views(lease: Lease) -> None:
    views = lease.write_arrays(60, 64)
    with pytest.raises(PagesInUse, match="60 to 64"):
        lease.extend()
    del views
    assert lease.extend() == 0


def test_only_a_match_behind_which_nothing_is_can_be_extended(
    namespace: Namespace, lease: Lease
) -> None:
    write(lease, TOKENS, 0, 16)
    lease.commit(TOKENS[:16])
    with_a_tail = namespace.match(TOKENS[:6], exact_tail=True)
    for other in (lease, lease.fork(), with_a_tail):
        with pytest.raises(BadRequest, match="extend"):
            other.extend()
    lease.release(keep_tokens=8)
    with pytest.raises(BadRequest, match="extend"):
        lease.extend()


# --- views ---


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 59, 60, 61, 63, 64])
@pytest.mark.parametrize("stop", [0, 1, 4, 5, 8, 60, 63, 64])
def test_read_arrays_are_exact_to_the_token(namespace: Namespace, start: int, stop: int) -> None:
    store(namespace, TOKENS)
    lease = namespace.match(TOKENS)
    if start > stop:
        with pytest.raises(BadRequest):
            lease.read_arrays(start, stop)
        return
    assert np.array_equal(read(lease, start, stop), kv_of(TOKENS)[:, :, start:stop])


def test_views_across_runs_are_in_order_and_exact(namespace: Namespace) -> None:
    """Two leases that reserve in turn have a run after every sixteenth page."""
    one, two = namespace.match([]), namespace.match([])
    tokens = tokens_of(1, 48)
    for step in (16, 32, 48):
        one.reserve(step * BLOCK)
        two.reserve(step * BLOCK)
    two.release()
    compute(one, tokens)
    pieces = [array.shape[2] for array in one.read_arrays(0, 48 * BLOCK)]
    assert pieces == [64, 64, 64]
    edges = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192]
    for start in edges:
        for stop in (edge for edge in edges if edge >= start):
            got = read(one, start, stop)
            assert np.array_equal(got, kv_of(tokens)[:, :, start:stop]), (start, stop)


def test_write_arrays_across_runs_write_what_read_arrays_read(namespace: Namespace) -> None:
    one, two = namespace.match([]), namespace.match([])
    for step in (16, 32):
        one.reserve(step * BLOCK)
        two.reserve(step * BLOCK)
    tokens = tokens_of(1, 32)
    for start, stop in ((0, 1), (1, 63), (63, 65), (65, 128)):
        write(one, tokens, start, stop)
    assert np.array_equal(read(one, 0, 128), kv_of(tokens))


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (0, 65), (64, 65), (5, 4), (-4, -1)])
def test_views_of_tokens_without_pages_are_refused(lease: Lease, start: int, stop: int) -> None:
    with pytest.raises(BadRequest):
        lease.read_arrays(start, stop)
    with pytest.raises(BadRequest):
        lease.write_arrays(start, stop)


def test_what_is_matched_is_read_only(namespace: Namespace) -> None:
    store(namespace, TOKENS)
    lease = namespace.match(TOKENS)
    (array,) = lease.read_arrays(0, 64)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[:] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_what_is_committed_is_not_writable_any_more(lease: Lease) -> None:
    write(lease, TOKENS, 0, 64)
    lease.commit(TOKENS[:32])
    for start in (0, 31):
        with pytest.raises(BadRequest, match="committed"):
            lease.write_arrays(start, 64)
    assert [array.flags.writeable for array in lease.write_arrays(32, 64)] == [True]


# --- tensors ---


def test_tensors_show_the_same_bytes_as_arrays(lease: Lease) -> None:
    torch = pytest.importorskip("torch")
    (tensor,) = lease.write_tensors(3, 64)
    tensor.copy_(torch.from_numpy(kv_of(TOKENS)[:, :, 3:].copy()))
    del tensor
    write(lease, TOKENS, 0, 3)
    assert holds(lease, TOKENS)
    (shown,) = lease.read_tensors(1, 63)
    assert shown.dtype == torch.float32
    assert np.array_equal(shown.numpy(), kv_of(TOKENS)[:, :, 1:63])


def test_bfloat16_is_bits_in_numpy_and_itself_in_torch() -> None:
    torch = pytest.importorskip("torch")
    layout = Layout(1, 1, 64, "bfloat16", block_size=4)
    with running_daemon(settings()) as daemon, Client(daemon.endpoint, timeout=30.0) as client:
        lease = client.open(IDENTITY, layout).match([], reserve_tokens=4)
        check_bfloat16(torch, lease)


def check_bfloat16(torch: Any, lease: Lease) -> None:
    (tensor,) = lease.write_tensors(0, 4)
    tensor.fill_(1.5)
    del tensor
    (bits,) = lease.read_arrays(0, 4)
    (shown,) = lease.read_tensors(0, 4)
    assert (bits.dtype, shown.dtype) == (np.uint16, torch.bfloat16)
    assert (bits == 0x3FC0).all()
    assert (shown == 1.5).all()


# Imports torch once; runs each program that it is told in a fork, and says how that ended.
FORKS = """
import os, sys, torch
for program in sys.stdin:
    if os.fork() == 0:
        exec(eval(program))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""

STRAY_WRITE = """
import warnings
store(namespace, tokens_of(1, 4))
lease = namespace.match(tokens_of(1, 4))
{}
print('has a view')
{}
print('wrote')
"""


@pytest.fixture(scope="module")
def forks(daemon: RunningDaemon) -> Iterator[Child]:
    pytest.importorskip("torch")
    forks = Child(FORKS, daemon.endpoint)
    yield forks
    forks.close()


@pytest.mark.parametrize(
    ("view", "stray"),
    [
        ("(view,) = lease.read_tensors(0, 16)", "view[:] = 0"),
        ("view = lease.read_tensors(0, 16)[0][0, 0]", "view.add_(1)"),
        (
            "warnings.simplefilter('ignore')\nview = torch.from_numpy(lease.read_arrays(0, 16)[0])",
            "view.zero_()",
        ),
    ],
    ids=["a tensor", "a part of one", "a tensor of an array"],
)
def test_a_stray_write_to_what_is_matched_kills_who_does_it(
    forks: Child, client: Client, view: str, stray: str
) -> None:
    forks.tell(repr(PROLOGUE + STRAY_WRITE.format(view, stray)))
    assert forks.says() == "has a view"
    assert forks.says() == str(-signal.SIGSEGV)
    with client.open(IDENTITY, LAYOUT).match(tokens_of(1, 4)) as lease:
        assert holds(lease, tokens_of(1, 4), lease.num_tokens)


# --- views in use ---

HELD: dict[str, Callable[[Any], Any]] = {
    "the array": lambda lease: lease.write_arrays(0, 64),
    "a part of it": lambda lease: lease.write_arrays(0, 64)[0][0, 1, 3:9],
    "a part of a part": lambda lease: lease.write_arrays(0, 64)[0][0, 1][3:9][..., :2],
    "another dtype": lambda lease: lease.write_arrays(0, 64)[0].view(np.uint8),
    "another shape": lambda lease: lease.write_arrays(0, 64)[0][0, 0].reshape(-1),
    "a memoryview": lambda lease: memoryview(lease.write_arrays(0, 64)[0]),
    "an iterator": lambda lease: iter(lease.write_arrays(0, 64)[0]),
    "a tensor": lambda lease: lease.write_tensors(0, 64),
    "a part of a tensor": lambda lease: lease.write_tensors(0, 64)[0][0, 1, 3:9],
    "a tensor's storage": lambda lease: lease.write_tensors(0, 64)[0].untyped_storage(),
    "a tensor's array": lambda lease: lease.write_tensors(0, 64)[0].numpy(),
    "a tensor of an array": lambda lease: _tensor(lease.write_arrays(0, 64)[0]),
    "a parameter": lambda lease: _parameter(lease.write_tensors(0, 64)[0]),
}


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)[0]


def _parameter(tensor: Any) -> Any:
    import torch

    return torch.nn.Parameter(tensor)


@pytest.mark.parametrize("what", HELD)
def test_pages_are_in_use_while_there_is(lease: Lease, what: str) -> None:
    if "tensor" in what or what == "a parameter":
        pytest.importorskip("torch")
    held = [HELD[what](lease)]
    for end in (lambda: lease.commit(TOKENS), lease.abort, lease.release):
        with pytest.raises(PagesInUse, match="0 to 64"):
            end()
    assert lease.is_open
    held.clear()
    write(lease, TOKENS, 0, 64)
    assert lease.commit(TOKENS) == 64
    lease.abort()
    lease.release()
    assert not lease.is_open


def test_a_view_behind_what_is_committed_does_not_hinder_the_commit(lease: Lease) -> None:
    write(lease, TOKENS, 0, 32)
    views = lease.write_arrays(32, 64)
    assert lease.commit(TOKENS[:32]) == 32
    with pytest.raises(PagesInUse, match="32 to 64"):
        lease.commit(TOKENS[32:])
    del views


def test_a_view_that_begins_in_a_block_hinders_the_commit_of_that_block(lease: Lease) -> None:
    write(lease, TOKENS, 0, 64)
    views = lease.write_arrays(3, 64)
    with pytest.raises(PagesInUse):
        lease.commit(TOKENS[:BLOCK])
    del views


def test_pages_in_use_is_a_buffer_error(lease: Lease) -> None:
    views = lease.write_arrays(0, 1)
    with pytest.raises(BufferError):
        lease.release()
    del views


def test_read_views_do_not_hinder_anything(lease: Lease) -> None:
    write(lease, TOKENS, 0, 64)
    views = lease.read_arrays(0, 64)
    lease.commit(TOKENS)
    lease.release()
    assert np.array_equal(np.concatenate(views, axis=2), kv_of(TOKENS))


# --- commit ---


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 63, 64])
def test_commit_is_of_whole_blocks(lease: Lease, namespace: Namespace, num_tokens: int) -> None:
    write(lease, TOKENS, 0, 64)
    committed = lease.commit(TOKENS[:num_tokens])
    assert committed == lease.num_committed == num_tokens // BLOCK * BLOCK
    assert namespace.match(TOKENS).num_tokens == committed


def test_commit_goes_on_where_it_ended(lease: Lease, namespace: Namespace) -> None:
    write(lease, TOKENS, 0, 64)
    for start in range(0, 64, 8):
        assert lease.num_committed == start
        lease.commit(TOKENS[start : start + 8])
    with namespace.match(TOKENS) as found:
        assert holds(found, TOKENS)


def test_commit_of_more_than_there_are_pages_for_is_refused(lease: Lease) -> None:
    with pytest.raises(BadRequest, match="reserve them first"):
        lease.commit(tokens_of(1, 17))
    assert lease.num_committed == 0


def test_commit_takes_every_kind_of_token_ids(lease: Lease, namespace: Namespace) -> None:
    write(lease, TOKENS, 0, 64)
    kinds: list[Any] = [
        TOKENS[:4],
        tuple(TOKENS[4:8]),
        np.array(TOKENS[8:12]),
        np.array(TOKENS[12:16], np.uint32),
        np.array(TOKENS[16:20], "<u4").tobytes(),
    ]
    for kind in kinds:
        lease.commit(kind)
    assert namespace.match(TOKENS).num_tokens == 20


@pytest.mark.parametrize("tokens", [[-1] * 4, [1 << 32] * 4, [0.5] * 4, ["a"] * 4, b"123", None])
def test_what_is_no_token_id_is_refused(lease: Lease, namespace: Namespace, tokens: Any) -> None:
    with pytest.raises(BadRequest):
        lease.commit(tokens)
    with pytest.raises(BadRequest):
        namespace.match(tokens)


def test_of_two_who_compute_the_same_the_first_is_kept_and_both_read_it(
    namespace: Namespace,
) -> None:
    one = namespace.match(TOKENS, reserve_tokens=64)
    two = namespace.match(TOKENS, reserve_tokens=64)
    compute(one, TOKENS)
    compute(two, TOKENS)
    assert (one.num_committed, two.num_committed) == (64, 64)
    assert holds(one, TOKENS)
    assert holds(two, TOKENS)
    assert namespace.match(TOKENS).pages.tolist() == one.pages.tolist()


def test_after_abort_a_lease_reads_what_it_committed_where_others_were_first(
    namespace: Namespace,
) -> None:
    """Its own copies of the blocks go back with abort: its block table must not show them."""
    one = namespace.match(TOKENS, reserve_tokens=64)
    two = namespace.match(TOKENS, reserve_tokens=64)
    compute(one, TOKENS)
    compute(two, TOKENS)
    two.abort()
    for seed in range(2, 20):
        store(namespace, tokens_of(seed, 16))
    two.check()
    assert holds(two, TOKENS)


def test_sequences_branch_where_their_tokens_do(namespace: Namespace) -> None:
    branches = [TOKENS + tokens_of(seed, 4) for seed in (2, 3, 4)]
    for tokens in branches:
        store(namespace, tokens)
    leases = [namespace.match(tokens) for tokens in branches]
    assert all(holds(lease, tokens) for lease, tokens in zip(leases, branches, strict=True))
    assert len({tuple(lease.pages[:16].tolist()) for lease in leases}) == 1


# --- abort ---


def test_abort_gives_back_what_is_not_committed(lease: Lease, client: Client) -> None:
    write(lease, TOKENS, 0, 32)
    lease.commit(TOKENS[:32])
    lease.abort()
    assert (lease.capacity_tokens, lease.num_committed) == (32, 32)
    eventually(lambda: mine(client) == (1, 0))
    assert holds(lease, TOKENS, 32)


def test_after_abort_a_lease_can_reserve_anew(lease: Lease, namespace: Namespace) -> None:
    write(lease, TOKENS, 0, 32)
    lease.commit(TOKENS[:32])
    lease.abort()
    compute(lease, TOKENS)
    with namespace.match(TOKENS) as found:
        assert holds(found, TOKENS)


def test_abort_twice_is_as_once(lease: Lease) -> None:
    lease.abort()
    lease.abort()
    assert lease.is_open
    assert lease.capacity_tokens == 0


# --- ends ---


def test_release_ends_a_lease_once(lease: Lease, client: Client) -> None:
    lease.release()
    lease.release()
    assert not lease.is_open
    assert mine(client) == (0, 0)
    assert client.status().counters.get("releases_unknown", 0) == 0


USES: dict[str, Callable[[Lease], object]] = {
    "check": lambda lease: lease.check(),
    "reserve": lambda lease: lease.reserve(1000),
    "extend": lambda lease: lease.extend(),
    "read_arrays": lambda lease: lease.read_arrays(0, 1),
    "read_tensors": lambda lease: lease.read_tensors(0, 1),
    "write_arrays": lambda lease: lease.write_arrays(0, 1),
    "commit": lambda lease: lease.commit(TOKENS[:BLOCK]),
}


@pytest.mark.parametrize("use", USES)
def test_a_released_lease_cannot_be_used(lease: Lease, use: str) -> None:
    lease.release()
    with pytest.raises(LeaseEnded):
        USES[use](lease)


def test_a_with_block_releases(namespace: Namespace, client: Client) -> None:
    with namespace.match(TOKENS, reserve_tokens=64) as lease:
        assert mine(client) == (1, 16)
    assert not lease.is_open
    assert mine(client) == (0, 0)


def test_a_with_block_that_ends_with_views_in_use_says_so(namespace: Namespace) -> None:
    views = []
    lease = namespace.match(TOKENS, reserve_tokens=64)
    with pytest.raises(PagesInUse), lease:
        views += lease.write_arrays(0, 64)
    assert lease.is_open
    views.clear()
    lease.release()


def test_an_exception_releases(namespace: Namespace, client: Client) -> None:
    with pytest.raises(KeyError), namespace.match(TOKENS, reserve_tokens=64):
        raise KeyError
    assert mine(client) == (0, 0)


def test_an_exception_with_a_view_in_use_releases_when_it_is_gone(
    namespace: Namespace, client: Client
) -> None:
    views = []
    with contextlib.suppress(KeyError), namespace.match(TOKENS, reserve_tokens=64) as lease:
        views += lease.write_arrays(0, 64)
        raise KeyError
    assert mine(client) == (1, 16)
    views.clear()
    eventually(lambda: mine(client) == (0, 0))


def test_a_lease_that_is_forgotten_is_released(namespace: Namespace, client: Client) -> None:
    namespace.match(TOKENS, reserve_tokens=64)
    gc.collect()
    eventually(lambda: mine(client) == (0, 0))


def test_a_forgotten_lease_is_released_only_when_no_writable_view_is_left(
    namespace: Namespace, client: Client
) -> None:
    views = namespace.match(TOKENS, reserve_tokens=64).write_arrays(0, 64)
    gc.collect()
    beats = client.status().counters["requests"]
    eventually(lambda: client.status().counters["requests"] > beats + 20)
    assert mine(client) == (1, 16)
    views[0][:] = 1
    views.clear()
    eventually(lambda: mine(client) == (0, 0))


def test_a_lease_survives_heartbeats_and_sweeps(lease: Lease, client: Client) -> None:
    beats = client.status().counters["requests"]
    eventually(lambda: client.status().counters["requests"] > beats + 50)
    lease.check()
    assert pages_in(client, "reserved") == 16


def test_no_page_is_faulted_in_after_its_lease_let_go() -> None:
    populating, began, taken = Populating(), threading.Event(), []

    def steps() -> Iterator[None]:
        while True:
            taken.append(1)
            began.set()
            yield

    populating.begin(steps())
    (thread,) = [each for each in threading.enumerate() if each.name == "kvd-populate"]
    assert began.wait(30)
    populating.end()
    num_taken = len(taken)
    thread.join()
    assert len(taken) == num_taken


@pytest.mark.parametrize("verb", ["abort", "keep"])
def test_a_verb_that_was_interrupted_lets_nobody_write_what_is_committed(
    client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    tokens = tokens_of(1, 4)
    lease = namespace.match(tokens, reserve_tokens=len(tokens))
    compute(lease, tokens)
    call = lease.abort if verb == "abort" else partial(lease.release, keep_tokens=BLOCK)
    monkeypatch.setattr(client, "post", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()
    monkeypatch.undo()
    lease.reserve(8 * BLOCK)
    assert len(set(lease.pages.tolist())) == len(lease.pages)
    with pytest.raises(BadRequest):
        lease.write_arrays(BLOCK, 4 * BLOCK)
    assert holds(lease, tokens)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_numbers_of_numpy_are_numbers(namespace: Namespace, kind: type) -> None:
    tokens = tokens_of(1, 4)
    with namespace.match(tokens, reserve_tokens=kind(16)) as lease:
        lease.reserve(kind(32))
        compute(lease, tokens)
        lease.release(keep_tokens=kind(BLOCK))
        assert lease.num_committed == BLOCK
