"""Together: what fails ends nothing but itself, and is told when all is done."""

from __future__ import annotations

import anyio
import pytest

from kvd.actors.together import together
from kvd.protocol.errors import TierFailed

pytestmark = pytest.mark.anyio


async def test_what_fails_hinders_no_other_and_the_first_error_is_raised() -> None:
    has_failed, done = anyio.Event(), []

    async def fail() -> None:
        has_failed.set()
        raise TierFailed("the first")

    async def go_on() -> None:
        await has_failed.wait()
        done.append("the second")

    with pytest.raises(TierFailed, match="the first"):
        await together(fail, go_on)
    assert done == ["the second"]
