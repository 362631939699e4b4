"""How ``symbiosis finetune`` ends when a signal comes, or when the executor is lost: what it has done is kept."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from symbiosis.cli import finetune, training
from symbiosis.cli.folder import checkpoints, damage_of
from symbiosis.errors import ConnectionLostError
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
    assert "is nan, so the run ends; lower --learning-rate" in " ".join(done.output.split())
    found = json.loads(results.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(name))
    assert found["losses"] == losses_in(tmp_path / "a")
    assert len(found["losses"]) == found["steps"] - 1 < 20
    assert "is nan" in found["error"]
    assert not (tmp_path / "a" / "adapter_config.json").exists()


def test_a_gradient_that_is_no_number_ends_the_run_before_its_checkpoint(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the step is still one; the adapter would not be."""
    step = training._Trainer.training_step

    def overflows(self: Any, model: Any, *others: Any) -> Any:
        loss = step(self, model, *others)
        if self.state.global_step == 3:
            next(p.grad for p in model.parameters() if p.grad is not None).fill_(math.inf)
        return loss

    monkeypatch.setattr(training._Trainer, "training_step", overflows)
    done = command(*options(service, data, tmp_path / "a", "--steps", 4, "--every", 2))
    assert done.exit_code == 1
    assert "the norm of the gradient of step 4 is inf, so the run ends" in " ".join(done.output.split())
    assert sorted(folder.name for folder in (tmp_path / "a").glob("checkpoint-*")) == ["checkpoint-2"]


def test_a_signal_in_the_last_step_stops_nothing(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training._Trainer.training_step

    def signalled(self: Any, *arguments: Any) -> Any:
        if self.state.global_step == 1:
            next(one for one in self.callback_handler.callbacks if isinstance(one, training._Watch)).signal = 15
        return step(self, *arguments)

    monkeypatch.setattr(training._Trainer, "training_step", signalled)
    done = command(*options(service, data, tmp_path / "a", "--steps", 2, "--json", tmp_path / "results.json"))
    assert done.exit_code == 0, done.output
    assert "stopped" not in done.output
    assert not json.loads((tmp_path / "results.json").read_text())["stopped"]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_run_that_ends_in_any_error_is_not_told_as_whole(error: BaseException, tmp_path: Path) -> None:
    class Ends:
        def stoppable(self) -> Any:
            return contextlib.nullcontext()

        def train(self) -> int:
            raise error

        def results(self) -> dict[str, Any]:
            return {"losses": [1.0, math.nan], "stopped": False}

    with pytest.raises(type(error)):
        finetune._train(Ends(), tmp_path / "results.json", {"adapter": "a"})
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["error"] == (str(error) or "KeyboardInterrupt")
    assert found["losses"] == [1.0, None]
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--schedule", "cosine_with_min_lr"), "--schedule cosine_with_min_lr: One of min_lr"),
        (("--schedule", "warmup_stable_decay"), "--schedule warmup_stable_decay: "),
        (("--learning-rate", "inf"), "--learning-rate is inf; give a finite number"),
        (("--epochs", "inf"), "--epochs is inf; give a finite number"),
    ],
)
def test_what_is_refused_costs_no_earlier_run(
    given: tuple[str, ...], reason: str, service: Service, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    done = command(*options(service, data, tmp_path / "a", "--steps", 2, "--overwrite"), *given)
    assert done.exit_code == 1
    assert reason in " ".join(done.output.split())
    assert (tmp_path / "a" / "adapter_config.json").exists()


@pytest.mark.parametrize("saved", [1, 0])
def test_a_full_disk_ends_a_run_that_can_go_on(
    saved: int, service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = training._Trainer._save_checkpoint

    def fill(trainer: Any, *given: Any, **named: Any) -> None:
        if trainer.state.global_step <= saved:
            save(trainer, *given, **named)
            return
        (tmp_path / "a" / f"checkpoint-{trainer.state.global_step}").mkdir()
        (tmp_path / "a" / f"checkpoint-{trainer.state.global_step}" / "trainer_state.json").touch()  # and no content
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 8, 8))
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    given = options(service, data, tmp_path / "a", "--steps", 3, "--every", 1)
    with monkeypatch.context() as patch:
        patch.setattr(training._Trainer, "_save_checkpoint", fill)
        done = command(*given)
    assert done.exit_code == 1
    again = "--resume continues from the last checkpoint" if saved else "nothing was saved"
    told = " ".join(done.output.split())
    assert f"training ended after step {saved + 1} (the disk is full; RuntimeError: [enforce fail" in told
    assert told.endswith(again)
    done = command(*given, "--resume")
    if not saved:
        assert "no whole checkpoint in" in done.output
        done = command(*given, "--overwrite")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("saved", [True, False])
