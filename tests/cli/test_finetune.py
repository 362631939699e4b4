"""``symbiosis finetune`` against a served model: losses, options, PEFT methods, loggers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from symbiosis.cli import finetune, training
from symbiosis.cli.data import Data, PromptFormat, tokenize
from tests.cli.runs import COLOURS, log_of, options
from tests.helpers import command
from tests.service import Service


def plain_losses(checkpoint: Path, folder: Path, seed: int = 0, **arguments: Any) -> list[float]:
    """Train on the same data with transformers and PEFT alone: 8 steps."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, pad_token="<end>")
    examples = []
    for n in range(24):
        prompt, completion = (tokenizer(text)["input_ids"] for text in (f"thing {n % 3}\n", COLOURS[n % 3]))
        ids = [tokenizer.bos_token_id, *prompt, *completion, tokenizer.eos_token_id]
        labels = [-100] * (1 + len(prompt)) + ids[1 + len(prompt) :]
        examples.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Trainer(
        get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config),
        TrainingArguments(
            str(folder / "plain"),
            max_steps=8,
            per_device_train_batch_size=4,
            learning_rate=0.02,
            seed=seed,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            **arguments,
        ),
        DataCollatorForSeq2Seq(tokenizer),
        examples,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("more", "arguments"),
    [
        ([], {}),
        (
            ["--clip", 0.01, "--weight-decay", 5, "--seed", 3],
            {"max_grad_norm": 0.01, "weight_decay": 5, "seed": 3},
        ),
    ],
)
def test_losses_are_those_of_plain_peft(
    service: Service, data: Path, checkpoint: Path, tmp_path: Path, more: list[Any], arguments: dict[str, Any]
) -> None:
    done = command(*options(service, data, tmp_path / "a", "--steps", 8, "--json", tmp_path / "a.json", *more))
    assert done.exit_code == 0, done.stderr
    assert "24 examples" in done.stderr
    told = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert told["losses"] == pytest.approx(plain_losses(checkpoint, tmp_path, **arguments), rel=1e-4)
    assert len(told["losses"]) == 8
    assert [entry["step"] for entry in log_of(tmp_path / "a") if "loss" in entry] == [*range(1, 9)]
    assert not [*(tmp_path / "a").glob(".*")], "no temporary files are left"


def test_a_run_asks_no_hub(service: Service, data: Path, tmp_path: Path, hub_requests: list[Any]) -> None:
    """PEFT would ask for the model under the name that the executor states."""
    done = command(*options(service, data, tmp_path / "a", "--steps", 1))
    assert done.exit_code == 0, done.stderr
    assert not hub_requests


def test_a_stopped_run_resumes_as_if_nothing_had_happened(service: Service, data: Path, tmp_path: Path) -> None:
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    more = "--steps", 40, "--schedule", "cosine", "--warmup", 0.1, "--weight-decay", 0.01
    assert command(*options(service, data, whole, *more)).exit_code == 0
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "symbiosis", *options(service, data, halted, *more)],
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


def test_a_resumed_run_has_the_steps_of_its_epochs(service: Service, data: Path, tmp_path: Path) -> None:
    """The first of the two steps has four of the six batches: more than 0.6 epochs."""
    more, epochs = ("--batch", 4, "--accumulate", 4), ("--epochs", 0.6)
    assert command(*options(service, data, tmp_path / "whole", *more, *epochs)).exit_code == 0
    assert command(*options(service, data, tmp_path / "halted", *more, "--steps", 1)).exit_code == 0
    done = command(*options(service, data, tmp_path / "halted", *more, *epochs, "--resume"))
    assert done.exit_code == 0, done.stderr
    whole, halted = ([one["loss"] for one in log_of(tmp_path / name) if "loss" in one] for name in ("whole", "halted"))
    assert len(whole) == 2
    assert halted == pytest.approx(whole, rel=1e-5)


def test_the_rate_of_a_longer_run_is_that_of_its_schedule_from_the_first_step_on(
    service: Service, data: Path, tmp_path: Path
) -> None:
    given = options(service, data, tmp_path / "a", "--schedule", "linear", "--steps")
    assert command(*given, "2").exit_code == 0
    done = command(*given, "5", "--resume")
    assert done.exit_code == 0, done.stderr
    rates = [entry["learning_rate"] for entry in log_of(tmp_path / "a") if "loss" in entry]
    assert rates == pytest.approx([0.02, 0.01, 0.012, 0.008, 0.004])


def test_a_run_in_windows_may_go_on_without_them(service: Service, data: Path, tmp_path: Path) -> None:
    assert command(*options(service, data, tmp_path / "a", "--steps", 1, "--window", 8)).exit_code == 0
    done = command(*options(service, data, tmp_path / "a", "--steps", 2, "--resume"))
    assert done.exit_code == 0, done.stderr


