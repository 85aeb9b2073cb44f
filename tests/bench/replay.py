"""replay: an hour of a real service's prompts, and how much of them the cache still has, by tier.

Every block of the trace is a block here, with tokens of its own and a page that says which it is.
What the daemon finds is compared with what a perfect LRU would have found in as many pages.
"""

from __future__ import annotations

import json
import lzma
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvd.arena.base import GROUP_PAGES
from kvd.testing.daemons import running_daemon
from kvd.tiers.registry import GROUP
from kvd_client import Client, Layout, Lease, Namespace
from tests.bench.common import IDENTITY, Bench, Row, row
from tests.e2e.support import capacity_of, eventually

TRACE = Path(__file__).parent / "data" / "mooncake-conversation.jsonl.xz"
# A token has 8 bytes in each plane, enough for the number of its block; a page has 8 KiB.
LAYOUT = Layout(num_layers=1, num_kv_heads=1, head_size=4, dtype="bfloat16", block_size=512)
# One in so many of the trace's blocks has a page.
SHARES = (16, 8, 4, 1)
HOST, DISK = "host", "lmdb"
DISK_SHARE = 16
# The daemon is asked once in so many prompts whether the disk keeps up.
PROMPTS_PER_PACE = 16

Blocks: TypeAlias = NDArray[np.uint64]
# The blocks of each prompt, by number, in the order of time.
Trace: TypeAlias = list[Blocks]


