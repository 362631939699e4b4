"""Costs of a privacy scheme, measured next to a client with bare rows of the same executor."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

import torch

from symbiosis.client.client import Client
from symbiosis.core.privacy import Privacy
from symbiosis.host import Executor
from symbiosis.privacy.audit.workload import Workload, generate, give_adapter, lora, text


@dataclass
class SchemeCosts:
    """Costs of a scheme relative to bare rows. Times are medians of pairs of measurements; NaN if not measured."""

    decode: float
    """Ratio of times to generate a text."""
    train: float
    """Ratio of times of a training step."""
    traffic: float
    """Ratio of bytes to and from executors over the whole workload."""
    logits: float
    """Largest error of a logit, relative to the largest logit."""
    gradients: float
    """Largest error of a gradient of the adapter, relative to the largest gradient."""


async def measure_costs(
    privacy: Privacy | None, plan: Workload, executor: Executor, rounds: int, traffic: float
) -> SchemeCosts:
    """Measure the costs of a scheme, with ``rounds`` pairs of timings. The caller knows the ratio of ``traffic``."""
    async with (
        executor.client(lora(plan), seed=plan.seed) as bare,
        executor.client(lora(plan), privacy=privacy, seed=plan.seed) as masked,
    ):
        (logits, gradients), (masked_logits, masked_gradients) = [
            await _results(client, plan) for client in (bare, masked)
        ]
        return SchemeCosts(
            await _ratio(_decode, bare, masked, plan, rounds),
            await _ratio(_train, bare, masked, plan, rounds),
            traffic,
            relative_error(masked_logits, logits),
            relative_error(masked_gradients, gradients),
        )


async def _results(client: Client, plan: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and the adapter's gradients of a batch."""
    give_adapter(client.model, plan)
    ids = text(plan, 4, 5)
    await client.forward(input_ids=ids)  # the client learns which layers are siblings, so that shapes are equal
    output = await client.forward(input_ids=ids, labels=ids)
    await client.backward(output.loss)
    parameters = [parameter for parameter in client.model.parameters() if parameter.requires_grad]
    gradients = torch.cat([parameter.grad.flatten() for parameter in parameters])
    client.model.zero_grad()
    return output.logits.detach(), gradients


async def _ratio(
    work: Callable[[Client, Workload], Awaitable[None]], bare: Client, masked: Client, plan: Workload, rounds: int
) -> float:
    """Return the median ratio of times of masked and bare work, after one round that warms up; NaN without rounds."""
    ratios = []
    for _ in range(rounds + 1 if rounds else 0):
        seconds = []
        for client in (bare, masked):
            started = time.perf_counter()
            await work(client, plan)
            seconds.append(time.perf_counter() - started)
        ratios.append(seconds[1] / seconds[0])
    return median(ratios[1:]) if rounds else math.nan


async def _decode(client: Client, plan: Workload) -> None:
    await generate(client, text(plan, 1, 6)[0], 4 * plan.new_tokens)


async def _train(client: Client, plan: Workload) -> None:
    ids = text(plan, 8, 7)
    optimizer = torch.optim.SGD([parameter for parameter in client.model.parameters() if parameter.requires_grad], 0.0)
    for _ in range(4):
        await client.train_step({"input_ids": ids, "labels": ids}, optimizer)


def relative_error(masked: torch.Tensor, bare: torch.Tensor) -> float:
    """Return the largest error, relative to the largest number of bare rows' result."""
    return ((masked - bare).abs().max() / bare.abs().max()).item()
