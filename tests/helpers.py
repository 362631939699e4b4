"""Helpers of several test files: PEFT configurations, batches, background tenants, Hypothesis profiles."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from click.testing import Result
from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig
from torch import nn
from typer.testing import CliRunner

import symbiosis
from symbiosis.cli.commands import app
from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Key, Pass
from symbiosis.core.scheduler import WaitUntil
from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.executor.packing import pack
from symbiosis.simulation import Cost, Done, Simulation, finetune, generate
from symbiosis.testing import Comparison, Job, Outcome, PolicyConformance, World

T = TypeVar("T")
CAUSAL = "CAUSAL_LM"
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")
"""Name of the Hypothesis profile: ``fast``, or ``thorough`` for all examples. Both check the same properties."""


def examples(thorough: int, *, profile: str = PROFILE) -> int:
    """Return the number of examples of a property: ``thorough``, or a quarter of it in the fast profile."""
    return thorough if profile == "thorough" else max(thorough // 4, 1)


class Conformance(PolicyConformance):
    """The conformance kit with as many scripts as the Hypothesis profile allows."""

    pytestmark = pytest.mark.hypothesis
    max_examples = examples(PolicyConformance.max_examples)
    steps = PolicyConformance.steps if PROFILE == "thorough" else 30


def lora(architecture: str = "llama", **options: Any) -> LoraConfig:
    """Return LoRA for every linear layer of the blocks, with dropout, and with B ≠ 0 so that it has an effect from the
    start.
    """
    defaults = {"r": 4, "init_lora_weights": False, "lora_dropout": 0.1, "target_modules": "all-linear"}
    return LoraConfig(task_type=CAUSAL, fan_in_fan_out=architecture == "gpt2", **{**defaults, **options})


def ia3(architecture: str = "llama", **options: Any) -> IA3Config:
    return IA3Config(task_type=CAUSAL, init_ia3_weights=False, fan_in_fan_out=architecture == "gpt2", **options)


def prefix(architecture: str = "llama", **options: Any) -> PrefixTuningConfig:
    return PrefixTuningConfig(task_type=CAUSAL, **{"num_virtual_tokens": 3, **options})


METHODS = {"lora": lora, "ia3": ia3, "prefix": prefix}

F0 = Key((0,), Pass.FORWARD)
"""The first layer's forward pass."""

SHORT = Job(steps=5, new_tokens=4)
"""A short job for tests of other subjects."""

IDS = torch.arange(3, 21).reshape(2, 9)
"""Token ids [2, 9]."""

BATCH = {"input_ids": IDS, "labels": IDS}


LOGITS = 1e-5
GRADIENTS = 1e-5
TRAINED = 1e-3
"""fp32 tolerances for a tenant among others, relative to the largest element of each tensor. The tolerance of an
adapter after 20 AdamW steps is larger: Adam divides by the size of the gradient, which magnifies differences in small
elements.
"""


def world_of(
    policy: Policy,
    *clients: str,
    max_rows: int = 8,
    layers: int = 4,
    terms: Mapping[str, Terms] | None = None,
    local: bool = False,
) -> World:
    """Return a world with a policy and clients that are all in a walk. ``terms`` has terms by client name."""
    world = World(policy, layers=layers, max_rows=max_rows)
    for client in clients:
        world.join(client, (terms or {}).get(client, NO_TERMS), local=local)
        world.begin_walk(client)
    return world


def run_next(world: World) -> Batch:
    """Run the next batch of a world, in a millisecond."""
    action = world.decide()
    while isinstance(action, WaitUntil):
        world.clock.advance(action.time - world.clock.now)
        action = world.decide()
    assert isinstance(action, Batch), action
    world.clock.advance(1e-3)
    return action


def loaded(policy: Policy, decoding: int, tuning: int, seconds: float) -> tuple[list[Done], list[Done]]:
    """Simulate clients that decode and clients that fine-tune, on a model of 16 layers. Return what each has done."""
    simulation = Simulation(policy, layers=16, cost=Cost(1e-3, 2e-5).of)
    texts, jobs = [Done() for _ in range(decoding)], [Done() for _ in range(tuning)]
    for number, done in enumerate(texts):
        simulation.add(f"text-{number}", generate(16, 64, 10**6, 5e-3, done, 3e-3 * number), 3e-3 * number)
    for number, done in enumerate(jobs):
        simulation.add(f"job-{number}", finetune(16, 512, 20e-3, done))
    simulation.run(seconds)
    return texts, jobs


