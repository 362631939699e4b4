"""Fair shares of the executor: Virtual Token Counters around any policy (Sheng et al., OSDI '24; FlexLLM, algorithm 4).

Each tenant has a counter of the tokens that it was served, by weights. A request is admitted while its tenant's counter
is at most ``quantum`` above the least counter of the tenants that have a request queued; then the tenant is charged. A
tenant that is ahead goes on while no tenant behind it has a request queued, so fairness never leaves the executor idle.
A tenant's next request is admitted only while the tenant's admitted rows are fewer than a batch has room for. So a
request that arrives later does not wait behind a long queue of one tenant. Each tenant has this room to itself.

Let V be the highest counter at which a request was admitted so far, before the charge. A tenant that returns is raised
to V − quantum: it cannot save up the service that it did not use. VTC raises it to the least counter, which is higher.
Here a request is for one layer, and between two layers a tenant has none queued; with VTC's rule, a tenant that is
behind would lose its claim to more service at each layer.

A request of a joint walk has rows of several tenants. It is held back with each of them, and admitted as soon as it is
the next request of one of them that is let through: the counter and the queue of the others do not hold it up. Each
tenant is charged for its own rows. A tenant whose counter is more than ``quantum`` above V is not let into the next
joint walk. So a joint walk may put a tenant ahead by the tokens of its clients in that walk, in addition to the bound.

*Bound.* An admitted tenant is at most ``quantum`` above the least counter. So no tenant with a queued request is below
V − quantum, and none is above V + its own last charge. Hence the counters of two tenants with queued requests differ by
at most U = ``quantum`` + the larger of their last charges. While both always have requests queued, the service that
they are admitted for differs by at most 2 · U (VTC's lemma 1 and theorem 1), for any requests of other tenants.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from symbiosis.core.policy import Policy, View
from symbiosis.core.requests import Request
from symbiosis.core.terms import MOST_DECODED, Kind, tenant_of
from symbiosis.errors import UsageError
from symbiosis.policies.admission import Admission
from symbiosis.policies.options import mapping, number

_MAX_CLIENTS = 16384
"""Clients whose tenant need not be looked up by its name."""
_MAX_TENANTS = 4096
"""Tenants that are remembered while they have nothing queued."""
_MAX_WEIGHT = 1e6
"""Largest weight, and the inverse of the smallest."""


@dataclass(slots=True, eq=False)
class _TenantQueue:
    number: int
    weight: float
    counter: float = 0.0
    charged: float = 0.0
    """Tokens that the tenant was charged for. The counter also has the amounts by which it was raised."""
    queued: int = 0
    """Requests with rows to run, held back or admitted."""
    inside: int = 0
    """Rows of the admitted requests."""
    held: OrderedDict[int, Request] = field(default_factory=OrderedDict)
    """Requests that are held back. A request of a joint walk is held back with each of its tenants."""


class _ByCounter:
    """Tenants by counter. Counters only grow, so a stored counter is at most the present one. A stale entry is
    corrected when it reaches the top of the heap."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, _TenantQueue]] = []
        self._members: set[_TenantQueue] = set()

    def add(self, tenant: _TenantQueue) -> None:
        """Add a tenant, unless it is a member."""
        if tenant not in self._members:
            self._members.add(tenant)
            heapq.heappush(self._entries, (tenant.counter, tenant.number, tenant))

    def least(self, belongs: Callable[[_TenantQueue], object]) -> _TenantQueue | None:
        """Return the tenant with the least counter, or None. Tenants on the way that do not belong are removed."""
        entries = self._entries
        while entries:
            counter, number, tenant = entries[0]
            if not belongs(tenant):
                heapq.heappop(entries)
                self._members.discard(tenant)
            elif counter == tenant.counter:
                return tenant
            else:
                heapq.heapreplace(entries, (tenant.counter, number, tenant))
        return None


