"""How long things take: on a GPU that is described, or here, measured on a real executor."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from symbiosis.core.requests import Batch, Key, Kind, Pass, Request
from symbiosis.errors import UsageError
from symbiosis.policies.lockstep import Lockstep
from symbiosis.simulation.clients import Thinking, backward

if TYPE_CHECKING:
    from symbiosis.bench.models import Preset

__all__ = ["GPUS", "MODELS", "Costs", "Gpu", "Shape", "measure", "roofline"]


@dataclass(frozen=True)
class Costs:
    """What a simulation needs to know of a model on a machine."""

    walk: Sequence[Key]
    """What a token asks for, in order."""
    back: Sequence[Key]
    """What fine-tuning asks for on its walk back."""
    layers: int
    """Size of the layer table."""
    batch: Callable[[Batch], float]
    """Seconds a batch takes."""
    think: Thinking
    overhead_s: float
    local: bool
    """See :class:`~symbiosis.simulation.Simulation`."""
    text: str
    """Where these figures come from, in a few words."""


# -------------------------------------------------------------------------------------------------------- as described


@dataclass(frozen=True)
class Gpu:
    """What a data sheet says, and how much of it dense layers get."""

    bytes_per_s: float
    flops: float
    """Of bf16 matrix products, dense."""
    efficiency: float = 0.7
    launch_s: float = 10e-6
    """A batch beside its matrix product: gathering rows, launching, scattering."""


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped model, bf16."""

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int

    def siblings(self) -> list[list[tuple[int, int]]]:
        """(in, out) of the base layers of one block, those that read the same rows together."""
        kv = self.hidden // self.heads * self.kv_heads
        return [
            [(self.hidden, self.hidden), (self.hidden, kv), (self.hidden, kv)],
            [(self.hidden, self.hidden)],
            [(self.hidden, self.intermediate), (self.hidden, self.intermediate)],
            [(self.intermediate, self.hidden)],
        ]


GPUS = {"a100": Gpu(2.0e12, 312e12), "h100": Gpu(3.35e12, 989e12)}
MODELS = {
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8),
    "qwen2.5-14b": Shape(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": Shape(5120, 27648, 64, 40, 8),
}


def roofline(gpu: str, model: str, think_s: float = 40e-6) -> Costs:
    """A base layer takes as long as its weights take to be read, or its products to be computed, whichever is longer.

    Args:
        gpu: one of :data:`GPUS`.
        model: one of :data:`MODELS`.
        think_s: seconds of a client's own work (attention, norms, adapter) before each request, on a GPU of its own.

    Raises:
        UsageError: there is no such GPU, or model.
    """
    if gpu not in GPUS or model not in MODELS:
        raise UsageError(f"no figures for {model} on {gpu}; there are {', '.join(MODELS)} and {', '.join(GPUS)}")
    card, shape = GPUS[gpu], MODELS[model]
    walk: list[Key] = []
    sizes: list[int] = []
    for _ in range(shape.blocks):
        for group in shape.siblings():
            walk.append(Key(tuple(range(len(sizes), len(sizes) + len(group))), Pass.FORWARD))
            sizes += [before * after for before, after in group]

    def batch(batch: Batch) -> float:
        weights = sum(sizes[layer] for layer in batch.key.layers)
        reading = 2 * weights / (card.efficiency * card.bytes_per_s)
        computing = 2 * weights * batch.rows / (card.efficiency * card.flops)
        return max(reading, computing) + card.launch_s

    text = f"{model} on {gpu} by its roofline"
    return Costs(walk, backward(walk), len(sizes), batch, lambda kind, rows: think_s, 20e-6, False, text)


# -------------------------------------------------------------------------------------------------------- as measured


