"""One executor, parts of a model on two executors, replicas, an executor of two shards, and transformers' own tensor
parallelism, each in processes of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import psutil

from symbiosis.bench.placed import CostMeter, MachineCosts
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.service import RECORDED, ServingProcess, TenantProcess, served, tenant_processes
from symbiosis.bench.settings import Settings
from symbiosis.bench.tensor_parallel import TensorParallel, tensor_parallel

MiB = 1 << 20
MODELS = 6
"""Whole models in memory: of the executor whose costs are measured, of both replicas, of both halves, of shards, and of
tensor parallelism."""
COSTS = "costs"
ONE = "one executor"
PARTS = "a half of the layers on each of 2"
APART = "2 replicas, half of the tenants on each"
SHARDS = "2 shards"
PEER = "tensor parallelism of transformers"


class Figures(NamedTuple):
    """One measurement of a placement."""

    decode_s: float
    """Seconds in which all tenants decode, without their prompts."""
    train_s: float
    """Seconds in which each tenant runs its training steps."""
    bytes: int
    """Bytes over the loopback interface while they decode, without their prompts, in both directions."""


@dataclass
class MeasuredPlacement:
    """A placement: its executors, its tenants, and its index in each tenant's list of addresses."""

    executors: Sequence[ServingProcess]
    tenants: Sequence[TenantProcess]
    number: int

    def memory(self) -> str:
        """Return the memory of each executor's processes alone, in MiB."""
        first = [psutil.Process(each.pid) for each in self.executors]
        return _memory([process for each in first for process in (each, *each.children())])

    async def measure(self, settings: Settings) -> Figures:
        """Have all tenants decode, and then train, at once."""
        number, steps = self.number, settings.preset.decode_steps
        await asyncio.gather(*(tenant.prefill(number) for tenant in self.tenants))
        sent, start = _loopback(), time.perf_counter()
        await asyncio.gather(*(tenant.steps(steps, number) for tenant in self.tenants))
        decoded, bytes_ = time.perf_counter() - start, _loopback() - sent
        start = time.perf_counter()
        await asyncio.gather(*(tenant.train(number, settings.preset.train_steps) for tenant in self.tenants))
        return Figures(decoded, time.perf_counter() - start, bytes_)


@dataclass
class JobsInTurn:
    """A plain job for each tenant, one after another, on tensor parallelism."""

    peer: TensorParallel
    count: int

    def memory(self) -> str:
        """Return the memory of each process alone, in MiB."""
        return _memory(map(psutil.Process, self.peer.pids))

    async def measure(self, settings: Settings) -> Figures:
        """Decode for all tenants, and then train for all of them."""
        decoded, bytes_ = 0.0, 0
        for _ in range(self.count):
            await self.peer.prefill()
            sent = _loopback()
            decoded += await self.peer.steps()
            bytes_ += _loopback() - sent
        steps = self.count * settings.preset.train_steps
        return Figures(decoded, sum([await self.peer.train() for _ in range(steps)]), bytes_)


