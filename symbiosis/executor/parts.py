"""Parts of base layers, for a base model whose weights are divided among several processes (tensor parallelism).

A linear layer is cut by its outputs, and a bank of experts by its experts. Each part is a base layer of its own:

===========  ===========================  ==========================================
layer        forward                      backward
===========  ===========================  ==========================================
linear       Y = [Y_0, Y_1, …] from X     dX = Σ dX_r, each from the columns dY_r
bank         Y = Σ Y_r from X             dX = Σ dX_r, and so for routing weights
===========  ===========================  ==========================================

A sum over the inputs of a linear layer is never cut, so its forward results are those of the undivided product.

Legend: n rows; i in_features; o out_features; k experts for each row; e experts; r a part.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from symbiosis.core.requests import Columns, Expected, Key, LayerSpec, Pass, Results, expected
from symbiosis.errors import SplitError
from symbiosis.executor import experts
from symbiosis.executor.layers import BaseLayer, Conv1DLayer, ExpertBank, LinearLayer, QuantizedLayer

_BACKWARD = Pass.BACKWARD


def range_of(size: int, rank: int, count: int) -> slice:
    """Return which of ``size`` outputs or experts part ``rank`` of ``count`` has. Sizes differ by at most one."""
    return slice(size * rank // count, size * (rank + 1) // count)


def part_of(layer: BaseLayer, rank: int, count: int, device: torch.device, dtype: torch.dtype) -> BaseLayer:
    """Return part ``rank`` of ``count`` of a base layer, on a device and in a precision.

    Raises:
        SplitError: the layer cannot be cut, or has fewer experts, or inputs and outputs, than there are parts. A gate
            with one output is in one part, and the others are empty.
    """
    spec, module = layer.spec, copy.copy(layer.module)
    size = spec.experts or spec.out_features
    cut = range_of(size, rank, count)
    whole = f"{spec.name} ({type(module).__name__})"
    if size < count and (spec.experts or spec.in_features < count):
        what = "experts" if spec.experts else "outputs"
        raise SplitError(f"{whole} cannot be divided into {count} parts: it has {size} {what}; use fewer shards")
    module._parameters = {}
    if isinstance(layer, ExpertBank):
        if not _has_experts_first(layer):
            raise SplitError(f"{whole} cannot be divided: its parameters have no dimension for the experts")
        for leaf, parameter in layer.module._parameters.items():
            module._parameters[leaf] = _taken(parameter, cut, 0, device, dtype)
        for count_of in ("total_experts", "num_experts"):
            if hasattr(module, count_of):
                setattr(module, count_of, cut.stop - cut.start)
        return _BankPart(spec._replace(experts=cut.stop - cut.start), module, cut.start, spec.experts)
    if isinstance(layer, QuantizedLayer) or not isinstance(layer, LinearLayer | Conv1DLayer):
        why = "its weight is quantized" if isinstance(layer, QuantizedLayer) else "it is served whole"
        raise SplitError(f"{whole} cannot be divided among shards: {why}; leave --shards out")
    outputs = 1 if isinstance(layer, Conv1DLayer) else 0
    module._parameters["weight"] = _taken(layer.module.weight, cut, outputs, device, dtype)
    module._parameters["bias"] = _taken(layer.module.bias, cut, 0, device, dtype)
    return type(layer)(spec._replace(out_features=cut.stop - cut.start), module)  # type: ignore[arg-type]


def _has_experts_first(layer: BaseLayer) -> bool:
    """Return whether each parameter of a bank has a row, or matrix, for each expert."""
    module = layer.module
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return len(own) == len(list(module.parameters())) and all(one.shape[0] == layer.spec.experts for one in own)


def _taken(whole: object, cut: slice, dim: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter | None:
    """Return a range of a parameter. What is mapped from a file stays so: other pages are never read."""
    if whole is None:
        return None
    assert isinstance(whole, torch.Tensor)
    part = whole.detach().narrow(dim, cut.start, cut.stop - cut.start)
    part = part.to(device, dtype)
    if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and not (
        part.is_contiguous() and _is_mapped(part)
    ):
        part = part.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=False)


def _is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is a file's, by Linux' list of mappings; elsewhere, False."""
    maps = Path("/proc/self/maps")
    if tensor.device.type != "cpu" or not maps.exists():
        return False
    for line in maps.read_text().splitlines():
        first, _, last = line.partition(" ")[0].partition("-")
        if int(first, 16) <= tensor.data_ptr() < int(last, 16):
            return len(line.split(maxsplit=5)) == 6 and line.split(maxsplit=5)[5].startswith("/")
    return False


class _BankPart(ExpertBank):
    """Some of a bank's experts. A row's results of other experts are left to the other parts.

    Args:
        spec: the bank's, with the number of experts of this part.
        module: the bank with the weights of these experts.
        first: the number of the first of these.
        experts: number of experts in the bank. As in a whole bank, a number of an expert that does not exist counts
            for the nearest that does.
    """

    def __init__(self, spec: LayerSpec, module: nn.Module, first: int, experts: int) -> None:
        super().__init__(spec, module)
        self._first = first
        self._last = experts - 1

    def forward(self, tensors: tuple[torch.Tensor, ...], *, bias: bool, fp32: bool) -> torch.Tensor:
        x, chosen, weights = tensors
        chosen = chosen.clamp(0, self._last) - self._first
        rows, places = ((chosen >= 0) & (chosen < self.spec.experts)).nonzero(as_tuple=True)
        y = x.new_zeros(len(x), self.spec.out_features)
        if not len(rows):
            return y
        own = experts.run(
            self.module, self.spec.experts, x[rows], chosen[rows, places][:, None], weights[rows, places][:, None]
        )
        return y.index_add(0, rows, own.to(y.dtype))

    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> tuple[torch.Tensor, ...]:
        x, chosen, weights, _ = tensors
        chosen = chosen.clamp(0, self._last) - self._first
        if not ((chosen >= 0) & (chosen < self.spec.experts)).any():
            return torch.zeros_like(x), torch.zeros_like(weights)
        return super().backward(tensors, fp32=fp32)


class Cut:
    """How the calls of a layer table are divided among parts, and their results put together.

    Args:
        specs: the table of whole layers.
        count: number of parts.
    """

    def __init__(self, specs: Sequence[LayerSpec], count: int) -> None:
        self._specs = specs
        self._count = count

    def shapes(self, key: Key, rank: int) -> Expected:
        """Return the shapes of the part of a call that goes to ``rank``, and of its part of the answer."""
        call, answer = expected(self._specs, key)
        first = self._specs[key.layers[0]]
        if first.experts:
            return Expected(call, answer)
        if key.pass_ is _BACKWARD:
            return Expected((self._columns(call[0], rank),), answer)
        return Expected(call, tuple([self._columns(columns, rank) for columns in answer]))

    def _columns(self, whole: Columns, rank: int) -> Columns:
        own = range_of(whole.width, rank, self._count)
        return Columns(own.stop - own.start, whole.dtype)

    def call(self, key: Key, tensors: Results, rank: int) -> Results:
        """Return the matrices of a call that go to ``rank``."""
        if key.pass_ is _BACKWARD and not key.choices:
            (dy,) = tensors
            return (dy[:, range_of(dy.shape[1], rank, self._count)],)
        return tensors

    def together(self, key: Key, parts: Sequence[Results]) -> Results:
        """Return the results of a call from those of all parts, in their order."""
        if key.choices or key.pass_ is _BACKWARD:
            return tuple([sum(column[1:], start=column[0]) for column in zip(*parts, strict=True)])
        return tuple([torch.cat(column, dim=1) for column in zip(*parts, strict=True)])
