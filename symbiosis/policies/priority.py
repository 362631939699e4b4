"""Priorities around any policy: requests of higher priority run first."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from symbiosis.core.policy import Policy, View
from symbiosis.core.requests import Request
from symbiosis.core.terms import Terms, tenant_of
from symbiosis.policies.admission import Admission
from symbiosis.policies.options import mapping, milliseconds, whole


@dataclass(slots=True, eq=False)
class _Level:
    queued: int = 0
    """Requests with rows to run, held back or admitted."""
    held: OrderedDict[int, Request] = field(default_factory=OrderedDict)


class Priority(Admission):
    """Hold requests back while a client of higher priority has a request queued.

    The provider states priorities: ``executor.client(priority=…)`` for a client in the executor's process, and
    ``tenants`` for clients in other processes, which can only ask for a negative one themselves.

    Args:
        policy: decides about the admitted requests; opportunistic batching if None.
        max_wait_ms: longest time that a request is held back, in milliseconds.
        tenants: priorities by tenant (the part of a client's name before the slash), added to those of its clients.

    Raises:
        UsageError: an option has no valid value.
    """

    name = "priority"

    def __init__(
        self, policy: Policy | None = None, max_wait_ms: float = 1000.0, tenants: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(policy)
        self.max_wait_ms = milliseconds("priority", "max_wait_ms", max_wait_ms)
        self.tenants = {
            name: whole("priority", f"the priority of {name!r}", priority)
            for name, priority in mapping("priority", "tenants", tenants).items()
        }
        self._levels: dict[int, _Level] = {}
        self._highest: list[int] = []
        """Heap of the negative priorities of the levels."""
        self._held: set[int] = set()
        """Ids of the requests that are held back."""
        self._arrivals: list[tuple[float, int, Request]] = []
        """Heap of requests by arrival. A wrapper around this one may have held an older one back for longer than a
        newer one. Those that are no longer held back are removed at the top."""
        self._level_of: dict[int, _Level] = {}
        """Levels of the queued requests, by request id."""

    def default_terms(self, client: str) -> Terms:
        inner = super().default_terms(client)
        return inner._replace(priority=inner.priority + self.tenants.get(tenant_of(client), 0))

    def hold(self, request: Request) -> None:
        priority = request.terms.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            heapq.heappush(self._highest, -priority)
        level.queued += 1
        self._level_of[request.id] = level
        level.held[request.id] = request
        self._held.add(request.id)
        heapq.heappush(self._arrivals, (request.arrived, request.id, request))
        if len(self._arrivals) > 2 * len(self._held) + 64:  # one that stays first keeps those behind it
            self._arrivals = [entry for entry in self._arrivals if entry[1] in self._held]
            heapq.heapify(self._arrivals)

    def release(self, view: View, now: float) -> float:
        while (until := self._until()) <= now:
            longest = self._arrivals[0][2]
            self.drop(longest)
            self.admit(longest)
        while self._highest and not (highest := self._levels[-self._highest[0]]).queued:
            del self._levels[-heapq.heappop(self._highest)]
        if self._highest and highest.held:
            for request in highest.held.values():
                self._held.remove(request.id)
                self.admit(request)
            highest.held.clear()
            until = self._until()
        return until

    def _until(self) -> float:
        """Return when the next request has been held back for ``max_wait_ms``, or ``inf``."""
        arrivals = self._arrivals
        while arrivals and arrivals[0][1] not in self._held:
            heapq.heappop(arrivals)
        return arrivals[0][0] + self.max_wait_ms / 1e3 if arrivals else math.inf

    def drop(self, request: Request) -> None:
        if request.id in self._held:
            self._held.remove(request.id)
            del self._level_of[request.id].held[request.id]

    def gone(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._level_of.pop(request.id).queued -= 1
