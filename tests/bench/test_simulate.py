"""Tests of the command ``symbiosis simulate`` and of its measured costs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from symbiosis.bench.calibrate import Calibration, Curve
from symbiosis.bench.models import PRESETS
from symbiosis.bench.settings import Settings
from symbiosis.bench.simulate import _ratio, _show, _text
from symbiosis.cli.commands import app
from symbiosis.simulation import replay as replays
from symbiosis.simulation.outcome import LoadOutcome
from symbiosis.simulation.replay import ReplayedLoad
from symbiosis.simulation.trace import Arrival
from tests.simulation.made_up import costs, trace_file


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_command(tmp_path: Path) -> None:
    trace = trace_file(tmp_path, *(f"{number / 10},20,5" for number in range(9)))
    options = [
        "--executors",
        "2",
        "--finetune",
        "1",
        "--rows",
        "64",
        "--policy",
        "opportunistic",
        "--policy",
        "fair+co-serving",
    ]
    out = _run(str(trace), *options, "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "plots" / "o.png"))
    assert "9 requests, 1 fine-tuning clients" in out
    data = json.loads((tmp_path / "o.json").read_text())
    assert data["policies"]["opportunistic"]["predicted"]["finished"] == 9
    assert "fair+co-serving:slo_ms=75,ttft_ms=5000" in data["policies"]
    assert data["executors"] == 2
    assert (tmp_path / "plots" / "o.png").stat().st_size > 10_000


@pytest.mark.parametrize("columns", ["80", None])
def test_figures_are_never_truncated(
    columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No heading is truncated, neither on a terminal of 80 columns nor in a file."""
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    found = LoadOutcome(1.0, 123456.7, 234567.8, 0.0, 345.1, 45678.9, 56789.1, 678912.3, 0.891, 0.912, 8, 11.4)
    long, brief = "rate-limit:tokens_per_s=500+fair:quantum=64+co-serving:slo_ms=75", "lockstep"
    _show(costs(), ReplayedLoad([Arrival(0.0, 1, 1)] * 8), 1, {long: found, brief: found}, {long: found})
    out = capsys.readouterr().out
    assert "…" not in out
    assert all(len(line) <= 80 for line in out.splitlines()) or columns is None
    figures = "123,457 234,568 345 45,679 56,789 678,912 0.891 0.912 11.4"
    for word in (*figures.split(), "tokens/s", "tuning", "SLO", "mean", "batch", "fairness", "token", "p99 ms"):
        assert re.search(rf"(?<!\S){word}(?!\S)", out), out


def test_figures_are_rounded_to_three_digits() -> None:
    assert [_text(value) for value in (float("nan"), 0.0, 1.234, 999.4, 999.7, 12345.6)] == [
        *("", "0", "1.23", "999", "1,000", "12,346")
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--policy", "co-serving:slo_ms=1"], "one token takes"),
        (["missing.csv"], "cannot read the trace"),
        (["--policy", "magic"], "unknown policy"),
        (["--check"], "--machine here"),
        (["--machine", "here", "--check", "--executors", "2"], "one executor"),
        (["--model", "gpt"], "gpt is neither a folder"),
        (["--lengths", "inf"], "--lengths is inf"),
        (["--lengths", "1e9"], "lengths is 1e+09, and the longest text has"),
        (["--load", "coed"], "unknown load 'coed'"),
        (["--load", "code:speed=2"], "load 'code' has no option"),
        (["--load", "chat", "--load", "code"], "--load may be repeated with --grid only"),
        (
            ["--grid", "--model", "qwen2.5-14b"],
            "--grid has loads, machines and numbers of clients of its own; leave model",
        ),
        (["--grid", "--random", "3", "--load", "chat"], "--random replaces the named loads; leave --load out"),
        (["--grid", "--policy", "co-serving:slo_ms=1"], "one token takes"),
        (["--seeds", "3"], "--seeds has no effect here: it is for --grid"),
        (["--ttft-ms", "inf"], "--ttft-ms is inf"),
        (["trace.csv", "--load", "rag"], "--load has no effect here: the trace has its own"),
        (["trace.csv", "--seed", "5"], "--seed has no effect here: the trace is not generated"),
        (["--machine", "here", "--model", "qwen2.5-14b"], "--model has no effect here"),
        (["--preset", "100m"], "--preset has no effect here: it is for --machine here"),
        (["--base-layers", "mlp"], "--base-layers has no effect here: it is for --machine here"),
        (["--rows", "64"], "--rows has no effect here: no client fine-tunes"),
        (["--speed", "2", "--no-paced", "--requests", "1"], "--speed has no effect here: --no-paced leaves the times"),
        (["--policy", "lockstep", "--policy", "lockstep"], "--policy lockstep is given 2 times"),
        (["--plot", "drawing.bogus"], "ends in .png, .svg, .pdf"),
        (["--json", "/dev/null/o.json"], "cannot write to /dev/null/o.json"),
    ],
)
def test_wrong_use(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit), result.exception
    assert why in " ".join(result.output.split())


def test_an_impossible_slo_is_refused_before_the_load_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of the four default policies is refused before the load is replayed with the first one."""
    played: list[object] = []
    monkeypatch.setattr(replays, "replay", lambda *arguments, **options: played.append(arguments))
    result = CliRunner().invoke(app, ["simulate", "--requests", "2", "--slo-ms", "5"])
    assert result.exit_code == 1
    assert "slo_ms is 5, but one token takes" in result.output
    assert not played


def test_a_ratio_without_both_figures_is_empty() -> None:
    missing = float("nan")
    pairs = [(1.0, 2.0), (missing, missing), (missing, 2.0), (1.0, missing), (1.0, 0.0)]
    assert [_ratio(predicted, real) for predicted, real in pairs] == ["0.50", "", "", "", ""]


def test_predictions_beside_a_real_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured, and the load is replayed on a real executor. A benchmark checks the accuracy of the
    predictions.
    """
    monkeypatch.setattr("symbiosis.bench.simulate.ROUNDS", 1)
    _run(
        *("--machine", "here", "--requests", "4", "--lengths", "0.02", "--clients", "2", "--no-paced", "--check"),
        *("--policy", "opportunistic", "--finetune", "1", "--rows", "32", "--json", str(tmp_path / "o.json")),
    )
    found = json.loads((tmp_path / "o.json").read_text())["policies"]["opportunistic"]
    assert found["predicted"]["finished"] == found["real"]["finished"] == 4
    assert found["predicted"]["mean_batch"] >= 1
    assert found["real"]["finetune_per_s"] > 0


async def test_short_prompts_leave_most_layers_to_all_tokens() -> None:
    """Only the head is measured as a layer that prompts send their last token to."""
    settings = Settings(PRESETS["tiny"], torch.device("cpu"), "", "linear", 1, lambda text: None)
    async with Calibration(settings, ReplayedLoad([Arrival(0.0, 1, 2)] * 2)) as calibration:
        recorder = calibration._apart.recorder
        assert recorder.alone == {recorder.walk[-1]}


def test_the_curve_uses_the_median_of_each_size() -> None:
    curve = Curve([(1, 2.0), (1, 3.0), (1, 4.0), (5, 7.0)])
    assert [curve(rows) for rows in (1, 3, 5, 9)] == [3.0, 5.0, 7.0, 11.0]
    assert Curve([(1, 2.0)])(100) == 2.0


def test_the_curve_never_decreases() -> None:
    curve = Curve([(1, 1.0), (2, 9.0), *[(4, 3.0)] * 3, (8, 7.0)])
    assert [curve(rows) for rows in (1, 2, 4, 8)] == [1.0, 4.5, 4.5, 7.0]
