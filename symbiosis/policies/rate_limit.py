"""Rate limits around any policy: a token bucket for each tenant."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from symbiosis.core.policy import Policy, View
from symbiosis.core.requests import Request
from symbiosis.core.terms import tenant_of
from symbiosis.policies.admission import Admission
from symbiosis.policies.options import mapping, number

_MAX_TENANTS = 4096
"""Tenants that are remembered while they have nothing held back."""
_ROUNDING_S = 1e-4
"""Added to the time at which a debt is paid, so that rounding does not leave a rest of it."""


@dataclass(slots=True, eq=False)
class _Bucket:
    rate: float
    size: float
    level: float
    filled: float
    """Time at which ``level`` was right, in seconds."""
    held: OrderedDict[int, Request] = field(default_factory=OrderedDict)
    """Requests that are held back. A request of a joint walk is held back in the bucket of each of its tenants."""
    due: bool = False
    """Whether the bucket is in one of the policy's lists of buckets to visit."""

    def level_at(self, now: float) -> float:
        """Return the tokens in the bucket at a time; less than 0 is a debt."""
        return min(self.size, self.level + self.rate * max(now - self.filled, 0.0))

    def pay(self, tokens: float, now: float) -> None:
        """Take tokens out of the bucket."""
        self.level, self.filled = self.level_at(now) - tokens, now


class RateLimit(Admission):
    """Limit each tenant (the part of a client's name before the slash) to a number of tokens per second.

    A request is admitted while its tenant's bucket is not empty. It may leave the bucket in debt; the debt is paid
    before the next request is admitted. A request of a joint walk is admitted while the bucket of one of its tenants is
    not empty, and all of them pay; a tenant in debt is not let into the next joint walk.

    Args:
        policy: decides about the admitted requests; opportunistic batching if None.
        tokens_per_s: rate of each tenant, for prompts, output and fine-tuning together. A token's forward walk
            through all layers counts 1, and each layer a part of that in proportion to its weights; the backward walk
            counts again. A prompt counts less than its tokens: the language model head computes its last row alone.
        burst_s: size of a bucket, in seconds at that rate.
        tenants: other rates, by tenant.

    Raises:
        UsageError: an option has no valid value.
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
        self._new: list[_Bucket] = []
        """Buckets that got a request and are visited next."""
        self._due: list[tuple[float, int, _Bucket]] = []
        """Heap of the times at which buckets with held requests are out of debt."""
        self._visits = itertools.count()
        """Order of buckets that are out of debt at the same time, such as those of one joint request."""

    def hold(self, request: Request) -> None:
        now = request.arrived
        for client in request.clients:
            bucket = self._bucket(client, now)
            if not bucket.due:
                bucket.due = True
                self._new.append(bucket)
            bucket.held[request.id] = request

    def release(self, view: View, now: float) -> float:
        due = self._due
        buckets: list[_Bucket] = []
        while due and due[0][0] <= now:
            buckets.append(heapq.heappop(due)[2])
        buckets += self._new
        self._new.clear()
        for bucket in buckets:
            bucket.due = False
            bucket.level, bucket.filled = bucket.level_at(now), now
            held = bucket.held
            while held and bucket.level > 0:
                request = next(iter(held.values()))
                tokens = request.rows * view.part(request.key)
                for client, part in request.clients.items():
                    payer = self._bucket(client, now)
                    payer.held.pop(request.id, None)
                    payer.pay(part * tokens, now)
                self.admit(request)
            if held:
                bucket.due = True
                again = now + max(-bucket.level / bucket.rate, 0.0) + _ROUNDING_S
                heapq.heappush(due, (again, next(self._visits), bucket))
        return due[0][0] if due else math.inf

    def drop(self, request: Request) -> None:
        for client in request.clients:
            self._bucket(client, request.arrived).held.pop(request.id, None)

    def may_join(self, client: str, now: float) -> bool:
        return self._bucket(client, now).level_at(now) > 0 and super().may_join(client, now)

    def _bucket(self, client: str, now: float) -> _Bucket:
        """Return the bucket of a client's tenant, which is full if it is new."""
        name = tenant_of(client)
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= _MAX_TENANTS:
                self._forget(now)
            rate = self.tenants.get(name, self.tokens_per_s)
            size = rate * self.burst_s
            bucket = self._buckets[name] = _Bucket(rate, size, size, now)
        return bucket

    def _forget(self, now: float) -> None:
        """Forget the buckets that are full and hold nothing back: they would be made anew as they are."""
        for name, bucket in list(self._buckets.items()):
            if not bucket.held and not bucket.due and bucket.level_at(now) >= bucket.size:
                del self._buckets[name]
