"""Access: what a client may ask is what its configuration says, and nothing beside it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.actors.access import EVERYTHING, INFERENCE_ALONE, NOTHING, Access, access_of
from kvd.actors.doors import Doors
from kvd.config import ClientConfig, Config, OperatorConfig
from kvd.protocol.errors import Forbidden
from kvd.protocol.verbs import INFERENCE, VERBS, verb_name
from tests.protocol.samples import sample

if TYPE_CHECKING:
    from kvd.protocol.messages import AnyRequest

SAMPLES = {name: sample(verb) for name, verb in VERBS.items()}
NAMES = st.sampled_from(["", "a", "b", "c", "aa", "*"])
KEY = "0" * 40


@st.composite
def clients(draw: st.DrawFn) -> ClientConfig:
    return ClientConfig(
        "client",
        KEY,
        verbs=tuple(draw(st.lists(st.sampled_from(["inference", *VERBS]), max_size=4))),
        models=tuple(draw(st.lists(NAMES, max_size=2))),
        salts=tuple(draw(st.lists(NAMES, min_size=1, max_size=3))),
    )


def is_served(access: Access, request: AnyRequest) -> bool:
    try:
        access.check(request)
    except Forbidden:
        return False
    return True


@given(clients())
def test_a_client_asks_the_verbs_that_it_has_and_no_other(client: ClientConfig) -> None:
    named = {verb_name(verb) for verb in INFERENCE} if "inference" in client.verbs else set()
    access = access_of(client)
    served = {name for name, request in SAMPLES.items() if is_served(access, request)}
    assert served == named | set(client.verbs) - {"inference"}


@given(clients(), NAMES, NAMES)
def test_a_client_opens_what_its_models_and_salts_name(
    client: ClientConfig, model: str, salt: str
) -> None:
    is_named = (not client.models or model in client.models) and salt in client.salts
    assert access_of(client).may_open(model, salt) == is_named


def test_an_operator_opens_all() -> None:
    root = access_of(ClientConfig("root", KEY, verbs=("operator",)))
    assert root.is_operator
    assert root.may_open("any", "any")


def test_an_operator_of_some_salts_opens_those() -> None:
    root = access_of(ClientConfig("root", KEY, verbs=("operator",), salts=("a",)))
    assert [root.may_open("any", salt) for salt in ("a", "b")] == [True, False]


def test_a_refusal_names_verb_and_client() -> None:
    with pytest.raises(Forbidden, match="match is not for client root"):
        access_of(ClientConfig("root", KEY, verbs=(), salts=("",))).check(SAMPLES["match"])


# --- doors ---


def test_by_ipc_everything_may_be_asked_unless_operators_have_a_door() -> None:
    alone = Doors(Config(), Counter(), {})
    beside = Doors(Config(operator=OperatorConfig("ipc:///run/operators.sock")), Counter(), {})
    assert alone.access(b"\0name") == EVERYTHING
    assert beside.access(b"\0name") == INFERENCE_ALONE
    assert beside.access(b"operator\0name") == EVERYTHING


def test_a_key_that_is_taken_out_of_the_configuration_may_ask_nothing() -> None:
    client = ClientConfig("client", KEY, salts=("",))
    doors = Doors(Config(clients=(client,)), Counter(), {})
    doors.configure(Config())
    assert doors.access(KEY.encode() + b"\0name") == NOTHING
    assert not doors.lets_in(KEY.encode())


@given(st.binary(max_size=60))
def test_who_comes_with_an_unknown_key_may_ask_nothing(key: bytes) -> None:
    client = ClientConfig("client", KEY, salts=("",))
    doors = Doors(Config(clients=(client,)), Counter(), {})
    assert doors.access(KEY.encode() + b"\0name") == access_of(client)
    assert doors.access(b"x" + key.replace(b"\0", b"") + b"\0name") == NOTHING
    assert doors.lets_in(KEY.encode())
    assert not doors.lets_in(b"x" + key)
