"""Tokens per second of many clients that decode at once, each with its own adapter."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

import torch

from symbiosis.bench.jobs import Decoding, now
from symbiosis.bench.models import lora, plain_peft
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.service import decoding_processes, served
from symbiosis.bench.settings import Settings
from symbiosis.core.registry import make_transport

__all__ = ["serve"]

GOALS = {"speedup_8": "≥ 5 on 1b, then towards 7", "mean_batch_8": "8"}


async def serve(settings: Settings, *, counts: tuple[int, ...], transport: str) -> Report:
    """Measure clients that decode at once against plain PEFT jobs in turn, and against PEFT's mixed-adapter batch.

    The mixed-adapter batch (``adapter_names``) has all adapters in one model, in lockstep.
    """
    if transport != "inproc":
        return await _serve_processes(settings, counts, transport)
    preset, device, rounds = settings.preset, settings.device, settings.rounds
    base = settings.base()
    report = Report("serve", preset.name, GOALS)
    steps = preset.decode_steps
    most = max(counts)
    settings.progress("building models")
    plain = [Decoding(plain_peft(base, lora()), preset, device, seed) for seed in range(most)]
    mixed_model = _mixed(base, most)
    async with settings.executor(base) as executor:
        clients = [await executor.client(lora()).open() for _ in range(most)]
        ours = [Decoding(client.model, preset, device, seed) for seed, client in enumerate(clients)]
        for count in counts:
            names = [f"tenant-{seed}" for seed in range(count)]
            mixed = Decoding(mixed_model, preset, device, rows=count, adapter_names=names)
            times: dict[str, list[float]] = {"plain": [], "mixed": [], "ours": []}
            mean_batch: list[float] = []
            for turn in range(-1, rounds):
                settings.says(turn, f"{count} clients")
                plain_time = _in_turn(plain[:count], steps, device)
                mixed.prefill()
                start = now(device)
                mixed.steps(steps)
                mixed_time = now(device) - start
                pairs = list(zip(clients, ours, strict=True))[:count]
                await asyncio.gather(*(client.run(job.prefill) for client, job in pairs))
                executor.reset_statistics()
                start = now(device)
                await asyncio.gather(*(client.run(job.steps, steps) for client, job in pairs))
                our_time = now(device) - start
                if turn >= 0:
                    times["plain"].append(plain_time)
                    times["mixed"].append(mixed_time)
                    times["ours"].append(our_time)
                    mean_batch.append(executor.statistics().mean_batch)
            tokens = count * steps
            speedup = ratio(times["plain"], times["ours"])
            report.rows.append(
                {
                    "clients": count,
                    "symbiosis tok/s": tokens / median(times["ours"]),
                    "plain jobs in turn tok/s": tokens / median(times["plain"]),
                    "mixed batch tok/s": tokens / median(times["mixed"]),
                    "speedup": speedup,
                    "vs mixed batch": ratio(times["mixed"], times["ours"]),
                    "mean batch": median(mean_batch),
                    "ms a token and client": median(times["ours"]) / steps * 1e3,
                }
            )
            report.headline[f"speedup_{count}"] = speedup
            report.headline[f"mean_batch_{count}"] = median(mean_batch)
            report.headline[f"vs_mixed_batch_{count}"] = ratio(times["mixed"], times["ours"])
        for client in clients:
            await client.close()
    report.notes.append(
        f"Every client has its own LoRA (r8, qkvo) and decodes {steps} tokens after a {preset.prompt}-token prompt "
        f"(prefill not timed); medians of {rounds} rounds; policy {settings.policy}, base layers "
        f"{settings.base_layers!r}."
    )
    return report


async def _serve_processes(settings: Settings, counts: tuple[int, ...], transport: str) -> Report:
    """Measure the same with executor and clients in separate processes; plain jobs run in this process."""
    preset, device, rounds = settings.preset, settings.device, settings.rounds
    base = settings.base()
    report = Report("serve", preset.name, {}, transport=transport)
    steps = preset.decode_steps
    plain = [Decoding(plain_peft(base, lora()), preset, device, seed) for seed in range(max(counts))]
    with served(preset.name, transport, settings.policy, settings.base_layers) as address:
        look = make_transport(address).look
        for count in counts:
            settings.progress(f"{count} clients: starting their processes")
            times: dict[str, list[float]] = {"plain": [], "ours": []}
            mean_batch: list[float] = []
            async with decoding_processes(preset.name, address, count) as tenants:
                for turn in range(-1, rounds):
                    settings.says(turn, f"{count} clients")
                    plain_time = _in_turn(plain[:count], steps, device)
                    await asyncio.gather(*(tenant.do("prefill") for tenant in tenants))
                    before = look(address).status
                    start = now(device)
                    await asyncio.gather(*(tenant.do(f"steps {steps}") for tenant in tenants))
                    our_time = now(device) - start
                    after = look(address).status
                    if turn >= 0:
                        times["plain"].append(plain_time)
                        times["ours"].append(our_time)
                        mean_batch.append(
                            (after["requests"] - before["requests"]) / (after["batches"] - before["batches"])
                        )
            tokens = count * steps
            speedup = ratio(times["plain"], times["ours"])
            report.rows.append(
                {
                    "clients": count,
                    "symbiosis tok/s": tokens / median(times["ours"]),
                    "plain jobs in turn tok/s": tokens / median(times["plain"]),
                    "speedup": speedup,
                    "mean batch": median(mean_batch),
                    "ms a token and client": median(times["ours"]) / steps * 1e3,
                }
            )
            report.headline[f"{transport}_speedup_{count}"] = speedup
            report.headline[f"{transport}_mean_batch_{count}"] = median(mean_batch)
    report.notes.append(
        f"Every client is a process with its own LoRA (r8, qkvo) that decodes {steps} tokens after a "
        f"{preset.prompt}-token prompt (prefill not timed); medians of {rounds} rounds; policy {settings.policy}, "
        f"base layers {settings.base_layers!r}, {transport}://."
    )
    return report


def _in_turn(jobs: list[Decoding], steps: int, device: torch.device) -> float:
    """Return the seconds in which plain jobs decode in turn, without their prompts."""
    for job in jobs:
        job.prefill()
    start = now(device)
    for job in jobs:
        job.steps(steps)
    return now(device) - start


def _mixed(base: torch.nn.Module, count: int) -> Any:
    """Return a plain PEFT model with all adapters loaded, for mixed batches."""
    model: Any = plain_peft(base, lora())
    for seed in range(count):
        model.add_adapter(f"tenant-{seed}", lora())
    return model.eval()
