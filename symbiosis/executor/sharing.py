"""What a split model shares: the bytes that are served once for all clients, and those that every client holds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

from symbiosis.executor.choosing import HEADS
from symbiosis.executor.quantized import size_of
from symbiosis.executor.share import client_side
from symbiosis.executor.splitting import SplitModel

SMALL_BYTES = 64 << 10
"""Largest size in bytes of a weight that may always leave the executor."""
SMALL_PART = 1 / 1000
"""The same as a fraction of the model. Routers and parameters of state-space layers are smaller in large models."""
SMALL_BYTES_TOGETHER = 1 << 20
SMALL_PART_TOGETHER = 1 / 20
"""The same for all such weights together. Without a bound on the sum, a model could leave in small pieces."""


class Unserved(NamedTuple):
    """A weight that clients hold."""

    name: str
    bytes: int
    reason: str


class Sharing(NamedTuple):
    """Sizes in bytes of the two parts of a model."""

    served: int
    """Weights of base layers that the executor alone has."""
    held: int
    """Parameters and buffers that each process with clients holds. They leave the executor if it serves other
    processes."""
    unserved: tuple[Unserved, ...]
    """The held tensors that are neither embeddings nor heads and are not computed from the configuration; largest
    first."""

    def leaving(self) -> list[Unserved]:
        """Return the weights that are too large to leave an executor that keeps its weights."""
        whole = self.served + self.held
        small = max(SMALL_BYTES, whole * SMALL_PART)
        large = [one for one in self.unserved if one.bytes > small]
        together = sum(one.bytes for one in self.unserved)
        most = max(SMALL_BYTES_TOGETHER, whole * SMALL_PART_TOGETHER)
        return large or (list(self.unserved) if together > most else [])

    def lines(self) -> list[str]:
        """Return what is shared, for people."""
        return [
            sizes_text(self.served, self.held),
            *(f"not served: {text}" for text in describe(one for one in self.unserved if one.bytes > SMALL_BYTES)),
        ]


def describe(unserved: Iterable[Unserved]) -> list[str]:
    """Return a text for each of the five largest sorts of weights, and one for the remainder."""
    sorts: dict[tuple[str, str], list[int]] = {}
    for name, size, reason in unserved:
        sorts.setdefault((re.sub(r"\b\d+\b", "*", name), reason), []).append(size)
    found = sorted(sorts.items(), key=lambda item: -sum(item[1]))
    texts = [
        f"{name}, {size_text(sum(sizes))}{f' in {len(sizes)} blocks' if len(sizes) > 1 else ''} ({reason})"
        for (name, reason), sizes in found[:5]
    ]
    rest = [size for _, sizes in found[5:] for size in sizes]
    return [*texts, f"{len(rest)} further weights, {size_text(sum(rest))}"] if rest else texts


def sharing_of(split: SplitModel) -> Sharing:
    """Return what a split model shares."""
    tensors, tied, _ = client_side(split)
    served = {
        id(parameter): size_of(parameter)
        for layer in split.layers
        for leaf, parameter in layer.module.named_parameters()
        if f"{layer.spec.name}.{leaf}" not in tensors.keys() | tied.keys()
    }
    unserved = []
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = split.model.get_submodule(path)
        small = tensor.ndim < 2 and size_of(tensor) <= SMALL_BYTES  # norms and biases
        if not small and not _is_expected(path, leaf, module) and path not in split.allowed:
            why = split.left_out.get(path, f"{type(module).__name__} is no linear layer and no bank of experts")
            unserved.append(Unserved(name, size_of(tensor), why))
    held = sum(map(size_of, tensors.values()))
    return Sharing(sum(served.values()), held, tuple(sorted(unserved, key=lambda one: -one.bytes)))


def _is_expected(path: str, leaf: str, module: nn.Module) -> bool:
    """Return whether clients always have this tensor: of an embedding or a head, or computed from the configuration."""
    if isinstance(module, nn.Embedding) or (isinstance(module, _ConvNd) and "embed" in path) or _is_head(path):
        return True
    return leaf in module._non_persistent_buffers_set


def _is_head(path: str) -> bool:
    return path.partition(".")[0].endswith(HEADS)


def sizes_text(served: int, held: int) -> str:
    """Return the sizes in bytes of the two parts of a model as text."""
    return f"{size_text(served)} are served once for all tenants; {size_text(held)} are with each tenant"


def size_text(size: float) -> str:
    """Return a size in bytes as text, in GiB, MiB or KiB."""
    unit, bytes_ = ("GiB", 1 << 30) if size >= 1 << 30 else ("MiB", 1 << 20) if size >= 1 << 20 else ("KiB", 1 << 10)
    number = size / bytes_
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
