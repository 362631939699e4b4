"""The four tenants' jobs: on one executor at once, and with plain transformers and PEFT in turn."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from symbiosis import Client, Executor
from symbiosis.cli.demo.texts import Batch, docstrings, make_batches, topics

NEW_TOKENS = 64
"""Length of each generated text."""
STEPS, BATCH, LENGTH = 50, 2, 48
"""Training steps of each tenant, sequences in a batch, and tokens in a sequence."""
WATCH_S = 1.0
"""Seconds between two looks at the executor."""
PLANS: list[tuple[str, str, dict[str, Any], str, float, list[str]]] = [
    ("alice", "LoRA", {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": "all-linear"}, "turtle", 3e-3,
     ["Move the turtle", "Return the"]),
    ("bob", "IA3", {}, "_pydecimal", 3e-2, ["Returns the", ">>> ExtendedContext"]),
    ("carol", "rsLoRA", {"r": 32, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}, "tkinter", 3e-3,
     ["Return the", "Set the"]),
    ("dave", "prefix tuning", {"num_virtual_tokens": 16}, "argparse", 1e-1, ["The argument", "Return"]),
]  # fmt: skip
"""Tenant, PEFT method, its options, module whose docstrings it learns from, learning rate, and prompts."""

Report = Callable[["Job", "Run"], None]
"""Called after each training step and each text."""


@dataclass
class Run:
    """What a job gave, in one of the two ways."""

    before: list[list[int]] = field(default_factory=list)
    """Token ids of the texts before training, prompts included."""
    losses: list[float] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    """Times in seconds at which it began, began to train, ended training, and ended."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes that the job needs beside the base model: adapter, gradients, optimizer, activations."""


@dataclass
class Job:
    """Generates texts, trains an adapter with AdamW, and generates the texts again."""

    name: str
    method: str
    """Name of the PEFT method in tables."""
    options: dict[str, Any]
    """Options of the PEFT method."""
    learns: str
    """Name of the training text in tables."""
    rate: float
    batches: list[Batch]
    prompts: list[torch.Tensor]
    """Token ids [1, tokens] of each prompt."""
    seed: int
    shared: Run = field(default_factory=Run)
    plain: Run = field(default_factory=Run)
    gaps: list[float] = field(default_factory=list)
    """For each text, by how much plain PEFT prefers its first token that differs; 0 if the texts are equal."""

    def config(self) -> Any:
        """Return a new configuration of its PEFT method."""
        import peft

        kinds = {"IA3": peft.IA3Config, "prefix tuning": peft.PrefixTuningConfig}
        return kinds.get(self.method, peft.LoraConfig)(task_type="CAUSAL_LM", **self.options)

    @property
    def tokens(self) -> int:
        """Tokens trained on and generated."""
        trained = sum(batch["input_ids"].numel() for batch in self.batches)
        texts = zip(self.plain.before + self.plain.after, self.prompts * 2, strict=True)
        return trained + sum(len(text) - prompt.shape[1] for text, prompt in texts)

    @property
    def difference(self) -> float:
        """Largest relative difference of a loss from plain PEFT's; infinite if a loss is no number."""
        pairs = zip(self.shared.losses, self.plain.losses, strict=True)
        differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
        return max(differences) if all(map(math.isfinite, differences)) else math.inf


def make_jobs(tokenizer: Any, seed: int) -> list[Job]:
    """Return the jobs of four tenants, each with a PEFT method and a text of its own."""
    jobs = []
    for number, (name, method, options, module, rate, own) in enumerate(PLANS, seed):
        documents = docstrings(module) or topics()
        batches = make_batches(documents, tokenizer, steps=STEPS, size=BATCH, length=LENGTH, seed=number)
        texts = [*own, "A list is", 'The "with" statement', "When an exception is raised"]
        prompts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        jobs.append(Job(name, method, options, f"docstrings of {module.strip('_')}", rate, batches, prompts, number))
    return jobs


def write(model: Any, job: Job, run: Run, report: Report) -> None:
    """Generate the texts, with a client's model as with a plain one."""
    texts = run.after if run.losses else run.before
    model.eval()
    run.marks.append(time.monotonic())
    for prompt in job.prompts:
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        texts.append(model.generate(prompt, do_sample=False, no_repeat_ngram_size=4, **options)[0].tolist())
        if run is job.plain:
            job.gaps.append(_gap(model, (job.shared.before + job.shared.after)[len(job.gaps)], texts[-1]))
        report(job, run)
    run.marks.append(time.monotonic())


def _adamw(model: Any, job: Job) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=job.rate)


async def _work(client: Client, job: Job, report: Report) -> None:
    """Do a job as a client of an executor."""
    run = job.shared
    await client.run(write, client.model, job, run, report)
    optimizer = _adamw(client.model, job)
    for batch in job.batches:
        run.losses.append(await client.train_step(batch, optimizer))
        report(job, run)
    await client.run(write, client.model, job, run, report)
    run.memory = await client.run(_memory, client.model, optimizer, job.batches[-1])


async def run_shared(
    folder: Path, policy: str, jobs: list[Job], report: Report, watch: Callable[[dict[str, Any]], object] | None = None
) -> tuple[int, float]:
    """Run all jobs at once on one executor. Return the bytes of the base model, and the mean requests of a batch.

    Each second, ``watch`` is called with the executor's status.
    """
    async with Executor.from_pretrained(folder, policy=policy) as executor, AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(job.config(), name=job.name, seed=job.seed)) for job in jobs
        ]
        executor.reset_statistics()
        watching = None if watch is None else asyncio.create_task(_watch(executor, watch))
        try:
            async with asyncio.TaskGroup() as group:
                for client, job in zip(clients, jobs, strict=True):
                    group.create_task(_work(client, job, report))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the other jobs were cancelled because of it
        finally:
            if watching is not None:
                watching.cancel()
        # Weights that are packed for decoding are in memory a second time while clients train.
        base = executor.sharing.served + executor.sharing.held + executor.status()["unpacked_bytes"]
        return base, executor.statistics().mean_batch


async def _watch(executor: Executor, watch: Callable[[dict[str, Any]], object]) -> None:
    while True:
        await asyncio.sleep(WATCH_S)
        watch(executor.status())


def run_plain(folder: Path, job: Job, report: Report) -> int:
    """Run a job on a base model of its own, with nothing of symbiosis. Return the bytes of that model."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder)
    size = sum(_storages([*base.parameters(), *base.buffers()]).values())
    torch.manual_seed(job.seed)
    run, model = job.plain, get_peft_model(base, job.config())
    write(model, job, run, report)
    model.train()
    optimizer = _adamw(model, job)
    for batch in job.batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        report(job, run)
    write(model, job, run, report)
    run.memory = _memory(model, optimizer, job.batches[-1])
    return size


def _gap(model: Any, ours: list[int], plain: list[int]) -> float:
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
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).loss  # has to live until the tensors are counted
    mine = {*_storages(model.parameters()), *_storages(model.buffers())}
    activations = sum(size for address, size in _storages(saved).items() if address not in mine)
    del loss
    adapter = sum(_storages(p for p in model.parameters() if p.requires_grad).values())
    state = sum(_storages(value for values in optimizer.state.values() for value in values.values()).values())
    return {"adapter": adapter, "gradients": adapter, "optimizer": state, "activations": activations}


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage behind some tensors, by its address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
