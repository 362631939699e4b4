"""Simulation of executors and tenants in processes of this machine, with costs measured on one executor.

The executor measures its batches by their rows, with one tenant. The costs outside batches come from processor times,
measured with one tenant and with all of them, because processes that share cores need more time for the same work.
In the simulation all processes share the cores, and an executor does one thing at a time. It tells how the time
changes from one executor, where it was measured, to other placements.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

from symbiosis.bench.cores import usable_cores
from symbiosis.bench.recorder import Curve, Points
from symbiosis.bench.service import ServingProcess, TenantProcess, tenant_processes
from symbiosis.bench.settings import Settings
from symbiosis.core.registry import make_policy
from symbiosis.core.requests import Key
from symbiosis.core.terms import Kind
from symbiosis.simulation.clients import Done, Thinking, finetune
from symbiosis.simulation.clock import Clock, Cores, Thread, Way
from symbiosis.simulation.executor import SimulatedExecutor
from symbiosis.simulation.simulation import Ask, Cluster, Hop, InWalk, Route, SimulatedClient, Think

ROWS = (1, 2, 4)
"""Multiples of the rows of a tenant's requests, to measure batches of so many rows."""


class Spent(NamedTuple):
    """What tenants and an executor spent on some work."""

    seconds: float
    batches: Sequence[tuple[Key, int, float]]
    """Key, rows and seconds of each batch."""
    requests: int
    batches_s: float
    """Processor time of batches."""
    executor_s: float
    """Processor time of the executor, batches included."""
    tenants_s: float
    """Processor time of all tenants."""

    @property
    def handling_s(self) -> float:
        """Processor time of the executor besides batches."""
        return max(self.executor_s - self.batches_s, 0.0)


@dataclass(frozen=True)
class WorkCosts:
    """The costs of decoding, or of training, in seconds."""

    tenant_s: float
    """A tenant's own work for each request."""
    request_s: float
    """The executor's work for each request besides batches."""
    batch_s: float
    """The executor's work for each batch besides base layers."""
    wait_s: float
    """Time of each request in which no process computes."""
    threads: float
    """Cores that a batch uses."""
    slower: float
    """Processor time of a batch while all tenants run, in multiples of its time with one tenant."""
    together_s: float
    """Time in which all tenants did their work."""

    @classmethod
    def of(cls, alone: Spent, together: Spent, curves: Mapping[Key, Curve]) -> WorkCosts:
        """Return the costs that explain the processor time of both runs: of one tenant, and of all tenants.

        Args:
            alone: one tenant, so that each batch has one request.
            together: all tenants.
            curves: seconds of a batch by its rows, with one tenant.
        """
        run = sum(seconds for _, _, seconds in alone.batches)
        threads = alone.batches_s / run
        expected = threads * sum(curves[key](rows) for key, rows, _ in together.batches)
        each = alone.handling_s / alone.requests
        shared = together.requests - len(together.batches)
        handling = max((together.handling_s - each * len(together.batches)) / shared, 0.0) if shared else each / 2
        wait = alone.seconds - run - alone.handling_s - alone.tenants_s
        return cls(
            tenant_s=together.tenants_s / together.requests,
            request_s=handling,
            batch_s=max(each - handling, 0.0),
            wait_s=max(wait, 0.0) / alone.requests,
            threads=threads,
            slower=together.batches_s / expected,
            together_s=together.seconds,
        )


@dataclass(frozen=True)
class MachineCosts:
    """The costs of a preset's model on this machine."""

    walk: Sequence[Key]
    back: Sequence[Key]
    curves: Mapping[Key, Curve]
    """Seconds of a batch by its rows, with one tenant."""
    decode: WorkCosts
    train: WorkCosts
    blocks: Sequence[int]
    """The block of each base layer; the language model head is in the last one."""

    def predicted(
        self, settings: Settings, parts: Sequence[range], routes: Sequence[Sequence[int]]
    ) -> tuple[float, float]:
        """Return the seconds in which tenants decode the preset's steps, and run its training steps.

        These are the measured seconds of one executor, times those of these executors over those of one executor by
        simulation. So what processes that take turns on the cores lose is taken to be the same part everywhere.

        Args:
            parts: the blocks of each executor.
            routes: for each tenant, the executors that it uses, which together serve all blocks.
        """
        one = [range(settings.preset.layers)], [[0]] * len(routes)
        decode, train = (
            costs.together_s * self._run(settings, parts, routes, costs) / self._run(settings, *one, costs)
            for costs in (self.decode, self.train)
        )
        return decode, train

    def _client(self, settings: Settings, costs: WorkCosts, number: int) -> SimulatedClient:
        """Return a tenant that decodes or trains.

        The time of its own work before a request is random, with an exponential distribution. With equal times all
        tenants would be in step, and every batch would have a request of each.
        """
        preset, own = settings.preset, _varied(costs.tenant_s, number)
        if costs is self.train:
            rows = preset.batch * preset.sequence
            return finetune(self.walk, rows, own, Done(), steps=preset.train_steps, back=self.back)
        return self._decodes(preset.decode_steps, own)

    def _decodes(self, steps: int, own: Thinking) -> SimulatedClient:
        for _ in range(steps):
            yield InWalk(True)
            for key in self.walk:
                yield Think(own(Kind.DECODE, 1))
                yield Ask(key, 1, Kind.DECODE)
            yield InWalk(False)

    def _run(
        self,
        settings: Settings,
        parts: Sequence[range],
        routes: Sequence[Sequence[int]],
        costs: WorkCosts,
    ) -> float:
        """Return the simulated seconds of some work of all tenants."""
        clock = Clock()
        cores = Cores(clock, len(usable_cores()))
        executors, ways = [], []
        for part in parts:
            thread = Thread(cores)
            executor = SimulatedExecutor(
                clock,
                make_policy(settings.policy),
                layers=len(self.blocks),
                cost=lambda batch, again: costs.slower * self.curves[batch.key](batch.rows),
                overhead_s=costs.batch_s,
                thread=thread,
                threads=costs.threads,
                fraction=len(part) / settings.preset.layers,
            )
            executors.append(executor)
            wire = clock, thread, costs.wait_s / 2, costs.request_s / 2
            ways.append((_There(*wire), _Back(*wire)))
        cluster = Cluster(clock)
        ends: list[float] = []
        for number, route in enumerate(routes):
            hops = [Hop(executors[index], *ways[index]) for index in route]
            places = [
                next(place for place, index in enumerate(route) if block in parts[index]) for block in self.blocks
            ]
            client = _timed(self._client(settings, costs, number), clock, ends)
            cluster.add(f"tenant-{number}", client, route=Route(hops, places, cores=cores))
        cluster.run()
        return max(ends)


