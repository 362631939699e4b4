"""Opportunistic batching: wait a short time for other requests, longer for larger requests (Symbiosis, section 3.7)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from types import MappingProxyType

from symbiosis.core.policy import Decision, Policy, Run, View, Wait
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import Kind
from symbiosis.errors import UsageError
from symbiosis.policies.arrivals import Arrivals
from symbiosis.policies.latency import LatencyModel
from symbiosis.policies.options import milliseconds
from symbiosis.policies.order import FurthestBehind, too_many

_KINDS = {kind.name.lower(): kind for kind in Kind}

WAIT_MS = MappingProxyType({"decode": 10.0, "prefill": 2.0, "finetune": 2.0})
"""Milliseconds for each row. A decode row waits long enough for clients that are behind to reach its layer; prefill and
fine-tuning requests have more rows, which fill a batch sooner (docs/decisions/0016-deadlines-and-waits.md)."""


class Opportunistic(Policy):
    """Give each request a deadline scaled with its size, and batch the requests that are queued when it is due.

    A request of ``rows`` rows is due after ``min(wait_ms · rows, max_wait_ms)``. When requests are due and the executor
    is free, the one with the earliest deadline runs first, with all requests that fit into its batch. So a deadline is
    missed by at most the batch that is running, the requests with earlier deadlines, and earlier requests of the same
    client for the same layer. While no request is due, the queue that is *furthest behind* runs, so that clients at
    different layers meet and share batches from there on. This queue waits for other requests, except in three cases:

    * no client is thinking, so no request can join;
    * a queue fills a batch of ``max_rows``, and runs instead;
    * if ``adaptive``, no thinking client is expected at that layer so soon that the wait pays
      (:mod:`symbiosis.policies.arrivals`).

    Args:
        wait_ms: deadline per row, in milliseconds, for all kinds of requests; or by kind (decode, prefill, finetune),
            where missing kinds have the values of :data:`WAIT_MS`. Deadlines shorter than a few batches leave clients
            desynchronized, and their batches small. With 0, requests run in the order of arrival, together with
            requests that are queued for the same layer.
        max_wait_ms: longest deadline of a request, in milliseconds.
        adaptive: whether waits end early when they are not expected to pay. Otherwise a queue waits until the deadline
            while a client is thinking, which needs deadlines of a few milliseconds.

    Raises:
        UsageError: an option has no valid value.
    """

    name = "opportunistic"
    lone_at_once = True

    def __init__(
        self,
        wait_ms: float | Mapping[str, float] = WAIT_MS,
        max_wait_ms: float = 50.0,
        adaptive: bool = True,
    ) -> None:
        if isinstance(wait_ms, Mapping):
            unknown = set(wait_ms) - set(_KINDS)
            if unknown:
                raise UsageError(f"opportunistic: wait_ms has {min(map(repr, unknown))}; kinds are {', '.join(_KINDS)}")
            wait_ms = {**WAIT_MS, **wait_ms}
            waits = {
                kind: milliseconds(self.name, f"wait_ms of {name}", wait_ms[name], zero=True)
                for name, kind in _KINDS.items()
            }
        else:
            waits = dict.fromkeys(Kind, milliseconds(self.name, "wait_ms", wait_ms, zero=True))
        if not isinstance(adaptive, bool):
            raise UsageError(f"opportunistic: adaptive is {adaptive!r}; it must be true or false")
        self.wait_ms = wait_ms
        self.max_wait_ms = milliseconds(self.name, "max_wait_ms", max_wait_ms, zero=True)
        self.latency = LatencyModel()
        self._waits_s = {kind: wait / 1e3 for kind, wait in waits.items()}
        self._arrivals = Arrivals(self.latency, self.max_wait_ms / 1e3) if adaptive else None
        self._behind = FurthestBehind()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._perhaps_full: set[Key] = set()
        """Keys that got rows since they were last seen not to fill a batch."""
        self._now = 0.0
        """Time of the latest decision, at which the latest batch started."""

    @property
    def adaptive(self) -> bool:
        """Whether waits end early when they are not expected to pay."""
        return self._arrivals is not None

    def deadline(self, request: Request) -> float:
        """Return when a request is due, in seconds on the executor's clock."""
        return request.arrived + min(self._waits_s[request.kind] * request.rows, self.max_wait_ms / 1e3)

    def submitted(self, request: Request) -> None:
        self._behind.add(request)
        self._perhaps_full.add(request.key)
        heapq.heappush(self._deadlines, (self.deadline(request), request.id, request))
        if self._arrivals is not None:
            self._arrivals.submitted(request)

    def started(self, batch: Batch) -> None:
        if self._arrivals is not None:
            self._arrivals.started(batch, self._now)

    def ran(self, batch: Batch, seconds: float) -> None:
        if self._arrivals is not None:
            self.latency[batch.key].learn(batch.rows, seconds)
            self._arrivals.ran(batch, seconds)

    def decide(self, view: View, now: float) -> Decision:
        self._now = now
        due, urgent = self._first_due()
        queues = view.queues
        if too_many(self._perhaps_full, queues):
            self._perhaps_full.intersection_update(queues)
            self._behind.prune(queues)
        if due <= now:
            queue = queues[urgent.key]
            first = queue.of(urgent.client)[0]  # requests of one client for a layer stay in order
            return Run(urgent.key, queue.take(view.max_rows, first=first), "deadline")
        behind = min(self._behind.candidates(queues), key=lambda key: queues[key].oldest.id)
        if not view.thinking:
            return Run(behind, queues[behind].take(view.max_rows), "no-client-thinking")
        full = self._full(view)
        if full is not None:
            return Run(full, queues[full].take(view.max_rows), "full")
        pays = math.inf if self._arrivals is None else self._arrivals.pays_until(behind, now)
        if pays <= now:
            return Run(behind, queues[behind].take(view.max_rows), "no-gain")
        return Wait(min(due, pays))

    def _first_due(self) -> tuple[float, Request]:
        """Return the earliest deadline of a queued request, and that request."""
        deadlines = self._deadlines
        while deadlines[0][2].cancelled or not deadlines[0][2].remaining:
            heapq.heappop(deadlines)
        due, _, request = deadlines[0]
        return due, request

    def _full(self, view: View) -> Key | None:
        """Return the key of a queue that fills a batch, if there is one. Reads the queues that grew; O(1) a request."""
        while self._perhaps_full:
            key = self._perhaps_full.pop()
            queue = view.queues.get(key)
            if queue is not None and queue.rows >= view.max_rows:
                self._perhaps_full.add(key)  # it may still be full after this batch
                return key
        return None
