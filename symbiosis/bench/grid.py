"""``symbiosis simulate --grid``: policies over many loads, in parallel."""

from __future__ import annotations

import math
import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.markup import escape
from rich.table import Table

from symbiosis.bench.cores import usable_cores
from symbiosis.core.registry import make_policy
from symbiosis.core.requests import Batch
from symbiosis.simulation.bound import Bound, bound
from symbiosis.simulation.costs import Costs, roofline
from symbiosis.simulation.loads import SHAPES, LoadShape, arrivals, drawn, make_shape
from symbiosis.simulation.outcome import SLO, LoadOutcome
from symbiosis.simulation.replay import ReplayedLoad, replay
from symbiosis.simulation.trace import Arrival
from symbiosis.terminal.child import end_with_parent

MACHINES = {"a100": "llama-3.1-8b", "h100": "qwen2.5-14b"}
PARTS = (0.3, 0.6, 0.9)
"""Mean rates of requests, as parts of what the machine can serve without fine-tuning."""
TUNING = (0, 2)
POLICIES = ("temporal:every=64", "temporal:every=128", "temporal:every=512", "dynamic-temporal", "opportunistic")
CLOSE = 0.02
"""Difference of SLO attainment up to which two policies count as equal."""
_TOGETHER = 8
"""Texts that decode together at the rate that counts as the machine's capacity."""


@dataclass(frozen=True)
class GridLoad:
    """One load of the grid."""

    machine: str
    load: str
    """Name or spec of the load."""
    shape: LoadShape
    part: float
    tuning: int
    seed: int

    def costs(self) -> Costs:
        return _costs(self.machine)

    def made(self, requests: int, rows: int) -> ReplayedLoad:
        """Return the load: its shape, at its part of the machine's capacity."""
        trace = arrivals(self.shape, requests, self.seed)
        rate = self.part * capacity(self.costs(), trace)
        return ReplayedLoad(
            arrivals(replace(self.shape, rate=rate), requests, self.seed), tuning=self.tuning, rows=rows
        )

    def text(self) -> str:
        """Return a short name."""
        tuned = f", {self.tuning} fine-tune" if self.tuning else ""
        return f"{self.load}, {self.part:g} of {self.machine}{tuned}, seed {self.seed}"


@dataclass(frozen=True)
class GridResult:
    """The results of one load: what seems possible, and the outcome of each policy."""

    cell: GridLoad
    bound: Bound
    outcomes: dict[str, LoadOutcome]

    def tuned(self, policy: str) -> float:
        """Return a policy's fine-tuning as a part of the bound's. It is not a number if the policy fine-tunes and none
        seems possible."""
        tokens = self.outcomes[policy].finetune_per_s
        return tokens / (self.bound.finetune_per_s or math.nan) if tokens else 0.0

    def best(self, besides: str) -> tuple[float, float]:
        """Return the best SLO attainment of the other policies, and the most fine-tuning of those that are close."""
        others = [outcome for policy, outcome in self.outcomes.items() if policy != besides]
        slo = max((outcome.slo_attainment for outcome in others), default=0.0)
        tuned = [outcome.finetune_per_s for outcome in others if outcome.slo_attainment >= slo - CLOSE]
        return slo, max(tuned, default=0.0)

    def holds(self, policy: str) -> bool:
        """Return whether a policy keeps as many SLOs as the best other one, and fine-tunes as much as the others that
        do, unless it keeps more."""
        slo, tuned = self.best(policy)
        mine = self.outcomes[policy]
        return mine.slo_attainment >= slo - CLOSE and (
            mine.finetune_per_s >= tuned or mine.slo_attainment > slo + CLOSE
        )


@cache
def _costs(machine: str) -> Costs:
    return roofline(machine, MACHINES[machine])


def capacity(costs: Costs, trace: Sequence[Arrival]) -> float:
    """Return the requests per second that occupy the executor fully, if eight texts share each batch of tokens."""

    def walk(rows: int) -> float:
        return sum(costs.batch(Batch(key, (), "", rows), False) + costs.overhead_s for key in costs.walk)

    token = walk(_TOGETHER) / _TOGETHER
    return 1 / fmean(walk(arrival.prompt) + token * (arrival.tokens - 1) for arrival in trace)


def cells(loads: Sequence[str], seeds: int, first: int, random_loads: int) -> Iterator[GridLoad]:
    """Return the loads of a grid: the named ones, or so many with random parameters, rates and machines."""
    if random_loads:
        chance = random.Random(first)
        for number in range(random_loads):
            machine, tuning = chance.choice(list(MACHINES)), chance.choice(TUNING)
            yield GridLoad(machine, f"random {number}", drawn(chance), round(chance.uniform(0.2, 1), 2), tuning, number)
        return
    for machine in MACHINES:
        for load in loads or SHAPES:
            for part in PARTS:
                for tuning in TUNING:
                    for seed in range(first, first + seeds):
                        yield GridLoad(machine, load, make_shape(load), part, tuning, seed)


