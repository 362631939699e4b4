"""Products with the weight of a base layer, which the executor computes.

Some code multiplies by a layer's weight instead of calling the layer. TRL's and Liger's losses multiply a few thousand
rows at a time by a part of ``lm_head.weight``. The executor can compute such products: with ``nn.Linear``'s weight
[o, i], ``x @ weight.t()`` is the layer's forward pass without bias, and ``y @ weight`` its backward pass. With
``Conv1D``'s weight [i, o] it is the other way round.

A :class:`Placeholder` knows its layer. A slice, transpose or cast of it is a :class:`Part`: NaN of the same shape, with
a *map* beside it. The map is a tensor on the meta device that went through the same operations; its offset and strides
say which rows and columns of the weight the part has. The executor computes with whole weights, so rows are padded with
zeros for a part of the weight's input, and columns of the result are dropped for a part of its output.

Every other function of a placeholder runs as usual. If NaN comes out, the function needed the values, and it is
refused. Functions of shapes and dtypes, and ``isnan``, therefore work. Functions that turn NaN into numbers (``sign``,
``nansum``) are refused by name.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from symbiosis.client.parameters import CASTS, SharedParameter, values_of
from symbiosis.core.requests import LayerSpec
from symbiosis.errors import PlaceholderError


class Multiplying(Protocol):
    """A base layer's stand-in, which has products with the layer's weight computed by the executor."""

    spec: LayerSpec

    @property
    def kept(self) -> KeptProduct:
        """The last product of this thread."""

    def multiply(self, x: torch.Tensor, forward: bool) -> torch.Tensor:
        """Return X·Wᵀ, [..., i] → [..., o], or with ``forward=False`` X·W, [..., o] → [..., i]."""


class _Product(NamedTuple):
    of: weakref.ref[torch.Tensor]
    rows: torch.Tensor
    """A copy of the rows that were multiplied: writes that no version counter sees may change the original."""
    state: tuple[Any, ...]
    result: torch.Tensor


class KeptProduct:
    """The last product with a whole weight, kept while parts of it are asked for. One for each thread."""

    __slots__ = ("__weakref__", "_product")

    def __init__(self) -> None:
        self._product: _Product | None = None

    @property
    def is_empty(self) -> bool:
        return self._product is None

    def find(self, x: torch.Tensor, state: tuple[Any, ...], *, more: bool) -> torch.Tensor | None:
        """Return the product of x, if it was kept. It is dropped unless ``more`` parts are likely to follow."""
        kept = self._product
        if kept is None or kept.of() is not x or kept.state != state or not torch.equal(kept.rows, x):
            return None
        if not more:
            self._product = None
        return kept.result

    def keep(self, x: torch.Tensor, state: tuple[Any, ...], result: torch.Tensor) -> None:
        """Keep a product until x is gone."""
        self._product = _Product(weakref.ref(x, self._drop), x.detach().clone(), state, result)

    def _drop(self, _: object) -> None:
        self._product = None


class _StandsForWeight:
    """The behaviour that Placeholder and Part have in common."""

    __slots__ = ()
    _layer: weakref.ref[Multiplying]
    t: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        product = _multiplied(func, args, kwargs)
        return _run(func, args, kwargs) if product is None else product

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _is_hole(self):
            raise PlaceholderError(
                "base layers' weights stay with the executor, so a tensor that stands for one cannot be saved; save "
                "model.state_dict(), which has none of them, or the adapter (client.save_adapter, or save_pretrained "
                "of the PEFT model)"
            )
        values: Any = values_of(self)  # type: ignore[arg-type]
        return (nn.Parameter(values, False) if isinstance(self, nn.Parameter) else values).__reduce_ex__(protocol)


class Placeholder(_StandsForWeight, SharedParameter):
    """The weight of a base layer. Turns into a plain SharedParameter when the tenant makes it its own."""

    @property
    def _map(self) -> torch.Tensor:
        rows, columns = self.shape
        # One column more than the weight has: the strides of a single column would not show whether it is transposed.
        return torch.empty(rows, columns + 1, dtype=self.dtype, device="meta")[:, :columns]

    def refuse_another(self, source: torch.Tensor) -> None:
        own, other = self._layer(), source._layer() if isinstance(source, _StandsForWeight) else None
        if own is not None and other is not None and own.spec.name != other.spec.name:
            raise another_layer(own.spec.name, other.spec.name)

    def __copy__(self) -> SharedParameter:
        return self._introduced(super().__copy__())

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedParameter:
        return self._introduced(super().__deepcopy__(memo))

    def _introduced(self, copy: SharedParameter) -> SharedParameter:
        """Return a copy that stands for the same layer. A layer that is copied introduces its own copy again."""
        if type(copy) is SharedParameter and copy.is_placeholder:
            copy.__class__ = Placeholder
            copy._layer = self._layer  # type: ignore[attr-defined]
        return copy


class Part(_StandsForWeight, torch.Tensor):
    """Some rows and columns of a placeholder, possibly transposed or in another dtype."""

    _map: torch.Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        return self  # a part has no values

    def __copy__(self) -> Part:
        return self


class PartTimesMatrix(_StandsForWeight, torch.Tensor):
    """The product of a placeholder or a part of it, W [o, i], and a matrix R [i, i] of the client's, as HRA makes it.

    ``F.linear(x, W·R)`` is ``F.linear(F.linear(x, R), W)``, so the executor computes with W alone.
    """

    _factors: tuple[torch.Tensor, torch.Tensor]

    @property
    def _map(self) -> torch.Tensor:
        return torch.empty((), dtype=self.dtype, device="meta").expand(self.shape)  # of no rows and columns of a weight


def another_layer(name: str, other: str) -> PlaceholderError:
    """Return the error of putting one base layer's weight into the place of another's."""
    return PlaceholderError(
        f"{name} cannot take the weight of {other}, which stays with the executor; put the whole module, or "
        "copy.deepcopy of it, into its place"
    )


def introduce(weight: SharedParameter, layer: Multiplying) -> None:
    """Tell a placeholder which layer it stands for."""
    weight.__class__ = Placeholder
    assert isinstance(weight, Placeholder)
    weight._layer = weakref.ref(layer)


_ROWS = {"linear": 0, "matmul": 0, "linalg_matmul": 0, "mm": 0, "addmm": 1, "addmm_": 1}
"""Functions that multiply, and the index of the operand with the rows; the weight is the next operand."""
_OPERANDS = ("input", "weight", "mat1", "mat2", "other", "bias")
_CASTS = CASTS | {"clone", "contiguous"}
_READS = {"item", "tolist", "numpy", "__array__", "__float__"}
_HIDE_NAN = {
    *("sign", "sgn", "copysign", "heaviside", "fmax", "fmin"),
    *("nan_to_num", "nansum", "nanmean", "nanmedian", "nanquantile"),
}
"""Functions that turn NaN into numbers, which would look like a result."""
_WRITE_NOTHING = {"requires_grad_", "detach_", "share_memory_", "rename_"}
_UNINITIALISED = {"empty_like", "new_empty", "new_empty_strided", "as_subclass"}
"""Functions whose result may contain NaN by chance or by design."""


def _multiplied(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the result if ``func`` multiplies rows by a base layer's weight, or by a part of it; otherwise None."""
    name = getattr(func, "__name__", "")
    at = _ROWS.get(name)
    if at is None:
        return None
    operands = [*args, *(kwargs[operand] for operand in _OPERANDS if operand in kwargs)]
    if len(operands) < at + 2:
        return None
    x, weight = operands[at : at + 2]
    if name in ("mm", "matmul") and isinstance(x, _StandsForWeight):
        return _times(x, weight)
    if isinstance(x, _StandsForWeight) or not isinstance(weight, _StandsForWeight):
        return None
    if isinstance(weight, PartTimesMatrix) and name == "linear":
        part, matrix = weight._factors
        return F.linear(F.linear(x, matrix), part, *operands[2:])
    y = _product(x, weight.t() if name == "linear" else weight)
    if y is None:
        return None
    y = y.to(kwargs.get("out_dtype") or y.dtype)
    if name == "linear" and len(operands) > 2 and operands[2] is not None:
        y = y + operands[2].to(y.dtype)
    elif at:
        y = y * kwargs.get("alpha", 1)
        beta = kwargs.get("beta", 1)
        if beta != 0:  # with beta = 0, torch does not read the operand
            y = operands[0] * beta + y
    out = operands[0] if name == "addmm_" else kwargs.get("out")
    return y if out is None else out.resize_(y.shape).copy_(y)