class Fair(Admission):
    """Admit the requests of the tenant that was served least.

    The tenant of a client is the part of its name before the slash, as in ``alice/notebook``. Over ``tcp://`` with keys
    this is the name of the key; otherwise it is what the client states. A token's forward walk through all layers
    counts 1, times the weight of its kind, and each layer a part of that in proportion to its weights; its backward
    walk counts again. A client in another process states the kind itself. Its forward requests count at least as much
    as if their first 64 rows were output.

    Args:
        policy: decides about the admitted requests; opportunistic batching if None.
        quantum: weighted tokens by which a tenant may be ahead of the one that was served least. A smaller quantum is
            fairer in the short term. With a larger one, tenants share more batches, and a prompt of that length is read
            without interruption.
        prompt, output, finetune: weights of a token, by kind (w_p, w_q and w_r in the paper).
        weights: shares of the executor by tenant, relative to 1 for the tenants that are not listed.

    Raises:
        UsageError: an option has no valid value.
    """

    name = "fair"

    def __init__(
        self,
        policy: Policy | None = None,
        quantum: float = 64.0,
        prompt: float = 1.0,
        output: float = 2.0,
        finetune: float = 1.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(policy)
        self.quantum = number("fair", "quantum", quantum)
        self.prompt, self.output, self.finetune = prompt, output, finetune
        self._kinds = {
            Kind.PREFILL: _weight("prompt", prompt),
            Kind.DECODE: _weight("output", output),
            Kind.FINETUNE: _weight("finetune", finetune),
        }
        self.weights = {
            name: _weight(f"the weight of {name!r}", weight)
            for name, weight in mapping("fair", "weights", weights).items()
        }
        self._tenants: dict[str, _TenantQueue] = {}
        self._of: dict[str, _TenantQueue] = {}
        """Tenants by client, as far as they were looked up lately."""
        self._numbers = itertools.count()
        self._queued = _ByCounter()
        """Tenants with a request queued."""
        self._held = _ByCounter()
        """Tenants with a request held back that has room in a batch."""
        self._reached = 0.0
        """Highest counter at which a request was admitted (V)."""
        self._floor = 0.0
        """Lower bound of the counters of tenants with a request queued."""

    def served(self, tenant: str) -> float:
        """Return a tenant's counter: weighted tokens, including those by which it was raised."""
        found = self._tenants.get(tenant)
        return found.counter if found else 0.0

    def service(self) -> Mapping[str, float]:
        """Return the tokens that each tenant was charged for, by the weights of kinds and divided by the tenant's."""
        return {name: tenant.charged for name, tenant in self._tenants.items()}

    def hold(self, request: Request) -> None:
        for client in request.clients:
            tenant = self._tenant(client)
            if not tenant.queued:
                tenant.counter = max(tenant.counter, self._reached - self.quantum)
                self._floor = min(self._floor, tenant.counter)
                self._queued.add(tenant)
            tenant.queued += 1
            self._held.add(tenant)
            tenant.held[request.id] = request

    def release(self, view: View, now: float) -> float:
        max_rows, least = view.max_rows, self._held.least
        most = self._floor + self.quantum

        def has_room(tenant: _TenantQueue) -> bool | OrderedDict[int, Request]:
            return tenant.inside < max_rows and tenant.held

        while (first := least(has_room)) is not None:
            counter = first.counter
            if counter > most:
                self._floor = self._least()
                most = self._floor + self.quantum
                if counter > most:
                    break
            request = next(iter(first.held.values()))
            if counter > self._reached:
                self._reached = counter
            tokens = self._weight_of(request) * request.rows * view.part(request.key)
            for client, part in request.clients.items():
                tenant = self._tenant(client)
                tenant.held.pop(request.id, None)
                tenant.counter += part * tokens / tenant.weight
                tenant.charged += part * tokens / tenant.weight
                tenant.inside += round(part * request.rows)
            self.admit(request)
        return math.inf

    def may_join(self, client: str, now: float) -> bool:
        tenant = self._of.get(client)
        is_ahead = tenant is not None and tenant.counter > self._reached + self.quantum
        return not is_ahead and super().may_join(client, now)

    def drop(self, request: Request) -> None:
        tenants = [(self._tenant(client), part) for client, part in request.clients.items()]
        held = [tenant.held.pop(request.id, None) for tenant, _ in tenants]
        if any(held):
            for tenant, part in tenants:
                tenant.inside += round(part * request.rows)  # `gone` follows and takes them off again

    def gone(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for client, part in request.clients.items():
                tenant = self._tenant(client)
                tenant.queued -= 1
                tenant.inside -= round(part * request.rows)
                if tenant.held:
                    self._held.add(tenant)

    def _weight_of(self, request: Request) -> float:
        """Return what a token of a request counts."""
        weight = self._kinds[request.kind]
        if request.kind is Kind.DECODE or request.local or request.key.pass_.is_backward:
            return weight
        return max(weight, self._kinds[Kind.DECODE] * min(1.0, MOST_DECODED / request.rows))

    def _least(self) -> float:
        """Return the least counter of the tenants with a request queued, of which there is one."""
        tenant = self._queued.least(lambda tenant: tenant.queued)
        assert tenant is not None
        return tenant.counter

    def _tenant(self, client: str) -> _TenantQueue:
        """Return the tenant of a client."""
        known = self._of.get(client)
        if known is not None:
            return known
        if len(self._of) >= _MAX_CLIENTS:
            self._of.clear()
        name = tenant_of(client)
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= _MAX_TENANTS:
                self._forget()
            tenant = self._tenants[name] = _TenantQueue(next(self._numbers), self.weights.get(name, 1.0))
        self._of[client] = tenant
        return tenant

    def _forget(self) -> None:
        """Forget the older half of the tenants without a queued request."""
        idle = [name for name, tenant in self._tenants.items() if not tenant.queued]
        for name in idle[: len(idle) // 2 + 1]:
            del self._tenants[name]
        self._of.clear()


def _weight(option: str, value: object) -> float:
    """Return a weight that counters can be computed with.

    Raises:
        UsageError: the value is no number, too small or too large.
    """
    weight = number("fair", option, value)
    if not 1 / _MAX_WEIGHT <= weight <= _MAX_WEIGHT:
        raise UsageError(f"fair: {option} is {value!r}; it must be between {1 / _MAX_WEIGHT:g} and {_MAX_WEIGHT:g}")
    return weight