@dataclass(frozen=True, slots=True)
class Setting:
    """One in `share` blocks has a page in host memory; with `disk`, the others have a record."""

    share: int
    disk: bool = False

    @property
    def holds_all(self) -> bool:
        return self.disk or self.share == 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many blocks were found in each tier, and by the perfect LRU of as many pages."""

    setting: Setting
    num_pages: int
    by_tier: Counter[str]
    by_lru: int

    @property
    def num_found(self) -> int:
        return self.by_tier.total()


def replay(bench: Bench) -> Iterator[Row]:
    trace = load_trace()[: bench.pick(1 << 20, 200)]
    num_blocks, num_different = sum(map(len, trace)), len(np.unique(np.concatenate(trace)))
    ceiling = num_found_by_lru(trace, num_different)
    settings = [Setting(share) for share in SHARES]
    if DISK in entry_points(group=GROUP).names:
        settings.append(Setting(DISK_SHARE, disk=True))
    outcomes = []
    for setting in settings:
        outcomes.append(_measure(trace, setting, num_different))
        bench.say(_told(outcomes[-1], num_blocks))
    print(_table(outcomes, num_blocks))
    alone = [outcome for outcome in outcomes if not outcome.setting.disk]
    whole = [outcome for outcome in outcomes if outcome.setting.holds_all]
    yield row(
        "replay_vs_lru",
        min(outcome.num_found / outcome.by_lru for outcome in alone),
        "x",
        f"of {len(trace)} prompts, {num_blocks} blocks of {LAYOUT.block_size} tokens, what is "
        "found in host memory alone, over what a perfect LRU of blocks finds in as many pages; "
        f"the worst of {'; '.join(_told(outcome, num_blocks) for outcome in alone)}",
    )
    yield row(
        "replay_vs_ceiling",
        min(outcome.num_found / ceiling for outcome in whole),
        "x",
        f"what is found where there is a place for all {num_different} different blocks, over the "
        f"{ceiling / num_blocks:.1%} that were there before; the worst of "
        f"{'; '.join(_told(outcome, num_blocks) for outcome in whole)}",
    )


def load_trace() -> Trace:
    with lzma.open(TRACE) as lines:
        return [np.array(json.loads(line)["hash_ids"], np.uint64) for line in lines]


def num_found_by_lru(trace: Trace, num_pages: int) -> int:
    """How many blocks a perfect LRU finds: the longest prefix, touched as a whole, leaf first."""
    resident: OrderedDict[int, None] = OrderedDict()
    num_found = 0
    for blocks in trace:
        path = blocks.tolist()
        prefix = list(takewhile(resident.__contains__, path))
        num_found += len(prefix)
        for block in prefix:  # held while its prompt is computed
            del resident[block]
        while len(resident) + len(path) > num_pages:
            resident.popitem(last=False)
        resident.update(dict.fromkeys(reversed(path)))
    return num_found


# --- the daemon's turn -----------------------------------------------------------------------


def _measure(trace: Trace, setting: Setting, num_blocks: int) -> Outcome:
    num_pages = -(-num_blocks // setting.share // GROUP_PAGES) * GROUP_PAGES
    found: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as data_directory,
        running_daemon(_document(setting, num_pages, num_blocks, data_directory)) as daemon,
        Client(daemon.endpoint, timeout=60) as client,
    ):
        namespace = client.open(IDENTITY, LAYOUT)
        for number, blocks in enumerate(trace):
            if setting.disk and number % PROMPTS_PER_PACE == 0:
                _pace(client)
            found += _prefill(namespace, blocks)
    return Outcome(setting, num_pages, found, num_found_by_lru(trace, num_pages))


def _document(
    setting: Setting, num_pages: int, num_blocks: int, data_directory: str
) -> dict[str, Any]:
    tiers = [{"type": HOST, "capacity_bytes": capacity_of(num_pages, LAYOUT)}]
    if setting.disk:
        # Twice what all blocks have: room for all that a store keeps beside them.
        tiers.append({"type": DISK, "capacity_bytes": 2 * capacity_of(num_blocks, LAYOUT)})
    return {
        "data_directory": data_directory,
        "tiers": tiers,
        "cache": {"high_watermark": 1.0, "low_watermark": 1.0},
    }


def _pace(client: Client) -> None:
    """Let the disk catch up: an hour of prompts comes within a minute."""
    eventually(lambda: not client.status().counters.get("blocks_waiting"))


def _prefill(namespace: Namespace, blocks: Blocks) -> Counter[str]:
    """Check what is found of a prompt, and compute the rest; the blocks found in each tier."""
    size = LAYOUT.block_size
    tokens = np.repeat(blocks.astype(np.uint32), size)
    with namespace.match(tokens) as lease:
        num_found = lease.num_tokens // size
        found = Counter({tier: count // size for tier, count in lease.tokens_by_tier.items()})
        assert found.total() == num_found
        _check(lease, blocks[:num_found])
        if num_found < len(blocks):
            lease.reserve(len(tokens))
            _fill(lease, blocks)
            lease.commit(tokens[lease.num_committed :])
    return found


def _check(lease: Lease, blocks: Blocks) -> None:
    """Raise AssertionError where a page is of another block."""
    at = 0
    for marks in map(_marks, lease.read_arrays(0, lease.num_tokens)):
        count = marks.shape[1]
        assert (marks == blocks[at : at + count]).all(), f"{marks} instead of {blocks}"
        at += count


def _fill(lease: Lease, blocks: Blocks) -> None:
    """Have the pages behind the lease's prefix say of which blocks they are; no view is left."""
    at = lease.num_committed // LAYOUT.block_size
    for marks in map(
        _marks, lease.write_arrays(lease.num_committed, len(blocks) * LAYOUT.block_size)
    ):
        count = marks.shape[1]
        marks[:] = blocks[at : at + count]
        at += count


def _marks(array: NDArray[Any]) -> NDArray[np.uint64]:
    """The first token of each block of a run, in both planes: `[planes, blocks]`."""
    return array.view(np.uint64)[0, :, :: LAYOUT.block_size, 0, 0]


# --- what people read ------------------------------------------------------------------------


def _told(outcome: Outcome, num_blocks: int) -> str:
    place = f"{outcome.num_pages} pages" + f" and {DISK}" * outcome.setting.disk
    found, by_lru = outcome.num_found / num_blocks, outcome.by_lru / num_blocks
    return f"{place}: {found:.1%} against {by_lru:.1%}"


def _table(outcomes: Sequence[Outcome], num_blocks: int) -> str:
    """As Markdown."""
    lines = [
        "| Host memory | Pages | Below it | Found there | Found below | Perfect LRU | Of it |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        share, disk = outcome.setting.share, outcome.setting.disk
        found = outcome.by_tier[HOST] / num_blocks
        below = f"{outcome.by_tier[DISK] / num_blocks:.1%}" if disk else ""
        lines.append(
            f"| 1/{share} | {outcome.num_pages} | {DISK if disk else ''} | {found:.1%} | {below} | "
            f"{outcome.by_lru / num_blocks:.1%} | {outcome.num_found / outcome.by_lru:.3f} |"
        )
    return "\n".join(lines)
