"""Co-serving: inference within its latency targets, and fine-tuning in the time that remains (FlexLLM, sections 5, 6).

Every token and every prompt has a deadline that follows from its SLO (:mod:`symbiosis.policies.walks`). The policy runs
*the most patient work that leaves all deadlines feasible*, by learned costs. While the slack of all tokens allows it,
that is fine-tuning, within its share of the time that prompts can spare, then prompts; otherwise it is decode rows.
Tokens are thus made as late as their SLOs permit: the later a token is made, the more texts share its batches, so the
more time remains. Decision 0036 has the argument, and its limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain

from symbiosis.core.policy import Decision, Policy, QueueView, Run, View, Wait
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import Kind, Terms
from symbiosis.errors import UsageError
from symbiosis.policies.latency import LONGEST_S, LatencyModel
from symbiosis.policies.options import milliseconds, targets
from symbiosis.policies.order import Index
from symbiosis.policies.own_work import OwnWork
from symbiosis.policies.starts import Starts
from symbiosis.policies.walks import Walks

_UNKNOWN = 64  # rows of a batch with an unknown latency
# On Python 3.11 a member looked up on its class takes six times as long.
_DECODE, _PREFILL, _FINETUNE = Kind.DECODE, Kind.PREFILL, Kind.FINETUNE


class CoServing(Policy):
    """Run prompts and fine-tuning while the slack of all tokens allows it, otherwise decode rows.

    Args:
        slo_ms: latency target for each generated token, as a mean over a text, in milliseconds.
        ttft_ms: latency target for the first token, from the first request of the prefill, in milliseconds. If the
            client sends a prompt in several passes, the time starts with the last one.
        wait_ms: longest time that decode rows wait for rows of thinking clients, in milliseconds.
        max_wait_ms: longest time that a request is passed over, in milliseconds. After it, requests run in the order of
            arrival, whatever the latency targets.
        clients: (slo_ms, ttft_ms) of single clients, by name. The provider may state other targets for a client in its
            process (``executor.client(slo_ms=…)``). A client in another process can ask for longer ones only.

    Raises:
        UsageError: an option has no valid value, or ``max_wait_ms`` is less than a target for tokens.
    """

    name = "co-serving"

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
        self.clients = targets(self.name, clients)
        longest = max(self.slo_ms, *(slo for slo, _ in self.clients.values()), 0.0)
        if self.max_wait_ms < longest:
            raise UsageError(
                f"co-serving: max_wait_ms is {self.max_wait_ms:g}, less than an SLO of {longest:g}, which then "
                "has no effect; give a longer max_wait_ms"
            )
        self.latency = LatencyModel()
        self.walks = Walks(self.slo_ms / 1e3, self.ttft_ms / 1e3)
        self.own_work = OwnWork()
        self._starts = Starts()
        self._queued = tuple(Index() for _ in Kind)  # by kind
        self._now = 0.0  # time of the latest decision, at which the latest batch started

    def default_terms(self, client: str) -> Terms:
        slo_ms, ttft_ms = self.clients.get(client, (self.slo_ms, self.ttft_ms))
        return Terms(slo_ms=slo_ms, ttft_ms=ttft_ms)

    def slo(self) -> Mapping[str, tuple[int, int]]:
        return self.walks.slo()

    def unloaded(self, seconds: float) -> None:
        for client, pair in {"": (self.slo_ms, self.ttft_ms), **self.clients}.items():
            for option, target in zip(("slo_ms", "ttft_ms"), pair, strict=True):
                if target < 1e3 * seconds:
                    raise UsageError(
                        f"co-serving: {option}{client and f' of {client!r}'} is {target:g}, but one token takes "
                        f"{1e3 * seconds:.3g} ms in base layers alone on an idle executor; give a longer time"
                    )
        shortest = min(self.slo_ms, *(slo for slo, _ in self.clients.values()), math.inf)
        if self.wait_ms > shortest:
            raise UsageError(
                f"co-serving: wait_ms is {self.wait_ms:g}, more than an SLO of {shortest:g}; give a shorter wait_ms"
            )

    def submitted(self, request: Request) -> None:
        self._queued[request.kind].add(request)
        begins = self._starts.begins(request, request.kind is not _FINETUNE and self.walks.is_over(request.client))
        self.own_work.submitted(request, begins)
        if request.kind is not _FINETUNE:
            self.walks.submitted(request, begins)

    def started(self, batch: Batch) -> None:
        for request, _, stop in batch.slices:
            if stop == request.rows:
                self._queued[request.kind].remove(request)
                if request.kind is not _FINETUNE:
                    self.walks.started(request, self._now + self.latency[batch.key].predict(batch.rows))

    def cancelled(self, request: Request) -> None:
        self._queued[request.kind].remove(request)

    def ran(self, batch: Batch, seconds: float) -> None:
        line = self.latency[batch.key]
        if 0 < seconds < LONGEST_S:
            decode = sum(stop - start for request, start, stop in batch.slices if request.kind is _DECODE)
            others = max(seconds - (line.predict(decode) if decode else 0.0), 0.0) / max(batch.rows - decode, 1)
            self.own_work.ran(seconds)
            for request, start, stop in batch.slices:
                if request.kind is not _DECODE:
                    self.walks.spent(request.client, others * (stop - start))
                    # On a GPU, the request was answered before its time is known.
                    if request.local and stop == request.rows and request.done != request.rows:
                        self.walks.spent(request.client, self.own_work.seconds(request))
                        self.own_work.answered(request, self._now + seconds)
                if request.kind is not _FINETUNE and stop == request.rows:
                    self.walks.answered(request)
        line.learn(batch.rows, seconds)

    def decide(self, view: View, now: float) -> Decision:
        self._now = now
        oldest = view.oldest
        overdue = oldest.arrived + self.max_wait_ms / 1e3
        if overdue <= now:
            return Run(oldest.key, view.queues[oldest.key].take(view.max_rows, first=oldest), "overdue")
        decode, prompt, tuning = (queued.furthest_behind() for queued in self._queued)
        if prompt is not None:
            first = self.walks.first_prompt(now)
            waits = first is None and self.walks.waits and view.thinking > 0  # for a prompt whose client thinks
            prompt = None if waits else first or prompt
        for patient in (tuning, prompt):  # fine-tuning first, for its share of the time that prompts can spare
            if patient is not None:
                rows = self._fitting(patient, view, now)
                if decode is None and not view.thinking and (patient is prompt or prompt is None):
                    rows = rows or max(self._rows_within(patient.key, 0, self.slo_ms / 1e3, view.max_rows), 1)
                if rows:
                    reason = "slack" if decode or view.thinking else "all"
                    return self._run(view, patient, rows, now, reason)
        if decode is None:
            return Wait(max(min(overdue, self.walks.next_look(now)), now + 1e-4))  # for a client that thinks
        due = decode.arrived + self.wait_ms / 1e3
        if due > now and view.thinking:
            return Wait(due)
        return self._run(view, decode, 0, now, "inference")

    def _fitting(self, patient: Request, view: View, now: float) -> int:
        """Return the rows of a prompt or of fine-tuning that fit into the slack; 0 if they are not worth a batch."""
        start, slope = self.latency[patient.key].coefficients
        worth = min(start / slope, view.max_rows) if slope > 0 else 1  # from here, rows take most of the time
        left = patient.rows - patient.taken
        rows = self._rows_within(patient.key, 0, self._slack(patient, now), view.max_rows)
        if patient.kind is _PREFILL:
            rows = min(rows, max(left, int(worth)))  # prompts that shared all their batches would all end late
        return rows if rows >= min(left, worth) else 0

    def _slack(self, patient: Request, now: float) -> float:
        """Return the seconds that a batch of a prompt or of fine-tuning may take now."""
        own = self.own_work.seconds(patient) if patient.kind is _FINETUNE else 0.0
        return self.walks.slack(patient.kind, now) - own

    def _run(self, view: View, first: Request, rows: int, now: float, reason: str) -> Run:
        """Run the queue's decode rows, and up to ``rows`` rows of the kind of ``first``. If that is a decode request,
        add what fits into the slack."""
        queue = view.queues[first.key]
        takes: list[tuple[Request, int]] = []
        total = self._take(queue, _DECODE, view.max_rows, takes)
        for kind in (_PREFILL, _FINETUNE) if first.kind is _DECODE else (first.kind,):
            if (patient := next(self._queued[kind].of(first.key), None)) is not None:
                slack = self._slack(patient, now)
                most = rows or self._rows_within(first.key, total, slack, view.max_rows) - total
                total += self._take(queue, kind, min(most, view.max_rows - total), takes, first)
        return Run(first.key, takes or queue.take(view.max_rows), reason)

    def _take(
        self, queue: QueueView, kind: Kind, most: int, takes: list[tuple[Request, int]], first: Request | None = None
    ) -> int:
        """Add up to ``most`` rows of a kind, those of ``first`` before others, and return their number. A client's
        requests stay in order, whatever their kinds, so only its first one is taken."""
        left = most
        requests = self._queued[kind].of(queue.key)
        if first is not None and first.kind is kind:
            requests = chain((first,), (request for request in requests if request is not first))
        while left > 0 and (request := next(requests, None)):
            if queue.of(request.client)[0] is request:
                takes.append((request, min(request.rows - request.taken, left)))
                left -= takes[-1][1]
        return most - left

    def _rows_within(self, key: Key, rows: int, seconds: float, most: int) -> int:
        """Return the rows of a batch that takes ``seconds`` longer than a batch of ``rows``."""
        if seconds <= 0:
            return rows
        line = self.latency[key]
        if seconds == math.inf or not line.count:
            return most if seconds == math.inf else min(max(rows, _UNKNOWN), most)
        return max(rows, line.rows_within((line.predict(rows) if rows else 0.0) + seconds, most))
