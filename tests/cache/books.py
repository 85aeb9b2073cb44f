"""Carries out plans, step by step, on real page tables; each step must keep the order."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from kvd.arena.page_table import NO_PARENT, PageState, PageTable, table_bytes
from kvd.arena.runs import pages_of
from kvd.cache import plan as plans
from tests.cache.model import Page

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.arena.runs import Pages
    from kvd.cache.plan import Plan, Step
    from kvd.protocol.keys import BlockKey
    from kvd.protocol.layout import Layout


class Books:
    def __init__(self) -> None:
        self.tables: dict[int, PageTable] = {}
        self.generations: Counter[int] = Counter()
        self.freed: list[Page] = []
        # What each store has, as far as it was told.
        self.records: defaultdict[int, set[BlockKey]] = defaultdict(set)

    def add_arena(self, number: int, layout: Layout, row_bytes: int, num_pages: int) -> None:
        assert number not in self.tables
        buffer = memoryview(bytearray(table_bytes(layout, row_bytes, num_pages)))
        self.tables[number] = PageTable(layout, row_bytes, num_pages, buffer)

    def carry_out(self, plan: Plan) -> None:
        self.freed = []
        for step in plan:
            self.do(step)

    def do(self, step: Step) -> None:
        match step:
            case plans.Reserved(arena, pages, session):
                self.check_states(arena, pages, PageState.FREE)
                self.tables[arena].reserve(pages, session)
            case plans.Committed(arena, pages, parent, first_block, rows, namespace):
                self.check_states(arena, pages, PageState.RESERVED)
                self.tables[arena].commit(pages, parent, first_block, rows, namespace)
                self.check_parents(arena)
            case plans.Detached(arena, pages):
                self.check_states(arena, pages, PageState.COMMITTED)
                for page in pages.tolist():  # one by one: a kill may come after any of them
                    self.tables[arena].detach([page])
                    self.check_parents(arena)
            case plans.Freed(arena, pages):
                for page in pages.tolist():
                    assert self.states(arena, page) != PageState.FREE
                    self.tables[arena].free([page])
                    self.check_parents(arena)
                    self.freed.append(Page(arena, page))
            case plans.Quarantined(arena, pages):
                self.check_states(arena, pages, PageState.RESERVED)
                sessions = self.tables[arena].records["session"][pages]
                self.tables[arena].quarantine(pages)
                assert (self.tables[arena].records["session"][pages] == sessions).all()
            case plans.Unback(arena, run):
                self.check_states(arena, pages_of([run]), PageState.FREE)
                self.tables[arena].unback(pages_of([run]))
            case plans.Back(arena, run):
                self.check_states(arena, pages_of([run]), PageState.UNBACKED)
            case plans.Forgotten(tier, _, keys):
                self.records[tier].difference_update(keys)
            case plans.Unnamed(arena, number, _):
                is_block = self.tables[arena].records["state"] == PageState.COMMITTED
                assert number not in self.tables[arena].records["namespace"][is_block]
            case plans.Removed(arena):
                states = self.tables.pop(arena).records["state"]
                assert (states <= PageState.FREE).all()
            case plans.Ended(slot, generation):
                assert generation > self.generations[slot]
                self.generations[slot] = generation

    def states(self, arena: int, pages: Pages | int) -> NDArray[np.uint16]:
        return np.asarray(self.tables[arena].records["state"][pages])

    def check_states(self, arena: int, pages: Pages, state: PageState) -> None:
        assert (self.states(arena, pages) == state).all()

    def check_parents(self, arena: int) -> None:
        """A committed block stands behind a committed one of the generation that it names."""
        records = self.tables[arena].records
        children = records[records["state"] == PageState.COMMITTED]
        children = children[children["parent"] != NO_PARENT]
        parents = records[children["parent"]]
        assert (parents["state"] == PageState.COMMITTED).all()
        assert (parents["generation"] == children["parent_generation"]).all()
        assert (parents["block"] + 1 == children["block"]).all()
