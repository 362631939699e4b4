"""Time, one executor, and clients that think and ask.

A client is a generator. What it yields is what it does next: :class:`Think` for some seconds, or :class:`Ask` the
executor for a key; it is resumed with the time at which that was over. The executor runs one batch after another, each
for as long as a :class:`Cost` says, and what runs next is the scheduler's to say, which does not know that the clock is
not real.
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

__all__ = ["Ask", "Client", "Cost", "Simulation", "Think", "Until", "Walk"]


class Think(NamedTuple):
    """Compute on the client's side for so many seconds."""

    seconds: float


class Until(NamedTuple):
    """Do nothing until a time, in seconds."""

    time: float


class Walk(NamedTuple):
    """Begin a walk through the model, or end it."""

    begins: bool


class Ask(NamedTuple):
    """A request to the executor."""

    key: Key
    rows: int
    kind: Kind


Client = Generator[Think | Until | Walk | Ask, float, None]
"""Yields what it does; is sent the time, in seconds, when that was over."""


class Cost(NamedTuple):
    """Seconds that a batch takes: ``start`` for any, and ``row`` for each of its rows."""

    start: float
    row: float

    def of(self, batch: Batch, again: bool = False) -> float:
        return self.start + self.row * batch.rows


@dataclass(slots=True)
class Totals:
    """What the executor did."""

    batches: int = 0
    members: int = 0
    rows: int = 0
    busy_s: float = 0.0


class Simulation:
    """Run clients against a policy.

    Args:
        policy: fresh, as for a new executor.
        layers: size of the layer table.
        max_rows: most rows in a batch.
        cost: what a batch takes, in seconds; a :class:`Cost`'s ``of``, or anything else that takes the batch, and
            whether the one before it had the same key.
        overhead_s: that the executor needs beside each batch.
        local: whether clients compute in the executor's process, where one thing happens at a time: whoever has
            something to compute, in the order in which they were answered, and a batch when none of them has.

    Raises:
        PolicyError: from :meth:`run`, where the scheduler had to refuse what the policy decided.
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
        """When what the clients have to compute is done, if they are local."""
        self._clients: dict[str, Client] = {}
        self._waiting: dict[int, str] = {}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._busy = False
        self._last_key: Key | None = None
        self._wake = math.inf
        """When the scheduler wants to be asked again."""

    def add(self, name: str, client: Client, at: float = 0.0) -> None:
        """A client that joins at time ``at`` and leaves when it has no more to do."""

        def join() -> None:
            self._scheduler.client_joined(name, local=self._local)
            self._clients[name] = client
            self._resume(name, start=True)

        self._at(at, join)

    @property
    def next_at(self) -> float:
        """When something happens next, in seconds; ``inf`` if nothing does."""
        return self._events[0][0] if self._events else math.inf

    def step(self) -> None:
        """Let the next thing happen."""
        self.now, _, happen = heapq.heappop(self._events)
        happen()
        if not self._events or self._events[0][0] > self.now:  # all that happens at one time happens first
            self._ask()

    def run(self, until: float = math.inf) -> None:
        """Go on until nothing is left to do, or until a time, in seconds."""
        while self._events and self._events[0][0] <= until:
            self.step()

    # ----------------------------------------------------------------------------------------------------------- parts

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    def _resume(self, name: str, start: bool = False) -> None:
        """Let a client do what it does, up to the next thing that takes time."""
        client = self._clients[name]
        try:
            action = next(client) if start else client.send(self.now)
            while isinstance(action, Walk):
                if action.begins:
                    self._scheduler.pass_began(name, self.now)
                else:
                    self._scheduler.pass_ended(name)
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
        action = self._scheduler.next_action(self.now)
        if self._scheduler.policy_errors:
            raise PolicyError(str(self._scheduler.policy_errors[0])) from self._scheduler.policy_errors[0]
        if isinstance(action, Batch):
            self._run(action)
        elif isinstance(action, WaitUntil) and self.now < action.time < self._wake:
            self._wake = action.time
            self._at(action.time, self._woken)

    def _run(self, batch: Batch) -> None:
        """A batch starts now. Nothing else is running."""
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