def _times(part: Any, matrix: Any) -> torch.Tensor | None:
    """Return part [o, i] · matrix [i, i]. Return None if the matrix is not square; a later function then decides
    whether W is read."""
    if isinstance(matrix, _StandsForWeight) or not _is_hole(part) or part.requires_grad:
        return None
    if part.ndim != 2 or matrix.shape != (part.shape[1], part.shape[1]) or part.dtype is not matrix.dtype:
        return None
    values = torch.full((), math.nan, dtype=part.dtype, device=part.device).expand(part.shape)
    product = values.as_subclass(PartTimesMatrix)
    product._layer, product._factors = part._layer, (part, matrix)
    return product


def _product(x: torch.Tensor, part: Any) -> torch.Tensor | None:
    """Return x [..., a] · part [a, b] from the executor, or None if the shapes or the part do not allow it."""
    layer = part._layer()
    autocast = torch.is_autocast_enabled(x.device.type)
    if (
        layer is None
        or not _is_hole(part)
        or part.requires_grad
        or part.ndim != 2
        or x.ndim == 0
        or x.shape[-1] != part.shape[0]
        or not (x.dtype is part.dtype or (autocast and x.is_floating_point()))
    ):
        return None
    map_, spec = part._map, layer.spec
    conv = isinstance(layer, Conv1D)
    stride = (spec.out_features if conv else spec.in_features) + 1
    if sorted(map_.stride()) != [1, stride]:  # every second row, for example
        return None
    first, second = divmod(map_.storage_offset(), stride)
    if transposed := map_.stride(0) == 1:
        first, second = second, first
    forward = transposed is not conv
    width, results = (spec.in_features, spec.out_features) if forward else (spec.out_features, spec.in_features)
    if x.shape[-1] != width:
        x = F.pad(x, (first, width - first - x.shape[-1]))
    target = torch.get_autocast_dtype(x.device.type) if autocast else part.dtype
    y = _whole_product(layer, x, forward, target, more=0 < part.shape[1] < results - second)
    # A copy, because the caller may write to its result, and the product is kept for the next part.
    return y if part.shape[1] == results else y.narrow(-1, second, part.shape[1]).clone()