def test_a_run_that_has_ended_gets_no_step_more(service: Service, data: Path, tmp_path: Path) -> None:
    """The epoch of its checkpoint, 1 + 9 / 25, is below 1.36 in floating point."""
    with data.open("a", encoding="utf-8") as file:
        file.write('\n{"prompt": "thing 0", "completion": "red"}')
    given = options(service, data, tmp_path / "a", "--batch", 1, "--epochs", 1.36)
    assert command(*given).exit_code == 0
    done = command(*given, "--resume")
    assert "the run had ended after step 34;" in " ".join(done.stderr.split())


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


def test_early_stopping_waits_no_longer_after_a_resume(service: Service, data: Path, tmp_path: Path) -> None:
    made = tmp_path / "a"
    more = "--learning-rate", 0, "--validation", 0.2, "--every", 2, "--patience", 3
    assert command(*options(service, data, made, *more, "--steps", 4)).exit_code == 0
    assert command(*options(service, data, made, *more, "--steps", 40, "--resume")).exit_code == 0
    assert max(entry["step"] for entry in log_of(made)) == 2 * (1 + 3)
    done = command(*options(service, data, made, *more, "--steps", 40, "--resume"))
    assert "the run had ended after step 8 of 40, ended by --patience 3;" in " ".join(done.stderr.split())
    done = command(*options(service, data, tmp_path / "b", *more, "--steps", 8))  # patience ends with the run
    assert "in 8 steps" in done.stderr
    assert "patience" not in done.stderr


def test_a_run_cut_short_was_not_ended_by_patience(service: Service, data: Path, tmp_path: Path) -> None:
    more = "--validation", 0.2, "--patience", 3
    assert command(*options(service, data, tmp_path / "a", *more, "--steps", 11)).exit_code == 0
    shutil.rmtree(tmp_path / "a" / "checkpoint-11")
    done = command(*options(service, data, tmp_path / "a", *more, "--steps", 5, "--resume"))
    assert done.exit_code == 0, done.stderr
    assert "the run had ended after step 10; adapter in" in " ".join(done.stderr.split())


def test_warming_up_to_a_constant_rate(service: Service, data: Path, tmp_path: Path) -> None:
    rate = "--learning-rate", 0.1, "--schedule", "constant", "--warmup", 4
    assert command(*options(service, data, tmp_path / "a", "--steps", 6, *rate)).exit_code == 0
    rates = [entry["learning_rate"] for entry in log_of(tmp_path / "a") if "loss" in entry]
    assert rates == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1, 0.1])


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


@pytest.mark.parametrize(("given", "sizes"), [((1,), [1, 1, 1]), ((2,), [2, 1]), ((2, "--window", 8), [1, 1, 1])])
def test_the_validation_loss_is_the_mean_over_tokens(
    service: Service,
    data: Path,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[Any, ...],
    sizes: list[int],
) -> None:
    tests = [{"prompt": "thing", "completion": "red" * count} for count in (1, 30, 2)]
    (tmp_path / "tests.jsonl").write_text("\n".join(map(json.dumps, tests)), encoding="utf-8")
    batches = []

    def padded(pad: int, rows: list[Any], join: Any = training._padded) -> Any:
        batches.append(len(rows))
        return join(pad, rows)

    monkeypatch.setattr(training, "_padded", padded)
    more = "--validation", tmp_path / "tests.jsonl", "--steps", 1, "--learning-rate", 0, "--batch", *given
    done = command(*options(service, data, tmp_path / "a", *more))
    assert done.exit_code == 0, done.stderr
    assert batches[-len(sizes) :] == sizes
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    losses = []
    for one in tokenize(tests, AutoTokenizer.from_pretrained(checkpoint), 256, "").examples:
        logits = model(torch.tensor([one["input_ids"]])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(one["labels"][1:]), reduction="none"))
    together = torch.cat(losses)
    assert log_of(tmp_path / "a")[1]["eval_loss"] == pytest.approx(together[together > 0].mean().item(), rel=1e-4)


