"""A training step, as a sequence of operations that a driver runs.

Coroutines and synchronous code run model code in different ways: a coroutine awaits a fiber or a thread where
synchronous code simply calls. The order of forward and backward passes is the same for both, and is written once here:
:func:`training_step` is a generator that yields each operation and receives its result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from symbiosis.errors import UsageError
from symbiosis.training.pruning import pruned
from symbiosis.training.windows import WindowedStep, check_window, tokens


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass. The driver sends back what ``run`` returns."""

    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward pass. The driver sends back what ``run`` returns."""

    run: Callable[[], Any]


NOTHING_TRAINS = (
    "nothing in the model is trainable, so training would change nothing: the base model is frozen. Add an adapter "
    "before the optimizer or trainer is made (a peft_config for the client, or its load_adapter(folder, "
    "trainable=True); for an opened model, get_peft_model(model, config)), or unfreeze a part"
)
Step = Generator[Forward | Backward, Any, float]
"""Yields operations, and returns the loss of the batch."""


def training_step(model: Any, batch: Mapping[str, Any], window: int | None, prune: bool | None) -> Step:
    """Return the operations that add a batch's gradients to those of the trainable parameters.

    Args:
        model: a model of ``transformers``, with PEFT or without.
        batch: arguments of the model, with ``labels``, on the model's device.
        window: number of tokens in a window; None, or as many as the batch has, for the whole sequence at once.
        prune: keep fewer activations for backward. None: True with a window, otherwise False.

    Raises:
        UsageError: the window is not a whole number, gradients are off, the model gives no loss, nothing in it is
            trainable, or it cannot be run in windows.
    """
    if not torch.is_grad_enabled():
        raise UsageError(
            "a training step needs gradients, and they are off here; call it outside torch.no_grad() and "
            "torch.inference_mode()"
        )
    if window is not None:
        check_window(window)
    prune = window is not None if prune is None else prune
    if window is not None and window < tokens(batch):
        return _windows(WindowedStep(model, batch, window, prune))
    return _whole(model, batch, prune)


def _whole(model: Any, batch: Mapping[str, Any], prune: bool) -> Step:
    def forward() -> Any:
        with pruned(dict(batch)) if prune else contextlib.nullcontext():
            return model(**batch)

    output = yield Forward(forward)
    loss: torch.Tensor | None = getattr(output, "loss", None)
    if loss is None:
        remedy = "leave return_dict=False out" if isinstance(output, tuple) else "add labels"
        raise UsageError(f"the model gave no loss for a batch of {', '.join(batch)}; {remedy}")
    del output
    if not loss.requires_grad:
        raise UsageError(NOTHING_TRAINS)
    return (yield Backward(lambda: _backward(loss)))  # type: ignore[no-any-return]


def _windows(step: WindowedStep) -> Step:
    yield Forward(step.try_model)
    total = 0.0
    for index in range(len(step) - 1):
        yield Forward(lambda index=index: step.fill_cache(index))  # type: ignore[misc]
    for index in reversed(range(len(step))):
        loss: torch.Tensor = yield Forward(lambda index=index: step.loss(index))  # type: ignore[misc]
        if not loss.requires_grad:
            raise UsageError(NOTHING_TRAINS)
        total += yield Backward(lambda loss=loss: _backward(loss))  # type: ignore[misc]
    tensors, gradients = step.rest()
    if tensors:
        yield Backward(lambda: torch.autograd.backward(tensors, gradients))
    return total


def _backward(loss: torch.Tensor) -> float:
    """Run the backward pass of a loss and return the loss. On a GPU this waits until the pass has run there."""
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


async def drive(step: Step, run: Callable[[Forward | Backward], Awaitable[Any]]) -> float:
    """Have ``run`` run the operations of a step one after another, and return the step's loss."""
    result: Any = None
    try:
        while True:
            operation = step.send(result)
            result = None  # the output of a forward pass is freed before the backward pass
            result = await run(operation)
    except StopIteration as end:
        return float(end.value)


def run_now(step: Step) -> float:
    """Run the operations of a step, and return its loss. For synchronous code."""

    async def run(operation: Forward | Backward) -> Any:
        return operation.run()

    try:
        drive(step, run).send(None)  # which never waits
    except StopIteration as end:
        return float(end.value)
    raise AssertionError("an operation of synchronous code has waited")
