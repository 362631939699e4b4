"""A trace, played to policies in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from symbiosis.core.protocols import Policy
from symbiosis.core.requests import Key
from symbiosis.simulation.clients import Done, Thinking, finetune, generate
from symbiosis.simulation.costs import Costs
from symbiosis.simulation.engine import Client, Simulation, Until
from symbiosis.simulation.outcome import SLO, Outcome, outcome
from symbiosis.simulation.trace import Arrival

__all__ = ["Load", "replay"]


@dataclass(frozen=True)
class Load:
    """What clients ask for.

    Args:
        trace: requests for text.
        clients: that ask for it, each for every so manieth, one after another; each request is a client of its own if
            None.
        paced: whether requests come when the trace says, or as soon as their client is done with the one before.
        tuning: clients that fine-tune until the last text is finished.
        rows: tokens of a fine-tuning step.
    """

    trace: Sequence[Arrival]
    clients: int | None = None
    paced: bool = True
    tuning: int = 0
    rows: int = 256

    def by_client(self) -> list[list[Arrival]]:
        """What each client asks for."""
        count = min(self.clients or len(self.trace), len(self.trace))
        return [list(self.trace[number::count]) for number in range(count)]


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
    """
    texts: list[tuple[Done, int]] = []
    jobs: list[Done] = []
    left = [0] * executors
    simulations = [
        Simulation(
            make_policy(),
            layers=costs.layers,
            max_rows=max_rows,
            cost=costs.batch,
            overhead_s=costs.overhead_s,
            local=costs.local,
        )
        for _ in range(executors)
    ]

    def finished(executor: int) -> None:
        left[executor] -= 1
        progress(1 - sum(left) / len(load.trace))

    for number, arrivals in enumerate(load.by_client()):
        mine = [(arrival, Done()) for arrival in arrivals]
        texts += [(done, arrival.tokens) for arrival, done in mine]
        executor = number % executors
        left[executor] += len(mine)
        client = _asks(mine, costs.walk, costs.think, load.paced, lambda executor=executor: finished(executor))  # type: ignore[misc]
        simulations[executor].add(f"text-{number}", client, mine[0][0].at if load.paced else 0.0)
    for number in range(load.tuning):
        jobs.append(Done())
        tunes = finetune(costs.walk, load.rows, costs.think, jobs[-1], back=costs.back)
        simulations[number % executors].add(f"job-{number}", tunes)
    for executor, simulation in enumerate(simulations):
        simulation.run(going=lambda executor=executor: left[executor] > 0)  # type: ignore[misc]
    batches = sum(simulation.totals.batches for simulation in simulations)
    members = sum(simulation.totals.members for simulation in simulations)
    seconds = max(simulation.now for simulation in simulations)
    return outcome(texts, jobs, seconds, members / batches if batches else 0.0, slo)


def _asks(
    mine: Sequence[tuple[Arrival, Done]],
    walk: Sequence[Key],
    think: Thinking,
    paced: bool,
    finished: Callable[[], None],
) -> Client:
    """One request for text after another."""
    for arrival, done in mine:
        now = yield Until(arrival.at if paced else 0.0)
        yield from generate(walk, arrival.prompt, arrival.tokens, think, done, arrival.at if paced else now)
        finished()
