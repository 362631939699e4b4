"""Replay of a trace in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from symbiosis.core.faults import tell_unloaded
from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Key
from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.simulation.clients import Done, finetune, generate
from symbiosis.simulation.clock import Clock, Link
from symbiosis.simulation.costs import Costs
from symbiosis.simulation.executor import SimulatedExecutor
from symbiosis.simulation.outcome import SLO, LoadOutcome, outcome
from symbiosis.simulation.simulation import Cluster, Hop, Route, SimulatedClient, Until
from symbiosis.simulation.trace import Arrival


@dataclass(frozen=True)
class ReplayedLoad:
    """The work of all clients.

    Args:
        trace: requests for text.
        clients: number of clients that send them, each one request after another; None for a client per conversation.
            A request that belongs to no conversation is one.
        paced: whether requests arrive at the times of the trace, with conversations dealt to the clients in turn.
            Otherwise requests follow one another without pauses, and a client that has finished a conversation takes
            the next one.
        tuning: number of clients that fine-tune until the last text is finished.
        rows: tokens of a fine-tuning step.
    """

    trace: Sequence[Arrival]
    clients: int | None = None
    paced: bool = True
    tuning: int = 0
    rows: int = 256

    def by_client(self) -> list[Iterator[Arrival]]:
        """Return the requests of each client, in order."""
        conversations: dict[object, list[Arrival]] = {}
        for number, arrival in enumerate(self.trace):
            conversations.setdefault((number,) if arrival.conversation is None else arrival.conversation, []).append(
                arrival
            )
        count = min(self.clients or len(conversations), len(conversations))
        dealt = list(conversations.values())
        if not self.paced:
            left = iter(dealt)
            return [chain.from_iterable(left) for _ in range(count)]  # one iterator for all clients
        return [chain.from_iterable(dealt[number::count]) for number in range(count)]

    def terms(self, number: int, slo: SLO) -> Terms:
        """Return the terms of a client. A client of several conversations has the targets of the first one."""
        factor = next((arrival.slo for arrival in self.trace if arrival.conversation in (number, None)), 1.0)
        return Terms(slo_ms=factor * slo.token_ms, ttft_ms=factor * slo.first_ms) if factor > 1 else NO_TERMS


def told(policy: Policy, walk: Sequence[Key], cost: Callable[[Batch, bool], float], fraction: float = 1.0) -> Policy:
    """Tell a policy the latency of one token in the whole model's base layers on an idle executor, and return it.

    Args:
        walk: the calls to the executor.
        fraction: the part (0 to 1) of the model's work that its layers do.

    Raises:
        UsageError: the policy promises latencies below this.
        PolicyError: the policy raised another error.
    """
    tell_unloaded(policy, sum(cost(Batch(key, (), "", 1), False) for key in walk) / fraction)
    return policy


class SimulatedPlacement(NamedTuple):
    """Executors in simulated time. Clients are dealt to the routes in turn."""

    executors: Sequence[SimulatedExecutor]
    routes: Sequence[Route]
    links: Mapping[tuple[str, str], Link] = {}
    """Links by the names of the machines at their ends, each for one direction."""


Place = Callable[[Clock, Callable[[], Policy]], SimulatedPlacement]
"""Function of a clock and of a maker of policies: makes the executors of a placement."""


def replicas(costs: Costs, count: int = 1) -> Place:
    """Place some executors of the same base model, whose messages take no time."""

    def placed(clock: Clock, make_policy: Callable[[], Policy]) -> SimulatedPlacement:
        executors = [
            SimulatedExecutor(
                clock,
                told(make_policy(), costs.walk, costs.batch),
                layers=costs.layers,
                cost=costs.batch,
                overhead_s=costs.overhead_s,
                local=costs.local,
                parts=costs.parts,
            )
            for _ in range(count)
        ]
        return SimulatedPlacement(executors, [Route([Hop(executor)]) for executor in executors])

    return placed


def replay(
    make_policy: Callable[[], Policy],
    costs: Costs,
    load: ReplayedLoad,
    slo: SLO,
    *,
    place: Place | None = None,
    progress: Callable[[float], None] = lambda part: None,
) -> LoadOutcome:
    """Simulate a load.

    Args:
        make_policy: called once for each executor.
        costs: the walk, and the clients' own work.
        place: makes the executors; one of :func:`replicas` by default.
        progress: called with the part (0 to 1) of the texts that is finished.

    Raises:
        PolicyError: the scheduler refused a decision of the policy.
        UsageError: the policy promises latencies below those of an idle executor.
    """
    texts: list[tuple[Done, Arrival]] = []
    jobs: list[Done] = []
    clients = load.by_client()
    left = len(load.trace)
    clock = Clock()
    cluster = Cluster(clock, costs.joint)
    executors, routes, links = (place or replicas(costs))(clock, make_policy)

    def asks(arrivals: Iterator[Arrival]) -> SimulatedClient:
        """Send one request for text after another."""
        nonlocal left
        done = Done()
        for arrival in arrivals:
            at = arrival.at if arrival.pause is None else done.tokens[-1] + arrival.pause
            now = yield Until(at if load.paced else 0.0)
            done = Done()
            texts.append((done, arrival))
            began = at if load.paced else now
            yield from generate(costs.walk, arrival.prompt, arrival.tokens, costs.think, done, began, costs.last)
            left -= 1
            progress(1 - left / len(load.trace))

    for number, arrivals in enumerate(clients):
        route = routes[number % len(routes)]
        cluster.add(f"text-{number}", asks(arrivals), terms=load.terms(number, slo), route=route)
    for number in range(load.tuning):
        jobs.append(Done())
        tunes = finetune(costs.walk, load.rows, costs.think, jobs[-1], back=costs.back)
        cluster.add(f"job-{number}", tunes, route=routes[number % len(routes)])
    while left:
        cluster.step()
    batches = sum(executor.batches for executor in executors)
    members = sum(executor.members for executor in executors)
    sent = sum(link.bytes for link in links.values())
    return outcome(texts, jobs, cluster.now, members / batches if batches else 0.0, slo, sent)
