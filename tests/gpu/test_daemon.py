"""A daemon whose pages lie on a GPU: what is true of one on the device "cpu" is true of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from tests.e2e.conftest import client, program  # noqa: F401 - fixtures
from tests.e2e.support import SESSIONS, capacity_of
from tests.e2e.test_device import (  # noqa: F401 - fixtures, and tests with another daemon
    namespace,
    salt,
    test_a_saved_sequence_goes_on_to_the_token,
    test_a_tail_is_copied_on_the_device,
    test_after_a_restart_a_client_maps_anew,
    test_nothing_is_committed_while_a_tensor_could_write_it,
    test_rows_are_copied_from_lease_to_lease,
    test_there_are_tensors_and_no_arrays,
    test_what_a_killed_process_reserved_is_free_again,
    test_what_one_process_computes_another_has,
    test_who_does_not_map_loads_and_stores,
    test_who_has_no_torch_loads_and_stores,
    test_whole_pages_are_tensors_in_every_order,
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    tier = {"type": "torch", "device": "cuda:0", "capacity_bytes": capacity_of(768), "layouts": 3}
    with running_daemon({"tiers": [tier], "sessions": SESSIONS}) as daemon:
        yield daemon