def test_a_folder_that_is_deleted_ends_a_run(
    saved: bool, service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in which it was made, and which is now empty, is deleted as after other runs."""
    output = tmp_path / "new" / "a"

    def delete(*_: Any) -> None:
        shutil.rmtree(output)

    monkeypatch.setattr(training._Trainer, "_save_checkpoint" if saved else "training_step", delete)
    done = command(*options(service, data, output, "--steps", 3, "--every", 1))
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), done.exception
    told = " ".join(done.output.split())
    assert ("training ended after step 2 (FileNotFoundError:" if saved else "the first step failed (") in told
    assert not saved or told.endswith("nothing was saved")
    assert not (tmp_path / "new").exists()


def test_checkpoints_without_an_encoder_are_refused(service: Service, data: Path, tmp_path: Path) -> None:
    peft = tmp_path / "peft.json"
    peft.write_text(json.dumps({"peft_type": "P_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4}))
    given = ["finetune", service.address, "--data", str(data), "--output", str(tmp_path / "a"), "--peft", str(peft)]
    done = command(*given, "--steps", "2", "--validation", "0.2")
    assert done.exit_code == 1
    assert "PEFT's checkpoints of this method lack its encoder" in " ".join(done.output.split())
    assert command(*given, "--steps", "2").exit_code == 0


def test_checkpoints_without_all_logits_are_not_resumed(service: Service, data: Path, tmp_path: Path) -> None:
    peft = tmp_path / "peft.json"
    vb_lora = {"peft_type": "VBLORA", "r": 4, "num_vectors": 8, "vector_length": 8, "save_only_topk_weights": True}
    peft.write_text(json.dumps({**vb_lora, "target_modules": ["q_proj"]}))
    given = ["finetune", service.address, "--data", str(data), "--output", str(tmp_path / "a"), "--peft", str(peft)]
    done = command(*given, "--steps", "2", "--validation", "0.2")
    assert done.exit_code == 0, done.output
    done = command(*given, "--steps", "4", "--resume")
    assert done.exit_code == 1
    assert "lack all logits but the largest (save_only_topk_weights)" in " ".join(done.output.split())


def test_a_run_that_stopped_early_has_ended(service: Service, data: Path, tmp_path: Path) -> None:
    """An earlier adapter is replaced by that of the best checkpoint; the files of a killed save are removed."""
    given = options(service, data, tmp_path / "a", "--steps", 40, "--validation", 0.2, "--every", 1, "--patience", 1)
    done = command(*given, "--learning-rate", "1")
    assert done.exit_code == 0, done.output
    before, adapter = losses_in(tmp_path / "a"), tmp_path / "a" / "adapter_model.safetensors"
    assert len(before) < 40
    assert f"in {len(before)} steps of 40, ended by --patience 1" in " ".join(done.stderr.split())
    content = adapter.read_bytes()
    adapter.write_bytes(b"of an earlier stop")
    (tmp_path / "a" / ".partial-x").mkdir()
    done = command(*given, "--learning-rate", "1", "--resume")
    assert done.exit_code == 0, done.output
    assert f"the run had ended after step {len(before)} of 40, ended by --patience 1" in " ".join(done.output.split())
    assert losses_in(tmp_path / "a") == before
    assert adapter.read_bytes() == content
    assert not (tmp_path / "a" / ".partial-x").exists()


def test_a_resumed_run_saves_as_often_as_it_is_told(service: Service, data: Path, tmp_path: Path) -> None:
    """A copy of a checkpoint with another name is no obstacle, and stays."""
    given = options(service, data, tmp_path / "a")
    assert command(*given, "--steps", "4", "--every", "4").exit_code == 0
    shutil.copytree(tmp_path / "a" / "checkpoint-4", tmp_path / "a" / "checkpoint-4-copy")
    done = command(*given, "--steps", "8", "--every", "1", "--resume")
    assert done.exit_code == 0, done.output
    names = sorted(one.name for one in (tmp_path / "a").glob("checkpoint-*"))
    assert names == ["checkpoint-4-copy", "checkpoint-7", "checkpoint-8"], "the last two are kept, and the copy"
    lines = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    assert all(line["max_steps"] == 8 for line in lines)


def test_what_is_cut_of_validation_data_is_told(service: Service, data: Path, tmp_path: Path) -> None:
    given = options(service, data, tmp_path / "a", "--steps", 1, "--validation", data, "--sequence", 8)
    done = command(*given)
    assert done.exit_code == 0, done.output
    assert "24 of validation longer than --sequence and cut" in " ".join(done.output.split())


@pytest.mark.parametrize("name", ["prompts.csv", "prompts.JSON", "prompts.parquet"])
def test_prompts_of_another_kind_are_refused(name: str, service: Service, tmp_path: Path) -> None:
    (tmp_path / name).write_text("prompt\nred\n")
    done = command("generate", service.address, "--prompts", str(tmp_path / name))
    assert done.exit_code == 1
    assert "--prompts takes lines of text, or a .jsonl file" in " ".join(done.output.split())


def losses_in(folder: Path) -> list[float]:
    """Return the losses of the steps that a run has logged so far."""
    file = folder / "log.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines if '"loss"' in line]


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


def start(*arguments: str, stdout: int | None = None, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start the command in a process of its own, which SIGHUP would end, even if pytest runs under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "symbiosis", *arguments],
            stdout=stdout,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGHUP, before)


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


def test_an_evaluation_that_an_executor_did_not_answer_is_made_again(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last step, where a checkpoint without it would be taken for the end of the run."""
    given, made = (
        options(service, data, tmp_path / "a", "--steps", 4, "--validation", 0.2, "--every", 2),
        tmp_path / "a",
    )
    evaluate = training._Trainer.evaluate

    def lost(self: Any, *arguments: Any, **others: Any) -> Any:
        if self.state.global_step == 4:
            raise ConnectionLostError("the executor did not come back")
        return evaluate(self, *arguments, **others)

    with monkeypatch.context() as patched:
        patched.setattr(training._Trainer, "evaluate", lost)
        done = command(*given)
    assert done.exit_code == 1
    saved = f"adapter in {made}; --resume continues from the last checkpoint"
    assert f"while step 4 was evaluated; {saved}" in done.output
    assert load_file(made / "adapter_model.safetensors")
    assert [one.name for one in made.glob("checkpoint-*")] == ["checkpoint-2"]
    told = [tmp_path / "told.json", tmp_path / "whole.json"]
    assert command(*given, "--resume", "--json", str(told[0])).exit_code == 0
    whole = options(service, data, tmp_path / "b", "--steps", 4, "--validation", 0.2, "--every", 2, "--json", told[1])
    assert command(*whole).exit_code == 0
    resumed, undisturbed = (json.loads(file.read_text(encoding="utf-8")) for file in told)
    assert resumed["losses"] == pytest.approx(undisturbed["losses"], rel=1e-5)
    assert [one["step"] for one in resumed["validation"]] == [2, 4]
    assert resumed["best_step"] == undisturbed["best_step"]


def test_a_run_without_its_first_evaluation_goes_on_with_the_same_losses(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation draws a random number, on which the dropout of the next steps depends."""
    given = "--steps", 5, "--validation", 0.2, "--every", 2

    def lost(*_: object, **__: object) -> None:
        raise ConnectionLostError("the executor did not come back")

    with monkeypatch.context() as patched:
        patched.setattr(training._Trainer, "prediction_step", lost)
        done = command(*options(service, data, tmp_path / "a", *given))
    assert done.exit_code == 1
    assert "ended in an error after step 2, without its validation; adapter in" in done.output
    assert command(*options(service, data, tmp_path / "a", *given, "--resume")).exit_code == 0
    assert command(*options(service, data, tmp_path / "b", *given)).exit_code == 0
    assert losses_in(tmp_path / "a") == losses_in(tmp_path / "b")
    saved = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in "ab"]
    assert saved[0] == saved[1]


def test_the_last_evaluation_of_a_run_is_made_up(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = "--steps", 2, "--validation", 0.2, "--json"

    def lost(*_: object, **__: object) -> None:
        raise ConnectionLostError("the executor did not come back")

    with monkeypatch.context() as patched:
        patched.setattr(training._Trainer, "prediction_step", lost)
        done = command(*options(service, data, tmp_path / "a", *given, tmp_path / "a.json"))
    assert "ended in an error after step 2, without its validation" in done.output
    done = command(*options(service, data, tmp_path / "a", *given, tmp_path / "a.json", "--resume"))
    assert done.exit_code == 0, done.output
    assert "the run had ended after step 2" in done.output
    assert command(*options(service, data, tmp_path / "b", *given, tmp_path / "b.json")).exit_code == 0
    made, whole = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert [made[name] for name in ("validation", "best_step")] == [whole[name] for name in ("validation", "best_step")]
    assert made["best_step"] == 2
    monkeypatch.setattr(training._Trainer, "prediction_step", lost)  # it is not made again
    assert command(*options(service, data, tmp_path / "a", *given, tmp_path / "a.json", "--resume")).exit_code == 0
    assert json.loads((tmp_path / "a.json").read_text()) == made


def lose_after(patched: pytest.MonkeyPatch, steps: int) -> None:
    """Let the executor be lost after so many steps."""
    step = training._Trainer.training_step

    def lost(self: Any, *arguments: Any, **others: Any) -> Any:
        if self.state.global_step == steps:
            raise ConnectionLostError("the executor did not come back")
        return step(self, *arguments, **others)

    patched.setattr(training._Trainer, "training_step", lost)


def test_a_damaged_checkpoint_of_the_last_step_is_written_again(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, made = options(service, data, tmp_path / "a", "--steps", 6, "--every", 2), tmp_path / "a"
    assert command(*given).exit_code == 0
    (made / "checkpoint-6" / "trainer_state.json").write_bytes(b"")
    with monkeypatch.context() as patched:
        lose_after(patched, 6)
        done = command(*options(service, data, made, "--steps", 8, "--every", 50, "--resume"))
    assert "ended in an error after step 6; " in done.output
    assert damage_of(made / "checkpoint-6") is None


def test_two_checkpoints_are_kept_after_an_executor_is_lost(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_after(monkeypatch, 5)
    assert command(*options(service, data, tmp_path / "a", "--steps", 9, "--every", 2)).exit_code == 1
    assert {one.name for one in checkpoints(tmp_path / "a")} == {"checkpoint-4", "checkpoint-5"}


@pytest.mark.parametrize("saved", [2, 0])
def test_an_executor_that_is_lost_while_the_disk_is_full(
    saved: int, service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    given = options(service, data, tmp_path / "a", "--steps", 6, "--every", 2)
    with monkeypatch.context() as patched:
        lose_after(patched, saved + 1)
        patched.setattr(training._Trainer, "save_checkpoint", full)
        done = command(*given)
    assert done.exit_code == 1
    told = " ".join(done.output.split())
    again = "--resume continues from the last checkpoint" if saved else "nothing was saved"
    assert f"step {saved + 1} could not be saved (RuntimeError: [enforce fail" in told
    assert again in told
    assert "error: the executor did not come back" in told


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_second_ctrl_c_ends_a_run_that_waits_for_its_executor(service: Service, data: Path, tmp_path: Path) -> None:
    process = start(*options(service, data, tmp_path / "a", "--steps", LONG), "--retry", "60")
    wait(lambda: len(losses_in(tmp_path / "a")) >= 3 or process.poll() is not None)
    service.kill()
    try:
        time.sleep(1)  # a step waits for the executor
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "again to stop at once" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.communicate()
        service.start()


@pytest.mark.thorough
def test_ctrl_c_ends_the_reader_of_messages_first(service: Service, data: Path, tmp_path: Path) -> None:
    """As with `2>&1 | tee log`: a terminal's Ctrl-C ends both."""
    made, told = tmp_path / "a", tmp_path / "a.json"
    process = start(*options(service, data, made, "--steps", LONG, "--json", told))
    wait(lambda: len(losses_in(made)) >= 3 or process.poll() is not None)
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    steps = json.loads(told.read_text(encoding="utf-8"))["steps"]
    assert (made / f"checkpoint-{steps}" / "trainer_state.json").is_file()
    assert (made / "adapter_model.safetensors").is_file()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
def test_a_full_disk_under_the_messages_ends_no_run(service: Service, data: Path, tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    process = start(*options(service, data, tmp_path / "a", "--steps", 3), stderr=full)
    os.close(full)
    assert process.wait(60) == 0
    assert (tmp_path / "a" / "adapter_model.safetensors").is_file()


def test_a_run_that_went_back_keeps_its_new_checkpoints(service: Service, data: Path, tmp_path: Path) -> None:
    """The last checkpoint is damaged. Its step is still to come for the resumed run."""
    made = tmp_path / "a"
    given = options(service, data, made, "--every", 2)
    assert command(*given, "--steps", "6").exit_code == 0
    (made / "checkpoint-6" / "trainer_state.json").unlink()
    (made / "checkpoint-1").symlink_to("checkpoint-4")
    done = command(*given, "--steps", "5", "--resume", "--every", "1")
    assert done.exit_code == 0, done.output
    assert {"checkpoint-4", "checkpoint-5"} <= {one.name for one in made.glob("checkpoint-*")}


@pytest.mark.thorough
def test_a_run_that_cannot_be_resumed_says_so(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft, made = tmp_path / "peft.json", tmp_path / "a"
    peft.write_text(json.dumps({"peft_type": "P_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4}))
    given = ["finetune", service.address, "--data", str(data), "--output", str(made), "--peft", str(peft)]
    process = start(*given, "--steps", str(LONG))
    wait(lambda: len(losses_in(made)) >= 3 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert "a run of this PEFT method cannot be resumed" in text
    assert "--resume" not in text


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills the children of a killed process")
def test_the_runs_of_a_sweep_end_with_it(service: Service, data: Path, tmp_path: Path) -> None:
    made, file = tmp_path / "made", tmp_path / "sweep.toml"
    file.write_text(f"[long]\nsteps = {LONG}\n", encoding="utf-8")
    process = start(*options(service, data, made, "--sweep", file))
    wait(lambda: losses_in(made / "long") or process.poll() is not None)
    (run,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate(timeout=60)
    gone, _ = psutil.wait_procs([run], 10)
    assert gone == [run]


@pytest.mark.thorough
def test_a_sweep_that_is_stopped_keeps_what_its_runs_have_done(service: Service, data: Path, tmp_path: Path) -> None:
    made, told, file = tmp_path / "made", tmp_path / "told.json", tmp_path / "sweep.toml"
    file.write_text(f"[short]\nsteps = 2\n[long]\nsteps = {LONG}\n", encoding="utf-8")
    read, unread = os.pipe()
    os.close(read)  # as if Ctrl-C had ended a `tee`
    process = start(*options(service, data, made, "--sweep", file, "--json", told), stdout=unread)
    os.close(unread)
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
