"""Placements of a model on given machines, compared by simulation."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from symbiosis.core.policy import Policy
from symbiosis.errors import UsageError
from symbiosis.simulation.clients import Done, finetune, generate
from symbiosis.simulation.clock import Clock
from symbiosis.simulation.machines import Fleet, Placement, Site
from symbiosis.simulation.placement import SimulatedModel, TenantWork, fits, needs, place
from symbiosis.simulation.simulation import Cluster

_PROMPT = 8
"""Tokens of a simulated prompt, which is not measured."""
_WARM = 2
"""Tokens of each tenant that generates before rates are measured. Of each tenant that fine-tunes it is one step."""
_TOKENS = 10
"""Measured tokens of each tenant that generates, at least."""
_STEPS = 1
"""Measured steps of each tenant that fine-tunes, at least."""
_EVENTS = 1000
"""Simulated events from one look at all tenants to the next."""


@dataclass(frozen=True)
class Rates:
    """What tenants see, in simulated time."""

    decode_per_s: float
    """Generated tokens per second, of all tenants together."""
    token_ms: float
    """Mean time from one token of a tenant to the next; nan if no tenant generates."""
    finetune_per_s: float
    """Fine-tuned tokens per second, of all tenants together."""

    @property
    def score(self) -> float:
        """The geometric mean of the two rates, or the one that there is."""
        rates = [rate for rate in (self.decode_per_s, self.finetune_per_s) if rate]
        return float(rates[0] * rates[1]) ** 0.5 if len(rates) == 2 else sum(rates)


@dataclass(frozen=True)
class Candidate:
    """A placement, what it needs, and how fast it is if it fits."""

    placement: Placement
    memory: dict[str, list[dict[str, float]]]
    """Bytes by purpose for each device of each machine."""
    problem: str | None
    """Why it cannot be used, or None: it does not fit, a link is missing, or its machines cannot keep the latencies
    that the policy promises."""
    traffic: dict[tuple[str, str], int]
    """Bytes that a decoded token sends between two machines, in both directions."""
    rates: Rates | None


def candidates(fleet: Fleet, base: SimulatedModel, clients: str | None) -> Iterator[Placement]:
    """Yield placements: parts of equal numbers of blocks, each on so many shards, with so many replicas of the whole.

    All numbers are powers of 2. Executors take the machines in the order of the file, so the parts of a replica are
    next to each other.

    Args:
        clients: the machine on which clients compute, which then has no executor unless it is the only one; None for
            the machine of the first part.
    """
    machines = [each for each in fleet.machines.values() if each.name != clients or len(fleet.machines) == 1]
    most = max(machine.devices for machine in machines)
    for shards in _powers(most):
        slots = [machine.name for machine in machines for _ in range(machine.devices // shards)]
        for parts in _powers(min(len(slots), base.shape.blocks)):
            ends = [base.shape.blocks * number // parts for number in range(parts + 1)]
            for replicas in _powers(len(slots) // parts):
                found: list[list[Site]] = [[] for _ in range(parts)]
                for number, name in enumerate(slots[: parts * replicas]):
                    part = number % parts
                    found[part].append(Site(name, range(ends[part], ends[part + 1]), shards))
                yield Placement(found, clients)


def _powers(most: int) -> list[int]:
    """Return the powers of 2 up to a number."""
    return [1 << bit for bit in range(most.bit_length())]


def traffic(placement: Placement, base: SimulatedModel) -> dict[tuple[str, str], int]:
    """Return the bytes that a decoded token sends between two machines, in both directions, by the pair of them, for
    the first replica of each part."""
    home = placement.home
    found: dict[tuple[str, str], int] = {}
    for key in base.walk:
        block = base.of_block[key.layers[0]]
        site = next(part[0] for part in placement.parts if block in part[0].blocks)
        if site.machine != home:
            found[home, site.machine] = found.get((home, site.machine), 0) + sum(base.sent(key, 1))
    return found


def simulated(
    fleet: Fleet,
    placement: Placement,
    base: SimulatedModel,
    tenants: TenantWork,
    make_policy: Callable[[], Policy],
    progress: Callable[[], None] = lambda: None,
) -> Rates:
    """Return the rates of tenants that all work without pause, from a simulation of some tokens and steps.

    Replicas that share no link are simulated one by one, and those with equal machines and links, and as many tenants,
    only once.

    Raises:
        PolicyError: the scheduler refused a decision of the policy.
        UsageError: the policy promises latencies that the machines cannot keep, or a link is missing.
    """
    wholes = _replicas(placement)
    found: dict[object, Rates] = {}
    rates: list[Rates] = []
    for number, whole in enumerate(wholes):
        decode, finetune = (len(range(number, all_, len(wholes))) for all_ in (tenants.decode, tenants.finetune))
        machines = [(fleet.machines[site.machine], fleet.link(whole.home, site.machine)) for site in whole.sites()]
        names = [whole.home, *(site.machine for site in whole.sites())]
        same = tuple(map(names.index, names))  # parts on one machine share its link
        alike = (decode, finetune, same, *((machine.device, machine.between, link) for machine, link in machines))
        if alike not in found:
            work = replace(tenants, decode=decode, finetune=finetune)
            found[alike] = _simulated(fleet, whole, base, work, make_policy, progress)
        rates.append(found[alike])
    decoded = sum(each.decode_per_s for each in rates)
    waited = sum(each.token_ms * each.decode_per_s for each in rates if each.decode_per_s)
    return Rates(decoded, waited / decoded if decoded else math.nan, sum(each.finetune_per_s for each in rates))


def _replicas(placement: Placement) -> list[Placement]:
    """Return the replicas of the whole model, if they share no link; otherwise all of them as one."""
    count = len(placement.parts[0])
    wholes = [Placement([[part[number]] for part in placement.parts], placement.clients) for number in range(count)]
    links = [pair for whole in wholes for pair in {(whole.home, site.machine) for site in whole.sites()}]
    across = [pair for pair in links if pair[0] != pair[1]]
    return wholes if len(set(across)) == len(across) else [placement]


def _simulated(
    fleet: Fleet,
    placement: Placement,
    base: SimulatedModel,
    tenants: TenantWork,
    make_policy: Callable[[], Policy],
    progress: Callable[[], None],
) -> Rates:
    if not tenants.decode and not tenants.finetune:
        return Rates(0.0, math.nan, 0.0)
    clock = Clock()
    cluster, costs = Cluster(clock), base.costs(fleet.machines[placement.home].device)
    _, routes, _ = place(fleet, placement, base)(clock, make_policy)
    texts = [Done() for _ in range(tenants.decode)]
    jobs = [Done() for _ in range(tenants.finetune)]
    for number, done in enumerate(texts):
        client = generate(costs.walk, _PROMPT, 1 << 40, costs.think, done, last=costs.last)
        cluster.add(f"text-{number}", client, route=routes[number % len(routes)])
    for number, done in enumerate(jobs):
        client = finetune(costs.walk, tenants.rows, costs.think, done, back=costs.back)
        cluster.add(f"job-{number}", client, route=routes[number % len(routes)])

    while True:
        for _ in range(_EVENTS):
            cluster.step()
        progress()
        if all(len(done.steps) > _STEPS for done in jobs):
            # A token takes longer beside one half of a step than beside the other, so whole steps are measured.
            slowest = max((done.steps for done in jobs), default=[0.0, math.inf])
            tokens = [_within(done.tokens[_WARM:], slowest[0], slowest[-1]) for done in texts]
            if all(len(times) > _TOKENS for times in tokens):
                break
    gaps = sum(len(times) - 1 for times in tokens)
    return Rates(
        sum(map(_rate, tokens)),
        1e3 * sum(times[-1] - times[0] for times in tokens) / gaps if gaps else math.nan,
        tenants.rows * sum(_rate(done.steps) for done in jobs),
    )


def _within(times: list[float], begin: float, end: float) -> list[float]:
    """Return the times, which are in order, from ``begin`` to ``end``."""
    return times[bisect_left(times, begin) : bisect_right(times, end)]


def _rate(times: list[float]) -> float:
    """Return how often something happens in a second, by the times of two or more events."""
    return (len(times) - 1) / (times[-1] - times[0])


def plan(
    fleet: Fleet,
    base: SimulatedModel,
    tenants: TenantWork,
    make_policy: Callable[[], Policy],
    clients: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Candidate]:
    """Return the placements of a model: first those that fit, the fastest one first.

    Raises:
        PolicyError: a scheduler refused a decision of the policy.
        UsageError: for each placement that fits, a link is missing, or the policy promises latencies that its machines
            cannot keep.
    """
    found: list[Candidate] = []
    refused = None
    for placement in candidates(fleet, base, clients):
        memory = needs(fleet, base, tenants, placement)
        problem = fits(fleet, memory)
        rates = None
        if problem is None:
            try:
                rates = simulated(fleet, placement, base, tenants, make_policy, partial(progress, placement.text()))
            except UsageError as error:
                problem, refused = str(error), error
        found.append(Candidate(placement, memory, problem, traffic(placement, base), rates))
    if refused is not None and not any(each.rates for each in found):
        raise refused
    return sorted(found, key=lambda each: -each.rates.score if each.rates else 1.0)
