"""Mixed requests: a small one beside a large one, and inference beside fine-tuning."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median

import torch

from symbiosis import Client, Executor
from symbiosis.bench.jobs import Decoding, Tenant, Tuning, end, now, random_batch
from symbiosis.bench.models import lora
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.settings import Settings

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
    alone, beside, large = zip(*await _small(settings, base), strict=True)
    report.rows += [
        {"what": "small request alone", "ms": 1e3 * median(alone), "tokens/s": ""},
        {"what": f"small request beside one of {LARGE} tokens", "ms": 1e3 * median(beside), "tokens/s": ""},
        {"what": f"that of {LARGE} tokens", "ms": 1e3 * median(large), "tokens/s": ""},
    ]
    report.headline["small_request_slowdown"] = ratio(beside, alone)
    found = await _tuning(settings, base)
    for what, pairs in found.items():
        ms, rates = zip(*pairs, strict=True)
        report.rows.append({"what": what, "ms": median(ms), "tokens/s": f"{median(rates):.1f}"})
    (eight_ms, eight_rates), (six_ms, six_rates) = (zip(*pairs, strict=True) for pairs in found.values())
    report.headline["latency_with_finetuning"] = ratio(six_ms, eight_ms)
    report.headline["throughput_with_finetuning"] = ratio(six_rates, eight_rates)
    report.notes.append(
        f"ms: of the small request, its answer; of decoding clients, a token. Medians of {settings.rounds} rounds, "
        f"interleaved; base layers {settings.base_layers!r}; policy {settings.policy or 'co-serving'}. Fine-tuning: "
        f"batches of {preset.batch} x {preset.sequence} tokens."
    )
    return report


async def _small(settings: Settings, base: torch.nn.Module) -> list[tuple[float, float, float]]:
    """Return the seconds of the small request alone and beside the large one, and of the large one, for each round."""

    async def timed(client: Client, length: int) -> float:
        job = Decoding(client.model, settings.preset, settings.device, length=length)
        began = now(settings.device)
        await client.run(job.prefill)
        return now(settings.device) - began

    spec = settings.policy
    if not spec:
        async with settings.executor(base) as executor, executor.client(lora()) as client:
            spec = f"co-serving:slo_ms={1.4e3 * median([await timed(client, 1) for _ in range(5)]):.3f}"
    async with (
        settings.executor(base, spec) as executor,
        executor.client(lora(), name="small") as small,
        executor.client(lora(), name="large") as big,
    ):

        async def one_round() -> tuple[float, float, float]:
            await timed(small, 1)
            alone = await timed(small, 1)
            large = asyncio.create_task(timed(big, LARGE))
            await asyncio.sleep(0.05)  # until it is running
            beside = await timed(small, 1)
            return alone, beside, await large

        return (await settings.interleaved("small request", {"alone and beside a large one": one_round})).popitem()[1]


async def _tuning(settings: Settings, base: torch.nn.Module) -> dict[str, list[tuple[float, float]]]:
    """Return milliseconds per token and the tokens/s of all clients, for each round, without fine-tuning and with."""
    preset = settings.preset
    spec = settings.policy
    if not spec:
        async with AsyncExitStack() as stack:
            tenants = await _open(stack, await stack.enter_async_context(settings.executor(base)), settings)
            found = [await _decode(tenants, settings) for _ in range(2)]
        spec = f"co-serving:slo_ms={1.1e3 * found[-1] / preset.decode_steps:.3f}"
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(settings.executor(base, spec))
        tenants = await _open(stack, executor, settings)
        batch = random_batch(preset, settings.device)
        tuning = [Tuning(executor, tenant.client, batch) for tenant in tenants[:TUNING]]
        settings.says(-1, "fine-tuning")
        for job in tuning:
            await job.warm_up()

        async def decoding() -> tuple[float, float]:
            seconds = await _decode(tenants, settings)
            return 1e3 * seconds / preset.decode_steps, CLIENTS * preset.decode_steps / seconds

        async def with_tuning() -> tuple[float, float]:
            tasks = [asyncio.create_task(job.run()) for job in tuning]
            others = tenants[TUNING:]
            try:
                await asyncio.gather(*(tenant.prefill() for tenant in others))
                executor.reset_statistics()
                seconds = await _steps(others, settings)
                tuned = sum(job.tokens() for job in tuning)
            finally:
                await end(tasks)
            steps = preset.decode_steps
            return 1e3 * seconds / steps, (len(others) * steps + tuned) / seconds

        jobs = {
            f"{CLIENTS} decode": decoding,
            f"{CLIENTS - TUNING} decode, {TUNING} fine-tune": with_tuning,
        }
        return await settings.interleaved("with and without fine-tuning", jobs)


async def _open(stack: AsyncExitStack, executor: Executor, settings: Settings) -> list[Tenant]:
    clients = [await stack.enter_async_context(executor.client(lora())) for _ in range(CLIENTS)]
    return [Tenant(client, settings.preset, settings.device, seed) for seed, client in enumerate(clients)]


async def _steps(tenants: Sequence[Tenant], settings: Settings) -> float:
    """Return the seconds in which all tenants decode the preset's steps."""
    began = now(settings.device)
    await asyncio.gather(*(tenant.steps(settings.preset.decode_steps) for tenant in tenants))
    return now(settings.device) - began


async def _decode(tenants: Sequence[Tenant], settings: Settings) -> float:
    await asyncio.gather(*(tenant.prefill() for tenant in tenants))
    return await _steps(tenants, settings)
