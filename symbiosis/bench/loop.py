"""How long the executor's event loop stops: beside prompts and training batches of 2,048 tokens of other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from statistics import median

from symbiosis.bench.report import Report
from symbiosis.bench.service import served, tenant_processes
from symbiosis.bench.settings import Settings

GOALS = {"largest_gap_ms": "≤ 25"}
TOKENS = 2048
"""Length of prompts and of training batches."""


async def loop(settings: Settings, *, transport: str) -> Report:
    """Measure the longest time for which the executor's event loop does nothing but run a callback.

    The executor and each of two tenants have a process of their own. One tenant runs prompts, the other one trains: by
    themselves, and at the same time.
    """
    preset, policy = settings.preset, settings.policy
    report = Report("loop", preset.name, GOALS, transport=transport)
    settings.progress("starting an executor and two tenants")
    with served(preset.name, transport, policy, settings.base_layers) as service:
        async with tenant_processes(preset.name, [[service.address]] * 2, TOKENS) as (prompts, training):

            def gap_beside(*work: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[float]]:
                async def measure() -> float:
                    service.gap_ms()
                    await asyncio.gather(*(one() for one in work))
                    return service.gap_ms()

                return measure

            async def nothing() -> None:
                await asyncio.sleep(2)

            gaps = await settings.interleaved(
                "largest gap",
                {
                    "nothing": gap_beside(nothing),
                    f"a prompt of {TOKENS} tokens": gap_beside(prompts.prefill),
                    f"a training step of {TOKENS} tokens": gap_beside(training.train),
                    "both at once": gap_beside(prompts.prefill, training.train),
                },
            )
    for what, found in gaps.items():
        report.rows.append({"beside": what, "largest gap ms, median": median(found), "largest of all": max(found)})
    report.headline["largest_gap_ms"] = max(max(found) for found in gaps.values())
    report.notes.append(
        f"The largest gap of each of {settings.rounds} rounds, over {transport}://; policy {policy}, base layers "
        f"{settings.base_layers!r}. A task of the executor's event loop sleeps for a millisecond over and over; a gap "
        "is by how much longer it slept. Beside nothing, it shows what the machine itself adds."
    )
    return report