async def placement(settings: Settings, *, transport: str, tenants: int) -> Report:
    """Measure tenants in processes of their own that decode, and then train, at once.

    They use one executor, two with a half of the layers each, one of two shards, or two replicas. Of replicas, either
    they choose by load, or half of them use each. Their peers are plain PEFT jobs in turn, whose base model is divided
    by transformers.

    All processes share this machine's cores, so a second executor adds none. What is measured is what a placement
    costs, and what sharing batches gains.

    Args:
        settings: model, policy and rounds.
        transport: between executors and tenants.
        tenants: number of tenants.
    """
    preset = settings.preset
    report = Report("placement", preset.name, {}, transport=transport)
    half = preset.layers // 2
    packed = 2 * MODELS * preset.size < psutil.virtual_memory().available / 2  # packed weights may be there twice
    whole, halves = range(preset.layers), (range(half), range(half, preset.layers))
    async with AsyncExitStack() as stack:

        def started(layers: str | None = None, shards: int = 1, policy: str = settings.policy) -> ServingProcess:
            settings.progress("starting executors and tenants")
            options = preset.name, transport, policy, settings.base_layers
            return stack.enter_context(served(*options, layers=layers, shards=shards, packed=packed))

        recorded = started(policy=RECORDED + settings.policy)
        meter = CostMeter(settings, recorded)
        await meter.measure_batches()
        one, other = started(), started()
        parts = [started(f"0-{half - 1}"), started(f"{half}-{preset.layers - 1},lm_head")]
        executors = {ONE: [one], PARTS: parts, "2 replicas": [one, other], APART: [one, other]}
        executors |= {SHARDS: [started(shards=2)], COSTS: [recorded]}
        lists = [
            [",".join(each.address for each in _order(name, found, tenant)) for name, found in executors.items()]
            for tenant in range(tenants)
        ]
        processes = await stack.enter_async_context(tenant_processes(preset.name, lists))
        peer = await stack.enter_async_context(tensor_parallel(preset.name))
        measured_ones = {
            name: MeasuredPlacement(found, processes, number) for number, (name, found) in enumerate(executors.items())
        }
        costs = measured_ones.pop(COSTS)
        placements: dict[str, MeasuredPlacement | JobsInTurn] = {**measured_ones, PEER: JobsInTurn(peer, tenants)}
        jobs: dict[str, Callable[[], Awaitable[Any]]] = {COSTS: partial(meter.measure, processes, costs.number)}
        jobs |= {name: partial(each.measure, settings) for name, each in placements.items()}
        results = await settings.interleaved(f"{tenants} tenants", jobs)
        measured: list[MachineCosts] = results.pop(COSTS)
        layouts: dict[str, tuple[Sequence[range], Sequence[Sequence[int]]]] = {
            PARTS: (halves, [[0, 1]] * tenants),
            APART: ([whole, whole], [[number % 2] for number in range(tenants)]),
        }
        predicted = {name: [each.predicted(settings, *layout) for each in measured] for name, layout in layouts.items()}
        _fill(report, settings, tenants, placements, results, predicted)
    report.notes.append(
        "Headlines are speeds over one executor, that of shards over tensor parallelism, and simulated speeds over "
        "measured ones. The simulation knows the "
        "costs and the time of one more executor, measured in the same round, with one tenant and with all of them; it "
        "covers neither shards nor tenants that choose a replica by load. Placements that use the same executor take "
        f"turns on it, so its memory includes connections of all of them. {tenants} tenants, each a process with its "
        f"own LoRA (r8, qkvo), decode {preset.decode_steps} tokens after a prompt of {preset.prompt} (not timed), and "
        f"train on {preset.batch} × {preset.sequence}, {preset.train_steps} steps; medians of {settings.rounds} "
        f"rounds; policy {settings.policy}, base layers {settings.base_layers!r}, {transport}://, all on this machine. "
        'Tensor parallelism is tp_plan="auto" in 2 processes with gloo; its plain PEFT jobs run in turn, with a LoRA '
        "on q and v, because PEFT's LoRA on o fails there. "
        "Bytes are those of the loopback interface, in both directions. A process without a model takes some "
        f"350 MiB. Weights are {'' if packed else 'not '}packed{'' if packed else ': memory is too small'}."
    )
    return report


def _fill(
    report: Report,
    settings: Settings,
    tenants: int,
    placements: Mapping[str, MeasuredPlacement | JobsInTurn],
    results: Mapping[str, Sequence[Figures]],
    predicted: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    """Add a row for each placement, its speeds over one executor, that of shards over tensor parallelism, and the
    simulated speeds over the measured ones."""
    preset = settings.preset
    simulated: dict[str, float] = {}
    tokens, trained = tenants * preset.decode_steps, tenants * preset.train_steps * preset.batch * preset.sequence
    for name, found in results.items():
        seconds, steps, sent = zip(*found, strict=True)
        row: dict[str, Any] = {
            "placement": name,
            "decoded tok/s": tokens / median(seconds),
            "ms a token and tenant": 1e3 * median(seconds) / preset.decode_steps,
            "trained tok/s": trained / median(steps),
            **_simulated(predicted.get(name, ()), tokens, trained),
            "MiB of each executor": placements[name].memory(),
        }
        if report.transport == "tcp":
            row["bytes a token"] = median(sent) / tokens
        report.rows.append(row)
        for figure, number, measured in (("decode", 0, seconds), ("train", 1, steps)):
            speedup = ratio([each[number] for each in results[ONE]], [each[number] for each in found])
            if name != ONE:
                report.headline[f"{figure}: {name}"] = speedup
            if name == SHARDS:
                seconds_in_turn = [each[number] for each in results[PEER]]
                report.headline[f"{figure}: {name} / tensor parallelism"] = ratio(seconds_in_turn, measured)
            if name in predicted:
                expected = [each[number] for each in predicted[name]]
                simulated[f"{figure}, simulated / measured: {name}"] = ratio(measured, expected)
    report.headline |= simulated


def _simulated(seconds: Sequence[tuple[float, float]], tokens: int, trained: int) -> dict[str, Any]:
    decode, train = (median(found) for found in zip(*seconds, strict=True)) if seconds else (0.0, 0.0)
    return {
        "simulated decoded tok/s": tokens / decode if decode else "",
        "simulated trained tok/s": trained / train if train else "",
    }


def _order(name: str, executors: Sequence[ServingProcess], tenant: int) -> Sequence[ServingProcess]:
    """Return the executors in the order in which a tenant names them: it begins at the first one."""
    return executors[::-1] if name == APART and tenant % 2 else executors


def _memory(processes: Iterable[psutil.Process]) -> str:
    return " + ".join(f"{process.memory_full_info().uss / MiB:,.0f}" for process in processes)


def _loopback() -> int:
    counters = psutil.net_io_counters(pernic=True)
    return sum(found.bytes_sent for name, found in counters.items() if name.startswith("lo"))
