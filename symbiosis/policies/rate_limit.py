"""So many tokens a second for each tenant, around any policy."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from symbiosis.core.policy import Policy, View
from symbiosis.core.requests import Request
from symbiosis.policies.admission import Admission, mapping, number, tenant_of, tokens

__all__ = ["RateLimit"]

_MAX_TENANTS = 4096
"""Of whom something is remembered while they have nothing held."""
_SOON_S = 1e-4
"""After a bucket is out of debt."""


@dataclass(slots=True, eq=False)
class _Bucket:
    rate: float
    size: float
    level: float
    filled: float
    """When ``level`` was right, in seconds."""
    held: OrderedDict[int, Request] = field(default_factory=OrderedDict)
    due: bool = False
    """Whether it is to be looked at, now or later."""


class RateLimit(Admission):
    """A token bucket for each tenant: what stands before the slash of its clients' names.

    A request is let in while its tenant's bucket is not empty, and may leave it in debt, which is paid before the next.

    Args:
        policy: who decides about those that are let in; opportunistic batching if None.
        tokens_per_s: of a tenant, prompts, output and fine-tuning together. A forward walk through all layers counts 1,
            the walk back counts again.
        burst_s: how many seconds' worth a tenant that was quiet may take at once.
        tenants: ``tokens_per_s`` of those that have another.
    """

    name = "rate-limit"
    idles = True

    def __init__(
        self,
        policy: Policy | None = None,
        tokens_per_s: float = 1000.0,
        burst_s: float = 1.0,
        tenants: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(policy)
        self.tokens_per_s = number("rate-limit", "tokens_per_s", tokens_per_s)
        self.burst_s = number("rate-limit", "burst_s", burst_s)
        self.tenants = {
            name: number("rate-limit", f"the rate of {name!r}", rate)
            for name, rate in mapping("rate-limit", "tenants", tenants).items()
        }
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._ready: list[_Bucket] = []
        """Those that hold something, or did, and were not looked at since."""
        self._due: list[tuple[float, int, _Bucket]] = []
        """When the others that hold something, or did, are out of debt."""

    def hold(self, request: Request) -> None:
        name = tenant_of(request.client)
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= _MAX_TENANTS:
                self._forget(request.arrived)
            rate = self.tenants.get(name, self.tokens_per_s)
            size = rate * self.burst_s
            bucket = self._buckets[name] = _Bucket(rate, size, size, request.arrived)
        if not bucket.due:
            bucket.due = True
            self._ready.append(bucket)
        bucket.held[request.id] = request

    def release(self, view: View, now: float) -> float:
        due, layers = self._due, view.layers
        looked: list[_Bucket] = []
        while due and due[0][0] <= now:
            looked.append(heapq.heappop(due)[2])
        looked += self._ready
        self._ready.clear()
        for bucket in looked:
            bucket.due = False
            bucket.level = min(bucket.size, bucket.level + bucket.rate * max(now - bucket.filled, 0.0))
            bucket.filled = now
            held = bucket.held
            while held and bucket.level > 0:
                _, request = held.popitem(last=False)
                bucket.level -= tokens(request, layers)
                self.admit(request)
            if held:
                bucket.due = True
                again = now + max(-bucket.level / bucket.rate, 0.0) + _SOON_S
                heapq.heappush(due, (again, next(iter(held)), bucket))
        return due[0][0] if due else math.inf

    def drop(self, request: Request) -> None:
        self._buckets[tenant_of(request.client)].held.pop(request.id, None)

    def _forget(self, now: float) -> None:
        """Whose bucket is full again anyway."""
        for name, bucket in list(self._buckets.items()):
            if not bucket.held and not bucket.due and bucket.level + bucket.rate * (now - bucket.filled) >= bucket.size:
                del self._buckets[name]

    def __repr__(self) -> str:
        return f"RateLimit({self.policy!r}, tokens_per_s={self.tokens_per_s:g})"
