"""What a model costs here, for the simulator: measured on a real executor in this process."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Coroutine
from statistics import linear_regression, median
from typing import Any

import torch

from symbiosis.bench.jobs import Decoding, adamw
from symbiosis.bench.models import lora
from symbiosis.bench.settings import Settings
from symbiosis.core.client import Client
from symbiosis.core.executor import Executor
from symbiosis.core.protocols import Decision, Policy, View
from symbiosis.core.requests import Batch, Key, Kind, Request
from symbiosis.policies.lockstep import Lockstep
from symbiosis.policies.no_lockstep import NoLockstep
from symbiosis.simulation.costs import Costs

__all__ = ["calibrate"]

CLIENTS = 8
DECODING = (8, 4, 2)
PROMPTS = (4, 16, 64, 256, 1024)
TUNING = (32, 128, 512)

Points = list[tuple[int, float]]
"""Rows, and seconds that they took."""


async def calibrate(settings: Settings) -> Costs:
    """Run clients on a real executor and take notes: seconds of a batch by its rows, for each layer and pass, apart
    where the batch before it was for the same layer, whose weights are in the cache then; a client's own work before a
    request, by its rows, for each kind; and what the executor needs beside a batch. Takes a minute on the smallest
    preset.
    """
    recorder = _Recorder()
    async with settings.executor(settings.base(), recorder) as executor:
        clients = [await executor.client(lora()).open() for _ in range(CLIENTS)]
        own = _Own(executor)
        await _decode(settings, recorder, clients, own)
        await _read(settings, clients, own)
        await _tune(settings, clients, own)
        for client in clients:
            await client.close()
        layers = len(executor.layers)
    thinking, overhead_s = own.curves()
    running = {seen: Curve(points) for seen, points in recorder.seen.items()}

    def batch(batch: Batch, again: bool) -> float:
        curve = running.get((batch.key, again)) or running[batch.key, False]
        return curve(batch.rows)

    return Costs(
        recorder.walk,
        recorder.back,
        layers,
        batch,
        lambda kind, rows: thinking[kind](rows),
        overhead_s,
        True,
        recorder.alone,
        f"{settings.preset.name}, measured here",
    )


async def _decode(settings: Settings, recorder: _Recorder, clients: list[Client], own: _Own) -> None:
    for count in DECODING:
        settings.progress(f"{count} clients decode")
        jobs = [
            (client, Decoding(client.model, settings.preset, settings.device, seed))
            for seed, client in enumerate(clients[:count])
        ]
        for together in (True, False):
            recorder.together = together
            await asyncio.gather(*(client.run(job.prefill) for client, job in jobs))
            for _ in range(2):
                await own.time(Kind.DECODE, 1, *(client.run(job.steps, 8) for client, job in jobs))
        recorder.together = True


async def _read(settings: Settings, clients: list[Client], own: _Own) -> None:
    for length in PROMPTS:
        settings.progress(f"prompts of {length} tokens")
        for _ in range(3):
            prompts = [
                (client, Decoding(client.model, settings.preset, settings.device, length=length))
                for client in clients[:2]
            ]
            await own.time(Kind.PREFILL, length, *(client.run(job.prefill) for client, job in prompts))


async def _tune(settings: Settings, clients: list[Client], own: _Own) -> None:
    jobs = [(client, adamw(client.model)) for client in clients[:2]]
    for length in TUNING:
        settings.progress(f"fine-tuning on {length} tokens")
        ids = torch.randint(1, settings.preset.vocabulary, (1, length), device=settings.device)
        batch = {"input_ids": ids, "labels": ids}
        for _ in range(3):
            await own.time(Kind.FINETUNE, length, *(client.train_step(batch, optimizer) for client, optimizer in jobs))


class _Own:
    """Clients' own work: the time outside base layers, for each request, less what the executor needs for a batch.

    Both are on one thread. They are told apart by how many requests shared a batch: seconds = own + overhead / members.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._seen: dict[Kind, list[tuple[int, float, float]]] = {kind: [] for kind in Kind}
        """Rows, seconds a request, batches a request."""

    async def time(self, kind: Kind, rows: int, *work: Coroutine[Any, Any, Any]) -> None:
        self._executor.reset_statistics()
        began = time.perf_counter()
        await asyncio.gather(*work)
        seconds = time.perf_counter() - began
        done = self._executor.statistics()
        outside = max(seconds - done.run_s, 0.0) / done.requests
        self._seen[kind].append((rows, outside, done.batches / done.requests))

    def curves(self) -> tuple[dict[Kind, Curve], float]:
        """Own work by rows, for each kind; and the overhead of a batch, in seconds, by least squares over decoding."""
        slope, _ = linear_regression(
            *zip(*((part, seconds) for _, seconds, part in self._seen[Kind.DECODE]), strict=True)
        )
        overhead = max(slope, 0.0)
        return {
            kind: Curve([(rows, max(seconds - overhead * part, 0.0)) for rows, seconds, part in seen])
            for kind, seen in self._seen.items()
        }, overhead


class _Recorder:
    """A policy that takes notes: lockstep, which makes batches as large as there are clients, or one by one."""

    name = "recorder"

    def __init__(self) -> None:
        self.together = True
        self.seen: dict[tuple[Key, bool], Points] = {}
        """Of each batch, by its key and whether the one before it had the same."""
        self.walk: list[Key] = []
        """The last whole one. Clients find out about siblings in their first."""
        self.back: list[Key] = []
        """The last walk back."""
        self.alone: set[Key] = set()
        """Asked for a prompt's last token alone."""
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
        self.seen.setdefault((batch.key, batch.key == self._last), []).append((batch.rows, seconds))
        self._last = batch.key


class Curve:
    """Seconds by rows: the medians of what was measured, joined by straight lines, the first and the last drawn on.

    More rows never take less time: medians that say so are averaged by how often each was seen (isotonic regression, by
    pooling adjacent violators).
    """

    def __init__(self, points: Points) -> None:
        by_rows: dict[int, list[float]] = {}
        for rows, seconds in points:
            by_rows.setdefault(rows, []).append(seconds)
        pools: list[tuple[float, int, list[int]]] = []  # seconds, how often seen, rows
        for rows in sorted(by_rows):
            pool = median(by_rows[rows]), len(by_rows[rows]), [rows]
            while pools and pools[-1][0] > pool[0]:
                seconds, count, members = pools.pop()
                both = count + pool[1]
                pool = (seconds * count + pool[0] * pool[1]) / both, both, members + pool[2]
            pools.append(pool)
        self._rows = [rows for _, _, members in pools for rows in members]
        self._seconds = [seconds for seconds, _, members in pools for _ in members]

    def __call__(self, rows: int) -> float:
        if len(self._rows) == 1:
            return self._seconds[0]
        right = min(max(bisect_right(self._rows, rows), 1), len(self._rows) - 1)
        (x0, x1), (y0, y1) = self._rows[right - 1 : right + 1], self._seconds[right - 1 : right + 1]
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), 0.0)
