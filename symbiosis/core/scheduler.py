"""Which rows run next: queues, invariants, and the one question put to a policy.

The scheduler does no I/O, reads no clock and touches no tensor. Whoever drives it (the executor, a simulator, a test)
reports what happens (`submit`, `cancel`, `completed`, clients joining and walking) and pulls `next_action(now)`.

A :class:`~symbiosis.core.protocols.Policy` only chooses. The scheduler holds every decision against its rules before
acting on it:

* a batch has one key, so it never mixes layers or passes;
* a batch takes between 1 and ``max_rows`` rows, each of them queued, none twice;
* for each client and key, requests are taken first in, first out;
* waiting without a time limit is for when somebody is thinking, so that everything queued is served in the end.

A decision that breaks a rule, or a policy that raises, becomes a :class:`~symbiosis.errors.PolicyError` that names the
policy, and the method that raised. It is kept in :attr:`Scheduler.policy_errors`. Where there is no decision, the
oldest request is served in its place, so one bad policy costs speed, not answers.

Cost: submit, cancel, completion and leaving are O(1) in the number of clients and of others' requests; a decision costs
what the policy makes of it plus the size of its batch.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from symbiosis.core.protocols import MAX_WAIT_S, Decision, Policy, Run, Wait
from symbiosis.core.queues import Queue, Queues
from symbiosis.core.requests import Batch, Key, Request, Slice
from symbiosis.errors import PolicyError, UsageError

__all__ = ["Idle", "Scheduler", "WaitUntil", "tell_unloaded"]


MAX_REASON = 64


class WaitUntil(NamedTuple):
    """Ask again at ``time`` (seconds), or as soon as anything was reported. ``inf``: only when something was."""

    time: float


class Idle(NamedTuple):
    """Nothing is queued."""


IDLE = Idle()


@dataclass(slots=True)
class _Client:
    in_pass: bool = False
    open: dict[int, Request] = field(default_factory=dict)
    """Requests not yet answered, queued or running."""

    @property
    def thinking(self) -> bool:
        return self.in_pass and not self.open


class Scheduler:
    """Queues and invariants around a policy. Implements :class:`~symbiosis.core.protocols.View` for it.

    Args:
        policy: who chooses.
        layers: size of the layer table.
        max_rows: most rows in a batch; larger requests are served in slices.

    Raises:
        UsageError: no room for a row, or the policy was given to another scheduler before: what it remembers of that
            one's requests would be taken for this one's.
    """

    def __init__(self, policy: Policy, *, layers: int, max_rows: int) -> None:
        if max_rows < 1:
            raise UsageError(f"max_rows is {max_rows}; a batch needs room for at least 1 row")
        _claim(policy)
        self.policy = policy
        self._name = _said(policy.name)
        self._lone_at_once = getattr(policy, "lone_at_once", False) is True
        self._started: Callable[[Batch], None] | None = getattr(policy, "started", None)
        self._ran: Callable[[Batch, float], None] | None = getattr(policy, "ran", None)
        self._cancelled: Callable[[Request], None] | None = getattr(policy, "cancelled", None)
        self.layers = layers
        self.max_rows = max_rows
        self.thinking = 0
        self.policy_errors: deque[PolicyError] = deque(maxlen=16)
        self._clients: dict[str, _Client] = {}
        self._queues = Queues()
        self._open: dict[int, Request] = {}

    # ---------------------------------------------------------------------------------------------------- the view

    @property
    def queues(self) -> Mapping[Key, Queue]:
        return self._queues.by_key

    @property
    def oldest(self) -> Request:
        return self._queues.oldest

    @property
    def outstanding(self) -> int:
        """Requests not yet answered, queued or running."""
        return len(self._open)

    # -------------------------------------------------------------------------------------------------- what happens

    def client_joined(self, client: str) -> None:
        if client in self._clients:
            raise UsageError(f"a client named {client!r} is connected already; choose another name")
        self._clients[client] = _Client()

    def is_thinking(self, client: str) -> bool:
        """Whether a client is in a pass with nothing outstanding."""
        return self._clients[client].thinking

    def client_left(self, client: str) -> list[Request]:
        """Forget a client. Returns its unanswered requests, now cancelled."""
        self.pass_ended(client)
        mine = list(self._clients[client].open.values())
        for request in mine:
            self.cancel(request.id)
        del self._clients[client]
        return mine

    def pass_began(self, client: str) -> None:
        state = self._clients[client]
        self.thinking -= state.thinking
        state.in_pass = True
        self.thinking += state.thinking

    def pass_ended(self, client: str) -> None:
        state = self._clients[client]
        self.thinking -= state.thinking
        state.in_pass = False

    def submit(self, request: Request) -> None:
        """Queue a request. Its id must be new and its client must have joined."""
        if request.rows < 1 or request.taken or request.done:
            raise UsageError(
                f"request {request.id} of {request.client!r} must bring 1 or more rows, none of them taken"
            )
        if request.id in self._open:
            raise UsageError(f"request {request.id} of {request.client!r} was submitted already")
        state = self._clients.get(request.client)
        if state is None:
            raise UsageError(f"request {request.id} is from {request.client!r}, which has not joined")
        if state.in_pass and not state.open:
            self.thinking -= 1
        self._open[request.id] = state.open[request.id] = request
        self._queues.add(request)
        try:
            self.policy.submitted(request)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (a policy may be anybody's)
            self._refuse("raised in submitted()", "it may not know of a request", error)

    def lone(self, client: str, rows: int) -> bool:
        """Whether a request of ``client`` would be all there is to run, now and as far as anybody can tell, and the
        policy need not be asked about such. It is never queued then; nothing is to be reported."""
        if self._open or self.thinking > 1 or rows > self.max_rows or not self._lone_at_once:
            return False
        state = self._clients.get(client)
        return state is not None and self.thinking == state.in_pass  # it has nothing outstanding: nothing is open

    def cancel(self, request_id: int) -> None:
        """Forget a request. Rows of it in a running batch are finished and dropped. Unknown ids are ignored."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        request.cancelled = True
        if request.remaining:
            self._queues.cancel(request)
            self._tell(self._cancelled, "cancelled", request)
        state = self._clients[request.client]
        del state.open[request.id]
        if state.in_pass and not state.open:
            self.thinking += 1

    def measured(self, batch: Batch, seconds: float) -> None:
        """How long a batch took that has run; for who knows it later than at its completion."""
        self._tell(self._ran, "ran", batch, seconds)

    def completed(self, batch: Batch, seconds: float | None) -> list[Request]:
        """A batch has run, in so many seconds, or nobody knows yet. Returns the requests whose last row that was, in
        batch order."""
        if seconds is not None:
            self.measured(batch, seconds)
        answered, clients = [], self._clients
        for request, start, stop in batch.slices:
            request.done += stop - start
            if request.done == request.rows and not request.cancelled:
                del self._open[request.id]
                state = clients[request.client]
                del state.open[request.id]
                if state.in_pass and not state.open:
                    self.thinking += 1
                answered.append(request)
        return answered

    # ------------------------------------------------------------------------------------------------- what to do next

    def next_action(self, now: float) -> Batch | WaitUntil | Idle:
        """The next thing to do at time ``now``. A batch that is returned counts as running until `completed`."""
        if not len(self._queues):
            return IDLE
        try:
            decision = self.policy.decide(self, now)
            if isinstance(decision, Run):
                decision.takes = list(decision.takes)
            problem = self._check(decision, now)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (a policy may be anybody's)
            self._refuse("raised in decide()", _INSTEAD, error)
        else:
            if problem is None:
                if isinstance(decision, Wait):
                    return WaitUntil(math.inf if decision.until is None else decision.until)
                return self._start(decision)
            self._refuse(problem, _INSTEAD)
        oldest = self.oldest
        return self._start(Run(oldest.key, [(oldest, min(oldest.remaining, self.max_rows))], "policy-error"))

    def _check(self, decision: Decision | object, now: float) -> str | None:
        """Why a decision must be refused, or None."""
        if isinstance(decision, Wait):
            if decision.until is None or decision.until == math.inf:
                return None if self.thinking else "waits without a limit while nobody is thinking"
            if not self.thinking and decision.until > now + MAX_WAIT_S:
                return f"waits {decision.until - now:g} s while nobody is thinking; {MAX_WAIT_S:g} are allowed"
            return None if decision.until > now else f"waits until {decision.until}, which is not after now ({now})"
        if not isinstance(decision, Run):
            return f"returned {decision!r}, which is neither Run nor Wait"
        if type(decision.reason) is not str or not 0 < len(decision.reason) <= MAX_REASON:
            return f"gives {decision.reason!r:.100} as its reason, which is no text of 1 to {MAX_REASON} characters"
        queue = self._queues.by_key.get(decision.key)
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
                return f"takes {count} rows of request {request.id}, which has {remaining} left"
            # After a partial take nothing else of this client may follow: its next request is not at the front yet.
            firsts[client] = used + 1 if count == remaining else len(mine)
            total += count
        if not 1 <= total <= self.max_rows:
            return f"makes a batch of {total} rows; 1 to {self.max_rows} are allowed"
        return None

    def _start(self, run: Run) -> Batch:
        key = self._queues.by_key[run.key].key  # equal, and certainly a key
        slices = []
        rows = 0
        for request, count in run.takes:
            start = request.taken
            slices.append(_slice((request, start, start + count)))
            rows += count
            request.taken += count
        batch = Batch(key, slices, run.reason, rows)
        self._queues.started(batch)
        self._tell(self._started, "started", batch)
        return batch

    # ----------------------------------------------------------------------------------------------------------- parts

    def _tell(self, method: Callable[..., None] | None, name: str, *what: Any) -> None:
        """Call one of the methods that a policy may have or not."""
        if method is not None:
            try:
                method(*what)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 (a policy may be anybody's)
                self._refuse(f"raised in {name}()", "what it keeps in mind may be wrong from here on", error)

    def _refuse(self, problem: str, so: str, cause: BaseException | None = None) -> None:
        error = PolicyError(f"policy {self._name} {problem}{f': {_said(cause)}' if cause else ''}; {so}")
        error.__cause__ = cause
        self.policy_errors.append(error)

    def validate(self) -> None:
        """Assert every invariant of the queues; for tests, O(everything)."""
        self._queues.validate()
        for request in self._open.values():
            assert 0 <= request.done <= request.taken <= request.rows
            assert not request.cancelled
            assert (request.remaining > 0) == (request in self._queues), "a request with rows left is not queued"
        theirs = {request.id: request for state in self._clients.values() for request in state.open.values()}
        assert theirs == self._open, "the clients' open requests are not all that are open"
        for client, state in self._clients.items():
            assert all(request.client == client for request in state.open.values()), f"{client!r} has one of another's"
        assert self.thinking == sum(state.thinking for state in self._clients.values()), "thinking count is off"


_slice = partial(tuple.__new__, Slice)
"""What ``Slice(…)`` does, in a third of the time."""
_INSTEAD = "the oldest request was served instead"


def tell_unloaded(policy: Policy, seconds: float) -> None:
    """Tell a policy that wants to know what a token takes in base layers when nothing else goes on, in seconds.

    Raises:
        UsageError: it promises what cannot be kept even then.
        PolicyError: it raised something else.
    """
    try:
        getattr(policy, "unloaded", lambda seconds: None)(seconds)
    except UsageError:
        raise
    except Exception as error:
        raise PolicyError(f"policy {_said(policy.name)} raised in unloaded(): {_said(error)}") from error


def _said(what: object) -> str:
    """Its representation, or what it is, where that fails as well."""
    try:
        return repr(what)
    except Exception:  # noqa: BLE001 (a policy may be anybody's)
        return f"<{type(what).__name__}>"


_claimed: set[int] = set()
"""Policies that were given to a scheduler, by identity: they need not be hashable."""


def _claim(policy: Policy) -> None:
    """Take a policy, and those that it goes around, for one scheduler."""
    each: Policy | None = policy
    while each is not None:
        if id(each) in _claimed:
            raise UsageError(
                f"the policy {each!r} was given to another executor, simulation or test before, and remembers what was "
                "asked there; make a new one for each"
            )
        each = getattr(each, "policy", None)
    each = policy
    while each is not None:
        with contextlib.suppress(TypeError):  # a class with __slots__ may have no room for it
            weakref.finalize(each, _claimed.discard, id(each))
            _claimed.add(id(each))
        each = getattr(each, "policy", None)
