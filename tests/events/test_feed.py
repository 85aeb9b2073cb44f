"""Feed: what batches tell of a cache, and which of them are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvd.actors.feed import BATCH_BLOCKS, Feed
from kvd.cache.rows import row_bytes, rows_of
from kvd.config import EventConfig
from kvd.protocol.events import AllBlocksCleared, BlockStored, decode_batch, hashes_of
from kvd.protocol.keys import Identity, chain
from tests.cache.conftest import FOURS, LAYOUT, Cache, disk, packed
from tests.events.conftest import Map, truth

if TYPE_CHECKING:
    from kvd.actors.feed import Message
    from kvd.protocol.events import Event

EPOCH = 7
MEDIA = ("CPU", "DISK")


def feed_of(cache: Cache, **config: Any) -> Feed:
    return Feed(EventConfig(topic_instance="pod", **config), cache.state, MEDIA, EPOCH)


def events_of(messages: Iterable[Message]) -> list[Event]:
    return [event for message in messages for event in decode_batch(message.payload)[1]]


def topics(messages: Iterable[Message]) -> list[str]:
    return [message.topic.decode() for message in messages]


def keys(text: str, parent: bytes = b"") -> bytes:
    return b"".join(chain(parent, packed(text), LAYOUT.page_bytes))


def test_a_commit_is_told_with_tokens_and_what_it_follows() -> None:
    feed = feed_of(cache := Cache())
    list(feed.begin())
    lease = cache.hold("ab")
    cache.commit(lease, "c")
    first, second, third = hashes_of(keys("abc"))
    assert events_of(feed.news()) == [
        BlockStored(
            hashes, parent, tokens, 1, None, "CPU", None,
            locality="LOCAL", ownership="kvd", epoch=EPOCH,
        )
        for hashes, parent, tokens in [
            ([first, second], None, [ord("a"), ord("b")]),
            ([third], second, [ord("c")]),
        ]
    ]  # fmt: skip


def test_a_start_clears_all_and_then_tells_what_is_there() -> None:
    cache = Cache()
    cache.fill("abc")
    cache.tenant("t")
    cache.fill("xy", salt="t")
    messages = list(feed_of(cache).begin())
    assert topics(messages) == ["kv@pod@", "kv@pod@model", "kv@pod@model"]
    cleared, again, *stored = events_of(messages)
    assert cleared == again == AllBlocksCleared(EPOCH)
    assert [event.extra_keys for event in stored] == [None, [["t"], None]]


def test_what_is_told_is_what_is_there() -> None:
    cache = Cache(stores=[store := disk(4)])
    feed, known = feed_of(cache), Map()
    known.read(feed.begin())
    for text in ("abcd", "abxy", "ef"):
        cache.fill(text)
        cache.save(store)
        cache.evict(2)
        known.read(feed.news())
        assert known.blocks == truth(cache.state, *MEDIA)
    cache.state.drop(cache.namespace, packed("ab"))
    known.read(feed.news())
    assert known.blocks == truth(cache.state, *MEDIA)


def test_a_copy_below_is_told_before_memory_forgets() -> None:
    cache = Cache(stores=[store := disk()])
    feed = feed_of(cache)
    list(feed.begin())
    cache.store("a", store)
    assert [(type(event).__name__, event.medium) for event in events_of(feed.news())] == [
        ("BlockStored", "CPU"),
        ("BlockStored", "DISK"),
        ("BlockRemoved", "CPU"),
    ]


def test_many_blocks_are_told_in_batches_that_follow_each_other() -> None:
    cache = Cache(num_pages=(count := 2 * BATCH_BLOCKS + 16))
    feed, known = feed_of(cache), Map()
    list(feed.begin())
    cache.fill("".join(map(chr, range(1, count + 1))))
    messages = list(feed.news())
    known.read(messages)
    assert [message.seq[-1] for message in messages] == [1, 2, 3]
    assert known.blocks == truth(cache.state, *MEDIA)


def test_adapters_images_and_salts_are_told_beside_tokens() -> None:
    width = row_bytes(extras=True)
    cache = Cache(layout=FOURS, row_bytes=width)
    arena = cache.state.find_arena(FOURS, width)
    space = cache.state.open_namespace(1, b"k" * 32, Identity("m", "r", "lora"), "t", arena)
    image = bytes([1]) * 32
    rows = rows_of(packed("abcdefgh"), ((1, image), (2, image)), 0, width)
    feed = feed_of(cache)
    list(feed.begin())
    lease = cache.state.match(1, 1, space, rows).lease
    pages = cache.reserve(lease, 2)
    cache.state.commit(lease, 0, np.array(pages, np.int64), rows)
    (stored,) = events_of(feed.news())
    assert (stored.lora_name, stored.token_ids) == ("lora", list(map(ord, "abcdefgh")))
    assert stored.extra_keys == [["lora", [image.hex(), 1], "t"], ["lora"]]


def test_of_a_model_in_shards_the_first_one_is_told() -> None:
    feed = feed_of(cache := Cache())
    list(feed.begin())
    shard = Identity("model", "main", shard_rank=1, shard_size=2)
    space = cache.state.open_namespace(1, b"shard", shard, "", cache.arena)
    lease = cache.state.match(1, 1, space, packed("a")).lease
    cache.commit(lease, "a")
    assert not feed.has_news
    assert topics(feed.snapshot()) == ["kv@pod@"]


@pytest.mark.parametrize(("bound", "kept"), [({"buffer_batches": 2}, 2), ({"buffer_bytes": 1}, 1)])
def test_the_last_batches_are_kept_within_both_bounds(bound: dict[str, int], kept: int) -> None:
    feed = feed_of(cache := Cache(), **bound)
    list(feed.begin())
    for text in "abc":
        cache.fill(text)
        list(feed.news())
    assert (feed.first_seq, feed.next_seq) == (4 - kept, 4)
    assert feed.kept(3).seq[-1] == 3


def test_who_missed_what_is_lost_gets_what_is_there() -> None:
    feed, late = feed_of(cache := Cache(), buffer_batches=1), Map()
    list(feed.begin())
    for text in ("abc", "abd", "x"):
        cache.fill(text)
        list(feed.news())
    late.read(messages := list(feed.snapshot()))
    assert late.blocks == truth(cache.state, *MEDIA)
    assert {int.from_bytes(message.seq, "big") for message in messages} == {feed.next_seq - 1}
