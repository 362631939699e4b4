"""Requests and batches: the data that the scheduler, the policies and the executor work on.

A *request* is one client's rows for one key, where a *key* is (layers, pass, precision, and a row's number of
experts). Requests are divisible: a batch takes a *slice* of rows from each of several requests with the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from symbiosis.core.terms import NO_TERMS, Kind, Terms
from symbiosis.errors import RequestError

if TYPE_CHECKING:
    import asyncio

    import torch


MAX_SIBLINGS = 64
"""Largest number of layers in one key."""
Results: TypeAlias = "tuple[torch.Tensor, ...]"
"""The matrices of an answer, [rows, width] each: one for each layer of the key; or, for a backward pass, dX, and the
gradient of the routing weights of a bank of experts."""


class Pass(IntEnum):
    """What a base layer computes from the rows."""

    FORWARD = 0
    """Y = f(X), with the layer's bias if it has one."""
    FORWARD_WITHOUT_BIAS = 1
    """Y = X·Wᵀ, for a client that trains its own bias and for the effects of noise."""
    BACKWARD = 2
    """dX from dY (linear layers), or from X and dY (layers that are recomputed). For a bank of experts also the
    gradient of the routing weights."""
    NORMS = 3
    """The norms of the rows of a linear layer's weight W [o, i], for each row of X, whatever it is. DoRA needs them."""

    @property
    def is_backward(self) -> bool:
        return self is _BACKWARD


_BACKWARD = Pass.BACKWARD
"""A name of its own: on Python 3.11 a member looked up on its class takes six times as long."""
_OF_LINEAR_LAYERS = (Pass.FORWARD_WITHOUT_BIAS, Pass.NORMS)


class Key(NamedTuple):
    """What the requests of a batch have in common."""

    layers: tuple[int, ...]
    """Indices into the layer table, in ascending order. Several indices are siblings, which read the same rows."""
    pass_: Pass
    fp32: bool = False
    """Of linear layers: whether rows and results are fp32 whatever the layer's dtype; for rows that are masked. Of a
    bank of experts: whether the routing weights are fp32."""
    choices: int = 0
    """Number of experts that each row goes through; 0 for a layer that is no bank of experts."""


class LayerSpec(NamedTuple):
    """One entry of the layer table: all that a client knows of a base layer."""

    layer: int
    """Index into the layer table."""
    name: str
    in_features: int
    out_features: int
    dtype: torch.dtype
    bias: bool
    linear: bool
    """False for a module that is served whole and recomputed in backward."""
    experts: int = 0
    """Number of experts, for a module that is a bank of experts; otherwise 0."""
    choices: int = 0
    """Largest number of experts that a row of a bank goes through."""


class Columns(NamedTuple):
    """The columns of a matrix. It has as many rows as the call."""

    width: int
    dtype: torch.dtype


