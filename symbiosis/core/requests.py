"""The nouns of the runtime: pure data, no tensor arithmetic, no clock, no I/O.

A *request* is one client's rows for one key, where a *key* is (layers, pass). Requests are divisible: a batch takes a
*slice* of rows from each of several requests with the same key. Everything else in the package is built on these words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from symbiosis.core.terms import NO_TERMS, Kind, Terms
from symbiosis.errors import RequestError

if TYPE_CHECKING:
    import asyncio

    import torch

__all__ = [
    "Batch",
    "Call",
    "Expected",
    "Key",
    "LayerSpec",
    "Pass",
    "Request",
    "Slice",
    "expected",
]


class Pass(IntEnum):
    """What a base layer is asked to do with the rows. The numbers are part of the wire format."""

    FORWARD = 0
    """Y = f(X), with the layer's bias where it has one."""
    FORWARD_WITHOUT_BIAS = 1
    """Y = X·Wᵀ: for a client that trains its own bias, and for noise effects."""
    BACKWARD = 2
    """dX from dY (linear layers) or from X and dY (layers that are recomputed)."""
    FORWARD_FP32 = 3
    """As FORWARD, of a linear layer: rows and results in fp32 whatever the weight's dtype, for rows that are masked."""
    FORWARD_WITHOUT_BIAS_FP32 = 4
    BACKWARD_FP32 = 5

    @property
    def is_backward(self) -> bool:
        return self in _BACKWARD

    @property
    def has_bias(self) -> bool:
        """Whether the layer's bias is added."""
        return self is Pass.FORWARD or self is Pass.FORWARD_FP32

    @property
    def in_fp32(self) -> bool:
        """Whether rows and results are fp32 whatever the layer's dtype."""
        return self >= Pass.FORWARD_FP32


_BACKWARD = (Pass.BACKWARD, Pass.BACKWARD_FP32)
"""By a name of their own: on Python 3.11 a member looked up on its class takes six times as long."""


class Key(NamedTuple):
    """What a batch has in common. ``layers`` are indices into the layer table, ascending in the order the model calls
    them; several indices are siblings that read the same rows (D9)."""

    layers: tuple[int, ...]
    pass_: Pass


class LayerSpec(NamedTuple):
    """One row of the layer table: all that a client knows of a base layer.

    ``linear`` is False for a module that is served whole and recomputed in backward.
    """

    layer: int
    """Index into the layer table."""
    name: str
    in_features: int
    out_features: int
    dtype: torch.dtype
    bias: bool
    linear: bool


class Expected(NamedTuple):
    """The matrices of a call and of its answer, all with the same number of rows."""

    widths: tuple[int, ...]
    """Columns of each matrix that the call brings."""
    dtype: torch.dtype
    results: tuple[int, ...]
    """Columns of each matrix of the answer."""


def expected(layers: Sequence[LayerSpec], key: Key) -> Expected:
    """What a call for ``key`` brings and gets, by the layer table.

    Raises:
        RequestError: the table has no such key.
    """
    indices, pass_ = key
    if not indices or not all(0 <= index < len(layers) for index in indices):
        raise RequestError(f"layers {indices}; there are {len(layers)}, counted from 0")
    chosen = [layers[index] for index in indices]
    first = chosen[0]
    if len(indices) > 1 and (
        pass_.is_backward
        or any(a >= b for a, b in pairwise(indices))
        or any((spec.in_features, spec.dtype) != (first.in_features, first.dtype) for spec in chosen)
    ):
        raise RequestError(
            f"layers {indices} for {pass_.name}; siblings read the same rows in a forward pass, in ascending order"
        )
    if not all(spec.linear for spec in chosen) and pass_ not in (Pass.FORWARD, Pass.BACKWARD):
        raise RequestError(f"{first.name} is served whole; it has no single bias to leave out and no pass in fp32")
    dtype = _fp32() if pass_.in_fp32 else first.dtype
    if not pass_.is_backward:
        return Expected((first.in_features,), dtype, tuple(spec.out_features for spec in chosen))
    widths = (first.out_features,) if first.linear else (first.in_features, first.out_features)
    return Expected(widths, dtype, (first.in_features,))


def _fp32() -> torch.dtype:
    import torch  # not before it is needed: the simulator does without

    return torch.float32


@dataclass(slots=True, eq=False)
class Call:
    """A request with its tensors, on its way to the executor.

    ``tensors`` are matrices of equal row count: (X,) forward; (dY,) backward of a linear layer; (X, dY) backward of a
    layer that is recomputed.
    """

    key: Key
    kind: Kind
    tensors: tuple[torch.Tensor, ...]
    id: int = -1
    """Set by the executor's session when it accepts the call."""
    results: tuple[torch.Tensor, ...] | None = None
    """The answer, while it is put together from slices."""
    reply: asyncio.Future[tuple[torch.Tensor, ...]] | None = None
    """Where the executor puts the answer."""


@dataclass(slots=True, eq=False)
class Request:
    """A request as the scheduler and the policies see it: everything but its tensors."""

    id: int
    client: str
    key: Key
    rows: int
    kind: Kind
    arrived: float
    """Seconds on the executor's clock."""
    taken: int = field(default=0)
    """Rows handed to batches so far; they are always the first ones."""
    done: int = field(default=0)
    """Rows whose batch has completed."""
    cancelled: bool = field(default=False)
    terms: Terms = field(default=NO_TERMS)
    """Effective terms of the client."""
    local: bool = field(default=False)
    """Whether the client computes on this executor's cores, so that its own work delays other clients."""

    @property
    def remaining(self) -> int:
        """Rows still queued."""
        return self.rows - self.taken


class Slice(NamedTuple):
    """Rows ``start`` up to, not including, ``stop`` of a request."""

    request: Request
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class Batch:
    """Row slices with one key, run as one matrix product per layer."""

    key: Key
    slices: Sequence[Slice]
    reason: str
    """Why the policy ran it now: ``full``, ``deadline``, ``nobody-thinking``, ``at-once``, ``lone``…"""
    rows: int
