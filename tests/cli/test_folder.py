"""The output folder of a run: nothing of an earlier run is lost, and a run goes on from its checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from peft import LoraConfig
from safetensors.torch import save_file

from symbiosis.cli.folder import OPTIONS_FILE, check_same, checkpoint_in, owned
from symbiosis.errors import UsageError
from tests.cli.runs import log_of, options
from tests.helpers import command
from tests.service import Service


def test_an_earlier_run_is_not_overwritten(service: Service, data: Path, tmp_path: Path) -> None:
    made = tmp_path / "a"
    assert command(*options(service, data, made, "--steps", 1)).exit_code == 0
    weights = (made / "adapter_model.safetensors").read_bytes()
    done = command(*options(service, data, made, "--steps", 2))
    assert done.exit_code == 1
    assert "the run would replace checkpoint-1, adapter_config.json" in " ".join(done.stderr.split())
    done = command(*options(service, data, made, "--steps", 2, "--resume", "--batch", 2, "--lora", "r=3"))
    assert done.exit_code == 1
    text = " ".join(done.stderr.split())
    assert "batch was 4 and is 2" in text
    assert "r of peft was 8 and is 3" in text
    assert "task_type" not in text
    assert (made / "adapter_model.safetensors").read_bytes() == weights
    assert command(*options(service, data, made, "--steps", 2, "--overwrite")).exit_code == 0
    assert (made / "adapter_model.safetensors").read_bytes() != weights
    assert not (made / "checkpoint-1").exists()


def test_a_run_of_another_version_of_peft_goes_on(tmp_path: Path) -> None:
    config = LoraConfig(r=8)
    before = {**config.to_dict(), "peft_version": "0.1", "removed": True}
    del before["use_dora"], before["rank_pattern"]
    (tmp_path / OPTIONS_FILE).write_text(json.dumps({"peft": before, "batch": 4}, default=sorted), encoding="utf-8")
    check_same(tmp_path, {"peft": config.to_dict(), "batch": 4}, config)
    config = LoraConfig(r=8, use_dora=True)
    with pytest.raises(UsageError, match=r"the run \(use_dora of peft was False and is True\)"):
        check_same(tmp_path, {"peft": config.to_dict(), "batch": 4}, config)


class NoLoginError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (NoLoginError("log in first"), "error: --log-to, or --lora"),
        (NotADirectoryError(20, "Not a directory", "a/runs"), "error: a/runs: the first step failed"),
    ],
)
def test_a_run_without_a_step_leaves_nothing(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, complaint: str
) -> None:
    """As where a logger wants a login: the same command works afterwards."""

    def fail(*_arguments: Any, **_others: Any) -> None:
        raise error

    made = tmp_path / "a"
    with monkeypatch.context() as patched:
        patched.setattr("symbiosis.cli.training._Watch.on_train_begin", fail)
        done = command(*options(service, data, made, "--steps", 1))
    assert done.exit_code == 1
    assert complaint in done.stderr
    assert f"the first step failed ({type(error).__name__}: {error})" in " ".join(done.stderr.split())
    assert not made.exists()
    assert command(*options(service, data, made, "--steps", 1)).exit_code == 0


def test_files_of_another_origin_are_not_lost(service: Service, data: Path, tmp_path: Path) -> None:
    made = tmp_path / "a"
    (made / "adapter_v1").mkdir(parents=True)
    (made / "adapter_v1" / "notes").write_text("mine", encoding="utf-8")
    (made / "checkpoint-5.bak").mkdir()
    (made / "checkpoint-best").mkdir()
    (made / "README.md").write_text("mine", encoding="utf-8")
    done = command(*options(service, data, made, "--steps", 1))
    assert done.exit_code == 1
    assert "the run would replace README.md; choose another folder" in " ".join(done.stderr.split())
    assert (made / "README.md").read_text(encoding="utf-8") == "mine"
    assert command(*options(service, data, made, "--steps", 6, "--every", 1, "--overwrite")).exit_code == 0
    assert (made / "adapter_v1" / "notes").read_text(encoding="utf-8") == "mine", "no run has made this folder"
    found = sorted(one.name for one in made.glob("checkpoint-*"))
    assert found == ["checkpoint-5", "checkpoint-5.bak", "checkpoint-6", "checkpoint-best"]


def test_a_link_with_the_name_of_a_checkpoint_is_not_written_through(
    service: Service, data: Path, tmp_path: Path
) -> None:
    made, other = tmp_path / "a", tmp_path / "other"
    made.mkdir()
    other.mkdir()
    (made / "checkpoint-1").symlink_to(other)
    given = options(service, data, made, "--steps", 2, "--every", 1)
    done = command(*given)
    assert done.exit_code == 1
    assert "the run would replace checkpoint-1" in " ".join(done.stderr.split())
    assert command(*given, "--overwrite").exit_code == 0
    assert not list(other.iterdir())


def test_a_lock_that_is_a_folder(service: Service, data: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / ".lock").mkdir(parents=True)
    done = command(*options(service, data, tmp_path / "a", "--steps", 1))
    assert done.exit_code == 1
    assert ".lock in it cannot be locked (Is a directory)" in " ".join(done.stderr.split())


@pytest.mark.parametrize("killed", ["while it moves", "after it has moved"])
def test_a_run_that_is_killed_as_it_begins_loses_no_earlier_one(
    killed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next run in the folder finds the adapter and the checkpoint of the earlier one, and says so."""
    for name in ("checkpoint-3", "checkpoint-best"):  # the second one is a copy, and stays where it is
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    aside = tmp_path / (".replaced" if killed == "after it has moved" else ".moving")
    aside.mkdir()
    (tmp_path / "adapter_config.json").rename(aside / "adapter_config.json")
    if killed == "after it has moved":
        (tmp_path / "checkpoint-3").rename(aside / "checkpoint-3")
        (tmp_path / "finetune.json").write_text("of the killed run")
    with owned(tmp_path):
        assert sorted(each for each in tmp_path.rglob("*") if each.name != ".lock") == before
    assert (tmp_path / "adapter_config.json").read_text() == "mine"
    assert "killed before it saved anything; what it was to replace is back" in capsys.readouterr().err


