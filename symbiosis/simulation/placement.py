"""Executors of a placement in simulated time, and what its devices must hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Key, Pass
from symbiosis.simulation.clients import backward
from symbiosis.simulation.clock import Clock, Link
from symbiosis.simulation.costs import OVERHEAD_S, THINK_S, Costs, Gpu, LlamaShape
from symbiosis.simulation.executor import MAX_ROWS, SimulatedExecutor
from symbiosis.simulation.machines import Fleet, Machine, Placement, Site
from symbiosis.simulation.replay import SimulatedPlacement, told
from symbiosis.simulation.simulation import Hop, Route

BYTES = 2
"""Of a number in bf16."""


@dataclass(frozen=True)
class SimulatedModel:
    """The base layers of a model, and the walk through them."""

    shape: LlamaShape
    walk: Sequence[Key]
    sizes: Sequence[tuple[int, int]]
    """Features of the input and of the output of each layer."""
    of_block: Sequence[int]
    """The block of each layer. The language model head belongs to the last one."""

    @classmethod
    def of(cls, shape: LlamaShape) -> SimulatedModel:
        """Return the base layers of a shape, with its language model head if that is not the embedding."""
        walk, sizes, of_block = shape.layers()
        if not shape.tied:
            walk = [*walk, Key((len(sizes),), Pass.FORWARD)]
            sizes = [*sizes, (shape.hidden, shape.vocabulary)]
            of_block = [*of_block, shape.blocks - 1]
        return cls(shape, walk, sizes, of_block)

    def weights(self, layers: Sequence[int]) -> int:
        """Return the number of weights of some layers."""
        return sum(math.prod(self.sizes[layer]) for layer in layers)

    def sent(self, key: Key, rows: int) -> tuple[int, int]:
        """Return the bytes of a call's rows, and of its results. Siblings read the same rows."""
        into, out = self.sizes[key.layers[0]][0], sum(self.sizes[layer][1] for layer in key.layers)
        before, after = (out, into) if key.pass_.is_backward else (into, out)
        return BYTES * rows * before, BYTES * rows * after

    @property
    def kept(self) -> int:
        """Numbers that a block keeps for a backward pass, for each row, at the client: an estimate for Llama."""
        shape = self.shape
        return 6 * shape.hidden + 2 * shape.attention + 2 * shape.kv + 3 * shape.intermediate

    def costs(self, device: Gpu) -> Costs:
        """Return the costs of this model, without those of batches: their latency is not a number.

        Args:
            device: where clients compute. Before each request a client takes
                :data:`~symbiosis.simulation.costs.THINK_S` or, with many rows, the time to move the tensors that a
                block keeps three times, divided among the block's requests.
        """
        moved = 3 * BYTES * self.kept / len(self.shape.siblings()) / (device.efficiency * device.bytes_per_s)
        last = () if self.shape.tied else {self.walk[-1]}
        return Costs(
            self.walk,
            backward(self.walk),
            len(self.sizes),
            lambda batch, again: math.nan,
            lambda kind, rows: max(THINK_S, rows * moved),
            OVERHEAD_S,
            "by the figures of its machines",
            last=last,
        )

    def seconds(self, machine: Machine, shards: int, batch: Batch) -> float:
        """Return the latency of a batch on one device, or on several that have a part of each weight.

        The first shard sends all rows to each other one, and receives their parts of the results; of a backward pass,
        sums for all of the rows (decision 0039).
        """
        alone = machine.device.seconds(self.weights(batch.key.layers) / shards, batch.rows)
        if shards == 1:
            return alone
        rows, results = self.sent(batch.key, batch.rows)
        received = results if batch.key.pass_.is_backward else results / shards
        return alone + machine.between.seconds((shards - 1) * rows) + machine.between.seconds((shards - 1) * received)


def place(fleet: Fleet, placement: Placement, base: SimulatedModel) -> Callable[..., SimulatedPlacement]:
    """Return a function of a clock and of a maker of policies that makes the executors and routes of a placement.

    Raises:
        UsageError: there is no link between two machines that need one.
    """
    sites = placement.sites()
    combinations = math.lcm(*map(len, placement.parts))
    chosen = [[replicas[number % len(replicas)] for replicas in placement.parts] for number in range(combinations)]
    for hops in chosen:
        for site in hops:
            fleet.link(placement.clients or hops[0].machine, site.machine)

    def made(clock: Clock, make_policy: Callable[[], Policy]) -> SimulatedPlacement:
        executors = {id(site): _executor(clock, make_policy(), fleet, site, base) for site in sites}
        links: dict[tuple[str, str], Link] = {}

        def link(source: str, target: str) -> Link | None:
            figures = fleet.link(source, target)
            if figures is None:
                return None
            return links.setdefault((source, target), Link(clock, figures.latency_s, figures.bytes_per_s))

        places = [_part_of(placement, block) for block in base.of_block]
        routes = []
        for hops in chosen:
            home = placement.clients or hops[0].machine
            here = [Hop(executors[id(site)], link(home, site.machine), link(site.machine, home)) for site in hops]
            routes.append(Route(here, places if len(here) > 1 else None, base.sent))
        return SimulatedPlacement(list(executors.values()), routes, links)

    return made


