"""Verbs, over bare frames, where a store has what memory has not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvd.protocol.codec import encode
from kvd.protocol.messages import (
    CommitResult,
    DoneReply,
    DropItem,
    DropReply,
    DropRequest,
    MatchResult,
    Run,
    Stretch,
)
from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd.testing.faults import Faults, set_faults
from tests.actors.wire import Wire, failed, numbers, refused, soon
from tests.e2e.support import BLOCK, eventually, faultless_daemon, tokens_of, with_store

if TYPE_CHECKING:
    Join = Callable[[], Wire]
    Switch = Callable[[Faults], None]

TOKENS = tokens_of(1, 16)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with faultless_daemon(with_store()) as daemon:
        yield daemon


@pytest.fixture
def store_is(daemon: RunningDaemon, join: Join) -> Iterator[Switch]:
    """Switches the faults of the store; it has none before the clients end."""
    yield lambda faults: set_faults(daemon.data_directory, faults)
    set_faults(daemon.data_directory, Faults.NONE)


def count(wire: Wire, name: str) -> int:
    return wire.status().counters.get(name, 0)


def save(wire: Wire, tokens: list[int], lease: int = 99) -> tuple[Run, ...]:
    """Have these blocks in memory and in the store, under a lease that stays."""
    before = count(wire, "blocks_demoted")
    runs = wire.store(lease, tokens)
    eventually(lambda: count(wire, "blocks_demoted") == before + len(tokens) // BLOCK)
    return runs


def evict(wire: Wire) -> None:
    """Have no block in memory."""
    wire.matched(98, [], reserve=wire.num_pages)
    wire.release(98)
    assert wire.pages().get("committed", 0) == 0


def put_away(wire: Wire, tokens: list[int]) -> None:
    """Have these blocks in the store alone."""
    save(wire, tokens)
    wire.release(99)
    evict(wire)


def waits(wire: Wire, observer: Wire) -> None:
    """Return when the wire's match has a lease, of which it does not know yet."""

    def has_lease() -> bool:
        sessions = observer.status().sessions
        return any(one.num_leases for one in sessions if one.session == wire.session)

    eventually(has_lease)


def has_dropped(observer: Wire) -> bool:
    """Whether a drop in the namespace has begun."""
    spaces = observer.status().namespaces
    return any(space.generation for space in spaces if space.namespace == observer.namespace)


# --- what is told of it ---


def test_a_prompt_is_explained_tier_by_tier(wire: Wire) -> None:
    put_away(wire, TOKENS)
    wire.matched(1, TOKENS[: 4 * BLOCK])
    assert wire.explain(TOKENS).stretches == (
        Stretch(4 * BLOCK, ("host", "faulty")),
        Stretch(12 * BLOCK, ("faulty",)),
    )


def test_a_tree_has_what_memory_has_not(wire: Wire) -> None:
    put_away(wire, TOKENS)
    (node,) = wire.tree().nodes
    assert (node.num_blocks, node.tiers) == (16, ("faulty",))


# --- match ---


def test_a_match_waits_for_what_the_store_has(wire: Wire) -> None:
    put_away(wire, TOKENS)
    result = wire.matched(1, TOKENS, reserve=1)
    assert (result.num_tokens, result.pending_tokens) == (len(TOKENS), 0)
    assert result.tokens_by_tier == {"faulty": len(TOKENS)}
    assert len(numbers(result.runs + result.reserved)) == 17


def test_a_match_tells_what_was_in_memory_from_what_was_not(wire: Wire) -> None:
    put_away(wire, TOKENS)
    wire.matched(1, TOKENS[: 4 * BLOCK])
    assert wire.matched(2, TOKENS).tokens_by_tier == {"host": 4 * BLOCK, "faulty": 12 * BLOCK}


def test_a_tail_comes_from_the_store_with_its_block(wire: Wire) -> None:
    put_away(wire, TOKENS[: 4 * BLOCK])
    result = wire.matched(1, TOKENS[: 3 * BLOCK + 2], exact_tail=True, ahead=1)
    assert result.num_tokens == 3 * BLOCK


