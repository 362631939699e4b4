"""The demo's jobs on one executor, all at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import torch

from symbiosis import Client, Executor, Statistics
from symbiosis.cli.demo.jobs import Footprint, Generation, Plan, Tenant, Training
from symbiosis.cli.demo.memory import Storages, cache_bytes, optimizer_tensors, saved_bytes, storages, total
from symbiosis.errors import UsageError

Watch = Callable[[Executor], Coroutine[Any, Any, None]]
"""Shows the jobs' progress until it is cancelled."""


class Served:
    """What the executor has to report."""

    def __init__(self, statistics: Statistics, seconds: float, base_bytes: int) -> None:
        self.statistics = statistics
        self.seconds = seconds
        """From the first step to the last."""
        self.base_bytes = base_bytes
        """The base model, which there is once."""


async def serve(plan: Plan, watch: Watch) -> Served:
    """Run every job of a plan at once. Fills in the jobs' results.

    Raises:
        UsageError: the model cannot be served.
        SymbiosisError: a tenant failed; the others were ended.
    """
    model = _load(plan)
    base = storages([*model.parameters(), *model.buffers()])
    async with Executor(model, policy=plan.policy) as executor, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(executor, tenant)) for tenant in plan.tenants]
        for tenant, client in zip(plan.tenants, clients, strict=True):
            if tenant.adapter is not None:
                client.load_adapter(tenant.adapter)
        trainers, generators = clients[: len(plan.trainings)], clients[len(plan.trainings) :]
        for training, client in zip(plan.trainings, trainers, strict=True):
            training.before = await _continue(plan, client, training.prompts)
        executor.reset_statistics()
        started = time.monotonic()
        watching = asyncio.create_task(watch(executor))
        try:
            optimizers = await _all_at_once(plan, trainers, generators)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        seconds = time.monotonic() - started
        statistics = executor.statistics()
        for training, client, optimizer in zip(plan.trainings, trainers, optimizers, strict=True):
            training.after = await _continue(plan, client, training.prompts)
            training.memory = await _training_footprint(client, training, optimizer, base)
        for generation, client in zip(plan.generations, generators, strict=True):
            tensors = [*client.model.parameters(), *client.model.buffers()]
            generation.memory = Footprint(adapter=total(tensors, base), activations=generation.cache_bytes)
        return Served(statistics, seconds, sum(base.values()))


def _load(plan: Plan) -> Any:
    """The one base model."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(plan.model, dtype=plan.dtype).to(plan.device)
    except (OSError, ValueError) as error:
        raise UsageError(f"{plan.model} cannot be served as a causal language model: {error}") from error


def _client(executor: Executor, tenant: Tenant) -> Client:
    config = tenant.config() if tenant.config is not None else None
    return executor.client(config, name=tenant.name, seed=tenant.seed)


async def _all_at_once(plan: Plan, trainers: list[Client], generators: list[Client]) -> list[torch.optim.Optimizer]:
    trained = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            training = [
                group.create_task(_train(client, job)) for client, job in zip(trainers, plan.trainings, strict=True)
            ]
            for client, job in zip(generators, plan.generations, strict=True):
                group.create_task(_generate(plan, client, job, trained))
            await asyncio.wait(training)
            trained.set()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the others were cancelled because of it
    return [task.result() for task in training]


# --------------------------------------------------------------------------------------------------------- the tenants


async def _train(client: Client, job: Training) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in client.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=job.learning_rate)
    job.started = time.monotonic()
    for batch in job.batches:
        job.count(await client.train_step(batch, optimizer), batch)
    job.ended = time.monotonic()
    return optimizer


async def _generate(plan: Plan, client: Client, job: Generation, enough: asyncio.Event) -> None:
    """One prompt after another; each at least once, and then until there is enough."""
    job.started = time.monotonic()
    while job.rounds < len(job.prompts) or not enough.is_set():
        number = job.rounds % len(job.prompts)
        ids = plan.encode(job.prompts[number])
        job.current = []
        result = await client.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            streamer=_Counter(job),
            return_dict_in_generate=True,
            **plan.generation_options(),
        )
        job.finished(number, result.sequences[0, ids.shape[1] :].tolist())
        job.cache_bytes = max(job.cache_bytes, cache_bytes(result.past_key_values))
    job.ended = time.monotonic()


class _Counter:
    """A streamer for ``generate`` that shows a tenant's new tokens while they come."""

    def __init__(self, job: Generation) -> None:
        self._job = job
        self._prompt = True

    def put(self, tokens: torch.Tensor) -> None:
        """The prompt first, and then each new token."""
        if not self._prompt:
            self._job.current.extend(tokens.flatten().tolist())
            self._job.tokens += tokens.numel()
        self._prompt = False

    def end(self) -> None:
        """The text is complete."""


async def _continue(plan: Plan, client: Client, prompts: list[str]) -> list[str]:
    texts = []
    for prompt in prompts:
        ids = plan.encode(prompt)
        out = await client.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **plan.generation_options())
        texts.append(plan.decode(out[0, ids.shape[1] :].tolist()))
    return texts


async def _training_footprint(
    client: Client, job: Training, optimizer: torch.optim.Optimizer, base: Storages
) -> Footprint:
    model: Any = client.model
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in job.batches[-1].items()}
    tensors = [*model.parameters(), *model.buffers()]

    def activations() -> int:
        model.train()
        return saved_bytes(lambda: model(**batch).loss, tensors)

    return Footprint(
        adapter=total(tensors, base),
        gradients=total(parameter for parameter in tensors if parameter.requires_grad),
        optimizer=total(optimizer_tensors(optimizer)),
        activations=await client.run(activations),
    )
