"""When is KV the same KV: everything that changes its values changes the fingerprint."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from kvd.protocol.errors import BadRequest
from kvd.protocol.keys import Identity, _digest, check_identity, fingerprint, namespace_key
from kvd.protocol.layout import Layout

IDENTITY = Identity("llama", "sha256:00ff")
LAYOUT = Layout(2, 4, 8, "float16")

OTHER_IDENTITY: dict[str, Any] = {
    "model": "Llama",
    "revision": "sha256:00fe",
    "adapter": "lora",
    "shard_rank": 1,
    "shard_size": 2,
    "positions": "yarn-4",
}
OTHER_LAYOUT: dict[str, Any] = {
    "num_layers": 3,
    "num_kv_heads": 5,
    "head_size": 9,
    "dtype": "bfloat16",
    "block_size": 32,
    "num_planes": 1,
    "order": "page_first",
    "layer_bytes": 4096,
    "packing": "an engine's, on x86",
}


def test_every_field_has_another_value_below() -> None:
    assert set(OTHER_IDENTITY) == set(Identity.__struct_fields__)
    assert set(OTHER_LAYOUT) == set(Layout.__struct_fields__)


@pytest.mark.parametrize("name", OTHER_IDENTITY)
def test_the_fingerprint_has_every_field_of_the_identity(name: str) -> None:
    other = msgspec.structs.replace(IDENTITY, **{name: OTHER_IDENTITY[name]})
    assert fingerprint(other, LAYOUT) != fingerprint(IDENTITY, LAYOUT)


@pytest.mark.parametrize("name", OTHER_LAYOUT)
def test_the_fingerprint_has_every_field_of_the_layout(name: str) -> None:
    other = msgspec.structs.replace(LAYOUT, **{name: OTHER_LAYOUT[name]})
    assert fingerprint(IDENTITY, other) != fingerprint(IDENTITY, LAYOUT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Identity("ab", "c"), Identity("a", "bc")),
        (Identity("a", "b", adapter="c"), Identity("a", "b", positions="c")),
        (Identity("a", "b", adapter="cd"), Identity("a", "b", adapter="c", positions="d")),
        (Identity("a", "b", shard_rank=1, shard_size=11), Identity("a", "b", "", 11, 1)),
    ],
)
def test_letters_do_not_move_from_field_to_field(one: Identity, other: Identity) -> None:
    assert fingerprint(one, LAYOUT) != fingerprint(other, LAYOUT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a", ""), ("", "a")),
        (("a",), ("a", "")),
        (("1",), (1,)),
        (("a",), (b"a",)),
        ((1,), (True,)),
        ((1, 23), (12, 3)),
        ((-1,), (1,)),
    ],
    ids=repr,
)
def test_values_that_differ_in_type_or_place_have_another_digest(
    one: tuple[object, ...], other: tuple[object, ...]
) -> None:
    assert _digest("kind", *one) != _digest("kind", *other)


@pytest.mark.parametrize("value", [1.5, None, ("a",), ["a"]])
def test_a_value_without_one_spelling_has_no_place(value: object) -> None:
    with pytest.raises(TypeError):
        _digest("kind", value)


def test_two_tenants_have_two_namespaces() -> None:
    keys = {namespace_key(IDENTITY, LAYOUT, salt) for salt in ("", "a", "b", "ab")}
    assert len(keys) == 4
    assert fingerprint(IDENTITY, LAYOUT) not in keys


def test_a_fingerprint_on_disk_is_found_again() -> None:
    """These are written into files: a change of the code must not change them."""
    assert fingerprint(IDENTITY, LAYOUT).hex() == FINGERPRINT
    assert namespace_key(IDENTITY, LAYOUT, "tenant").hex() == NAMESPACE_KEY


FINGERPRINT = "d3efd220ce200ed42675eb900e8782d0db78f8a3e87b6d2f2694294b7294535f"
NAMESPACE_KEY = "a3e1fd403b142a5a5d382129ed8cf0dff15963fd811734e9f3cfbbc982a6021e"


def test_another_process_has_the_same_fingerprint() -> None:
    program = "from tests.protocol.test_keys import *\nprint(fingerprint(IDENTITY, LAYOUT).hex())"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == fingerprint(IDENTITY, LAYOUT).hex()


@pytest.mark.parametrize("identity", [Identity("llama", ""), Identity("", "main")])
def test_a_name_alone_is_refused(identity: Identity) -> None:
    with pytest.raises(BadRequest, match="revision"):
        check_identity(identity)


def test_a_shard_that_does_not_exist_is_refused() -> None:
    check_identity(Identity("llama", "main", shard_rank=1, shard_size=2))
    with pytest.raises(BadRequest, match="2 of 2"):
        check_identity(Identity("llama", "main", shard_rank=2, shard_size=2))
