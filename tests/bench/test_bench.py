"""Each part works and yields whole rows; no figure is asserted, for at this size none means any."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from tests.bench import __main__ as command
from tests.bench.common import BUDGETS, Bench, Row, row


@pytest.mark.parametrize("name", command.PARTS)
def test_part_yields_its_figure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(command.PARTS[name](Bench(print, tiny=True)))
    if name == "hit_first_touch" and "skipped" in capsys.readouterr().out:
        assert [row.name for row in rows] == ["hit_first_touch_4k"]
        return
    assert rows[0].name.startswith(name)
    assert all(map(is_whole, rows))
    assert {row.name for row in rows if row.budget is not None} == budgets_of(name)


def is_whole(row: Row) -> bool:
    figure = json.loads(msgspec.json.encode(row))  # as it is written down
    named = bool(figure["name"] and figure["unit"] and figure["detail"])
    return named and math.isfinite(figure["value"]) and figure["value"] > 0


def budgets_of(part: str) -> set[str]:
    return {figure for figure in BUDGETS if figure.startswith(part)}


def test_every_budget_belongs_to_a_part() -> None:
    assert set().union(*map(budgets_of, command.PARTS)) == set(BUDGETS)


def test_budget_is_a_least_or_a_greatest_value() -> None:
    assert row("store_vs_copy", 0.9, "x", "").met
    assert not row("store_vs_copy", 0.89, "x", "").met
    assert row("start_seconds", 1.0, "s", "").met
    assert not row("start_seconds", 1.1, "s", "").met
    assert row("without a budget", 0.1, "x", "").met


@pytest.fixture
def _two_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    figures = {
        "store_vs_copy": lambda bench: iter([row("store_vs_copy", 0.5, "x", "slow")]),
        "start_seconds": lambda bench: iter([row("start_seconds", 0.5, "s", "fast")]),
    }
    monkeypatch.setattr(command, "PARTS", figures)


@pytest.mark.usefixtures("_two_figures")
def test_missed_budget_is_said_and_fails_only_where_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main([]) == 0
    assert "1 missed their budget: store_vs_copy" in capsys.readouterr().out
    assert command.main(["--check"]) == 1
    assert command.main(["--check", "start_seconds"]) == 0


@pytest.mark.usefixtures("_two_figures")
def test_figures_are_written_and_recorded_with_their_machine(tmp_path: Path) -> None:
    command.main(["--record", "here"])
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert figures[0] == {
        "name": "store_vs_copy",
        "value": 0.5,
        "unit": "x",
        "budget": 0.9,
        "met": False,
        "detail": "slow",
    }
    recorded = json.loads((tmp_path / "here.json").read_text())
    assert recorded["figures"] == figures
    assert {"date", "cpu", "cores", "memory_gib", "kernel", "torch"} <= set(recorded["machine"])


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "Example: python -m tests.bench hit_vs_copy" in capsys.readouterr().out


def test_unknown_part_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["hit_vs_cop"])
    assert "hit_vs_copy, hit_first_touch" in capsys.readouterr().err
