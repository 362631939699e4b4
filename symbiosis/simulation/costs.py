"""How long things take: what a simulation has to know, and a GPU that is described.

What it takes here is measured by :mod:`symbiosis.bench.calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from symbiosis.core.requests import Batch, Key, Pass
from symbiosis.errors import UsageError
from symbiosis.simulation.clients import Thinking, backward

__all__ = ["GPUS", "MODELS", "Costs", "Gpu", "Shape", "roofline"]


@dataclass(frozen=True)
class Costs:
    """What a simulation needs to know of a model on a machine."""

    walk: Sequence[Key]
    """What a token asks for, in order."""
    back: Sequence[Key]
    """What fine-tuning asks for on its walk back."""
    layers: int
    """Size of the layer table."""
    batch: Callable[[Batch, bool], float]
    """Seconds a batch takes; whether the one before it had the same key is told as well."""
    think: Thinking
    overhead_s: float
    local: bool
    """See :class:`~symbiosis.simulation.Simulation`."""
    last: Container[Key]
    """What a prompt asks for its last token alone."""
    text: str
    """Where these figures come from, in a few words."""


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

    def batch(batch: Batch, again: bool = False) -> float:
        weights = sum(sizes[layer] for layer in batch.key.layers)
        reading = 2 * weights / (card.efficiency * card.bytes_per_s)
        computing = 2 * weights * batch.rows / (card.efficiency * card.flops)
        return max(reading, computing) + card.launch_s

    text = f"{model} on {gpu} by its roofline"
    return Costs(walk, backward(walk), len(sizes), batch, lambda kind, rows: think_s, 20e-6, False, (), text)
