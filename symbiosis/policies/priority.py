"""Who is urgent goes first, around any policy."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from symbiosis.core.policy import Policy, View
from symbiosis.core.requests import Request
from symbiosis.core.terms import Terms
from symbiosis.errors import UsageError
from symbiosis.policies.admission import Admission, mapping, number, tenant_of

__all__ = ["Priority"]


@dataclass(slots=True, eq=False)
class _Level:
    queued: int = 0
    """Requests with rows to run, held or let in."""
    held: OrderedDict[int, Request] = field(default_factory=OrderedDict)


class Priority(Admission):
    """While a client of higher priority has something queued, those of lower priority wait.

    Who provides the executor says who is urgent: ``executor.client(priority=…)`` for a client in its process, and
    ``tenants`` for those who come from elsewhere, who can only ask for less than nothing (a negative priority).

    Args:
        policy: who decides about those that are let in; opportunistic batching if None.
        max_wait_ms: the longest that a request is held back.
        tenants: priorities by tenant (what stands before the slash of a client's name), added to its clients' own.
    """

    name = "priority"

    def __init__(
        self, policy: Policy | None = None, max_wait_ms: float = 1000.0, tenants: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(policy)
        self.max_wait_ms = number("priority", "max_wait_ms", max_wait_ms)
        self.tenants = dict(mapping("priority", "tenants", tenants))
        for name, priority in self.tenants.items():
            if isinstance(priority, bool) or not isinstance(priority, int):
                raise UsageError(f"priority: that of {name!r} is {priority!r}; it must be a whole number")
        self._levels: dict[int, _Level] = {}
        self._heap: list[int] = []
        """Their priorities, negative: the highest first."""
        self._held: OrderedDict[int, Request] = OrderedDict()
        """By id, in the order in which they came."""
        self._level_of: dict[int, _Level] = {}
        """By request, held or let in."""

    def default_terms(self, client: str) -> Terms:
        inner = super().default_terms(client)
        return inner._replace(priority=inner.priority + self.tenants.get(tenant_of(client), 0))

    def hold(self, request: Request) -> None:
        priority = request.terms.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            heapq.heappush(self._heap, -priority)
        level.queued += 1
        self._level_of[request.id] = level
        level.held[request.id] = self._held[request.id] = request

    def release(self, view: View, now: float) -> float:
        while (until := self._until()) <= now:
            longest = next(iter(self._held.values()))
            self.drop(longest)
            self.admit(longest)
        while self._heap and not (highest := self._levels[-self._heap[0]]).queued:
            del self._levels[-heapq.heappop(self._heap)]
        if self._heap and highest.held:
            for request in highest.held.values():
                del self._held[request.id]
                self.admit(request)
            highest.held.clear()
            until = self._until()
        return until

    def _until(self) -> float:
        """When the next one has been held back for long enough."""
        return next(iter(self._held.values())).arrived + self.max_wait_ms / 1e3 if self._held else math.inf

    def drop(self, request: Request) -> None:
        if self._held.pop(request.id, None) is not None:
            del self._level_of[request.id].held[request.id]

    def gone(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._level_of.pop(request.id).queued -= 1

    def __repr__(self) -> str:
        return f"Priority({self.policy!r}, max_wait_ms={self.max_wait_ms:g})"
