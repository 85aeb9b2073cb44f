"""replay: an hour of a real service's prompts, and how much of them the cache still has, by tier.

Every block has tokens of its own and a page that says which it is. What the daemon finds is
compared with what a perfect LRU of blocks would have found in as many pages.
"""

from __future__ import annotations

import json
import lzma
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvd.protocol.layout import MAX_GROUP_PAGES
from kvd.testing.daemons import running_daemon
from kvd.tiers.registry import GROUP
from kvd_client import Client, Layout, Lease, Namespace
from tests.bench.common import IDENTITY, Bench, Row, row
from tests.e2e.support import capacity_of, eventually

PROMPTS = Path(__file__).parent / "data" / "mooncake-conversation.jsonl.xz"
PROMPT_BLOCK = 512
# A token has 16 bytes in each plane; the first 8 of a block are its number.
LAYOUT = Layout(num_layers=1, num_kv_heads=1, head_size=8, dtype="bfloat16")
HOST, DISK = "host", "lmdb"
# Of memory so much at most has no copy on disk when the next prompt comes.
MAX_UNCOPIED = 1 / 4

# The blocks of a prompt, by number.
Blocks: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Setting:
    """One in `share` blocks has a page in host memory; with `disk`, all have a record there."""

    block_size: int
    share: int
    disk: bool = False

    @property
    def holds_all(self) -> bool:
        return self.disk or self.share == 1


SETTINGS = (*(Setting(PROMPT_BLOCK, share) for share in (16, 8, 4, 1)), Setting(16, 16))


