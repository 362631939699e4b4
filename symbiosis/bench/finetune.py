"""Tokens per second and memory of many adapters that are fine-tuned at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import sys
from pathlib import Path
from statistics import median

import torch

import symbiosis
from symbiosis.bench.jobs import adamw, now, random_batch
from symbiosis.bench.models import PRESETS, Preset, build, lora, plain_peft
from symbiosis.bench.processes import in_process
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.settings import Settings

__all__ = ["finetune"]

GOALS = {
    "throughput_ratio_4": "≥ 1.0 (paper: ahead from 3 clients on)",
    "memory_ratio_8": "",
    "bytes_per_extra_client": "",
}


async def finetune(settings: Settings, *, counts: tuple[int, ...]) -> Report:
    """Measure adapters trained at once against as many plain PEFT jobs in turn; memory in separate processes."""
    preset = settings.preset
    report = Report("finetune", preset.name, GOALS)
    await _add_throughput(report, settings, counts)
    gc.collect()
    _add_memory(report, settings, counts)
    report.notes.append(
        f"LoRA r8 qkvo, AdamW, batch {preset.batch} × {preset.sequence} tokens, {STEPS} step a round, medians of "
        f"{settings.rounds} rounds; policy {settings.policy}, base layers {settings.base_layers!r}. Memory: peak of a "
        "process of its own above what the imports alone take; plain jobs are separate processes, so n of them take n "
        "times one. An extra "
        "client takes more than its adapter, gradients, optimizer and activations: the rest is temporaries of its "
        "backward pass, which all tenants of a process may hold at once. On tiny there is little to share, "
        "and many tenants take more than as many jobs; the reason is not known."
    )
    return report


async def _add_throughput(report: Report, settings: Settings, counts: tuple[int, ...]) -> None:
    preset, device = settings.preset, settings.device
    base = settings.base()
    most = max(counts)
    plain = [_Plain(base, preset, device, seed) for seed in range(most)]
    async with settings.executor(base) as executor:
        clients = [await executor.client(lora()).open() for _ in range(most)]
        optimizers = [adamw(client.model) for client in clients]
        batches = [random_batch(preset, device, seed) for seed in range(most)]

        async def train(seed: int) -> None:
            for _ in range(STEPS):
                await clients[seed].train_step(batches[seed], optimizers[seed])

        for count in counts:
            times: dict[str, list[float]] = {"plain": [], "ours": []}
            for turn in range(-1, settings.rounds):
                settings.says(turn, f"{count} adapters")
                start = now(device)
                for job in plain[:count]:
                    job.train(STEPS)
                plain_time = now(device) - start
                executor.reset_statistics()
                start = now(device)
                await asyncio.gather(*(train(seed) for seed in range(count)))
                our_time = now(device) - start
                if turn >= 0:
                    times["plain"].append(plain_time)
                    times["ours"].append(our_time)
            tokens = count * STEPS * preset.batch * preset.sequence
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
        for client in clients:
            await client.close()


STEPS = 1


class _Plain:
    """One plain PEFT training job."""

    def __init__(self, base: torch.nn.Module, preset: Preset, device: torch.device, seed: int) -> None:
        self.model = plain_peft(base, lora()).train()
        self._optimizer = adamw(self.model)
        self._batch = random_batch(preset, device, seed)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(**self._batch).loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------------------- memory


def _add_memory(report: Report, settings: Settings, counts: tuple[int, ...]) -> None:
    model = settings.preset.name, str(settings.device)
    settings.progress("memory: one plain job")
    one = in_process(_plain_memory, *model)
    ours = {}
    for count in counts:
        settings.progress(f"memory: {count} tenants")
        ours[count] = in_process(_tenants_memory, *model, settings.policy, settings.base_layers, count)
    for row in report.rows:
        count = row["adapters"]
        row["symbiosis peak MiB"] = ours[count]["peak"] / 2**20
        row["plain jobs peak MiB"] = one["peak"] * count / 2**20
        row["memory ratio"] = ours[count]["peak"] / (one["peak"] * count)
        report.headline[f"memory_ratio_{count}"] = row["memory ratio"]
    first, last = min(counts), max(counts)
    if last > first:
        report.headline["bytes_per_extra_client"] = (ours[last]["peak"] - ours[first]["peak"]) / (last - first)
    for part in ("adapter", "gradients", "optimizer", "activations"):
        report.headline[f"bytes_{part}"] = one[part]


def _plain_memory(preset_name: str, device_name: str) -> dict[str, float]:
    preset, device = PRESETS[preset_name], torch.device(device_name)
    before = _baseline(device)
    job = _Plain(build(preset, device), preset, device, 0)
    job.train(2)
    peak = _peak(device) - before
    saved: dict[int, int] = {}
    frozen = {parameter.untyped_storage().data_ptr() for parameter in job.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = job.model(**job._batch).loss
    activations = sum(saved.values())
    loss.backward()
    trainable = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
    state = [value for states in job._optimizer.state.values() for value in states.values() if torch.is_tensor(value)]
    return {
        "peak": peak,
        "adapter": sum(parameter.nbytes for parameter in trainable),
        "gradients": sum(parameter.grad.nbytes for parameter in trainable if parameter.grad is not None),
        "optimizer": sum(value.nbytes for value in state),
        "activations": activations,
    }


def _tenants_memory(preset_name: str, device_name: str, policy: str, base_layers: str, count: int) -> dict[str, float]:
    preset, device = PRESETS[preset_name], torch.device(device_name)
    before = _baseline(device)
    base = build(preset, device)

    async def tenant(executor: symbiosis.Executor, seed: int) -> None:
        async with executor.client(lora()) as client:
            optimizer = adamw(client.model)
            batch = random_batch(preset, device, seed)
            for _ in range(2):
                await client.train_step(batch, optimizer)

    async def main() -> None:
        async with symbiosis.Executor(base, policy=policy, base_layers=base_layers) as executor:
            await asyncio.gather(*(tenant(executor, seed) for seed in range(count)))

    asyncio.run(main())
    return {"peak": _peak(device) - before}


def _baseline(device: torch.device) -> float:
    """Return the bytes in use after all imports and thread pools; peaks count from there."""
    tiny = build(PRESETS["tiny"], device)
    _Plain(tiny, PRESETS["tiny"], device, 0).train(1)
    del tiny
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts from here
    return _peak(device)


def _peak(device: torch.device) -> float:
    """Return the peak memory since the baseline, in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
