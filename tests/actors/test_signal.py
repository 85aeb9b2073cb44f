"""Signal and Want: who hears of what, and when."""

from __future__ import annotations

import anyio
import pytest

from kvd.actors.signal import Signal, Want

pytestmark = pytest.mark.anyio


async def test_a_signal_is_for_all_who_wait_and_for_nobody_who_comes_later() -> None:
    signal, heard = Signal(), list[int]()

    async def listen(number: int) -> None:
        await signal.wait()
        heard.append(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen, 1)
        tasks.start_soon(listen, 2)
        await anyio.wait_all_tasks_blocked()
        signal.set()
        tasks.start_soon(listen, 3)
        await anyio.wait_all_tasks_blocked()
        assert sorted(heard) == [1, 2]
        tasks.cancel_scope.cancel()


async def test_a_want_that_nobody_waited_for_is_heard_once() -> None:
    want = Want()
    want.set()
    want.set()
    await want.wait()
    with anyio.move_on_after(0) as late:
        await want.wait()
    assert late.cancelled_caught