class Trace:
    """The prompts in the order of time, in blocks of so many tokens."""

    def __init__(self, block_size: int, max_prompts: int) -> None:
        self.layout = replace(LAYOUT, block_size=block_size)
        with lzma.open(PROMPTS) as lines:
            found = [json.loads(line) for line in lines]
        self.prompts = [self._blocks(**prompt) for prompt in found[:max_prompts]]
        self.num_blocks = sum(map(len, self.prompts))
        self.num_different = len(np.unique(np.concatenate(self.prompts)))

    def _blocks(self, hash_ids: Sequence[int], input_length: int, **_: int) -> Blocks:
        """All that have a token of the prompt; the last one counts as whole."""
        size = self.layout.block_size
        parts = np.arange(PROMPT_BLOCK // size, dtype=np.uint64)
        blocks = np.array(hash_ids, np.uint64)[:, None] * len(parts) + parts
        return blocks.ravel()[: -(-input_length // size)]

    @property
    def num_repeated(self) -> int:
        """What a cache that forgets nothing finds."""
        return self.num_blocks - self.num_different


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many blocks were found in each tier, and by the perfect LRU of as many pages."""

    setting: Setting
    trace: Trace
    num_pages: int
    by_tier: Counter[str]
    by_lru: int

    @property
    def num_found(self) -> int:
        return self.by_tier.total()

    def __str__(self) -> str:
        place = f"{self.num_pages} pages of {self.setting.block_size} tokens"
        place += f" and {DISK}" * self.setting.disk
        return f"{place}: {self.rate(self.num_found)} against {self.rate(self.by_lru)}"

    def rate(self, num_blocks: int) -> str:
        return f"{num_blocks / self.trace.num_blocks:.1%}"


def replay(bench: Bench) -> Iterator[Row]:
    max_prompts = bench.pick(1 << 20, 200)
    settings = list(SETTINGS)
    if DISK in entry_points(group=GROUP).names:
        settings.append(Setting(PROMPT_BLOCK, bench.pick(16, 2), disk=True))
    outcomes = []
    for setting in settings:
        outcomes.append(_measure(setting, Trace(setting.block_size, max_prompts)))
        bench.say(str(outcomes[-1]))
    print(_table(outcomes))
    alone = [outcome for outcome in outcomes if not outcome.setting.disk]
    yield row(
        "replay_vs_lru",
        min(outcome.num_found / outcome.by_lru for outcome in alone),
        "x",
        f"{len(alone[0].trace.prompts)} prompts; blocks found in host memory alone, over those "
        f"that a perfect LRU finds in as many pages; the worst of {'; '.join(map(str, alone))}",
    )
    whole = [outcome for outcome in outcomes if outcome.setting.holds_all]
    yield row(
        "replay_vs_ceiling",
        min(outcome.num_found / outcome.trace.num_repeated for outcome in whole),
        "x",
        "blocks found where there is a place for all, over those that were there before; the "
        f"worst of {'; '.join(map(str, whole))}",
    )


def num_found_by_lru(prompts: Sequence[Blocks], num_pages: int) -> int:
    """How many blocks a perfect LRU finds: the longest prefix, touched as a whole, leaf first."""
    resident: OrderedDict[int, None] = OrderedDict()
    num_found = 0
    for blocks in prompts:
        path = blocks.tolist()
        prefix = list(takewhile(resident.__contains__, path))
        num_found += len(prefix)
        for block in prefix:  # held while its prompt is computed
            del resident[block]
        while len(resident) + len(path) > num_pages:
            resident.popitem(last=False)
        resident.update(dict.fromkeys(reversed(path)))
    return num_found


# --- the daemon's turn ---


def _measure(setting: Setting, trace: Trace) -> Outcome:
    num_pages = -(-trace.num_different // setting.share // MAX_GROUP_PAGES) * MAX_GROUP_PAGES
    found: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as data_directory,
        running_daemon(_document(setting, trace, num_pages, data_directory)) as daemon,
        Client(daemon.endpoint, timeout=60) as client,
    ):
        namespace = client.open(IDENTITY, trace.layout)
        for blocks in trace.prompts:
            if setting.disk:
                _pace(client, num_pages)
            found += _prefill(namespace, blocks)
    return Outcome(setting, trace, num_pages, found, num_found_by_lru(trace.prompts, num_pages))


def _document(
    setting: Setting, trace: Trace, num_pages: int, data_directory: str
) -> dict[str, Any]:
    tiers = [{"type": HOST, "capacity_bytes": capacity_of(num_pages, trace.layout)}]
    cache = {"high_watermark": 1.0, "low_watermark": 1.0}
    if setting.disk:
        # Far more than all blocks have: there is room for what a store keeps beside them.
        all_bytes = capacity_of(trace.num_different, trace.layout)
        tiers.append({"type": DISK, "capacity_bytes": 4 * all_bytes})
        cache["demote_watermark"] = 0.01  # copied at once, so that nothing goes without a copy
    return {"data_directory": data_directory, "tiers": tiers, "cache": cache}


def _pace(client: Client, num_pages: int) -> None:
    """Let the disk catch up: an hour of prompts comes within a minute.

    Of what is evicted before it was copied nothing is left.
    """
    eventually(lambda: _num_uncopied(client.status().counters) < MAX_UNCOPIED * num_pages)


def _num_uncopied(counters: Mapping[str, int]) -> int:
    """Blocks that are in memory alone, as the daemon counts."""
    gone = ("blocks_promoted", "blocks_demoted", "pressure_drops")
    return counters.get("blocks_committed", 0) - sum(counters.get(name, 0) for name in gone)


def _prefill(namespace: Namespace, blocks: Blocks) -> Counter[str]:
    """Check what is found of a prompt, and compute the rest; the blocks found in each tier."""
    size = namespace.layout.block_size
    tokens = np.repeat(blocks.astype(np.uint32), size)
    with namespace.match(tokens) as lease:
        num_found = lease.num_tokens // size
        found = Counter({tier: count // size for tier, count in lease.tokens_by_tier.items()})
        assert found.total() == num_found
        _check(lease, blocks)
        if num_found < len(blocks):
            lease.reserve(len(tokens))
            _fill(lease, blocks)
            lease.commit(tokens[lease.num_committed :])
    return found


def _check(lease: Lease, blocks: Blocks) -> None:
    """Raise AssertionError where a page that was found is of another block."""
    at = 0
    for numbers in _numbers(lease, lease.read_arrays(0, lease.num_tokens)):
        count = numbers.shape[1]
        assert (numbers == blocks[at : at + count]).all(), f"{numbers} instead of {blocks}"
        at += count


def _fill(lease: Lease, blocks: Blocks) -> None:
    """Have the reserved pages say of which blocks they are; no view of them is left."""
    start, size = lease.num_committed, lease.layout.block_size
    at = start // size
    for numbers in _numbers(lease, lease.write_arrays(start, len(blocks) * size)):
        count = numbers.shape[1]
        numbers[:] = blocks[at : at + count]
        at += count


def _numbers(lease: Lease, arrays: Sequence[NDArray[Any]]) -> Iterator[NDArray[np.uint64]]:
    """Where each block of a run says its number, in both planes: `[planes, blocks]`."""
    for array in arrays:
        yield array.view(np.uint64)[0, :, :: lease.layout.block_size, 0, 0]


# --- what people read ---


def _table(outcomes: Sequence[Outcome]) -> str:
    """As Markdown."""
    lines = [
        "| Tokens a block | Host memory | Pages | Found there | On disk | Perfect LRU | Of it |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        setting, tiers = outcome.setting, outcome.by_tier
        lines.append(
            f"| {setting.block_size} | 1/{setting.share} | {outcome.num_pages} | "
            f"{outcome.rate(tiers[HOST])} | {outcome.rate(tiers[DISK]) if setting.disk else ''} | "
            f"{outcome.rate(outcome.by_lru)} | {outcome.num_found / outcome.by_lru:.3f} |"
        )
    return "\n".join(lines)
