"""Decides which rows run next: keeps the queues, asks the policy, and checks its decisions.

The scheduler does no I/O, reads no clock and touches no tensor. Its driver (the executor, the simulator or a test)
reports what happens (`offer`, `cancel`, `completed`, clients that join, leave, and begin or end a walk) and pulls
`next_action(now)`. Times are seconds on the driver's clock.

A :class:`~symbiosis.core.policy.Policy` only chooses. The scheduler checks each decision before it acts on it:

* A batch has one key, so it never mixes layers or passes.
* A batch takes between 1 and ``max_rows`` rows. All of them are queued, and none is taken twice.
* For each client and key, requests are taken first in, first out.
* A wait without a time limit requires a client that is thinking.

Each fault of a policy becomes a :class:`~symbiosis.errors.PolicyError` in :attr:`Scheduler.policy_errors`. If its
decision breaks a rule, or it raises instead of deciding, the oldest request is served.

The scheduler makes four decisions itself. A request that finds the executor idle runs at once, if no other client is
thinking and the policy allows it. The driver's other work gets its turn every :data:`TURN_S`. A client that is thinking
for :data:`STOPPED_S` without a request counts as stopped, and not as thinking, until its next request. A client of
another process that begins one walk after another without a request counts as thinking for the first only. Once a batch
has passed over a request, waits without a limit may delay the rest of its walk by :data:`HELD_S` in all: otherwise a
client that sends single rows at intervals could delay each request anew. A walk of many tokens counts as several here,
of two requests for each layer.

Cost: submission, cancellation and completion are O(1) in the number of clients and of their requests, and O(n) in those
of the same client and key. A decision costs what the policy needs, plus the size of its batch; it looks at all clients
whenever one of them may have stopped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from symbiosis.core.clients import STOPPED_S, Clients, ClientState
from symbiosis.core.faults import PolicyFaults, are_counts, are_numbers, are_terms, problem
from symbiosis.core.policy import Policy, Run, Wait
from symbiosis.core.queues import Queue, Queues
from symbiosis.core.requests import Batch, Key, Request, Slice
from symbiosis.core.terms import NO_TERMS, Terms, effective, most_urgent
from symbiosis.errors import PolicyError, UsageError

HELD_S = 1.0
"""Longest total delay of a walk, in seconds, by waits without a limit, once a batch has passed over one of its
requests."""
_ALL_HELD_S = HELD_S - 1e-6
"""HELD_S without what rounding may lose, in seconds."""
TURN_S = 0.01
"""Longest time, in seconds, for which batches follow one another before the driver's other work gets its turn."""
LONE = str(b"lone", "ascii")
"""Reason of a batch that ran without asking the policy. It is told from a policy's own ``"lone"`` by identity, so it is
not the literal, which is one object in all modules."""

ALONE, THINKING, ELSEWHERE, PASSED_OVER = "alone", "thinking", "elsewhere", "passed over"
"""What other clients do beside a batch of one request; see :meth:`Scheduler.beside`."""


class WaitUntil(NamedTuple):
    """Ask again at ``time`` (seconds), or once a request comes or goes, or a client ends a walk or leaves. ``inf``:
    nothing is queued."""

    time: float


