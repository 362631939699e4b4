"""The engine of the simulator: a clock, one executor, and clients that compute and send requests.

A client is a generator. It yields its next action, such as :class:`Think` for some seconds or :class:`Ask` the executor
for a key, and is sent the time at which the action ended. The executor runs one batch after another; a cost function
gives their latencies. The scheduler chooses the batches as in a real executor.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple

from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.scheduler import Scheduler, WaitUntil
from symbiosis.core.terms import Kind
from symbiosis.errors import PolicyError


class Think(NamedTuple):
    """Compute in the client for a number of seconds."""

    seconds: float


class Until(NamedTuple):
    """Be idle until a time, in seconds."""

    time: float


class InWalk(NamedTuple):
    """Begin or end a walk through the model."""

    begins: bool


class Ask(NamedTuple):
    """Send a request to the executor, and wait for the answer."""

    key: Key
    rows: int
    kind: Kind


SimulatedClient = Generator[Think | Until | InWalk | Ask, float, None]
"""Generator that yields actions and is sent the time, in seconds, at which each one ended."""


class Cost(NamedTuple):
    """A linear latency in seconds: ``start`` for any batch, and ``row`` for each of its rows."""

    start: float
    row: float

    def of(self, batch: Batch, again: bool = False) -> float:
        """Return the latency of a batch, in seconds."""
        return self.start + self.row * batch.rows


@dataclass(slots=True)
class Totals:
    """The work of the executor so far."""

    batches: int = 0
    members: int = 0
    """Requests, counted once for each batch that took rows of them."""
    rows: int = 0
    busy_s: float = 0.0


class Simulation:
    """One executor and its clients, in simulated time.

    Args:
        policy: a new policy.
        layers: size of the layer table.
        max_rows: largest number of rows in a batch.
        cost: function of a batch, and of whether the batch before it had the same key: the latency in seconds, such as
            :meth:`Cost.of`.
        overhead_s: seconds that the executor needs for each batch besides its latency.
        local: whether clients compute in the executor's process, where one action happens at a time: clients compute in
            the order of their answers, and a batch starts when no client has anything to compute.

    Raises:
        PolicyError: from :meth:`run` and :meth:`step`: the scheduler refused a decision of the policy.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        layers: int,
        max_rows: int = 8192,
        cost: Callable[[Batch, bool], float],
        overhead_s: float = 0.0,
        local: bool = False,
    ) -> None:
        self.now = 0.0
        self.totals = Totals()
        self._scheduler = Scheduler(policy, layers=layers, max_rows=max_rows)
        self._cost = cost
        self._overhead_s = overhead_s
        self._local = local
        self._free = 0.0
        """Time at which local clients have finished their computations."""
        self._clients: dict[str, SimulatedClient] = {}
        self._waiting: dict[int, str] = {}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._busy = False
        self._last_key: Key | None = None
        self._wake = math.inf
        """Time at which the scheduler is asked again."""

    def add(self, name: str, client: SimulatedClient, at: float = 0.0) -> None:
        """Add a client that joins at time ``at`` (seconds) and leaves when its generator ends."""

        def join() -> None:
            self._scheduler.client_joined(name, local=self._local)
            self._clients[name] = client
            self._resume(name, start=True)

        self._at(at, join)

    @property
    def next_at(self) -> float:
        """Time of the next event, in seconds; ``inf`` if there is none."""
        return self._events[0][0] if self._events else math.inf

    def step(self) -> None:
        """Process the next event."""
        self.now, _, happen = heapq.heappop(self._events)
        happen()
        if not self._events or self._events[0][0] > self.now:  # the scheduler is asked after all events of one time
            self._ask()

    def run(self, until: float = math.inf) -> None:
        """Process all events, or those up to a time, in seconds."""
        while self._events and self._events[0][0] <= until:
            self.step()

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    def _resume(self, name: str, start: bool = False) -> None:
        """Resume a client, and start its next action that takes time."""
        client = self._clients[name]
        try:
            action = next(client) if start else client.send(self.now)
            while isinstance(action, InWalk):
                if action.begins:
                    self._scheduler.walk_began(name, self.now)
                else:
                    self._scheduler.walk_ended(name)
                action = client.send(self.now)
        except StopIteration:
            del self._clients[name]
            self._scheduler.client_left(name, self.now)
            return
        if isinstance(action, Think):
            ends = self.now + action.seconds
            if self._local:
                ends = self._free = max(self._free, self.now) + action.seconds
            self._at(ends, lambda: self._resume(name))
        elif isinstance(action, Until):
            self._at(max(action.time, self.now), lambda: self._resume(name))
        else:
            request = Request(next(self._numbers), name, action.key, action.rows, action.kind, self.now)
            self._waiting[request.id] = name
            batch = self._scheduler.offer(request, self.now)
            if batch is not None:
                self._run(batch)

    def _ask(self) -> None:
        if self._busy or (self._local and self._free > self.now):
            return
        self._scheduler.turned(self.now)
        action = self._scheduler.next_action(self.now)
        if self._scheduler.policy_errors:
            raise PolicyError(str(self._scheduler.policy_errors[0])) from self._scheduler.policy_errors[0]
        if isinstance(action, Batch):
            self._run(action)
        elif isinstance(action, WaitUntil) and self.now < action.time < self._wake:
            self._wake = action.time
            self._at(action.time, self._woken)

    def _run(self, batch: Batch) -> None:
        """Start a batch; no other batch is running."""
        self._busy = True
        seconds = self._cost(batch, batch.key == self._last_key)
        self._last_key = batch.key
        if self._local:
            self._free = self.now + seconds + self._overhead_s
        self._at(self.now + seconds + self._overhead_s, lambda: self._ran(batch, seconds))

    def _woken(self) -> None:
        self._wake = math.inf

    def _ran(self, batch: Batch, seconds: float) -> None:
        self._busy = False
        totals = self.totals
        totals.batches += 1
        totals.members += len(batch.slices)
        totals.rows += batch.rows
        totals.busy_s += seconds
        for request in self._scheduler.completed(batch, seconds, self.now):
            self._resume(self._waiting.pop(request.id))
