"""``symbiosis finetune`` and ``generate`` against a served model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from symbiosis.cli import finetune, generate
from symbiosis.cli.data import Data, PromptFormat
from symbiosis.cli.folder import owned
from tests.cli.chat_model import save_chat_model
from tests.helpers import command
from tests.service import Service

COLOURS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[Service]:
    with Service(checkpoint, f"shm://{checkpoint.parent}/s.sock") as running:
        yield running


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    pairs = [{"prompt": f"thing {n % 3}", "completion": COLOURS[n % 3]} for n in range(24)]
    file.write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    return file


LORA = "r=8,alpha=16,dropout=0.1,targets=all-linear"


def options(service: Service, data: Path, output: Path, *more: Any) -> list[str]:
    lora = () if {"--ia3", "--prefix", "--peft"} & {*more} else ("--lora", LORA)
    given = *lora, "--learning-rate", "0.02", "--every", "5", *map(str, more)
    return ["finetune", service.address, "--data", str(data), "--output", str(output), *given]


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def plain_losses(checkpoint: Path, folder: Path) -> list[float]:
    """Train on the same data with transformers and PEFT alone: 8 steps."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, pad_token="<end>")
    examples = []
    for n in range(24):
        prompt, completion = (tokenizer(text)["input_ids"] for text in (f"thing {n % 3}\n", COLOURS[n % 3]))
        ids = [tokenizer.bos_token_id, *prompt, *completion, tokenizer.eos_token_id]
        labels = [-100] * (1 + len(prompt)) + ids[1 + len(prompt) :]
        examples.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Trainer(
        get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config),
        TrainingArguments(
            str(folder / "plain"),
            max_steps=8,
            per_device_train_batch_size=4,
            learning_rate=0.02,
            seed=0,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
        ),
        DataCollatorForSeq2Seq(tokenizer),
        examples,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_losses_are_those_of_plain_peft(service: Service, data: Path, checkpoint: Path, tmp_path: Path) -> None:
    done = command(*options(service, data, tmp_path / "a", "--steps", 8, "--json", tmp_path / "a.json"))
    assert done.exit_code == 0, done.stderr
    assert "24 examples" in done.stderr
    told = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert told["losses"] == pytest.approx(plain_losses(checkpoint, tmp_path), rel=1e-4)
    assert len(told["losses"]) == 8
    assert [entry["step"] for entry in log_of(tmp_path / "a") if "loss" in entry] == [*range(1, 9)]
    assert not [*(tmp_path / "a").glob(".*")], "no temporary files are left"


