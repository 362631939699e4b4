"""Tokens per second of many clients that decode at once, each with its own adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch

from symbiosis.bench.jobs import Decoding, Tenant, now
from symbiosis.bench.models import lora, plain_peft
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.service import decoding_processes, served
from symbiosis.bench.settings import Settings
from symbiosis.core.registry import make_transport

GOALS = {"speedup_8": "≥ 5 on 1b, then towards 7", "mean_batch_8": "8"}


class _Decoder(Protocol):
    """A tenant, in this process or in its own."""

    async def prefill(self) -> None: ...
    async def steps(self, count: int) -> None: ...


_Counters = Callable[[], tuple[int, int]]
"""Returns the requests and the batches of the executor so far."""


async def serve(settings: Settings, *, counts: tuple[int, ...], transport: str) -> Report:
    """Measure clients that decode at once against plain PEFT jobs in turn, and against PEFT's mixed-adapter batch.

    The mixed-adapter batch (``adapter_names``) has all adapters in one model, in lockstep. Over a ``transport`` other
    than ``inproc``, executor and clients are separate processes; plain jobs run in this one, and there is no mixed
    batch.
    """
    preset, device = settings.preset, settings.device
    here = transport == "inproc"
    report = Report("serve", preset.name, GOALS if here else {}, transport="" if here else transport)
    most = max(counts)
    settings.progress("building models")
    base = settings.base()
    plain = [Decoding(plain_peft(base, lora()), preset, device, seed) for seed in range(most)]
    mixed = _mixed(base, most) if here else None
    async with _tenants(settings, base, transport, most) as (tenants, counters):
        for count in counts:
            jobs = {
                "plain": partial(_plain, settings, plain[:count]),
                "ours": partial(_ours, settings, tenants[:count], counters),
            }
            if mixed is not None:
                names = [f"tenant-{seed}" for seed in range(count)]
                batch = Decoding(mixed, preset, device, rows=count, adapter_names=names)
                jobs["mixed"] = partial(_plain, settings, [batch])
            _add_row(report, settings, count, await settings.interleaved(f"{count} clients", jobs))
    report.notes.append(
        f"Every client {'has' if here else 'is a process with'} its own LoRA (r8, qkvo) and decodes "
        f"{preset.decode_steps} tokens after a {preset.prompt}-token prompt (prefill not timed); medians of "
        f"{settings.rounds} rounds; policy {settings.policy}, base layers {settings.base_layers!r}, {transport}://."
    )
    return report


def _add_row(report: Report, settings: Settings, count: int, results: dict[str, list[tuple[float, float]]]) -> None:
    times = {name: [seconds for seconds, _ in found] for name, found in results.items()}
    tokens = count * settings.preset.decode_steps
    headline = {"speedup": ratio(times["plain"], times["ours"])}
    row = {
        "clients": count,
        "symbiosis tok/s": tokens / median(times["ours"]),
        "plain jobs in turn tok/s": tokens / median(times["plain"]),
    }
    if "mixed" in times:
        row["mixed batch tok/s"] = tokens / median(times["mixed"])
        headline["vs_mixed_batch"] = ratio(times["mixed"], times["ours"])
    headline["mean_batch"] = median(mean_batch for _, mean_batch in results["ours"])
    row |= {name.replace("_", " "): value for name, value in headline.items()}
    row["ms a token and client"] = median(times["ours"]) / settings.preset.decode_steps * 1e3
    report.rows.append(row)
    prefix = f"{report.transport}_" if report.transport else ""
    report.headline |= {f"{prefix}{name}_{count}": value for name, value in headline.items()}


@asynccontextmanager
async def _tenants(
    settings: Settings, base: torch.nn.Module, transport: str, most: int
) -> AsyncIterator[tuple[Sequence[_Decoder], _Counters]]:
    """Yield tenants of one executor, and its counters."""
    preset, device = settings.preset, settings.device
    async with AsyncExitStack() as stack:
        if transport == "inproc":
            executor = await stack.enter_async_context(settings.executor(base))
            clients = [await stack.enter_async_context(executor.client(lora())) for _ in range(most)]

            def counters() -> tuple[int, int]:
                statistics = executor.statistics()
                return statistics.requests, statistics.batches

            yield [Tenant(client, preset, device, seed) for seed, client in enumerate(clients)], counters
        else:
            address = stack.enter_context(served(preset.name, transport, settings.policy, settings.base_layers))
            settings.progress(f"starting the processes of {most} clients")
            processes = await stack.enter_async_context(decoding_processes(preset.name, address, most))
            look = make_transport(address).look

            def counters() -> tuple[int, int]:
                status = look(address).status
                return status["requests"], status["batches"]

            yield processes, counters


async def _plain(settings: Settings, jobs: Sequence[Decoding]) -> tuple[float, float]:
    """Return the seconds in which plain jobs decode in turn, without their prompts, and a mean batch of 1."""
    for job in jobs:
        job.prefill()
    start = now(settings.device)
    for job in jobs:
        job.steps(settings.preset.decode_steps)
    return now(settings.device) - start, 1.0


async def _ours(settings: Settings, tenants: Sequence[_Decoder], counters: _Counters) -> tuple[float, float]:
    """Return the seconds in which tenants decode at once, without their prompts, and their mean batch."""
    await asyncio.gather(*(tenant.prefill() for tenant in tenants))
    requests, batches = counters()
    start = now(settings.device)
    await asyncio.gather(*(tenant.steps(settings.preset.decode_steps) for tenant in tenants))
    seconds = now(settings.device) - start
    requests_after, batches_after = counters()
    return seconds, (requests_after - requests) / (batches_after - batches)


def _mixed(base: torch.nn.Module, count: int) -> Any:
    """Return a plain PEFT model with all adapters loaded, for mixed batches."""
    model: Any = plain_peft(base, lora())
    for seed in range(count):
        model.add_adapter(f"tenant-{seed}", lora())
    return model.eval()
