"""A trace, played to policies in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch
from symbiosis.core.scheduler import tell_unloaded
from symbiosis.simulation.clients import Done, finetune, generate
from symbiosis.simulation.costs import Costs
from symbiosis.simulation.engine import Client, Simulation, Until
from symbiosis.simulation.outcome import SLO, Outcome, outcome
from symbiosis.simulation.trace import Arrival

__all__ = ["Load", "replay", "told"]


@dataclass(frozen=True)
class Load:
    """What clients ask for.

    Args:
        trace: requests for text.
        clients: that ask for it, one request after another; each request is a client of its own if None.
        paced: whether requests come when the trace says, to each client every so manieth; or whichever client is done
            takes the next.
        tuning: clients that fine-tune until the last text is finished.
        rows: tokens of a fine-tuning step.
    """

    trace: Sequence[Arrival]
    clients: int | None = None
    paced: bool = True
    tuning: int = 0
    rows: int = 256

    def by_client(self) -> list[Iterator[Arrival]]:
        """What each client asks for, as it gets to it."""
        count = min(self.clients or len(self.trace), len(self.trace))
        if not self.paced:
            return [iter(self.trace)] * count  # the very same
        return [iter(self.trace[number::count]) for number in range(count)]


def told(policy: Policy, costs: Costs) -> Policy:
    """The policy, once it has been told what a token takes when nothing else goes on.

    Raises:
        UsageError: it promises what cannot be kept even then.
        PolicyError: it raised something else.
    """
    tell_unloaded(policy, sum(costs.batch(Batch(key, (), "", 1), False) for key in costs.walk))
    return policy


def replay(
    make_policy: Callable[[], Policy],
    costs: Costs,
    load: Load,
    slo: SLO,
    *,
    executors: int = 1,
    max_rows: int = 8192,
    progress: Callable[[float], None] = lambda part: None,
) -> Outcome:
    """Simulate a load, with clients spread over executors of the same base model in turn.

    Args:
        make_policy: called for each executor.
        progress: told what part of the texts is finished.

    Raises:
        PolicyError: the policy made a decision that the scheduler had to refuse.
        UsageError: it promises what cannot be kept even when nothing else goes on.
    """
    texts: list[tuple[Done, int]] = []
    jobs: list[Done] = []
    clients = load.by_client()
    left = len(load.trace)
    simulations = [
        Simulation(
            told(make_policy(), costs),
            layers=costs.layers,
            max_rows=max_rows,
            cost=costs.batch,
            overhead_s=costs.overhead_s,
            local=costs.local,
        )
        for _ in range(executors)
    ]

    def asks(arrivals: Iterator[Arrival]) -> Client:
        """One request for text after another."""
        nonlocal left
        for arrival in arrivals:
            now = yield Until(arrival.at if load.paced else 0.0)
            done = Done()
            texts.append((done, arrival.tokens))
            began = arrival.at if load.paced else now
            yield from generate(costs.walk, arrival.prompt, arrival.tokens, costs.think, done, began, costs.last)
            left -= 1
            progress(1 - left / len(load.trace))

    for number, arrivals in enumerate(clients):
        simulations[number % executors].add(f"text-{number}", asks(arrivals))
    for number in range(load.tuning):
        jobs.append(Done())
        tunes = finetune(costs.walk, load.rows, costs.think, jobs[-1], back=costs.back)
        simulations[number % executors].add(f"job-{number}", tunes)
    while left:  # all executors at the same time: clients of one may take what those of another leave
        min(simulations, key=lambda simulation: simulation.next_at).step()
    batches = sum(simulation.totals.batches for simulation in simulations)
    members = sum(simulation.totals.members for simulation in simulations)
    seconds = max(simulation.now for simulation in simulations)
    return outcome(texts, jobs, seconds, members / batches if batches else 0.0, slo)