def test_a_stopped_run_resumes_as_if_nothing_had_happened(service: Service, data: Path, tmp_path: Path) -> None:
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    more = "--steps", 40, "--schedule", "cosine", "--warmup", 0.1, "--weight-decay", 0.01
    assert command(*options(service, data, whole, *more)).exit_code == 0
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "symbiosis.cli.main", *options(service, data, halted, *more)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 90
    while not (halted / "log.jsonl").exists() or len(log_of(halted)) < 7:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, text
    stopped = log_of(halted)[-2]["step"]
    assert 7 <= stopped < 40
    assert f"checkpoint-{stopped}; the same command with --resume continues" in text
    done = command(*options(service, data, halted, *more, "--resume"))
    assert done.exit_code == 0, done.stderr
    losses = [[entry["loss"] for entry in log_of(folder) if "loss" in entry] for folder in (whole, halted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[1]) == 40


def test_an_earlier_run_is_not_overwritten(service: Service, data: Path, tmp_path: Path) -> None:
    made = tmp_path / "a"
    assert command(*options(service, data, made, "--steps", 1)).exit_code == 0
    weights = (made / "adapter_model.safetensors").read_bytes()
    done = command(*options(service, data, made, "--steps", 2))
    assert done.exit_code == 1
    assert "the run would replace checkpoint-1, adapter_config.json" in " ".join(done.stderr.split())
    done = command(*options(service, data, made, "--steps", 2, "--resume", "--batch", 2))
    assert done.exit_code == 1
    assert "batch was 4 and is 2" in done.stderr
    assert (made / "adapter_model.safetensors").read_bytes() == weights
    assert command(*options(service, data, made, "--steps", 2, "--overwrite")).exit_code == 0
    assert (made / "adapter_model.safetensors").read_bytes() != weights
    assert not (made / "checkpoint-1").exists()


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


def test_a_conversation_is_not_divided_for_validation() -> None:
    """Its answers may be examples of their own, which have earlier answers in their prompts."""
    data = Data(PromptFormat("chat"))
    for record in range(6):
        for answer in range(3):
            data.add(record, [record, answer], [record, answer], 8)
    train, test = finetune._split(data, 0.34, 0, Path("chat.jsonl"))
    of_train, of_test = ({one["input_ids"][0] for one in part.examples} for part in (train, test))
    assert not of_train & of_test
    assert (len(train.examples), len(test.examples)) == (12, 6)


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
def test_a_run_that_is_killed_as_it_begins_loses_no_earlier_one(killed: str, tmp_path: Path) -> None:
    """The next run in the folder finds the adapter and the checkpoint of the earlier one."""
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


def test_early_stopping_waits_no_longer_after_a_resume(service: Service, data: Path, tmp_path: Path) -> None:
    made = tmp_path / "a"
    more = "--learning-rate", 0, "--validation", 0.2, "--every", 2, "--patience", 3
    assert command(*options(service, data, made, *more, "--steps", 4)).exit_code == 0
    assert command(*options(service, data, made, *more, "--steps", 40, "--resume")).exit_code == 0
    assert max(entry["step"] for entry in log_of(made)) == 2 * (1 + 3)


@pytest.mark.parametrize("file", ["optimizer.pt", "adapter_model.safetensors"])
def test_a_checkpoint_that_is_cut_off_is_passed_over(service: Service, data: Path, tmp_path: Path, file: str) -> None:
    made = tmp_path / "a"
    assert command(*options(service, data, made, "--steps", 4, "--every", 2)).exit_code == 0
    os.truncate(made / "checkpoint-4" / file, 100)
    done = command(*options(service, data, made, "--steps", 5, "--every", 2, "--resume"))
    assert done.exit_code == 0, done.stderr
    assert "checkpoint-4 is damaged and is passed over" in " ".join(done.stderr.split())
    assert len([entry for entry in log_of(made) if "loss" in entry]) == 5


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


def test_warming_up_to_a_constant_rate(service: Service, data: Path, tmp_path: Path) -> None:
    rate = "--learning-rate", 0.1, "--schedule", "constant", "--warmup", 4
    assert command(*options(service, data, tmp_path / "a", "--steps", 6, *rate)).exit_code == 0
    rates = [entry["learning_rate"] for entry in log_of(tmp_path / "a") if "loss" in entry]
    assert rates == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1, 0.1])


def test_two_runs_do_not_share_a_folder(service: Service, data: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "a").mkdir()
    with FileLock(tmp_path / "a" / ".lock"):
        done = command(*options(service, data, tmp_path / "a", "--steps", 1))
    assert done.exit_code == 1
    assert "another run writes to it" in done.stderr


def test_the_best_checkpoint_becomes_the_adapter(service: Service, data: Path, tmp_path: Path) -> None:
    result = tmp_path / "a.json"
    rate = "--learning-rate", 0.5, "--schedule", "constant"  # so large that the loss does not only fall
    done = command(
        *options(service, data, tmp_path / "a", "--steps", 30, "--validation", 0.25, *rate, "--patience", 2),
        *("--json", str(result)),
    )
    assert done.exit_code == 0, done.stderr
    assert "18 examples, 6 for validation" in done.stderr
    told = json.loads(result.read_text(encoding="utf-8"))
    best = min(told["validation"], key=lambda one: one["loss"])
    assert told["best_step"] == best["step"]
    assert best["perplexity"] == pytest.approx(torch.tensor(best["loss"]).exp().item(), rel=1e-4)
    chosen = (tmp_path / "a" / f"checkpoint-{best['step']}" / "adapter_model.safetensors").read_bytes()
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == chosen


def test_any_peft_method_from_a_file(service: Service, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "ia3.json"
    file.write_text('{"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []}', encoding="utf-8")
    done = command(*options(service, data, tmp_path / "a", "--steps", 2, "--peft", file))
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text(encoding="utf-8"))["peft_type"] == "IA3"


