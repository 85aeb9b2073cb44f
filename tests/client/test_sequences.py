"""Sequences saved by one client and resumed by another: mapped and copied, threads and tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from kvd.protocol.messages import MAX_STATE_BYTES
from kvd_client import BadRequest, LeaseEnded, SequenceTaken, UnknownSequence
from kvd_client.aio import AsyncClient
from kvd_client.client import Client
from tests.e2e.support import (
    BLOCK,
    EXTENT_PAGES,
    IDENTITY,
    LAYOUT,
    holds,
    store,
    tokens_of,
    write,
)

if TYPE_CHECKING:
    from kvd.testing.daemons import RunningDaemon
    from kvd_client import Lease, Namespace

Open: TypeAlias = Callable[[Client], "Namespace"]

TOKENS = tokens_of(1, 4)
IMAGE = b"i" * 32


@pytest.fixture(params=[True, False], ids=["mapped", "copied"])
def maps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def connect(connect: Callable[..., Client], maps: bool) -> Callable[[], Client]:
    return lambda: connect(maps=maps)


@pytest.fixture
def other(connect: Callable[[], Client], open_namespace: Open) -> Namespace:
    """The same namespace in another client."""
    return open_namespace(connect())


def go_on(lease: Lease, tokens: list[int]) -> None:
    """Write the rows of all tokens that have none here, and commit the whole blocks."""
    lease.reserve(len(tokens))
    write(lease, tokens, lease.num_tokens, len(tokens))
    lease.commit(tokens[lease.num_committed :])


def saved(namespace: Namespace, tokens: list[int], **options: Any) -> int:
    with namespace.match(tokens) as lease:
        go_on(lease, tokens)
        return lease.save("chat", tokens, **options)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 15, 16])
def test_another_client_goes_on_where_a_sequence_was_saved(
    namespace: Namespace, other: Namespace, num_tokens: int
) -> None:
    tokens = TOKENS[:num_tokens]
    generation = saved(namespace, tokens, state=b"sampler")
    resumed = other.resume("chat", reserve_tokens=8)
    assert (resumed.tokens.tolist(), resumed.state) == (tokens, b"sampler")
    assert resumed.generation > generation
    with resumed.lease as lease:
        assert (lease.num_tokens, lease.num_committed) == (num_tokens, num_tokens // BLOCK * BLOCK)
        assert holds(lease, tokens)
        go_on(lease, tokens + tokens_of(2, 2))
        assert holds(lease, tokens + tokens_of(2, 2))


def test_who_saved_before_saves_no_more(namespace: Namespace, other: Namespace) -> None:
    lease = namespace.match(TOKENS, reserve_tokens=16)
    generation = lease.save("chat", TOKENS[:2])
    with pytest.raises(SequenceTaken):
        other.match([]).save("chat", [])
    resumed = other.resume("chat")
    for stale in (generation, 0):
        with pytest.raises(SequenceTaken):
            lease.save("chat", TOKENS[:3], generation=stale)
    resumed.lease.save("chat", TOKENS[:2], generation=resumed.generation)
    assert namespace.resume("chat").tokens.tolist() == TOKENS[:2]


def test_each_save_takes_the_place_of_the_last(namespace: Namespace, other: Namespace) -> None:
    lease, generation = namespace.match([], reserve_tokens=16), 0
    for stop in range(1, 15):
        write(lease, TOKENS, stop - 1, stop)
        lease.commit(TOKENS[lease.num_committed : stop])
        generation = lease.save("chat", TOKENS[:stop], bytes([stop]), generation=generation)
    resumed = other.resume("chat")
    assert (len(resumed.tokens), resumed.state) == (14, bytes([14]))
    assert holds(resumed.lease, TOKENS, 14)
    assert other.sequences().num_sequences == 1


def test_a_first_save_said_again_is_the_same(namespace: Namespace) -> None:
    assert saved(namespace, TOKENS[:5]) == saved(namespace, TOKENS[:7])
    assert len(namespace.resume("chat").tokens) == 7


def test_a_tail_without_its_blocks_is_not_taken(namespace: Namespace, other: Namespace) -> None:
    saved(namespace, TOKENS[:10])
    namespace.drop(TOKENS, from_token=BLOCK)
    resumed = other.resume("chat", reserve_tokens=16)
    assert resumed.tokens.tolist() == TOKENS[:10]
    assert resumed.lease.num_tokens == BLOCK
    go_on(resumed.lease, TOKENS)
    assert holds(resumed.lease, TOKENS)


def test_without_a_page_for_it_a_tail_is_computed_again(
    namespace: Namespace, other: Namespace
) -> None:
    saved(namespace, TOKENS[:10])
    blocks = namespace.match(TOKENS[:10])
    greedy = [namespace.match([]), other.match([])]  # neither client may have all of them
    greedy[0].reserve(3 * EXTENT_PAGES * BLOCK)
    greedy[1].reserve((EXTENT_PAGES - 2) * BLOCK)
    resumed = other.resume("chat", timeout=1.0)
    assert resumed.lease.num_tokens == blocks.num_tokens == 8
    assert resumed.lease.shortage is not None


def test_rows_within_committed_blocks_need_no_tail(namespace: Namespace, other: Namespace) -> None:
    store(namespace, TOKENS)
    with namespace.match(TOKENS) as lease:
        lease.save("chat", TOKENS[:10])
    resumed = other.resume("chat")
    assert resumed.lease.num_tokens == 10
    assert holds(resumed.lease, TOKENS, 10)


def test_extras_are_part_of_a_sequence(client: Client, request: pytest.FixtureRequest) -> None:
    images = client.open(IDENTITY, LAYOUT, salt=request.node.name, extras=True)
    with images.match(TOKENS, reserve_tokens=16, extras=[(5, IMAGE)]) as lease:
        write(lease, TOKENS, 0, 10)
        lease.commit(TOKENS[:8], extras=[(5, IMAGE)])
        lease.save("chat", TOKENS[:10], extras=[(5, IMAGE)])
    with images.resume("chat").lease as lease:
        assert lease.num_tokens == 10
        assert holds(lease, TOKENS, 10)


def test_a_discarded_sequence_is_neither_resumed_nor_saved_on(
    namespace: Namespace, other: Namespace
) -> None:
    generation = saved(namespace, TOKENS[:5])
    with pytest.raises(SequenceTaken):
        other.discard("chat", generation=generation + 1)
    assert other.discard("chat", generation=generation)
    assert not other.discard("chat")
    with pytest.raises(UnknownSequence):
        namespace.resume("chat")
    with pytest.raises(UnknownSequence):
        saved(namespace, TOKENS[:6], generation=generation)


def test_sequences_are_listed_the_oldest_first(namespace: Namespace, client: Client) -> None:
    lease = namespace.match([], reserve_tokens=8)
    for name in ("first", "second"):
        lease.save(name, TOKENS[:5], b"state")
    both = namespace.sequences().sequences
    assert [each.sequence for each in both] == ["first", "second"]
    assert both[0].num_bytes == 5 * 4 + LAYOUT.token_bytes + 5
    listed = client.sequences(namespace_key=both[0].namespace_key, sequence="second")
    assert [each.salt for each in listed.sequences] == [namespace.salt]
    limited = namespace.sequences(limit=1)
    assert (len(limited.sequences), limited.num_sequences) == (1, 2)
    assert client.discard(both[0].namespace_key, "first")


def test_a_released_lease_saves_nothing(namespace: Namespace) -> None:
    lease = namespace.match(TOKENS)
    lease.release()
    with pytest.raises(LeaseEnded):
        lease.save("chat", [])


@pytest.mark.parametrize(
    ("name", "tokens", "options"),
    [
        ("", [], {}),
        ("x" * 65, [], {}),
        (7, [], {}),
        ("chat", [-1], {}),
        ("chat", [*TOKENS, *TOKENS, *TOKENS, *TOKENS, 1], {}),
        ("chat", [], {"state": bytes(MAX_STATE_BYTES + 1)}),
        ("chat", [], {"state": 7}),
        ("chat", [], {"generation": -1}),
        ("chat", [], {"generation": "1"}),
        ("chat", [], {"extras": [(0, IMAGE)]}),
        ("chat", [1], {"extras": [(0, IMAGE)]}),
        ("chat", [], {"timeout": "long"}),
    ],
)
def test_what_is_no_sequence_is_refused(
    namespace: Namespace, name: Any, tokens: list[int], options: dict[str, Any]
) -> None:
    with namespace.match([], reserve_tokens=16) as lease, pytest.raises(BadRequest):
        lease.save(name, tokens, **options)
    assert namespace.sequences().num_sequences == 0


async def test_tasks_save_and_resume_alike(
    daemon: RunningDaemon, maps: bool, request: pytest.FixtureRequest
) -> None:
    async with AsyncClient(daemon.endpoint, timeout=30.0, maps=maps) as client:
        namespace = client.open(IDENTITY, LAYOUT, salt=request.node.name)
        async with await namespace.match([], reserve_tokens=16) as lease:
            write(lease, TOKENS, 0, 10)
            await lease.commit(TOKENS[:8])
            generation = await lease.save("chat", TOKENS[:10], b"state")
        resumed = await namespace.resume("chat", reserve_tokens=4)
        with resumed.lease:
            assert holds(resumed.lease, TOKENS, 10)
        assert resumed.generation > generation
        assert (await namespace.sequences()).num_sequences == 1
        assert (await client.sequences(sequence="chat")).num_sequences >= 1
        assert await namespace.discard("chat", generation=resumed.generation)