def test_results_replace_no_other_file(service: Service, data: Path, tmp_path: Path) -> None:
    told = tmp_path / "notes.json"
    told.write_text("mine", encoding="utf-8")
    given = options(service, data, tmp_path / "a", "--steps", 1, "--json", told)
    done = command(*given)
    assert done.exit_code == 1
    assert f"--json {told}: the file exists" in " ".join(done.stderr.split())
    assert told.read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "a").exists()
    assert command(*given, "--overwrite").exit_code == 0
    assert json.loads(told.read_text(encoding="utf-8"))["steps"] == 1


def test_a_refused_run_leaves_no_folder(service: Service, data: Path, tmp_path: Path) -> None:
    """A folder that was there before stays, though it is empty."""
    made = tmp_path / "new" / "a"
    for wrong in (["--lora", "r=0"], ["--schedule", "none"], ["--resume"]):
        assert command(*options(service, data, made, "--steps", 1), *wrong).exit_code == 1
        assert not made.parent.exists()
    made.mkdir(parents=True)
    assert command(*options(service, data, made, "--steps", 1, "--resume")).exit_code == 1
    assert made.exists()


def test_what_is_read_is_not_written(service: Service, data: Path, tmp_path: Path) -> None:
    before = data.read_bytes()
    done = command(*options(service, data, tmp_path / "a", "--json", data))
    assert done.exit_code == 1
    assert "this file is read; choose another one for the results" in " ".join(done.stderr.split())
    done = command(*options(service, data, tmp_path / "a", "--json", tmp_path / "a" / "finetune.json"))
    assert done.exit_code == 1
    assert "the run writes finetune.json itself" in " ".join(done.stderr.split())
    done = command(*options(service, data, tmp_path / "a", "--json", tmp_path / "a" / "checkpoint-1" / "a.json"))
    assert done.exit_code == 1
    assert "the run writes its checkpoints there" in " ".join(done.stderr.split())
    assert not (tmp_path / "a").exists()
    own = data.rename(tmp_path / "log.jsonl")
    done = command(*options(service, own, tmp_path, "--overwrite"))
    assert done.exit_code == 1
    assert "log.jsonl, which it reads; choose another folder" in " ".join(done.stderr.split())
    assert own.read_bytes() == before


def test_a_run_is_continued_or_begun_again(service: Service, data: Path, tmp_path: Path) -> None:
    done = command(*options(service, data, tmp_path / "a", "--resume", "--overwrite"))
    assert done.exit_code == 1
    assert "--resume continues a run and --overwrite begins one again" in done.stderr