@pytest.mark.parametrize(
    ("given", "kind", "values"),
    [
        (["--ia3"], "IA3", {"target_modules": ["down_proj", "k_proj", "v_proj"]}),
        (["--prefix", "4"], "PREFIX_TUNING", {"num_virtual_tokens": 4}),
    ],
)
def test_short_options_of_other_methods(
    service: Service, data: Path, tmp_path: Path, given: list[str], kind: str, values: dict[str, Any]
) -> None:
    done = command(*options(service, data, tmp_path / "a", "--steps", 2, *given))
    assert done.exit_code == 0, done.stderr
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["peft_type"] == kind
    assert {name: sorted(v) if isinstance(v := config[name], list) else v for name in values} == values


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--schedule", "zigzag"], "zigzag"),
        (["--ia3", "--lora", "r=4"], "--lora and --ia3 each name a PEFT method"),
        (["--ia3", "--prefix", "4"], "--ia3 and --prefix each name a PEFT method"),
        (["--log-to", "nologger"], "nologger is not supported"),
        (["--window", "8", "--accumulate", "2"], "--window and --accumulate cannot be combined"),
        (["--patience", "2"], "--patience needs --validation"),
        (["--validation", "1.5"], "more than 0 and less than 1"),
        (["--validation", "0.001"], "too few to divide"),
        (["--validation", "absent.jsonl"], "cannot be read"),
        (["--peft", "absent.json"], "cannot be read as JSON"),
        (["--resume"], "there is no whole checkpoint"),
        (["--lora", "targets=absent"], "--lora targets=absent"),
        (["--log-to", "absent"], "training options (--schedule, --log-to, …): absent is not supported"),
    ],
)
def test_wrong_options(service: Service, data: Path, tmp_path: Path, given: list[str], complaint: str) -> None:
    done = command(*options(service, data, tmp_path / "a", "--steps", 1, *given))
    assert done.exit_code == 1
    assert complaint in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_the_loggers_of_transformers_get_each_step(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback in the place of a logger, because none of them is installed."""
    from transformers import TrainerCallback
    from transformers.integrations import integration_utils

    seen: list[tuple[str, int]] = []

    def logger(name: str) -> type[Any]:
        class Logger(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
                seen.extend([(name, state.global_step)] * ("loss" in logs))

        return Logger

    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, name, logger(name))
    more = "--steps", 2, "--log-to", "tensorboard", "--log-to", "wandb"
    done = command(*options(service, data, tmp_path / "a", *more))
    assert done.exit_code == 0, done.stderr
    assert seen == [("tensorboard", 1), ("wandb", 1), ("tensorboard", 2), ("wandb", 2)]


def test_a_logger_that_is_not_installed_is_named(
    service: Service, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import integration_utils

    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: False)
    done = command(*options(service, data, tmp_path / "a", "--steps", 1, "--log-to", "tensorboard"))
    assert done.exit_code == 1
    assert "refuses the training options" in done.stderr
    assert "tensorboard" in done.stderr.lower()


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"r": 8}', '{"peft_type": "NOTHING"}', '{"peft_type": "LORA", "s": 1}']
)
def test_wrong_peft_files(data: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "peft.json").write_text(content, encoding="utf-8")
    done = command(
        *("finetune", "shm:///nowhere.sock", "--data", str(data), "--output", str(tmp_path / "a")),
        *("--peft", str(tmp_path / "peft.json")),
    )
    assert done.exit_code == 1
    assert f"--peft {tmp_path / 'peft.json'}" in done.stderr.replace("\n", "")


# ------------------------------------------------------------------------------------------------------------ generate


@pytest.fixture(scope="module")
def adapter(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that has learned three answers."""
    folder = tmp_path_factory.mktemp("adapter")
    pairs = [{"prompt": f"thing {n % 3}", "completion": COLOURS[n % 3]} for n in range(24)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    plain = "--lora", "r=8,alpha=16,targets=all-linear", "--learning-rate", 0.01
    done = command(*options(service, folder / "data.jsonl", folder / "a", "--steps", 120, "--batch", 12, *plain))
    assert done.exit_code == 0, done.stderr
    return folder / "a"


def test_an_adapter_answers_as_it_has_learned(service: Service, adapter: Path, checkpoint: Path) -> None:
    done = command(
        "generate", service.address, "--adapter", str(adapter), "--prompt", "thing 1", "--max-new-tokens", "9"
    )
    assert done.stdout.strip() == "green"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), str(adapter))
    ids = torch.tensor([PromptFormat.load(adapter).prompt(tokenizer, {"prompt": "thing 1"})])
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True) == "green"


