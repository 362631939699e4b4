"""Tokens per second and memory of many adapters that are fine-tuned at once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from statistics import median

import torch

import symbiosis
from symbiosis.bench.jobs import PlainJob, Tenant, now
from symbiosis.bench.models import PRESETS, build, lora, plain_peft
from symbiosis.bench.peak_memory import PeakMemory, check, in_process
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.settings import Settings

GOALS = {
    "throughput_ratio_4": "≥ 1.0 (paper: ahead from 3 clients on)",
    "memory_ratio_8": "",
    "bytes_per_extra_client": "",
}


async def finetune(settings: Settings, *, counts: tuple[int, ...]) -> Report:
    """Measure adapters trained at once against as many plain PEFT jobs in turn; memory in separate processes.

    Raises:
        UsageError: peak memory cannot be measured on this system.
    """
    check(settings.device)
    preset = settings.preset
    report = Report("finetune", preset.name, GOALS)
    await _add_throughput(report, settings, counts)
    gc.collect()
    _add_memory(report, settings, counts)
    report.notes.append(
        f"LoRA r8 qkvo, AdamW, batch {preset.batch} × {preset.sequence} tokens, 1 step a round, medians of "
        f"{settings.rounds} rounds; policy {settings.policy}, base layers {settings.base_layers!r}. Weights are not "
        "packed, because no client decodes. Memory: peak of a "
        "process of its own above what the imports alone take; plain jobs are separate processes, so n of them take n "
        "times the memory of one. An extra client takes more than its adapter, gradients, optimizer and activations: "
        "the rest is temporaries of its backward pass, which all tenants of a process may hold at once. On tiny there "
        "is little to share, and many tenants take more than as many jobs; the reason is not known."
    )
    return report


async def _add_throughput(report: Report, settings: Settings, counts: tuple[int, ...]) -> None:
    preset, device = settings.preset, settings.device
    base = settings.base()
    plain = [PlainJob(plain_peft(base, lora()), preset, device, seed) for seed in range(max(counts))]
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(settings.executor(base, packed=False))
        tenants = []
        for seed in range(max(counts)):
            client = await stack.enter_async_context(executor.client(lora()))
            tenants.append(Tenant(client, preset, device, seed))

        async def ours(count: int) -> float:
            executor.reset_statistics()
            start = now(device)
            await asyncio.gather(*(tenant.train() for tenant in tenants[:count]))
            return now(device) - start

        for count in counts:
            jobs = {"plain": partial(_in_turn, plain[:count]), "ours": partial(ours, count)}
            times = await settings.interleaved(f"{count} adapters", jobs)
            tokens = count * preset.batch * preset.sequence
            report.rows.append(
                {
                    "adapters": count,
                    "symbiosis tok/s": tokens / median(times["ours"]),
                    "plain jobs in turn tok/s": tokens / median(times["plain"]),
                    "throughput ratio": ratio(times["plain"], times["ours"]),
                    "mean batch": executor.statistics().mean_batch,
                }
            )
            report.headline[f"throughput_ratio_{count}"] = ratio(times["plain"], times["ours"])


async def _in_turn(jobs: Sequence[PlainJob]) -> float:
    """Return the seconds in which plain jobs train in turn."""
    return sum([await job.train() for job in jobs])


def _add_memory(report: Report, settings: Settings, counts: tuple[int, ...]) -> None:
    model = settings.preset.name, str(settings.device)
    settings.progress("memory: one plain job")
    one = in_process(_plain_memory, *model)
    ours = {}
    for count in counts:
        settings.progress(f"memory: {count} tenants")
        ours[count] = in_process(_tenants_memory, *model, settings.policy, settings.base_layers, count)["peak"]
    for row in report.rows:
        count = row["adapters"]
        row["symbiosis peak MiB"] = ours[count] / 2**20
        row["plain jobs peak MiB"] = one["peak"] * count / 2**20
        row["memory ratio"] = ours[count] / (one["peak"] * count)
        report.headline[f"memory_ratio_{count}"] = row["memory ratio"]
    first, last = min(counts), max(counts)
    if last > first:
        report.headline["bytes_per_extra_client"] = (ours[last] - ours[first]) / (last - first)
    for part in ("adapter", "gradients", "optimizer", "activations"):
        report.headline[f"bytes_{part}"] = one[part]


def _plain_memory(preset_name: str, device_name: str) -> dict[str, float]:
    device = torch.device(device_name)
    watch = _watch(device)
    job = _plain_job(preset_name, device)
    for _ in range(2):
        asyncio.run(job.train())
    peak = watch.peak()
    saved: dict[int, int] = {}
    frozen = {parameter.untyped_storage().data_ptr() for parameter in job.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = job.model(**job.batch).loss
    activations = sum(saved.values())
    loss.backward()
    trainable = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
    state = [value for states in job.optimizer.state.values() for value in states.values() if torch.is_tensor(value)]
    return {
        "peak": peak,
        "adapter": sum(parameter.nbytes for parameter in trainable),
        "gradients": sum(parameter.grad.nbytes for parameter in trainable if parameter.grad is not None),
        "optimizer": sum(value.nbytes for value in state),
        "activations": activations,
    }


def _tenants_memory(preset_name: str, device_name: str, policy: str, base_layers: str, count: int) -> dict[str, float]:
    preset, device = PRESETS[preset_name], torch.device(device_name)
    watch = _watch(device)
    base = build(preset, device)

    async def tenant(executor: symbiosis.Executor, seed: int) -> None:
        async with executor.client(lora()) as client:
            ours = Tenant(client, preset, device, seed)
            for _ in range(2):
                await ours.train()

    async def main() -> None:
        async with symbiosis.Executor(base, policy=policy, base_layers=base_layers) as executor:
            await asyncio.gather(*(tenant(executor, seed) for seed in range(count)))

    asyncio.run(main())
    return {"peak": watch.peak()}


def _plain_job(preset_name: str, device: torch.device) -> PlainJob:
    preset = PRESETS[preset_name]
    return PlainJob(plain_peft(build(preset, device), lora()), preset, device)


def _watch(device: torch.device) -> PeakMemory:
    """Measure peak memory beyond that of all imports and thread pools."""
    asyncio.run(_plain_job("tiny", device).train())
    return PeakMemory(device)
