"""What a split model shares: the bytes that are served once for all clients, and those that every client holds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

from symbiosis.executor.quantized import size_of
from symbiosis.executor.splitting import HEADS, SplitModel

SMALL_BYTES = 64 << 10
"""Size of a weight up to which it may always leave the executor…"""
SMALL_PART = 1 / 1000
"""…and its size as a part of the model's: routers and the parameters of state-space layers are smaller in every model
of transformers that is worth hosting."""
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
    """Weights of base layers, held once, by the executor."""
    held: int
    """Parameters and buffers that each process with clients holds. They leave the executor, if it serves others."""
    unserved: tuple[Unserved, ...]
    """The weights among these that are no embeddings, norms, biases, convolutions or heads; largest first."""

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
            f"{size_text(self.served)} are served once for all tenants; {size_text(self.held)} are with each tenant",
            *(f"not served: {text}" for text in describe(self.unserved)),
        ]


def describe(unserved: Iterable[Unserved], most: int = 5) -> list[str]:
    """Return a text for each sort of weights, largest first; at most ``most``, and one for the remainder."""
    sorts: dict[tuple[str, str], list[int]] = {}
    for name, size, reason in unserved:
        sorts.setdefault((re.sub(r"\b\d+\b", "*", name), reason), []).append(size)
    found = sorted(sorts.items(), key=lambda item: -sum(item[1]))
    texts = [
        f"{name}, {size_text(sum(sizes))}{f' in {len(sizes)} blocks' if len(sizes) > 1 else ''} ({reason})"
        for (name, reason), sizes in found[:most]
    ]
    rest = [size for _, sizes in found[most:] for size in sizes]
    return [*texts, f"{len(rest)} further weights, {size_text(sum(rest))}"] if rest else texts


def sharing_of(split: SplitModel) -> Sharing:
    """Return what a split model shares."""
    inside = {id(module) for layer in split.layers for module in layer.module.modules()}
    allowed = [next(layer.module.parameters()) for layer in split.layers if layer.spec.name in split.allowed]
    served = {id(parameter): size_of(parameter) for layer in split.layers for parameter in layer.module.parameters()}
    held: dict[int, int] = {}
    unserved: list[Unserved] = []
    for path, module in split.model.named_modules():
        if id(module) in inside:
            continue
        computed = module._non_persistent_buffers_set  # from the configuration, such as rotary frequencies
        for leaf, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) in held:
                continue
            held[id(tensor)] = size = size_of(tensor)
            served.pop(id(tensor), None)  # a head that is tied to an embedding
            if tensor.ndim < 2 or leaf in computed or isinstance(module, nn.Embedding | _ConvNd) or _is_head(path):
                continue
            why = split.left_out.get(path, f"{type(module).__name__} is no linear layer and no bank of experts")
            unserved.append(Unserved(f"{path}.{leaf}" if path else leaf, size, why))
    held |= {id(weight): size_of(weight) for weight in allowed}
    return Sharing(sum(served.values()), sum(held.values()), tuple(sorted(unserved, key=lambda one: -one.bytes)))


def _is_head(path: str) -> bool:
    return path.partition(".")[0].endswith(HEADS)


def size_text(size: float) -> str:
    """Return a size in bytes as text, in GiB, MiB or KiB."""
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= bytes_:
            return f"{size / bytes_:,.3g} {unit}"
    return f"{size / 1024:,.3g} KiB"
