"""Wrappers: policies around a policy, which decide when a request is admitted to the inner policy.

A wrapper holds requests back and admits them by a rule of its own: fairness, priority or a rate. The inner policy sees
the admitted requests only. A wrapper goes around any policy, including other wrappers; a wrapper that holds requests
back while the executor is free goes outermost. An admitted request stays admitted.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from symbiosis.core.policy import MAX_WAIT_S, Decision, Policy, QueueView, View, Wait
from symbiosis.core.queues import Queues
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import Terms
from symbiosis.errors import UsageError
from symbiosis.policies.opportunistic import Opportunistic


class Admission(Policy):
    """Base class of wrappers. A subclass implements :meth:`hold`, :meth:`release` and :meth:`drop`.

    Args:
        policy: decides about the admitted requests; opportunistic batching if None.

    Raises:
        UsageError: ``policy`` is not a policy, or it is a wrapper that must be outside this one.
    """

    name: str
    idles: bool = False
    """Whether the wrapper holds requests back while nothing else is queued. Such a wrapper must be around
    wrappers that do not: these would count the requests that it holds back as being served."""

    def __init__(self, policy: Policy | None = None) -> None:
        if policy is None:
            policy = Opportunistic()
        if not isinstance(policy, Policy):
            raise UsageError(f"{self.name}: policy is {policy!r}; give an instance of a subclass of Policy")
        if isinstance(policy, Admission) and policy.idles and not self.idles:
            raise UsageError(
                f"{self.name} cannot go around {policy.name}: it would hold requests back for requests that "
                f"{type(policy).name} does not let run; write {type(policy).name}+{self.name}+…"
            )
        self.policy = policy
        self.name = f"{type(self).name}+{policy.name}"
        self.admitted = Queues()
        """Queued requests that were admitted."""
        self._view = _AdmittedView(self.admitted)
        self._raised: BaseException | None = None
        """Error that the inner policy raised when a request was admitted."""

    def bind(self) -> None:
        super().bind()
        self.policy.bind()

    def default_terms(self, client: str) -> Terms:
        return self.policy.default_terms(client)

    def may_join(self, client: str, now: float) -> bool:
        return self.policy.may_join(client, now)

    def slo(self) -> Mapping[str, tuple[int, int]]:
        return self.policy.slo()

    def service(self) -> Mapping[str, float]:
        return self.policy.service()

    @abstractmethod
    def hold(self, request: Request) -> None:
        """Note that a request was queued. It is held back until :meth:`admit` is called for it."""

    @abstractmethod
    def release(self, view: View, now: float) -> float:
        """Admit the requests that may run by now. Return the time at which to ask again, or ``inf``."""

    @abstractmethod
    def drop(self, request: Request) -> None:
        """Note that a request that is held back was cancelled or has run."""

    def gone(self, requests: Sequence[Request]) -> None:
        """Note that requests, admitted or held back, have no more rows to run. Called after :meth:`drop`."""

    def admit(self, request: Request) -> None:
        """Show a request to the inner policy. An error of the inner policy is raised later, by :meth:`decide`, so that
        the records of the wrapper stay right."""
        self.admitted.add(request)
        try:
            self.policy.submitted(request)
        except BaseException as error:  # noqa: BLE001 (a policy may raise anything)
            self._raised = error

    def submitted(self, request: Request) -> None:
        self.hold(request)

    def decide(self, view: View, now: float) -> Decision:
        until = self.release(view, now)
        if (raised := self._raised) is not None:
            self._raised = None
            raise raised
        if not len(self.admitted):
            return Wait(min(until, now + MAX_WAIT_S))
        self._view.real = view
        decision = self.policy.decide(self._view, now)
        if isinstance(decision, Wait):
            wanted = math.inf if decision.until is None else decision.until
            # The scheduler must see a wait that it refuses; a shorter one would hide it.
            if until < wanted and (view.thinking or wanted <= now + MAX_WAIT_S):
                return Wait(until)
        return decision

    def started(self, batch: Batch) -> None:
        first = batch.slices[0].request
        shown = first in self.admitted
        if shown:
            self.admitted.started(batch)
        elif not first.remaining:  # the scheduler refused a decision and served this request instead
            self.drop(first)
        self.gone([request for request, _, stop in batch.slices if stop == request.rows])
        if shown:
            self.policy.started(batch)

    def ran(self, batch: Batch, seconds: float) -> None:
        self.policy.ran(batch, seconds)

    def unloaded(self, seconds: float) -> None:
        self.policy.unloaded(seconds)

    def cancelled(self, request: Request) -> None:
        shown = request in self.admitted
        if shown:
            self.admitted.cancel(request)
        else:
            self.drop(request)
        self.gone([request])
        if shown:
            self.policy.cancelled(request)


class _AdmittedView:
    """The admitted requests. Implements :class:`~symbiosis.core.policy.View`."""

    real: View

    def __init__(self, admitted: Queues) -> None:
        self._admitted = admitted

    @property
    def queues(self) -> Mapping[Key, QueueView]:
        return self._admitted.by_key

    @property
    def oldest(self) -> Request:
        return self._admitted.oldest

    @property
    def thinking(self) -> int:
        return self.real.thinking

    @property
    def batches(self) -> int:
        return self.real.batches

    @property
    def layers(self) -> int:
        return self.real.layers

    @property
    def max_rows(self) -> int:
        return self.real.max_rows

    def part(self, key: Key) -> float:
        return self.real.part(key)
