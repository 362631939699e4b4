"""Weights in the layout in which oneDNN multiplies on this CPU.

Products of few rows with a packed weight take 0.4 to 0.8 of the time (docs/decisions/0028-packed-weights.md). A packed
weight is the only copy of its values, unless :meth:`PackedWeight.keep` lets the usual layout stay. It behaves like
any other frozen weight: code that reads it gets the usual layout, made for that occasion.

The operators are private to torch. They are used here only, and :func:`pack` tries them first.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from symbiosis.errors import UsageError

log = logging.getLogger(__name__)

LEAST = 1 << 16
"""Elements of the smallest weight that is packed. Smaller ones stay in a core's cache, where packing gains nothing."""


class _Forms:
    """The values of a weight in one or two layouts."""

    __slots__ = ("keep", "packed", "plain")

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed
        self.plain: torch.Tensor | None = None
        self.keep = False

    def unpacked(self) -> torch.Tensor:
        return self.packed.to_dense() if self.plain is None else self.plain


class PackedWeight(torch.Tensor):
    """A frozen weight [o, i] of an ``nn.Linear``, packed for products of few rows. ``F.linear`` uses it as it is.

    Parts of it are copies, not views.

    Raises:
        UsageError: from any function that would write to it.
    """

    _forms: _Forms

    @staticmethod
    def __new__(cls, forms: _Forms) -> PackedWeight:
        shape, dtype = forms.packed.shape, forms.packed.dtype
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))

    def __init__(self, forms: _Forms) -> None:
        self._forms = forms

    def plain(self) -> torch.Tensor:
        """Return the weight in the usual layout. After :meth:`keep`, it is made once."""
        forms = self._forms
        if forms.plain is not None:
            return forms.plain
        with torch.inference_mode(False), torch.no_grad():
            made = forms.packed.to_dense()
        if forms.keep:
            forms.plain = made
        return made

    def keep(self, room: Callable[[int], bool]) -> None:
        """Keep the weight in the usual layout once it is made, until :meth:`release`, if its bytes find room."""
        if not self._forms.keep:
            self._forms.keep = room(self.numel() * self.element_size())

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of the copy in the usual layout that it keeps now."""
        return 0 if self._forms.plain is None else self._forms.plain.nbytes

    def release(self) -> None:
        """Free the weight in the usual layout."""
        self._forms.keep, self._forms.plain = False, None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copy = nn.Parameter(self.clone(), requires_grad=False)
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and isinstance(args[1], PackedWeight):
            return linear(*args)
        if func is torch.Tensor.__setitem__ and isinstance(args[0], PackedWeight):
            raise _refusal("assignment to a part")
        with torch._C.DisableTorchFunctionSubclass():  # its default would make results PackedWeights
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return PackedWeight(args[0]._forms)
        if func._schema.is_mutable:
            raise _refusal(str(func))
        return func(*tree_map(_unpacked, args), **tree_map(_unpacked, kwargs or {}))


def _refusal(what: str) -> UsageError:
    return UsageError(f"{what}: the weights of a served model are packed and cannot be written to")


def _unpacked(value: Any) -> Any:
    return value._forms.unpacked() if isinstance(value, PackedWeight) else value


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return what ``F.linear`` returns. With a packed weight, that would come here through Python twice."""
    if not isinstance(weight, PackedWeight):
        return F.linear(x, weight, bias)
    packed = weight._forms.packed
    # Autograd, conversions and products without rows need the usual layout.
    gradients = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if gradients or x.dtype is not packed.dtype or torch.is_autocast_enabled("cpu") or not x.numel():
        return F.linear(x, weight.plain(), bias)
    return _multiply(x, packed, bias)


def _multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return y


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in the usual layout."""
    return weight.plain() if isinstance(weight, PackedWeight) else weight


def pack(model: nn.Module, modules: Iterable[nn.Module]) -> int:
    """Pack the weights of those modules of a frozen model for which it pays, and return how many.

    A weight that several modules have stays as it is: an embedding reads single rows of it.
    """
    users = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    chosen = [
        module
        for module in modules
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward  # another one would unpack the weight for each product
        and type(module.weight) is nn.Parameter
        and users[id(module.weight)] == 1
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= LEAST
    ]
    problems = {dtype: _problem(dtype) for dtype in {module.weight.dtype for module in chosen}}
    for dtype, problem in problems.items():
        if problem is not None:
            log.warning("weights of %s are not packed: %s", dtype, problem)
    chosen = [module for module in chosen if problems[module.weight.dtype] is None]
    for module in chosen:
        packed = _packed(module.weight.detach())
        module.weight = nn.Parameter(PackedWeight(_Forms(packed)), requires_grad=False)
    return len(chosen)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
    return packed


def _problem(dtype: torch.dtype) -> str | None:
    """Return why weights of this dtype cannot be packed here, or None."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 256), (512, 256), (512,)
    x, weight, bias = (torch.randn(*shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
    try:
        with torch.no_grad():
            packed = _packed(weight)
            wrong = not torch.equal(packed.to_dense(), weight) or not all(
                torch.allclose(_multiply(rows, packed, bias).float(), F.linear(rows, weight, bias).float(), 1e-2, 1e-2)
                for rows in (x, x[:1])
            )
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return "products with a packed weight are wrong" if wrong else None