def _executor(clock: Clock, policy: Policy, fleet: Fleet, site: Site, base: SimulatedModel) -> SimulatedExecutor:
    machine = fleet.machines[site.machine]

    def cost(batch: Batch, again: bool) -> float:
        return base.seconds(machine, site.shards, batch)

    weights = [base.weights([layer]) if block in site.blocks else 0 for layer, block in enumerate(base.of_block)]
    fraction = sum(weights) / base.weights(range(len(base.sizes)))
    walk = [key for key in base.walk if base.of_block[key.layers[0]] in site.blocks]
    return SimulatedExecutor(
        clock,
        told(policy, walk, cost, fraction),
        layers=len(base.sizes),
        cost=cost,
        overhead_s=OVERHEAD_S,
        parts=[weight / sum(weights) for weight in weights],
        fraction=fraction,
    )


def _part_of(placement: Placement, block: int) -> int:
    return next(number for number, replicas in enumerate(placement.parts) if block in replicas[0].blocks)


@dataclass(frozen=True)
class TenantWork:
    """What tenants do."""

    decode: int
    """Number of tenants that generate."""
    finetune: int
    """Number of tenants that fine-tune."""
    context: int
    """Tokens in the cache of a tenant that generates."""
    rows: int
    """Tokens of a fine-tuning step."""
    rank: int
    """Rank of their LoRA on the four attention layers of each block."""


def needs(
    fleet: Fleet, base: SimulatedModel, tenants: TenantWork, placement: Placement
) -> dict[str, list[dict[str, float]]]:
    """Return what each device of a machine must hold, in bytes by purpose, for each executor's devices and for clients.

    Weights and caches follow from the shape. Activations are an estimate: the tensors that a block of a Llama model in
    bf16 keeps for a backward pass, without attention scores. An adapter of a tenant that fine-tunes counts four times,
    in fp32, for its gradients and Adam's moments. The embedding is on the first device of each executor, which gives it
    to tenants, and once more where clients compute. On a machine of their own, clients are spread over all devices that
    have no executor.
    """
    shape = base.shape
    embedding = float(BYTES * shape.hidden * shape.vocabulary)
    found: dict[str, list[dict[str, float]]] = {}
    widest = max(into + out for into, out in base.sizes)
    homes = []
    for part, replicas in enumerate(placement.parts):
        decoded, tuned = (math.ceil(all_ / len(replicas)) for all_ in (tenants.decode, tenants.finetune))
        for site in replicas:
            devices = found.setdefault(site.machine, [])
            if part == 0 and placement.clients is None:
                homes.append((site.machine, len(devices)))
            weights = base.weights([layer for layer, block in enumerate(base.of_block) if block in site.blocks])
            rows = min(max(decoded, tenants.rows * tuned), MAX_ROWS)
            device = {"weights": BYTES * weights / site.shards, "rows": float(BYTES * rows * widest)}
            devices += [dict(device) for _ in range(site.shards)]
            devices[-site.shards]["embedding"] = embedding
    if placement.clients is not None:
        devices = found.setdefault(placement.clients, [])
        free = range(len(devices), fleet.machines[placement.clients].devices)
        free = free or range(max(len(devices), 1))
        homes += [(placement.clients, number) for number in free]
        devices += [{} for _ in range(len(devices), free.stop)]
    lora = tenants.rank * shape.blocks * sum(into + out for group in shape.siblings()[:2] for into, out in group)
    cache = 2 * BYTES * shape.kv * shape.blocks
    for number, (name, index) in enumerate(homes):
        decode, finetune = (len(range(number, all_, len(homes))) for all_ in (tenants.decode, tenants.finetune))
        held = found[name][index]
        held |= {
            "embedding": held.get("embedding", 0.0) + embedding,
            "caches": float(decode * tenants.context * cache),
            "activations": float(finetune * tenants.rows * BYTES * base.kept * shape.blocks),
            "adapters": float(4 * lora * (decode + 4 * finetune)),
        }
    return found


def fits(fleet: Fleet, needed: Mapping[str, list[dict[str, float]]]) -> str | None:
    """Return None if each device has the memory that it needs; otherwise why not."""
    for name, devices in needed.items():
        machine = fleet.machines[name]
        if len(devices) > machine.devices:
            return f"{name} needs {len(devices)} devices and has {machine.devices}"
        for device in devices:
            if (size := sum(device.values())) > machine.memory_bytes:
                return f"a device of {name} needs {size / 2**30:,.0f} GiB and has {machine.memory_bytes / 2**30:,.0f}"
    return None
