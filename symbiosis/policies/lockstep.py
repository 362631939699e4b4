"""Lockstep: wait for all clients at every layer (Symbiosis, section 3.7; mLoRA and vLLM batch in this way)."""

from __future__ import annotations

from collections import OrderedDict

from symbiosis.core.policy import Decision, Policy, Run, View, Wait
from symbiosis.core.requests import Request
from symbiosis.policies.order import FurthestBehind


class Lockstep(Policy):
    """Run a batch only when all clients in a walk are blocked, and then the queue that is furthest behind.

    A client that thinks for a long time delays all other clients: this is what lockstep means. A request that was
    passed over for two walks through the model (2 × layers batches) runs first.
    """

    name = "lockstep"
    lone_at_once = True

    def __init__(self) -> None:
        self._behind = FurthestBehind()
        self._batches = 0
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Value of ``_batches`` when a request arrived, by its id."""

    def submitted(self, request: Request) -> None:
        self._behind.add(request)
        self._seen[request.id] = self._batches

    def decide(self, view: View, now: float) -> Decision:
        if view.thinking:
            return Wait(None)
        oldest = view.oldest
        while next(iter(self._seen)) != oldest.id:  # requests are submitted in the order of the view
            self._seen.popitem(last=False)
        self._batches += 1
        queues = view.queues
        if self._batches - self._seen[oldest.id] > 2 * view.layers:
            key, reason = oldest.key, "overtaken"
        else:
            key = min(self._behind.candidates(queues), key=lambda key: queues[key].oldest.id)
            reason = "all-blocked"
        return Run(key, queues[key].take(view.max_rows), reason)

    def __repr__(self) -> str:
        return "Lockstep()"
