"""Linear layers with quantized weights, such as those of torchao and bitsandbytes.

Such a layer computes with the module's own forward and backward, as plain ``transformers`` + PEFT does. Which
quantizations work follows from trying: rows must not depend on one another.

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


def without_bias(module: Any) -> Any:
    """Return a layer on the same weight that adds no bias."""
    bare = copy.copy(module)
    bare._parameters = {**module._parameters, "bias": None}
    return bare


def run(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return Y [n, o] for rows X [n, i].

    bitsandbytes' ``Linear8bitLt`` would round the rows to integers, in a way that depends on the other rows of the
    batch. Rows of other tenants must not have an effect, so its weight is dequantized.
    """
    if _scales(module) is not None:
        return F.linear(x, dequantized(module).to(x.dtype), module.bias)
    # torchao's result is a view. Made without gradients, it could not be written to, as a few PEFT methods do.
    y: torch.Tensor = module(x)
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def gradient(module: Any, dy: torch.Tensor) -> torch.Tensor:
    """Return dX [n, i] for dY [n, o]. It does not depend on X, so zeros take its place."""
    if _scales(module) is not None:
        return dy.mm(dequantized(module).to(dy.dtype))
    try:
        with torch.enable_grad():
            x = dy.new_zeros(dy.shape[0], module.in_features).requires_grad_()
            (dx,) = torch.autograd.grad(module(x), x, dy)
    except RuntimeError as error:
        if not str(error).startswith("derivative for"):
            raise
        return dy.mm(dequantized(module).to(dy.dtype))  # torchao's int4 has no derivative
    return dx


def dequantized(module: Any) -> torch.Tensor:
    """Return the weight [o, i] that a layer stands for. It takes the memory of that matrix while it is used."""
    from peft.utils.integrations import dequantize_module_weight

    with torch.no_grad():
        scales = _scales(module)
        if scales is not None:  # PEFT's function would move the weight, which loses the scales
            codes = module.weight.data if module.state.CB is None else module.state.CB
            return codes.float() * scales[:, None] / 127  # type: ignore[no-any-return]
        try:
            weight: torch.Tensor = dequantize_module_weight(module).detach()
        except NotImplementedError:  # torchao's int4 is known by its products only
            return _by_products(module)
        return weight


def _by_products(module: Any) -> torch.Tensor:
    """Return the weight [o, i] as the products with unit vectors, of a few rows each."""
    bare = without_bias(module)
    rows = torch.eye(module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    return torch.cat([bare(few) for few in torch.split(rows, 64)]).T


def _scales(module: Any) -> torch.Tensor | None:
    """Return the scales of the rows of a ``Linear8bitLt``'s weight; None for other layers."""
    state: Any = getattr(module, "state", None)
    if state is None:
        return None
    found: torch.Tensor | None = module.weight.SCB if state.SCB is None else state.SCB
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
    x = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    try:
        with torch.no_grad():
            together = run(module, x)
            alone = torch.cat([run(module, row[None]) for row in x])
            product = F.linear(x.float(), dequantized(module).float())
        product = product if module.bias is None else product + module.bias.float()
        gradient(module, together)
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
        scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)  # of bitsandbytes' Params4bit
        if isinstance(scales, torch.Tensor):
            yield scales


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a parameter or buffer."""
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))
