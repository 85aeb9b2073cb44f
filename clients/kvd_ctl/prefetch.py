"""`kvd-ctl prefetch`: has what lower tiers hold of some tokens brought to memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvd.protocol.codec import TOKEN_BYTES
from kvd_client import Client, Identity, Unsupported, to_json
from kvd_ctl import render
from kvd_ctl.commands import namespace

if TYPE_CHECKING:
    from kvd_client import Namespace, NamespaceStatus

POLL_SECONDS = 0.1


def bring_up(client: Client, number: int, tokens: bytes, *, as_json: bool) -> bool:
    """Bring to memory what there is of some tokens; whether all of it came in time."""
    deadline = time.monotonic() + client.timeout
    status = client.status()
    memory = status.tiers[0].name
    _opened(client, namespace(status.namespaces, number)).prefetch(tokens)
    with render.bar("prefetching") as tell:
        while True:
            num_there, num_known = _progress(client, number, tokens, memory)
            tell(num_there, num_known)
            if num_there == num_known or time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
    if as_json:
        print(to_json({"num_tokens_in_memory": num_there, "num_tokens_known": num_known}))
    else:
        render.console.print(
            f"in memory: {num_there} of the {num_known} tokens that kvd has of these "
            f"{len(tokens) // TOKEN_BYTES}"
        )
    return num_there == num_known


def _progress(client: Client, number: int, tokens: bytes, memory: str) -> tuple[int, int]:
    """How many of the tokens memory has, and how many any tier has."""
    stretches = client.explain(number, tokens).stretches
    there = sum(each.num_tokens for each in stretches if memory in each.tiers)
    return there, sum(each.num_tokens for each in stretches)


def _opened(client: Client, space: NamespaceStatus) -> Namespace:
    """The namespace as an engine opens it. Raises Unsupported where prompts are more than ids."""
    if space.extras or space.layout is None:
        raise Unsupported(f"namespace {space.namespace} has extras, which cannot be named here")
    identity = Identity(
        space.model,
        space.revision,
        space.adapter,
        space.shard_rank,
        space.shard_size,
        space.positions,
    )
    return client.open(identity, space.layout, space.salt)
