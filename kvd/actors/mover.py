"""Mover: copies blocks between memory and the stores, down in the background and up when asked.

It books what it does in the state between two awaits, and names pages and keys meanwhile, never
nodes: whatever was evicted, committed or dropped while it waited, the state says when it is done.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import anyio
import numpy as np

from kvd.arena.checksum import block_checksums
from kvd.cache.leases import OWN_SESSION
from kvd.cache.radix import MEMORY
from kvd.cache.recovery import about
from kvd.protocol.errors import KvdError, TierFailed
from kvd.tiers import copying
from kvd.tiers.copying import Copy

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from kvd.actors.store import StoreActor
    from kvd.arena.runs import Pages
    from kvd.cache.memory import ArenaState, Namespace
    from kvd.cache.plan import Forgotten, Lacking, Plan
    from kvd.cache.radix import Node
    from kvd.cache.state import CacheState
    from kvd.cache.stores import Write
    from kvd.config import CacheConfig
    from kvd.tiers.base import TierArena

logger = logging.getLogger(__name__)

# What goes down, or comes up, at once.
BATCH_BYTES = 64 << 20
# What is summed or verified at once: some milliseconds of a thread.
SUM_BYTES = 32 << 20