def test_by_its_deadline_a_match_has_what_was_there_and_says_what_comes(
    wire: Wire, store_is: Switch
) -> None:
    put_away(wire, TOKENS)
    wire.matched(1, TOKENS[: 4 * BLOCK])
    store_is(Faults.STUCK)
    result = wire.matched(2, TOKENS, deadline_ns=soon(0.2))
    assert (result.num_tokens, result.pending_tokens) == (4 * BLOCK, 12 * BLOCK)
    store_is(Faults.NONE)
    extended = wire.extended(2, TOKENS)
    assert (extended.num_tokens, extended.pending_tokens) == (len(TOKENS), 0)
    assert extended.runs[0].first == result.runs[0].first


def test_what_two_ask_for_at_once_is_read_once(wire: Wire, join: Join, store_is: Switch) -> None:
    put_away(wire, TOKENS)
    promoted, both = count(wire, "blocks_promoted"), (join(), join())
    store_is(Faults.STUCK)
    for each in both:
        each.begin_match(1, TOKENS)
        waits(each, wire)
    store_is(Faults.NONE)
    first, second = (each.end_match() for each in both)
    assert isinstance(first, MatchResult)
    assert isinstance(second, MatchResult)
    assert first.runs == second.runs
    assert first.num_tokens == len(TOKENS)
    assert count(wire, "blocks_promoted") == promoted + 16


def test_a_release_overtakes_the_match_that_waits(wire: Wire, join: Join, store_is: Switch) -> None:
    put_away(wire, TOKENS)
    store_is(Faults.STUCK)
    wire.begin_match(1, TOKENS)
    waits(wire, join())
    assert isinstance(wire.release(1), DoneReply)
    store_is(Faults.NONE)
    failed(wire.end_match(), "lease_ended")
    assert wire.me().num_leases == 0


def test_of_a_session_that_ends_while_its_match_waits_nothing_is_left(
    wire: Wire, join: Join, store_is: Switch
) -> None:
    put_away(wire, TOKENS)
    store_is(Faults.STUCK)
    other = join()
    other.begin_match(1, TOKENS, reserve=4)
    waits(other, wire)
    other.close()
    eventually(lambda: len(wire.status().sessions) == 1)
    store_is(Faults.NONE)
    assert wire.matched(1, TOKENS).num_tokens == len(TOKENS)
    assert wire.pages() == {"committed": 16, "free": wire.num_pages - 16}


def test_of_what_memory_has_no_room_for_the_first_blocks_come(wire: Wire, join: Join) -> None:
    put_away(wire, TOKENS)
    greedy = join()
    greedy.matched(1, [], reserve=wire.num_pages - 12)
    result = wire.matched(1, TOKENS)
    assert 0 < result.num_tokens <= 12 * BLOCK
    assert result.num_tokens + result.pending_tokens == len(TOKENS)
    assert sum(result.tokens_by_tier.values()) == result.num_tokens
    greedy.release(1)
    assert wire.extended(1, TOKENS).num_tokens == len(TOKENS)


def test_a_store_that_fails_is_a_miss(wire: Wire, store_is: Switch) -> None:
    put_away(wire, TOKENS)
    store_is(Faults.GONE)
    result = wire.matched(1, TOKENS)
    assert (result.num_tokens, result.pending_tokens) == (0, 0)
    store_is(Faults.NONE)
    eventually(lambda: wire.matched(2, TOKENS).num_tokens == len(TOKENS))


# --- extend and prefetch ---


def test_extend_is_of_a_match_of_these_tokens_that_committed_nothing(wire: Wire) -> None:
    runs = save(wire, TOKENS, 1)
    failed(wire.extend(1, TOKENS), "bad_request")
    assert wire.matched(2, TOKENS).runs == runs
    failed(wire.extend(2, tokens_of(2, 16)), "bad_request")
    failed(wire.extend(3, TOKENS), "lease_ended")
    assert wire.extended(2, TOKENS).runs == runs


def test_an_extended_lease_keeps_its_pages_and_its_generation(wire: Wire, join: Join) -> None:
    first = wire.matched(1, TOKENS, reserve=16)
    save(join(), TOKENS[: 4 * BLOCK])
    extended = wire.extended(1, TOKENS)
    assert (extended.slot, extended.generation) == (first.slot, first.generation)
    (run,) = first.reserved
    own = (Run(run.first, 12),)
    assert isinstance(wire.commit(1, 4, own, TOKENS[4 * BLOCK :]), CommitResult)


