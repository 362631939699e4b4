"""Memory of a training step over sequence length: whole sequences, gradient checkpointing, windows."""

from __future__ import annotations

import asyncio
import os
import warnings
from dataclasses import replace
from typing import Any

import torch

import symbiosis
from symbiosis.bench.jobs import adamw, random_batch
from symbiosis.bench.models import PRESETS, build, lora, plain_peft
from symbiosis.bench.peak_memory import PeakMemory, check, in_process
from symbiosis.bench.report import Report
from symbiosis.bench.settings import Settings

GOALS = {"activation_ratio": "≤ 0.15 (FlexLLM: 0.13 to 0.15)"}

_Batch = dict[str, torch.Tensor]
_WAYS = ("HF+PEFT", "checkpointing", "symbiosis", "pruned", "windows")


async def memory(settings: Settings, *, lengths: tuple[int, ...], window: int) -> Report:
    """Measure the peak memory of one training step beyond weights, adapter and optimizer, in separate processes.

    Raises:
        UsageError: peak memory cannot be measured on this system.
    """
    preset, device = settings.preset, settings.device
    check(device)
    report = Report("memory", preset.name, GOALS)
    found = {}
    # Processes started from here on return freed memory at once, so that resident memory is memory in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 1024)
    for way in _WAYS:
        settings.progress(way)
        found[way] = in_process(_measure, way, preset.name, str(device), sorted(set(lengths)), window)
    for length in sorted(set(lengths)):
        used = {way: found[way][str(length)] for way in _WAYS}
        report.rows.append(
            {
                "tokens": length,
                **{f"{way} MiB": used[way] / 2**20 for way in _WAYS},
                **{f"{way} ratio": used[way] / used["HF+PEFT"] for way in _WAYS[1:]},
            }
        )
    last = report.rows[-1]
    report.headline["activation_ratio"] = last["windows ratio"]
    for way in ("checkpointing", "symbiosis", "pruned"):
        report.headline[f"activation_ratio_{way}"] = last[f"{way} ratio"]
    report.notes.append(
        "Peak of one training step above what lay in memory before it (weights, adapter, optimizer state): "
        "activations, gradients and temporaries; for symbiosis including the executor in the same process. LoRA r8 "
        "qkvo, AdamW, one sequence, use_cache=False where there are no windows. checkpointing: HF+PEFT with gradient "
        "checkpointing of every block. symbiosis: train_step(batch, optimizer); pruned: with prune=True; windows: with "
        f"window={window}. ratio: to HF+PEFT. On CPUs the peak is the kernel's (VmHWM), with every allocation of 64 "
        "KiB and more mapped on its own, so that what is freed is gone; on CUDA it is torch's."
    )
    return report


def _measure(way: str, preset_name: str, device_name: str, lengths: list[int], window: int) -> dict[str, float]:
    preset, device = replace(PRESETS[preset_name], batch=1), torch.device(device_name)
    # A first, short step makes thread pools, workspaces, sibling groups and the optimizer's state.
    first, *batches = (random_batch(replace(preset, sequence=length), device) for length in (window + 32, *lengths))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses old names of transformers
        if way in ("HF+PEFT", "checkpointing"):
            found = _plain(build(preset, device), first, batches, checkpointing=way == "checkpointing")
        else:
            ours: dict[str, dict[str, Any]] = {
                "symbiosis": {},
                "pruned": {"prune": True},
                "windows": {"window": window},
            }
            found = asyncio.run(_client(build(preset, device), first, batches, ours[way]))
    return {str(length): peak for length, peak in zip(lengths, found, strict=True)}


def _plain(base: torch.nn.Module, first: _Batch, batches: list[_Batch], checkpointing: bool) -> list[float]:
    model = plain_peft(base, lora()).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = adamw(model)

    def step(batch: _Batch) -> None:
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(first)
    found = []
    for batch in batches:
        watch = PeakMemory(batch["labels"].device)
        step(batch)
        found.append(watch.peak())
    return found


async def _client(base: torch.nn.Module, first: _Batch, batches: list[_Batch], options: dict[str, Any]) -> list[float]:
    found = []
    async with symbiosis.Executor(base) as executor, executor.client(lora()) as client:
        optimizer = adamw(client.model)
        await client.train_step(first, optimizer, **options)
        for batch in batches:
            watch = PeakMemory(batch["labels"].device)
            await client.train_step(
                batch if "window" in options else {**batch, "use_cache": False}, optimizer, **options
            )
            found.append(watch.peak())
    return found
