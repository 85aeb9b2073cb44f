"""A script of which it is known what must be counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvd_client import UnknownSequence
from tests.e2e.support import IDENTITY, LAYOUT, LMDB, compute, settings, store, tokens_of

if TYPE_CHECKING:
    from kvd_client import Client, Lease

# One group of pages, so that none is reserved ahead.
NUM_BLOCKS = 16
# So many sequences fill the memory.
NUM_SEQUENCES = 8
NUM_COMMITTED = (NUM_SEQUENCES + 1) * NUM_BLOCKS
TOKENS = NUM_BLOCKS * LAYOUT.block_size


def document() -> dict[str, Any]:
    """Memory for these sequences, and a disk below it to which only checkpoints copy."""
    found = settings(NUM_BLOCKS * NUM_SEQUENCES)
    found["tiers"].append(LMDB)
    found["cache"] = found["cache"] | {"demote_watermark": 1.0, "scrub_bytes": 0}
    return found


def run(client: Client) -> Lease:
    """Do it all; a lease is left."""
    namespace = client.open(IDENTITY, LAYOUT)
    first, second, *others = (tokens_of(seed, NUM_BLOCKS) for seed in range(NUM_SEQUENCES))
    with namespace.match(first) as one, namespace.match(first) as another:
        compute(one, first)
        compute(another, first)
    assert client.checkpoint() == NUM_BLOCKS
    for tokens in (second, *others, tokens_of(NUM_SEQUENCES, NUM_BLOCKS)):
        store(namespace, tokens)  # at the last one the first goes from memory
    with namespace.match(first) as lease:  # which has the second go, of which there is no copy
        assert lease.num_tokens == TOKENS
        lease.save("saved", first)
    assert namespace.match(second).num_tokens == 0
    assert namespace.pin(others[-1], seconds=60).num_tokens == TOKENS
    namespace.drop(others[0])
    with pytest.raises(UnknownSequence):
        namespace.resume("never saved")
    return namespace.match(others[-1])
