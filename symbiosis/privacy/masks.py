"""What a scheme does with rows, and what it is asked by the channel that it works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from symbiosis.core.requests import Call, Key, LayerSpec
from symbiosis.core.terms import Kind
from symbiosis.privacy.amplitude import Levels

__all__ = ["Ask", "Asked", "Mask", "Masked"]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a client asks of linear layers again and again, and how it is asked with masked rows."""

    key: Key
    """With masked rows: in fp32 where the layers are narrower."""
    effects: Key
    """The same without the bias: what noise becomes."""
    layers: tuple[LayerSpec, ...]
    width: int
    """Columns of the rows."""
    results: tuple[int, ...]
    """Columns of each result."""
    dtype: torch.dtype
    """Of masked rows and their results."""


class Masked(NamedTuple):
    """Rows that are masked, and how their results are unmasked."""

    calls: tuple[Call, ...]
    """One for each executor."""
    waits: tuple[Future[Any], ...]
    """What must be there besides before anything can be unmasked: effects of noise."""
    unmask: Callable[[Sequence[tuple[torch.Tensor, ...]]], tuple[torch.Tensor, ...]]
    """From the results of each executor to those of the bare rows, in :attr:`Asked.dtype`."""


class Mask(Protocol):
    """A privacy scheme at work for one client. Called on any of its threads, several at a time."""

    levels: Levels
    """The amplitudes of its noise."""

    def mask(self, asked: Asked, x: torch.Tensor, amplitude: float, kind: Kind) -> Masked:
        """Mask finite rows [n, width]. The ``amplitude``, a power of two, is what ``levels`` say: ``levels.least``
        times the largest row's rms or more, unless the scheme has the public weights at hand and wraps larger ones."""

    def prepare(self, asked: Asked) -> Future[Any] | None:
        """Get ready for rows that will be asked for, ahead of time. Done when they can be masked without a wait."""

    def close(self) -> None:
        """The client leaves. Blocks for a moment where there is a thread to end."""


Ask = Callable[[Call], "Future[tuple[torch.Tensor, ...]]"]
"""Sends a call of the scheme's own to the first executor, from any thread and without waiting."""
