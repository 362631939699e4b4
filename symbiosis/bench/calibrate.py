"""Costs of a model on this machine, for the simulator, measured on a real executor in this process."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain, cycle, takewhile
from statistics import linear_regression, median
from typing import Any

import torch

from symbiosis import Client, Executor, Statistics
from symbiosis.bench.jobs import Decoding, adamw
from symbiosis.bench.models import PAPER_LORA, lora
from symbiosis.bench.settings import Settings
from symbiosis.core.policy import Decision, Policy, View
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import Kind
from symbiosis.policies import Lockstep, NoLockstep
from symbiosis.simulation.costs import Costs
from symbiosis.simulation.replay import Load

DECODING = range(8, 1, -1)
"""Numbers of clients that decode together. Each is measured, because cost does not grow evenly with them."""
MIXED = (0, 3, 1, 2)
"""The order in which clients get adapters. The first two, which read prompts, adapt an average number of layers."""
STEPS = 6
PROMPTS = (4, 12, 32, 64, 128, 256, 512, 1024)
TUNING = (32, 128, 512)
LONGEST = 512
"""Longest context, in tokens, at which decoding is measured: each decoding client must read it first, each time."""

Points = list[tuple[int, float]]
"""Pairs of rows and seconds."""


async def calibrate(settings: Settings, load: Load) -> Costs:
    """Return the costs of a load on this machine.

    This takes some ten seconds on the preset tiny and a minute on 100m; longer for long prompts.
    """
    async with Calibration(settings, load) as calibration:
        return calibration.costs([await calibration.measure() for _ in range(2)])


@dataclass
class Notes:
    """The measurements of one time."""

    batches: dict[tuple[Key, bool, bool], Points] = field(default_factory=dict)
    """Batches by key, whether the batch before had the same key, and whether it was fine-tuning."""
    own: dict[Kind, list[tuple[int, float, float]]] = field(default_factory=lambda: {kind: [] for kind in Kind})
    """Rows of a request, seconds outside base layers per request, batches per request. The request of a joint walk has
    the rows of several clients."""


class Calibration:
    """Measures costs with clients on real executors that repeat short parts of a load.

    It measures the seconds of a batch by its rows, for each key, separately for batches that follow one of the same
    layer, whose weights are in the cache; the seconds of a client's own work before a request, by its rows, for each
    kind; and the seconds of the executor's work beside a batch. Batches of several decoding clients are those of joint
    walks.

    Args:
        settings: the model and the device.
        load: as many of its clients decode as it has, up to eight, at the average position of its tokens. Prompts and
            fine-tuning batches that are much longer than the load's are not measured.
    """

    def __init__(self, settings: Settings, load: Load) -> None:
        self._settings = settings
        tokens = sum(arrival.tokens for arrival in load.trace)
        contexts = sum(arrival.tokens * (arrival.prompt + arrival.tokens // 2) for arrival in load.trace)
        self._context = min(max(contexts // tokens - STEPS // 2, 1), LONGEST)
        self._prompts = _up_to(max(arrival.prompt for arrival in load.trace), PROMPTS)
        self._lengths = _up_to(load.rows, TUNING)
        clients = len(load.by_client())
        self._counts = [count for count in DECODING if count <= max(clients, 2)]
        self._stack = AsyncExitStack()
        self._tuning: list[tuple[Client, torch.optim.Optimizer]] = []
        self._tuners = min(load.tuning, 2)
        self._notes = Notes()

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
        recorder = _WalkRecorder()
        executor = await stack.enter_async_context(self._settings.executor(base, recorder, joint=joint))
        adapters = list(PAPER_LORA.values())
        numbers = [number for _, number in zip(range(self._counts[0]), cycle(MIXED), strict=False)]
        clients = [await stack.enter_async_context(executor.client(lora(*adapters[number]))) for number in numbers]
        return _Decoders(executor, recorder, clients)

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)

    async def measure(self) -> Notes:
        """Run a little of each kind of work, and record its costs."""
        recorder = self._apart.recorder
        self._notes = self._joint.recorder.notes = Notes()
        for count in self._counts:
            self._settings.progress(f"{count} clients decode jointly")
            await self._decode(self._joint, count)
        for recorder.together in (True, False):
            recorder.notes = Notes() if recorder.together else self._notes
            for count in {self._counts[0], 2}:
                self._settings.progress(f"{count} clients decode")
                await self._decode(self._apart, count)
        recorder.together = True
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
            seconds, done = await _timed(decoders.executor, *work)  # a batch is a request: that of a joint walk
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

    def costs(self, notes: Sequence[Notes]) -> Costs:
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
            True,
            True,
            recorder.alone,
            f"{self._settings.preset.name}, measured here",
        )


@dataclass
class _Decoders:
    """Clients that decode, and their executor and its policy."""

    executor: Executor
    recorder: _WalkRecorder
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


def _own(notes: Iterable[Notes]) -> tuple[dict[Kind, Curve], float]:
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


class _WalkRecorder(Policy):
    """A policy that records requests and batches. It is lockstep, with the largest batches, or runs single requests."""

    name = "recorder"

    def __init__(self) -> None:
        self.together = True
        self.notes = Notes()
        self.walk: list[Key] = []
        """The keys of the last complete forward walk."""
        self.back: list[Key] = []
        """The keys of the last backward walk."""
        self.alone: set[Key] = set()
        """Keys that are requested for a prompt's last token only."""
        self._walks: dict[str, list[Key]] = {}
        self._last: Key | None = None
        self._lockstep, self._apart = Lockstep(), NoLockstep()

    def submitted(self, request: Request) -> None:
        for policy in (self._lockstep, self._apart):
            policy.submitted(request)
        if request.kind is Kind.DECODE:
            walk = self._walks.setdefault(request.client, [])
            if walk and request.key.layers[0] <= walk[-1].layers[0]:
                if sum(len(key.layers) for key in walk) >= sum(len(key.layers) for key in self.walk):
                    self.walk = walk
                self._walks[request.client] = [request.key]
            else:
                walk.append(request.key)
        elif request.kind is Kind.PREFILL:
            if request.rows == 1:
                self.alone.add(request.key)
        elif request.kind is Kind.FINETUNE:
            walk = self._walks.setdefault(f"{request.client} back", [])
            if request.key.pass_.is_backward:
                walk.append(request.key)
            elif walk:
                self.back = list(walk)
                walk.clear()

    def decide(self, view: View, now: float) -> Decision:
        policy: Policy = self._lockstep if self.together else self._apart
        return policy.decide(view, now)

    def ran(self, batch: Batch, seconds: float) -> None:
        tuning = batch.slices[0].request.kind is Kind.FINETUNE
        seen = batch.key, batch.key == self._last, tuning
        self.notes.batches.setdefault(seen, []).append((batch.rows, seconds))
        self._last = batch.key


