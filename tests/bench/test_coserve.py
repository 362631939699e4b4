"""``symbiosis bench coserve``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from symbiosis.bench import coserve
from tests.helpers import command
from tests.simulation.made_up import trace_file

OPTIONS = "bench", "coserve", "--preset", "tiny", "--rounds", "1", "--load", "2", "--trace"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coserve, "QUIET_S", 0.1)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["0,100,50"], "arrive at one time"),
        ([*["0,100,50"] * coserve.REQUESTS, "1,100,50"], "arrive at one time"),
        (["0,100,5", "1,100,5"], "have one token each"),
    ],
)
def test_a_trace_without_a_load_is_refused(tmp_path: Path, rows: list[str], said: str) -> None:
    result = command(*OPTIONS, str(trace_file(tmp_path, *rows)))
    assert result.exit_code == 1
    assert said in " ".join(result.stderr.split())


@pytest.mark.thorough
def test_a_trace_that_begins_with_answers_of_one_token(tmp_path: Path) -> None:
    """The latency of one client alone comes from the answers that have one. Results name the policy of --policy."""
    trace = trace_file(tmp_path, *(f"{at / 10},100,5" for at in range(4)), "0.4,50,30")
    found = tmp_path / "found.json"
    result = command(*OPTIONS, str(trace), "--policy", "no-lockstep", "--json", str(found))
    assert result.exit_code == 0, result.output
    named = [row["policy"] for row in json.loads(found.read_text())["rows"]]
    assert named[:2] == ["no-lockstep, no fine-tuning", "no-lockstep"]