def _whole_product(layer: Multiplying, x: torch.Tensor, forward: bool, dtype: torch.dtype, more: bool) -> torch.Tensor:
    """Return x times the whole weight, in a dtype. The product is kept if ``more`` parts are likely to follow."""
    own = layer.spec.dtype
    rows = x if dtype.itemsize > own.itemsize else x.to(own)  # in autocast, x may be wider than its product
    if x.is_inference() or (x.requires_grad and torch.is_grad_enabled()):  # each part has a graph of its own
        return layer.multiply(rows, forward).to(dtype)
    kept, state = layer.kept, (layer, forward, dtype)
    y = kept.find(x, state, more=more)
    if y is None:
        y = layer.multiply(rows, forward).to(dtype)
        if more:
            kept.keep(x, state, y)
    return y


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run any function but a product on NaN. Return views as Parts; refuse a function whose result has NaN."""
    name = getattr(func, "__name__", "")
    part = next(_placeholders((*args, *kwargs.values())))
    first = bool(args) and args[0] is part
    with torch._C.DisableTorchFunctionSubclass():
        refused = name in _READS or name in _HIDE_NAN or _writes(func, name)
        refused = refused or isinstance(kwargs.get("out"), _StandsForWeight)
        if refused and _is_hole(part):
            raise _refusal(part, name, _ADVICE.get(name, "") if first else "")
        if first and name in _CASTS and _is_hole(part):
            result = func(values_of(part)[(0,) * part.ndim], *args[1:], **kwargs)
            if not isinstance(result, torch.Tensor):
                return result
            if not result.is_floating_point():  # the executor computes with weights that are not rounded to integers
                raise _refusal(part, name)
            return _as_part(result.expand(part.shape), part, part._map)
        try:
            result = func(*args, **kwargs)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise _refusal(part, name) from error
        if not isinstance(result, torch.Tensor | tuple | list) or isinstance(result, torch.Size):
            return result
        results = result if isinstance(result, tuple | list) else (result,)
        if result is part or name in _UNINITIALISED or name in _CASTS or not _is_hole(part):
            return result
        if first and results and all(_is_view(one, part) for one in results):
            try:
                maps = func(part._map, *args[1:], **kwargs)
            except RuntimeError as error:  # a view that joins rows, which products have no use for
                raise _refusal(part, name) from error
            if result is not results:
                return _as_part(result, part, maps)
            return tuple(_as_part(one, part, map_) for one, map_ in zip(results, maps, strict=True))
        if _shows_nan(results):
            raise _refusal(part, name)
        return result


def _writes(func: Callable[..., Any], name: str) -> bool:
    """Return whether ``func`` works in place. A write to a placeholder itself has made it the tenant's own before."""
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return in_place and name not in _WRITE_NOTHING and getattr(func, "__module__", None) != "torch.nn.init"


def _placeholders(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _StandsForWeight):
            yield value
        elif isinstance(value, tuple | list):
            yield from _placeholders(value)


def _is_hole(part: Any) -> bool:
    """Return whether the part has no values. A tenant may have written values to it."""
    return not isinstance(part, SharedParameter) or part.is_placeholder


def _is_view(result: Any, part: torch.Tensor) -> bool:
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return False
    return result.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


def _as_part(values: Any, part: Any, map_: Any) -> Any:
    if not isinstance(map_, torch.Tensor) or map_.shape != values.shape:
        return values
    made = values.as_subclass(Part)
    made._layer, made._map = part._layer, map_
    return made


def _shows_nan(result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        return result.is_floating_point() and not result.is_meta and bool(result.isnan().any())
    return isinstance(result, tuple | list) and any(map(_shows_nan, result))


_ADVICE = {
    "copy_": "; average trainable parameters only: AveragedModel(nn.ParameterList(p for p in model.parameters() if "
    "p.requires_grad))",
    "add_": "; to merge an adapter, save it and load it where the base model is",
}
"""Advice for common code that writes to weights: torch.optim.swa_utils, and PEFT's merge_and_unload."""


def _refusal(part: Any, name: str, advice: str = "") -> PlaceholderError:
    layer = part._layer()
    error = PlaceholderError(
        f"{'a base layer' if layer is None else layer.spec.name}: {name} needs the values of this base layer's weight, "
        "and the weights of base layers stay with the executor; call the layer, multiply rows by its weight "
        "(x @ weight.t()), or ask the provider not to serve this layer (base_layers=['*_proj'] leaves out lm_head)"
        + advice
    )
    error.layer = None if layer is None else layer.spec.name
    return error
