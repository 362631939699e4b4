"""``symbiosis simulate --grid`` compares policies over many loads."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from symbiosis.bench.grid import GridLoad, GridResult, cells, means
from symbiosis.cli.commands import app
from symbiosis.simulation.bound import Bound
from symbiosis.simulation.loads import SHAPES
from symbiosis.simulation.outcome import LoadOutcome
from symbiosis.terminal.progress import Steps


def outcome(slo: float, tuned: float) -> LoadOutcome:
    return LoadOutcome(1.0, 1.0, tuned, 1.0, 1.0, 1.0, 1.0, 1.0, slo, 1.0, 1, 1.0)


def row(**policies: tuple[float, float]) -> GridResult:
    cell = GridLoad("a100", "chat", SHAPES["chat"], 0.5, 2, 0)
    return GridResult(cell, Bound(1.0, 100.0), {name: outcome(*figures) for name, figures in policies.items()})


def test_a_policy_holds_where_no_other_keeps_more_slos_or_fine_tunes_more() -> None:
    assert row(mine=(0.9, 50.0), best=(0.91, 50.0), greedy=(0.5, 90.0)).holds("mine")
    assert not row(mine=(0.9, 50.0), best=(0.93, 50.0)).holds("mine")
    assert not row(mine=(0.9, 50.0), best=(0.91, 60.0)).holds("mine")
    assert row(mine=(0.9, 50.0), other=(0.8, 60.0)).holds("mine"), "it keeps more than the other one"


def test_means() -> None:
    found = means([row(mine=(0.9, 50.0), other=(0.8, 60.0)), row(mine=(0.7, 30.0), other=(0.8, 60.0))])
    assert {name: round(value, 6) for name, value in found["mine"].items()} == {
        "slo": 0.8,
        "regret": 0.2,
        "tuning": 0.4,
        "held": 1,
    }


def test_loads_without_possible_fine_tuning_are_not_in_the_mean() -> None:
    whole = row(mine=(0.9, 50.0))
    busy = GridResult(whole.cell, Bound(0.5, 0.0), {"mine": outcome(0.5, 20.0)})
    assert means([whole, busy])["mine"]["tuning"] == 0.5


def test_cells() -> None:
    assert len(list(cells([], 3, 0, 0))) == 2 * 6 * 3 * 2 * 3
    assert [cell.load for cell in cells(["code:variation=3"], 1, 0, 0)] == ["code:variation=3"] * 12
    assert list(cells([], 1, 7, 5)) == list(cells([], 1, 7, 5)) != list(cells([], 1, 8, 5))


OPTIONS = [
    *("--load", "steady:answer=4", "--requests", "3", "--policy", "co-serving:slo_ms=75", "--policy", "lockstep"),
]


def test_command(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "grid.json"), "--plot", str(tmp_path / "grid.png")]
    result = CliRunner().invoke(app, ["simulate", "--grid", *OPTIONS, *files])
    assert result.exit_code == 0, result.output
    assert "12 loads, 2 policies: 24/24" in result.stderr
    assert "means of 12 loads" in result.output
    data = json.loads((tmp_path / "grid.json").read_text())
    assert len(data["loads"]) == 12
    assert set(data["means"]) == {"co-serving:slo_ms=75", "lockstep"}
    assert data["loads"][0]["policies"]["lockstep"]["finished"] == 3
    assert (tmp_path / "grid.png").stat().st_size > 10_000


@pytest.mark.parametrize(("done", "held"), [(1, 0), (23, 11)])
def test_an_interrupted_grid_keeps_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, done: int, held: int
) -> None:
    """A load counts if all policies have run it."""

    def show(self: Steps, task: str, number: int, total: int, note: str = "") -> None:
        if number == done:
            raise KeyboardInterrupt

    monkeypatch.setattr(Steps, "__call__", show)
    told = tmp_path / "grid.json"
    result = CliRunner().invoke(app, ["simulate", "--grid", *OPTIONS, "--json", str(told)])
    assert result.exit_code == 130, result.output
    assert "interrupted" in result.stderr
    assert (f"these are {held} of 12 loads" in result.stderr) == (held > 0)
    assert not multiprocessing.active_children()
    assert told.exists() == (held > 0)
    assert not held or len(json.loads(told.read_text())["loads"]) == held
