"""How a fine-tuning job goes on after its actor was lost."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra symbiosis-peft[ray]")

from symbiosis.cluster import jobs
from symbiosis.errors import ConnectionLostError


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of each command that an actor has run. All actors were lost before."""
    found: list[list[str]] = []
    context = SimpleNamespace(was_current_actor_reconstructed=True)
    monkeypatch.setattr(jobs, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    follow = SimpleNamespace(start=lambda arguments, cwd: found.append(arguments[1:]), follow=lambda child: (0, ""))
    monkeypatch.setattr(jobs, "child", follow)
    monkeypatch.setattr(jobs, "AWAIT_S", 0.0)
    return found


def job(folder: Path, *arguments: str) -> dict[str, Any]:
    run = {"arguments": [*arguments], "output": "out", "sweep": "--sweep" in arguments, "folder": str(folder)}
    return {**run, "address": "tcp://127.0.0.1:1", "options": {}, "retry": 0.0}


def begin(folder: Path) -> None:
    """Write what a run writes when it begins, a second after an earlier one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "finetune.json"
    written = file.stat().st_mtime if file.exists() else 0.0
    file.write_text("{}")
    os.utime(file, (written + 1, written + 1))


def save(folder: Path) -> None:
    (folder / "checkpoint-50").mkdir()
    (folder / "checkpoint-50" / "trainer_state.json").write_text("{}")


def test_a_lost_run_resumes_or_begins_again(ran: list[list[str]], tmp_path: Path) -> None:
    lost, output = job(tmp_path, "--every", "50"), tmp_path / "out"
    earlier = jobs.begun(lost)
    jobs.FineTuning().run(lost, earlier)
    begin(output)
    jobs.FineTuning().run(lost, earlier)
    save(output)
    jobs.FineTuning().run(lost, earlier)
    assert ran == [["--every", "50"], ["--every", "50", "--overwrite"], ["--every", "50", "--resume"]]


def test_an_earlier_run_is_not_resumed_in_place_of_the_lost_one(ran: list[list[str]], tmp_path: Path) -> None:
    """``--overwrite`` replaces the earlier run once the new one begins. Without it, the new run is still refused."""
    output = tmp_path / "out"
    begin(output)
    save(output)
    for given in ("--overwrite", "--seed=1"):
        lost = job(tmp_path, given)
        jobs.FineTuning().run(lost, jobs.begun(lost))
        assert ran.pop() == [given]
    lost = job(tmp_path, "--overwrite")
    earlier = jobs.begun(lost)
    (output / "checkpoint-50").rename(tmp_path / "aside")
    begin(output)
    jobs.FineTuning().run(lost, earlier)
    save(output)
    jobs.FineTuning().run(lost, earlier)
    assert ran == [["--overwrite"], ["--resume"]]


def test_a_lost_sweep_resumes_its_runs(ran: list[list[str]], tmp_path: Path) -> None:
    output, given = tmp_path / "out", ["--sweep", "s.toml"]
    begin(output / "earlier")
    lost = job(tmp_path, *given)
    earlier = jobs.begun(lost)
    jobs.FineTuning().run(lost, earlier)
    (output / "small.log").write_text("loading\n")
    jobs.FineTuning().run(lost, earlier)
    begin(output / "small")
    save(output / "small")
    jobs.FineTuning().run(lost, earlier)
    assert ran == [given, [*given, "--resume"], [*given, "--resume"]]


def test_a_lost_sweep_that_overwrites_resumes_no_earlier_run(ran: list[list[str]], tmp_path: Path) -> None:
    output, given = tmp_path / "out", ["--sweep", "s.toml", "--overwrite"]
    for name in ("small", "large"):
        begin(output / name)
        save(output / name)
    lost = job(tmp_path, *given)
    earlier = jobs.begun(lost)
    for name in ("small", "large"):
        jobs.FineTuning().run(lost, earlier)
        begin(output / name)
    jobs.FineTuning().run(lost, earlier)
    assert ran == [given, given, ["--sweep", "s.toml", "--resume"]]


def test_a_run_that_was_lost_waits_for_executors_that_were_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ConnectionLostError("gone"), {"replicas": {"tcp://a:1": {}, "tcp://b:1": {"error": "gone"}}}, {}])

    def look(address: str) -> SimpleNamespace:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return SimpleNamespace(status=answer)

    monkeypatch.setattr(jobs, "make_transport", lambda address, **options: SimpleNamespace(look=look))
    monkeypatch.setattr(jobs, "LOOK_EVERY_S", 0.0)
    jobs.await_executors("http://head:7070/llama", {}, 20.0)
    assert next(answers, None) is None
    jobs.await_executors("http://head:7070/llama", {}, 0.0)