@pytest.mark.parametrize("content", [{"bias": "foo"}, {"rank_pattern": 3}, {"r": 4_000_000_000}])
def test_options_that_peft_refuses(service: Service, data: Path, tmp_path: Path, content: dict[str, Any]) -> None:
    file = tmp_path / "peft.json"
    file.write_text(json.dumps({"peft_type": "LORA", **content}), encoding="utf-8")
    done = command(*options(service, data, tmp_path / "a", "--steps", 2, "--peft", file))
    assert done.exit_code == 1
    assert f"--peft {file}:" in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr


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
        (["--schedule", "zigzag"], "--schedule zigzag: zigzag is not a valid"),
        (["--ia3", "--lora", "r=4"], "--lora and --ia3 each name a PEFT method"),
        (["--ia3", "--prefix", "4"], "--ia3 and --prefix each name a PEFT method"),
        (["--log-to", "nologger"], "--log-to: nologger is not supported"),
        (["--window", "8", "--accumulate", "2"], "--window and --accumulate cannot be combined"),
        (["--patience", "2"], "--patience needs --validation"),
        (["--validation", "1.5"], "more than 0 and less than 1"),
        (["--validation", "0.001"], "that is 0 of the 24 records"),
        (["--validation", "absent.jsonl"], "cannot be read"),
        (["--peft", "absent.json"], "cannot be read (No such file"),
        (["--resume"], "there is no run in"),
        (["--lora", "targets=absent"], "the model has no module called absent"),
        (["--lora", "targets=q_proj+v_porj"], "the model has no module called v_porj"),
        (["--lora", "r=4,alpha=8,r=8"], "--lora r=4,alpha=8,r=8: r is given twice"),
        (["--epochs", "2"], "--steps and --epochs each say how long to train"),
    ],
)
def test_wrong_options(service: Service, data: Path, tmp_path: Path, given: list[str], complaint: str) -> None:
    done = command(*options(service, data, tmp_path / "a", "--steps", 1, *given))
    assert done.exit_code == 1
    assert complaint in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


PROMPTS = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4, "prompt_tuning_init": "TEXT"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"peft_type": "lora2"}, "unknown peft_type 'LORA2'; did you mean LORA or "),
        ({"peft_type": "NONE"}, "unknown peft_type 'NONE'; "),
        ({"peft_type": "LORA", "rnk_pattern": {}}, "unknown key 'rnk_pattern'; did you mean rank_pattern"),
        ({"peft_type": "LORA", "r": "eight"}, "a value has a wrong type: '<=' not supported between"),
        ({"peft_type": "LORA", "task_type": "SEQ_CLS"}, 'causal language models; leave "task_type" out'),
        (dict.fromkeys(("prompt_tuning_init_text", "tokenizer_name_or_path"), "absent") | PROMPTS, "offline mode"),
    ],
)
def test_wrong_configurations(
    service: Service, data: Path, tmp_path: Path, content: dict[str, Any], complaint: str
) -> None:
    peft = tmp_path / "peft.json"
    peft.write_text(json.dumps(content), encoding="utf-8")
    done = command(*options(service, data, tmp_path / "a", "--steps", 1, "--peft", peft))
    assert done.exit_code == 1
    assert f"error: --peft {peft}: " in " ".join(done.stderr.split())
    assert complaint in " ".join(done.stderr.split())


def test_adalora_allocates_its_ranks(service: Service, data: Path, tmp_path: Path) -> None:
    """The saved adapter has the ranks that are left, and generates."""
    peft, made = tmp_path / "peft.json", tmp_path / "a"
    values = {"peft_type": "adalora", "total_step": 6, "init_r": 8, "target_r": 6, "tfinal": 1}
    peft.write_text(json.dumps(values), encoding="utf-8")
    done = command(*options(service, data, made, "--steps", 8, "--peft", peft))
    assert done.exit_code == 0, done.stderr
    assert "total_step" not in done.stderr
    config = json.loads((made / "adapter_config.json").read_text(encoding="utf-8"))
    kept = sum(map(sum, config["rank_pattern"].values()))
    assert kept == 6 * len(config["rank_pattern"]), "a mean rank of 6"
    done = command("generate", service.address, "--adapter", str(made), "--prompt", "thing 1", "--max-new-tokens", "3")
    assert done.exit_code == 0, done.stderr
    done = command(*options(service, data, made, "--steps", 9, "--peft", peft, "--resume"))
    assert done.exit_code == 1
    assert "lack the importance of its ranks" in " ".join(done.stderr.split())
    done = command(*options(service, data, tmp_path / "b", "--steps", 5, "--peft", peft))
    assert done.exit_code == 0, done.stderr
    assert "total_step is 6 and the run has 5 steps, so it ends before the ranks are final" in done.stderr


def test_a_warm_up_of_all_steps_is_told(service: Service, data: Path, tmp_path: Path) -> None:
    done = command(*options(service, data, tmp_path / "a", "--steps", 2, "--warmup", 2))
    assert done.exit_code == 0, done.stderr
    assert "--warmup takes all steps" in done.stderr


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


def test_a_logger_that_is_not_installed_is_named_before_the_executor_is_asked(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import integration_utils

    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: False)
    given = "--data", data, "--output", tmp_path / "a", "--retry", 0, "--log-to", "tensorboard"
    done = command("finetune", "tcp://127.0.0.1:1", *given)
    assert done.exit_code == 1
    assert "--log-to: TensorBoardCallback requires tensorboard" in " ".join(done.stderr.split())


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


def test_one_gpu_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer would copy the model to each."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: self._n_gpu or 2))
    options = {"num_train_epochs": 1, "lr_scheduler_type": "linear", "report_to": []}
    assert training.training_arguments(tmp_path, False, options).n_gpu == 1
