"""Lockstep: wait for every client at every layer (Symbiosis, section 3.7; what mLoRA and vLLM do)."""

from __future__ import annotations

from collections import OrderedDict

from symbiosis.core.policy import Decision, Policy, Run, View, Wait
from symbiosis.core.requests import Request
from symbiosis.policies.order import FurthestBehind

__all__ = ["Lockstep"]


class Lockstep(Policy):
    """Run only when every client in a pass is blocked, and then the queue that is furthest behind.

    A client that thinks for long holds up all others: that is what lockstep means. A client cannot be overtaken for
    ever, though: a request that was passed over for two walks of the model (2 × layers batches) goes first.
    """

    name = "lockstep"
    lone_at_once = True

    def __init__(self) -> None:
        self._behind = FurthestBehind()
        self._batches = 0
        self._seen: OrderedDict[int, int] = OrderedDict()  # request id → self._batches when it came

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
            reason = "everyone-here"
        return Run(key, queues[key].take(view.max_rows), reason)

    def __repr__(self) -> str:
        return "Lockstep()"
