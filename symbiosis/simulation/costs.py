"""The costs of a simulation: latencies of batches and of clients' own work.

:func:`roofline` derives them from the data sheet of a GPU; :mod:`symbiosis.bench.calibrate` measures them on this
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from symbiosis.core.requests import Batch, Key, Pass
from symbiosis.errors import UsageError
from symbiosis.simulation.clients import Thinking, backward


@dataclass(frozen=True)
class Costs:
    """The figures of a model on a machine that a simulation needs."""

    walk: Sequence[Key]
    """Keys of a token's walk, in order."""
    back: Sequence[Key]
    """Keys of the walk back of fine-tuning."""
    layers: int
    """Size of the layer table."""
    batch: Callable[[Batch, bool], float]
    """Function of a batch, and of whether the batch before it had the same key: the latency in seconds."""
    think: Thinking
    """Function of a request's kind and rows: seconds of the client's own work before the request."""
    overhead_s: float
    """Seconds that the executor needs for each batch besides its latency."""
    local: bool
    """Whether clients compute in the executor's process. See :class:`~symbiosis.simulation.Simulation`."""
    joint: bool
    """Whether clients decode jointly."""
    last: Container[Key]
    """Keys that are requested for the last token of a prompt alone."""
    text: str
    """Source of these figures, in a few words."""


@dataclass(frozen=True)
class Gpu:
    """The figures of a data sheet, and the part of them that dense layers reach."""

    bytes_per_s: float
    flops: float
    """Floating-point operations per second of dense bf16 matrix products."""
    efficiency: float = 0.7
    """Part of both figures that dense layers reach."""
    launch_s: float = 10e-6
    """Seconds of a batch besides its matrix product: gathering rows, launching kernels, scattering results."""


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama model in bf16."""

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int

    def siblings(self) -> list[list[tuple[int, int]]]:
        """Return (in, out) of the base layers of one block, grouped by the rows that they read."""
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
    """Return the costs of a model on a GPU. A base layer takes the time to read its weights or to compute its
    products, whichever is longer.

    Args:
        gpu: name in :data:`GPUS`.
        model: name in :data:`MODELS`.
        think_s: seconds of a client's own work (attention, norms, adapter) before each request, on a GPU of its own.

    Raises:
        UsageError: the tables have no such GPU or model.
    """
    if gpu not in GPUS or model not in MODELS:
        raise UsageError(
            f"no figures for {model} on {gpu}; models are {', '.join(MODELS)}, machines are {', '.join(GPUS)}"
        )
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
    return Costs(walk, backward(walk), len(sizes), batch, lambda kind, rows: think_s, 20e-6, False, False, (), text)
