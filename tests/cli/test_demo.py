"""``symbiosis demo`` with a tiny model: the complete run, and every way in which it must refuse or fail."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from symbiosis.cli.commands import app
from symbiosis.cli.demo import base_model, jobs
from symbiosis.cli.demo.base_model import cache_folder
from symbiosis.cli.demo.results import BUSY
from symbiosis.errors import UsageError
from symbiosis.terminal.machine import OtherLoad
from symbiosis.testing import tiny_model

TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SMALL = {"STEPS": 3, "NEW_TOKENS": 4}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    for key, value in TINY.items():
        monkeypatch.setitem(base_model.CONFIG, key, value)
    monkeypatch.setattr(base_model, "STEPS", 2)
    for key, value in SMALL.items():
        monkeypatch.setattr(jobs, key, value)


def demo(*arguments: Any) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["demo", *map(str, arguments)])


# ------------------------------------------------------------------------------------------------------- the whole demo


def test_the_whole_demo(tmp_path: Path) -> None:
    results = tmp_path / "results" / "demo.json"
    result = demo("--json", results, "--policy", "lockstep", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for words in ("alice", "rsLoRA", "IA3", "prefix tuning", "all 12 equal", "four tenants at once", "took"):
        assert words in result.stdout
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(results.read_text(encoding="utf-8"))
    assert told["agrees"] is True
    assert told["policy"] == "lockstep"
    assert told["mean_batch"] > 1
    assert told["throughput_ratio"] == pytest.approx(told["seconds"]["plain"] / told["seconds"]["shared"])
    assert told["memory_ratio"] == pytest.approx(told["bytes"]["shared"] / told["bytes"]["plain"])
    assert told["base_bytes"]["plain"] == 4 * base_bytes(cache_folder())
    for tenant in told["tenants"]:
        shared, plain = tenant["shared"], tenant["plain"]
        assert len(shared["losses"]) == len(plain["losses"]) == 3
        assert shared["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert shared["losses"][0] != shared["losses"][-1]
        assert shared["before"] == plain["before"]
        assert shared["after"] == plain["after"]
        assert shared["memory"] == plain["memory"], "a client holds what a plain job holds beside the base model"
        assert tenant["tokens"] > 3 * 2 * 48


def test_a_base_model_that_had_no_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = base_model.base_model(nothing)
    monkeypatch.setattr(base_model, "STEPS", 5)
    result = demo("--json", tmp_path / "demo.json", "--output", tmp_path)
    assert (
        f"trained for 2 of 5 steps only, the most that this machine made in 75 s; to train it anew, delete {folder}"
        in (" ".join(result.output.split()))
    )
    assert json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))["base_steps"] == 2


def test_watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "WATCH_S", 0.2)
    result = demo("--watch", "--policy", "lockstep", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for words in ("policy lockstep", "1 block", "of the requests shared a batch", "all 12 equal"):
        assert words in result.stdout


def base_bytes(folder: Path) -> int:
    from transformers import AutoModelForCausalLM

    (checkpoint,) = (folder / "").glob("demo-*")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}.values())


# -------------------------------------------------------------------------------------------- when results do not agree


def test_a_wrong_loss_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_plain = jobs.run_plain

    def differently(folder: Path, job: Any, report: Any) -> int:
        size = run_plain(folder, job, report)
        if job.name == "bob":
            job.plain.losses[1] *= 1.01
        return size

    monkeypatch.setattr(jobs, "run_plain", differently)
    results = tmp_path / "demo.json"
    result = demo("--json", results, "--output", tmp_path)
    assert result.exit_code == 1
    assert "bob (IA3): losses differ by 9.9e-03" in result.stderr
    assert "alice" not in result.stderr
    assert json.loads(results.read_text(encoding="utf-8"))["agrees"] is False
    assert (tmp_path / "demo.png").exists()


@pytest.mark.parametrize("others", [0.05, 0.4])
def test_a_busy_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: float) -> None:
    monkeypatch.setattr(OtherLoad, "part", lambda self: others)
    result = demo("--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert ("other programs used 40% of the processors" in result.stdout) is (others > BUSY)


def test_a_wrong_text_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_plain = jobs.run_plain

    def differently(folder: Path, job: Any, report: Any) -> int:
        size = run_plain(folder, job, report)
        job.gaps[0] = 2.0 if job.name == "carol" else 1e-6
        return size

    monkeypatch.setattr(jobs, "run_plain", differently)
    result = demo("--output", tmp_path)
    assert result.exit_code == 1
    assert "carol (rsLoRA): 'Return the" in result.stderr
    assert "dave" not in result.stderr, "two tied tokens are not an error"
    assert "11 equal, 1 with tied tokens" in result.stdout


def test_the_gap_is_at_the_first_difference() -> None:
    model = tiny_model().eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[3, 5]])).logits[0, -1]
    assert jobs._gap(model, [3, 5, 7], [3, 5, 7]) == 0
    assert jobs._gap(model, [3, 5, 7, 1], [3, 5, 9, 2]) == pytest.approx(float(logits[9] - logits[7]))
    assert jobs._gap(model, [3, 5], [3, 5, 9]) == math.inf


def test_a_loss_that_is_no_number_is_a_difference() -> None:
    job = jobs.DemoJob("name", "LoRA", lambda: None, "text", 1e-3, [], [], 0)
    job.shared.losses = job.plain.losses = [1.0, math.nan]
    assert job.difference == math.inf


# -------------------------------------------------------------------------------------------------------- wrong options


def test_results_that_cannot_be_written_show_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    for options in (["--output", tmp_path / "file" / "x"], ["--json", tmp_path], ["--json", tmp_path / "file" / "x"]):
        result = demo("--output", tmp_path, *options)
        assert result.exit_code == 1
        assert str(options[1]) in result.stderr
        assert "alice" not in result.output


def test_a_policy_with_a_mistake_shows_before_the_work(tmp_path: Path) -> None:
    result = demo("--output", tmp_path, "--policy", "opportunistic:patience=3")
    assert result.exit_code == 1
    assert "has no option 'patience=3'" in result.stderr
    assert "alice" not in result.output


# ------------------------------------------------------------------------------------------------------------ the cache


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "symbiosis"


def nothing(step: int, steps: int, loss: float) -> None: ...


@pytest.mark.parametrize("fast", [True, False])
def test_the_model_is_trained_once_and_cached(own_cache: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(base_model, "bf16_is_fast", lambda: fast)

    seen: list[tuple[int, int]] = []
    folder = base_model.base_model(lambda step, steps, loss: seen.append((step, steps)))
    assert seen == [(1, 2), (2, 2)]
    assert folder.parent == own_cache
    seen.clear()
    assert base_model.base_model(lambda step, steps, loss: seen.append((step, steps))) == folder
    assert not seen
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("The “with” statement")["input_ids"]) == "The “with” statement"
    assert AutoModelForCausalLM.from_pretrained(folder).config.eos_token_id == tokenizer.eos_token_id == 0
    assert list(own_cache.iterdir()) == [folder]


def test_a_half_written_model_is_never_used(own_cache: Path) -> None:
    def interrupt(step: int, steps: int, loss: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        base_model.base_model(interrupt)
    assert list(own_cache.iterdir()) == []
    assert base_model.base_model(nothing).is_dir()


def test_two_processes_may_train_at_the_same_time(own_cache: Path) -> None:
    def other_process(step: int, steps: int, loss: float) -> None:
        if step == 2:
            made.append(base_model.base_model(nothing))

    made: list[Path] = []
    assert base_model.base_model(other_process) == made[0]
    assert list(own_cache.iterdir()) == made


def test_training_ends_early_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "LIMIT_S", 1e-9)
    seen: list[int] = []
    batches = [{"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}] * 3
    assert base_model.fit(tiny_model(), batches, lambda step, steps, loss: seen.append(step), False) == 0
    assert not seen


def test_a_cache_that_cannot_be_written(own_cache: Path) -> None:
    own_cache.parent.write_text("in the way", encoding="utf-8")
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME"):
        base_model.base_model(nothing)


def test_relative_cache_homes_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_folder() == Path.home() / ".cache" / "symbiosis"


# --------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.thorough
def test_ctrl_c_while_tenants_work(tmp_path: Path) -> None:
    """Ctrl-C ends the command with exit status 130 and without a traceback, at any moment."""
    code = f"""
from symbiosis.cli.demo import base_model, jobs
base_model.CONFIG.update({TINY!r})
base_model.STEPS, jobs.STEPS, jobs.NEW_TOKENS = 2, 3000, 4
from symbiosis.__main__ import main
main()
"""
    command = [sys.executable, "-c", code, "demo", "--output", str(tmp_path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
    )
    assert process.stdout is not None
    try:
        deadline = time.monotonic() + 90
        while "four tenants at once" not in process.stdout.readline():
            assert time.monotonic() < deadline
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # makes the process print the stacks of its threads
            pytest.fail(f"the command goes on after Ctrl-C: {process.communicate()[1][-8000:]}")
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