def assert_close(outcome: Outcome, expected: Outcome) -> None:
    comparison = Comparison.of(outcome, expected)
    assert comparison.worst("logits") <= LOGITS, comparison
    if expected.greedy is not None:
        assert comparison.worst("greedy") == 0, comparison
        assert comparison.worst("sampled") == 0, comparison
    if expected.gradients:
        assert comparison.worst("gradient") <= GRADIENTS, comparison
        assert comparison.worst("losses") <= TRAINED, comparison
        assert comparison.worst("adapter") <= TRAINED, comparison


def losses(model: Any, steps: int, at: int = -1, then: Any = None) -> list[float]:
    """Train, and call ``then`` between forward and backward of one step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(steps):
        loss = model(IDS, labels=IDS).loss
        if step == at:
            then()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adamw(model: torch.nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=lr)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the trainable parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


async def tenant(executor: symbiosis.Executor, config: PeftConfig | None, what: str, stop: asyncio.Event) -> int:
    """Train or generate until told to stop, and return the number of rounds."""
    job = Job(seed=sum(map(ord, what)), length=5, new_tokens=4)
    rounds = 0
    async with executor.client(copy.deepcopy(config)) as client:
        optimizer = adamw(client.model) if what == "train" else None
        while not stop.is_set():
            rounds += 1
            if optimizer is None:
                await client.generate(**job.prompt(torch.device("cpu")), **job.sampled)
            else:
                await client.train_step(job.batch(rounds, torch.device("cpu")), optimizer)
    return rounds


@contextlib.asynccontextmanager
async def crowd(
    executor: symbiosis.Executor, jobs: Sequence[tuple[PeftConfig | None, str]]
) -> AsyncIterator[Sequence[asyncio.Task[int]]]:
    """Run background tenants during the block, and check that they end without an error."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(tenant(executor, config, what, stop)) for config, what in jobs]
        try:
            yield tasks
        finally:
            stop.set()
    assert all(task.result() > 0 for task in tasks)


async def in_thread(fn: Callable[..., T], *args: Any) -> T:
    """Run a synchronous tenant beside the event loop, with as many torch threads as the calling thread has."""
    threads = torch.get_num_threads()

    def work() -> T:
        torch.set_num_threads(threads)
        return fn(*args)

    return await asyncio.wait_for(asyncio.to_thread(work), 60)


def command(*arguments: str) -> Result:
    """Run the command ``symbiosis`` in this process, which takes seconds less than in a new process."""
    return CliRunner().invoke(app, arguments)


def run_command(*arguments: str, within_s: float = 100, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command ``symbiosis`` in a process of its own, with options of :func:`subprocess.run`."""
    program = [sys.executable, "-m", "symbiosis", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=within_s, check=False, **options)


async def check_ends_when_cancelled(measure: Callable[[Callable[[str], None]], Coroutine[Any, Any, object]]) -> None:
    """Cancel a measurement, made from a function that shows progress, when it first shows some. It must end then."""
    told: list[str] = []

    def progress(text: str) -> None:
        told.append(text)
        task.cancel()

    task = asyncio.ensure_future(measure(progress))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(told) == 1


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(0.01)


async def restart(address: str, executors: list[symbiosis.Executor], job: asyncio.Future[Any], **options: Any) -> None:
    """Close each executor after some work and start the next one on the same port."""
    for old, new in itertools.pairwise(executors):
        await until(lambda old=old: old.statistics().requests > 50 or job.done())
        await old.close()
        await asyncio.sleep(0.05)
        await new.start()
        await new.listen(address, **options)


HANGS = """
import sys, time, torch, symbiosis
with symbiosis.open_model(sys.argv[1]) as model:
    model.base_model.layers[0].register_forward_hook(lambda *_: (print("there", flush=True), time.sleep(600)))
    model(torch.arange(3, 21).reshape(2, 9))
"""
"""Program of a tenant that stops in the middle of a walk."""


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def packs_bf16() -> bool:
    """Return whether weights in bf16 are packed on this processor: whether it has instructions for such products."""
    module = nn.Linear(256, 512, dtype=torch.bfloat16)
    return pack(module, [module]) == 1
