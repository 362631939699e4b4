"""Tokens per second of many clients that decode at once, each with its own adapter."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from symbiosis.bench.jobs import Decoding, Tenant, now
from symbiosis.bench.models import lora, plain_peft
from symbiosis.bench.models import varied as varied_adapter
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.service import TenantProcess, served, tenant_processes
from symbiosis.bench.settings import Settings
from symbiosis.bench.vllm_peer import VllmProcess, vllm_process
from symbiosis.core.registry import make_transport

GOALS = {
    "speedup_8": "≥ 7",
    "speedup_16": "≥ 10",
    "vs_mixed_batch_8": "≥ 1.25",
    "vs_vllm_8": "≥ 1.5",
    "vs_vllm_16": "≥ 1.5",
    "mean_batch_8": "8",
}
VARIED_GOALS = {"varied_speedup_8": "≥ 6"}


_Decoder = Tenant | TenantProcess
_Counters = Callable[[], tuple[int, int]]
"""Returns the requests and the batches of the executor so far."""


async def serve(
    settings: Settings, *, counts: tuple[int, ...], transport: str, modes: tuple[str, ...], varied: bool, vllm: str
) -> Report:
    """Measure clients that decode at once against plain PEFT jobs in turn, and against PEFT's mixed-adapter batch.

    The mixed-adapter batch (``adapter_names``) has all adapters in one model, in lockstep; it knows LoRA alone, so
    there is none for ``varied`` adapters. Over a ``transport`` other than ``inproc``, executor and clients are separate
    processes, so nothing is decoded jointly; plain jobs run in this process, and there is no mixed batch.

    Args:
        settings: model, device, policy and rounds.
        counts: numbers of clients.
        transport: ``inproc``, or a transport between processes.
        modes: of joint decoding; the last one is in the headline.
        varied: adapters of many kinds and prompts of many lengths.
        vllm: Python interpreter of an environment with vLLM, to compare with as well; or empty.
    """
    preset = settings.preset
    here = transport == "inproc"
    goals = (VARIED_GOALS if varied else GOALS) if here else {}
    report = Report("serve", preset.name, goals, transport="" if here else transport)
    most = max(counts)
    settings.progress("building models")
    base = settings.base()
    plain = [
        Decoding(plain_peft(base, _adapter(seed, varied)), preset, settings.device, seed, length=_length(seed, varied))
        for seed in range(most)
    ]
    mixed = _mixed(base, most) if here and not varied else None
    async with AsyncExitStack() as stack:
        peers = await _vllm(stack, settings, vllm, base, plain) if vllm else {}
        ours = {
            mode: await stack.enter_async_context(_tenants(settings, base, transport, most, mode, varied))
            for mode in (modes if here else ("off",))
        }
        for count in counts:
            jobs = {"plain": partial(_plain, settings, plain[:count])}
            for mode, (tenants, counters) in ours.items():
                jobs[mode] = partial(_ours, settings, tenants[:count], counters)
            if mixed is not None:
                names = [f"tenant-{seed}" for seed in range(count)]
                batch = Decoding(mixed, preset, settings.device, rows=count, adapter_names=names)
                jobs["mixed"] = partial(_plain, settings, [batch])
            for name, peer in peers.items():
                jobs[name] = partial(_peer, settings, peer, plain[:count])
            results = await settings.interleaved(f"{count} clients", jobs)
            _add_row(report, settings, count, results, varied)
    has = "an adapter of another kind and a prompt of 8 to 64 tokens" if varied else "its own LoRA (r8, qkvo)"
    report.notes.append(
        f"Every client {'has' if here else 'is a process with'} {has} and decodes {preset.decode_steps} tokens after a "
        f"prompt ({preset.prompt} tokens unless varied, not timed); medians of {settings.rounds} rounds; policy "
        f"{settings.policy}, base layers {settings.base_layers!r}, {transport}://."
    )
    return report


def _adapter(seed: int, varied: bool) -> Any:
    return varied_adapter(seed) if varied else lora()


def _length(seed: int, varied: bool) -> int | None:
    return 8 + 8 * (3 * seed % 8) if varied else None


def _add_row(
    report: Report, settings: Settings, count: int, results: dict[str, list[tuple[float, float]]], varied: bool
) -> None:
    times = {name: [seconds for seconds, _ in found] for name, found in results.items()}
    tokens = count * settings.preset.decode_steps
    peers = [name for name in times if name.startswith("vLLM")]
    modes = [name for name in times if name not in ("plain", "mixed", *peers)]
    row: dict[str, Any] = {"clients": count, "plain jobs in turn tok/s": tokens / median(times["plain"])}
    headline = {}
    for mode in modes:
        row[f"joint {mode} tok/s"] = tokens / median(times[mode])
        headline["speedup" if mode is modes[-1] else f"speedup_{mode}"] = ratio(times["plain"], times[mode])
    if "mixed" in times:
        row["mixed batch tok/s"] = tokens / median(times["mixed"])
        headline["vs_mixed_batch"] = ratio(times["mixed"], times[modes[-1]])
    for name in peers:
        row[f"{name} tok/s"] = tokens / median(times[name])
    if peers:
        headline["vs_vllm"] = min(ratio(times[name], times[modes[-1]]) for name in peers)
    headline["mean_batch"] = median(mean_batch for _, mean_batch in results[modes[-1]])
    row |= {name.replace("_", " "): value for name, value in headline.items()}
    row["ms a token and client"] = median(times[modes[-1]]) / settings.preset.decode_steps * 1e3
    report.rows.append(row)
    prefix = f"{report.transport}_" if report.transport else "varied_" if varied else ""
    report.headline |= {f"{prefix}{name}_{count}": value for name, value in headline.items()}


@asynccontextmanager
async def _tenants(
    settings: Settings, base: torch.nn.Module, transport: str, most: int, mode: str, varied: bool
) -> AsyncIterator[tuple[Sequence[_Decoder], _Counters]]:
    """Yield tenants of one executor, and its counters."""
    preset, device = settings.preset, settings.device
    async with AsyncExitStack() as stack:
        if transport == "inproc":
            executor = await stack.enter_async_context(settings.executor(base, joint=mode))
            clients = [await stack.enter_async_context(executor.client(_adapter(seed, varied))) for seed in range(most)]

            def counters() -> tuple[int, int]:
                statistics = executor.statistics()
                return statistics.requests, statistics.batches

            yield (
                [
                    Tenant(client, preset, device, seed, length=_length(seed, varied))
                    for seed, client in enumerate(clients)
                ],
                counters,
            )
        else:
            address = stack.enter_context(served(preset.name, transport, settings.policy, settings.base_layers)).address
            settings.progress(f"starting the processes of {most} clients")
            processes = await stack.enter_async_context(tenant_processes(preset.name, [[address]] * most))
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


async def _vllm(
    stack: AsyncExitStack, settings: Settings, python: str, base: Any, plain: Sequence[Decoding]
) -> dict[str, VllmProcess]:
    """Start vLLM with the model and the adapters of plain jobs: without compiling the model, and with it."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="symbiosis-")))
    base.save_pretrained(folder / "base")
    adapters = [folder / f"adapter-{seed}" for seed in range(len(plain))]
    for job, adapter in zip(plain, adapters, strict=True):
        job.model.save_pretrained(adapter)
    preset = settings.preset
    options = {
        "dtype": str(preset.dtype).removeprefix("torch."),
        "rank": lora().r,
        "length": preset.prompt + preset.decode_steps + 8,
    }
    peers = {}
    for name, eager in (("vLLM eager", True), ("vLLM compiled", False)):
        settings.progress(f"starting {name}")
        process = vllm_process(python, folder / "base", adapters, **options, eager=eager)
        peers[name] = await stack.enter_async_context(process)
    return peers


async def _peer(settings: Settings, peer: VllmProcess, jobs: Sequence[Decoding]) -> tuple[float, float]:
    """Return the seconds in which vLLM decodes the texts of plain jobs at once, and their number."""
    prompts = [prompt for job in jobs for prompt in job.prompts]
    return await peer.decode(prompts, settings.preset.decode_steps), len(jobs)


def _mixed(base: torch.nn.Module, count: int) -> Any:
    """Return a plain PEFT model with all adapters loaded, for mixed batches."""
    model: Any = plain_peft(base, lora())
    for seed in range(count):
        model.add_adapter(f"tenant-{seed}", lora())
    return model.eval()