class Scheduler:
    """Queues and invariants around a policy. Implements :class:`~symbiosis.core.policy.View` for it.

    Args:
        policy: chooses what runs.
        layers: size of the layer table.
        max_rows: largest number of rows in a batch; larger requests are served in slices.
        parts: for each layer, the part of a token's walk that one row through it is, for one expert if it is a bank; by
            default all layers are alike.
        fraction: the part (0 to 1) of a walk's work that these layers do. Latency targets of clients are multiplied by
            it.

    Raises:
        UsageError: ``max_rows`` is less than 1, or the policy belongs to another scheduler.
    """

    def __init__(
        self, policy: Policy, *, layers: int, max_rows: int, parts: Sequence[float] = (), fraction: float = 1.0
    ) -> None:
        if max_rows < 1:
            raise UsageError(f"max_rows is {max_rows}; a batch needs room for at least 1 row")
        policy.bind()
        self.policy = policy
        self._faults = PolicyFaults(policy)
        self._lone_at_once = policy.lone_at_once
        self.layers = layers
        self.max_rows = max_rows
        self.parts = parts or [1 / layers] * layers
        self._fraction = fraction
        self.batches = 0
        self._clients = Clients()
        self._states = self._clients.states
        self._turned = -math.inf
        """Time at which the driver's other work last had its turn; -inf after a client has begun a walk."""
        self._holds: tuple[ClientState, float] | None = None
        """During a wait without a limit: the client whose request it holds up, and since when."""
        self._queues = Queues()
        self._open: dict[int, Request] = {}
        self._joint: Mapping[str, float] | None = None
        """Clients of the latest joint request."""
        self._joint_terms = NO_TERMS

    @property
    def queues(self) -> Mapping[Key, Queue]:
        return self._queues.by_key

    @property
    def oldest(self) -> Request:
        return self._queues.oldest

    @property
    def thinking(self) -> int:
        return self._clients.thinking

    @property
    def policy_errors(self) -> deque[PolicyError]:
        """The latest faults of the policy."""
        return self._faults.errors

    @property
    def outstanding(self) -> int:
        """Number of requests not yet answered, queued or running."""
        return len(self._open)

    def part(self, key: Key) -> float:
        return sum([self.parts[layer] for layer in key.layers]) * (key.choices or 1)

    @property
    def walking(self) -> bool:
        """Whether a client of another process is in a walk or has an outstanding request."""
        return any((state.in_walk or state.open) and not state.local for state in self._states.values())

    def client_joined(self, client: str, terms: Terms = NO_TERMS, *, local: bool = False) -> Terms:
        """Admit a client, and return its effective terms.

        Args:
            client: a name that no other client has.
            terms: what the client asks for or, if it is local, what the provider grants.
            local: whether the client computes in the executor's process.
        """
        if client in self._states:
            raise UsageError(f"a client named {client!r} is connected already; choose another name")
        default = self._faults.ask(
            "default_terms",
            self.policy.default_terms,
            client,
            fits=are_terms,
            instead=NO_TERMS,
            consequence="the client joins without terms of the policy",
        )
        granted = effective(terms, default, trusted=local).times(self._fraction)
        self._states[client] = ClientState(granted, local)
        return granted

    def client_left(self, client: str, now: float) -> list[Request]:
        """Forget a client, and return its unanswered requests, which are now cancelled."""
        self.walk_ended(client)
        mine = [request for request in self._open.values() if request.client == client]
        for request in mine:
            self.cancel(request.id, now)
        del self._states[client]
        return mine

    def walk_began(self, client: str, now: float) -> None:
        """Note that a client began to walk the model."""
        state = self._states[client]
        state.in_walk = True
        state.begin_traversal()
        self._turned = -math.inf  # other clients may be about to begin: their requests can share its first batch
        if not state.open:
            self._clients.begin_walk(state, now)

    def walk_ended(self, client: str) -> None:
        """Note that a client is idle."""
        state = self._states[client]
        state.in_walk = False
        self._clients.end_thinking(state)

    def turned(self, now: float) -> None:
        """Note that the driver has run its other callbacks, including those of clients."""
        self._turned = now

    def hurries(self, now: float) -> bool:
        """Return whether to ask `next_action` before the driver's other work gets its turn.

        This is so if no client is thinking, so that only idle clients can enlarge the next batch, and the last turn was
        less than TURN_S ago. A simulation has no other work and does not ask.
        """
        return not self._clients.thinking and now - self._turned < TURN_S

    def beside_others(self, client: str) -> bool:
        """Return whether another client has an unanswered request or is thinking. Any thread may call this."""
        state = self._states.get(client)
        return state is not None and (len(self._open) > state.open or self._clients.thinking > state.thinking)

    def may_join(self, client: str, now: float) -> bool:
        """Return whether the policy lets a client take part in a walk with other clients now."""
        return self._faults.ask(
            "may_join", self.policy.may_join, client, now, instead=False, consequence="the client walks alone"
        )

    def accounts(self) -> tuple[Mapping[str, tuple[int, int]], Mapping[str, float]]:
        """Return ``slo()`` and ``service()`` of the policy."""
        none = "the statistics have none of it"
        return (
            self._faults.ask("slo", self.policy.slo, fits=are_counts, instead={}, consequence=none),
            self._faults.ask("service", self.policy.service, fits=are_numbers, instead={}, consequence=none),
        )

    def offer(self, request: Request, now: float) -> Batch | None:
        """Run or queue a request. Its id must be new, and its client must have joined.

        Returns:
            A batch of this request alone, which must run at once and counts as running until `completed`; or None: the
            request is queued. It is queued if the driver's other work had no turn for TURN_S.
        """
        batch = None if now - self._turned > TURN_S else self.offer_alone(request, now)
        if batch is None:
            self.submit(request)
        return batch

    def offer_alone(self, request: Request, now: float) -> Batch | None:
        """Return a batch of this request alone if it may run at once; otherwise None, and nothing has changed.

        A request runs at once if nothing is queued or running, no other client is thinking, and the policy allows it.
        There is nothing to choose then, and the policy gets no hook for the request. A driver calls this method for
        requests of other threads, which do not delay its own callbacks. Such a thread may not know yet that its client
        has left; then the answer is None too.
        """
        rows, state = request.rows, self._states.get(request.client)
        if (
            state is None
            or self._open
            or not self._lone_at_once
            or rows > self.max_rows
            or self._clients.thinking > state.thinking
        ):
            return None
        self._admit(request)
        request.taken = rows
        return Batch(request.key, (_slice((request, 0, rows)),), LONE, rows)

    def submit(self, request: Request) -> None:
        """Queue a request. Its id must be new, and its client must have joined."""
        state = self._admit(request)
        request.seen, request.passed = self.batches, state.passed
        self._queues.add(request)
        self._faults.tell("submitted", self.policy.submitted, request)

    def cancel(self, request_id: int, now: float) -> None:
        """Forget a request. Rows of it in a running batch are finished and dropped. Unknown ids are ignored."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        request.cancelled = True
        if request.remaining:
            self._queues.cancel(request)
            self._faults.tell("cancelled", self.policy.cancelled, request)
        self._closed(request, now)

    def beside(self, batch: Batch) -> str:
        """Return what other clients do beside a batch of one request, before it is completed: none is in a walk
        (ALONE), at least one is thinking (THINKING), or requests of them are queued, for other keys (ELSEWHERE) or for
        the key of the batch (PASSED_OVER)."""
        if batch.reason is LONE:
            return ALONE
        client = batch.slices[0].request.client
        state, queue = self._states.get(client), self._queues.by_key.get(batch.key)
        if state is not None and len(self._open) > state.open:
            return ELSEWHERE if queue is None or len(queue) == len(queue.of(client)) else PASSED_OVER
        return THINKING if self.thinking else ALONE

    def measured(self, batch: Batch, seconds: float) -> None:
        """Report how long a batch took, if that was not known when it was completed."""
        if batch.reason is not LONE:
            self._faults.tell("ran", self.policy.ran, batch, seconds)

    def completed(self, batch: Batch, seconds: float | None, now: float) -> list[Request]:
        """Note that a batch has run, and return the requests that it answered, in batch order.

        Args:
            batch: from :meth:`next_action` or :meth:`offer`.
            seconds: how long it took; None if that is to be reported later by :meth:`measured`.
            now: the time at which its results are handed out.
        """
        if seconds is not None and batch.reason is not LONE:
            self._faults.tell("ran", self.policy.ran, batch, seconds)
        answered = []
        for request, start, stop in batch.slices:
            request.done += stop - start
            if request.done == request.rows and not request.cancelled:
                del self._open[request.id]
                self._closed(request, now)
                answered.append(request)
        return answered

    def next_action(self, now: float) -> Batch | WaitUntil:
        """Return the next thing to do at time ``now``. A batch counts as running until `completed`."""
        if self._holds is not None:
            state, since = self._holds
            state.held += now - since
            self._holds = None
        if not len(self._queues):
            return WaitUntil(math.inf)
        oldest, clients = self._queues.oldest, self._clients
        passed_over = oldest.passed + self.batches > oldest.seen
        held = self._states[oldest.client].held
        if clients.thinking and (now >= clients.look_at or held > _ALL_HELD_S):
            clients.drop_stopped(now, STOPPED_S if held <= _ALL_HELD_S else 0.0)
        try:
            decision = self.policy.decide(self, now)
            if isinstance(decision, Run):
                decision.takes = list(decision.takes)
            broken = problem(decision, self._queues.by_key, thinking=clients.thinking, max_rows=self.max_rows, now=now)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (a policy may raise anything)
            self._faults.note("raised in decide()", _INSTEAD, error)
        else:
            if broken is None:
                if isinstance(decision, Wait):
                    until = math.inf if decision.until is None else decision.until
                    if until == math.inf and passed_over:
                        self._holds = self._states[oldest.client], now
                        until = now + HELD_S - held
                    return WaitUntil(min(until, clients.look_at) if clients.thinking else until)
                return self._start(decision)
            self._faults.note(broken, _INSTEAD)
        return self._start(Run(oldest.key, [(oldest, min(oldest.remaining, self.max_rows))], "policy-error"))

    def _start(self, run: Run) -> Batch:
        key = self._queues.by_key[run.key].key  # equal, and certainly a key
        slices = []
        rows = 0
        for request, count in run.takes:
            start = request.taken
            if not start:
                state = self._states[request.client]
                state.passed = max(state.passed, request.passed + self.batches - request.seen)
            slices.append(_slice((request, start, start + count)))
            rows += count
            request.taken += count
        batch = Batch(key, slices, run.reason, rows)
        self.batches += 1
        self._queues.started(batch)
        self._faults.tell("started", self.policy.started, batch)
        return batch

    def _admit(self, request: Request) -> ClientState:
        """Record a request as open. Return its client."""
        if request.rows < 1 or request.taken or request.done:
            raise UsageError(
                f"request {request.id} of {request.client!r} must bring 1 or more rows, none of them taken"
            )
        if request.id in self._open:
            raise UsageError(f"request {request.id} of {request.client!r} was submitted already")
        state = self._states.get(request.client)
        if state is None:
            raise UsageError(f"request {request.id} is from {request.client!r}, which has not joined")
        if not state.in_walk or state.requests == 2 * self.layers:  # for a coroutine, a walk may be a whole text
            state.begin_traversal()
        state.requests += 1
        self._open[request.id] = request
        state.open += 1
        state.asked = True
        self._clients.end_thinking(state)
        request.terms, request.local = state.terms, state.local
        if request.joint:
            if request.joint is not self._joint:  # once for a walk
                self._joint = request.joint
                known = [self._states[name].terms for name in request.joint if name in self._states]
                self._joint_terms = most_urgent(known)
            request.terms = self._joint_terms
        return state

    def _closed(self, request: Request, now: float) -> None:
        """Note that a request is no longer open."""
        state = self._states[request.client]
        state.open -= 1
        if state.in_walk and not state.open:
            self._clients.begin_thinking(state, now)

    def validate(self) -> None:
        """Assert every invariant of the queues; for tests, O(everything)."""
        self._queues.validate()
        for request in self._open.values():
            assert 0 <= request.done <= request.taken <= request.rows
            assert not request.cancelled
            assert (request.remaining > 0) == (request in self._queues), "a request with rows left is not queued"
        for client, state in self._states.items():
            mine = [request for request in self._open.values() if request.client == client]
            assert state.open == len(mine), f"the number of open requests of {client!r} is wrong"
        assert all(request.client in self._states for request in self._open.values()), "a request has no client"
        self._clients.validate()


_slice = partial(tuple.__new__, Slice)
"""Makes a ``Slice`` in a third of the time that calling the class takes."""
_INSTEAD = "the oldest request was served instead"
