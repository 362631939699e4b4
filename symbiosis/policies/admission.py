"""Policies around a policy: which requests the inner one is shown, and when.

A wrapper holds requests back and lets them in by a rule of its own: fairness, priority, a rate. The inner policy
decides about those that are in, as if there were no others, so a wrapper goes around any policy, other wrappers
included: but for those that hold back though nothing else runs, which go outermost. A request that was let in stays in.
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from symbiosis.core.policy import MAX_WAIT_S, Decision, Policy, QueueView, View, Wait
from symbiosis.core.queues import Queues
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import Terms
from symbiosis.errors import UsageError
from symbiosis.policies.opportunistic import Opportunistic

__all__ = ["Admission", "mapping", "number", "tenant_of", "tokens"]

T = TypeVar("T")


@lru_cache(1 << 14)
def tenant_of(client: str) -> str:
    """``alice`` of ``alice/notebook``; a name without a slash is a tenant of its own."""
    return client.partition("/")[0]


def tokens(request: Request, layers: int) -> float:
    """What a request is of tokens' walks through all layers: one forward row through the whole model is 1."""
    return request.rows * len(request.key.layers) / layers


def number(who: str, what: str, value: object) -> float:
    """A finite number greater than 0.

    Raises:
        UsageError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise UsageError(f"{who}: {what} is {value!r}; it must be a number greater than 0")
    return float(value)


def mapping(who: str, what: str, value: Mapping[str, T] | None, *, tenants: bool = True) -> Mapping[str, T]:
    """A mapping by the names of tenants, or of clients; empty for None.

    Raises:
        UsageError: it is none, or has a name that nobody can have.
    """
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"{who}: {what} is {value!r}; give one for each by name, as in {what}.alice=…")
    for name in value or {}:
        if not isinstance(name, str) or not name:
            raise UsageError(f"{who}: {what} has {name!r}, which is no name")
        if tenants and "/" in name:
            raise UsageError(f"{who}: {what} has {name!r}; it goes by tenants, so give {tenant_of(name)!r}")
    return value or {}


class Admission(Policy):
    """What wrappers have in common.

    Args:
        policy: the inner policy; opportunistic batching if None.
    """

    name: str
    idles = False
    """Whether it holds requests back though nothing else is queued. It goes around others then: one around it would
    count what it holds as being served, and let others wait for that."""

    def __init__(self, policy: Policy | None = None) -> None:
        if policy is None:
            policy = Opportunistic()
        if not isinstance(policy, Policy):
            raise UsageError(f"{self.name}: policy is {policy!r}; give an instance of a subclass of Policy")
        if isinstance(policy, Admission) and policy.idles and not self.idles:
            raise UsageError(
                f"{self.name} cannot go around {policy.name}: others would wait for what that holds back while nothing "
                f"runs. Give them the other way round, {type(policy).name}+{self.name}+…"
            )
        self.policy = policy
        self.name = f"{type(self).name}+{policy.name}"
        self._view = _View()
        self._raised: BaseException | None = None
        """By the inner policy, when it was shown a request."""

    def bind(self) -> None:
        super().bind()
        self.policy.bind()

    def default_terms(self, client: str) -> Terms:
        return self.policy.default_terms(client)

    # ---------------------------------------------------------------------------------------------- for the subclasses

    @abstractmethod
    def hold(self, request: Request) -> None:
        """A request was queued; it is held back until it is let in by :meth:`admit`."""

    @abstractmethod
    def release(self, view: View, now: float) -> float:
        """Let in whatever may be by now; the time at which to ask again, or ``inf``."""

    @abstractmethod
    def drop(self, request: Request) -> None:
        """A request that is held was cancelled."""

    def gone(self, requests: Sequence[Request]) -> None:
        """Requests, let in or held, have no more rows to run. Called after :meth:`drop`."""

    def admit(self, request: Request) -> None:
        """Show a request to the inner policy. If that raises, :meth:`decide` does, when all books are done."""
        self._view.admitted.add(request)
        try:
            self.policy.submitted(request)
        except BaseException as error:  # noqa: BLE001 (whatever it is)
            self._raised = error

    # ---------------------------------------------------------------------------------------------------------- policy

    def submitted(self, request: Request) -> None:
        self.hold(request)

    def decide(self, view: View, now: float) -> Decision:
        until = self.release(view, now)
        if (raised := self._raised) is not None:
            self._raised = None
            raise raised
        if not len(self._view.admitted):
            return Wait(min(until, now + MAX_WAIT_S))
        self._view.real = view
        decision = self.policy.decide(self._view, now)
        if isinstance(decision, Wait):
            wanted = math.inf if decision.until is None else decision.until
            # A wait that the scheduler must refuse is its to see, not to be hidden by a shorter one.
            if until < wanted and (view.thinking or wanted <= now + MAX_WAIT_S):
                return Wait(until)
        return decision

    def started(self, batch: Batch) -> None:
        first = batch.slices[0].request
        shown = first in self._view.admitted
        if shown:
            self._view.admitted.started(batch)
        elif not first.remaining:  # the scheduler has served it in place of a decision that it refused
            self.drop(first)
        self.gone([request for request, _, stop in batch.slices if stop == request.rows])
        if shown:
            self.policy.started(batch)

    def ran(self, batch: Batch, seconds: float) -> None:
        self.policy.ran(batch, seconds)

    def unloaded(self, seconds: float) -> None:
        self.policy.unloaded(seconds)

    def cancelled(self, request: Request) -> None:
        shown = request in self._view.admitted
        if shown:
            self._view.admitted.cancel(request)
        else:
            self.drop(request)
        self.gone([request])
        if shown:
            self.policy.cancelled(request)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r})"


class _View:
    """What was let in. Implements :class:`~symbiosis.core.policy.View`."""

    real: View

    def __init__(self) -> None:
        self.admitted = Queues()

    @property
    def queues(self) -> Mapping[Key, QueueView]:
        return self.admitted.by_key

    @property
    def oldest(self) -> Request:
        return self.admitted.oldest

    @property
    def thinking(self) -> int:
        return self.real.thinking

    @property
    def layers(self) -> int:
        return self.real.layers

    @property
    def max_rows(self) -> int:
        return self.real.max_rows
