"""Temporal sharing: inference and fine-tuning alternate (FlexLLM's baselines, section 8 and algorithm 3).

One iteration of fine-tuning follows a number of iterations of inference, and neither runs during an iteration of the
other. An iteration of inference is a batch whose oldest request of inference begins a walk
(:mod:`symbiosis.policies.starts`). An iteration of fine-tuning, called its *turn*, runs each key once, which is one
walk forward and back (two turns where backward recomputes layers).
"""

from __future__ import annotations

import math
from statistics import fmean

from symbiosis.core.policy import Decision, Policy, Run, View, Wait
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import Kind
from symbiosis.policies.options import milliseconds, whole
from symbiosis.policies.order import Index
from symbiosis.policies.starts import Starts

_AWAY_S = 0.1
"""Seconds without a request of a kind after which clients of that kind count as idle."""


class TemporalSharing(Policy):
    """Run one iteration of fine-tuning after every ``every`` iterations of inference.

    Args:
        every: iterations of inference (the paper measures 64, 128 and 512).
        max_wait_ms: longest time that a request waits for its turn, in milliseconds. After it, requests run in the
            order of arrival.

    Raises:
        UsageError: an option has no valid value.
    """

    name = "temporal"

    def __init__(self, every: int = 64, max_wait_ms: float = 10_000.0) -> None:
        self.every = whole(self.name, "every", every, least=1)
        self.max_wait_ms = milliseconds(self.name, "max_wait_ms", max_wait_ms)
        self._inference, self._tuning = Index(), Index()
        self._starts = Starts()
        self._begins: set[int] = set()
        """Ids of the queued requests with which a walk of inference begins."""
        self._seen = -math.inf
        """Time of the latest inference request."""
        self._tuned = -math.inf
        """Time of the latest batch of fine-tuning."""
        self._until_turn = self.interval()
        """Iterations of inference until fine-tuning may have its turn."""
        self._turn: dict[Key, float] | None = None
        """During fine-tuning's turn, the keys that have run, and since when."""

    def submitted(self, request: Request) -> None:
        self._side(request).add(request)
        if request.kind is not Kind.FINETUNE:
            self._seen = request.arrived
            if self._starts.begins(request):
                self._begins.add(request.id)

    def started(self, batch: Batch) -> None:
        for request, _, stop in batch.slices:
            if stop == request.rows:
                self._remove(request)

    def cancelled(self, request: Request) -> None:
        self._remove(request)

    def _remove(self, request: Request) -> None:
        """Note that a request is no longer queued."""
        self._side(request).remove(request)
        self._begins.discard(request.id)

    def _side(self, request: Request) -> Index:
        return self._tuning if request.kind is Kind.FINETUNE else self._inference

    def decide(self, view: View, now: float) -> Decision:
        oldest = view.oldest
        overdue = oldest.arrived + self.max_wait_ms / 1e3
        if overdue <= now:
            if oldest.kind is Kind.FINETUNE and self._turn is None:  # else each request of its walk waits as long
                self._turn, self._tuned = {oldest.key: now}, now
            return Run(oldest.key, view.queues[oldest.key].take(view.max_rows, first=oldest), "overdue")
        inference, tuning = self._inference.furthest_behind(), self._tuning.furthest_behind()
        if self._turn is not None and tuning is not None and self._turn.get(tuning.key, now) < tuning.arrived:
            self._turn = None  # the walk has come back to a key that has run
        busy = inference is not None or (view.thinking and now < self._seen + _AWAY_S)
        if tuning is not None and (self._turn is not None or not busy):
            if self._turn is not None:
                self._turn.setdefault(tuning.key, now)
            self._tuned = now
            return self._run(self._tuning, tuning.key, view, "turn")
        if self._turn is not None:
            if view.thinking and now < self._tuned + _AWAY_S:  # the fine-tuning client is between two layers
                return Wait(self._tuned + _AWAY_S)
            self._turn = None
        if inference is None:
            return Wait(min(overdue, self._seen + _AWAY_S))
        if inference.id in self._begins:
            self.iteration(len(view.queues[inference.key]))
            if not self._until_turn and tuning is not None:
                self._until_turn = self.interval()
                self._turn, self._tuned = {}, now
        return self._run(self._inference, inference.key, view, "inference")

    def _run(self, side: Index, key: Key, view: View, reason: str) -> Run:
        """Run as many rows of inference or of fine-tuning as fit. A client's requests stay in order, whatever their
        kinds."""
        queue, left = view.queues[key], view.max_rows
        takes: list[tuple[Request, int]] = []
        taken: dict[str, int] = {}
        for request in side.of(key):
            before = taken.get(request.client, 0)
            if queue.of(request.client)[before] is request:
                taken[request.client] = before + 1
                takes.append((request, min(request.remaining, left)))
                left -= takes[-1][1]
                if not left:
                    break
        return Run(key, takes or queue.take(view.max_rows), reason)

    def iteration(self, queued: int) -> None:
        """Note that an iteration of inference begins, with so many queued requests."""
        self._until_turn = max(self._until_turn - 1, 0)

    def interval(self) -> int:
        """Return the iterations of inference until the next turn of fine-tuning."""
        return self.every


class DynamicTemporalSharing(TemporalSharing):
    """Run one iteration of fine-tuning after 64 to 512 iterations of inference, by the pressure of inference (FlexLLM,
    algorithm 3).

    The pressure is a sum of the mean queue (divided by 20), the longest queue (by 25), and arrivals less completions
    (by 8 per iteration). The interval follows it slowly, and only at every third turn.
    """

    name = "dynamic-temporal"

    def __init__(self, max_wait_ms: float = 10_000.0) -> None:
        self.pace = 64.0
        """Smoothed interval between two turns, in iterations of inference."""
        self._turns = 0
        self._queued: list[int] = []
        """Queued requests at each iteration since the last turn."""
        self._prefills = 0
        """Prefills since the last turn."""
        super().__init__(64, max_wait_ms)

    def submitted(self, request: Request) -> None:
        super().submitted(request)
        if self._until_turn and request.kind is Kind.PREFILL and request.id in self._begins:
            self._prefills += 1

    def iteration(self, queued: int) -> None:
        if self._until_turn:  # otherwise the turn waits for fine-tuning
            self._queued.append(queued)
        super().iteration(queued)

    def interval(self) -> int:
        if not self._queued:
            return 64
        self._turns += 1
        interval = min(512.0, self.pace * 1.1) if self._turns % 3 else self._computed()
        self._queued.clear()
        self._prefills = 0
        return int(interval)

    def _computed(self) -> float:
        """Return the interval for the present pressure. A prefill is an arrival; a request that was queued at the
        beginning of the interval and not at its end is a completion."""
        arrivals = self._prefills / len(self._queued)
        completions = max(arrivals - (self._queued[-1] - self._queued[0]) / len(self._queued), 0.0)
        pressure = (
            min(1.0, fmean(self._queued) / 20)
            + min(0.5, max(self._queued) / 25)
            + max(0.0, (arrivals - completions) / 8)
        )
        if pressure <= 0.8:
            found = 64.0
        elif pressure >= 2.0:
            found = 512.0
        else:
            found = 64 + (pressure - 0.8) / 1.2 * 0.6 * (512 - 64)
        self.pace = (1.35 * found + 2 * self.pace) / 3
        return min(max(self.pace, 80.0), 512.0)
