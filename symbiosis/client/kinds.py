"""The kind of a request: what its rows are for, seen from a VirtLayer."""

from __future__ import annotations

import torch

from symbiosis.core.terms import Kind

__all__ = ["KindTracker"]


class KindTracker:
    """Tells decode rows from prefill rows in the forward passes of one thread, without gradients.

    Several rows of one sequence belong to a prompt. Some models flatten sequences on the way (OPT), and the last layer
    is asked for a prompt's last token alone, so the rest of a prompt's pass belongs to the prompt too.
    """

    __slots__ = ("_kind", "_layer", "_rows")

    def __init__(self) -> None:
        self._layer = -1
        """The layer that was asked last."""
        self._kind = Kind.DECODE
        self._rows = 0
        """Rows of the first request of this pass."""

    def kind_of(self, layer: int, x: torch.Tensor) -> Kind:
        """Return the kind of the rows x [..., i] for a layer."""
        rows = x.shape[:-1].numel()
        if layer > self._layer and self._kind is _PREFILL and rows <= self._rows:
            kind = _PREFILL
        else:
            kind = _PREFILL if x.ndim > 2 and x.shape[-2] > 1 else _DECODE
            self._rows = rows
        self._layer, self._kind = layer, kind
        return kind


_DECODE, _PREFILL, _ = Kind
