"""`kvd-ctl tree`: what a namespace has, branch by branch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from kvd_client import Client, TreeReply, format_bytes, to_json
from kvd_ctl import render
from kvd_ctl.text import ids_of, text_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOP = -1


def list_tree(
    client: Client,
    namespace: int,
    tokens: bytes,
    depth: int,
    limit: int,
    tokenizer: Tokenizer | None,
    *,
    in_order: bool,
    as_json: bool,
) -> None:
    """List the biggest branches below some tokens, each below the one that it follows."""
    reply = client.tree(namespace, tokens, depth=depth, limit=limit)
    if as_json:
        nodes = [
            asdict(node) | {"tokens": ids_of(node.tokens)} | _text(node.tokens, tokenizer)
            for node in reply.nodes
        ]
        print(to_json(asdict(reply) | {"nodes": nodes}))
        return
    rows = [
        _row(reply, place, level, tokenizer)
        for place, level in _walk(reply, TOP, 0, in_order=in_order)
    ]
    render.console.print(
        f"namespace {namespace}: {reply.num_nodes} nodes; blocks of {reply.block_size} tokens, "
        f"{format_bytes(reply.page_bytes)} each"
    )
    render.table(f"below {reply.num_tokens} tokens" if tokens else "tree", rows)


def _walk(
    reply: TreeReply, parent: int, level: int, *, in_order: bool
) -> Iterator[tuple[int, int]]:
    """The places of nodes, each before what follows it, and how deep they stand."""
    children = [place for place, node in enumerate(reply.nodes) if node.parent == parent]
    if in_order:
        children.sort(key=lambda place: ids_of(reply.nodes[place].tokens))
    for place in children:
        yield place, level
        yield from _walk(reply, place, level + 1, in_order=in_order)


def _row(
    reply: TreeReply, place: int, level: int, tokenizer: Tokenizer | None
) -> dict[str, object]:
    node = reply.nodes[place]
    text = _text(node.tokens, tokenizer).get("text")
    listed = ",".join(map(str, ids_of(node.tokens)))
    return {
        "blocks": node.num_blocks,
        "bytes": format_bytes(node.num_blocks * reply.page_bytes),
        "hits": node.hits,
        "age": node.age_touches,
        "held": "yes" if node.is_locked else "",
        "tiers": " ".join(node.tiers),
        "next": node.num_children,
        "begins with": "  " * level + (repr(text) if text is not None else listed),
    }


def _text(tokens: bytes, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {"text": text_of(tokens, tokenizer)} if tokenizer else {}
