"""Mixed requests: a small one beside a large one, and inference beside fine-tuning."""

from __future__ import annotations

import asyncio
import time
from statistics import median

import torch

from symbiosis.bench.jobs import Decoding, Tuning, random_batch
from symbiosis.bench.models import lora
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.settings import Settings
from symbiosis.client.client import Client

__all__ = ["mix"]

GOALS = {
    "small_request_slowdown": "≤ 1.5 (paper, vLLM: 12)",
    "latency_with_finetuning": "≤ 1.1",
    "throughput_with_finetuning": "> 1",
}
LARGE = 512
"""Tokens of the large prompt, as in the paper."""
CLIENTS, TUNING = 8, 2
"""Number of clients, and how many of them fine-tune in the second half."""


async def mix(settings: Settings) -> Report:
    """Measure a prompt of one token beside one of 512 (Symbiosis, preprint, table 4), and 8 decoding clients against 6.

    In the latter, 2 further clients fine-tune. The SLO of co-serving is measured first: 1.4 times the small request's
    time alone, and 1.1 times the 8 clients' time per token.
    """
    preset = settings.preset
    report = Report("mix", preset.name, GOALS)
    base = settings.base()
    settings.progress("the small request alone")
    alone, beside, large = await _small(settings, base)
    report.rows += [
        {"what": "small request alone", "ms": 1e3 * median(alone), "tokens/s": ""},
        {"what": f"small request beside one of {LARGE} tokens", "ms": 1e3 * median(beside), "tokens/s": ""},
        {"what": f"that of {LARGE} tokens", "ms": 1e3 * median(large), "tokens/s": ""},
    ]
    report.headline["small_request_slowdown"] = ratio(beside, alone)
    eight, six = await _tuning(settings, base)
    for what, found in ((f"{CLIENTS} decode", eight), (f"{CLIENTS - TUNING} decode, {TUNING} fine-tune", six)):
        report.rows.append(
            {
                "what": what,
                "ms": median(ms for ms, _ in found),
                "tokens/s": f"{median(rate for _, rate in found):.1f}",
            }
        )
    report.headline["latency_with_finetuning"] = ratio([ms for ms, _ in six], [ms for ms, _ in eight])
    report.headline["throughput_with_finetuning"] = ratio([rate for _, rate in six], [rate for _, rate in eight])
    report.notes.append(
        f"ms: of the small request, its answer; of decoding clients, a token. Medians of {settings.rounds} rounds, "
        f"interleaved; base layers {settings.base_layers!r}; policy {settings.policy or 'co-serving'}. Fine-tuning: "
        f"batches of {preset.batch} x {preset.sequence} tokens."
    )
    return report


async def _small(settings: Settings, base: torch.nn.Module) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of the small request alone and beside the large one, and of the large one."""
    preset, device = settings.preset, settings.device
    spec = settings.policy
    if not spec:
        async with settings.executor(base) as executor, executor.client(lora()) as client:
            times = [await _timed(client, Decoding(client.model, preset, device, length=1)) for _ in range(5)]
        spec = f"co-serving:slo_ms={1.4e3 * median(times):.3f}"
    alone, beside, large = [], [], []
    async with (
        settings.executor(base, spec) as executor,
        executor.client(lora(), name="small") as small,
        executor.client(lora(), name="large") as big,
    ):
        for turn in range(-1, settings.rounds):
            settings.says(turn, "small and large")
            await _timed(small, Decoding(small.model, preset, device, length=1))
            first = await _timed(small, Decoding(small.model, preset, device, length=1))
            running = asyncio.create_task(_timed(big, Decoding(big.model, preset, device, length=LARGE)))
            await asyncio.sleep(0.05)  # until it is running
            second = await _timed(small, Decoding(small.model, preset, device, length=1))
            third = await running
            if turn >= 0:
                alone.append(first)
                beside.append(second)
                large.append(third)
    return alone, beside, large


async def _timed(client: Client, job: Decoding) -> float:
    began = time.perf_counter()
    await client.run(job.prefill)
    return time.perf_counter() - began


async def _tuning(
    settings: Settings, base: torch.nn.Module
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return, per round, seconds per token and all clients' tokens/s: 8 decoding; 6 decoding and 2 fine-tuning."""
    preset, device = settings.preset, settings.device
    steps = preset.decode_steps
    spec = settings.policy
    if not spec:
        async with settings.executor(base) as executor:
            clients = [await executor.client(lora()).open() for _ in range(CLIENTS)]
            found = [await _decode(clients, settings) for _ in range(2)]
            for client in clients:
                await client.close()
        spec = f"co-serving:slo_ms={1.1e3 * found[-1] / steps:.3f}"
    results: tuple[list[tuple[float, float]], list[tuple[float, float]]] = [], []
    async with settings.executor(base, spec) as executor:
        clients = [await executor.client(lora(), name=f"client-{number}").open() for number in range(CLIENTS)]
        batch = random_batch(preset, device)
        tuning = [Tuning(executor, client, batch) for client in clients[:TUNING]]
        settings.says(-1, "with fine-tuning")
        for job in tuning:
            await job.warm_up()
        for turn in range(-1, settings.rounds):
            settings.says(turn, "with fine-tuning")
            seconds = await _decode(clients, settings)
            tasks = [asyncio.create_task(job.run()) for job in tuning]
            jobs = await _prompted(clients[TUNING:], settings)
            executor.reset_statistics()
            mixed = await _steps(clients[TUNING:], jobs, steps)
            tuned = sum(job.tokens() for job in tuning)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if turn >= 0:
                results[0].append((1e3 * seconds / steps, CLIENTS * steps / seconds))
                results[1].append((1e3 * mixed / steps, ((CLIENTS - TUNING) * steps + tuned) / mixed))
        for client in clients:
            await client.close()
    return results


async def _prompted(clients: list[Client], settings: Settings) -> list[Decoding]:
    """Start a text for each client and read its prompt."""
    jobs = [
        Decoding(client.model.eval(), settings.preset, settings.device, seed) for seed, client in enumerate(clients)
    ]
    await asyncio.gather(*(client.run(job.prefill) for client, job in zip(clients, jobs, strict=True)))
    return jobs


async def _steps(clients: list[Client], jobs: list[Decoding], steps: int) -> float:
    """Return the seconds in which all clients decode this many tokens."""
    began = time.perf_counter()
    await asyncio.gather(*(client.run(job.steps, steps) for client, job in zip(clients, jobs, strict=True)))
    return time.perf_counter() - began


async def _decode(clients: list[Client], settings: Settings) -> float:
    return await _steps(clients, await _prompted(clients, settings), settings.preset.decode_steps)
