"""A mob of hostile clients does the others no harm, and leaves nothing behind."""

from __future__ import annotations

from kvd.testing.daemons import running_daemon
from tests.fuzz.mob import SETTINGS, riot


def test_a_riot_does_no_harm() -> None:
    with running_daemon(SETTINGS) as daemon:
        outcomes = riot(daemon, seed=1, turns=range(3000))
    # It got far enough to be of use.
    assert outcomes.keys() >= {"bad_request", "stale_epoch", "lease_ended", "MatchResult"}
