"""A tenant that floods the executor, beside three that do not."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from statistics import median

from symbiosis.bench.jobs import Decoding
from symbiosis.bench.models import lora
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.settings import Settings
from symbiosis.client.client import Client
from symbiosis.core.registry import make_policy
from symbiosis.host import Executor
from symbiosis.policies import Fair
from symbiosis.policies.admission import tenant_of

__all__ = ["fairness"]

GOALS = {"max_gap_over_bound": "≤ 1"}
FLOOD, POLITE = 12, 3
"""Clients of the flooding tenant; number of tenants with one client each."""
QUANTUM = 2.0
SIBLINGS = 3
"""Layers of the largest request: q, k and v."""
OUTPUT_WEIGHT = 2.0


async def fairness(settings: Settings) -> Report:
    """Have all clients decode without pause, and compare what tenants were served with the bound of fair sharing.

    The gap is the difference between two tenants' service, in weighted tokens, over any interval. The bound includes
    requests that were running.
    """
    policy = settings.policy
    report = Report("fairness", settings.preset.name, GOALS)
    base = settings.base()
    names = [*(f"flood/{number}" for number in range(FLOOD)), *(f"polite-{number}" for number in range(POLITE))]
    polite = names[FLOOD:]
    times: dict[str, list[float]] = {"alone": [], "without": [], "fair": []}
    gaps: list[float] = []
    shares: dict[str, list[float]] = {"without": [], "fair": []}
    async with AsyncExitStack() as stack:
        fair = Fair(make_policy(policy), quantum=QUANTUM, output=OUTPUT_WEIGHT)
        crowds: dict[str, tuple[Executor, dict[str, Client]]] = {}
        for what, chosen in (("without", make_policy(policy)), ("fair", fair)):
            executor = await stack.enter_async_context(settings.executor(base, chosen))
            clients = {name: await executor.client(lora(), name=name).open() for name in names}
            crowds[what] = executor, clients
        for turn in range(-1, settings.rounds):
            settings.says(turn, "all decode")
            clients = crowds["without"][1]
            alone = await _decode({name: clients[name] for name in polite}, settings, {}, polite)
            for what, (executor, clients) in crowds.items():
                served: dict[str, list[float]] = {}
                together = await _decode(clients, settings, served, polite, executor)
                if turn >= 0:
                    times[what].append(together)
                    shares[what].append(served["flood"][-1] / median(served[name][-1] for name in polite))
                    if what == "fair":
                        widest = max(_widest(served[a], served[b]) for a, b in itertools.combinations(served, 2))
                        largest = max(settings.preset.prompt, OUTPUT_WEIGHT) * SIBLINGS / len(executor.layers)
                        under_way = 2 * OUTPUT_WEIGHT * (FLOOD + 1) / len(executor.layers)
                        gaps.append(widest / (2 * (QUANTUM + largest) + under_way))
            if turn >= 0:
                times["alone"].append(alone)
        for _, clients in crowds.values():
            for client in clients.values():
                await client.close()
    for what, text in (
        ("alone", "polite tenants alone"),
        ("without", f"with the flood, {policy}"),
        ("fair", f"with the flood, fair+{policy}"),
    ):
        served_ratio = median(shares[what]) if what in shares else ""
        report.rows.append(
            {
                "what": text,
                "ms a token of the polite": 1e3 * median(times[what]),
                "the flood's tokens for one of theirs": served_ratio,
            }
        )
    report.headline["max_gap_over_bound"] = max(gaps)
    report.headline["polite_latency_fair"] = ratio(times["fair"], times["alone"])
    report.headline["polite_latency_without"] = ratio(times["without"], times["alone"])
    report.headline["flood_share_fair"] = median(shares["fair"])
    report.headline["flood_share_without"] = median(shares["without"])
    report.notes.append(
        f"A tenant with {FLOOD} clients and {POLITE} with one each, all decoding; quantum {QUANTUM:g} tokens by "
        f"weight, a generated token counts {OUTPUT_WEIGHT:g}. Medians of {settings.rounds} rounds, the gap is "
        f"the widest of all; policy {policy}, base layers {settings.base_layers!r}."
    )
    return report


async def _decode(
    clients: dict[str, Client],
    settings: Settings,
    served: dict[str, list[float]],
    polite: list[str],
    executor: Executor | None = None,
) -> float:
    """Have all clients decode until the polite tenants have their tokens; return their seconds per token.

    ``served`` receives, by tenant, its weighted tokens at each time at which a polite tenant got a token.
    """
    preset, device = settings.preset, settings.device
    jobs = {name: Decoding(client.model, preset, device, seed) for seed, (name, client) in enumerate(clients.items())}
    await asyncio.gather(*(clients[name].run(job.prefill) for name, job in jobs.items()))
    requests = 1
    if executor is not None:  # requests of one token
        executor.reset_statistics()
        await clients[polite[0]].run(jobs[polite[0]].steps, 1)
        requests = executor.statistics().requests
        executor.reset_statistics()

    def look() -> None:
        if executor is not None:
            now: dict[str, float] = {tenant_of(name): 0.0 for name in clients}
            for name, client in executor.statistics().clients.items():
                now[tenant_of(name)] += OUTPUT_WEIGHT * client.rows / requests
            for tenant, tokens in now.items():
                served.setdefault(tenant, []).append(tokens)

    def decode(job: Decoding) -> None:
        for _ in range(preset.decode_steps):
            job.steps(1)
            look()

    async def flood(name: str) -> None:
        while True:
            await clients[name].run(jobs[name].steps, 1)

    floods = [asyncio.create_task(flood(name)) for name in clients if name not in polite]
    began = time.perf_counter()
    await asyncio.gather(*(clients[name].run(decode, jobs[name]) for name in polite))
    seconds = time.perf_counter() - began
    for task in floods:
        task.cancel()
    await asyncio.gather(*floods, return_exceptions=True)
    return seconds / preset.decode_steps


def _widest(a: list[float], b: list[float]) -> float:
    """Return the largest difference in service between two tenants over any interval."""
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    return max(gaps) - min(gaps)