class Curve:
    """Seconds by rows: medians of the measurements, joined by straight lines that are extended at both ends.

    On a shared machine a few batches take many times as long, so all medians are scaled until their sum is that of the
    measurements. More rows never take less time: medians that contradict this are averaged by their counts (isotonic
    regression, by pooling adjacent violators).
    """

    def __init__(self, points: Points) -> None:
        by_rows: dict[int, list[float]] = {}
        for rows, seconds in points:
            by_rows.setdefault(rows, []).append(seconds)
        pools: list[tuple[float, int, list[int]]] = []  # seconds, count, rows
        for rows in sorted(by_rows):
            pool = median(by_rows[rows]), len(by_rows[rows]), [rows]
            while pools and pools[-1][0] > pool[0]:
                seconds, count, members = pools.pop()
                both = count + pool[1]
                pool = (seconds * count + pool[0] * pool[1]) / both, both, members + pool[2]
            pools.append(pool)
        self._rows = [rows for _, _, members in pools for rows in members]
        self._seconds = [seconds for seconds, _, members in pools for _ in members]
        expected = sum(self(rows) for rows, _ in points)
        if expected > 0:
            longer = sum(seconds for _, seconds in points) / expected
            self._seconds = [longer * seconds for seconds in self._seconds]

    def __call__(self, rows: int) -> float:
        if len(self._rows) == 1:
            return self._seconds[0]
        right = min(max(bisect_right(self._rows, rows), 1), len(self._rows) - 1)
        (x0, x1), (y0, y1) = self._rows[right - 1 : right + 1], self._seconds[right - 1 : right + 1]
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), 0.0)
