"""The base class of channels for synchronous code, and the errors that they share."""

from __future__ import annotations

import asyncio

import torch

from symbiosis.core.requests import Call
from symbiosis.errors import ClientClosedError, UsageError

__all__ = ["SynchronousChannel", "closed_error", "forked_error"]


def closed_error(client: str) -> ClientClosedError:
    """Return the error for a call on a closed channel."""
    return ClientClosedError(f"the model of {client!r} was closed; open it again with symbiosis.open_model")


def forked_error(client: str) -> ClientClosedError:
    """Return the error for a call in a forked child process."""
    return ClientClosedError(
        f"the model of {client!r} belongs to the process that opened it, not to its forked child; open another model "
        "in the child"
    )


class SynchronousChannel:
    """The operations of a channel that synchronous code does not use."""

    def send(self, call: Call) -> asyncio.Future[tuple[torch.Tensor, ...]]:
        raise UsageError("this model was opened for synchronous code; use symbiosis.connect for coroutines")

    def flush(self) -> None:
        pass

    def cancel(self, call: Call) -> None:
        pass

    def interrupt(self, error: BaseException) -> None:
        pass
