"""Faults of a policy: decisions that break a rule, and whatever its methods raise.

Each becomes a :class:`~symbiosis.errors.PolicyError`, and the scheduler goes on without the policy's answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from symbiosis.core.policy import MAX_WAIT_S, Decision, Policy, Run, Wait
from symbiosis.core.queues import Queue
from symbiosis.core.requests import Key
from symbiosis.core.terms import Terms
from symbiosis.errors import PolicyError, UsageError

T = TypeVar("T")
MAX_REASON = 64
"""Longest reason of a batch, in characters."""


class PolicyFaults:
    """The faults of one policy.

    Attributes:
        errors: the latest 16.
    """

    def __init__(self, policy: Policy) -> None:
        self.errors: deque[PolicyError] = deque(maxlen=16)
        self._name = _text(policy.name)

    def note(self, problem: str, consequence: str, cause: BaseException | None = None) -> None:
        """Keep a fault.

        Args:
            problem: what the policy did.
            consequence: what the scheduler did instead, or what may be wrong from now on.
            cause: what the policy raised.
        """
        error = PolicyError(f"policy {self._name} {problem}{f': {_text(cause)}' if cause else ''}; {consequence}")
        error.__cause__ = cause
        self.errors.append(error)

    def tell(self, name: str, hook: Callable[..., None], *what: Any) -> None:
        """Call a hook of the policy."""
        try:
            hook(*what)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (a policy may raise anything)
            self.note(f"raised in {name}()", "its own records may be wrong from here on", error)

    def ask(
        self,
        name: str,
        hook: Callable[..., T],
        *what: Any,
        fits: Callable[[T], bool] = lambda answer: True,
        instead: T,
        consequence: str,
    ) -> T:
        """Return what a hook of the policy returns, or ``instead`` if it raises or returns what does not fit."""
        try:
            answer = hook(*what)
            if fits(answer):
                return answer
        except Exception as error:  # noqa: BLE001 (a policy may raise anything)
            self.note(f"raised in {name}()", consequence, error)
        else:
            self.note(f"returned {_text(answer):.100} in {name}()", consequence)
        return instead


def are_terms(answer: object) -> bool:
    """Return whether this is an answer of ``Policy.default_terms``.

    Raises:
        UsageError: these are terms with a value of the wrong type, or a target that is not positive.
    """
    if not isinstance(answer, Terms) or type(answer.priority) is not int:
        return False
    answer._replace(priority=0).check()  # a policy may grant higher priorities than a client may state
    return True


def are_counts(answer: object) -> bool:
    """Return whether this is an answer of ``Policy.slo``."""
    return isinstance(answer, Mapping) and all(
        isinstance(name, str)
        and isinstance(pair, tuple)
        and len(pair) == 2
        and all(isinstance(one, Integral) for one in pair)
        for name, pair in answer.items()
    )


def are_numbers(answer: object) -> bool:
    """Return whether this is an answer of ``Policy.service``."""
    return isinstance(answer, Mapping) and all(
        isinstance(name, str) and isinstance(value, Real) for name, value in answer.items()
    )


def problem(
    decision: Decision | object, queues: Mapping[Key, Queue], *, thinking: int, max_rows: int, now: float
) -> str | None:
    """Return which rule of :mod:`symbiosis.core.scheduler` a decision breaks, or None.

    Args:
        decision: what ``Policy.decide`` returned.
        queues: the queued requests of each key.
        thinking: the number of clients that are thinking.
        max_rows: largest number of rows in a batch.
        now: the time of the decision, in seconds.
    """
    if isinstance(decision, Wait):
        if decision.until is None or decision.until == math.inf:
            return None if thinking else "waits without a limit while no client is thinking"
        if not thinking and decision.until > now + MAX_WAIT_S:
            return f"waits {decision.until - now:g} s while no client is thinking; {MAX_WAIT_S:g} are allowed"
        return None if decision.until > now else f"waits until {decision.until}, which is not after now ({now})"
    if not isinstance(decision, Run):
        return f"returned {decision!r}, which is neither Run nor Wait"
    if type(decision.reason) is not str or not 0 < len(decision.reason) <= MAX_REASON:
        return f"gives {decision.reason!r:.100} as its reason, which is not a text of 1 to {MAX_REASON} characters"
    queue = queues.get(decision.key)
    if queue is None:
        return f"runs {decision.key}, for which nothing is queued"
    total = 0
    firsts: dict[str, int] = {}  # how many requests of each client the batch has used up so far
    for request, count in decision.takes:
        client = request.client
        used = firsts.get(client, 0)
        mine = queue.of(client)
        if used >= len(mine) or mine[used] is not request:
            if request not in queue:
                return f"takes request {request.id}, which is not queued for {decision.key}"
            return f"takes request {request.id} of {client!r} out of order, or twice"
        remaining = request.rows - request.taken
        if type(count) is not int or not 1 <= count <= remaining:
            return f"takes {count!r} rows of request {request.id}; an int of 1 to {remaining} is allowed"
        # After a partial take nothing else of this client may follow: its next request is not at the front yet.
        firsts[client] = used + 1 if count == remaining else len(mine)
        total += count
    if not 1 <= total <= max_rows:
        return f"makes a batch of {total} rows; 1 to {max_rows} are allowed"
    return None


def tell_unloaded(policy: Policy, seconds: float) -> None:
    """Tell a policy how long one token takes in the base layers of an idle executor, in seconds.

    Raises:
        UsageError: the policy promises latencies below this.
        PolicyError: the policy raised another error.
    """
    try:
        policy.unloaded(seconds)
    except UsageError:
        raise
    except Exception as error:
        raise PolicyError(f"policy {_text(policy.name)} raised in unloaded(): {_text(error)}") from error


def _text(what: object) -> str:
    """Return the representation of an object, or its type where that fails too."""
    try:
        return repr(what)
    except Exception:  # noqa: BLE001 (a policy's __repr__ may raise anything)
        return f"<{type(what).__name__}>"
