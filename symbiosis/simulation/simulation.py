"""The engine of the simulator: clients that compute and send requests to executors.

A client is a generator. It yields its next action, such as :class:`Think` for some seconds or :class:`Ask` an executor
for a key, and is sent the time at which the action ended. Executors run one batch after another; a cost function gives
their latencies. The scheduler chooses the batches as in a real executor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Key
from symbiosis.core.terms import JOINT, NO_TERMS, Kind, Terms
from symbiosis.simulation.clock import Clock, Cores, Way
from symbiosis.simulation.executor import SimulatedExecutor


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
    """Send a request to the executor of the key, and wait for the answer."""

    key: Key
    rows: int
    kind: Kind


class Decode(NamedTuple):
    """Walk the model for one token; in joint decoding, together with all other clients that are ready."""

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


class Hop(NamedTuple):
    """An executor, and the ways to it and back; None where messages take no time."""

    executor: SimulatedExecutor
    there: Way | None = None
    back: Way | None = None


@dataclass(frozen=True)
class Route:
    """Where a client's calls go, and where it computes.

    Args:
        hops: the executors that it uses. Together they serve all layers.
        places: the number of the hop of each layer; None if there is one hop.
        sizes: function of a key and its rows: bytes of a call and of its answer.
        cores: cores that the client's own work shares with other processes; None if it shares none.
    """

    hops: Sequence[Hop]
    places: Sequence[int] | None = None
    sizes: Callable[[Key, int], tuple[int, int]] = lambda key, rows: (0, 0)
    cores: Cores | None = None

    def hop(self, key: Key) -> Hop:
        """Return the hop that serves a key."""
        return self.hops[0 if self.places is None else self.places[key.layers[0]]]


@dataclass(slots=True)
class _ClientState:
    name: str
    route: Route
    work: list[SimulatedClient]
    """The client's generator, and the walk that it is in, if it asked for one by :class:`Decode`."""
    in_walk: bool = False
    at: SimulatedExecutor | None = None
    """The executor that counts the client as one in a walk."""

    def enter(self, executor: SimulatedExecutor, now: float) -> None:
        if self.in_walk and self.at is not executor:
            self.leave()
            self.at = executor
            executor.scheduler.walk_began(self.name, now)
            executor.changed()

    def leave(self) -> None:
        if self.at is not None:
            self.at.scheduler.walk_ended(self.name)
            self.at.changed()
        self.at = None


@dataclass(slots=True)
class _JointWalks:
    """The joint walks of clients in an executor's process. One token is under way at a time."""

    ready: dict[str, tuple[_ClientState, Decode]] = field(default_factory=dict)
    """Clients that wait for the next token to begin."""
    together: tuple[_ClientState, ...] = ()
    """Clients of the joint walk under way."""
    token: bool = False
    """Whether a token is under way."""
    client: _ClientState | None = None
    """The client that walks for all of them, once one has."""


