"""One function per command: ask the daemon, hand the answer to render."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from msgspec.structs import asdict

from kvd.protocol.codec import TOKEN_BYTES
from kvd_client import (
    BadRequest,
    Client,
    NamespaceStatus,
    UnknownNamespace,
    UnknownSequence,
    format_bytes,
    to_json,
)
from kvd_ctl import render
from kvd_ctl.notation import format_duration


def ping(client: Client, *, as_json: bool) -> None:
    """Measure one round trip."""
    client.status()  # which waits for the connection
    start = time.perf_counter()
    reply = client.status()
    milliseconds = (time.perf_counter() - start) * 1000
    if as_json:
        print(
            to_json({"endpoint": client.endpoint, "pid": reply.pid, "milliseconds": milliseconds})
        )
    else:
        render.console.print(
            f"kvd {reply.version} (pid {reply.pid}) answers on {client.endpoint} "
            f"in {milliseconds:.1f} ms"
        )


def status(client: Client, *, as_json: bool) -> None:
    """Show pages by state, hits and misses; as JSON all that kvd says of itself."""
    reply = client.status()
    if as_json:
        print(to_json(reply))
    else:
        render.status(reply)


def tiers(client: Client, *, as_json: bool) -> None:
    """List the tiers."""
    reply = client.status()
    if as_json:
        print(to_json(reply.tiers))
    else:
        render.tiers(reply.tiers)


def checkpoint(client: Client, *, as_json: bool) -> None:
    """Have all blocks saved."""
    count = client.checkpoint()
    if as_json:
        print(to_json({"num_blocks": count}))
    else:
        render.console.print(f"all blocks are saved; copied for it: {count}")


def verify(client: Client, *, as_json: bool) -> bool:
    """Have all blocks compared with their checksums; whether all were good."""
    with render.progress("verifying") as progress:
        reply = client.verify(progress)
    if as_json:
        print(to_json({"tiers": reply.tiers}))
    else:
        render.checks(reply)
    return not any(tier.num_bad or tier.num_missing or tier.trouble for tier in reply.tiers)


def sessions(client: Client, *, as_json: bool) -> None:
    """List who is attached."""
    reply = client.status()
    if as_json:
        print(to_json(reply.sessions))
    else:
        render.sessions(reply)


def namespaces(client: Client, *, as_json: bool) -> None:
    """List the namespaces."""
    reply = client.status()
    if as_json:
        print(to_json(reply.namespaces))
    else:
        render.namespaces(reply)


def leases(client: Client, limit: int, *, as_json: bool) -> None:
    """List the oldest leases."""
    reply = client.leases(limit)
    if as_json:
        print(to_json({"leases": reply.leases, "num_leases": reply.num_leases}))
    else:
        render.leases(reply)


def pins(client: Client, limit: int, *, as_json: bool) -> None:
    """List the oldest pins."""
    reply = client.leases(limit)
    if as_json:
        print(to_json({"pins": reply.pins, "num_pins": reply.num_pins}))
    else:
        render.pins(reply)


def sequences(client: Client, limit: int, *, as_json: bool) -> None:
    """List the oldest saved sequences."""
    reply = client.sequences(limit=limit)
    if as_json:
        listed = [
            asdict(each) | {"namespace_key": each.namespace_key.hex()} for each in reply.sequences
        ]
        print(to_json({"sequences": listed, "num_sequences": reply.num_sequences}))
    else:
        render.sequences(reply)


def pin(
    client: Client, namespace: int, tokens: bytes, seconds: float, owner: str, *, as_json: bool
) -> None:
    """Pin what is resident of some tokens."""
    result = client.pin(namespace, tokens, seconds, owner=owner)
    if as_json:
        print(to_json(result))
    elif result.num_tokens == 0:
        render.console.print("nothing is pinned: no block of these tokens is resident")
    else:
        render.console.print(
            f"pin {result.pin} of {owner} keeps {result.num_tokens} of "
            f"{len(tokens) // TOKEN_BYTES} tokens, {format_bytes(result.num_bytes)}, "
            f"for {format_duration(seconds)}"
        )


def unpin(client: Client, pins: Sequence[int], owner: str, *, as_json: bool) -> None:
    """End pins of an owner: those with these numbers, or all."""
    count = client.unpin(owner=owner, pins=tuple(pins))
    if as_json:
        print(to_json({"num_pins": count}))
    else:
        render.console.print(f"pins of {owner} ended: {count}")


def namespace(spaces: Iterable[NamespaceStatus], number: int) -> NamespaceStatus:
    """The namespace of a number. Raises UnknownNamespace."""
    for each in spaces:
        if each.namespace == number:
            return each
    raise UnknownNamespace(f"there is no namespace {number}")


def question(client: Client, number: int) -> str:
    """What to ask before all of a namespace is dropped. Raises UnknownNamespace."""
    each = namespace(client.status().namespaces, number)
    salt = f", salt {each.salt}" if each.salt else ""
    return f"Drop all {each.num_blocks} blocks of namespace {number} ({each.model}{salt})?"


def drop(client: Client, namespace: int, tokens: bytes, from_token: int, *, as_json: bool) -> None:
    """Drop the blocks of some tokens, or without tokens all of the namespace."""
    result = client.drop(namespace, tokens, from_token=from_token)
    if as_json:
        print(to_json(result))
    else:
        by_tier = ", ".join(f"{tier} {count}" for tier, count in result.blocks_by_tier.items())
        render.console.print(
            f"blocks dropped: {by_tier}; still held by leases: {result.num_detached}"
        )


def discard(client: Client, name: str, key: str, *, as_json: bool) -> None:
    """Discard a sequence, of a namespace whose key begins so. Raises where that is not one."""
    listed = client.sequences(sequence=name).sequences
    found = [each for each in listed if each.namespace_key.hex().startswith(key)]
    if not found:
        raise UnknownSequence(f"no sequence {name!r} is saved")
    if len(found) > 1:
        keys = ", ".join(each.namespace_key.hex()[: render.KEY_CHARACTERS] for each in found)
        raise BadRequest(f"several namespaces have it: choose one by --namespace: {keys}")
    (sequence,) = found
    was_there = client.discard(sequence.namespace_key, name)
    if as_json:
        print(to_json({"was_there": was_there}))
    else:
        render.console.print(
            f"sequence {name} is discarded: {sequence.num_tokens} tokens, "
            f"{format_bytes(sequence.num_bytes)}"
        )
