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
from symbiosis.core.terms import JOINT, NO_TERMS, Kind, Terms
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


class Decode(NamedTuple):
    """Walk the model for one token, if clients decode jointly together with all others that are ready to."""

    walk: Callable[[int], SimulatedClient]
    """Function of the number of tokens: a generator of the walk's actions."""


SimulatedClient = Generator[Think | Until | InWalk | Ask | Decode, float, None]
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
    """Requests, counted once for each batch that took rows of them; those of a joint walk once for each client."""
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
        joint: whether clients decode jointly, as :mod:`symbiosis.client.joint.decoder` describes. One token is under
            way at a time. The next begins when no client has anything to compute, for all clients that are ready.

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
        joint: bool = False,
    ) -> None:
        self.now = 0.0
        self.totals = Totals()
        self._scheduler = Scheduler(policy, layers=layers, max_rows=max_rows)
        self._cost = cost
        self._overhead_s = overhead_s
        self._local = local
        self._free = 0.0
        """Time at which local clients have finished their computations."""
        self._clients: dict[str, list[SimulatedClient]] = {}
        """Each client's generator, and the walk that it is in, if it asked for one by :class:`Decode`."""
        self._joint = joint
        self._ready: dict[str, Decode] = {}
        """Clients that wait for the next token to begin."""
        self._together: tuple[str, ...] = ()
        """Clients of the joint walk under way."""
        self._token = False
        """Whether a token is under way."""
        self._waiting: dict[int, str] = {}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._busy = False
        self._last_key: Key | None = None
        self._wake = math.inf
        """Time at which the scheduler is asked again."""

    def add(self, name: str, client: SimulatedClient, at: float = 0.0, terms: Terms = NO_TERMS) -> None:
        """Add a client that joins at time ``at`` (seconds), asks for ``terms``, and leaves when its generator ends."""

        def join() -> None:
            self._scheduler.client_joined(name, terms, local=self._local)
            self._clients[name] = [client]
            self._resume(name, None)

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

    def _resume(self, name: str, sent: float | None) -> None:
        """Resume a client, and start its next action that takes time. ``sent`` is None for a new generator."""
        generators = self._clients[name]
        try:
            action = next(generators[-1]) if sent is None else generators[-1].send(sent)
            while isinstance(action, InWalk):
                if action.begins:
                    self._scheduler.walk_began(name, self.now)
                else:
                    self._scheduler.walk_ended(name)
                action = generators[-1].send(self.now)
        except StopIteration:
            generators.pop()
            if generators:
                self._resume(name, self.now)
            elif name != JOINT:
                del self._clients[name]
                self._scheduler.client_left(name, self.now)
            return
        if isinstance(action, Think):
            ends = self.now + action.seconds
            if self._local:
                ends = self._free = max(self._free, self.now) + action.seconds
            self._at(ends, lambda: self._resume(name, self.now))
        elif isinstance(action, Until):
            self._at(max(action.time, self.now), lambda: self._resume(name, self.now))
        elif isinstance(action, Decode):
            if self._joint and self._scheduler.may_join(name, self.now):
                self._scheduler.walk_ended(name)
                self._ready[name] = action
            else:
                self._begin(name, action.walk(1))
        else:
            tenants = self._together if name == JOINT else ()
            request = Request(
                next(self._numbers), name, action.key, action.rows, action.kind, self.now, tenants=tenants
            )
            self._waiting[request.id] = name
            batch = self._scheduler.offer(request, self.now)
            if batch is not None:
                self._run(batch)

    def _begin(self, name: str, walk: SimulatedClient) -> None:
        """Have a client walk the model, and then go on."""
        self._clients[name].append(walk)
        self._resume(name, None)

    def _begin_token(self) -> None:
        """Begin the next token, for all clients that are ready."""
        (first, *_), names = self._ready.values(), list(self._ready)
        self._ready = {}
        self._token = True
        if len(names) == 1:
            self._scheduler.walk_began(names[0], self.now)
            self._begin(names[0], self._alone(first.walk(1)))
        else:
            if JOINT not in self._clients:
                self._clients[JOINT] = []
                self._scheduler.client_joined(JOINT, local=self._local)
            self._together = tuple(names)
            self._begin(JOINT, self._walk_together(first.walk(len(names))))

    def _alone(self, walk: SimulatedClient) -> SimulatedClient:
        yield from walk
        self._token = False

    def _walk_together(self, walk: SimulatedClient) -> SimulatedClient:
        yield InWalk(True)
        yield from walk
        yield InWalk(False)
        self._token = False
        for name in self._together:
            self._scheduler.walk_began(name, self.now)
            self._resume(name, self.now)

    def _computing(self) -> bool:
        """Return whether the thread of local clients has something to do."""
        return self._local and self._free > self.now

    def _ask(self) -> None:
        if self._ready and not self._token and not self._computing():
            self._begin_token()
        if self._busy or self._computing():
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
        totals.members += sum(len(piece.request.clients) for piece in batch.slices)
        totals.rows += batch.rows
        totals.busy_s += seconds
        for request in self._scheduler.completed(batch, seconds, self.now):
            self._resume(self._waiting.pop(request.id), self.now)
