"""Events: the bytes that routers read, in both encodings."""

from __future__ import annotations

import struct

import msgspec
import pytest

from kvd.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Encoding,
    Event,
    decode_batch,
    encode_batch,
    hashes_of,
    topic,
)

STORED = BlockStored(
    [1, 2], None, [5, 6, 7, 8], 2, None, "CPU", None, locality="LOCAL", ownership="kvd", epoch=9
)
REMOVED = BlockRemoved([2], "DISK", "LOCAL", "kvd", 9)
ALL: list[Event] = [STORED, REMOVED, AllBlocksCleared(9)]
GOLDEN = {
    "map": "93cb3ff800000000000093"
    "8ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920102"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739405060708"
    "aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055"
    "a96c6f72615f6e616d65c0a86c6f63616c697479a54c4f43414c"
    "a96f776e657273686970a36b7664a565706f636809"
    "86a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739102"
    "a66d656469756da44449534ba86c6f63616c697479a54c4f43414ca96f776e657273686970a36b7664"
    "a565706f636809"
    "82a474797065b0416c6c426c6f636b73436c6561726564a565706f636809"
    "00",
    "array": "93cb3ff800000000000093"
    "99ab426c6f636b53746f726564920102c0940506070802c0a3435055c0c0"
    "93ac426c6f636b52656d6f7665649102a44449534b"
    "91b0416c6c426c6f636b73436c6561726564"
    "00",
}


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_batch_has_the_bytes_that_routers_read(encoding: Encoding) -> None:
    assert encode_batch(1.5, ALL, encoding).hex() == GOLDEN[encoding]


def test_a_map_comes_back_as_it_was_sent() -> None:
    assert decode_batch(bytes.fromhex(GOLDEN["map"])) == (1.5, ALL)


def test_an_array_comes_back_without_what_it_has_no_place_for() -> None:
    stored, removed, cleared = decode_batch(bytes.fromhex(GOLDEN["array"]))[1]
    assert stored == BlockStored([1, 2], None, [5, 6, 7, 8], 2, None, "CPU", None)
    assert (removed, cleared) == (BlockRemoved([2], "DISK"), AllBlocksCleared())


def test_keys_that_are_not_known_are_ignored() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0}
    payload = msgspec.msgpack.encode([1.5, [event], 0])
    assert decode_batch(payload) == (1.5, [BlockRemoved([1], "GPU")])


@pytest.mark.parametrize("event", [{"type": "Other"}, ["Other", 1], 7])
def test_an_event_of_no_known_kind_is_an_error(event: object) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_batch(msgspec.msgpack.encode([1.5, [event], 0]))


def test_a_block_is_called_by_the_end_of_its_key_and_never_nothing() -> None:
    key = bytes(24) + struct.pack(">Q", 1 << 63)
    assert hashes_of(key + bytes(32)) == [1 << 63, 1]


def test_a_topic_has_three_parts_whatever_the_names() -> None:
    assert topic("pod", "org/model") == "kv@pod@org/model"
    assert topic("a@b", "c@d").count("@") == 2
