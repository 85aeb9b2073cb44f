"""Patience: which calls are waited for, and which are left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from anyio import CancelScope, create_task_group, current_time

from kvd.actors.patience import Patience
from kvd.protocol.errors import TierFailed
from tests.actors.waiting import until
from tests.e2e.support import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

STILL_SECONDS = 1.0


class Hanging:
    """A call that returns when the test is over, or earlier when it is told so."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go.wait(PATIENCE_SECONDS)
        return "done"


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    hanging = Hanging()
    yield hanging
    hanging.go.set()


async def test_a_call_that_hangs_is_left_at_the_end_and_none_is_begun_after_it(
    hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    patience = Patience("the disk")
    async with create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(TierFailed, match="the disk does not answer"):
                await patience.call(hanging)

        tasks.start_soon(call)
        await until(hanging.begun.is_set)
        patience.end_at(current_time())
    with pytest.raises(TierFailed):
        patience.check()
    with pytest.raises(TierFailed):
        await patience.call(pytest.fail)
    assert caplog.text.count("reason=left the disk") == 1


async def test_a_call_is_waited_for_though_who_waits_is_cancelled(hanging: Hanging) -> None:
    patience, results = Patience("the disk"), []
    async with create_task_group() as tasks:

        async def call() -> None:
            with CancelScope() as scope:
                tasks.start_soon(go, scope)
                results.append(await patience.call(hanging))

        async def go(scope: CancelScope) -> None:
            await until(hanging.begun.is_set)
            scope.cancel()
            hanging.go.set()

        tasks.start_soon(call)
    assert results == ["done"]


async def test_a_call_that_stands_still_is_left_and_one_that_moves_is_not(
    hanging: Hanging,
) -> None:
    moving, still = Patience("the one"), Patience("the other")
    has_moved = threading.Event()

    def move() -> str:
        moving.moved(PATIENCE_SECONDS)
        has_moved.set()
        return hanging()

    async def call() -> None:
        assert await moving.call(move, still_seconds=STILL_SECONDS) == "done"

    async with create_task_group() as tasks:
        tasks.start_soon(call)
        await until(has_moved.is_set)
        with pytest.raises(TierFailed):
            await still.call(hanging, still_seconds=STILL_SECONDS)
        hanging.go.set()
    moving.check()
