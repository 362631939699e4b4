"""Tenants of ``symbiosis serve`` in another process: common training tools, commands, and an executor that dies."""

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
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments, pipeline

import symbiosis
from symbiosis.errors import UsageError
from tests.fused import LOSSES, step
from tests.helpers import adamw, command, losses
from tests.service import Service, free_port, save_model
from tests.transports.raw import hello, raw

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*tokenizer.*:UserWarning"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("served") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[Service]:
    with Service(checkpoint, f"shm://{checkpoint.parent}/s.sock") as running:
        yield running


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences of 8 tokens."""

    def __init__(self, count: int) -> None:
        self.ids = torch.randint(3, 20, (count, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "per_device_train_batch_size": 2,
        "max_steps": 12,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


class Around(torch.nn.Module):
    """A module of a user that wraps the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, labels=labels)


def train(
    model: Any,
    folder: Path,
    resume: str | None = None,
    each_step: Callable[[int], None] | None = None,
    around: Callable[[Any], Any] = lambda tuned: tuned,
    **options: Any,
) -> list[float]:
    """Fine-tune with HF's Trainer, unmodified, and return the losses. ``around`` wraps the adapted model."""
    torch.manual_seed(0)
    tuned = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", lora_dropout=0.1))

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if each_step is not None:
                each_step(state.global_step)

    trainer = Trainer(
        model=around(tuned), args=arguments(folder, **options), train_dataset=Tokens(32), callbacks=[Watch()]
    )
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"dataloader_num_workers": 1}, {"gradient_checkpointing": True}],
    ids=["plain", "accumulation", "workers", "checkpointing"],
)
def test_trainer_gives_plain_pefts_losses(service: Service, checkpoint: Path, tmp_path: Path, options: Any) -> None:
    expected = train(plain(checkpoint), tmp_path / "plain", **options)
    with symbiosis.open_model(service.address) as model:
        losses = train(model, tmp_path / "ours", **options)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]


def test_training_without_an_adapter_is_refused(service: Service, tmp_path: Path) -> None:
    """Inputs that require gradients give the loss a gradient, so the backward pass alone would not show it."""
    with symbiosis.open_model(service.address) as model:
        model.enable_input_require_grads()
        trainer = Trainer(model=model, args=arguments(tmp_path, max_steps=3), train_dataset=Tokens(32))
        with pytest.raises(UsageError, match=r"no trainable parameter.*get_peft_model"):
            trainer.train()


