"""Overhead of one client over plain transformers + PEFT: decode step and training step (Symbiosis, Table 2)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from statistics import median

import torch
from peft import LoraConfig, get_peft_model

import symbiosis
from symbiosis.bench.jobs import PlainJob, Tenant
from symbiosis.bench.models import PAPER_LORA, lora, plain_peft
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.service import served
from symbiosis.bench.settings import Settings

GOALS = {
    "inproc": {"decode_ratio": "≤ 1.05 (paper: 1.25 to 1.70)", "train_ratio": "≤ 1.03 (paper: 1.25 to 1.70)"},
    "shm": {"decode_ratio": "≤ 1.15", "train_ratio": "≤ 1.10"},
    "tcp": {},
    "dist": {},
}


async def overhead(settings: Settings, *, transport: str) -> Report:
    """Measure one client alone on its executor against plain PEFT, interleaved, for each LoRA of Table 2.

    Over a ``transport`` other than ``inproc`` the executor is a separate process, and the client is synchronous code.
    """
    preset, device, rounds = settings.preset, settings.device, settings.rounds
    settings.progress("building models")
    base = settings.base()
    report = Report("overhead", preset.name, GOALS[transport], transport="" if transport == "inproc" else transport)
    ratios: dict[str, list[float]] = {"decode": [], "train": []}
    async with _tenants(settings, base, transport) as tenant:
        for name, adapter in PAPER_LORA.items():
            plain = PlainJob(plain_peft(base, lora(*adapter)), preset, device)
            async with tenant(lora(*adapter)) as ours:
                jobs = {"decode": (plain.decode, ours.decode), "train": (plain.train, ours.train)}
                seconds = await settings.interleaved(
                    name,
                    {f"{job} {who}": run for job, pair in jobs.items() for who, run in zip(_WHO, pair, strict=True)},
                )
            del plain, ours, jobs
            row: dict[str, object] = {"adapter": name}
            for job in ratios:
                scale = 1e3 / preset.decode_steps if job == "decode" else 1e3
                theirs, mine = (seconds[f"{job} {who}"] for who in _WHO)
                row[f"{job} plain ms"] = median(theirs) * scale
                row[f"{job} symbiosis ms"] = median(mine) * scale
                row[f"{job} ratio"] = ratio(mine, theirs)
                ratios[job] += [ours_s / plain_s for ours_s, plain_s in zip(mine, theirs, strict=True)]
            report.rows.append(row)
    for job in ratios:
        report.headline[f"{job}_ratio"] = median(ratios[job])
        report.headline[f"{job}_ratio_worst_adapter"] = max(float(row[f"{job} ratio"]) for row in report.rows)
    report.notes.append(
        f"Ratios are medians over {rounds} rounds of pairs measured next to each other, each first in every other "
        f"round; headlines are over all adapters. Decode: 1 sequence, {preset.prompt}-token prompt; training: batch "
        f"{preset.batch} × {preset.sequence} tokens, AdamW; policy {settings.policy}, base layers "
        f"{settings.base_layers!r}, {transport}://."
    )
    return report


_WHO = ("plain", "symbiosis")
_Open = Callable[[LoraConfig], AbstractAsyncContextManager[PlainJob | Tenant]]


@asynccontextmanager
async def _tenants(settings: Settings, base: torch.nn.Module, transport: str) -> AsyncIterator[_Open]:
    """Yield a function that opens a tenant of an executor in this process or in another one."""
    preset, device = settings.preset, settings.device
    if transport == "inproc":
        async with settings.executor(base) as executor:

            @asynccontextmanager
            async def here(config: LoraConfig) -> AsyncIterator[PlainJob | Tenant]:
                async with executor.client(config) as client:
                    yield Tenant(client, preset, device)

            yield here
    else:
        with served(preset.name, transport, settings.policy, settings.base_layers) as service:

            @asynccontextmanager
            async def there(config: LoraConfig) -> AsyncIterator[PlainJob | Tenant]:
                with symbiosis.open_model(service.address) as model:
                    yield PlainJob(get_peft_model(model, config), preset, device)

            yield there
