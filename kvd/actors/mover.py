"""Mover: copies blocks between memory and the stores, down in the background and up when asked.

It books what it does in the state between two awaits, and names pages and keys meanwhile, never
nodes: whatever was evicted, committed or dropped while it waited, the state says when it is done.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

# What goes down, or comes up, at once.
BATCH_BYTES = 64 << 20
# What is summed or verified at once: some milliseconds of a thread.
SUM_BYTES = 32 << 20