def test_an_adapter_of_a_deeper_model_is_refused(service: Service, adapter: Path, tmp_path: Path) -> None:
    other = shutil.copytree(adapter, tmp_path / "other")
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("layers.1.", "layers.7."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, other / "adapter_model.safetensors")
    done = command("generate", service.address, "--adapter", str(other), "--prompt", "thing 1")
    assert done.exit_code == 1
    assert "cannot be loaded onto this model" in " ".join(done.stderr.split())


def test_many_prompts_go_to_a_file(service: Service, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("thing 0\n\nthing 2\n", encoding="utf-8")
    output = tmp_path / "texts.jsonl"
    done = command(
        *("generate", service.address, "--adapter", str(adapter), "--prompts", str(tmp_path / "prompts.txt")),
        *("--max-new-tokens", "9", "--output", str(output), "--temperature", "0.01", "--n", "2", "--top-k", "5"),
        *("--top-p", "0.9", "--seed", "1"),
    )
    assert done.exit_code == 0, done.stderr
    made = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    wanted = [("thing 0", "red")] * 2 + [("thing 2", "blue")] * 2
    assert [(one["prompt"], one["completion"]) for one in made] == wanted
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "thing 0"}), encoding="utf-8")
    done = command(
        *("generate", service.address, "--adapter", str(adapter), "--prompts", str(tmp_path / "prompts.jsonl")),
        *("--max-new-tokens", "9", "--stop", "re"),
    )
    assert done.stdout.strip() == "re"


def test_texts_end_where_the_adapter_has_learned_to_end_them(
    service: Service, adapter: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """The end of an answer may be several tokens, and the tokenizer's end token need not be the model's."""
    made = shutil.copytree(adapter, tmp_path / "a")
    form = json.loads((made / "prompt_format.json").read_text(encoding="utf-8"))
    (made / "prompt_format.json").write_text(json.dumps({**form, "end": "ed"}), encoding="utf-8")
    prompts, output = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts.write_text("thing 0", encoding="utf-8")
    done = command(
        *("generate", service.address, "--adapter", str(made), "--prompts", str(prompts), "--output", str(output))
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(output.read_text(encoding="utf-8"))["completion"] == "r"
    printed = command("generate", service.address, "--adapter", str(made), "--prompt", "thing 0")
    assert printed.stdout == "r\n"
    (made / "prompt_format.json").write_text(json.dumps({**form, "end": "d"}), encoding="utf-8")  # one token
    printed = command("generate", service.address, "--adapter", str(made), "--prompt", "thing 0")
    assert printed.stdout == "re\n"
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7]))
    writer = generate._Writer(model, AutoTokenizer.from_pretrained(checkpoint), None, {}, "")
    assert writer._options["eos_token_id"] == [0, 7]


def test_a_checkpoint_is_an_adapter(service: Service, data: Path, tmp_path: Path) -> None:
    made = tmp_path / "a"
    assert command(*options(service, data, made, "--steps", 1)).exit_code == 0
    form = PromptFormat.load(made)
    assert form.name == "pairs"
    assert PromptFormat.load(made / "checkpoint-1") == form


