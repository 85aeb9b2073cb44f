"""Mover: what goes on in the background, whatever becomes of one turn of it."""

from __future__ import annotations

from typing import Any

import pytest
from anyio import create_task_group

from tests.actors.stored import TOKENS
from tests.actors.waiting import until
from tests.e2e.support import tokens_of

pytestmark = pytest.mark.anyio


async def test_after_an_error_while_summing_later_blocks_are_summed(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no descriptors are left")

    async with start() as cache, create_task_group() as tasks:
        monkeypatch.setattr("kvd.actors.mover.FAULT_PAUSE_SECONDS", 0.001)
        with monkeypatch.context() as broken:
            broken.setattr("kvd.actors.tier.block_checksums", fail)
            tasks.start_soon(cache.store, TOKENS)  # waits for checksums that never come
            await until(lambda: "no descriptors are left" in caplog.text)
        await cache.store(tokens_of(2, 4))
        tasks.cancel_scope.cancel()
