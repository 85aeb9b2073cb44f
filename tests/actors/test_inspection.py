"""What operators are told of a tree, and of a prompt that did not match."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from kvd.actors import inspection
from kvd.protocol.messages import ExplainRequest, NearMiss, Stretch, TreeRequest
from tests.actors.wire import Wire, refused
from tests.cache.conftest import Cache
from tests.e2e.support import BLOCK, LAYOUT, tokens_of

if TYPE_CHECKING:
    from kvd.protocol.messages import TreeNode

Join = Callable[[], Wire]
TOKENS = tokens_of(1, 4)
SHARED = TOKENS[: 2 * BLOCK]
IN_MEMORY = ("host",)


@pytest.fixture
def branched(wire: Wire) -> Wire:
    """Three branches of 2, 3 and 1 blocks behind two that they share."""
    for number, num_blocks in enumerate([2, 3, 1], 2):
        wire.store(number, SHARED + tokens_of(number, num_blocks))
        wire.release(number)
    return wire


def first_id(node: TreeNode) -> int:
    return int(np.frombuffer(node.tokens, "<u4")[0])


# --- tree ---


def test_an_empty_tree_has_no_nodes(wire: Wire) -> None:
    reply = wire.tree()
    assert (reply.nodes, reply.num_nodes) == ((), 0)
    assert (reply.block_size, reply.page_bytes) == (BLOCK, LAYOUT.page_bytes)


def test_the_biggest_branch_comes_first_and_parents_before_it(branched: Wire) -> None:
    reply = branched.tree()
    assert [node.num_blocks for node in reply.nodes] == [2, 3, 2, 1]
    assert [node.parent for node in reply.nodes] == [-1, 0, 0, 0]
    assert (reply.nodes[0].num_children, reply.num_nodes) == (3, 4)
    assert first_id(reply.nodes[1]) == tokens_of(3, 1)[0]


def test_a_tree_is_cut_to_what_was_asked_for(branched: Wire) -> None:
    assert [node.num_blocks for node in branched.tree(limit=2).nodes] == [2, 3]
    assert [node.num_blocks for node in branched.tree(depth=1).nodes] == [2]


def test_a_tree_may_begin_behind_tokens(branched: Wire) -> None:
    reply = branched.tree([*SHARED, 1, 2, 3])
    assert reply.num_tokens == len(SHARED)
    assert [(node.num_blocks, node.parent) for node in reply.nodes] == [(3, -1), (2, -1), (1, -1)]


def test_no_more_nodes_are_looked_at_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MAX_LOOKED_AT", 2)
    cache = Cache()
    for text in ("aw", "bwx", "cwxyz"):
        cache.fill(text)
    nodes = inspection._biggest_first(cache.namespace.tree.root, 1)
    assert [node.num_blocks for node in nodes] == [3, 2]


def test_a_node_counts_the_matches_through_it(branched: Wire) -> None:
    before = branched.tree().nodes[0].hits
    branched.matched(8, TOKENS)
    branched.matched(9, SHARED + tokens_of(3, 3))
    shared, biggest, *_ = branched.tree().nodes
    assert (shared.hits, biggest.hits) == (before + 2, 1)
    assert (shared.is_locked, shared.tiers) == (True, IN_MEMORY)


def test_a_node_tells_its_age_in_leases_that_ended_since(branched: Wire) -> None:
    ages = {first_id(node): node.age_touches for node in branched.tree().nodes[1:]}
    assert [ages[tokens_of(number, 1)[0]] for number in (2, 3, 4)] == [2, 1, 0]


# --- explain ---


def test_a_prompt_that_is_there_is_one_stretch(branched: Wire) -> None:
    reply = branched.explain(SHARED + tokens_of(2, 2))
    assert reply.stretches == (Stretch(4 * BLOCK, IN_MEMORY),)
    assert (reply.num_common_tokens, reply.num_evicted_tokens, reply.near) == (0, 0, ())


def test_a_prompt_that_leaves_the_tree_tells_in_which_token(branched: Wire) -> None:
    other = tokens_of(2, 2)
    other[BLOCK + 3] += 1
    reply = branched.explain(SHARED + other)
    assert sum(one.num_tokens for one in reply.stretches) == 3 * BLOCK
    assert reply.num_common_tokens == 3


def test_what_was_evicted_is_told_from_what_was_never_there(wire: Wire) -> None:
    wire.store(1, TOKENS)
    wire.release(1)
    wire.matched(2, [], reserve=wire.num_pages)
    wire.release(2)
    assert wire.explain(TOKENS + tokens_of(2, 1)).num_evicted_tokens == len(TOKENS)
    assert wire.explain(tokens_of(2, 1)).num_evicted_tokens == 0


def test_another_namespace_that_has_more_of_it_is_near(wire: Wire) -> None:
    tokens = tokens_of(8, 4)
    wire.store(1, tokens)
    there = wire.namespace
    wire.open("another salt")
    reply = wire.explain(tokens)
    assert (reply.stretches, reply.near) == ((), (NearMiss(there, len(tokens)),))


def test_a_near_namespace_may_have_other_blocks_and_extras(wire: Wire) -> None:
    layout = replace(LAYOUT, block_size=2 * BLOCK)
    tokens = tokens_of(7, 4)
    wide = wire.open("wide", layout=layout, extras=True)
    wire.commit(1, 0, wire.matched(1, tokens, reserve=2).reserved, tokens)
    wire.open("plain")
    assert wire.explain(tokens).near == (NearMiss(wide, len(tokens)),)


@pytest.mark.parametrize("kind", [TreeRequest, ExplainRequest])
def test_what_cannot_be_asked_is_refused(
    wire: Wire, kind: type[TreeRequest | ExplainRequest]
) -> None:
    envelope = wire.envelope()
    refused(wire.ask(kind(**envelope, namespace=9999, num_tokens=0)), "unknown_namespace")
    refused(wire.ask(kind(**envelope, namespace=1, num_tokens=3), [1]), "bad_request")


def test_neither_needs_a_session(branched: Wire, connect: Join) -> None:
    stranger = connect()
    stranger.namespace = branched.namespace
    assert len(stranger.tree().nodes) == 4
    assert stranger.explain(SHARED).stretches == (Stretch(len(SHARED), IN_MEMORY),)
