"""Base layers: the frozen modules that an executor runs for all clients.

A base layer is stateless. The backward pass of a linear layer needs the weights alone: dX = dY·W, whatever the
batch was in the forward pass (Symbiosis, section 3.6). Any other row-wise module receives X again and recomputes.

Legend: n rows; i in_features; o out_features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from symbiosis.core.requests import Key, LayerSpec, Pass
from symbiosis.errors import SplitError
from symbiosis.executor.fp32_products import times, times_transposed
from symbiosis.executor.packing import PackedWeight, plain


class BaseLayer(ABC):
    """One frozen module and how to run it in either direction."""

    def __init__(self, spec: LayerSpec, module: nn.Module) -> None:
        self.spec = spec
        self.module = module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name!r}, {self.spec.in_features} → {self.spec.out_features})"

    def sample(self) -> torch.Tensor:
        """Return a row of zeros [1, i] for this layer."""
        parameter = next(self.module.parameters())
        return torch.zeros(1, self.spec.in_features, dtype=self.spec.dtype, device=parameter.device)

    def run(self, key: Key, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return [n, o] from (X [n, i],) forward; [n, i] from (dY [n, o],) or (X [n, i], dY [n, o]) backward.

        Tensors and result are fp32 if the key says so, otherwise of the layer's dtype.
        """
        pass_ = key.pass_
        if pass_ is _BACKWARD:
            return self.backward(tensors, fp32=key.fp32)
        return self.forward(tensors[0], bias=pass_ is _FORWARD, fp32=key.fp32)

    def release(self) -> None:
        """Free the weights in the usual layout that backward passes, and those in fp32, have made of packed ones."""
        for parameter in self.module.parameters():
            if isinstance(parameter, PackedWeight):
                parameter.release()

    @abstractmethod
    def forward(self, x: torch.Tensor, *, bias: bool, fp32: bool) -> torch.Tensor: ...
    @abstractmethod
    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> torch.Tensor: ...


_FORWARD, _, _BACKWARD = Pass


class LinearLayer(BaseLayer):
    """``nn.Linear``: Y = X·Wᵀ + b, weight [o, i]."""

    def __init__(self, spec: LayerSpec, module: nn.Linear) -> None:
        super().__init__(spec, module)
        self._weight, self._bias = module.weight, module.bias

    def forward(self, x: torch.Tensor, *, bias: bool, fp32: bool) -> torch.Tensor:
        if fp32:
            return _plus(times_transposed(x, plain(self._weight)), self._bias if bias else None)
        return F.linear(x, self._weight, self._bias if bias else None)

    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> torch.Tensor:
        (dy,) = tensors
        weight = plain(self._weight)
        return times(dy, weight) if fp32 else dy.mm(weight)


class Conv1DLayer(BaseLayer):
    """transformers' ``Conv1D`` (GPT-2): Y = X·W + b, weight [i, o]."""

    def __init__(self, spec: LayerSpec, module: Conv1D) -> None:
        super().__init__(spec, module)
        self._weight, self._bias = module.weight, module.bias

    def forward(self, x: torch.Tensor, *, bias: bool, fp32: bool) -> torch.Tensor:
        if fp32:
            return _plus(times(x, self._weight), self._bias if bias else None)
        return torch.addmm(self._bias, x, self._weight) if bias else x.mm(self._weight)

    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> torch.Tensor:
        (dy,) = tensors
        return times_transposed(dy, self._weight) if fp32 else dy.mm(self._weight.t())


class ModuleLayer(BaseLayer):
    """A frozen module that treats every row alike, such as an MLP, served whole. Backward recomputes it from X."""

    def forward(self, x: torch.Tensor, *, bias: bool, fp32: bool) -> torch.Tensor:
        if fp32 or not bias:
            raise self._refusal()
        y: torch.Tensor = self.module(x)
        return y

    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> torch.Tensor:
        if fp32:
            raise self._refusal()
        x, dy = tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(self.module(x), x, dy)
        return dx

    def _refusal(self) -> SplitError:
        return SplitError(f"{self.spec.name} is served whole; it has no single bias to leave out and no pass in fp32")


def _plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y.add_(bias)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Linear`` or ``Conv1D``, and not a subclass with a forward of its own."""
    return (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward) or type(module) is Conv1D


def base_layer(index: int, name: str, module: nn.Module) -> BaseLayer:
    """Return the base layer for a module that :func:`is_linear`, or that treats all rows alike.

    Raises:
        SplitError: the module is neither.
    """
    if is_linear(module):
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        conv = isinstance(module, Conv1D)
        out_features, in_features = reversed(weight.shape) if conv else weight.shape
        spec = LayerSpec(index, name, in_features, out_features, weight.dtype, module.bias is not None, True)
        return Conv1DLayer(spec, module) if conv else LinearLayer(spec, cast(nn.Linear, module))
    in_features, out_features, dtype = _probe(name, module)
    return ModuleLayer(LayerSpec(index, name, in_features, out_features, dtype, False, False), module)


def _probe(name: str, module: nn.Module) -> tuple[int, int, torch.dtype]:
    """Return the widths and dtype of a module, after checking on random rows that no row depends on another."""
    first = next((child for child in module.modules() if is_linear(child)), None)
    if first is None:
        raise SplitError(f"{name} ({type(module).__name__}) cannot be a base layer: it has no linear layer inside")
    weight: torch.Tensor = first.weight  # type: ignore[assignment]
    width = weight.shape[0] if isinstance(first, Conv1D) else weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, width, generator=generator).to(weight.device, weight.dtype)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            together = module(x)
            alone = torch.cat([module(row[None]) for row in x])
    except Exception as error:
        raise SplitError(
            f"{name} ({type(module).__name__}) cannot be served whole: it does not run on a matrix of rows "
            f"[n, {width}] alone; serve its linear layers instead"
        ) from error
    finally:
        module.train(was_training)
    if not isinstance(together, torch.Tensor) or together.ndim != 2 or together.shape[0] != 3:
        raise SplitError(f"{name} ({type(module).__name__}) cannot be served whole: it does not give a row for a row")
    if not torch.allclose(together.float(), alone.float(), rtol=2e-2, atol=1e-3):
        raise SplitError(f"{name} ({type(module).__name__}) cannot be served whole: its rows depend on one another")
    return width, together.shape[1], weight.dtype
