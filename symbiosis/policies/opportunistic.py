"""Opportunistic batching: wait a little for company, longer for larger requests (Symbiosis, section 3.7)."""

from __future__ import annotations

import heapq
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from symbiosis.core.policy import Decision, Policy, QueueView, Run, View, Wait
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import Kind
from symbiosis.errors import UsageError
from symbiosis.policies.latency import LatencyModel
from symbiosis.policies.order import FurthestBehind

__all__ = ["Opportunistic"]

_LEARN = 0.1
"""Weight of the newest gap between two arrivals."""
_LEARN_TOGETHER = 0.02
"""Weight of the newest batch in how many of its members were together before."""
_LONGEST = 64
"""Layers that clients are taken to stay together at most."""
_AWAY = 16
"""Requests before the one for a key, from which company for it may come."""
_MAX_KEYS = 20_000
_MAX_CLIENTS = 20_000
_KINDS = {kind.name.lower(): kind for kind in Kind}


WAIT_MS = MappingProxyType({"decode": 10.0, "prefill": 2.0, "finetune": 2.0})
"""Milliseconds a row. A token's is long enough for others to catch up with it (docs/architecture.md); prompts and
training batches have more rows, and are worth a batch sooner."""


class Opportunistic(Policy):
    """Give every request a deadline scaled with its size; batch whatever has come when one is due.

    A request of ``rows`` rows is due after ``min(wait_ms · rows, max_wait_ms)``. Once the executor is free and somebody
    is due, the first one due is served, and whoever fits into its batch: no deadline is overrun by more than the batch
    that runs already, those of others that were due before, and what the same client has asked of the same layer
    before. Until then, the queue that is *furthest behind* runs: clients who drifted apart meet at the layer where the
    first one waits, and share batches from there on. It waits for company, but not

    * when nobody is thinking, so that nobody could join (D5);
    * when a queue can fill a batch of ``max_rows``;
    * when nobody who is thinking is on the way to that layer, a few requests before it;
    * when it is not expected to pay. Company saves what any batch of that key takes, whatever its size: ``a`` of a
      latency a + b · rows that is learned from the batches; and it saves that again at each of the n layers through
      which those who met stay together, which is learned too. So it waits where the next request for a key usually
      comes within n · a of the last one, and no longer than that after it.

    Args:
        wait_ms: deadline per row, in milliseconds, for all; or one for each kind of request, by name (decode, prefill,
            finetune), those of :data:`WAIT_MS` for those that are left out. Deadlines of less than some batches leave
            no time to catch up: clients who drifted apart stay so, and share little. 0: the first to come is served
            first, with whoever happens to be queued for the same layer.
        max_wait_ms: the longest deadline of any request, in milliseconds.
        adaptive: whether waits that are not expected to pay are left out. Without it each lasts until the deadline,
            if somebody thinks, which wants deadlines of a few milliseconds.
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
            waits = {kind: _milliseconds(f"wait_ms of {name}", wait_ms[name]) for name, kind in _KINDS.items()}
        else:
            waits = dict.fromkeys(Kind, _milliseconds("wait_ms", wait_ms))
        if not isinstance(adaptive, bool):
            raise UsageError(f"opportunistic: adaptive is {adaptive!r}; it must be true or false")
        self.wait_ms = wait_ms
        self.max_wait_ms = _milliseconds("max_wait_ms", max_wait_ms)
        self.adaptive = adaptive
        self.latency = LatencyModel()
        self._waits = {kind: wait / 1e3 for kind, wait in waits.items()}
        self._longest = self.max_wait_ms / 1e3
        self._behind = FurthestBehind()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._perhaps_full: set[Key] = set()  # keys that got rows since they were last seen not full
        self._arrivals: dict[Key, tuple[float, float]] = {}
        """By key: when the last request came, and the usual gap between two; in seconds."""
        self._at: dict[str, Key] = {}
        """Where clients were served last, who have not asked again."""
        self._leaving: dict[Key, OrderedDict[str, float]] = {}
        """Those, by key, and when that was, in seconds; the last one last. Who does not come back stays."""
        self._before: dict[Key, Key] = {}
        """Where whoever asks for a key was served before."""
        self._now = 0.0
        self._batches = 0
        self._last_batch: dict[str, int] = {}
        """By client."""
        self._together = 0.0
        """Of the neighbours in a batch, the part that shared their last batch as well."""

    def deadline(self, request: Request) -> float:
        """When a request is due, in seconds on the executor's clock."""
        wait = self._waits[request.kind] * request.rows
        return request.arrived + min(wait, self._longest)

    def submitted(self, request: Request) -> None:
        self._behind.add(request)
        key, now = request.key, request.arrived
        self._perhaps_full.add(key)
        heapq.heappush(self._deadlines, (self.deadline(request), request.id, request))
        if self.adaptive:
            last, usual = self._arrivals.get(key) or self._first(key)
            if now > last:  # not what a wrapper has held back
                self._arrivals[key] = now, (1 - _LEARN) * usual + _LEARN * min(now - last, self._longest)
            else:
                self._arrivals[key] = last, (1 - _LEARN) * usual
            before = self._at.pop(request.client, None)
            if before is not None:
                del self._leaving[before][request.client]
                self._before[key] = before

    def _first(self, key: Key) -> tuple[float, float]:
        """For a key that nobody has asked for, or that was forgotten."""
        if len(self._arrivals) >= _MAX_KEYS:
            for known in (self._arrivals, self._at, self._leaving, self._before):
                known.clear()
        return -math.inf, 0.0

    def started(self, batch: Batch) -> None:
        if not self.adaptive:
            return
        if len(self._last_batch) >= _MAX_CLIENTS:
            for known in (self._last_batch, self._at, self._leaving):
                known.clear()
        self._batches += 1
        same, before, number, last_batch = 0, -1, self._batches, self._last_batch
        key, at, now = batch.key, self._at, self._now
        leaving = self._leaving.get(key)
        if leaving is None:
            leaving = self._leaving[key] = OrderedDict()
        for request, _, _ in batch.slices:
            client = request.client
            last = last_batch.get(client, -2)
            same += last == before
            before = last
            last_batch[client] = number
            if client in at:  # and asked for something else meanwhile, or for more than fits into a batch
                del self._leaving[at[client]][client]
            at[client] = key
            leaving[client] = now
        if len(batch.slices) > 1:
            self._together += _LEARN_TOGETHER * (same / (len(batch.slices) - 1) - self._together)

    def ran(self, batch: Batch, seconds: float) -> None:
        if self.adaptive:
            self.latency[batch.key].learn(batch.rows, seconds)

    def decide(self, view: View, now: float) -> Decision:
        self._now = now
        deadlines = self._deadlines
        while deadlines[0][2].cancelled or not deadlines[0][2].remaining:
            heapq.heappop(deadlines)
        due, _, urgent = deadlines[0]
        queues = view.queues
        if due <= now:
            queue = queues[urgent.key]
            first = queue.of(urgent.client)[0]  # one client's requests for a layer stay in order
            return Run(urgent.key, queue.take(view.max_rows, first=first), "deadline")
        behind = min(self._behind.candidates(queues), key=lambda key: queues[key].oldest.id)
        if not view.thinking:
            return Run(behind, queues[behind].take(view.max_rows), "nobody-thinking")
        full = self._full(view)
        if full is not None:
            return Run(full, queues[full].take(view.max_rows), "full")
        pays = self._pays_until(queues[behind])
        if pays <= now:
            reason = "no-gain" if pays == -math.inf else "gave-up"
            return Run(behind, queues[behind].take(view.max_rows), reason)
        return Wait(min(due, pays))

    def _pays_until(self, queue: QueueView) -> float:
        """How long company for a queue is worth waiting for, in seconds on the executor's clock."""
        if not self.adaptive:
            return math.inf
        start = self.latency[queue.key].start
        if start is None:  # nothing is known of it
            return -math.inf
        last, usual = self._arrivals.get(queue.key, (-math.inf, math.inf))  # forgotten, where there were too many keys
        worth = start * min(1 / max(1 - self._together, 1e-9), _LONGEST)
        if usual >= worth or not self._on_the_way(queue.key, self._now - start - worth):
            return -math.inf
        return last + worth

    def _on_the_way(self, key: Key, since: float) -> bool:
        """Whether somebody who has not asked again was served a few layers before, no longer ago than that."""
        for _ in range(_AWAY):
            before = self._before.get(key)
            if before is None:
                return False
            leaving = self._leaving.get(before)
            if leaving and next(reversed(leaving.values())) >= since:
                return True
            key = before
        return False

    def _full(self, view: View) -> Key | None:
        """A queue that fills a batch, if there is one. Looks only at queues that grew; O(1) a request."""
        while self._perhaps_full:
            key = self._perhaps_full.pop()
            queue = view.queues.get(key)
            if queue is not None and queue.rows >= view.max_rows:
                self._perhaps_full.add(key)  # it may still be full after this batch
                return key
        return None

    def __repr__(self) -> str:
        wait_ms = dict(self.wait_ms) if isinstance(self.wait_ms, Mapping) else self.wait_ms
        return f"Opportunistic(wait_ms={wait_ms}, max_wait_ms={self.max_wait_ms:g})"


def _milliseconds(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise UsageError(f"opportunistic: {what} is {value!r}; it must be a number of milliseconds, 0 or more")
    return float(value)
