"""The four tenants' jobs: on one executor at once, and with plain transformers and PEFT in turn."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import get_peft_config, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM

from symbiosis import Executor
from symbiosis.cli.demo.base_model import Batch, make_batches
from symbiosis.terminal.top import between, fitted, read, screen, view

STEPS, BATCH, LENGTH = 40, 2, 48
"""Training steps of each tenant, sequences in a batch, and tokens in a sequence."""
NEW_TOKENS = 64
WATCH_S = 1.0
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": "all-linear"}
RSLORA = {"peft_type": "LORA", "r": 32, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
PREFIX = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 16}
TENANTS: list[tuple[str, str, dict[str, Any], str, float, list[str]]] = [
    # At twice the rate, differences from rounding grow to 1e-3 if the base model had time for few training steps.
    ("alice", "LoRA", LORA, "turtle", 1.5e-3, ["Move the turtle", "Return the"]),
    ("bob", "IA3", {"peft_type": "IA3"}, "_pydecimal", 3e-2, ["Returns the", ">>> ExtendedContext"]),
    ("carol", "rsLoRA", RSLORA, "tkinter", 3e-3, ["Return the", "Set the"]),
    ("dave", "prefix tuning", PREFIX, "argparse", 1e-1, ["The argument", "Return"]),
]
"""Name, PEFT method, its options, module whose docstrings the tenant learns from, learning rate, and two prompts."""
PROMPTS = ["A list is", "A function is", 'The "with" statement', "When an exception is raised"]
"""Further prompts of every tenant."""

Report = Callable[["DemoJob", "JobResult"], None]
"""Called after each training step and each text."""


@dataclass
class JobResult:
    """What a job gave, in one of the two ways. Texts are token ids and include their prompts."""

    before: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    """Times in seconds at which it began, began to train, ended training, and ended."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes that the job needs beside the base model: adapter, gradients, optimizer, activations."""


