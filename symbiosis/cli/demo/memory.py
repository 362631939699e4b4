"""Count bytes of tensors: every storage once, whoever looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Storages = dict[int, int]
"""Bytes by address."""


def storages(tensors: Iterable[torch.Tensor]) -> Storages:
    """The storages behind some tensors. What is expanded from one number counts as that number."""
    found = ((tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors)
    return dict(found)


def total(tensors: Iterable[torch.Tensor], besides: Storages | None = None) -> int:
    """Bytes of the storages behind some tensors, besides those given."""
    return sum(size for address, size in storages(tensors).items() if address not in (besides or {}))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The state that an optimizer keeps."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def saved_bytes(forward: Callable[[], Any], besides: Iterable[torch.Tensor]) -> int:
    """Bytes that autograd keeps for backward when ``forward`` has run, besides parameters and buffers."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    size = total(saved, storages(besides))
    del result  # until here, so that no address could be used twice
    return size


def cache_bytes(cache: Any) -> int:
    """Bytes of a transformers KV cache."""
    layers = getattr(cache, "layers", ())
    tensors = (getattr(layer, name, None) for layer in layers for name in ("keys", "values"))
    return total(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
