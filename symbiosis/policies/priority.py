"""Who is urgent goes first, around any policy."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from symbiosis.core.protocols import Policy, View
from symbiosis.core.requests import Request
from symbiosis.errors import UsageError
from symbiosis.policies.admission import Admission, number

__all__ = ["Priority"]


@dataclass(slots=True, eq=False)
class _Level:
    queued: int = 0
    """Requests with rows to run, held or let in."""
    held: OrderedDict[int, Request] = field(default_factory=OrderedDict)


class Priority(Admission):
    """While a client of higher priority has something queued, those of lower priority wait.

    A client says its priority as it joins (``client(priority=…)``, ``--priority``), so where tenants do not trust each
    other there should be a :class:`~symbiosis.policies.fair.Fair` around this: urgency then is for a tenant's own
    clients to share.

    Args:
        policy: who decides about those that are let in; opportunistic batching if None.
        max_wait_ms: the longest that a request is held back.
        highest: what a client that asks for more is given.
    """

    name = "priority"

    def __init__(self, policy: Policy | None = None, max_wait_ms: float = 1000.0, highest: int = 100) -> None:
        super().__init__(policy)
        self.max_wait_ms = number("priority", "max_wait_ms", max_wait_ms)
        if isinstance(highest, bool) or not isinstance(highest, int):
            raise UsageError(f"priority: highest is {highest!r}; it must be a whole number")
        self.highest = highest
        self._levels: dict[int, _Level] = {}

    def hold(self, request: Request) -> None:
        level = self._level(request)
        level.queued += 1
        level.held[request.id] = request

    def release(self, view: View, now: float) -> float:
        until = math.inf
        higher = False
        for priority in sorted(self._levels, reverse=True):
            level = self._levels[priority]
            while level.held:
                request = next(iter(level.held.values()))
                due = request.arrived + self.max_wait_ms / 1e3
                if higher and due > now:
                    until = min(until, due)
                    break
                del level.held[request.id]
                self.admit(request)
            higher = higher or level.queued > 0
        return until

    def drop(self, request: Request) -> None:
        self._level(request).held.pop(request.id, None)

    def gone(self, request: Request) -> None:
        level = self._level(request)
        level.queued -= 1
        if not level.queued:
            del self._levels[min(request.terms.priority, self.highest)]

    def _level(self, request: Request) -> _Level:
        return self._levels.setdefault(min(request.terms.priority, self.highest), _Level())

    def __repr__(self) -> str:
        return f"Priority({self.policy!r}, max_wait_ms={self.max_wait_ms:g})"