def test_an_earlier_run_stays_until_the_new_one_can_begin(service: Service, data: Path, tmp_path: Path) -> None:
    made = tmp_path / "a"
    assert command(*options(service, data, made, "--steps", 1)).exit_code == 0
    before = {file.name: file.read_bytes() for file in made.iterdir() if file.is_file()}
    for wrong in (("--schedule", "none"), ("--validation", 0.001)):
        done = command(*options(service, data, made, "--steps", 2, "--overwrite", *wrong))
        assert done.exit_code == 1, done.output
    unreachable = options(service, data, made, "--overwrite", "--retry", 0)
    unreachable[1] = f"shm://{tmp_path}/none.sock"
    assert command(*unreachable).exit_code == 1
    assert {file.name: file.read_bytes() for file in made.iterdir() if file.is_file()} == before


def test_a_run_that_has_ended_is_not_trained_again(service: Service, data: Path, tmp_path: Path) -> None:
    made, told = tmp_path / "a", tmp_path / "a.json"
    assert command(*options(service, data, made, "--steps", 3)).exit_code == 0
    weights = (made / "adapter_model.safetensors").read_bytes()
    done = command(*options(service, data, made, "--steps", 3, "--resume", "--json", told))
    assert done.exit_code == 0, done.stderr
    assert "the run had ended after step 3" in done.stderr
    assert (made / "adapter_model.safetensors").read_bytes() == weights
    assert json.loads(told.read_text(encoding="utf-8"))["steps"] == 3
    done = command(*options(service, data, made, "--steps", 5, "--resume"))  # more steps than it had
    assert done.exit_code == 0, done.stderr
    assert "the run was to have 3 steps and now has 5" in " ".join(done.stderr.split())
    assert len([entry for entry in log_of(made) if "loss" in entry]) == 5


def test_resume_wants_the_same_examples_and_the_same_model(service: Service, data: Path, tmp_path: Path) -> None:
    made, copy = tmp_path / "a", tmp_path / "copy.jsonl"
    copy.write_bytes(data.read_bytes())
    assert command(*options(service, data, made, "--steps", 2)).exit_code == 0
    assert command(*options(service, copy, made, "--steps", 3, "--resume")).exit_code == 0
    copy.write_bytes(b"".join(data.read_bytes().splitlines(keepends=True)[:-1]))
    done = command(*options(service, copy, made, "--steps", 4, "--resume"))
    assert done.exit_code == 1
    assert "the examples are not those of the run" in done.stderr
    done = command(*options(service, data, made, "--steps", 4, "--resume", "--validation", copy))
    assert done.exit_code == 1
    assert "the validation data are not those of the run" in " ".join(done.stderr.split())
    kept = json.loads((made / "finetune.json").read_text(encoding="utf-8"))
    (made / "finetune.json").write_text(json.dumps({**kept, "model": "another"}), encoding="utf-8")
    done = command(*options(service, data, made, "--steps", 4, "--resume"))
    assert done.exit_code == 1
    assert "the weights of the model at this address are not those of the run" in " ".join(done.stderr.split())


def test_a_damaged_checkpoint_is_passed_over(service: Service, data: Path, tmp_path: Path) -> None:
    made, whole = tmp_path / "a", tmp_path / "whole"
    more = "--schedule", "constant", "--every", 2
    assert command(*options(service, data, whole, "--steps", 6, *more)).exit_code == 0
    assert command(*options(service, data, made, "--steps", 4, *more)).exit_code == 0
    state = made / "checkpoint-4" / "trainer_state.json"
    state.write_bytes(state.read_bytes()[:300])
    done = command(*options(service, data, made, "--steps", 6, *more, "--resume"))
    assert done.exit_code == 0, done.stderr
    assert "checkpoint-4 is damaged and is passed over" in done.stderr
    losses = [[entry["loss"] for entry in log_of(folder) if "loss" in entry] for folder in (whole, made)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[1]) == 6


