"""A short run of each part, and proof that a fault would show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import Client, LeaseEnded
from tests.stress import __main__ as command
from tests.stress.clients import Crowd, settings
from tests.stress.common import Stress
from tests.stress.content import (
    DOMAINS,
    NUM_PICTURES,
    WrongKV,
    kv_of,
    prompts_of,
    show,
    verify,
)
from tests.stress.crash import Crashes
from tests.stress.worker import Worker

SEED = 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", command.PARTS)
def test_part_finds_no_fault(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = command.main([part, "--tiny", "--seed", str(SEED)])
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status, verdict["ok"], verdict["seed"]) == (0, True, SEED), verdict


# --- a fault would show ---


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(settings(num_pages=512)) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout=30.0) as client:
        yield client


def store_zeros(client: Client, tokens: tuple[int, ...]) -> None:
    """Have blocks in the cache, in every namespace, that hold nothing of what they must."""
    for domain in DOMAINS:
        with domain.open(client).match(tokens, reserve_tokens=len(tokens)) as lease:
            for array in lease.write_arrays(lease.num_committed, len(tokens)):
                array[:] = 0
                del array
            lease.commit(tokens[lease.num_committed :])


def test_wrong_byte_is_found_and_named(client: Client) -> None:
    tokens = tuple(range(32))
    store_zeros(client, tokens)
    wrong = pytest.raises(WrongKV, match="128 of 128 rows differ, the first at layer 0, plane 0")
    with DOMAINS[0].open(client).match(tokens) as lease, wrong:
        verify(lease, DOMAINS[0], tokens)


def test_read_of_a_lease_that_ended_is_void_not_wrong(
    client: Client, daemon: RunningDaemon
) -> None:
    tokens = tuple(range(32))
    store_zeros(client, tokens)
    lease = DOMAINS[0].open(client).match(tokens)
    daemon.restart()
    with pytest.raises(LeaseEnded):
        verify(lease, DOMAINS[0], tokens)


def test_client_that_reads_wrong_says_where_and_ends_the_run(
    client: Client, daemon: RunningDaemon, capfd: pytest.CaptureFixture[str]
) -> None:
    for prompt in prompts_of(SEED)[:20]:
        store_zeros(client, prompt)
    crowd = Crowd(Stress(SEED, print), daemon.endpoint, num_clients=1, num_operations=100)
    with pytest.raises(AssertionError, match="client 0 ended with status 1 in operation"):
        crowd.run()
    said = capfd.readouterr().err
    assert "rows differ" in said
    assert f"seed {SEED}, client 0, operation" in said


def test_what_was_confirmed_and_is_lost_is_said() -> None:
    stress = Stress(SEED, print, tiny=True)
    with running_daemon(settings(num_pages=4096) | {"quotas": []}) as daemon:
        crashes = Crashes(stress, daemon)
        crashes.owed[10**6] = 8  # nobody came so far
        crashes.end()
    (failure,) = stress.failures
    assert re.fullmatch(r"after 0 kills 8 tokens of \d+ are lost", failure)


def test_run_in_which_too_little_happened_is_not_ok() -> None:
    stress = Stress(SEED, print)
    stress.counts["kills"] = 1
    stress.expect_at_least({"kills": 1})
    assert stress.ok
    stress.expect_at_least({"kills": 2})
    assert stress.failures == ["too few kills: 1 of 2"]


# --- a run can be repeated ---


def test_equal_seeds_do_equal_operations(daemon: RunningDaemon) -> None:
    workers = [Worker(daemon.endpoint, seed, 0) for seed in (1, 1, 2)]
    first, again, other = ([worker.draw(place)[0] for place in range(50)] for worker in workers)
    assert first == again
    assert first != other
    for worker in workers:
        worker.close()


def test_every_row_is_another_in_every_namespace() -> None:
    tokens = (7,) * 32
    rows = [kv_of(domain, tokens) for domain in DOMAINS]
    seen = {row.tobytes() for kv in rows for row in kv.reshape(-1, *kv.shape[3:])}
    assert len(seen) == sum(int(np.prod(kv.shape[:3])) for kv in rows)


def test_every_row_from_a_picture_on_is_another_with_another_picture() -> None:
    *_, domain = DOMAINS
    rows = [kv_of(domain, show((1, 2, 0, 3), picture)) for picture in range(NUM_PICTURES)]
    seen = {row.tobytes() for kv in rows for row in kv[0, 0]}
    assert len(seen) == 2 + 2 * NUM_PICTURES


def test_unknown_part_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["client"])
    assert "clients" in capsys.readouterr().err
