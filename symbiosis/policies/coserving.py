"""Co-serving: inference within its latency targets, and fine-tuning in the time that remains (FlexLLM, sections 5, 6).

FlexLLM fills each iteration of the model with fine-tuning tokens, s = argmax f(c, s) ≤ SLO, where c is the number of
inference tokens. Here a batch is one layer, not an iteration, so the same question is asked for each batch: how many
prefill and fine-tuning rows fit into the *slack* (:mod:`symbiosis.policies.slack`) of the tokens that are being made
(:mod:`symbiosis.policies.tokens`)? The latency of a batch is learned by key. Rows run beside decode rows of the same
layer, where they cost least, or as batches of their own. Large requests are cut to what fits.

Two more costs count. A client in the executor's process computes with each answer on the executor's cores
(:mod:`symbiosis.policies.own_work`). And fine-tuning may delay a prefill only by a part of its usual time, because
delayed prefills end at the same time; their texts then decode together and miss their SLO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from symbiosis.core.policy import Decision, Policy, QueueView, Run, View, Wait
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import Kind, Terms
from symbiosis.errors import UsageError
from symbiosis.policies.latency import LONGEST_S, LatencyModel
from symbiosis.policies.margins import MARGINS, Margins
from symbiosis.policies.options import mapping, milliseconds
from symbiosis.policies.order import Index
from symbiosis.policies.own_work import OwnWork
from symbiosis.policies.tokens import Tokens

_STARVING = "starving"
_DECODE, _PREFILL, _FINETUNE = Kind
"""Names of their own: on Python 3.11 a member looked up on its class takes six times as long."""

Takes = list[tuple[Request, int]]


class CoServing(Policy):
    """Run decode rows first, then prefill rows, then as many fine-tuning rows as the least slack allows.

    Args:
        slo_ms: latency target for each generated token, as a mean over a text, in milliseconds.
        ttft_ms: latency target for the first token, from the first request of the prefill, in milliseconds.
        wait_ms: longest time that inference rows wait for rows of thinking clients, in milliseconds.
        max_wait_ms: longest time that a request is passed over, in milliseconds. After it, requests run in the order of
            arrival, whatever the latency targets.
        clients: (slo_ms, ttft_ms) of single clients, by name. The provider may state other targets for a client in its
            process (``executor.client(slo_ms=…)``). A client in another process can ask for longer ones only.

    Raises:
        UsageError: an option has no valid value, or ``max_wait_ms`` is less than a latency target for tokens.
    """

    name = "co-serving"
    margins: Margins = MARGINS
    """Tuning constants. A subclass may set its own, to measure what they do."""

    def __init__(
        self,
        slo_ms: float = 100.0,
        ttft_ms: float = 5000.0,
        wait_ms: float = 0.2,
        max_wait_ms: float = 10_000.0,
        clients: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.slo_ms = milliseconds(self.name, "slo_ms", slo_ms)
        self.ttft_ms = milliseconds(self.name, "ttft_ms", ttft_ms)
        self.wait_ms = milliseconds(self.name, "wait_ms", wait_ms)
        self.max_wait_ms = milliseconds(self.name, "max_wait_ms", max_wait_ms)
        self.clients = _targets(clients)
        longest = max(self.slo_ms, *(slo for slo, _ in self.clients.values()), 0.0)
        if self.max_wait_ms < longest:
            raise UsageError(
                f"co-serving: max_wait_ms is {self.max_wait_ms:g}, less than an SLO of {longest:g}; requests that wait "
                "for so long run in the order of arrival, so the SLO would have no effect; give a longer max_wait_ms"
            )
        self.latency = LatencyModel()
        self.tokens = Tokens(self.slo_ms, self.ttft_ms, self.margins)
        self.own_work = OwnWork()
        self._queued = tuple(Index() for _ in Kind)
        """Queued requests, by kind."""
        self._last_tuned = -math.inf
        """Time at which fine-tuning last ran because the slack allowed it."""
        self._now = 0.0
        """Time of the latest decision, at which the latest batch started."""

    def default_terms(self, client: str) -> Terms:
        slo_ms, ttft_ms = self.clients.get(client, (self.slo_ms, self.ttft_ms))
        return Terms(slo_ms=slo_ms, ttft_ms=ttft_ms)

    def unloaded(self, seconds: float) -> None:
        targets = {"slo_ms": self.slo_ms, "ttft_ms": self.ttft_ms}
        for name, (slo, first) in self.clients.items():
            targets |= {f"slo_ms of {name!r}": slo, f"ttft_ms of {name!r}": first}
        for option, target in targets.items():
            if target < 1e3 * seconds:
                raise UsageError(
                    f"co-serving: {option} is {target:g}, but one token takes {1e3 * seconds:.3g} ms in base layers "
                    "alone on an idle executor; give a longer time"
                )
        shortest = min(self.slo_ms, *(slo for slo, _ in self.clients.values()), math.inf)
        if self.wait_ms > shortest:
            raise UsageError(
                f"co-serving: wait_ms is {self.wait_ms:g}, more than an SLO of {shortest:g}; give a shorter wait_ms"
            )

    def submitted(self, request: Request) -> None:
        self._queued[request.kind].add(request)
        self.own_work.submitted(request)
        if request.kind is not _FINETUNE:
            self.tokens.submitted(request)

    def ran(self, batch: Batch, seconds: float) -> None:
        line = self.latency[batch.key]
        if 0 < seconds < LONGEST_S:
            decode, prefill, tuning = _rows_of(batch)
            inference = decode + prefill
            tuned = seconds - (line.predict(inference) if inference else 0.0) if tuning else 0.0
            others = seconds - (line.predict(decode) if decode else 0.0) if prefill + tuning else 0.0
            self.tokens.slack.spend(max(others, tuned, 0.0), max(tuned, 0.0))
            self.own_work.ran(seconds)
            if tuning and batch.reason != _STARVING:
                self._last_tuned = self._now
            for request, _, stop in batch.slices:
                # On a GPU, a batch is reported some time after its requests were answered.
                if stop == request.rows and request.done != request.rows:
                    self._answers(request, self._now + seconds)
        line.learn(batch.rows, seconds)

    def _answers(self, request: Request, at: float) -> None:
        """Note that a request gets its answer at time ``at``."""
        if request.kind is _DECODE:
            self.tokens.answered(request.client, at)
        elif request.local:
            own = self.own_work.seconds(request)
            self.tokens.slack.spend(own, own if request.kind is _FINETUNE else 0.0)
            self.own_work.answered(request, at)

    def decide(self, view: View, now: float) -> Decision:
        self._now = now
        oldest = view.oldest
        overdue = oldest.arrived + self.max_wait_ms / 1e3
        if overdue <= now:
            return Run(oldest.key, view.queues[oldest.key].take(view.max_rows, first=oldest), "overdue")
        decode, prefill, tuning = (index.furthest_behind() for index in self._queued)
        first = decode or prefill
        if first is None:
            assert tuning is not None
            return self._tuning_only(tuning, view, now, overdue)
        run = None
        if tuning is not None and self._starves(tuning, now):
            run = self._minimum_share(tuning, view)
        elif decode is not None and prefill is not None and decode.key != prefill.key:
            run = self._prefill_alone(prefill, view, now)  # fine-tuning waits while a prefill does
        elif tuning is not None and first.key != tuning.key:
            run = self._tuning_alone(tuning, view, now)
        if run is not None:
            return run
        due = first.arrived + self.wait_ms / 1e3
        if due > now and view.thinking:
            return Wait(due)
        takes = self._with_inference(view.queues[first.key], view.max_rows, now)
        mixed = takes[-1][0].kind is _FINETUNE
        return Run(first.key, takes, "co-served" if mixed else "inference")

    def _starves(self, tuning: Request, now: float) -> bool:
        """Return whether fine-tuning has had no slack for so long that it gets its minimum share."""
        slo = self.slo_ms / 1e3
        waited = tuning.arrived + self.margins.patience * slo
        return now >= max(waited, self._last_tuned + self.margins.starved * slo)

    def _minimum_share(self, tuning: Request, view: View) -> Run:
        rows = self._rows_within(tuning.key, 0, self.margins.tune * self.slo_ms / 1e3, view.max_rows)
        return Run(tuning.key, view.queues[tuning.key].take(max(rows, 1), first=tuning), _STARVING)

    def _prefill_alone(self, prefill: Request, view: View, now: float) -> Run | None:
        """Run prefill rows at another layer than decode rows, if the slack allows it or the prefill is urgent."""
        key = prefill.key
        queue = view.queues[key]
        rows = self._rows_within(key, 0, self.tokens.slack.for_prefill(now), view.max_rows)
        hurry = self.tokens.in_a_hurry(prefill.client, now)
        if not hurry and rows < min(queue.rows, self._worth_a_batch(key)):
            return None
        rows = max(rows, min(self.margins.unknown, view.max_rows))
        return Run(key, self._with_inference(queue, rows, now), "hurry" if hurry else "prefill")

    def _tuning_alone(self, tuning: Request, view: View, now: float) -> Run | None:
        """Run fine-tuning rows at another layer than inference rows, if the slack allows it.

        They also run while inference is queued, because under load inference is always queued.
        """
        queue = view.queues[tuning.key]
        rows = self._rows_within(tuning.key, 0, self._for_tuning(tuning, now), view.max_rows)
        if rows < min(queue.rows, self._worth_a_batch(tuning.key)):
            return None
        return Run(tuning.key, queue.take(rows), "budget")

    def _tuning_only(self, tuning: Request, view: View, now: float, overdue: float) -> Decision:
        """Decide while nothing but fine-tuning is queued."""
        queue = view.queues[tuning.key]
        seconds = self._for_tuning(tuning, now)
        if not view.thinking:  # only a client that begins a walk can send a request
            seconds = max(seconds, self.margins.tune * self.slo_ms / 1e3)
        rows = self._rows_within(queue.key, 0, min(seconds, self.slo_ms / 1e3), view.max_rows)
        if view.thinking and seconds < math.inf and rows < min(queue.rows, self._worth_a_batch(queue.key)):
            return Wait(max(min(self.tokens.slack.next_given_up(), overdue), now + 1e-4))
        return Run(queue.key, queue.take(max(rows, 1)), "budget" if rows < min(queue.rows, view.max_rows) else "all")

    def _with_inference(self, queue: QueueView, max_rows: int, now: float) -> Takes:
        """Return all decode rows of a queue, and the prefill and fine-tuning rows that fit into the slack."""
        key, takes = queue.key, Takes()
        rows = self._take(queue, _DECODE, max_rows, takes)
        if rows < max_rows and key in self._queued[_PREFILL]:
            seconds = self.tokens.slack.for_prefill(now)
            most = self._rows_within(key, rows, seconds, max_rows)
            least = 0 if rows else min(self.margins.unknown, max_rows)
            rows += self._take(queue, _PREFILL, max(most - rows, least), takes)
        if rows < max_rows and key in self._queued[_FINETUNE]:
            tuning = next(self._queued[_FINETUNE].of(key))
            most = self._rows_within(key, rows, self._for_tuning(tuning, now), max_rows)
            self._take(queue, _FINETUNE, most - rows, takes)
        return takes or queue.take(max_rows)  # a client has queued fine-tuning ahead of its inference rows

    def _take(self, queue: QueueView, kind: Kind, most: int, takes: Takes) -> int:
        """Add up to ``most`` rows of a kind, and return their number. Only the first request of each client is taken,
        because a client's requests stay in order, whatever their kinds."""
        left = most
        index = self._queued[kind]
        if left > 0 and queue.key in index:
            for request in index.of(queue.key):
                if queue.of(request.client)[0] is request:
                    count = min(request.rows - request.taken, left)
                    takes.append((request, count))
                    left -= count
                    if not left:
                        break
        return most - left

    def _for_tuning(self, tuning: Request, now: float) -> float:
        """Return the seconds that a batch of fine-tuning rows may take now."""
        return self.margins.tune * self.tokens.slack.for_tuning(now) - self.own_work.seconds(tuning)

    def _worth_a_batch(self, key: Key) -> int:
        """Return the rows from which a batch spends at most half of its time on what any batch of its key costs."""
        start, slope = self.latency[key].coefficients
        return max(1, math.ceil(min(start / slope, 1e9))) if slope > 0 else 1

    def _rows_within(self, key: Key, rows: int, seconds: float, most: int) -> int:
        """Return the rows of a batch that takes ``seconds`` longer than a batch of ``rows``."""
        if seconds <= 0:
            return rows
        if seconds == math.inf:
            return most
        line = self.latency[key]
        if not line.count:
            return min(max(rows, self.margins.unknown), most)
        return max(rows, line.rows_within((line.predict(rows) if rows else 0.0) + seconds, most))

    def __repr__(self) -> str:
        return f"CoServing(slo_ms={self.slo_ms}, ttft_ms={self.ttft_ms}, max_wait_ms={self.max_wait_ms})"


def _rows_of(batch: Batch) -> tuple[int, int, int]:
    """Return the decode, prefill and fine-tuning rows of a batch."""
    rows = [0, 0, 0]
    for request, start, stop in batch.slices:
        rows[request.kind] += stop - start
    return rows[0], rows[1], rows[2]


def _targets(clients: Mapping[str, tuple[float, float]] | None) -> dict[str, tuple[float, float]]:
    """Return (slo_ms, ttft_ms) by client.

    Raises:
        UsageError: a client has no such pair.
    """
    targets = {}
    for name, pair in mapping("co-serving", "clients", clients, tenants=False).items():
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise UsageError(
                f"co-serving: clients has {pair!r} for {name!r}; give (slo_ms, ttft_ms), on a command line "
                f"clients.{name}=50/900"
            )
        targets[name] = (
            milliseconds("co-serving", f"slo_ms of {name!r}", pair[0]),
            milliseconds("co-serving", f"ttft_ms of {name!r}", pair[1]),
        )
    return targets
