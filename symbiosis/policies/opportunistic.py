"""Opportunistic batching: wait a little for company, longer for larger requests (Symbiosis, section 3.7)."""

from __future__ import annotations

import heapq
import math

from symbiosis.core.protocols import Decision, Run, View, Wait
from symbiosis.core.requests import Key, Request
from symbiosis.errors import UsageError
from symbiosis.policies.order import FurthestBehind

__all__ = ["Opportunistic"]


_FLAT = 16
"""Rows up to which a batch costs about what one row costs: reading the weights."""


class Opportunistic:
    """Give every request a deadline scaled with its size; batch whatever has come when one is due.

    A request of ``rows`` rows waits for company at most ``min(wait_ms · rows, max_wait_ms)``. The wait ends early

    * when nobody is thinking, so that nobody could join (D5);
    * when its queue can fill a batch of ``max_rows``.

    When the executor is busy, requests are due before their turn comes, and what counts is the order. A queue that is
    due may be passed over by one that is further behind and costs no more: they meet at the layer where the first one
    waits and share batches from there on, and a small request never waits for a large one. Nobody is passed over for
    longer than ``max_wait_ms``.

    Args:
        wait_ms: wait per row, in milliseconds.
        max_wait_ms: the longest wait of any request, in milliseconds.
    """

    name = "opportunistic"
    lone_at_once = True

    def __init__(self, wait_ms: float = 0.2, max_wait_ms: float = 50.0) -> None:
        for option, value in (("wait_ms", wait_ms), ("max_wait_ms", max_wait_ms)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise UsageError(
                    f"opportunistic: {option} is {value!r}; it must be a number of milliseconds, 0 or more"
                )
        self.wait_ms = wait_ms
        self.max_wait_ms = max_wait_ms
        self._behind = FurthestBehind()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._perhaps_full: set[Key] = set()  # keys that got rows since they were last seen not full

    def deadline(self, request: Request) -> float:
        """When a request is due, in seconds on the executor's clock."""
        return request.arrived + min(self.wait_ms * request.rows, self.max_wait_ms) / 1e3

    def submitted(self, request: Request) -> None:
        self._behind.add(request)
        self._perhaps_full.add(request.key)
        heapq.heappush(self._deadlines, (self.deadline(request), request.id, request))

    def decide(self, view: View, now: float) -> Decision:
        deadlines = self._deadlines
        while deadlines[0][2].cancelled or not deadlines[0][2].remaining:
            heapq.heappop(deadlines)
        due, _, urgent = deadlines[0]
        queues = view.queues
        oldest = view.oldest
        if now - oldest.arrived >= self.max_wait_ms / 1e3:
            return Run(oldest.key, queues[oldest.key].take(view.max_rows, first=oldest), "overdue")
        behind = min(self._behind.candidates(queues), key=lambda key: queues[key].oldest.id)
        if due <= now:
            if behind != urgent.key and queues[behind].rows <= max(queues[urgent.key].rows, _FLAT):
                return Run(behind, queues[behind].take(view.max_rows), "catching-up")
            return Run(urgent.key, queues[urgent.key].take(view.max_rows, first=urgent), "deadline")
        if not view.thinking:
            return Run(behind, queues[behind].take(view.max_rows), "nobody-thinking")
        full = self._full(view)
        if full is not None:
            return Run(full, queues[full].take(view.max_rows), "full")
        return Wait(due)

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
        return f"Opportunistic(wait_ms={self.wait_ms}, max_wait_ms={self.max_wait_ms})"
