"""Simulation of executors and tenants in processes of this machine, with costs measured on one executor and one tenant.

The executor measures its batches by their rows; processor times tell what a tenant and an executor do besides. In the
simulation all processes share the cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import psutil
import torch

from symbiosis.bench.recorder import Curve, Points
from symbiosis.bench.service import ServingProcess, TenantProcess, served, tenant_processes
from symbiosis.bench.settings import Settings
from symbiosis.core.registry import make_policy
from symbiosis.core.requests import Batch, Key
from symbiosis.core.terms import Kind
from symbiosis.simulation.clients import Done, finetune
from symbiosis.simulation.clock import Clock, Cores, Way
from symbiosis.simulation.executor import SimulatedExecutor
from symbiosis.simulation.simulation import Ask, Cluster, Hop, InWalk, Route, SimulatedClient, Think

ROWS = (1, 2, 4)
"""Numbers of texts that a tenant decodes at once, to measure batches of so many rows."""


class _Spent(NamedTuple):
    """Seconds of some work of one tenant, for each of its calls."""

    run: float
    """In base layers."""
    tenant: float
    """Of the tenant's processor time."""
    executor: float
    """Of the executor's processor time, besides base layers."""
    idle: float
    """In which neither computed."""


@dataclass(frozen=True)
class MachineCosts:
    """The costs of a preset's model on this machine."""

    walk: Sequence[Key]
    back: Sequence[Key]
    curves: dict[Key, Curve]
    """Seconds of a batch by its rows."""
    decode: _Spent
    train: _Spent
    blocks: Sequence[int]
    """The block of each base layer; the language model head is in the last one."""

    def predicted(
        self, settings: Settings, parts: Sequence[range], routes: Sequence[Sequence[int]]
    ) -> tuple[float, float]:
        """Return the seconds in which tenants decode the preset's steps, and run its training step, by simulation.

        Args:
            parts: the blocks of each executor.
            routes: for each tenant, the executors that it uses, which together serve all blocks.
        """
        preset = settings.preset
        decodes = [self._decodes(preset.decode_steps) for _ in routes]
        rows = preset.batch * preset.sequence
        think = self.train.tenant
        trains = [finetune(self.walk, rows, lambda kind, rows: think, Done(), steps=1, back=self.back) for _ in routes]
        return self._run(settings, parts, routes, decodes, self.decode), self._run(
            settings, parts, routes, trains, self.train
        )

    def _decodes(self, steps: int) -> SimulatedClient:
        for _ in range(steps):
            yield InWalk(True)
            for key in self.walk:
                yield Think(self.decode.tenant)
                yield Ask(key, 1, Kind.DECODE)
            yield InWalk(False)

    def _run(
        self,
        settings: Settings,
        parts: Sequence[range],
        routes: Sequence[Sequence[int]],
        clients: Sequence[SimulatedClient],
        spent: _Spent,
    ) -> float:
        clock = Clock()
        cores = Cores(clock, os.cpu_count() or 1)
        wire = _Wire(clock, cores, spent)
        executors = [
            SimulatedExecutor(
                clock,
                make_policy(settings.policy),
                layers=len(self.blocks),
                cost=self._cost,
                cores=cores,
                threads=torch.get_num_threads(),
                part=len(part) / settings.preset.layers,
            )
            for part in parts
        ]
        cluster = Cluster(clock)
        for number, (client, route) in enumerate(zip(clients, routes, strict=True)):
            hops = [Hop(executors[index], wire, wire) for index in route]
            places = [
                next(place for place, index in enumerate(route) if block in parts[index]) for block in self.blocks
            ]
            cluster.add(f"tenant-{number}", client, route=Route(hops, places, cores=cores))
        cluster.run()
        return cluster.now

    def _cost(self, batch: Batch, again: bool) -> float:
        return self.curves[batch.key](batch.rows)


class _Wire(Way):
    """The way to an executor, or back: half of what a call costs besides its batch and the tenant's own work."""

    def __init__(self, clock: Clock, cores: Cores, spent: _Spent) -> None:
        self.bytes = 0
        self._clock, self._cores, self._spent = clock, cores, spent

    def send(self, size: int, then: Callable[[], None]) -> None:
        handle = partial(self._cores.run, self._spent.executor / 2, 1, then)
        self.bytes += size
        self._clock.at(self._clock.now + self._spent.idle / 2, handle)


async def machine_costs(settings: Settings, transport: str) -> MachineCosts:
    """Measure the costs on an executor with one tenant, which decodes and trains."""
    preset = settings.preset
    points: dict[Key, Points] = {}
    trained = preset.batch * preset.sequence
    with served(preset.name, transport, "recorder", settings.base_layers) as executor:

        async def spend(tenant: TenantProcess, work: str, steps: int = 0) -> _Spent:
            executor.notes()
            before, began = _processor_s(executor, tenant), time.perf_counter()
            await (tenant.steps(steps) if work == "decode" else tenant.train())
            seconds, after = time.perf_counter() - began, _processor_s(executor, tenant)
            batches = executor.notes().batches
            for key, rows, taken in batches:
                points.setdefault(key, []).append((rows, taken))
            run = sum(taken for _, _, taken in batches)
            served_s, own = (later - earlier for earlier, later in zip(before, after, strict=True))
            handling = max(served_s - torch.get_num_threads() * run, 0.0)
            idle = max(seconds - run - own - handling, 0.0)
            return _Spent(*(part / len(batches) for part in (run, own, handling, idle)))

        decodes, trains = [], []
        for rows in ROWS:
            settings.progress(f"one tenant decodes {rows} texts")
            async with tenant_processes(preset.name, executor.address, 1, rows=rows) as (tenant,):
                await tenant.steps(preset.decode_steps)
                found = [await spend(tenant, "decode", preset.decode_steps) for _ in range(3)]
                decodes += found if rows == 1 else []
        walk = executor.notes().walk
        for length in (trained, 2 * trained, 4 * trained):
            settings.progress(f"one tenant trains on {length} tokens")
            async with tenant_processes(preset.name, executor.address, 1, length=length) as (tenant,):
                await tenant.train()
                await spend(tenant, "train")
        async with tenant_processes(preset.name, executor.address, 1) as (tenant,):
            await tenant.train()
            trains = [await spend(tenant, "train") for _ in range(3)]
        back = executor.notes().back
    names = sum(len(key.layers) for key in walk)
    each = (names - 1) // preset.layers
    blocks = [min(layer // each, preset.layers - 1) for layer in range(names)]
    curves = {key: Curve(found) for key, found in points.items()}
    return MachineCosts(walk, back, curves, _median(decodes), _median(trains), blocks)


def _median(found: Sequence[_Spent]) -> _Spent:
    return sorted(found, key=sum)[len(found) // 2]


def _processor_s(executor: ServingProcess, tenant: TenantProcess) -> tuple[float, float]:
    """Return the processor times of an executor's process and of a tenant's, in seconds."""
    times = [psutil.Process(pid).cpu_times() for pid in (executor.pid, tenant.pid)]
    return times[0].user + times[0].system, times[1].user + times[1].system
