"""Temporal sharing: inference and fine-tuning take turns (FlexLLM's baselines, section 8 and algorithm 3).

One iteration of fine-tuning follows every so many iterations of inference; during a turn of one, the other waits. An
iteration of inference is a batch at the first layer that inference asks for; one of fine-tuning is what is queued for
each key once, which is one walk forward and back (two turns where layers are computed again in backward).
"""

from __future__ import annotations

from statistics import fmean

from symbiosis.core.policy import Decision, Policy, Run, View, Wait
from symbiosis.core.requests import Key, Request
from symbiosis.core.terms import Kind
from symbiosis.errors import UsageError
from symbiosis.policies.order import Index

__all__ = ["DynamicTemporalSharing", "TemporalSharing"]

_AWAY_S = 0.1
"""Without a request of inference for so long there is none, and fine-tuning need not wait for its turn."""


class TemporalSharing(Policy):
    """One iteration of fine-tuning every ``every`` iterations of inference.

    Args:
        every: iterations of inference (the paper measures 64, 128 and 512).
        max_wait_ms: the longest that a request waits for its turn; then it goes in the order of arrival.
    """

    name = "temporal"

    def __init__(self, every: int = 64, max_wait_ms: float = 10_000.0) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"{self.name}: every is {every!r}; it must be a whole number, 1 or more")
        if isinstance(max_wait_ms, bool) or not isinstance(max_wait_ms, int | float) or not 0 < max_wait_ms < 1e9:
            raise UsageError(f"{self.name}: max_wait_ms is {max_wait_ms!r}; it must be milliseconds greater than 0")
        self.every = every
        self.max_wait_ms = float(max_wait_ms)
        self._inference, self._tuning = Index(), Index()
        self._first_layer = 1 << 62
        self._seen = -1e300
        """When inference last asked for something."""
        self._until_turn = self._interval()
        """Iterations of inference before fine-tuning has its turn, or before it has it as soon as it asks for it."""
        self._turn: dict[Key, float] | None = None
        """In fine-tuning's turn, which keys have run since when."""
        self._tuned = -1e300
        """When the last one was."""

    def submitted(self, request: Request) -> None:
        if request.kind is Kind.FINETUNE:
            self._tuning.add(request)
        else:
            self._inference.add(request)
            self._first_layer = min(self._first_layer, request.key.layers[0])
            self._seen = request.arrived

    def decide(self, view: View, now: float) -> Decision:
        oldest = view.oldest
        overdue = oldest.arrived + self.max_wait_ms / 1e3
        if overdue <= now:
            return Run(oldest.key, view.queues[oldest.key].take(view.max_rows, first=oldest), "overdue")
        inference, tuning = self._inference.furthest_behind(), self._tuning.furthest_behind()
        here = inference is not None or (view.thinking and now < self._seen + _AWAY_S)
        if self._turn is not None and tuning is not None and self._turn.get(tuning.key, now) < tuning.arrived:
            self._turn = None  # it has gone round
        if tuning is not None and (self._turn is not None or not here):
            if self._turn is not None:
                self._turn.setdefault(tuning.key, now)
            self._tuned = now
            return self._run(self._tuning, tuning.key, view, "turn")
        if self._turn is not None:
            if view.thinking and now < self._tuned + _AWAY_S:  # whose turn it is is between two layers
                return Wait(self._tuned + _AWAY_S)
            self._turn = None
        if inference is None:
            return Wait(min(overdue, self._seen + _AWAY_S))
        if inference.key.layers[0] == self._first_layer:
            self._step(len(view.queues[inference.key]))
            if not self._until_turn and tuning is not None:
                self._until_turn = self._interval()
                self._turn, self._tuned = {}, now
        return self._run(self._inference, inference.key, view, "inference")

    def _run(self, side: Index, key: Key, view: View, reason: str) -> Run:
        """As many rows of one side for a key as fit. A client's requests stay in order, whatever their kinds."""
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

    def _step(self, queued: int) -> None:
        """An iteration of inference begins, with so many requests."""
        self._until_turn = max(self._until_turn - 1, 0)

    def _interval(self) -> int:
        return self.every

    def __repr__(self) -> str:
        return f"TemporalSharing(every={self.every})"


class DynamicTemporalSharing(TemporalSharing):
    """How often fine-tuning has its turn follows the pressure of inference (FlexLLM, algorithm 3), between 64 and 512
    iterations.

    The pressure is made up of the mean queue (over 20), the longest (over 25) and arrivals less completions (over 8 an
    iteration). Frequencies change slowly, and only every third turn.
    """

    name = "dynamic-temporal"

    def __init__(self, max_wait_ms: float = 10_000.0) -> None:
        self._queued: list[int] = []
        self._prefills = 0
        self._before = 64.0
        self._turns = 0
        super().__init__(64, max_wait_ms)

    def submitted(self, request: Request) -> None:
        super().submitted(request)
        if self._until_turn and request.kind is Kind.PREFILL and request.key.layers[0] == self._first_layer:
            self._prefills += 1

    def _step(self, queued: int) -> None:
        if self._until_turn:  # and is not waiting for fine-tuning
            self._queued.append(queued)
        super()._step(queued)

    def _interval(self) -> int:
        if not self._queued:
            return 64
        self._turns += 1
        interval = min(512.0, self._before * 1.1) if self._turns % 3 else self._computed()
        self._queued.clear()
        self._prefills = 0
        return int(interval)

    def _computed(self) -> float:
        # A prefill is an arrival; who asked at the beginning of this interval and no more at its end is a completion.
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
        self._before = (1.35 * found + 2 * self._before) / 3
        return min(max(self._before, 80.0), 512.0)

    def __repr__(self) -> str:
        return "DynamicTemporalSharing()"
