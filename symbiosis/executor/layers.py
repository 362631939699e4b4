"""Base layers: the frozen modules that an executor runs for all clients.

A base layer is stateless. The backward pass of a linear layer needs the weights alone: dX = dY·W, whatever the
batch was in the forward pass (Symbiosis, section 3.6). Any other row-wise module receives X again and recomputes.

Legend: n rows; i in_features; o out_features.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from symbiosis.core.requests import Key, LayerSpec, Pass, Results
from symbiosis.errors import SplitError
from symbiosis.executor import experts, quantized
from symbiosis.executor.fp32_products import norms, times, times_transposed
from symbiosis.executor.packing import PackedWeight, linear, plain
from symbiosis.module_state import buffers_kept, modes_kept


class BaseLayer(ABC):
    """One frozen module and how to run it in either direction."""

    def __init__(self, spec: LayerSpec, module: nn.Module) -> None:
        self.spec = spec
        self.module = module
        self.device = next(module.parameters()).device
        self._norms: torch.Tensor | None = None
        """What :meth:`norms` has returned, from the first call that asks for it on."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name!r}, {self.spec.in_features} → {self.spec.out_features})"

    def sample(self) -> tuple[Key, tuple[torch.Tensor, ...]]:
        """Return the key and the matrices of a call forward with one row of zeros."""
        row = torch.zeros(1, self.spec.in_features, dtype=self.spec.dtype, device=self.device)
        return Key((self.spec.layer,), Pass.FORWARD), (row,)

    def run(self, key: Key, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return (Y [n, o],) from (X [n, i],); backward, (dX [n, i],) from (dY [n, o],) or (X [n, i], dY [n, o]).

        Tensors and results are fp32 if the key says so, otherwise of the layer's dtype. :class:`ExpertBank` has further
        matrices.
        """
        pass_ = key.pass_
        if pass_ is _BACKWARD:
            return self.backward(tensors, fp32=key.fp32)
        if pass_ is _NORMS:
            (x,) = tensors
            if self._norms is None:
                self._norms = self.norms()
            return (self._norms.to(x.dtype).repeat(len(x), 1),)
        return (self.forward(tensors, bias=pass_ is _FORWARD, fp32=key.fp32),)

    @cached_property
    def packed(self) -> list[PackedWeight]:
        """The packed weights. Backward passes, and those in fp32, need them in the usual layout."""
        return [parameter for parameter in self.module.parameters() if isinstance(parameter, PackedWeight)]

    @property
    def size(self) -> int:
        """Number of weights; of a bank, those of all experts."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def norms(self) -> torch.Tensor:
        """Return the norms [o] of the rows of a linear layer's weight [o, i]."""
        raise SplitError(f"{self.spec.name} is not linear, so it has no weight with norms")

    @abstractmethod
    def forward(self, tensors: tuple[torch.Tensor, ...], *, bias: bool, fp32: bool) -> torch.Tensor: ...
    @abstractmethod
    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> tuple[torch.Tensor, ...]: ...


_FORWARD, _BACKWARD, _NORMS = Pass.FORWARD, Pass.BACKWARD, Pass.NORMS


class LinearLayer(BaseLayer):
    """``nn.Linear``: Y = X·Wᵀ + b, weight [o, i]."""

    def __init__(self, spec: LayerSpec, module: nn.Linear) -> None:
        super().__init__(spec, module)
        self._parameters: dict[str, Any] = module._parameters

    def forward(self, tensors: tuple[torch.Tensor, ...], *, bias: bool, fp32: bool) -> torch.Tensor:
        (x,) = tensors
        weight, added = self._parameters["weight"], self._parameters["bias"] if bias else None
        return _plus(times_transposed(x, plain(weight)), added) if fp32 else linear(x, weight, added)

    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> tuple[torch.Tensor, ...]:
        (dy,) = tensors
        weight = plain(self._parameters["weight"])
        return (times(dy, weight) if fp32 else dy.mm(weight),)

    def norms(self) -> torch.Tensor:
        return norms(self._parameters["weight"], 1)


class OwnForwardLayer(LinearLayer):
    """A subclass of ``nn.Linear``, or one with hooks, that gives the same product. It may round in another place:
    Falcon's layer rounds before it adds the bias."""

    def forward(self, tensors: tuple[torch.Tensor, ...], *, bias: bool, fp32: bool) -> torch.Tensor:
        if fp32 or not bias:
            return super().forward(tensors, bias=bias, fp32=fp32)
        y: torch.Tensor = self.module(tensors[0])
        return y


class QuantizedLayer(LinearLayer):
    """An ``nn.Linear`` with a quantized weight (:mod:`symbiosis.executor.quantized`). For passes in fp32 the weight is
    dequantized."""

    def __init__(self, spec: LayerSpec, module: nn.Linear) -> None:
        super().__init__(spec, module)
        self._weight = quantized.weight_of(module)

    def forward(self, tensors: tuple[torch.Tensor, ...], *, bias: bool, fp32: bool) -> torch.Tensor:
        (x,) = tensors
        if not fp32:
            return self._weight.product(x, bias=bias)
        y = torch.cat([times_transposed(x, rows) for _, rows in self._weight.blocks()], dim=1)
        return _plus(y, self._parameters["bias"] if bias else None)

    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> tuple[torch.Tensor, ...]:
        (dy,) = tensors
        if not fp32:
            return (self._weight.gradient(dy),)
        return (sum(times(dy[:, outputs], rows) for outputs, rows in self._weight.blocks()),)  # type: ignore

    @property
    def size(self) -> int:
        return self.spec.in_features * self.spec.out_features

    def norms(self) -> torch.Tensor:
        return torch.cat([norms(rows, 1) for _, rows in self._weight.blocks()])


class Conv1DLayer(BaseLayer):
    """transformers' ``Conv1D`` (GPT-2): Y = X·W + b, weight [i, o]."""

    def __init__(self, spec: LayerSpec, module: Conv1D) -> None:
        super().__init__(spec, module)
        self._parameters: dict[str, Any] = module._parameters

    def forward(self, tensors: tuple[torch.Tensor, ...], *, bias: bool, fp32: bool) -> torch.Tensor:
        (x,) = tensors
        weight, added = self._parameters["weight"], self._parameters["bias"]
        if fp32:
            return _plus(times(x, weight), added if bias else None)
        return torch.addmm(added, x, weight) if bias else x.mm(weight)

    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> tuple[torch.Tensor, ...]:
        (dy,) = tensors
        weight = self._parameters["weight"]
        return (times_transposed(dy, weight) if fp32 else dy.mm(weight.t()),)

    def norms(self) -> torch.Tensor:
        return norms(self._parameters["weight"], 0)


class ModuleLayer(BaseLayer):
    """A frozen module that treats every row alike, such as an MLP, served whole. Backward recomputes it from X."""

    def forward(self, tensors: tuple[torch.Tensor, ...], *, bias: bool, fp32: bool) -> torch.Tensor:
        if fp32 or not bias:
            raise self._refusal()
        y: torch.Tensor = self.module(*tensors)
        return y

    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> tuple[torch.Tensor, ...]:
        if fp32:
            raise self._refusal()
        x, dy = tensors
        return _gradients(self.module, (x,), dy)

    def _refusal(self) -> SplitError:
        return SplitError(f"{self.spec.name} is served whole; it has no single bias to leave out and no pass in fp32")


class ExpertBank(BaseLayer):
    """A bank of experts (:mod:`symbiosis.executor.experts`): (X [n, i], experts [n, k], weights [n, k]) → [n, o].

    Backward takes dY [n, o] too, recomputes, and returns the gradients of X and of the weights.
    """

    def sample(self) -> tuple[Key, tuple[torch.Tensor, ...]]:
        key, (row,) = super().sample()
        chosen = torch.arange(min(2, self.spec.choices), device=row.device)[None]
        return key._replace(choices=chosen.shape[1]), (row, chosen, row.new_ones(chosen.shape))

    def forward(self, tensors: tuple[torch.Tensor, ...], *, bias: bool, fp32: bool) -> torch.Tensor:
        return experts.run(self.module, self.spec.experts, *tensors)

    def backward(self, tensors: tuple[torch.Tensor, ...], *, fp32: bool) -> tuple[torch.Tensor, ...]:
        x, chosen, weights, dy = tensors
        return _gradients(lambda x, weights: self.forward((x, chosen, weights), bias=True, fp32=fp32), (x, weights), dy)


def _gradients(forward: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], dy: torch.Tensor) -> Results:
    """Return the gradients of inputs for that of the output, computed on this thread. On the one thread that the
    autograd engine has for a GPU, a tenant's backward pass may be waiting for this result."""
    with torch.autograd.set_multithreading_enabled(False), torch.enable_grad():
        inputs = [given.detach().requires_grad_() for given in inputs]
        return torch.autograd.grad(forward(*inputs), inputs, dy)


