"""Overhead of one client over plain transformers + PEFT: decode step and training step (Symbiosis, Table 2)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from statistics import median

import torch
from peft import LoraConfig, get_peft_model

import symbiosis
from symbiosis.bench.jobs import Decoding, Tenant, adamw, now, random_batch
from symbiosis.bench.models import PAPER_LORA, Preset, lora, plain_peft
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.service import served
from symbiosis.bench.settings import Settings

__all__ = ["overhead"]

GOALS = {
    "inproc": {"decode_ratio": "≤ 1.05 (paper: 1.25 to 1.70)", "train_ratio": "≤ 1.05 (paper: 1.25 to 1.70)"},
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
    all_ratios: dict[str, list[float]] = {"decode": [], "train": []}
    async with _tenants(settings, base, transport) as tenant:
        for name, (rank, modules) in PAPER_LORA.items():
            plain = _Plain(plain_peft(base, lora(rank, modules)), preset, device)
            times: dict[str, tuple[list[float], list[float]]] = {"decode": ([], []), "train": ([], [])}
            async with tenant(lora(rank, modules), preset, device) as ours:
                for turn in range(-1, rounds):
                    settings.says(turn, name)
                    for job in times:
                        pair = await _in_turn(turn, getattr(plain, job), getattr(ours, job))
                        if turn >= 0:  # the first round warms up
                            for measured, seconds in zip(times[job], pair, strict=True):
                                measured.append(seconds)
            del plain, ours
            row: dict[str, object] = {"adapter": name}
            for job, (all_theirs, all_ours) in times.items():
                scale = preset.decode_steps if job == "decode" else 1
                row[f"{job} plain ms"] = median(all_theirs) / scale * 1e3
                row[f"{job} symbiosis ms"] = median(all_ours) / scale * 1e3
                row[f"{job} ratio"] = ratio(all_ours, all_theirs)
                all_ratios[job] += [mine / other for mine, other in zip(all_ours, all_theirs, strict=True)]
            report.rows.append(row)
    for job, ratios in all_ratios.items():
        report.headline[f"{job}_ratio"] = median(ratios)
        report.headline[f"{job}_ratio_worst_adapter"] = max(float(row[f"{job} ratio"]) for row in report.rows)
    report.notes.append(
        f"Ratios are medians over {rounds} rounds of pairs measured next to each other, each first in "
        f"every other round; headlines are over all "
        f"adapters. Decode: 1 sequence, {preset.prompt}-token prompt; training: batch {preset.batch} × "
        f"{preset.sequence} tokens, AdamW; policy {settings.policy}, base layers "
        f"{settings.base_layers!r}, {transport}://."
    )
    return report


class _Plain:
    """Synchronous code: plain PEFT, or a model whose base another process serves."""

    def __init__(self, model: torch.nn.Module, preset: Preset, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._steps = preset.decode_steps
        self._decoding = Decoding(model, preset, device)
        self._optimizer = adamw(model)
        self._batch = random_batch(preset, device)

    async def decode(self) -> float:
        """Return the seconds of the preset's decode steps."""
        self._model.eval()
        self._decoding.prefill()
        start = now(self._device)
        self._decoding.steps(self._steps)
        return now(self._device) - start

    async def train(self) -> float:
        """Return the seconds of a training step."""
        self._model.train()
        start = now(self._device)
        self._model(**self._batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return now(self._device) - start


Open = Callable[[LoraConfig, Preset, torch.device], AbstractAsyncContextManager[_Plain | Tenant]]


@asynccontextmanager
async def _tenants(settings: Settings, base: torch.nn.Module, transport: str) -> AsyncIterator[Open]:
    """Yield a function that opens a tenant of an executor in this process or in another one."""
    if transport == "inproc":
        async with settings.executor(base) as executor:

            @asynccontextmanager
            async def here(config: LoraConfig, preset: Preset, device: torch.device) -> AsyncIterator[_Plain | Tenant]:
                async with executor.client(config) as client:
                    yield Tenant(client, preset, device)

            yield here
    else:
        with served(settings.preset.name, transport, settings.policy, settings.base_layers) as address:

            @asynccontextmanager
            async def there(config: LoraConfig, preset: Preset, device: torch.device) -> AsyncIterator[_Plain | Tenant]:
                with symbiosis.open_model(address) as model:
                    yield _Plain(get_peft_model(model, config), preset, device)

            yield there


async def _in_turn(
    turn: int, plain: Callable[[], Awaitable[float]], ours: Callable[[], Awaitable[float]]
) -> tuple[float, float]:
    """Return the seconds of both. The order alternates, because the first job finds other caches."""
    if turn % 2:
        mine = await ours()
        return await plain(), mine
    return await plain(), await ours()
