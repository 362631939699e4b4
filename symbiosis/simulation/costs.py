"""The costs of a simulation: latencies of batches and of clients' own work.

:func:`roofline` derives them from the data sheet of a GPU; :mod:`symbiosis.bench.calibrate` measures them on this
machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    text: str
    """Source of these figures, in a few words."""
    local: bool = False
    """Whether clients compute in the executor's process. See :class:`~symbiosis.simulation.Simulation`."""
    joint: bool = False
    """Whether clients decode jointly."""
    last: Container[Key] = ()
    """Keys that are requested for the last token of a prompt alone."""
    parts: Sequence[float] = ()
    """For each layer, the part of a token's walk that one row through it is; see :class:`Scheduler`."""


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
    memory_gib: float = 0.0
    """Memory of a device; 0 if it is not known."""

    def seconds(self, weights: float, rows: int) -> float:
        """Return the latency of products of so many bf16 weights with rows: the time to read the weights or to compute
        the products, whichever is longer."""
        reading = 2 * weights / (self.efficiency * self.bytes_per_s)
        computing = 2 * weights * rows / (self.efficiency * self.flops)
        return max(reading, computing) + self.launch_s


@dataclass(frozen=True)
class LlamaShape:
    """The shape of a Llama model in bf16."""

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    """Whether the language model head is the embedding, which tenants have."""
    head: int = 0
    """Number of features of an attention head; 0 for hidden / heads."""

    @property
    def attention(self) -> int:
        """Number of features of queries."""
        return self.heads * (self.head or self.hidden // self.heads)

    @property
    def kv(self) -> int:
        """Number of features of keys, and of values."""
        return self.attention // self.heads * self.kv_heads

    def siblings(self) -> list[list[tuple[int, int]]]:
        """Return (in, out) of the base layers of one block, grouped by the rows that they read."""
        return [
            [(self.hidden, self.attention), (self.hidden, self.kv), (self.hidden, self.kv)],
            [(self.attention, self.hidden)],
            [(self.hidden, self.intermediate), (self.hidden, self.intermediate)],
            [(self.intermediate, self.hidden)],
        ]

    def layers(self) -> tuple[list[Key], list[tuple[int, int]], list[int]]:
        """Return the keys of a token's walk without the language model head, and of each base layer (in, out) and its
        block."""
        walk: list[Key] = []
        sizes: list[tuple[int, int]] = []
        of_block: list[int] = []
        for block in range(self.blocks):
            for group in self.siblings():
                walk.append(Key(tuple(range(len(sizes), len(sizes) + len(group))), Pass.FORWARD))
                sizes += group
                of_block += [block] * len(group)
        return walk, sizes, of_block


GPUS = {
    "a100": Gpu(2.0e12, 312e12, memory_gib=80),
    "h100": Gpu(3.35e12, 989e12, memory_gib=80),
}
MODELS = {
    "gemma-2-27b": LlamaShape(4608, 36864, 46, 32, 16, 256000, tied=True, head=128),
    "llama-2-13b": LlamaShape(5120, 13824, 40, 40, 40, 32000),
    "llama-3.1-8b": LlamaShape(4096, 14336, 32, 32, 8, 128256),
    "qwen2.5-14b": LlamaShape(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": LlamaShape(5120, 27648, 64, 40, 8, 152064),
}


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def shape_of(model: str) -> LlamaShape:
    """Return the shape of a model.

    Args:
        model: name in :data:`MODELS`, or a folder with the ``config.json`` of a dense model in the form of Llama.

    Raises:
        UsageError: there is no such model, or its configuration has another form.
    """
    if model in MODELS:
        return MODELS[model]
    file = Path(model) / "config.json"
    try:
        found: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{model} is neither a folder with a config.json nor one of {', '.join(MODELS)}: {error}"
        ) from error
    config: Any = found.get("text_config", found) if isinstance(found, dict) else None
    if not isinstance(config, dict):
        raise UsageError(f"{file} is not the configuration of a model")
    if experts := [name for name in _EXPERTS if config.get(name)]:
        raise UsageError(f"{file} has {experts[0]}: there are no figures for experts")
    sizes: list[Any] = [config.get(name) for name in _SIZES]
    if wrong := [name for name, size in zip(_SIZES, sizes, strict=True) if not isinstance(size, int) or size < 1]:
        raise UsageError(f"{file} has no {wrong[0]}; it must be the configuration of a dense model such as Llama")
    hidden, intermediate, blocks, heads, vocabulary = sizes
    others: list[Any] = [config.get(name) for name in ("num_key_value_heads", "head_dim", "tie_word_embeddings")]
    kv, head, tied = others
    for name, size in (("num_key_value_heads", kv), ("head_dim", head)):
        if size is not None and (not isinstance(size, int) or size < 1):
            raise UsageError(f"{file}: {name} is {size!r}; it must be a whole number, 1 or more")
    return LlamaShape(hidden, intermediate, blocks, heads, kv or heads, vocabulary, bool(tied), head or 0)


THINK_S = 40e-6
"""Seconds of a client's own work (attention, norms, adapter) before each request, at least. Clients do not slow down
each other, or the executor."""
OVERHEAD_S = 20e-6
"""Seconds that an executor needs for each batch besides its latency."""


def roofline(gpu: str, model: str) -> Costs:
    """Return the costs of a model on a GPU: see :meth:`Gpu.seconds`. The language model head is left out.

    Args:
        gpu: name in :data:`GPUS`.
        model: see :func:`shape_of`.

    Raises:
        UsageError: there are no figures of this GPU or model.
    """
    if gpu not in GPUS:
        raise UsageError(f"no figures for {gpu}; there are {', '.join(GPUS)}")
    card, shape = GPUS[gpu], shape_of(model)
    walk, sizes, _ = shape.layers()

    def batch(batch: Batch, again: bool = False) -> float:
        return card.seconds(sum(math.prod(sizes[layer]) for layer in batch.key.layers), batch.rows)

    whole = sum(map(math.prod, sizes))
    return Costs(
        walk,
        backward(walk),
        len(sizes),
        batch,
        lambda kind, rows: THINK_S,
        OVERHEAD_S,
        f"{model} on {gpu} by its roofline",
        parts=[math.prod(size) / whole for size in sizes],
    )
