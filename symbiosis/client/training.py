"""Training steps of synchronous clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symbiosis.client.virtlayer import in_training_step
from symbiosis.training.step import run_now, training_step

__all__ = ["backward_in_windows"]


def backward_in_windows(model: Any, batch: Mapping[str, Any], window: int, *, prune: bool = True) -> float:
    """Run a batch forward and backward in windows, for synchronous code, and return its loss.

    This adds to the gradients what ``model(**batch).loss.backward()`` would add. Coroutines use
    :meth:`symbiosis.Client.train_step`.

    Args:
        model: from :func:`symbiosis.open_model`, with a PEFT adapter or trainable parts of its own.
        batch: arguments of the model, with ``labels``, on the model's device.
        window: number of tokens in a window.
        prune: keep fewer activations for backward; see :meth:`symbiosis.Client.train_step`.

    Raises:
        UsageError: the model, its PEFT method or the batch cannot be run in windows.
    """
    step = training_step(model, batch, window, prune)
    with in_training_step(model):
        return run_now(step)
