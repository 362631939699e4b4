"""State of a model's modules that a trial run must not change: training or evaluation mode, and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module afterwards. A tenant may have frozen dropout alone, and ``model.train()`` sets
    all modules to one mode."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore afterwards the buffers that modules have now, such as those of batch norms, which training changes."""
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for place, name, buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer = before if buffer.is_inference() else buffer.copy_(before)
            place[name] = buffer
