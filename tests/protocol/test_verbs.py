"""Verbs by name: what an engine asks, and what is left to operators."""

from __future__ import annotations

import pytest

from kvd.protocol.errors import ConfigError
from kvd.protocol.messages import DropRequest, MatchRequest, StatusRequest
from kvd.protocol.verbs import INFERENCE, OPERATOR, VERBS, verb_name, verbs_named


def test_a_verb_is_called_as_on_the_wire() -> None:
    assert verb_name(MatchRequest) == "match"
    assert VERBS["match"] is MatchRequest


def test_verbs_are_named_one_by_one_or_as_a_set() -> None:
    assert verbs_named(["match", "status"]) == {MatchRequest, StatusRequest}
    assert verbs_named(["inference", "drop"]) == INFERENCE | {DropRequest}
    assert verbs_named(["operator"]) == OPERATOR == set(VERBS.values())
    assert verbs_named([]) == frozenset()


def test_a_name_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no verb 'mach'; there are inference, .*match"):
        verbs_named(["match", "mach"])


def test_what_tells_of_others_is_no_verb_of_inference() -> None:
    names = {verb_name(verb) for verb in OPERATOR - INFERENCE}
    assert names >= {"status", "leases", "checkpoint", "verify", "drop"}
