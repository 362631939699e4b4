"""Fair shares of the executor: Virtual Token Counters around any policy (Sheng et al., OSDI '24; FlexLLM, algorithm 4).

Every tenant has a counter of the tokens that it was served, by weights. A request is let in while its tenant's counter
is at most ``quantum`` above the least counter among the tenants that have something queued, and is charged as it is let
in. When nobody behind has anything queued, whoever is ahead goes on: no time is wasted on fairness. Of each tenant no
more is let in than fills a batch, or one request that is larger, so that who comes later does not stand behind all of a
flood; what others have let in takes no room from it.

Let V be the highest counter that anybody was let in at, so far (before the charge). A tenant that comes back is lifted
to V − quantum: what it did not use while it was away it cannot save up. That is less than VTC takes away, which lifts
it to the least counter there is. Here a request is for one layer; tenants have nothing queued between two layers, and
would never catch up.

Who is let in is at most ``quantum`` above the least, so no tenant with something queued is below V − quantum; and none
is above V + its own last charge. So the counters of two tenants with something queued differ by at most U = ``quantum``
+ the larger of their last charges, and what they are let in for while both always have something queued by at most
2 · U (VTC's lemma 1 and theorem 1). What a third tenant asks for does not come into it, however large.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from symbiosis.core.policy import Policy, View
from symbiosis.core.requests import Request
from symbiosis.core.terms import Kind
from symbiosis.errors import UsageError
from symbiosis.policies.admission import Admission, mapping, number, tenant_of, tokens

__all__ = ["Fair"]

_MAX_CLIENTS, _MAX_TENANTS = 16384, 4096
"""Of whom something is remembered while they have nothing queued."""


@dataclass(slots=True, eq=False)
class _Tenant:
    number: int
    weight: float
    counter: float = 0.0
    queued: int = 0
    """Requests with rows to run, held or let in."""
    inside: int = 0
    """Rows of those that were let in."""
    held: OrderedDict[int, Request] = field(default_factory=OrderedDict)
    in_queued: bool = False
    in_held: bool = False
    """Those with as many rows inside as fill a batch may be left out."""


_MOST = 1e6
"""Times as much as another, or as little."""


class Fair(Admission):
    """The tenant that was served least goes first.

    A tenant is what stands before the slash of its clients' names, as in ``alice/notebook``: over ``tcp://`` with keys
    that is the key's name, else what a client calls itself, which is taken on trust. A token's forward walk through all
    layers counts 1 by its kind's weight; its walk back counts again.

    Args:
        policy: who decides about those that are let in; opportunistic batching if None.
        quantum: tokens, by weight, that a tenant may be ahead of the one that was served least. Less is fairer from
            moment to moment; more lets tenants share more batches, and a prompt of that length be read without pause.
        prompt, output, finetune: weights of a token, by its kind (w_p, w_q and w_r in the paper).
        weights: a tenant's share in proportion to others'; 1 for those that are not in it.
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
        self._kinds = {
            Kind.PREFILL: _weight("prompt", prompt),
            Kind.DECODE: _weight("output", output),
            Kind.FINETUNE: _weight("finetune", finetune),
        }
        self.weights = {
            name: _weight(f"the weight of {name!r}", weight)
            for name, weight in mapping("fair", "weights", weights).items()
        }
        self._tenants: dict[str, _Tenant] = {}
        self._of: dict[str, _Tenant] = {}
        """By client; those with something queued, and others that were here."""
        self._reached = 0.0
        """V."""
        self._numbers = itertools.count()
        self._queued: list[tuple[float, int, _Tenant]] = []
        """Tenants with something queued, by counter."""
        self._floor = 0.0
        """The least counter of the tenants with something queued is no less."""
        self._held: list[tuple[float, int, _Tenant]] = []
        """Tenants with something held, by counter."""

    def served(self, tenant: str) -> float:
        """A tenant's counter: tokens by weight, and what it was lifted by."""
        found = self._tenants.get(tenant)
        return found.counter if found else 0.0

    # --------------------------------------------------------------------------------------------------------- parts

    def hold(self, request: Request) -> None:
        tenant = self._of.get(request.client) or self._tenant(request.client)
        if not tenant.queued:
            tenant.counter = max(tenant.counter, self._reached - self.quantum)
            self._floor = min(self._floor, tenant.counter)
        if not tenant.in_queued:
            heapq.heappush(self._queued, (tenant.counter, tenant.number, tenant))
            tenant.in_queued = True
        if not tenant.in_held:
            heapq.heappush(self._held, (tenant.counter, tenant.number, tenant))
            tenant.in_held = True
        tenant.queued += 1
        tenant.held[request.id] = request

    def release(self, view: View, now: float) -> float:
        layers, max_rows = view.layers, view.max_rows
        kinds, most = self._kinds, self._floor + self.quantum
        while (first := self._first(max_rows)) is not None:
            counter = first.counter
            if counter > most:
                self._floor = self._least()
                most = self._floor + self.quantum
                if counter > most:
                    break
            _, request = first.held.popitem(last=False)
            if counter > self._reached:
                self._reached = counter
            first.counter = counter + kinds[request.kind] * tokens(request, layers) / first.weight
            first.inside += request.rows
            self.admit(request)
        return math.inf

    # Counters only grow, so an entry of a heap is never too high; it is put right when it comes to the top.

    def _first(self, max_rows: int) -> _Tenant | None:
        """Of the tenants with something held, and room for it, the one with the least counter."""
        heap = self._held
        while heap:
            counter, _, tenant = heap[0]
            if not tenant.held or tenant.inside >= max_rows:
                heapq.heappop(heap)
                tenant.in_held = False
            elif counter != tenant.counter:
                heapq.heapreplace(heap, (tenant.counter, tenant.number, tenant))
            else:
                return tenant
        return None

    def _least(self) -> float:
        """The least counter of the tenants with something queued."""
        heap = self._queued
        while True:
            counter, _, tenant = heap[0]  # who has something held has something queued
            if not tenant.queued:
                heapq.heappop(heap)
                tenant.in_queued = False
            elif counter != tenant.counter:
                heapq.heapreplace(heap, (tenant.counter, tenant.number, tenant))
            else:
                return counter

    def drop(self, request: Request) -> None:
        tenant = self._of[request.client]
        if tenant.held.pop(request.id, None) is not None:
            tenant.inside += request.rows  # which it never was; `gone` follows

    def gone(self, requests: Sequence[Request]) -> None:
        for request in requests:
            tenant = self._of[request.client]
            tenant.queued -= 1
            tenant.inside -= request.rows
            if tenant.held and not tenant.in_held:
                heapq.heappush(self._held, (tenant.counter, tenant.number, tenant))
                tenant.in_held = True

    def _tenant(self, client: str) -> _Tenant:
        """Of a client that is not known."""
        if len(self._of) >= _MAX_CLIENTS:
            self._forget()
        name = tenant_of(client)
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= _MAX_TENANTS:
                self._forget()
            tenant = self._tenants[name] = _Tenant(next(self._numbers), self.weights.get(name, 1.0))
        self._of[client] = tenant
        return tenant

    def _forget(self) -> None:
        """Half of those who have nothing queued, whoever was here first."""
        idle = [name for name, tenant in self._tenants.items() if not tenant.queued]
        for name in idle[: len(idle) // 2 + 1]:
            del self._tenants[name]
        self._of = {client: tenant for client, tenant in self._of.items() if tenant.queued}

    def __repr__(self) -> str:
        return f"Fair({self.policy!r}, quantum={self.quantum:g})"


def _weight(what: str, value: object) -> float:
    """A weight that counters can be counted with."""
    weight = number("fair", what, value)
    if not 1 / _MOST <= weight <= _MOST:
        raise UsageError(f"fair: {what} is {value!r}; it must be between {1 / _MOST:g} and {_MOST:g}")
    return weight
