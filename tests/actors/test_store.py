"""StoreActor: what a store may hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.support import PAGE_FIRST

pytestmark = pytest.mark.anyio


async def test_a_store_holds_what_its_tier_allows_with_each_new_layout(start: Any) -> None:
    async with start() as cache:
        await cache.actor.settle()
        before = cache.actor.state.usable_bytes
        await cache.open(PAGE_FIRST)
        await cache.actor.settle()
        assert cache.actor.state.usable_bytes == cache.actor.tier.usable_bytes < before