def run(
    grid: Sequence[GridLoad],
    policies: Sequence[str],
    slo: SLO,
    requests: int,
    rows: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[GridResult]:
    """Simulate each load with each policy, with a process for each core.

    Args:
        progress: called with the number of simulations that are done, and of all.

    Returns:
        The results of all loads; after Ctrl-C, of those that all policies have run.

    Raises:
        UsageError: a policy promises latencies below those of an idle executor.
        PolicyError: the scheduler refused a decision of a policy.
    """
    outcomes: dict[tuple[int, str], LoadOutcome] = {}
    with ProcessPoolExecutor(len(usable_cores()), initializer=_begin) as pool:
        work = {
            pool.submit(simulated, cell, policy, slo, requests, rows): (number, policy)
            for number, cell in enumerate(grid)
            for policy in policies
        }
        try:
            for done in as_completed(work):
                outcomes[work[done]] = done.result()
                progress(len(outcomes), len(work))
        except BaseException as error:
            for worker in multiprocessing.active_children():  # the pool would wait for simulations that have begun
                worker.kill()
            if not isinstance(error, KeyboardInterrupt):
                raise
    return [
        GridResult(
            cell,
            bound(cell.costs(), cell.made(requests, rows), slo),
            {policy: outcomes[number, policy] for policy in policies},
        )
        for number, cell in enumerate(grid)
        if all((number, policy) in outcomes for policy in policies)
    ]


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the first process alone
    end_with_parent()


def simulated(cell: GridLoad, policy: str, slo: SLO, requests: int, rows: int) -> LoadOutcome:
    """Simulate one load with one policy."""
    return replay(partial(make_policy, policy), cell.costs(), cell.made(requests, rows), slo)


def table(rows: Sequence[GridResult], policy: str) -> Table:
    """Return a table of all loads: a policy, the best of the others, and what seems possible."""
    found = Table(title=f"SLO kept, and fine-tuning in tokens/s: {escape(policy)}", title_justify="left")
    found.add_column("load", overflow="fold")
    for heading in ("SLO", "best\nother", "pos-\nsible", "tuning", "other\nas good", "pos-\nsible"):
        found.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        mine, (slo, tuned) = row.outcomes[policy], row.best(policy)
        figures = [f"{value:.2f}" for value in (mine.slo_attainment, slo, row.bound.slo_attainment)]
        figures += [f"{value:,.0f}" if row.cell.tuning else "" for value in (mine.finetune_per_s, tuned, row.bound[1])]
        found.add_row(escape(row.cell.text()), *figures, style=None if row.holds(policy) else "bold")
    return found


def summary(rows: Sequence[GridResult]) -> Table:
    """Return a table of means over all loads, by policy."""
    found = Table(title=f"means of {len(rows)} loads", title_justify="left")
    found.add_column("policy", overflow="fold")
    for heading in ("SLO kept", "regret", "tuning kept", "loads held"):
        found.add_column(heading, justify="right", no_wrap=True)
    for policy, figures in means(rows).items():
        held = f"{figures['held']} of {len(rows)}"
        shown = ("" if math.isnan(figures[name]) else f"{figures[name]:.3f}" for name in ("slo", "regret", "tuning"))
        found.add_row(escape(policy), *shown, held)
    return found


def means(rows: Sequence[GridResult]) -> dict[str, dict[str, Any]]:
    """Return by policy: its mean SLO attainment; how far that is below the bound; its fine-tuning, as a part of the
    bound's; and the number of loads on which it holds (:meth:`GridResult.holds`)."""
    found: dict[str, dict[str, Any]] = {}
    for policy in rows[0].outcomes:
        tuned = [part for row in rows if row.cell.tuning and not math.isnan(part := row.tuned(policy))]
        found[policy] = {
            "slo": fmean(row.outcomes[policy].slo_attainment for row in rows),
            "regret": fmean(row.bound.slo_attainment - row.outcomes[policy].slo_attainment for row in rows),
            "tuning": fmean(tuned) if tuned else math.nan,
            "held": sum(row.holds(policy) for row in rows),
        }
    return found


def plot(file: Path, rows: Sequence[GridResult]) -> None:
    """Draw SLO attainment against fine-tuning, a panel for each load and a mark for each policy and rate."""
    from matplotlib.figure import Figure

    tuned = [row for row in rows if row.cell.tuning] or list(rows)
    names = list(dict.fromkeys(row.cell.load for row in tuned))
    across = min(len(names), 3)
    down = math.ceil(len(names) / across)
    figure = Figure(figsize=(4.5 * across, 3.6 * down), layout="tight")
    axes = figure.subplots(down, across, squeeze=False, sharey=True)
    for axis, name in zip(axes.flat, names, strict=False):
        mine = [row for row in tuned if row.cell.load == name]
        for number, policy in enumerate(tuned[0].outcomes):
            axis.scatter(
                [row.tuned(policy) for row in mine],
                [row.outcomes[policy].slo_attainment for row in mine],
                s=[80 * row.cell.part for row in mine],
                marker="o^sDvP*X"[number % 8],
                label=policy,
                alpha=0.7,
            )
        axis.set_title(name)
        axis.set_xlabel("fine-tuning, part of what seems possible")
        axis.set_ylim(-0.05, 1.05)
    axes[0, 0].set_ylabel("SLO kept")
    axes[0, 0].legend(fontsize=7)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    figure.savefig(file, dpi=120)