class Expected(NamedTuple):
    """The matrices of a call and of its answer. All have the same number of rows."""

    call: tuple[Columns, ...]
    answer: tuple[Columns, ...]

    def rows(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the number of rows of a call's matrices; 0 if the matrices do not fit, or have no rows."""
        if len(tensors) != len(self.call) or not tensors[0].ndim:
            return 0
        rows = tensors[0].shape[0]
        for tensor, (width, dtype) in zip(tensors, self.call, strict=True):
            if tensor.shape != (rows, width) or tensor.dtype is not dtype:
                return 0
        return rows

    def misfit(self, layer: str, tensors: Sequence[torch.Tensor]) -> str:
        """Return how the matrices of a call for a layer differ from those that are due."""
        due = " and ".join(f"[n, {width}] {dtype}" for width, dtype in self.call)
        got = " and ".join(f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}" for tensor in tensors)
        return f"{layer} takes {due} with n ≥ 1, not {got}"


def expected(layers: Sequence[LayerSpec], key: Key) -> Expected:
    """Return the shapes of a call for ``key`` and of its answer, by the layer table.

    Raises:
        RequestError: the table has no such key.
    """
    indices, pass_, fp32, choices = key
    if not indices or not all(0 <= index < len(layers) for index in indices):
        raise RequestError(f"a call asks for layers {indices}; there are {len(layers)}, counted from 0")
    chosen = [layers[index] for index in indices]
    first = chosen[0]
    if any(spec.experts for spec in chosen) or choices:
        return _expected_of_bank(chosen, key)
    if len(indices) > 1 and (
        pass_.is_backward
        or any(a >= b for a, b in pairwise(indices))
        or any((spec.in_features, spec.dtype) != (first.in_features, first.dtype) for spec in chosen)
    ):
        raise RequestError(
            f"a call for {pass_.name} of layers {indices}; several layers may be asked for in a forward pass alone, in "
            "ascending order, and only if they read the same rows"
        )
    if not all(spec.linear for spec in chosen) and (fp32 or pass_ in _OF_LINEAR_LAYERS):
        raise RequestError(f"{first.name} is served whole; it has no single bias or weight, and no pass in fp32")
    dtype = _fp32() if fp32 else first.dtype
    rows = Columns(first.in_features, dtype)
    if not pass_.is_backward:
        return Expected((rows,), tuple(Columns(spec.out_features, dtype) for spec in chosen))
    gradients = Columns(first.out_features, dtype)
    return Expected((gradients,) if first.linear else (rows, gradients), (rows,))


def _expected_of_bank(chosen: Sequence[LayerSpec], key: Key) -> Expected:
    bank = chosen[0]
    if len(chosen) > 1 or not bank.experts:
        names = ", ".join(spec.name for spec in chosen)
        raise RequestError(f"{key.choices} choices of experts for {names}; only a bank of experts alone takes them")
    if not 0 < key.choices <= bank.choices:
        raise RequestError(
            f"{key.choices} choices of experts for {bank.name}; each row goes through 1 to {bank.choices} of them"
        )
    if key.pass_ in _OF_LINEAR_LAYERS:
        raise RequestError(f"{bank.name} is a bank of experts; it has no single bias or weight")
    import torch

    rows, results = Columns(bank.in_features, bank.dtype), Columns(bank.out_features, bank.dtype)
    experts = Columns(key.choices, torch.int64)
    weights = Columns(key.choices, torch.float32 if key.fp32 else bank.dtype)
    if not key.pass_.is_backward:
        return Expected((rows, experts, weights), (results,))
    return Expected((rows, experts, weights, results), (rows, weights))


def _fp32() -> torch.dtype:
    import torch  # imported when it is first needed, because the simulator needs no torch

    return torch.float32


@dataclass(slots=True, eq=False)
class Call:
    """A request with its tensors, on its way to the executor."""

    key: Key
    kind: Kind
    tensors: tuple[torch.Tensor, ...]
    """Matrices of equal row count: (X,) forward; (dY,) backward of a linear layer; (X, dY) backward of a layer that is
    recomputed. For a bank of experts, the experts of each row [n, k] and their routing weights [n, k] follow X."""
    joint: Mapping[str, float] | None = None
    """In a joint walk, the part of the rows that each client has. None where all rows are the caller's."""
    work: Callable[[], Results] | None = None
    """What to run in place of the layers: a captured walk, which has them in it. For clients of this process."""
    answers: tuple[torch.Tensor, ...] = ()
    """Memory of the caller that the results are written to. Empty: the executor allocates it."""
    id: int = -1
    """Set when the call is sent or accepted."""
    results: tuple[torch.Tensor, ...] | None = None
    """The answer, while it is put together from slices."""
    reply: asyncio.Future[tuple[torch.Tensor, ...]] | None = None
    """Future for the answer."""


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
    """Rows that batches have taken so far, from the first row on."""
    done: int = field(default=0)
    """Rows whose batch has completed."""
    cancelled: bool = field(default=False)
    terms: Terms = field(default=NO_TERMS)
    """Effective terms of the client."""
    local: bool = field(default=False)
    """Whether the client computes in the executor's process, so that its own work delays other clients."""
    seen: int = field(default=0)
    """Number of batches that had started when it was queued."""
    passed: int = field(default=0)
    """Number of batches that passed over earlier requests of the same walk, or of the latest part of a long one."""
    joint: Mapping[str, float] | None = field(default=None)
    """In a joint walk, the part of the rows that each client has. None in other walks."""

    @property
    def clients(self) -> Mapping[str, float]:
        """The part of the rows that each client has. The sum is 1."""
        return self.joint or {self.client: 1.0}

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
    """The policy's reason for running it now: ``full``, ``deadline``, ``no-client-thinking``, ``at-once``, ``lone``…"""
    rows: int
