"""Who is urgent goes first, around any policy."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from symbiosis.core.protocols import Policy, View
from symbiosis.core.requests import Request
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
            del self._levels[self._priority(request)]

    def _priority(self, request: Request) -> int:
        own = min(request.terms.priority, 0) if request.terms.asked else request.terms.priority
        return own + self.tenants.get(tenant_of(request.client), 0)

    def _level(self, request: Request) -> _Level:
        return self._levels.setdefault(self._priority(request), _Level())

    def __repr__(self) -> str:
        return f"Priority({self.policy!r}, max_wait_ms={self.max_wait_ms:g})"
