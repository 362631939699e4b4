"""Costs of a model on this machine, for the simulator, measured on a real executor in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain, cycle, takewhile
from statistics import linear_regression
from typing import Any

import torch

from symbiosis import Client, Executor, Statistics
from symbiosis.bench.jobs import Decoding, adamw
from symbiosis.bench.models import PAPER_LORA, lora
from symbiosis.bench.recorder import Curve, Measurements, Points, WalkRecorder
from symbiosis.bench.settings import Settings
from symbiosis.core.requests import Batch, Key
from symbiosis.core.terms import Kind
from symbiosis.simulation.costs import Costs
from symbiosis.simulation.replay import ReplayedLoad

DECODING = range(8, 1, -1)
"""Numbers of clients that decode together. Each is measured, because cost does not grow evenly with them."""
MIXED = (0, 3, 1, 2)
"""The order in which clients get adapters. The first two, which also measure prompts, adapt an average number of
layers."""
STEPS = 6
PROMPTS = (4, 12, 32, 64, 128, 256, 512, 1024)
TUNING = (32, 128, 512)
LONGEST = 512
"""Longest context, in tokens, at which decoding is measured: each decoding client must read it first, each time."""


async def calibrate(settings: Settings, load: ReplayedLoad) -> Costs:
    """Return the costs of a load on this machine.

    This takes some ten seconds on the preset tiny and a minute on 100m; longer for long prompts.
    """
    async with Calibration(settings, load) as calibration:
        return calibration.costs([await calibration.measure() for _ in range(2)])


class Calibration:
    """Measures costs with clients on real executors that repeat short parts of a load.

    It measures, in seconds:

    * a batch, for each key, by its rows. Batches that follow one of the same layer, whose weights are in the cache, are
      measured apart;
    * a client's own work before a request, for each kind, by its rows;
    * the executor's work beside a batch.

    Batches of several decoding clients are those of joint walks.

    Args:
        settings: the model and the device.
        load: as many of its clients decode as it has, up to eight, at the average position of its tokens. Prompts and
            fine-tuning batches that are much longer than the load's are not measured.
    """

    def __init__(self, settings: Settings, load: ReplayedLoad) -> None:
        self._settings = settings
        tokens = sum(arrival.tokens for arrival in load.trace)
        contexts = sum(arrival.tokens * (arrival.prompt + arrival.tokens // 2) for arrival in load.trace)
        self._context = min(max(contexts // tokens - STEPS // 2, 2), LONGEST)  # 1 would be a prompt of "last tokens"
        self._prompts = _up_to(max(arrival.prompt for arrival in load.trace), PROMPTS)
        self._lengths = _up_to(load.rows, TUNING)
        clients = len(load.by_client())
        self._counts = [count for count in DECODING if count <= max(clients, 2)]
        self._stack = AsyncExitStack()
        self._tuning: list[tuple[Client, torch.optim.Optimizer]] = []
        self._tuners = min(load.tuning, 2)
        self._notes = Measurements()

    async def __aenter__(self) -> Calibration:
        async with AsyncExitStack() as stack:
            base = self._settings.base()
            self._apart = await self._open(stack, base, "off")
            self._joint = await self._open(stack, base, "auto")
            for _ in range(self._tuners):
                client = await stack.enter_async_context(self._apart.executor.client(lora()))
                self._tuning.append((client, adamw(client.model)))
            for decoders in (self._apart, self._joint) * 2:  # at first siblings are found and the joint model is made
                await self._decode(decoders, self._counts[0])
            self._stack = stack.pop_all()
        return self

    async def _open(self, stack: AsyncExitStack, base: torch.nn.Module, joint: str) -> _Decoders:
        recorder = WalkRecorder()
        executor = await stack.enter_async_context(self._settings.executor(base, recorder, joint=joint))
        adapters = list(PAPER_LORA.values())
        numbers = [number for _, number in zip(range(self._counts[0]), cycle(MIXED), strict=False)]
        clients = [await stack.enter_async_context(executor.client(lora(*adapters[number]))) for number in numbers]
        return _Decoders(executor, recorder, clients)

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def measure(self) -> Measurements:
        """Run a little of each kind of work, and record its costs."""
        recorder = self._apart.recorder
        self._notes = self._joint.recorder.notes = Measurements()
        for count in self._counts:
            self._settings.progress(f"{count} clients decode jointly")
            await self._decode(self._joint, count)
        together, apart = recorder.policies
        for policy, notes in ((together, Measurements()), (apart, self._notes)):
            recorder.deciding, recorder.notes = policy, notes
            for count in {self._counts[0], 2}:
                self._settings.progress(f"{count} clients decode")
                await self._decode(self._apart, count)
        recorder.deciding = together
        for length in self._prompts:
            self._settings.progress(f"prompts of {length} tokens")
            for _ in range(3):
                await self._read(length)
        if self._tuning:
            for length in self._lengths:
                self._settings.progress(f"fine-tuning on {length} tokens")
                await self._tune(length)
        return self._notes

    async def _decode(self, decoders: _Decoders, count: int) -> None:
        jobs = [(client, self._job(client, self._context)) for client in decoders.clients[:count]]
        await asyncio.gather(*(client.run(job.prefill) for client, job in jobs))
        work = (client.run(job.steps, STEPS) for client, job in jobs)
        if decoders is self._apart:
            await self._time(Kind.DECODE, 1, *work)
        else:
            seconds, done = await _timed(decoders.executor, *work)  # each batch has one request, of a joint walk
            self._notes.own[Kind.DECODE].append((count, max(seconds - done.run_s, 0.0) / done.batches, 1.0))

    async def _read(self, length: int) -> None:
        prompts = [(client, self._job(client, length)) for client in self._apart.clients[:2]]
        await self._time(Kind.PREFILL, length, *(client.run(job.prefill) for client, job in prompts))

    async def _tune(self, length: int) -> None:
        ids = torch.randint(1, self._settings.preset.vocabulary, (1, length), device=self._settings.device)
        batch = {"input_ids": ids, "labels": ids}
        for _ in range(3):
            steps = (client.train_step(batch, optimizer) for client, optimizer in self._tuning)
            await self._time(Kind.FINETUNE, length, *steps)

    def _job(self, client: Client, length: int) -> Decoding:
        return Decoding(client.model, self._settings.preset, self._settings.device, length=length)

    async def _time(self, kind: Kind, rows: int, *work: Coroutine[Any, Any, Any]) -> None:
        """Record the time outside base layers of work without joint walks."""
        seconds, done = await _timed(self._apart.executor, *work)
        outside = max(seconds - done.run_s, 0.0) / done.requests
        self._notes.own[kind].append((rows, outside, done.batches / done.requests))

    def costs(self, notes: Sequence[Measurements]) -> Costs:
        """Return the costs, from measurements of several times."""
        points: dict[tuple[Key, bool, bool], Points] = {}
        for note in notes:
            for seen, found in note.batches.items():
                points.setdefault(seen, []).extend(found)
        running = {seen: Curve(found) for seen, found in points.items()}
        curves: dict[tuple[Key, bool, bool], Curve] = {}

        def curve(key: Key, again: bool, tuning: bool) -> Curve:
            """Return the measured key nearest to this one."""
            nearest = (key, again, tuning), (key, False, tuning), (key, again, not tuning), (key, False, not tuning)
            return next(running[seen] for seen in nearest if seen in running)

        def batch(batch: Batch, again: bool) -> float:
            tuning = bool(batch.slices) and batch.slices[0].request.kind is Kind.FINETUNE
            seen = batch.key, again, tuning
            if seen not in curves:
                curves[seen] = curve(*seen)
            return curves[seen](batch.rows)

        thinking, overhead_s = _own(notes)
        recorder = self._apart.recorder
        return Costs(
            recorder.walk,
            recorder.back,
            len(self._apart.executor.layers),
            batch,
            lambda kind, rows: thinking[kind](rows),
            overhead_s,
            f"{self._settings.preset.name}, measured here",
            local=True,
            joint=True,
            last=recorder.alone,
            parts=self._apart.executor.engine.scheduler.parts,
        )


@dataclass
class _Decoders:
    """Clients that decode, and their executor and its policy."""

    executor: Executor
    recorder: WalkRecorder
    clients: list[Client]


async def _timed(executor: Executor, *work: Coroutine[Any, Any, Any]) -> tuple[float, Statistics]:
    """Return the seconds of some work, and what the executor did meanwhile."""
    executor.reset_statistics()
    began = time.perf_counter()
    await asyncio.gather(*work)
    return time.perf_counter() - began, executor.statistics()


def _up_to(longest: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths that are shorter, and the next one."""
    return lengths[: sum(1 for _ in takewhile(lambda length: length < longest, lengths)) + 1]


def _own(notes: Iterable[Measurements]) -> tuple[dict[Kind, Curve], float]:
    """Return the seconds of clients' own work by rows, for each kind, and the executor's seconds beside a batch.

    Both run on one thread. They are separated by the number of requests that shared a batch: seconds = own + overhead /
    members, by least squares over decoding without joint walks.
    """
    seen = {kind: list(chain.from_iterable(note.own[kind] for note in notes)) for kind in Kind}
    split = [(part, seconds) for rows, seconds, part in seen[Kind.DECODE] if rows == 1]
    slope, _ = linear_regression(*zip(*split, strict=True))
    overhead = max(slope, 0.0)
    return {
        kind: Curve([(rows, max(seconds - overhead * part, 0.0)) for rows, seconds, part in found])
        for kind, found in seen.items()
        if found
    }, overhead
