"""An actor: a mailbox, served one call at a time in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio import ClosedResourceError, create_task_group

from kvd.actors.actor import Actor
from tests.actors.waiting import until

pytestmark = pytest.mark.anyio


class Clerk(Actor):
    """Does whatever it is asked to."""

    async def do(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._ask(function, *args)


def fail(error: Exception) -> None:
    raise error


async def test_a_call_is_done_in_a_thread_and_answered() -> None:
    clerk = Clerk()
    async with create_task_group() as tasks:
        await tasks.start(clerk.run)
        assert await clerk.do(pow, 2, 10) == 1024
        assert await clerk.do(threading.get_ident) != threading.get_ident()
        clerk.close()


async def test_an_error_goes_to_its_caller_and_the_actor_goes_on() -> None:
    clerk = Clerk()
    async with create_task_group() as tasks:
        await tasks.start(clerk.run)
        for error in (ValueError("mine"), OSError(28, "full"), AssertionError()):
            with pytest.raises(type(error)) as raised:
                await clerk.do(fail, error)
            assert raised.value is error
        assert await clerk.do(pow, 2, 3) == 8
        clerk.close()


async def test_calls_are_done_one_after_the_other_in_their_order() -> None:
    clerk, busy, order = Clerk(), threading.Lock(), []

    def work(number: int) -> None:
        assert busy.acquire(blocking=False)
        time.sleep(0.001)
        order.append(number)
        busy.release()

    async with create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(clerk.do, work, number)
            await anyio.wait_all_tasks_blocked()
        await tasks.start(clerk.run)
        await until(lambda: len(order) == 6)
        clerk.close()
    assert order == list(range(6))


async def test_a_full_mailbox_makes_its_callers_wait_and_loses_nothing() -> None:
    clerk, done = Clerk(mailbox_size=1), []
    async with create_task_group() as callers:
        for number in range(10):
            callers.start_soon(clerk.do, done.append, number)
        await anyio.wait_all_tasks_blocked()
        async with create_task_group() as tasks:
            await tasks.start(clerk.run)
            await until(lambda: len(done) == 10)
            clerk.close()
    assert sorted(done) == list(range(10))


async def test_close_takes_no_new_calls_and_does_what_lies_in_the_mailbox() -> None:
    clerk, done = Clerk(), []
    async with create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(clerk.do, done.append, number)
        await anyio.wait_all_tasks_blocked()
        clerk.close()
        with pytest.raises(ClosedResourceError):
            await clerk.do(done.append, 99)
        tasks.start_soon(clerk.run)
    assert done == list(range(5))


async def test_close_twice_is_as_once() -> None:
    clerk = Clerk()
    async with create_task_group() as tasks:
        await tasks.start(clerk.run)
        clerk.close()
        clerk.close()


async def test_a_caller_that_gives_up_does_not_hinder_the_next() -> None:
    clerk, go = Clerk(), threading.Event()
    async with create_task_group() as tasks:
        await tasks.start(clerk.run)
        with anyio.move_on_after(0.01):
            await clerk.do(go.wait, 30)
        go.set()
        assert await clerk.do(pow, 2, 3) == 8
        clerk.close()