@pytest.mark.parametrize(
    ("file", "left"),
    [
        ("optimizer.pt", 100),
        pytest.param("adapter_model.safetensors", 100, marks=pytest.mark.thorough),
        pytest.param("optimizer.pt", 0, marks=pytest.mark.thorough),
        ("rng_state.pth", 0),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_passed_over(
    service: Service, data: Path, tmp_path: Path, file: str, left: int
) -> None:
    """Some bytes of a file are left, or the file is missing."""
    made = tmp_path / "a"
    assert command(*options(service, data, made, "--steps", 4, "--every", 2)).exit_code == 0
    if left:
        os.truncate(made / "checkpoint-4" / file, left)
    else:
        (made / "checkpoint-4" / file).unlink()
    done = command(*options(service, data, made, "--steps", 5, "--every", 2, "--resume"))
    assert done.exit_code == 0, done.stderr
    assert "checkpoint-4 is damaged and is passed over" in " ".join(done.stderr.split())
    assert len([entry for entry in log_of(made) if "loss" in entry]) == 5


ADALORA = '{"peft_type": "ADALORA", "total_step": 9, "tinit": 1, "tfinal": 1}'


@pytest.mark.parametrize(("lost", "resumes"), [("lora", True), ("adalora", False), ("no whole checkpoint", False)])
def test_the_lost_run_of_a_job_goes_on_or_begins_again(
    service: Service, data: Path, tmp_path: Path, lost: str, resumes: bool
) -> None:
    """The command is the same one. Without the job's id, it is refused because of its own run."""
    made, peft, told = tmp_path / "a", tmp_path / "peft.json", tmp_path / "a.json"
    peft.write_text(ADALORA, encoding="utf-8")
    method = ["--peft", peft] if lost == "adalora" else []
    alone = options(service, data, made, "--steps", 3, "--every", 2, *method)
    given = [*alone, "--json", told]
    assert command(*given, "--job", "one").exit_code == 0
    (made / "checkpoint-2" / "mark").touch()
    for refused, why in ((given, "the file exists"), (alone, "the run would replace")):
        for job in ([], ["--job", "another"]):
            done = command(*refused, *job)
            assert done.exit_code == 1
            assert why in " ".join(done.stderr.split())
    shutil.rmtree(made / "checkpoint-3")
    if lost == "no whole checkpoint":
        (made / "checkpoint-2" / "rng_state.pth").unlink()
    done = command(*given, "--job", "one")
    assert done.exit_code == 0, done.stderr
    assert [entry["step"] for entry in log_of(made) if "loss" in entry] == [1, 2, 3]
    assert (made / "checkpoint-2" / "mark").exists() == resumes


def test_a_job_that_overwrites_does_not_resume_the_run_of_another_job(
    service: Service, data: Path, tmp_path: Path
) -> None:
    given = options(service, data, tmp_path / "a", "--steps", 2, "--overwrite")
    for job in ("one", "another"):
        assert command(*given, "--job", job).exit_code == 0
        assert not (tmp_path / "a" / "checkpoint-2" / "mark").exists()
        (tmp_path / "a" / "checkpoint-2" / "mark").touch()


def test_a_job_waits_for_the_lock_of_its_lost_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of NFS keeps the lock of a host that is lost until its lease ends."""
    monkeypatch.setattr("symbiosis.cli.folder.LEASE_S", 20.0)
    lock = FileLock(tmp_path / ".lock", thread_local=False)
    lock.acquire()
    ends = threading.Timer(0.2, lock.release)
    ends.start()
    with pytest.raises(UsageError, match="another run writes to it"), owned(tmp_path):
        pass
    with owned(tmp_path, "job"):
        assert not lock.is_locked
    ends.join()


def test_a_checkpoint_that_may_not_be_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run of another user would be continued from an earlier checkpoint."""
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}", encoding="utf-8")
    save_file({}, checkpoint / "adapter_model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, checkpoint / name)
    assert checkpoint_in(tmp_path) == checkpoint
    opened = Path.open

    def refused(file: Path, *arguments: Any, **options: Any) -> Any:
        if file.name == "optimizer.pt":
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(PermissionError):
        checkpoint_in(tmp_path)


@pytest.mark.parametrize(
    "peft", [{"peft_type": "POLY", "r": 4}, {"peft_type": "LORA", "trainable_token_indices": [100_000]}]
)
def test_an_earlier_run_is_there_again_if_the_new_one_cannot_train(
    service: Service, data: Path, tmp_path: Path, peft: dict[str, Any]
) -> None:
    made, file = tmp_path / "a", tmp_path / "peft.json"
    file.write_text(json.dumps(peft), encoding="utf-8")
    assert command(*options(service, data, made, "--steps", 1)).exit_code == 0
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    done = command(*options(service, data, made, "--steps", 1, "--overwrite", "--peft", file))
    assert done.exit_code == 1
    assert f"error: --peft {file}: " in " ".join(done.stderr.split())
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_two_runs_do_not_share_a_folder(service: Service, data: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with FileLock(tmp_path / "a" / ".lock"):
        done = command(*options(service, data, tmp_path / "a", "--steps", 1))
    assert done.exit_code == 1
    assert "another run writes to it" in done.stderr
