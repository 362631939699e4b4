"""A tenant that floods the executor, beside three that do not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median

from symbiosis import Executor
from symbiosis.bench.jobs import Tenant, end, now
from symbiosis.bench.models import lora
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.settings import Settings
from symbiosis.core.policy import Policy
from symbiosis.core.registry import make_policy
from symbiosis.policies import Fair, tenant_of

GOALS = {"max_gap_over_bound": "≤ 1"}
FLOOD, POLITE = 12, 3
"""Clients of the flooding tenant; number of tenants with one client each."""
QUANTUM = 2.0
SIBLINGS = 3
"""Most layers of a request: q, k and v."""
OUTPUT_WEIGHT = 2.0
ALONE, WITHOUT, FAIR = "alone", "without", "fair"


async def fairness(settings: Settings) -> Report:
    """Have all clients decode without pause, and compare what tenants were served with the bound of fair sharing.

    The gap is the difference between two tenants' service, as ``fair`` counts it, over any interval.
    """
    policy = settings.policy
    base = settings.base()
    async with AsyncExitStack() as stack:

        async def crowd(chosen: Policy) -> _Tenants:
            executor = await stack.enter_async_context(settings.executor(base, chosen, joint="off"))
            names = [*(f"flood/{number}" for number in range(FLOOD)), *(f"polite-{number}" for number in range(POLITE))]
            clients = [await stack.enter_async_context(executor.client(lora(), name=name)) for name in names]
            tenants = [Tenant(client, settings.preset, settings.device, seed) for seed, client in enumerate(clients)]
            return _Tenants(executor, tenants, settings)

        without = await crowd(make_policy(policy))
        fair = await crowd(Fair(make_policy(policy), quantum=QUANTUM, output=OUTPUT_WEIGHT))
        jobs = {ALONE: without.polite_alone, WITHOUT: without.all, FAIR: fair.all}
        played = await settings.interleaved("all decode", jobs)
    times = {what: [seconds for seconds, _ in found] for what, found in played.items()}
    shares = {
        what: [
            served["flood"][-1] / median(served[f"polite-{number}"][-1] for number in range(POLITE))
            for _, served in found
        ]
        for what, found in played.items()
        if what != ALONE
    }
    report = Report("fairness", settings.preset.name, GOALS)
    for what, text in (
        (ALONE, "polite tenants alone"),
        (WITHOUT, f"with the flood, {policy}"),
        (FAIR, f"with the flood, fair+{policy}"),
    ):
        report.rows.append(
            {
                "what": text,
                "ms a token of the polite": 1e3 * median(times[what]),
                "the flood's tokens for one of theirs": median(shares[what]) if what in shares else "",
            }
        )
    bound = _bound(settings, fair.parts)
    report.headline["max_gap_over_bound"] = max(_widest_gap(served) for _, served in played[FAIR]) / bound
    for what in (FAIR, WITHOUT):
        report.headline[f"polite_latency_{what}"] = ratio(times[what], times[ALONE])
        report.headline[f"flood_share_{what}"] = median(shares[what])
    report.notes.append(
        f"A tenant with {FLOOD} clients and {POLITE} with one each, all decoding; quantum {QUANTUM:g} tokens by "
        f"weight, a generated token counts {OUTPUT_WEIGHT:g}. Medians of {settings.rounds} rounds, the gap is "
        f"the widest of all; policy {policy}, base layers {settings.base_layers!r}."
    )
    return report


class _Tenants:
    """The clients of all tenants on one executor."""

    def __init__(self, executor: Executor, tenants: list[Tenant], settings: Settings) -> None:
        self.parts = executor.engine.scheduler.parts
        self._executor = executor
        self._flood, self._polite = tenants[:FLOOD], tenants[FLOOD:]
        self._settings = settings

    async def polite_alone(self) -> tuple[float, dict[str, list[float]]]:
        """Have the polite tenants decode; see :meth:`all`."""
        return await self._decode([])

    async def all(self) -> tuple[float, dict[str, list[float]]]:
        """Have all clients decode until the polite tenants have their tokens.

        Return the seconds per token of the polite tenants; and, by tenant, its weighted tokens at the beginning and
        whenever a polite tenant got a token. If the policy does not count them, they follow from the rows of all
        layers.
        """
        return await self._decode(self._flood)

    async def _decode(self, flood: list[Tenant]) -> tuple[float, dict[str, list[float]]]:
        executor, polite, steps = self._executor, self._polite, self._settings.preset.decode_steps
        everyone = [*flood, *polite]
        await asyncio.gather(*(tenant.prefill() for tenant in everyone))
        executor.reset_statistics()
        await polite[0].steps(1)
        requests = executor.statistics().requests  # of one token
        executor.reset_statistics()
        policy = executor.engine.scheduler.policy
        before = dict(policy.service())
        served: dict[str, list[float]] = {tenant_of(tenant.client.name): [0.0] for tenant in everyone}

        def look() -> None:
            tokens = dict.fromkeys(served, 0.0)
            for name, client in executor.statistics().clients.items():
                tokens[tenant_of(name)] += OUTPUT_WEIGHT * client.rows / requests
            counted = policy.service()
            tokens |= {tenant: counted[tenant] - before.get(tenant, 0.0) for tenant in served if tenant in counted}
            for tenant, count in tokens.items():
                served[tenant].append(count)

        async def decode_on(tenant: Tenant) -> None:
            while True:
                await tenant.steps(1)

        tasks = [asyncio.create_task(decode_on(tenant)) for tenant in flood]
        try:
            began = now(self._settings.device)
            await asyncio.gather(*(tenant.steps(steps, look) for tenant in polite))
            seconds = now(self._settings.device) - began
        finally:
            await end(tasks)
        return seconds / steps, served


def _bound(settings: Settings, parts: Sequence[float]) -> float:
    """Return the largest gap that fair sharing allows, in weighted tokens. The last layer is the language model head,
    which reads one row of a prompt."""
    *others, head = parts
    largest = max(max(settings.preset.prompt, OUTPUT_WEIGHT) * SIBLINGS * max(others), OUTPUT_WEIGHT * head)
    return 2 * (QUANTUM + largest)


def _widest_gap(served: dict[str, list[float]]) -> float:
    """Return the largest difference in service between two tenants over any interval."""
    widest = 0.0
    for one, other in itertools.combinations(served.values(), 2):
        gaps = [a - b for a, b in zip(one, other, strict=True)]
        widest = max(widest, max(gaps) - min(gaps))
    return widest