def test_chat_remembers_the_conversation(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_prompts(monkeypatch)
    done = chat(service, "hi\nmore\n\n", "--max-new-tokens", "3")
    assert done.exit_code == 0, done.stderr
    assert len(seen) == 2
    assert len(seen[1]) > len(seen[0])
    assert seen[1][: len(seen[0])] == seen[0]


def test_an_adapter_chats_as_it_has_learned(
    service: Service, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = [("system", "be brief"), ("user", "hi"), ("assistant", "red")]
    record = json.dumps({"messages": [{"role": role, "content": text} for role, text in conversation]})
    (tmp_path / "data.jsonl").write_text("\n".join([record] * 8), encoding="utf-8")
    assert command(*options(service, tmp_path / "data.jsonl", tmp_path / "a", "--steps", 25)).exit_code == 0
    seen = watch_prompts(monkeypatch)
    given = "--adapter", str(tmp_path / "a"), "--system", "be brief", "--max-new-tokens", "6"
    done = chat(service, "hi\n\n", *given)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == "red"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(seen[0]) == "<system>be brief<user>hi<assistant>"
    without = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    (tmp_path / "prompts.jsonl").write_text(f"{record}\n{without}", encoding="utf-8")
    done = command("generate", service.address, "--prompts", str(tmp_path / "prompts.jsonl"), *given[2:])
    assert done.exit_code == 0, done.stderr
    assert seen == seen[:1] * 3, "a system message is put before messages that have none"


def watch_prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list to which the prompts of texts are added as they are generated."""
    seen: list[list[int]] = []
    write = generate._Writer.write

    def watched(self: Any, ids: list[int], shown: bool) -> str:
        seen.append(ids)
        return write(self, ids, shown)

    monkeypatch.setattr(generate._Writer, "write", watched)
    return seen


def chat(service: Service, typed: str, *given: str) -> Any:
    from typer.testing import CliRunner

    from symbiosis.cli.commands import app

    return CliRunner().invoke(app, ["generate", service.address, "--chat", *given], input=typed)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([], "give one of --prompt, --prompts and --chat"),
        (["--prompt", "x", "--chat"], "give one of --prompt, --prompts and --chat"),
        (["--prompt", "x", "--n", "2"], "need --temperature"),
        (["--prompts", "absent.txt"], "absent.txt: cannot be read"),
        (["--chat", "--output", "answers.jsonl"], "--chat prints one answer to each message"),
        (["--prompt", "x", "--output", "pyproject.toml"], "--output pyproject.toml: the file exists"),
        (["--prompt", "x", "--temperature", "1e-300"], "--temperature 1e-300: give 0, or a number from 1e-06 to 1e+06"),
        (["--prompt", "x", "--temperature", "inf"], "--temperature inf: give 0"),
        (["--prompt", "\udcff"], r"--prompt: \udcff is an unpaired surrogate"),
        (["--prompt", "x", "--stop", "\udcff"], r"--stop: \udcff is an unpaired surrogate"),
        (["--prompt", "x", "--stop", ""], "--stop is empty"),
        (["--prompt", "x", "--system", "s"], "--system goes with --chat"),
    ],
)
def test_wrong_options_of_generate(given: list[str], complaint: str) -> None:
    done = command("generate", "shm:///nowhere.sock", *given)
    assert done.exit_code == 1
    assert complaint in done.stderr


# --------------------------------------------------------------------------------------------------------------- sweep


def test_a_sweep_runs_side_by_side(service: Service, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    fast = 'learning-rate = 0.05\nlog-to = []\nbatch = "2"\nia3 = false\n'
    file.write_text('[small]\nlora = "r=2"\n[fast]\n' + fast, encoding="utf-8")
    output, told = tmp_path / "out", tmp_path / "out.json"
    done = command(*options(service, data, output, "--steps", 4, "--sweep", file, "--json", told))
    assert done.exit_code == 0, done.output
    runs = json.loads(told.read_text(encoding="utf-8"))["runs"]
    assert {name: run["steps"] for name, run in runs.items()} == {"small": 4, "fast": 4}
    ranks = [json.loads((output / name / "adapter_config.json").read_text("utf-8"))["r"] for name in ("small", "fast")]
    assert ranks == [2, 8]
    assert "small" in done.stdout
    assert "fast" in done.stdout


@pytest.mark.thorough
def test_a_sweep_goes_on_and_replaces_nothing(service: Service, data: Path, tmp_path: Path) -> None:
    file, output, told = tmp_path / "sweep.toml", tmp_path / "out", tmp_path / "out.json"
    file.write_text("[small]\nlora = 'r=2'\n", encoding="utf-8")
    assert command(*options(service, data, output, "--steps", 4, "--sweep", file)).exit_code == 0
    log = (output / "small.log").read_bytes()
    file.write_text('[new]\nlora = "r=2"\n[small]\nlora = "r=4"\n', encoding="utf-8")
    done = command(*options(service, data, output, "--steps", 4, "--sweep", file))
    assert done.exit_code == 1
    assert f"--output {output}/small: the run would replace checkpoint-4" in done.stderr
    assert (output / "small.log").read_bytes() == log
    assert not (output / "new").exists(), "no run begins if one is refused"
    (output / "new").mkdir()
    (output / "new" / "README.md").write_text("mine", encoding="utf-8")
    (output / "new.log").write_text("mine", encoding="utf-8")
    for more in ((), ("--resume",)):
        done = command(*options(service, data, output, "--steps", 4, "--sweep", file, *more))
        assert done.exit_code == 1
        found = re.search(r"new: the run would replace README\.md(, new\.log)?;", " ".join(done.stderr.split()))
        assert found is not None, done.stderr
        assert found.group(1) == (None if more else ", new.log"), "a run that goes on adds to its log"
    (output / "new" / "README.md").unlink()
    (output / "new.log").unlink()
    done = command(*options(service, data, output, "--steps", 4, "--sweep", file, "--resume", "--json", told))
    assert done.exit_code == 1
    assert "1 of 2 runs ended early (small)" in done.stderr
    assert "peft was" in done.stderr
    assert [*json.loads(told.read_text(encoding="utf-8"))["runs"]] == ["new"], "a run without a checkpoint begins"
    assert (output / "small.log").read_bytes().startswith(log)


def test_runs_of_a_sweep_have_data_of_their_own(service: Service, data: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text(f"[one]\ndata = '{data}'\n[other]\nlora = 'r=2'\n", encoding="utf-8")
    given = (*("finetune", service.address, "--output", str(output), "--steps", "1", "--sweep", str(file)),)
    done = command(*given)
    assert done.exit_code == 1
    assert "[other] has no data; give it data = 'FILE'" in " ".join(done.stderr.split())
    file.write_text(f"[one]\ndata = '{data}'\n", encoding="utf-8")
    done = command(*given)
    assert done.exit_code == 0, done.output
    assert (output / "one" / "adapter_model.safetensors").is_file()
    done = command("finetune", service.address, "--output", str(output))
    assert done.exit_code == 1
    assert "--data is missing" in done.stderr


def test_two_sweeps_do_not_share_a_folder(service: Service, data: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.log").write_text("of the other sweep", encoding="utf-8")
    (tmp_path / "sweep.toml").write_text("[one]\nseed = 1\n", encoding="utf-8")
    with FileLock(tmp_path / "a" / ".lock"):
        done = command(*options(service, data, tmp_path / "a", "--overwrite", "--sweep", tmp_path / "sweep.toml"))
    assert done.exit_code == 1
    assert "another run writes to it" in done.stderr
    assert (tmp_path / "a" / "one.log").read_text(encoding="utf-8") == "of the other sweep"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[", "cannot be read as TOML"),
        ("", "there is no run in it"),
        ("lora = 3", "'lora' is no table"),
        ("[a]\nrank = 3", "[a] has no option 'rank'"),
        ("[a]\noutput = 'x'", "[a] has no option 'output'"),
        ("['../a']\nseed = 3", "[../a] cannot be the name of a folder"),
        ("['..']\nseed = 3", "[..] cannot be the name of a folder"),
        ("['a.log']\nseed = 3", "[a.log] cannot be the name of a folder"),
        ('["a\\u0000b"]\nseed = 3', "cannot be the name of a folder"),
        ("['']\nseed = 3", "[] cannot be the name of a folder"),
        (f"[{'a' * 300}]\nseed = 3", "cannot be the name of a folder"),
        ("[a]\nlearning-rate = 'abc'", "[a] learning-rate = 'abc': Input should be a valid number"),
        ("[a]\nsteps = true", "[a] steps = True: give a value"),
        ("[a]\nia3 = 1", "[a] ia3 = 1: give true or false"),
        ("[a]\nbatch = 0", "[a] batch = 0: Input should be greater than or equal to 1"),
        ("[a]\nschedule = 'linear'\nresume = true", "[a] has no option 'resume'"),
    ],
)
def test_wrong_sweeps(data: Path, tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "sweep.toml").write_text(content, encoding="utf-8")
    done = command(
        *("finetune", "shm:///nowhere.sock", "--data", str(data), "--output", str(tmp_path / "a")),
        *("--sweep", str(tmp_path / "sweep.toml")),
    )
    assert done.exit_code == 1
    assert complaint in " ".join(done.stderr.split())
