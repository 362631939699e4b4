"""The interface between a masked channel and the mask of a privacy scheme.

The *effect* of noise n is n·Wᵀ, what a base layer without its bias makes of n. A mask adds noise to the rows that are
sent and removes the effect of that noise from the results.

Legend: n rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from symbiosis.core.requests import Call, Key, LayerSpec, Results
from symbiosis.core.terms import Kind
from symbiosis.privacy.amplitude import Amplitudes

SendCall = Callable[[Call], "Future[Results]"]
"""Sends a call of the scheme itself to the client's executor, from any thread and without waiting."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskedKey:
    """How the requests of one client for one key are sent with masked rows."""

    key: Key
    """Key of the masked requests: in fp32 where the layers have a narrower dtype, or may multiply in one."""
    effects: Key
    """Key of requests for the effects of noise: the same without the bias."""
    layers: tuple[LayerSpec, ...]
    width: int
    """Columns of the rows."""
    results: tuple[int, ...]
    """Columns of the result of each layer."""
    dtype: torch.dtype
    """Dtype of masked rows and of their results: fp32 or fp64."""


class MaskedRows(NamedTuple):
    """Masked rows, ready to be sent, and the function that unmasks their results."""

    calls: tuple[Call, ...]
    """One call for each executor."""
    waits: tuple[Future[Any], ...]
    """Effects of noise that :attr:`unmask` needs and that are still being computed."""
    unmask: Callable[[Sequence[Results]], Results]
    """Returns the results for the bare rows, in the masked key's dtype, from the results of each executor."""


class Mask(ABC):
    """The state of a privacy scheme for one client. Several threads of the client may call it at the same time."""

    amplitudes: Amplitudes
    """Chooses the amplitude of the noise for each request."""

    @abstractmethod
    def mask(self, key: MaskedKey, x: torch.Tensor, amplitude: float, kind: Kind) -> MaskedRows:
        """Mask finite rows [n, width] with noise of ``amplitude``, a power of two.

        The amplitude is at least ``amplitudes.least`` times the rms of the largest row. It may be smaller for a scheme
        that has the public weights, because such a scheme wraps larger rows.
        """

    def prepare(self, key: MaskedKey) -> Future[Any] | None:
        """Compute ahead of time what future requests for a key need. The future is done when masking will not wait."""
        return None

    def close(self) -> None:
        """Release what the client used. Blocks briefly if a thread has to end."""