def test_what_is_prefetched_is_in_memory_before_anyone_asks(wire: Wire) -> None:
    put_away(wire, TOKENS)
    promoted = count(wire, "blocks_promoted")
    assert isinstance(wire.prefetch(TOKENS), DoneReply)
    eventually(lambda: count(wire, "blocks_promoted") == promoted + 16)
    assert wire.matched(1, TOKENS).tokens_by_tier == {"host": len(TOKENS)}


def test_what_cannot_be_prefetched_is_refused(wire: Wire) -> None:
    assert isinstance(wire.prefetch(tokens_of(7, 4)), DoneReply)  # nobody has it
    wire.namespace += 1000
    refused(wire.prefetch(TOKENS), "unknown_namespace")


# --- drop ---


def test_a_drop_says_how_much_of_it_was_where(wire: Wire) -> None:
    put_away(wire, TOKENS)
    wire.matched(1, TOKENS[: 4 * BLOCK])
    wire.release(1)
    assert wire.drop(TOKENS, 2).blocks_by_tier == {"host": 2, "faulty": 14}
    assert wire.matched(2, TOKENS).num_tokens == 2 * BLOCK


def test_what_is_dropped_on_its_way_up_does_not_arrive(
    wire: Wire, join: Join, store_is: Switch
) -> None:
    put_away(wire, TOKENS)
    other = join()
    store_is(Faults.STUCK)
    other.begin_match(1, TOKENS)
    waits(other, wire)
    observer = join()
    wire.send(encode(DropRequest(**wire.envelope(), items=(DropItem(wire.namespace),))), b"")
    eventually(lambda: has_dropped(observer))
    store_is(Faults.NONE)
    assert isinstance(wire.receive(), DropReply)
    found = other.end_match()
    assert isinstance(found, MatchResult)
    assert (found.num_tokens, found.pending_tokens) == (0, 0)
    assert wire.matched(2, TOKENS).num_tokens == 0
    assert "committed" not in wire.pages()


def test_what_was_dropped_is_nowhere_once_the_drop_is_answered() -> None:
    with running_daemon(with_store()) as daemon, closing(Wire(daemon.endpoint)) as wire:
        wire.attach()
        wire.open()
        save(wire, TOKENS)
        assert wire.drop(TOKENS, 4).blocks_by_tier == {"host": 12, "faulty": 12}
        daemon.restart()
        with closing(Wire(daemon.endpoint)) as again:
            again.attach()
            again.open()
            assert again.matched(1, TOKENS).num_tokens == 4 * BLOCK
            assert count(again, "blocks_recovered") == 4


# --- commit ---


def test_a_commit_over_blocks_of_an_earlier_epoch_waits_until_they_are_verified() -> None:
    with running_daemon(with_store()) as daemon, closing(Wire(daemon.endpoint)) as wire:
        wire.attach()
        wire.open()
        runs = save(wire, TOKENS, 1)
        daemon.restart()
        with closing(Wire(daemon.endpoint)) as again:
            again.attach()
            again.open()
            own = again.matched(1, [], reserve=16).reserved
            done = again.commit(1, 0, own, TOKENS)
            assert isinstance(done, CommitResult)
            assert (done.runs, done.num_duplicates) == (runs, 16)


# --- a store that hangs ---


def test_what_waits_for_a_store_that_hangs_holds_few_pages(wire: Wire, store_is: Switch) -> None:
    prompts = [tokens_of(seed, 16) for seed in range(1, 8)]
    for number, tokens in enumerate(prompts):
        save(wire, tokens, number)
        wire.release(number)
    evict(wire)
    store_is(Faults.STUCK)
    for number, tokens in enumerate(prompts):
        assert wire.matched(number, tokens, deadline_ns=soon(0.1)).pending_tokens == len(tokens)
    assert wire.pages()["reserved"] < wire.num_pages // 4
    room = wire.num_pages * 3 // 4
    assert len(numbers(wire.matched(99, [], reserve=room).reserved)) == room
