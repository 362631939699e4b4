"""Training and evaluation mode of the modules of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
