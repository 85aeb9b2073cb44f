"""`kvd-ctl top`: what kvd does, interval by interval."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from rich.console import Group
from rich.live import Live
from rich.table import Table

from kvd_client import Client, KvdError, StatusReply, format_bytes
from kvd_ctl import render
from kvd_ctl.notation import format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

# Counters that are shown as rates: those that tell what is done, and what goes wrong.
RATES = (
    "requests",
    "errors",
    "matches",
    "tokens_requested",
    "tokens_matched",
    "blocks_committed",
    "blocks_evicted",
    "blocks_demoted",
    "blocks_promoted",
    "pressure_drops",
)
FROM = "tokens_from_"
NUM_SESSIONS = 8


@dataclass(frozen=True)
class SessionView:
    session: str
    client: str
    num_leases: int
    requests: float


@dataclass(frozen=True)
class View:
    """What was done in `seconds`, as rates per second, and how kvd stands behind them.

    After a restart these are the seconds since then. `hit_rate` is None where nothing was matched.
    """

    seconds: float
    is_restarted: bool
    is_draining: bool
    hit_rate: float | None
    rates: dict[str, float]
    tokens_by_source: dict[str, float]
    pages: dict[str, int]
    blocks: dict[str, int]
    used_bytes: dict[str, int]
    sessions: list[SessionView]


@dataclass(frozen=True)
class Silence:
    """Nobody answered, and why."""

    error: str


Told: TypeAlias = Callable[[View | Silence], None]


def watch(client: Client, interval: float, count: int | None, *, as_json: bool) -> None:
    """Show what kvd does, again and again, so many times or until Ctrl-C."""
    with suppress(KeyboardInterrupt), _lines() if as_json else _screen() as tell:
        for view in islice(_views(client, interval), count):
            tell(view)


def _views(client: Client, interval: float) -> Iterator[View | Silence]:
    """A view for each interval; while kvd does not answer, that is what there is to see."""
    before = client.status()
    while True:
        time.sleep(interval)
        try:
            now = client.status()
        except KvdError as error:
            yield Silence(str(error))
        else:
            yield view_of(before, now)
            before = now


def view_of(before: StatusReply, now: StatusReply) -> View:
    """What happened between two statuses; after a restart, since then."""
    is_restarted = before.epoch != now.epoch
    done, seconds = Counter(now.counters), now.uptime_seconds
    requests: Counter[str] = Counter()
    if not is_restarted:
        done.subtract(before.counters)
        seconds -= before.uptime_seconds
        requests.update({one.session: one.num_requests for one in before.sessions})
    seconds = max(seconds, 0.001)  # as fine as uptime is told
    asked, matched = done["tokens_requested"], done["tokens_matched"]
    sources = {name.removeprefix(FROM): n for name, n in done.items() if name.startswith(FROM)}
    sessions = [
        SessionView(
            one.session,
            one.client,
            one.num_leases,
            (one.num_requests - requests[one.session]) / seconds,
        )
        for one in now.sessions
    ]
    return View(
        seconds=round(seconds, 3),
        is_restarted=is_restarted,
        is_draining=now.is_draining,
        hit_rate=matched / asked if asked else None,
        rates=_per_second({name: done[name] for name in RATES}, seconds),
        tokens_by_source=_per_second(sources | {"missed": asked - matched}, seconds),
        pages={state: n for state, n in now.tiers[0].pages.items() if n},
        blocks={tier.name: tier.num_blocks for tier in now.tiers},
        used_bytes={tier.name: tier.used_bytes for tier in now.tiers},
        sessions=sorted(sessions, key=lambda one: (-one.requests, -one.num_leases))[:NUM_SESSIONS],
    )


def _per_second(counts: dict[str, int], seconds: float) -> dict[str, float]:
    return {name: count / seconds for name, count in counts.items()}


@contextmanager
def _lines() -> Iterator[Told]:
    yield lambda view: print(msgspec.json.encode(view).decode(), flush=True)


@contextmanager
def _screen() -> Iterator[Told]:
    """A screen that is drawn anew and gone at the end; without a terminal, one view by one."""
    if not render.console.is_terminal:
        yield lambda view: render.console.print(_drawn(view), crop=False)
        return
    with Live(console=render.console, screen=True, auto_refresh=False) as live:
        yield lambda view: live.update(_drawn(view), refresh=True)


def _drawn(view: View | Silence) -> RenderableType:
    if isinstance(view, Silence):
        return f"kvd does not answer: {view.error}"
    hits = "-" if view.hit_rate is None else f"{view.hit_rate:.1%}"
    head = f"in {format_duration(view.seconds)}; hit rate {hits}"
    head += "; kvd was restarted" * view.is_restarted + "; it is draining" * view.is_draining
    grid = Table.grid(padding=(0, 4))
    grid.add_row(
        _rates("", view.rates),
        Group(
            _rates("tokens", view.tokens_by_source),
            render.made_table([{"pages": state, "now": n} for state, n in view.pages.items()]),
        ),
        render.made_table(
            [
                {"tier": name, "blocks": n, "used": format_bytes(view.used_bytes[name])}
                for name, n in view.blocks.items()
            ]
        ),
    )
    sessions = [
        {
            "session": one.session,
            "client": one.client,
            "leases": one.num_leases,
            "requests a second": f"{one.requests:.1f}",
        }
        for one in view.sessions
    ]
    return Group(head, grid, render.made_table(sessions))


def _rates(title: str, rates: dict[str, float]) -> Table:
    return render.made_table([{title: name, "a second": f"{n:.1f}"} for name, n in rates.items()])