class _Recorder(Lockstep):
    """Lockstep, which makes batches as large as there are clients, and takes notes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Key, list[tuple[int, float]]] = {}
        """Rows and seconds of each batch."""
        self.walk: list[Key] = []
        """The last whole one. Clients find out about siblings in their first; a prefill asks for its last token alone
        at the last layer."""
        self.back: list[Key] = []
        """The last walk back."""
        self._walks: dict[str, list[Key]] = {}

    def submitted(self, request: Request) -> None:
        super().submitted(request)
        if request.kind is Kind.DECODE:
            walk = self._walks.setdefault(request.client, [])
            if walk and request.key.layers[0] <= walk[-1].layers[0]:
                if sum(len(key.layers) for key in walk) >= sum(len(key.layers) for key in self.walk):
                    self.walk = walk
                self._walks[request.client] = [request.key]
            else:
                walk.append(request.key)
        elif request.kind is Kind.FINETUNE:
            walk = self._walks.setdefault(f"{request.client} back", [])
            if request.key.pass_.is_backward:
                walk.append(request.key)
            elif walk:
                self.back = list(walk)
                walk.clear()

    def ran(self, batch: Batch, seconds: float) -> None:
        self.seen.setdefault(batch.key, []).append((batch.rows, seconds))


async def measure(
    preset: Preset, *, base_layers: str = "linear", device: str = "cpu", progress: Callable[[str], None]
) -> Costs:
    """Run clients on a real executor in this process and fit what is seen: a line of latency against rows for each
    layer and pass, and one of a client's own work against the rows of a request, for each kind. Takes a minute on the
    smallest preset.
    """
    import torch

    import symbiosis
    from symbiosis.bench.jobs import Decoding
    from symbiosis.bench.models import build, lora

    where = torch.device(device)
    recorder = _Recorder()
    own: dict[Kind, list[tuple[int, float]]] = {kind: [] for kind in Kind}
    async with symbiosis.Executor(build(preset, where), policy=recorder, base_layers=base_layers) as executor:
        clients = [await executor.client(lora()).open() for _ in range(8)]

        async def timed(kind: Kind, rows: int, *work: Coroutine[Any, Any, Any]) -> None:
            """Note the time outside the executor, for each request."""
            executor.reset_statistics()
            began = time.perf_counter()
            await asyncio.gather(*work)
            seconds = time.perf_counter() - began
            done = executor.statistics()
            own[kind].append((rows, max(seconds - done.run_s, 0.0) / done.requests))

        for count in (8, 4, 2, 1):
            progress(f"{count} clients decode")
            jobs = [
                (client, Decoding(client.model, preset, where, seed)) for seed, client in enumerate(clients[:count])
            ]
            await asyncio.gather(*(client.run(job.prefill) for client, job in jobs))
            for _ in range(2):
                await timed(Kind.DECODE, 1, *(client.run(job.steps, 8) for client, job in jobs))
        for length in (8, 32, 128, 512):
            progress(f"prompts of {length} tokens")
            for _ in range(3):
                prompts = [Decoding(client.model, preset, where, length=length) for client in clients[:2]]
                work = [client.run(job.prefill) for client, job in zip(clients, prompts, strict=False)]
                await timed(Kind.PREFILL, length, *work)
        optimizers = [torch.optim.AdamW(client.model.parameters(), lr=1e-4) for client in clients[:2]]
        for length in (32, 128, 512):
            progress(f"fine-tuning on {length} tokens")
            ids = torch.randint(1, preset.vocabulary, (1, length), device=where)
            batch = {"input_ids": ids, "labels": ids}
            for _ in range(3):
                steps = [client.train_step(batch, opt) for client, opt in zip(clients, optimizers, strict=False)]
                await timed(Kind.FINETUNE, length, *steps)
        for client in clients:
            await client.close()
        layers = len(executor.layers)
    thinking = {kind: _fit(points) for kind, points in own.items()}
    running = {key: _fit(points) for key, points in recorder.seen.items()}

    def think(kind: Kind, rows: int) -> float:
        start, slope = thinking[kind]
        return start + slope * rows

    def run(batch: Batch) -> float:
        start, slope = running[batch.key]
        return start + slope * batch.rows

    return Costs(
        recorder.walk,
        recorder.back,
        layers,
        run,
        think,
        0.0,  # in a client's own work already: it was measured from outside
        True,
        f"{preset.name}, measured here",
    )


def _fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """A line through the medians, least squares of relative errors: (start, slope) in seconds and seconds a row,
    neither negative."""
    by_rows: dict[int, list[float]] = {}
    for rows, seconds in points:
        by_rows.setdefault(rows, []).append(seconds)
    points = [(rows, median(seconds)) for rows, seconds in by_rows.items()]
    weights = [1 / max(y, 1e-9) ** 2 for _, y in points]
    total = sum(weights)
    x = sum(w * a for w, (a, _) in zip(weights, points, strict=True)) / total
    y = sum(w * b for w, (_, b) in zip(weights, points, strict=True)) / total
    spread = sum(w * (a - x) ** 2 for w, (a, _) in zip(weights, points, strict=True))
    slope = sum(w * (a - x) * (b - y) for w, (a, b) in zip(weights, points, strict=True)) / spread if spread else 0.0
    slope = max(slope, 0.0) if math.isfinite(slope) else 0.0
    return max(y - slope * x, 0.0), slope
