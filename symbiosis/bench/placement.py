"""One executor, parts of a model on two executors, replicas, and an executor of two shards, each in processes of its
own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import psutil

from symbiosis.bench.placed import machine_costs
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.service import ServingProcess, TenantProcess, served, tenant_processes
from symbiosis.bench.settings import Settings

MiB = 1 << 20
ONE = "one executor"
PARTS = "a half of the layers on each of 2"
APART = "2 replicas, half of the tenants on each"


class Figures(NamedTuple):
    """One measurement of a placement."""

    decode_s: float
    """Seconds in which all tenants decode, without their prompts."""
    train_s: float
    """Seconds in which each tenant runs a training step."""
    bytes: int
    """Bytes over the loopback interface while they decoded, in both directions."""


@dataclass
class Placed:
    """Executors and tenants of one placement."""

    executors: Sequence[ServingProcess]
    tenants: Sequence[TenantProcess]

    def memory(self) -> str:
        """Return the memory of each executor's processes alone, in MiB."""
        first = [psutil.Process(each.pid) for each in self.executors]
        processes = [process for each in first for process in (each, *each.children())]
        return " + ".join(f"{process.memory_full_info().uss / MiB:,.0f}" for process in processes)


async def placement(settings: Settings, *, transport: str, tenants: int) -> Report:
    """Measure tenants in processes of their own that decode, and train, at once: with one executor, with one half of
    the layers on each of two, with two replicas, where they choose by load and where half of them use each, and with
    one executor of two shards.

    All processes share this machine's cores, so a second executor adds none. What is measured is what a placement
    costs, and what sharing batches gains.

    Args:
        settings: model, policy and rounds.
        transport: between executors and tenants.
        tenants: number of tenants.
    """
    preset = settings.preset
    costs = await machine_costs(settings, transport)
    report = Report("placement", preset.name, {}, transport=transport)
    half = preset.layers // 2
    whole, halves = range(preset.layers), (range(half), range(half, preset.layers))
    parts = (f"0-{half - 1}", f"{half}-{preset.layers - 1},lm_head")
    async with AsyncExitStack() as stack:

        async def placed(
            name: str, layers: Sequence[str], order: Callable[[int], int] = lambda seed: 1, shards: int = 1
        ) -> None:
            settings.progress(f"starting {name} and {tenants} tenants")
            started = _placed(settings, transport, tenants, layers, order, shards)
            placements[name] = await stack.enter_async_context(started)

        placements: dict[str, Placed] = {}
        await placed(ONE, [""])
        await placed(PARTS, parts)
        await placed("2 replicas", ["", ""])
        await placed(APART, ["", ""], lambda seed: 1 - 2 * (seed % 2))
        await placed("2 shards", [""], shards=2)
        jobs = {name: partial(_measure, settings, each.tenants) for name, each in placements.items()}
        results = await settings.interleaved(f"{tenants} tenants", jobs)
        predicted = {
            ONE: costs.predicted(settings, [whole], [[0]] * tenants),
            PARTS: costs.predicted(settings, halves, [[0, 1]] * tenants),
            APART: costs.predicted(settings, [whole, whole], [[number % 2] for number in range(tenants)]),
        }
        simulated: dict[str, float] = {}
        tokens, trained = tenants * preset.decode_steps, tenants * preset.batch * preset.sequence
        for name, found in results.items():
            seconds, steps, sent = zip(*found, strict=True)
            row: dict[str, Any] = {
                "placement": name,
                "decoded tok/s": tokens / median(seconds),
                "ms a token and tenant": 1e3 * median(seconds) / preset.decode_steps,
                "trained tok/s": trained / median(steps),
                **_simulated(predicted.get(name), tokens, trained),
                "MiB of each executor": placements[name].memory(),
            }
            if transport == "tcp":
                row["bytes a token"] = median(sent) / tokens
            report.rows.append(row)
            for figure, number, measured in (("decode", 0, seconds), ("train", 1, steps)):
                speedup = ratio([each[number] for each in results[ONE]], [each[number] for each in found])
                if name != ONE:
                    report.headline[f"{figure}: {name}"] = speedup
                if name in predicted:
                    simulated[f"{figure}, simulated / measured: {name}"] = median(measured) / predicted[name][number]
    report.headline |= simulated
    report.notes.append(
        f"Headlines are speeds over one executor, and simulated speeds over measured ones. The simulation knows costs "
        "that were measured before on one executor and one tenant; of shards, and of tenants that choose a replica by "
        "load, it knows nothing. "
        f"{tenants} tenants, each a process with its own LoRA (r8, qkvo), "
        f"decode {preset.decode_steps} tokens after a prompt of {preset.prompt} (not timed), then train on "
        f"{preset.batch} × {preset.sequence}; medians of {settings.rounds} rounds; policy {settings.policy}, base "
        f"layers {settings.base_layers!r}, {transport}://, all processes on this machine. Bytes are those of the "
        "loopback interface, in both directions. A process without a model takes some 350 MiB."
    )
    return report


def _simulated(seconds: tuple[float, float] | None, tokens: int, trained: int) -> dict[str, Any]:
    decode, train = ("", "") if seconds is None else (tokens / seconds[0], trained / seconds[1])
    return {"simulated decoded tok/s": decode, "simulated trained tok/s": train}


@asynccontextmanager
async def _placed(
    settings: Settings,
    transport: str,
    tenants: int,
    layers: Sequence[str],
    order: Callable[[int], int],
    shards: int,
) -> AsyncIterator[Placed]:
    """Yield executors that serve these layers (all: "") and tenants, which name them in this order or in reverse."""
    async with AsyncExitStack() as stack:
        options = settings.preset.name, transport, settings.policy, settings.base_layers
        executors = [stack.enter_context(served(*options, layers=part, shards=shards)) for part in layers]
        addresses = [each.address for each in executors]
        lists = [",".join(addresses[:: order(seed)]) for seed in range(tenants)]
        processes = await stack.enter_async_context(tenant_processes(settings.preset.name, lists, tenants))
        yield Placed(executors, processes)


async def _measure(settings: Settings, tenants: Sequence[TenantProcess]) -> Figures:
    await asyncio.gather(*(tenant.prefill() for tenant in tenants))
    sent, start = _loopback(), time.perf_counter()
    await asyncio.gather(*(tenant.steps(settings.preset.decode_steps) for tenant in tenants))
    decoded, bytes_ = time.perf_counter() - start, _loopback() - sent
    start = time.perf_counter()
    await asyncio.gather(*(tenant.train() for tenant in tenants))
    return Figures(decoded, time.perf_counter() - start, bytes_)


def _loopback() -> int:
    counters = psutil.net_io_counters(pernic=True)
    return sum(found.bytes_sent for name, found in counters.items() if name.startswith("lo"))
