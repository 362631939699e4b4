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
TOLERANCE = 1e-3
"""Largest relative difference of two losses that counts as equal."""
TIE = 1e-2
"""Largest difference of two tokens' logits at which either may follow."""

WATCH_S = 1.0
"""Seconds between two looks at the executor."""

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

    def mark(self) -> None:
        """Note that a part of the job begins or ends now."""
        self.marks.append(time.monotonic())


@dataclass
class Job:
    """Generates texts, trains an adapter with AdamW, and generates the texts again."""

    name: str
    method: str
    """Name of the PEFT method in tables."""
    config: Callable[[], Any]
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
    from peft import IA3Config, LoraConfig, PrefixTuningConfig

    def lora() -> Any:
        return LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear")

    def rslora() -> Any:
        return LoraConfig(task_type="CAUSAL_LM", r=32, use_rslora=True, target_modules=["q_proj", "v_proj"])

    def ia3() -> Any:
        return IA3Config(task_type="CAUSAL_LM")

    def prefix() -> Any:
        return PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=16)

    plans = [
        ("alice", "LoRA", lora, "turtle", 3e-3, ["Move the turtle", "Return the"]),
        ("bob", "IA3", ia3, "_pydecimal", 3e-2, ["Returns the", ">>> ExtendedContext"]),
        ("carol", "rsLoRA", rslora, "tkinter", 3e-3, ["Return the", "Set the"]),
        ("dave", "prefix tuning", prefix, "argparse", 1e-1, ["The argument", "Return"]),
    ]
    jobs = []
    for number, (name, method, config, module, rate, own) in enumerate(plans, seed):
        documents = docstrings(module) or topics()
        batches = make_batches(documents, tokenizer, steps=STEPS, size=BATCH, length=LENGTH, seed=number)
        texts = [*own, "A list is", 'The "with" statement', "When an exception is raised"]
        prompts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        jobs.append(Job(name, method, config, f"docstrings of {module.strip('_')}", rate, batches, prompts, number))
    return jobs


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


async def _work(client: Client, job: Job, report: Report) -> None:
    run, model = job.shared, client.model
    run.mark()

    async def write(texts: list[list[int]]) -> None:
        for prompt in job.prompts:
            texts.append((await client.generate(input_ids=prompt, **_options(prompt)))[0].tolist())
            report(job, run)

    await write(run.before)
    run.mark()
    optimizer = torch.optim.AdamW(_trainable(model), lr=job.rate)
    for batch in job.batches:
        run.losses.append(await client.train_step(batch, optimizer))
        report(job, run)
    run.mark()
    await write(run.after)
    run.mark()
    run.memory = await client.run(_memory, model, optimizer, job.batches[-1])


def run_plain(folder: Path, job: Job, report: Report) -> int:
    """Run a job on a base model of its own, with nothing of symbiosis. Return the bytes of that model."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder)
    size = sum(_storages([*base.parameters(), *base.buffers()]).values())
    torch.manual_seed(job.seed)
    run, model = job.plain, get_peft_model(base, job.config())
    run.mark()

    def write(texts: list[list[int]]) -> None:
        for prompt in job.prompts:
            texts.append(model.generate(input_ids=prompt, **_options(prompt))[0].tolist())
            report(job, run)

    model.eval()
    write(run.before)
    run.mark()
    job.gaps += [_gap(model, *pair) for pair in zip(job.shared.before, run.before, strict=True)]
    model.train()
    optimizer = torch.optim.AdamW(_trainable(model), lr=job.rate)
    for batch in job.batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        report(job, run)
    run.mark()
    model.eval()
    write(run.after)
    run.mark()
    job.gaps += [_gap(model, *pair) for pair in zip(job.shared.after, run.after, strict=True)]
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


def _options(prompt: torch.Tensor) -> dict[str, Any]:
    """Return options of ``generate``: greedy, and without loops."""
    return {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "no_repeat_ngram_size": 4,
        "pad_token_id": 0,
    }


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _memory(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, int]:
    """Return the bytes of a job's tensors beside the base model. Runs a forward pass, as in training."""
    state = [value for values in optimizer.state.values() for value in values.values()]
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
    adapter = sum(_storages(_trainable(model)).values())
    optimizer_state = sum(_storages(state).values())
    return {"adapter": adapter, "gradients": adapter, "optimizer": optimizer_state, "activations": activations}


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage behind some tensors, by its address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
