"""How ``symbiosis finetune`` ends when a signal comes, or when the executor is lost: what it has done is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.chat_model import save_chat_model
from tests.helpers import command
from tests.service import Service

LONG = 4000
"""Steps of a run that does not end by itself within a test."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    checkpoint = save_chat_model(tmp_path_factory.mktemp("served") / "model")
    with Service(checkpoint, f"shm://{checkpoint.parent}/s.sock") as running:
        yield running


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    pairs = [{"prompt": f"thing {n}", "completion": f"colour {n % 3}"} for n in range(24)]
    file.write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    return file


def options(service: Service, data: Path, output: Path, *more: Any) -> list[str]:
    given = "--lora", "r=4,alpha=8,dropout=0.1", "--learning-rate", "0.01", "--schedule", "constant", "--retry", "1"
    return ["finetune", service.address, "--data", str(data), "--output", str(output), *given, *map(str, more)]


def test_a_loss_that_is_no_number_ends_the_run(service: Service, data: Path, tmp_path: Path) -> None:
    """transformers would show it as 0."""
    results = tmp_path / "results.json"
    done = command(
        *options(service, data, tmp_path / "a", "--epochs", 1000, "--json", results), "--learning-rate", "1e38"
    )
    assert done.exit_code == 1
    assert "is nan, so the run ends without an adapter; lower --learning-rate" in " ".join(done.output.split())
    found = json.loads(results.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(name))
    assert found["losses"] == losses_in(tmp_path / "a")
    assert len(found["losses"]) == found["steps"] - 1 < 20
    assert "is nan" in found["error"]
    assert not (tmp_path / "a" / "adapter_config.json").exists()


def losses_in(folder: Path) -> list[float]:
    """Return the losses of the steps that a run has logged so far."""
    file = folder / "log.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [json.loads(line)["loss"] for line in lines if '"loss"' in line]


def wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def after_steps(folder: Path, act: Callable[[], object]) -> threading.Thread:
    """Start a thread that does something when the run in a folder has done some steps."""

    def watch() -> None:
        wait(lambda: len(losses_in(folder)) >= 5)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own, which SIGHUP would end."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "symbiosis.cli.main", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def test_a_run_whose_executor_is_lost_can_be_resumed(service: Service, data: Path, tmp_path: Path) -> None:
    made, told = tmp_path / "a", tmp_path / "a.json"
    thread = after_steps(made, service.kill)
    done = command(*options(service, data, made, "--steps", LONG, "--json", told))
    thread.join()
    service.start()
    assert done.exit_code == 1
    result = json.loads(told.read_text(encoding="utf-8"))
    steps = result["steps"]
    assert len(result["losses"]) == steps >= 5
    assert "did not come back within 1 s" in result["error"]
    assert f"checkpoint in {made}/checkpoint-{steps}; the same command with --resume continues" in done.stderr
    assert (made / "adapter_model.safetensors").is_file()
    done = command(*options(service, data, made, "--steps", steps + 3, "--resume"))
    assert done.exit_code == 0, done.stderr
    assert command(*options(service, data, tmp_path / "whole", "--steps", steps + 3)).exit_code == 0
    assert losses_in(made) == pytest.approx(losses_in(tmp_path / "whole"), rel=1e-5)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="the system has no SIGHUP")
def test_sighup_saves_a_checkpoint(service: Service, data: Path, tmp_path: Path) -> None:
    made, told = tmp_path / "a", tmp_path / "a.json"
    process = start(*options(service, data, made, "--steps", LONG, "--json", told))
    wait(lambda: len(losses_in(made)) >= 3 or process.poll() is not None)
    process.send_signal(signal.SIGHUP)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGHUP, text
    steps = json.loads(told.read_text(encoding="utf-8"))["steps"]
    assert (made / f"checkpoint-{steps}" / "trainer_state.json").is_file()


def test_a_sweep_that_is_stopped_keeps_what_its_runs_have_done(service: Service, data: Path, tmp_path: Path) -> None:
    made, told, file = tmp_path / "made", tmp_path / "told.json", tmp_path / "sweep.toml"
    file.write_text(f"[short]\nsteps = 2\n[long]\nsteps = {LONG}\n", encoding="utf-8")
    process = start(*options(service, data, made, "--sweep", file, "--json", told))
    wait(lambda: (made / "short" / "results.json").exists() or process.poll() is not None)
    wait(lambda: losses_in(made / "long") or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, text
    runs = json.loads(told.read_text(encoding="utf-8"))["runs"]
    assert runs["short"]["steps"] == 2
    assert runs["long"]["stopped"]
    assert (made / "long" / f"checkpoint-{runs['long']['steps']}" / "trainer_state.json").is_file()
    assert "stopped: long; the same command with --resume continues" in text
