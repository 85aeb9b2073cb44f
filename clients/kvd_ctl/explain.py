"""`kvd-ctl explain`: how far some tokens match, and why not further."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from kvd.protocol.codec import TOKEN_BYTES
from kvd_client import Client, ExplainReply, NamespaceStatus, to_json
from kvd_ctl import render
from kvd_ctl.commands import namespace

# What tells one namespace from another, beside its layout.
IDENTITY = ("model", "revision", "salt", "adapter", "shard_rank", "shard_size", "positions")


def explain_match(client: Client, number: int, tokens: bytes, *, as_json: bool) -> None:
    """Say how far some tokens match, by tier, and what is known of those that do not."""
    reply = client.explain(number, tokens)
    spaces = client.status().namespaces
    here = namespace(spaces, number)
    near = [
        asdict(one) | {"differs": _differences(here, namespace(spaces, one.namespace))}
        for one in reply.near
    ]
    num_matched = sum(stretch.num_tokens for stretch in reply.stretches)
    if as_json:
        found = {"num_tokens": len(tokens) // TOKEN_BYTES, "num_matched_tokens": num_matched}
        print(to_json(found | asdict(reply) | {"near": near}))
        return
    _tell_matched(reply)
    _tell_rest(reply, num_matched, len(tokens) // TOKEN_BYTES)
    for one in near:
        differs = "; ".join(f"{name} {a!r}, not {b!r}" for name, (a, b) in one["differs"].items())
        render.console.print(
            f"namespace {one['namespace']} has {one['num_tokens']} of them; there: {differs}"
        )


def _tell_matched(reply: ExplainReply) -> None:
    at = 0
    rows = []
    for stretch in reply.stretches:
        end = at + stretch.num_tokens
        rows.append({"from token": at, "to": end, "tiers": ", ".join(stretch.tiers)})
        at = end
    render.table("there are", rows)


def _tell_rest(reply: ExplainReply, num_matched: int, num_tokens: int) -> None:
    """Where the tokens leave the tree, and whether what follows was evicted."""
    if num_tokens < reply.block_size:
        render.console.print(
            f"these {num_tokens} tokens are less than a block of {reply.block_size}"
        )
        return
    num_left = (num_tokens - num_matched) // reply.block_size * reply.block_size
    if not num_left:
        render.console.print(f"all whole blocks of these {num_tokens} tokens match")
        return
    place = num_matched + reply.num_common_tokens
    render.console.print(
        f"from token {place} on they are not there, in block {num_matched // reply.block_size}"
    )
    if evicted := reply.num_evicted_tokens:
        render.console.print(f"evicted not long ago: the next {evicted} tokens")
    if num_left > evicted:
        render.console.print(
            f"never there, dropped, or evicted long ago: {num_left - evicted} tokens"
        )


def _differences(here: NamespaceStatus, there: NamespaceStatus) -> dict[str, tuple[Any, Any]]:
    """What tells another namespace from this one: its value, and this one's."""
    ours, theirs = _fields(here), _fields(there)
    return {name: (theirs[name], ours[name]) for name in ours if theirs[name] != ours[name]}


def _fields(space: NamespaceStatus) -> dict[str, Any]:
    layout = asdict(space.layout) if space.layout else {}
    return {name: getattr(space, name) for name in (*IDENTITY, "extras")} | layout
