"""Base layers: the frozen modules that an executor runs for everybody.

A base layer is stateless (D3). Backward of a linear layer needs the weights alone: dX = dY·W, whatever the batch was in
forward (Symbiosis, section 3.6). Any other row-wise module gets X once more and recomputes.

Legend: n rows; i in_features; o out_features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from symbiosis.core.requests import LayerSpec, Pass
from symbiosis.errors import SplitError
from symbiosis.executor.products import times, times_transposed

__all__ = ["BaseLayer", "Conv1DLayer", "LinearLayer", "ModuleLayer", "is_linear"]


class BaseLayer(ABC):
    """One frozen module and how to run it in either direction."""

    def __init__(self, spec: LayerSpec, module: nn.Module) -> None:
        self.spec = spec
        self.module = module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name!r}, {self.spec.in_features} → {self.spec.out_features})"

    def sample(self) -> torch.Tensor:
        """A row [1, i] for it, of zeros."""
        parameter = next(self.module.parameters())
        return torch.zeros(1, self.spec.in_features, dtype=self.spec.dtype, device=parameter.device)

    def run(self, pass_: Pass, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[n, o] from (X [n, i],) forward; [n, i] from (dY [n, o],) or (X [n, i], dY [n, o]) backward."""
        if pass_ is Pass.FORWARD:
            return self.forward(tensors[0])
        if pass_ is Pass.BACKWARD:
            return self.backward(*tensors)
        if pass_ is Pass.FORWARD_WITHOUT_BIAS:
            return self.forward_without_bias(tensors[0])
        if pass_ is Pass.BACKWARD_FP32:
            return self.backward_fp32(tensors[0])
        return self.forward_fp32(tensors[0], pass_.has_bias)

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    @abstractmethod
    def forward_without_bias(self, x: torch.Tensor) -> torch.Tensor: ...
    @abstractmethod
    def backward(self, *tensors: torch.Tensor) -> torch.Tensor: ...
    @abstractmethod
    def forward_fp32(self, x: torch.Tensor, bias: bool) -> torch.Tensor: ...
    @abstractmethod
    def backward_fp32(self, dy: torch.Tensor) -> torch.Tensor: ...


class LinearLayer(BaseLayer):
    """``nn.Linear``: Y = X·Wᵀ + b, weight [o, i]."""

    def __init__(self, spec: LayerSpec, module: nn.Linear) -> None:
        super().__init__(spec, module)
        self._weight, self._bias = module.weight, module.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def forward_without_bias(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight)

    def backward(self, *tensors: torch.Tensor) -> torch.Tensor:
        (dy,) = tensors
        return dy.mm(self._weight)

    def forward_fp32(self, x: torch.Tensor, bias: bool) -> torch.Tensor:
        return _plus(times_transposed(x, self._weight), self._bias if bias else None)

    def backward_fp32(self, dy: torch.Tensor) -> torch.Tensor:
        return times(dy, self._weight)


class Conv1DLayer(BaseLayer):
    """transformers' ``Conv1D`` (GPT-2): Y = X·W + b, weight [i, o]."""

    def __init__(self, spec: LayerSpec, module: Conv1D) -> None:
        super().__init__(spec, module)
        self._weight, self._bias = module.weight, module.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self._bias, x, self._weight)

    def forward_without_bias(self, x: torch.Tensor) -> torch.Tensor:
        return x.mm(self._weight)

    def backward(self, *tensors: torch.Tensor) -> torch.Tensor:
        (dy,) = tensors
        return dy.mm(self._weight.t())

    def forward_fp32(self, x: torch.Tensor, bias: bool) -> torch.Tensor:
        return _plus(times(x, self._weight), self._bias if bias else None)

    def backward_fp32(self, dy: torch.Tensor) -> torch.Tensor:
        return times_transposed(dy, self._weight)


class ModuleLayer(BaseLayer):
    """A frozen module that treats every row alike, such as an MLP, served whole. Backward recomputes it from X."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.module(x)
        return y

    def forward_without_bias(self, x: torch.Tensor) -> torch.Tensor:
        raise SplitError(f"{self.spec.name} is served whole; it has no single bias to leave out")

    def backward(self, *tensors: torch.Tensor) -> torch.Tensor:
        x, dy = tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(self.module(x), x, dy)
        return dx

    def forward_fp32(self, x: torch.Tensor, bias: bool) -> torch.Tensor:
        raise SplitError(f"{self.spec.name} is served whole; it has no pass in fp32")

    def backward_fp32(self, dy: torch.Tensor) -> torch.Tensor:
        raise SplitError(f"{self.spec.name} is served whole; it has no pass in fp32")


def _plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y.add_(bias)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain ``nn.Linear`` or ``Conv1D``: subclasses with a forward of their own are not."""
    return (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward) or type(module) is Conv1D


def base_layer(index: int, name: str, module: nn.Module) -> BaseLayer:
    """The base layer for a module that :func:`is_linear` or that treats rows alike.

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
    """Try a module on a few random rows: width in and out, dtype, and that no row depends on another."""
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