@dataclass
class DemoJob:
    """Generates texts, trains an adapter with AdamW, and generates the texts again."""

    name: str
    method: str
    options: dict[str, Any]
    learns: str
    rate: float
    batches: list[Batch]
    prompts: list[Any]
    seed: int
    shared: JobResult = field(default_factory=JobResult)
    plain: JobResult = field(default_factory=JobResult)
    gaps: list[float] = field(default_factory=list)
    """For each text, by how much plain PEFT prefers its first token that differs; 0 if the texts are equal."""

    @property
    def tokens(self) -> int:
        """Tokens trained on and generated."""
        trained = sum(batch["input_ids"].numel() for batch in self.batches)
        prompts = sum(len(prompt["input_ids"][0]) for prompt in self.prompts)
        return trained + sum(map(len, self.plain.before + self.plain.after)) - 2 * prompts

    @property
    def difference(self) -> float:
        """Largest relative difference of a loss from plain PEFT's; infinite if a loss is no number."""
        pairs = zip(self.shared.losses, self.plain.losses, strict=True)
        differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
        return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _docstrings(module: str) -> list[str]:
    """Return the docstrings in a module's source, or the topics of ``help()`` if the module is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None:  # some Linux distributions package tkinter and turtle apart from Python
        return list(topics.values())
    nodes = ast.walk(ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8")))
    found = [ast.get_docstring(node) for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return list(filter(None, found))


def make_jobs(tokenizer: Any, seed: int) -> list[DemoJob]:
    """Return the jobs of the four tenants."""
    jobs = []
    for number, (name, method, options, module, rate, own) in enumerate(TENANTS, seed):
        batches = make_batches(_docstrings(module), tokenizer, steps=STEPS, size=BATCH, length=LENGTH, seed=number)
        prompts = [tokenizer(text, return_tensors="pt") for text in own + PROMPTS]
        options = {"task_type": "CAUSAL_LM", **options}
        jobs.append(
            DemoJob(name, method, options, f"docstrings of {module.strip('_')}", rate, batches, prompts, number)
        )
    return jobs


async def run_shared(
    folder: Path, policy: str, jobs: list[DemoJob], report: Report, watch: Console | None = None
) -> tuple[int, float]:
    """Run all jobs at once on one executor. Return the bytes of the base model, and the mean requests of a batch.

    The console ``watch`` shows what the executor does.
    """
    async with Executor.from_pretrained(folder, policy=policy) as executor:
        watching = asyncio.create_task(_watch(executor, watch)) if watch else None
        all_open = asyncio.Barrier(len(jobs))
        sizes = await asyncio.gather(*(_run_client(executor, job, all_open, report) for job in jobs))
        if watching:
            watching.cancel()
        return max(sizes), executor.statistics().mean_batch


async def _watch(executor: Executor, out: Console) -> None:
    before = None
    with screen(out) as show:
        while True:
            await asyncio.sleep(WATCH_S)
            now = read(executor.status())
            past = between(now, before)
            show(fitted(past, out, out.height) if out.is_terminal else view(past))
            before = now


async def _run_client(executor: Executor, job: DemoJob, all_open: asyncio.Barrier, report: Report) -> int:
    """Run a job as a client of an executor, once all clients are open. Return the bytes of the base model."""
    async with executor.client(get_peft_config(job.options), name=job.name, seed=job.seed) as client:
        run, model = job.shared, client.model
        await all_open.wait()  # building a client takes as long as decoding many tokens
        await client.run(_write, model, job, run, run.before, report)
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.rate)
        for batch in job.batches:
            run.losses.append(await client.train_step(batch, optimizer))
            report(job, run)
        await client.run(_write, model, job, run, run.after, report)
        run.memory = await client.run(_memory, model, optimizer, job.batches[-1])
        # Weights that are packed for decoding are in memory a second time while clients train.
        return executor.sharing.served + executor.sharing.held + int(executor.status()["unpacked_bytes"])


def run_plain(folder: Path, job: DemoJob, report: Report) -> int:
    """Run a job on a base model of its own, with nothing of symbiosis. Return the bytes of that model."""
    base = AutoModelForCausalLM.from_pretrained(folder)
    size: int = base.get_memory_footprint()
    torch.manual_seed(job.seed)
    run, model = job.plain, get_peft_model(base, get_peft_config(job.options))
    _write(model, job, run, run.before, report)
    job.gaps = [_gap(model, *texts) for texts in zip(job.shared.before, run.before, strict=True)]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.rate)
    for batch in job.batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        report(job, run)
    _write(model, job, run, run.after, report)
    job.gaps += [_gap(model, *texts) for texts in zip(job.shared.after, run.after, strict=True)]
    run.memory = _memory(model, optimizer, job.batches[-1])
    return size


def _write(model: Any, job: DemoJob, run: JobResult, texts: list[list[int]], report: Report) -> None:
    """Generate a text for each prompt."""
    model.eval()
    run.marks.append(time.monotonic())
    for prompt in job.prompts:
        texts.append(model.generate(**prompt, max_new_tokens=NEW_TOKENS, no_repeat_ngram_size=4)[0].tolist())
        report(job, run)
    run.marks.append(time.monotonic())


def _gap(model: Any, ours: list[int], plain: list[int]) -> float:
    """Return, at the first token that differs, the plain model's logit of its own token less that of ours."""
    if ours == plain:
        return 0.0
    differ = [position for position, pair in enumerate(zip(ours, plain, strict=False)) if pair[0] != pair[1]]
    if not differ:
        return math.inf  # one text is longer
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([plain[: differ[0]]])).logits[0, -1]
    return float(logits[plain[differ[0]]] - logits[ours[differ[0]]])


def _memory(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, int]:
    """Return the bytes of a job's tensors beside the base model. Runs a forward pass, as in training."""
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch)
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    adapter = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    state = sum(value.nbytes for values in optimizer.state.values() for value in values.values())
    return {"adapter": adapter, "gradients": adapter, "optimizer": state, "activations": sum(saved.values())}
