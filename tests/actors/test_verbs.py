"""Verbs, over bare frames: forks, tails, copies, pins, drops and sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvd.protocol.keys import namespace_key
from kvd.protocol.messages import (
    MAX_PIECE_BYTES,
    CommitItem,
    CommitReply,
    CommitRequest,
    CommitResult,
    DoneReply,
    DropItem,
    DropReply,
    DropRequest,
    Failure,
    MatchResult,
    ResumeRequest,
    Run,
    SaveReply,
    Tail,
)
from tests.actors.wire import failed, numbers, packed, refused
from tests.e2e.support import (
    BLOCK,
    IDENTITY,
    LAYOUT,
    OPAQUE,
    PAGE_FIRST,
    eventually,
    tokens_of,
)

if TYPE_CHECKING:
    from kvd.protocol.layout import Layout
    from kvd.protocol.messages import AnyReply
    from tests.actors.wire import Wire

Join = Callable[[], "Wire"]
TOKENS = tokens_of(1, 4)
EXTRA = b"a picture of a cat, by its digest"[:32]
OTHER = b"a picture of a dog, by its digest"[:32]


# --- fork and keep ---


def test_a_fork_has_the_same_blocks_and_pages_of_its_own(wire: Wire) -> None:
    before = wire.pages().get("committed", 0)
    runs = wire.store(1, TOKENS)
    forked = wire.fork(2, 1, reserve=2)
    assert isinstance(forked, MatchResult)
    assert (forked.num_tokens, forked.runs) == (len(TOKENS), runs)
    assert len(numbers(forked.reserved)) == 2
    wire.release(1)
    assert wire.pages()["committed"] == before + 4


def test_a_fork_asked_for_again_is_the_same(wire: Wire) -> None:
    wire.store(1, TOKENS)
    first = wire.fork(2, 1, reserve=2)
    assert wire.fork(2, 1, reserve=2) == first
    assert wire.me().num_leases == 2


def test_a_lease_that_is_not_there_has_no_fork(wire: Wire) -> None:
    failed(wire.fork(2, 1), "lease_ended")
    assert wire.me().num_leases == 0


def test_a_release_may_keep_the_first_blocks(wire: Wire) -> None:
    wire.store(1, TOKENS)
    wire.reserved(1, 4, 6)
    assert isinstance(wire.release(1, keep_blocks=2), DoneReply)
    assert (wire.me().num_leases, wire.me().num_reserved) == (1, 0)
    (lease,) = (one for one in wire.leases().leases if one.session == wire.session)
    assert lease.num_blocks == 2
    runs = wire.reserved(1, 0, 2)
    assert isinstance(wire.commit(1, 2, runs, TOKENS[2 * BLOCK :]), CommitResult)


# --- exact tail ---


@pytest.mark.parametrize("common", range(1, BLOCK))
def test_a_match_may_be_exact_to_the_token(wire: Wire, common: int) -> None:
    runs = wire.store(1, TOKENS)
    prompt = TOKENS[: BLOCK + common] + tokens_of(2, 1)
    result = wire.matched(2, prompt, exact_tail=True, ahead=1)
    assert result.num_tokens == BLOCK
    assert result.tail == Tail(numbers(runs)[1], common)
    assert len(numbers(result.reserved)) == 1


def test_the_tail_is_the_lease_s_until_its_next_commit(wire: Wire) -> None:
    wire.store(1, TOKENS)
    wire.release(1)
    prompt = TOKENS[: BLOCK + 1] + tokens_of(2, 1)[: BLOCK - 1]
    result = wire.matched(2, prompt, exact_tail=True, reserve=1)
    assert result.tail is not None
    wire.matched(3, tokens_of(3, 1), reserve=wire.num_pages - 3)  # all but what is locked
    assert wire.pages()["committed"] == 2
    assert isinstance(wire.commit(2, 1, result.reserved, prompt[BLOCK:]), CommitResult)
    wire.reserved(3, wire.num_pages - 3, wire.num_pages - 2)
    pages = wire.pages()
    assert (pages["committed"], pages["reserved"]) == (2, wire.num_pages - 2)


def test_no_block_that_agrees_is_no_tail(wire: Wire) -> None:
    wire.store(1, TOKENS)
    assert wire.matched(2, tokens_of(2, 2), exact_tail=True).tail is None
    assert wire.matched(3, TOKENS, exact_tail=True).tail is None


# --- extras ---


def with_extras(wire: Wire, lease: int, extras: tuple[tuple[int, bytes], ...]) -> None:
    runs = wire.matched(lease, TOKENS, reserve=4, extras=extras).reserved
    item = CommitItem(lease, 0, runs, len(TOKENS), extras)
    reply = wire.ask(CommitRequest(**wire.envelope(), items=(item,)), TOKENS)
    assert isinstance(reply, CommitReply)
    assert isinstance(reply.results[0], CommitResult), reply


def test_equal_tokens_with_other_extras_never_meet(wire: Wire) -> None:
    wire.open("extras", extras=True)
    with_extras(wire, 1, ((BLOCK + 1, EXTRA),))
    assert wire.matched(2, TOKENS, extras=((BLOCK + 1, EXTRA),)).num_tokens == len(TOKENS)
    assert wire.matched(3, TOKENS, extras=((BLOCK + 1, OTHER),)).num_tokens == BLOCK
    assert wire.matched(4, TOKENS, extras=((BLOCK + 2, EXTRA),)).num_tokens == BLOCK
    assert wire.matched(5, TOKENS).num_tokens == BLOCK


def test_a_namespace_with_extras_is_another_than_the_one_without(wire: Wire) -> None:
    plain = wire.namespace
    wire.store(1, TOKENS)
    name = next(one.salt for one in wire.status().namespaces if one.namespace == plain)
    assert wire.open(name, extras=True) != plain
    assert wire.matched(2, TOKENS).num_tokens == 0


def test_an_opaque_layout_has_no_exact_tail(wire: Wire) -> None:
    wire.open("opaque", layout=OPAQUE)
    wire.store(1, TOKENS)
    assert "whole blocks" in failed(wire.match(2, TOKENS, exact_tail=True), "unsupported")
    assert wire.matched(2, TOKENS).num_tokens == len(TOKENS)


# --- load and store ---


def test_what_is_stored_piece_by_piece_is_loaded_by_another(wire: Wire, join: Join) -> None:
    runs = wire.matched(1, TOKENS, reserve=4).reserved
    data = {
        number: bytes([number]) * (4 * LAYOUT.slice_bytes) for number in range(LAYOUT.num_slices)
    }
    for number, piece in data.items():
        assert isinstance(wire.put(1, runs, piece, number), DoneReply)
    assert isinstance(wire.commit(1, 0, runs, TOKENS), CommitResult)
    other = join()
    found = other.matched(1, TOKENS).runs
    loaded = other.load(1, found, 0, LAYOUT.num_slices)
    assert isinstance(loaded, list)
    assert b"".join(loaded) == b"".join(data.values())


def test_only_the_pages_of_its_lease_are_loaded(wire: Wire, join: Join) -> None:
    other = join()
    runs = other.store(1, tokens_of(7, 2))
    wire.store(1, TOKENS)
    refused_load(wire, runs)
    refused_load(wire, (Run(wire.num_pages, 1),))
    refused_load(wire, (Run(0, (1 << 63) - 1),))


def refused_load(wire: Wire, runs: tuple[Run, ...]) -> None:
    reply = wire.load(1, runs)
    assert not isinstance(reply, list)
    assert reply.code in ("bad_request", "limit_exceeded")


def test_only_reserved_pages_are_stored_into(wire: Wire) -> None:
    runs = wire.store(1, TOKENS)
    refused(wire.put(1, runs, bytes(4 * LAYOUT.slice_bytes)), "bad_request")


def test_a_piece_has_the_bytes_that_it_says(wire: Wire) -> None:
    runs = wire.matched(1, TOKENS, reserve=4).reserved
    refused(wire.put(1, runs, bytes(4 * LAYOUT.slice_bytes - 1)), "bad_request")
    refused(wire.put(1, runs, b"", num_slices=LAYOUT.num_slices + 1), "bad_request")


def test_a_piece_is_bounded(wire: Wire) -> None:
    many = (Run(0, MAX_PIECE_BYTES // LAYOUT.slice_bytes + 1),)
    wire.matched(1, TOKENS, reserve=4)
    refused(wire.put(1, many, b""), "limit_exceeded")


def test_a_tail_can_be_loaded(wire: Wire) -> None:
    wire.store(1, TOKENS)
    result = wire.matched(2, TOKENS[: BLOCK + 1], exact_tail=True)
    assert result.tail is not None
    loaded = wire.load(2, (Run(result.tail.page, 1),), 0, LAYOUT.num_slices)
    assert isinstance(loaded, list)
    assert sum(map(len, loaded)) == LAYOUT.page_bytes


@pytest.mark.parametrize("layout", [PAGE_FIRST, OPAQUE], ids=lambda layout: layout.order)
def test_contiguous_pages_come_in_one_frame_and_parts_of_them_page_by_page(
    wire: Wire, layout: Layout
) -> None:
    wire.open("contiguous", layout=layout)
    runs = wire.matched(1, TOKENS, reserve=4).reserved
    data = bytes(place % 251 for place in range(4 * layout.page_bytes))
    wire.put(1, runs, data, num_slices=layout.num_slices)
    wire.commit(1, 0, runs, TOKENS)
    assert wire.load(1, runs, 0, layout.num_slices) == [data]
    second = range(layout.slice_bytes, len(data), layout.page_bytes)
    assert wire.load(1, runs, 1, 1) == [data[at : at + layout.slice_bytes] for at in second]


# --- pins ---


def test_a_pin_keeps_blocks_that_would_go(wire: Wire) -> None:
    wire.store(1, TOKENS)
    pin = wire.pinned(TOKENS)
    assert (pin.num_tokens, pin.num_bytes) == (len(TOKENS), 4 * LAYOUT.page_bytes)
    wire.release(1)
    assert wire.drop(tokens_of(9, 1)).num_detached == 0
    wire.matched(2, tokens_of(2, 1), reserve=wire.num_pages - 4)
    assert wire.matched(3, TOKENS).num_tokens == len(TOKENS)
    wire.release(3)
    assert wire.unpin("", pin.pin) == 1
    wire.reserved(2, wire.num_pages - 4, wire.num_pages)
    assert wire.matched(4, TOKENS).num_tokens == 0


def test_a_pin_outlives_its_session_and_ends_with_its_time(wire: Wire, join: Join) -> None:
    wire.store(1, TOKENS)
    owner = f"owner of {wire.namespace}"
    wire.pinned(TOKENS, owner=owner)
    wire.close()
    other = join()
    assert [pin.owner for pin in other.leases().pins] == [owner]
    other.pinned(TOKENS, 0.05, owner)  # the same pin: its time is another now
    eventually(lambda: not other.leases().pins)
    assert other.unpin(owner) == 0


def test_nothing_resident_is_nothing_pinned(wire: Wire) -> None:
    pin = wire.pinned(TOKENS)
    assert (pin.pin, pin.num_tokens) == (0, 0)
    assert not wire.leases().pins


def test_an_owner_may_pin_a_part_of_the_capacity(wire: Wire) -> None:
    tokens = tokens_of(1, wire.num_pages * 3 // 8)  # more than a quarter
    wire.store(1, tokens)
    assert "an owner may pin" in failed(wire.pin(tokens, 60.0), "limit_exceeded")
    assert not wire.leases().pins


def test_all_owners_together_may_pin_a_part_of_the_capacity(wire: Wire) -> None:
    tokens = tokens_of(1, wire.num_pages // 4)
    wire.store(1, tokens)
    for owner in ("a", "b"):
        wire.pinned(tokens, owner=owner)
    assert "together" in failed(wire.pin(tokens, 60.0, "c"), "limit_exceeded")
    assert wire.unpin("a") + wire.unpin("b") == 2


# --- drop ---


def test_a_drop_forgets_at_once_and_frees_when_the_last_lease_ends(wire: Wire) -> None:
    wire.store(1, TOKENS)
    dropped = wire.drop(TOKENS, 1)
    assert (dropped.blocks_by_tier, dropped.num_detached) == ({"host": 3}, 3)
    assert wire.pages()["detached"] == 3
    assert wire.matched(2, TOKENS).num_tokens == BLOCK
    wire.release(1)
    assert "detached" not in wire.pages()


def test_what_was_computed_before_a_drop_is_not_committed_after_it(wire: Wire) -> None:
    runs = wire.matched(1, TOKENS, reserve=4).reserved
    wire.drop()
    failed(wire.commit(1, 0, runs, TOKENS), "dropped")
    assert wire.me().num_reserved == 4
    again = wire.matched(1, TOKENS[:-1], reserve=4).reserved
    assert isinstance(wire.commit(1, 0, again, TOKENS), CommitResult)


def test_a_drop_of_everything_ends_pins(wire: Wire) -> None:
    wire.store(1, TOKENS)
    wire.release(1)
    wire.pinned(TOKENS)
    assert wire.drop().blocks_by_tier == {"host": 4}
    assert not wire.leases().pins
    assert wire.matched(2, TOKENS).num_tokens == 0


def test_a_namespace_that_there_is_not_cannot_be_dropped_or_pinned(wire: Wire) -> None:
    wire.namespace += 1000
    reply = wire.ask(DropRequest(**wire.envelope(), items=(DropItem(wire.namespace),)), b"")
    assert isinstance(reply, DropReply)
    (result,) = reply.results
    assert isinstance(result, Failure)
    failed(result, "unknown_namespace")
    failed(wire.pin(TOKENS, 1.0), "unknown_namespace")


# --- who holds what ---


def test_leases_are_listed_the_oldest_first(wire: Wire) -> None:
    wire.store(5, TOKENS)
    wire.matched(6, TOKENS, reserve=2)
    reply = wire.leases(limit=1)
    assert (reply.num_leases, [lease.lease for lease in reply.leases]) == (2, [5])
    both = wire.leases().leases
    assert [(one.num_blocks, one.num_reserved) for one in both] == [(4, 0), (4, 2)]


def test_a_shortage_names_who_holds_the_pages(wire: Wire, join: Join) -> None:
    greedy = join()
    greedy.matched(1, TOKENS, reserve=greedy.num_pages - 2)
    wire.matched(1, TOKENS)
    result = wire.reserve(1, 0, 4)
    failed(result, "out_of_pages")
    assert isinstance(result, Failure)
    assert result.details["holders"] == {greedy.session: greedy.num_pages - 2, wire.session: 0}


# --- sequences ---


def saved(reply: AnyReply) -> int:
    assert isinstance(reply, SaveReply), reply
    return reply.generation


def test_a_sequence_comes_back_as_it_was_saved(wire: Wire) -> None:
    runs = wire.matched(1, TOKENS, reserve=2).reserved
    wire.put(1, runs, bytes(range(256)))
    generation = saved(wire.save("chat", 1, TOKENS[:7], tail_page=runs[0].first + 1))
    reply, tokens, tail = wire.resume("chat")
    assert (reply.generation, tokens) == (generation + 1, packed(TOKENS[:7]))
    row = LAYOUT.slice_bytes // BLOCK
    assert tail[: 3 * row] == bytes(range(128, 128 + 3 * row))
    assert len(tail) == 3 * LAYOUT.token_bytes


def test_two_saves_that_are_sent_together_are_kept_in_their_order(wire: Wire) -> None:
    wire.matched(1, TOKENS)
    for state in (b"first", b"second"):
        wire.send_save("chat", 1, [], state=state)
    assert saved(wire.receive()) == saved(wire.receive())
    reply, *_ = wire.resume("chat")
    assert reply.state == b"second"


def test_a_save_may_name_a_page_that_its_lease_reserved_alone(wire: Wire) -> None:
    committed = wire.store(1, TOKENS)[0].first
    other = wire.matched(2, tokens_of(2, 1), reserve=1).reserved[0].first
    for page in (committed, other, wire.num_pages, 1 << 40):
        refused(wire.save("chat", 1, TOKENS[:7], tail_page=page), "bad_request")
    refused(wire.save("chat", 9, TOKENS[:7]), "lease_ended")
    refused(wire.save("chat", 1, TOKENS[:7], extras=((0, EXTRA),)), "bad_request")


def test_a_sequence_of_another_namespace_is_not_this_one_s(wire: Wire) -> None:
    wire.matched(1, TOKENS)
    saved(wire.save("chat", 1, []))
    key = namespace_key(IDENTITY, LAYOUT, "another")
    refused(
        wire.ask(ResumeRequest(**wire.envelope(), namespace_key=key, sequence="chat")),
        "unknown_sequence",
    )