class Cluster:
    """Executors and their clients, in simulated time.

    Args:
        clock: the clock of the executors and links.
        joint: whether clients decode jointly, as :mod:`symbiosis.client.joint.decoder` describes, if they compute in
            their executor's process. One token is under way at a time. The next begins when no client has anything to
            compute, for all clients that are ready.

    Raises:
        PolicyError: from :meth:`run` and :meth:`step`: a scheduler refused a decision of its policy.
    """

    def __init__(self, clock: Clock, joint: bool = False) -> None:
        self.clock = clock
        self._joint = joint
        self._walks: dict[SimulatedExecutor, _JointWalks] = {}

    @property
    def now(self) -> float:
        """Simulated time, in seconds."""
        return self.clock.now

    def add(
        self, name: str, client: SimulatedClient, at: float = 0.0, terms: Terms = NO_TERMS, *, route: Route
    ) -> None:
        """Add a client that joins at time ``at`` (seconds), asks for ``terms``, and leaves when its generator ends."""

        def join() -> None:
            self._join(_ClientState(name, route, [client]), terms)

        self.clock.at(at, join)

    def step(self) -> None:
        """Process the next event."""
        self.clock.step()

    def run(self, until: float = math.inf) -> None:
        """Process all events, or those up to a time, in seconds."""
        while self.clock.next_at <= until and self.clock.next_at < math.inf:
            self.step()

    def _join(self, client: _ClientState, terms: Terms = NO_TERMS) -> None:
        for hop in client.route.hops:
            executor = hop.executor
            executor.scheduler.client_joined(client.name, terms, local=executor.local)
            if self._joint and executor not in self._walks:
                self._walks[executor] = _JointWalks()
                executor.settle = partial(self._settle, executor)
        self._resume(client, None)

    def _resume(self, client: _ClientState, sent: float | None) -> None:
        """Resume a client, and start its next action that takes time. ``sent`` is None for a new generator."""
        first = client.route.hops[0].executor
        first.changed()
        try:
            action = next(client.work[-1]) if sent is None else client.work[-1].send(sent)
            while isinstance(action, InWalk):
                client.in_walk = action.begins
                if not action.begins:
                    client.leave()
                elif len(client.route.hops) == 1:
                    client.enter(first, self.now)
                action = client.work[-1].send(self.now)
        except StopIteration:
            client.work.pop()
            if client.work:
                self._resume(client, self.now)
            elif client.name != JOINT:
                for hop in client.route.hops:
                    hop.executor.scheduler.client_left(client.name, self.now)
                    hop.executor.changed()
            return
        if isinstance(action, Think):
            self._think(client, action.seconds)
        elif isinstance(action, Until):
            self.clock.at(action.time, lambda: self._resume(client, self.now))
        elif isinstance(action, Decode):
            if self._joint and first.scheduler.may_join(client.name, self.now):
                client.leave()
                self._walks[first].ready[client.name] = client, action
            else:
                self._begin(client, action.walk(1))
        else:
            self._call(client, action)

    def _think(self, client: _ClientState, seconds: float) -> None:
        executor, cores = client.route.hops[0].executor, client.route.cores

        def thought() -> None:
            self._resume(client, self.now)

        if executor.local:
            executor.compute(seconds, thought)
        elif cores is not None:
            cores.run(seconds, 1, thought)
        else:
            self.clock.at(self.now + seconds, thought)

    def _call(self, client: _ClientState, ask: Ask) -> None:
        executor, there, back = client.route.hop(ask.key)
        together = self._walks[executor].together if client.name == JOINT else ()
        joint = {each.name: 1 / len(together) for each in together} or None

        def answered() -> None:
            self._resume(client, self.now)

        def arrived(answer: Callable[[], None]) -> None:
            client.enter(executor, self.now)  # what says so comes with the call
            executor.submit(client.name, ask.key, ask.rows, ask.kind, joint, answer)

        if there is None or back is None:
            arrived(answered)
            return
        if client.at is not executor:
            client.leave()
        call, answer = client.route.sizes(ask.key, ask.rows)
        there.send(call, lambda: arrived(lambda: back.send(answer, answered)))

    def _begin(self, client: _ClientState, walk: SimulatedClient) -> None:
        """Have a client walk the model, and then go on."""
        client.work.append(walk)
        self._resume(client, None)

    def _settle(self, executor: SimulatedExecutor) -> None:
        joint = self._walks[executor]
        if joint.ready and not joint.token and not executor.computing():
            self._begin_token(executor, joint)
        executor.decide()

    def _begin_token(self, executor: SimulatedExecutor, joint: _JointWalks) -> None:
        """Begin the next token, for all clients that are ready."""
        (first, action), *others = joint.ready.values()
        joint.ready = {}
        joint.token = True
        if not others:
            first.enter(executor, self.now)
            self._begin(first, self._alone(joint, action.walk(1)))
        else:
            joint.together = (first, *(client for client, _ in others))
            if joint.client is None:
                joint.client = _ClientState(JOINT, first.route, [])
                executor.scheduler.client_joined(JOINT, local=executor.local)
            self._begin(joint.client, self._together(joint, action.walk(len(joint.together))))

    def _alone(self, joint: _JointWalks, walk: SimulatedClient) -> SimulatedClient:
        yield from walk
        joint.token = False

    def _together(self, joint: _JointWalks, walk: SimulatedClient) -> SimulatedClient:
        yield InWalk(True)
        yield from walk
        yield InWalk(False)
        joint.token = False
        for client in joint.together:
            client.enter(client.route.hops[0].executor, self.now)
            self._resume(client, self.now)


class Simulation(Cluster):
    """One executor and its clients, in simulated time.

    Args:
        policy: a new policy.
        layers: size of the layer table.
        cost: function of a batch, and of whether the batch before it had the same key: the latency in seconds, such as
            :meth:`Cost.of`.
        local: whether clients compute in the executor's process; see :class:`SimulatedExecutor`.
        joint: whether clients decode jointly; see :class:`Cluster`.

    Raises:
        PolicyError: from :meth:`run` and :meth:`step`: the scheduler refused a decision of the policy.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        layers: int,
        cost: Callable[[Batch, bool], float],
        local: bool = False,
        joint: bool = False,
    ) -> None:
        super().__init__(Clock(), joint)
        self._executor = SimulatedExecutor(self.clock, policy, layers=layers, cost=cost, local=local)

    def add(
        self,
        name: str,
        client: SimulatedClient,
        at: float = 0.0,
        terms: Terms = NO_TERMS,
        *,
        route: Route | None = None,
    ) -> None:
        super().add(name, client, at, terms, route=route or Route([Hop(self._executor)]))
