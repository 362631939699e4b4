"""What an executor runs: the keys of walks, and how long batches take by their rows."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass, field
from statistics import median

from symbiosis.core.policy import Decision, Policy, View
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import Kind, Terms
from symbiosis.policies import Lockstep, NoLockstep

Points = list[tuple[int, float]]
"""Pairs of rows and seconds."""


@dataclass
class Measurements:
    """The measurements of one time."""

    batches: dict[tuple[Key, bool, bool], Points] = field(default_factory=dict)
    """Batches by key, whether the batch before had the same key, and whether it was fine-tuning."""
    own: dict[Kind, list[tuple[int, float, float]]] = field(default_factory=lambda: {kind: [] for kind in Kind})
    """Rows of a request, seconds outside base layers per request, batches per request. The request of a joint walk has
    the rows of several clients."""
    requests: int = 0
    batches_s: float = 0.0
    """Processor time of this process while batches ran, in seconds."""
    since_s: float = field(default_factory=time.process_time)
    """Processor time of this process when these measurements began, in seconds."""


class WalkRecorder(Policy):
    """A policy that records requests and batches, and has another one decide. It is asked for lone requests too.

    Args:
        policies: those that may decide; by default lockstep, with the largest batches, and single requests.

    Attributes:
        deciding: the one that decides now, at first the first one.
    """

    name = "recorder"

    def __init__(self, *policies: Policy) -> None:
        self.policies = policies or (Lockstep(), NoLockstep())
        self.deciding = self.policies[0]
        self.notes = Measurements()
        self.walk: list[Key] = []
        """The keys of the last complete forward walk."""
        self.back: list[Key] = []
        """The keys of the last backward walk."""
        self.alone: set[Key] = set()
        """Keys that are requested for a prompt's last token only."""
        self._walks: dict[str, list[Key]] = {}
        self._last: Key | None = None
        self._started_s = 0.0
        """Processor time of this process when the latest batch started."""

    def default_terms(self, client: str) -> Terms:
        return self.deciding.default_terms(client)

    def may_join(self, client: str, now: float) -> bool:
        return self.deciding.may_join(client, now)

    def unloaded(self, seconds: float) -> None:
        for policy in self.policies:
            policy.unloaded(seconds)

    def submitted(self, request: Request) -> None:
        self.notes.requests += 1
        for policy in self.policies:
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
        return self.deciding.decide(view, now)

    def cancelled(self, request: Request) -> None:
        for policy in self.policies:
            policy.cancelled(request)

    def started(self, batch: Batch) -> None:
        for policy in self.policies:
            policy.started(batch)
        self._started_s = time.process_time()

    def ran(self, batch: Batch, seconds: float) -> None:
        self.notes.batches_s += time.process_time() - self._started_s
        for policy in self.policies:
            policy.ran(batch, seconds)
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
