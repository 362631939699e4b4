"""Linear layers with quantized weights, such as those of torchao and bitsandbytes.

Such a layer computes with the module's own forward and backward where that is possible, as plain ``transformers`` +
PEFT does. Which quantizations work follows from trying: rows must not depend on one another.

Legend: n rows; i in_features; o out_features.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from symbiosis.errors import SplitError
from symbiosis.executor.packing import PackedWeight


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Linear`` whose weight is no plain matrix of floating-point numbers."""
    if not isinstance(module, nn.Linear):
        return False
    weight = module.weight
    plain = weight.is_floating_point() and not is_narrow(weight)
    return not (plain and type(weight) in (nn.Parameter, torch.Tensor, PackedWeight))


def is_narrow(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has floating-point numbers of 8 bits or less."""
    return tensor.is_floating_point() and tensor.dtype.itemsize == 1


BLOCK = 1 << 24
"""Elements of a weight that are dequantized at a time: 64 MiB in fp32."""


class QuantizedWeight:
    """The weight W [o, i] of a layer whose module computes forward and backward itself, such as torchao's int8 and fp8.

    Only :data:`BLOCK` elements of W exist as floating-point numbers at a time, apart from what the module itself makes
    in its forward pass.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._multiple: int = (getattr(module.weight, "block_size", None) or [1])[0]
        """Outputs that have scales in common."""
        self._bare = copy.copy(module)
        self._bare._parameters = {**module._parameters, "bias": None}

    def product(self, x: torch.Tensor, *, bias: bool) -> torch.Tensor:
        """Return Y [n, o] for rows X [n, i]."""
        # torchao's result is a view. Made without gradients, it could not be written to, as a few PEFT methods do.
        y: torch.Tensor = (self.module if bias else self._bare)(x)
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    def gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """Return dX [n, i] for dY [n, o]. It does not depend on X, so zeros take its place."""
        with torch.autograd.set_multithreading_enabled(False), torch.enable_grad():  # as in layers
            x = dy.new_zeros(dy.shape[0], self.module.in_features).requires_grad_()
            layer = copy.copy(self._bare)
            for outputs in self._outputs():
                layer._parameters = {"weight": nn.Parameter(self._rows(outputs), requires_grad=False), "bias": None}
                torch.autograd.backward(layer(x), dy[:, outputs])
        assert x.grad is not None
        return x.grad

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (outputs, W[outputs]) for all outputs in turn."""
        for outputs in self._outputs():
            yield outputs, self._rows(outputs).dequantize()

    def _rows(self, outputs: slice) -> torch.Tensor:
        weight: torch.Tensor = self.module.weight.detach()
        return weight[outputs] if len(weight) > outputs.stop - outputs.start else weight

    def _outputs(self) -> Iterator[slice]:
        step = -(-max(BLOCK // self.module.in_features, 1) // self._multiple) * self._multiple
        for first in range(0, self.module.out_features, step):
            yield slice(first, min(first + step, self.module.out_features))


class _Dequantized(QuantizedWeight):
    """A weight that is dequantized for the pass backward."""

    def gradient(self, dy: torch.Tensor) -> torch.Tensor:
        dtype = getattr(self.module, "compute_dtype", None) or dy.dtype  # in which Linear4bit multiplies
        dx = None
        for outputs, weight in self.blocks():
            part = dy[:, outputs].to(dtype).mm(weight.to(dtype))
            dx = part if dx is None else dx.add_(part)
        assert dx is not None
        return dx.to(dy.dtype)


class _EightBits(_Dequantized):
    """The weight of bitsandbytes' ``Linear8bitLt``, which is dequantized for each product.

    The module would round the rows to integers, in a way that depends on the other rows of the batch. Rows of other
    tenants must not have an effect.
    """

    def product(self, x: torch.Tensor, *, bias: bool) -> torch.Tensor:
        y = torch.cat([F.linear(x, weight.to(x.dtype)) for _, weight in self.blocks()], dim=1)
        return y if self.module.bias is None or not bias else y + self.module.bias

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        codes, scales = self.module.weight.data, scales_of(self.module)
        assert scales is not None
        for outputs in self._outputs():
            yield outputs, codes[outputs].float() * scales[outputs, None] / 127


class _FourBits(_Dequantized):
    """The weight of bitsandbytes' ``Linear4bit``, whose numbers lie in blocks with a scale for each."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._multiple = module.weight.quant_state.blocksize

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise

        codes, state = self.module.weight.data.view(torch.uint8).view(-1, 1), self.module.weight.quant_state
        scales = state.absmax
        if state.nested:
            scales = (dequantize_blockwise(scales, state.state2) + state.offset).float()
        for outputs in self._outputs():
            numbers = slice(outputs.start * state.shape[1], outputs.stop * state.shape[1])
            part = copy.copy(state)
            part.absmax = scales[numbers.start // state.blocksize : -(-numbers.stop // state.blocksize)]
            part.shape, part.nested, part.state2 = (outputs.stop - outputs.start, state.shape[1]), False, None
            yield outputs, dequantize_4bit(codes[numbers.start // 2 : -(-numbers.stop // 2)], part)


class _Products(QuantizedWeight):
    """A weight that is known by its products only, such as torchao's int4: they have no derivative."""

    def gradient(self, dy: torch.Tensor) -> torch.Tensor:
        return torch.cat([dy.mm(columns.T.to(dy.dtype)) for columns in self._columns()], dim=1)

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        yield slice(0, self.module.out_features), torch.cat(list(self._columns())).T

    def _columns(self) -> Iterator[torch.Tensor]:
        """Yield the columns of W as the products with unit vectors, a few rows at a time."""
        weight = self.module.weight
        for inputs in torch.split(torch.arange(self.module.in_features, device=weight.device), 64):
            yield self._bare(F.one_hot(inputs, self.module.in_features).to(weight.dtype))


def weight_of(module: Any) -> QuantizedWeight:
    """Return what computes with the weight of a layer that :func:`is_quantized`."""
    if hasattr(module.weight, "SCB"):
        return _EightBits(module)
    if getattr(module.weight, "quant_state", None) is not None:
        return _FourBits(module)
    found = QuantizedWeight(module)
    try:
        next(found.blocks())
    except NotImplementedError:
        return _Products(module)
    except Exception:  # noqa: BLE001 (a kind of weight that cannot be cut stays whole)
        found._multiple = module.out_features
    return found


def probe(name: str, module: Any, dtype: torch.dtype) -> None:
    """Try a layer on random rows [n, i] of a dtype.

    Raises:
        SplitError: it does not compute a product, or rows depend on one another.
    """
    if hasattr(module, "support_avx512bf16_for_cpu"):
        # bitsandbytes would lay the weight out for inference at its first use, and never train again.
        module.support_avx512bf16_for_cpu = False
    what = f"{name} ({type(module).__name__} with a weight of type {type(module.weight).__name__})"
    device = module.weight.device
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, module.in_features, generator=generator, device="cpu").to(device, dtype)
    try:
        with torch.no_grad():
            weight = weight_of(module)
            together = weight.product(x, bias=True)
            alone = torch.cat([weight.product(row[None], bias=True) for row in x])
            product = torch.cat([F.linear(x.float(), rows.float()) for _, rows in weight.blocks()], dim=1)
            product = product if module.bias is None else product + module.bias.float()
            weight.gradient(together)
    except Exception as error:
        text = textwrap.shorten(str(error).partition("\n")[0], 100, placeholder=" …")
        raise SplitError(f"{what} cannot be served: {type(error).__name__}: {text}") from error
    if not torch.allclose(together.float(), alone.float(), rtol=1e-2, atol=1e-3):
        raise SplitError(f"{what} cannot be served: its rows depend on one another")
    if (together.float() - product).abs().max() > 0.05 * product.abs().max():
        raise SplitError(f"{what} cannot be served: it does not compute a product with its weight")


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a parameter consists of: itself, or what a quantized one is made of."""
    if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, PackedWeight):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    else:
        yield tensor.detach() if tensor.is_floating_point() else tensor.detach().as_subclass(torch.Tensor)
        state = getattr(tensor, "quant_state", None)  # of bitsandbytes' Params4bit; nested if scales have scales
        while state is not None:
            yield from (part for part in (state.absmax, state.code, state.offset) if part is not None)
            state = state.state2


def scales_of(module: nn.Module) -> torch.Tensor | None:
    """Return the scales [o] of bitsandbytes' ``Linear8bitLt``; None for another module.

    They are no part of the weight. The module's first forward pass moves them from an attribute of it to the module.
    """
    weight: Any = module._parameters.get("weight")
    if not hasattr(weight, "SCB"):
        return None
    state: Any = module.state
    scales: torch.Tensor | None = state.SCB if weight.SCB is None else weight.SCB
    return scales


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a parameter or buffer."""
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))