@pytest.mark.thorough
@pytest.mark.timeout(300)  # three processes import everything: a minute and a half beside another test
def test_ddp_on_two_processes() -> None:
    """The processes' adapters are made equal, and placeholders are left alone."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "tests.ecosystem.ddp"], timeout=290, env=environment)
    assert done.returncode == 0


# Without a network, PEFT cannot look whether a model of this name has another vocabulary.
@pytest.mark.filterwarnings("ignore:Could not find a config file in model:UserWarning")
def test_trainer_resumes_from_its_checkpoint(service: Service, checkpoint: Path, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 6}
    expected = train(plain(checkpoint), tmp_path / "plain", **options)
    with symbiosis.open_model(service.address) as model:
        losses = train(model, tmp_path / "ours", **options)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert not list((tmp_path / "ours" / "checkpoint-6").glob("model*.safetensors"))  # adapters only
    with symbiosis.open_model(service.address) as model:
        resumed = train(model, tmp_path / "ours", resume=str(tmp_path / "ours" / "checkpoint-6"), **options)
    assert resumed[-6:] == pytest.approx(expected[-6:], rel=1e-5)


def test_trainer_saves_a_module_around_the_model(service: Service, checkpoint: Path, tmp_path: Path) -> None:
    """Trainer saves such a module as a whole, without placeholders, and resumes from the checkpoint."""
    options = {"save_strategy": "steps", "save_steps": 6, "around": Around}
    expected = train(plain(checkpoint), tmp_path / "plain", **options)
    with symbiosis.open_model(service.address) as model:
        assert train(model, tmp_path / "ours", **options) == pytest.approx(expected, rel=1e-5)
        saved = safetensors.torch.load_file(tmp_path / "ours" / "checkpoint-6" / "model.safetensors")
        assert not any(tensor.isnan().any() for tensor in saved.values())
        assert any("lora" in name for name in saved)
    with symbiosis.open_model(service.address) as model:
        resumed = train(model, tmp_path / "ours", resume=str(tmp_path / "ours" / "checkpoint-6"), **options)
    assert resumed[-6:] == pytest.approx(expected[-6:], rel=1e-5)


def test_pipeline_and_tokenizer_come_from_the_executor(service: Service, checkpoint: Path) -> None:
    text = "what is a list of"
    wanted = pipeline("text-generation", model=plain(checkpoint), tokenizer=AutoTokenizer.from_pretrained(checkpoint))
    with symbiosis.open_model(service.address) as model:
        made = pipeline("text-generation", model=model, tokenizer=model.tokenizer())
        options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
        assert made(text, **options) == wanted(text, **options)


@pytest.mark.parametrize("loss", LOSSES)
def test_fused_losses(service: Service, checkpoint: Path, loss: str) -> None:
    """A client without an event loop multiplies by the weight in forward and backward functions."""

    def losses(model: Any) -> list[float]:
        torch.manual_seed(0)
        tuned = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM"))
        optimizer = adamw(tuned, lr=1e-2)
        found = []
        for _ in range(4):
            value = step(tuned, LOSSES[loss])
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.item())
        return found

    expected = losses(plain(checkpoint))
    with symbiosis.open_model(service.address) as model:
        assert losses(model) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]


def test_executor_killed_in_the_middle_of_a_trainer_run(checkpoint: Path, tmp_path: Path) -> None:
    """After kill -9, a pause and a new process, the loss curve equals that of an undisturbed run."""
    expected = train(plain(checkpoint), tmp_path / "plain", max_steps=20)
    with Service(checkpoint, f"shm://{tmp_path}/s.sock") as running:

        def disturb(step: int) -> None:
            if step in (5, 12):
                threading.Thread(target=restart).start()

        def restart() -> None:
            time.sleep(0.01)  # during the next step
            running.kill()
            running.start()

        with symbiosis.open_model(running.address, retry=60.0) as model:
            losses = train(model, tmp_path / "ours", max_steps=20, each_step=disturb)
        assert running.log.count('"client joined"') == 3
    assert losses == pytest.approx(expected, rel=1e-5)


def test_executor_killed_in_the_middle_of_generate(checkpoint: Path, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": True}
    torch.manual_seed(3)
    expected = plain(checkpoint).generate(ids, attention_mask=torch.ones_like(ids), **options)
    with Service(checkpoint, f"shm://{tmp_path}/s.sock") as running:
        killed = threading.Event()

        class Streamer:
            count = 0

            def put(self, value: Any) -> None:
                self.count += 1
                if self.count == 20:
                    running.kill()
                    killed.set()
                    threading.Thread(target=running.start).start()

            def end(self) -> None: ...

        with symbiosis.open_model(running.address, retry=60.0) as model:
            torch.manual_seed(3)
            streamer: Any = Streamer()
            result = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **options)
    assert killed.is_set()
    assert torch.equal(result, expected)


MEMORY = """
import json, psutil, sys, torch, symbiosis
torch.set_num_threads(1)
import transformers, peft, accelerate, safetensors  # what any client loads
from transformers.models.llama import modeling_llama
with symbiosis.open_model(sys.argv[1]) as model:
    pass
before = psutil.Process().memory_full_info().uss
with symbiosis.open_model(sys.argv[1]) as model:
    ids = torch.arange(3, 19)[None]
    model(input_ids=ids, labels=ids)
    print(json.dumps({"grown": psutil.Process().memory_full_info().uss - before, "layers": len(list(model.modules()))}))
"""


def test_a_client_process_never_holds_a_base_layer(tmp_path: Path) -> None:
    """The base layers of this model take 150 MB, and the client's process grows by a few MB only."""
    folder = save_model(tmp_path / "wide", hidden_size=512, intermediate_size=2048, num_hidden_layers=9)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert weights > 120e6
    with Service(folder, f"shm://{tmp_path}/s.sock") as running:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", MEMORY, running.address],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["grown"] < 30e6