def _timed(client: SimulatedClient, clock: Clock, ends: list[float]) -> SimulatedClient:
    """Run a client, and note the time at which it ends. An executor may wake up after that, for a wait that is over."""
    yield from client
    ends.append(clock.now)


def _varied(mean_s: float, seed: int) -> Thinking:
    """Return random times of a tenant's own work, with an exponential distribution, whatever the request."""
    random = Random(seed)
    return lambda kind, rows: random.expovariate(1 / mean_s)


class _There(Way):
    """The way to an executor: the time of a message, and the executor's work for it.

    Args:
        clock: simulated time.
        thread: the executor's thread.
        wait_s: time of each message, in seconds.
        work_s: the executor's work for each message, in seconds.
    """

    def __init__(self, clock: Clock, thread: Thread, wait_s: float, work_s: float) -> None:
        self._clock, self._thread, self._wait_s, self._work_s = clock, thread, wait_s, work_s

    def send(self, size: int, then: Callable[[], None]) -> None:
        self._clock.at(self._clock.now + self._wait_s, partial(self._thread.run, self._work_s, 1, then))


class _Back(_There):
    """The way back. The executor sends answers before it chooses the next batch."""

    def send(self, size: int, then: Callable[[], None]) -> None:
        self._thread.run(self._work_s, 1, lambda: self._clock.at(self._clock.now + self._wait_s, then))


class CostMeter:
    """Measures costs on an executor that records its batches.

    Args:
        settings: the model, and the work to measure on it.
        executor: has a policy ``recorded:NAME``.
    """

    def __init__(self, settings: Settings, executor: ServingProcess) -> None:
        self._settings, self._executor = settings, executor
        self._points: dict[Key, Points] = {}

    async def measure_batches(self) -> None:
        """Measure batches by their rows, with one tenant at a time."""
        preset = self._settings.preset
        for times in ROWS:
            self._settings.progress(f"measuring batches of {times} times the rows")
            longer = None if times == 1 else times * preset.batch * preset.sequence
            for work, rows, length in (("decode", times, None), ("train", 1, longer)):
                async with tenant_processes(preset.name, [[self._executor.address]], length, rows) as tenants:
                    for turn in range(4):
                        spent = await self._spend(tenants, work, 0)
                        if turn:  # the first one is slower
                            for key, found, seconds in spent.batches:
                                self._points.setdefault(key, []).append((found, seconds))

    async def measure(self, tenants: Sequence[TenantProcess], number: int) -> MachineCosts:
        """Measure the work of one tenant and of all of them. ``number`` is the executor's place in their addresses."""
        preset = self._settings.preset
        curves = {key: Curve(found) for key, found in self._points.items()}
        costs = {}
        for work in ("decode", "train"):
            await asyncio.gather(*(tenant.prefill(number) for tenant in tenants))
            alone = await self._spend(tenants[:1], work, number)
            costs[work] = WorkCosts.of(alone, await self._spend(tenants, work, number), curves)
        notes = self._executor.notes()
        names = sum(len(key.layers) for key in notes.walk)
        each = (names - 1) // preset.layers
        blocks = [min(layer // each, preset.layers - 1) for layer in range(names)]
        return MachineCosts(notes.walk, notes.back, curves, costs["decode"], costs["train"], blocks)

    async def _spend(self, tenants: Sequence[TenantProcess], work: str, number: int) -> Spent:
        preset = self._settings.preset
        self._executor.notes()
        began = time.perf_counter()
        jobs = [
            each.train(number, preset.train_steps) if work == "train" else each.steps(preset.decode_steps, number)
            for each in tenants
        ]
        spent = sum(await asyncio.gather(*jobs))
        seconds = time.perf_counter() - began
        notes = self._executor.notes()
        return Spent(seconds, notes.batches, notes.requests, notes.batches_s, notes.processor_s, spent)
