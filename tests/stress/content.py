"""What every block must hold: KV that anyone can compute from the tokens up to its own."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd_client import Identity, Layout

if TYPE_CHECKING:
    from kvd.protocol.messages import NamespaceStatus
    from kvd_client import Client, Lease, Namespace

Bytes: TypeAlias = NDArray[np.uint8]
Tokens: TypeAlias = tuple[int, ...]

NUM_FAMILIES = 32
NUM_BRANCHES = 8
MAX_PART_TOKENS = 48
# A token of a sequence is the id and so many times the number of the picture at its position.
PICTURE = 1 << 16
NUM_PICTURES = 3


class WrongKV(AssertionError):
    """Raised when a lease that holds shows other bytes than those of its tokens."""


@dataclass(frozen=True, slots=True)
class Domain:
    """A namespace of the mix; equal tokens have other KV in each."""

    model: str
    layout: Layout
    salt: str = ""
    extras: bool = False

    def open(self, client: Client) -> Namespace:
        identity = Identity(self.model, "main")
        return client.open(identity, self.layout, self.salt, extras=self.extras)

    def has(self, space: NamespaceStatus) -> bool:
        """Whether a status tells of this namespace."""
        key = (space.model, space.block_size, space.salt, space.extras)
        return key == (self.model, self.layout.block_size, self.salt, self.extras)

    def sequences(self, prompts: list[Tokens]) -> list[Tokens]:
        """What is computed here: the prompts, with each picture where there are some."""
        if not self.extras:
            return prompts
        return [show(prompt, number) for prompt in prompts for number in range(NUM_PICTURES)]


# Pages of 512 bytes both, in extents of 16 KiB and of 8 KiB.
NARROW = Layout(2, 1, 8, "float32", block_size=4)
WIDE = Layout(1, 2, 8, "bfloat16", block_size=8)
LAYOUTS = (NARROW, WIDE)
DOMAINS = (
    Domain("small", NARROW),
    Domain("small", NARROW, salt="tenant"),
    Domain("large", NARROW),
    Domain("small", WIDE),
    Domain("small", NARROW, extras=True),
)


def prompts_of(seed: int) -> list[Tokens]:
    """Token sequences in families: a common beginning of any length, and many ways to go on."""
    rng = random.Random(f"{seed}/prompts")

    def part() -> Tokens:
        # Few different tokens, so that blocks with equal tokens stand behind different prefixes.
        return tuple(rng.randrange(4) for _ in range(rng.randint(1, MAX_PART_TOKENS)))

    prompts = []
    for _ in range(NUM_FAMILIES):
        stem = part()
        prompts += [stem + part() for _ in range(NUM_BRANCHES)]
    return prompts


def show(prompt: Tokens, picture: int) -> Tokens:
    """The prompt with a picture wherever its token is 0; picture 0 is none."""
    return tuple(token or picture * PICTURE for token in prompt)


def ids_of(tokens: Sequence[int]) -> list[int]:
    """What the daemon is told of these tokens, beside the extras."""
    return [token % PICTURE for token in tokens]


def extras_of(tokens: Sequence[int], start: int = 0) -> list[tuple[int, bytes]]:
    """Which pictures there are; `start` is the position of the first token."""
    return [
        (place, hashlib.sha256(b"%d" % (token // PICTURE)).digest())
        for place, token in enumerate(tokens, start)
        if token >= PICTURE
    ]


def blocks_of(domain: Domain, tokens: Sequence[int]) -> set[Tokens]:
    """The whole blocks of a sequence, each by all tokens up to its end."""
    size = domain.layout.block_size
    return {tuple(tokens[:stop]) for stop in range(size, len(tokens) + 1, size)}


@lru_cache(maxsize=64)
def kv_of(domain: Domain, tokens: Tokens) -> Bytes:
    """Bytes shaped as the arrays of a lease; each row tells of all tokens up to its own."""
    layout = domain.layout
    prefix = hashlib.blake2b(repr(domain).encode())
    rows = []
    for token in tokens:
        prefix.update(token.to_bytes(4, "little"))
        rows.append(hashlib.shake_128(prefix.digest()).digest(layout.token_bytes))
    by_token = np.frombuffer(b"".join(rows), np.uint8).reshape(
        len(tokens), layout.num_layers, layout.num_planes, layout.num_kv_heads, -1
    )
    return by_token.transpose(1, 2, 0, 3, 4)


def fill(lease: Lease, domain: Domain, tokens: Tokens, start: int, stop: int) -> None:
    """Write the KV of these tokens of the sequence; no view of it is left."""
    kv, at = kv_of(domain, tokens), start
    for array in lease.write_arrays(start, stop):
        size = array.shape[2]
        array.view(np.uint8)[:] = kv[:, :, at : at + size]
        at += size


def verify(lease: Lease, domain: Domain, tokens: Tokens, stop: int | None = None) -> None:
    """Compare every byte of these tokens, those of the lease's prefix unless said.

    Raises WrongKV, or LeaseEnded: then it is void.
    """
    stop = lease.num_tokens if stop is None else stop
    arrays = lease.read_arrays(0, stop)
    found = np.concatenate([array.view(np.uint8) for array in arrays], axis=2) if arrays else None
    del arrays
    lease.check()
    if found is not None and not np.array_equal(
        found, expected := kv_of(domain, tokens)[:, :, :stop]
    ):
        raise WrongKV(_difference(lease, domain, found, expected))


def _difference(lease: Lease, domain: Domain, found: Bytes, expected: Bytes) -> str:
    differs = (found != expected).any(axis=(3, 4))
    layer, plane, token = np.argwhere(differs)[0].tolist()
    page = lease.pages[token // domain.layout.block_size]
    return (
        f"{domain}: {differs.sum()} of {differs.size} rows differ, the first at layer {layer}, "
        f"plane {plane}, token {token} (page {page}): {found[layer, plane, token].tobytes().hex()} "
        f"instead of {expected[layer, plane, token].tobytes().hex()}; pages {lease.pages.tolist()}"
    )