def test_commands(service: Service, checkpoint: Path, tmp_path: Path) -> None:
    """A tenant calls finetune, generate and status."""

    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "what is a", "completion": "list of numbers"}\n' * 3)
    adapter = tmp_path / "adapter"
    losses = tmp_path / "losses.json"
    done = command(
        *("finetune", service.address, "--data", str(data), "--output", str(adapter), "--json", str(losses)),
        *("--steps", "30", "--learning-rate", "0.05", "--lora", "r=4,alpha=8,targets=all-linear"),
    )
    assert done.exit_code == 0, done.stderr
    found = json.loads(losses.read_text())["losses"]
    assert len(found) == 30
    assert found[-1] < found[0]
    done = command(
        *("finetune", service.address, "--data", str(data), "--output", str(tmp_path / "b"), "--json", str(losses)),
        "--overwrite",
        *("--steps", "30", "--learning-rate", "0.05", "--lora", "r=4,alpha=8,targets=all-linear", "--window", "3"),
    )
    assert done.exit_code == 0, done.stderr
    windowed = json.loads(losses.read_text())["losses"]
    assert windowed[:4] == pytest.approx(found[:4], rel=1e-3)  # AdamW amplifies rounding errors later
    assert windowed[-1] < windowed[0]
    prompt, count = "what is a", 6
    done = command(
        "generate", service.address, "--adapter", str(adapter), "--prompt", prompt, "--max-new-tokens", str(count)
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompted = tokenizer(f"<s>{prompt}", return_tensors="pt", return_token_type_ids=False)  # as in training
    tuned: Any = PeftModel.from_pretrained(plain(checkpoint), str(adapter))
    ids = tuned.generate(**prompted, max_new_tokens=count, do_sample=False)[0, prompted["input_ids"].shape[1] :]
    assert done.stdout.split() == tokenizer.decode(ids, skip_special_tokens=True).split()
    done = command("status", service.address, "--json")
    told = json.loads(done.stdout)
    assert (told["name"], told["model"]) == ("model", "LlamaForCausalLM"), "the folder's name, and the class"
    done = command("status", f"shm://{tmp_path}/absent.sock")
    assert done.exit_code == 1
    assert "no executor answers" in done.stderr
    done = command("generate", service.address, "--prompt", "x", "--adapter", str(tmp_path))
    assert done.exit_code == 1
    assert "adapter_config.json" in done.stderr


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGTERM,
        pytest.param(getattr(signal, "SIGHUP", signal.SIGTERM), marks=pytest.mark.thorough),  # a process more
    ],
)
def test_serve_ends_cleanly(checkpoint: Path, tmp_path: Path, number: int) -> None:
    running = Service(checkpoint, f"shm://{tmp_path}/s.sock", fresh=True)
    before = signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    try:
        running.start()  # under nohup, SIGHUP would stay ignored
    finally:
        signal.signal(number, before)
    assert running.stop(number) == 0
    assert "and lm_head; cpu) on shm://" in running.log
    assert not (tmp_path / "s.sock").exists()
    events = [json.loads(line) for line in running.log.splitlines() if line.startswith('{"')]
    assert any(event["event"] == "listening" for event in events)


def test_limits_reload_while_a_tenant_trains(checkpoint: Path, tmp_path: Path) -> None:
    """SIGHUP: new clients have the new limits, and a client that is connected goes on."""
    config, address = tmp_path / "serve.toml", f"tcp://127.0.0.1:{free_port()}"
    config.write_text("[limits]\ncalls = 7\nrows = 1000")

    def limits() -> Any:
        with raw(address) as line:
            line.send(hello("another"))
            return line.receive()[1][0]["limits"]

    with Service(checkpoint, address, "--config", str(config)) as running:
        assert (limits()["calls"], limits()["rows"]) == (7, 1000)
        with symbiosis.open_model(address) as model:
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
            before = losses(model, 2)
            for text, event in (("[limits]\ncalls = 9", "limits reloaded"), ("calls = 9", "limits not reloaded")):
                config.write_text(text)
                os.kill(running.pid, signal.SIGHUP)
                deadline = time.monotonic() + 20
                while event not in running.log:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                assert (limits()["calls"], limits()["rows"]) == (9, 1 << 20)
            assert losses(model, 2)[-1] < before[0]
        events = [json.loads(line) for line in running.log.splitlines() if line.startswith('{"')]
        assert [event["calls"] for event in events if event["event"] == "limits reloaded"] == ["7 → 9"]
        assert running.stop() == 0


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_data_loader_workers(service: Service, checkpoint: Path, context: str) -> None:
    """Worker processes make batches while the model is open."""

    def losses(model: Any) -> list[float]:
        torch.manual_seed(0)
        tuned: Any = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
        optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
        found = []
        for batch in DataLoader(Tokens(8), batch_size=2, num_workers=1, multiprocessing_context=context):
            loss = tuned(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected = losses(plain(checkpoint))
    with symbiosis.open_model(service.address) as model:
        assert losses(model) == pytest.approx(expected, rel=1e-5)
