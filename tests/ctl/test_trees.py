"""What `kvd-ctl tree` and `kvd-ctl explain` say of what there is, and of what there is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from msgspec.structs import replace

from tests.e2e.support import BLOCK, IDENTITY, LAYOUT, NUM_PAGES, store, tokens_of

if TYPE_CHECKING:
    from kvd_client import Client, Namespace

Ctl: TypeAlias = Callable[..., str]
Ask: TypeAlias = Callable[..., Any]

SHARED = tokens_of(1, 2)
SHORT, LONG = SHARED + tokens_of(2, 1), SHARED + tokens_of(3, 3)


def listed(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def number_of(namespace: Namespace) -> int:
    spaces = namespace.client.status().namespaces
    return next(each.namespace for each in spaces if each.salt == namespace.salt)


@pytest.fixture
def number(namespace: Namespace) -> int:
    """A namespace with two branches, by its number."""
    for tokens in (SHORT, LONG):
        store(namespace, tokens)
    return number_of(namespace)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer whose words are letters, by their place in the alphabet."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {chr(97 + place): place for place in range(26)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return folder


# --- tree ---


def test_a_tree_has_each_branch_below_what_it_follows(number: int, ctl: Ctl) -> None:
    *_, title, head, shared, long, short = ctl("tree", number).splitlines()
    assert title == "tree:"
    assert head.split()[:4] == ["blocks", "bytes", "hits", "age"]
    assert shared.split()[0] == "2"
    assert shared.rstrip().endswith(listed(SHARED))
    assert long.rstrip().endswith(f"  {listed(LONG[2 * BLOCK :])}")
    assert short.split()[0] == "1"


def test_branches_may_be_had_in_the_order_of_their_tokens(number: int, ctl: Ctl) -> None:
    *_, first, second = ctl("tree", number, "--in-order").splitlines()
    assert (first.split()[0], second.split()[0]) == ("1", "3")


def test_a_tree_is_cut_to_a_depth_and_a_number(number: int, ask: Ask) -> None:
    assert [node["num_blocks"] for node in ask("tree", number, "--depth", 1)["nodes"]] == [2]
    assert [node["num_blocks"] for node in ask("tree", number, "--limit", 2)["nodes"]] == [2, 3]


def test_a_tree_may_begin_behind_tokens(number: int, ask: Ask) -> None:
    said = ask("tree", number, listed(SHARED))
    assert said["num_tokens"] == len(SHARED)
    assert [node["tokens"] for node in said["nodes"]] == [LONG[2 * BLOCK :], SHORT[2 * BLOCK :]]


def test_a_tree_can_be_read_as_text(
    namespace: Namespace, tokenizer: Path, ctl: Ctl, ask: Ask
) -> None:
    store(namespace, [10, 21, 3, 2])
    number = number_of(namespace)
    assert "'k v d c'" in ctl("tree", number, "--tokenizer", tokenizer)
    assert ask("tree", number, "--tokenizer", tokenizer)["nodes"][0]["text"] == "k v d c"


def test_an_empty_tree_is_told_in_words(namespace: Namespace, ctl: Ctl) -> None:
    namespace.match(SHARED).release()
    assert ctl("tree", number_of(namespace)).endswith("tree: none\n")


# --- explain ---


def test_a_prompt_that_is_there_matches_whole(number: int, ctl: Ctl) -> None:
    said = ctl("explain", number, listed(SHORT))
    assert said.splitlines()[-1] == f"all whole blocks of these {len(SHORT)} tokens match"


def test_less_than_a_block_is_told_to_be_so(number: int, ctl: Ctl) -> None:
    said = ctl("explain", number, listed(SHARED[: BLOCK - 1]))
    assert said.splitlines()[-1] == f"these {BLOCK - 1} tokens are less than a block of {BLOCK}"


def test_a_prompt_that_leaves_the_tree_is_told_where(number: int, ctl: Ctl, ask: Ask) -> None:
    other = [*SHARED, LONG[2 * BLOCK], 1, 2, 3]
    said = ctl("explain", number, listed(other))
    assert f"from token {len(SHARED) + 1} on they are not there, in block 2" in said
    assert f"never there, dropped, or evicted long ago: {BLOCK} tokens" in said
    said = ask("explain", number, listed(other))
    assert (said["num_matched_tokens"], said["num_common_tokens"]) == (len(SHARED), 1)
    assert said["stretches"] == [{"num_tokens": len(SHARED), "tiers": ["host"]}]


def test_what_was_evicted_is_said_to_be(number: int, namespace: Namespace, ctl: Ctl) -> None:
    with namespace.match([], reserve_tokens=NUM_PAGES * BLOCK):
        pass
    assert f"evicted not long ago: the next {len(LONG)} tokens" in ctl(
        "explain", number, listed(LONG)
    )


def test_a_near_miss_is_told_with_what_differs(
    namespace: Namespace, client: Client, ctl: Ctl, ask: Ask
) -> None:
    tokens = tokens_of(9, 4)
    store(namespace, tokens)
    here = client.open(replace(IDENTITY, adapter="x"), replace(LAYOUT, block_size=8), salt="here")
    here.match(tokens).release()
    (near,) = ask("explain", number_of(here), listed(tokens))["near"]
    assert (near["namespace"], near["num_tokens"]) == (number_of(namespace), len(tokens))
    assert near["differs"] == {
        "salt": [namespace.salt, "here"],
        "adapter": ["", "x"],
        "block_size": [BLOCK, 8],
    }
    assert "adapter '', not 'x'" in ctl("explain", number_of(here), listed(tokens))


def test_a_text_is_explained_by_its_tokenizer(
    namespace: Namespace, tokenizer: Path, ask: Ask
) -> None:
    store(namespace, [10, 21, 3, 2])
    said = ask("explain", number_of(namespace), "--text", "k v d c x", "--tokenizer", tokenizer)
    assert (said["num_matched_tokens"], said["num_tokens"]) == (4, 5)