def _plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y.add_(bias)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Linear``, possibly quantized, a subclass of it that gives the same product, or
    a ``Conv1D``."""
    if not isinstance(module, nn.Linear):
        return type(module) is Conv1D and _is_unchanged(module)
    if "weight" not in module._parameters:  # it is computed from others
        return False
    return quantized.is_quantized(module) or _is_plain(module) or _gives_the_product(module)


def _is_plain(module: nn.Linear) -> bool:
    """Return whether a call of a module is ``F.linear`` and nothing else."""
    return type(module).forward is nn.Linear.forward and _is_unchanged(module)


def _is_unchanged(module: nn.Module) -> bool:
    """Return whether a module runs the ``forward`` of its class, without hooks."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _gives_the_product(module: nn.Linear) -> bool:
    """Compare a subclass with ``nn.Linear`` on random rows, large and small, in three shapes and both modes. Without
    weights, return whether it can be compared."""
    weight, own = module.weight, {*module._parameters, *module._buffers, *module._modules}
    if own != {"weight", "bias"} or len(inspect.signature(module.forward).parameters) != 1:
        return False
    if module._forward_pre_hooks:  # such as a cast of rows, which clients would not make
        return False
    if weight.is_meta:  # names are checked before weights are loaded, and this is asked again afterwards
        return True
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 33, weight.shape[1], generator=generator, device="cpu").to(weight.device, weight.dtype)
    x[1] *= 1e3 if weight.dtype is torch.float16 else 1e6
    training = module.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            wanted = F.linear(x, weight, module.bias)
            # Where product and bias cancel, little is left of the numbers that were rounded.
            size = F.linear(x, weight).abs() + (0 if module.bias is None else module.bias.abs())
            found = [module.train(mode)(rows) for mode in (True, False) for rows in (x, x.flatten(0, 1), x[:1, :1])]
    except (RuntimeError, TypeError, ValueError):
        return False
    finally:
        module.train(training)
    close = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 2e-2
    compared = 2 * [(wanted, size), (wanted, size), (wanted[:1, :1], size[:1, :1])]
    return all(
        isinstance(y, torch.Tensor) and _is_close(y, part, close, sizes)
        for y, (part, sizes) in zip(found, compared, strict=True)
    )


