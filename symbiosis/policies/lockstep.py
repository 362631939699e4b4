"""Lockstep: wait for all clients at every layer (Symbiosis, section 3.7; mLoRA and vLLM batch in this way)."""

from __future__ import annotations

from symbiosis.core.policy import Decision, Policy, Run, View, Wait
from symbiosis.core.requests import Request
from symbiosis.policies.order import FurthestBehind


class Lockstep(Policy):
    """Run a batch only when all clients in a walk are blocked, and then the queue that is furthest behind.

    A client that thinks for a long time delays all other clients: this is what lockstep means. A client whose requests
    were passed over for 2 × layers batches during one walk runs first for the rest of that walk. In a walk of many
    tokens, 2 × layers requests count as a walk of their own.
    """

    name = "lockstep"
    lone_at_once = True

    def __init__(self) -> None:
        self._behind = FurthestBehind()

    def submitted(self, request: Request) -> None:
        self._behind.add(request)

    def decide(self, view: View, now: float) -> Decision:
        if view.thinking:
            return Wait(None)
        oldest, queues = view.oldest, view.queues
        if oldest.passed + view.batches - oldest.seen >= 2 * view.layers:
            key, reason = oldest.key, "overtaken"
        else:
            key = min(self._behind.candidates(queues), key=lambda key: queues[key].oldest.id)
            reason = "all-blocked"
        return Run(key, queues[key].take(view.max_rows), reason)