def _is_close(y: torch.Tensor, wanted: torch.Tensor, close: float, sizes: torch.Tensor) -> bool:
    """Return whether y has the wanted dtype and numbers, each row within ``close`` of the largest of ``sizes``."""
    if y.numel() != wanted.numel() or y.dtype is not wanted.dtype:
        return False
    return bool((y.view(wanted.shape) - wanted).abs().amax(-1).le(close * sizes.abs().amax(-1)).all())


def base_layer(
    index: int, name: str, module: nn.Module, dtype: torch.dtype | None = None, config: Any = None
) -> BaseLayer:
    """Return the base layer for a module that :func:`is_linear`, is a bank of experts, or treats all rows alike.

    Args:
        index, name: its place in the layer table, and its name.
        module: the module.
        dtype: dtype of the rows of quantized layers.
        config: the model's configuration, which has the number of experts of a row.

    Raises:
        SplitError: the module is none of these.
    """
    if quantized.is_quantized(module):
        assert isinstance(module, nn.Linear)
        dtype = dtype or torch.get_default_dtype()
        quantized.probe(name, module, dtype)
        sizes = module.in_features, module.out_features
        return QuantizedLayer(LayerSpec(index, name, *sizes, dtype, module.bias is not None, True), module)
    if is_linear(module):
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        conv = isinstance(module, Conv1D)
        out_features, in_features = reversed(weight.shape) if conv else weight.shape
        spec = LayerSpec(index, name, in_features, out_features, weight.dtype, module.bias is not None, True)
        if conv:
            return Conv1DLayer(spec, module)
        linear = cast(nn.Linear, module)
        return LinearLayer(spec, linear) if _is_plain(linear) else OwnForwardLayer(spec, linear)
    if experts.is_bank(module):
        in_features, out_features, dtype = experts.probe(name, module)
        counts = experts.experts_of(module), experts.choices_of(module, config)
        return ExpertBank(LayerSpec(index, name, in_features, out_features, dtype, False, False, *counts), module)
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
    x = torch.randn(3, width, generator=generator, device="cpu").to(weight.device, weight.dtype)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), modes_kept(module), buffers_kept(module):
            module.eval()
            together = module(x)
            alone = torch.cat([module(row[None]) for row in x])
            for each in module.modules():
                each.training = not isinstance(each, nn.modules.dropout._DropoutNd)  # clients run active ones
            trained = module(x)
    except Exception as error:
        raise SplitError(
            f"{name} ({type(module).__name__}) cannot be served whole: it does not run on a matrix of rows "
            f"[n, {width}] alone; serve its linear layers instead"
        ) from error
    if not isinstance(together, torch.Tensor) or together.ndim != 2 or together.shape[0] != 3:
        raise SplitError(f"{name} ({type(module).__name__}) cannot be served whole: it does not give a row for a row")
    if not torch.allclose(together.float(), alone.float(), rtol=2e-2, atol=1e-3):
        raise SplitError(f"{name} ({type(module).__name__}) cannot be served whole: its rows depend on one another")
    if not (isinstance(trained, torch.Tensor) and _is_close(trained, together, 2e-2, together)):
        raise SplitError(f"{name} ({type(module).__name__}) cannot be served whole: it has another result in training")
    return width, together.shape[1], weight.dtype
