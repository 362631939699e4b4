"""Parameters of a client's model, which are shared until the tenant makes them its own.

A client's model has two sorts of frozen parameters. Embeddings, norms and biases have values and share memory with
every other client of the process. The weights of base layers are *placeholders*: one NaN expanded to the weight's
shape. PEFT finds a weight of the right shape, dtype and device, and code that reads it gets NaN instead of a wrong
number. :mod:`symbiosis.client.placeholders` explains what else a VirtLayer's placeholder can do.

A parameter of either sort becomes the tenant's own copy when the tenant makes it trainable or writes to it
(``modules_to_save``, ``bias="all"``, an unfrozen norm, a loaded adapter with biases). No other tenant sees the change.
A parameter that is made from it (``nn.Parameter(w)``) is such a copy.
A module that is moved or cast (``.to``) keeps placeholders, of which one number is moved. Shared values are copied to
another device or dtype for this tenant, and are not the tenant's own.
Writes that bypass the parameter's own methods (``.data.mul_``, a view's ``w[0].zero_()``, ``out=w``,
``torch._foreach_*``) are not noticed, and reach the memory that all tenants of the process share.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from symbiosis.errors import PlaceholderError

_owned = [0]


def times_owned() -> int:
    """Return how often a shared parameter of this process has become a tenant's own."""
    return _owned[0]


class SharedParameter(nn.Parameter):
    """A frozen parameter whose values are shared, or absent, until it is unfrozen or written to.

    Subclasses ``nn.Parameter``, so modules, optimizers and PEFT treat it as one.
    """

    _fetch: Callable[[], torch.Tensor] | None
    """Returns a copy of the values for this tenant. None once the tenant has one."""

    @property
    def own(self) -> bool:
        """Whether the values belong to this tenant."""
        return self._fetch is None

    @property
    def is_placeholder(self) -> bool:
        """Whether this parameter has a shape and no values."""
        values = values_of(self)
        return self._fetch is not None and values.stride() == (0,) * values.ndim and values.numel() > 1

    @property
    def data(self) -> torch.Tensor:
        return _data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Take the memory of ``values``. Values of this tenant's choice make the parameter its own; the same values
        elsewhere or in another dtype (``model.to``) do not."""
        self.refuse_another(values)
        if self._fetch is not None and values.device == self.device and values.dtype is self.dtype:
            present = values_of(self)
            if not _is_placeholder(values) and values.data_ptr() != present.data_ptr():
                self._become_own()
        _data.__set__(self, values)

    def refuse_another(self, source: torch.Tensor) -> None:
        """Raise PlaceholderError if this is a placeholder, and ``source`` one of another layer."""

    def _become_own(self) -> None:
        self._fetch = None
        _owned[0] += 1
        self.__class__ = SharedParameter  # no longer a placeholder of a layer

    def make_own(self) -> None:
        """Replace the shared values, or the placeholder, by a copy of this tenant's own."""
        fetch = self._fetch
        if fetch is not None:
            values = fetch() if self.is_placeholder else values_of(self).clone()
            self._become_own()
            self.data = values.to(device=self.device, dtype=self.dtype)

    def requires_grad_(self, requires_grad: bool = True) -> SharedParameter:
        if requires_grad:
            self.make_own()
        super().requires_grad_(requires_grad)
        return self

    @property
    def requires_grad(self) -> bool:
        return _requires_grad.__get__(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value:
            self.make_own()
        _requires_grad.__set__(self, value)

    def copy_(self, *args: Any, **kwargs: Any) -> SharedParameter:
        """Write values into this tenant's own copy, as ``load_state_dict`` does.

        A write that changes nothing makes no copy: the shared values again, or a placeholder onto a placeholder (from a
        state dict of this model). The values of a base layer are not needed, since all of them are replaced.

        Raises:
            PlaceholderError: a placeholder has no values to write.
        """
        source = args[0] if args else kwargs.get("other", kwargs.get("src"))
        if isinstance(source, torch.Tensor):
            if _is_placeholder(source):
                self.refuse_another(source)
                if self.is_placeholder:
                    return self
                raise PlaceholderError(
                    "this state dict has placeholders in place of a base layer's weights, which belong to the executor"
                )
            if not self.own and not self.is_placeholder and _same(source, values_of(self)):
                return self
        if self.is_placeholder:
            values = torch.empty_like(values_of(self), memory_format=torch.contiguous_format).copy_(*args, **kwargs)
            self._become_own()
            self.data = values
            return self
        self.make_own()
        super().copy_(*args, **kwargs)
        return self

    def set_(self, *args: Any, **kwargs: Any) -> SharedParameter:
        """Take another tensor's memory. The memory that it has already is no change: parametrizations set that."""
        source = args[0] if args else None
        if isinstance(source, SharedParameter) and values_of(source).is_set_to(values_of(self)):
            return self
        self.make_own()
        super().set_(*args, **kwargs)
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        self.make_own()
        super().__setitem__(index, value)

    def __copy__(self) -> SharedParameter:
        return _make(values_of(self), self._fetch)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedParameter:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        values = values_of(self)
        copy = _make(values.clone() if self.own else values, self._fetch)
        if self.requires_grad:
            _requires_grad.__set__(copy, True)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter: values shared in memory cannot stay shared in a file."""
        return nn.Parameter(self.data, requires_grad=self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_new = nn.Parameter.__new__


@functools.wraps(_new)
def _new_unshared(cls: type[nn.Parameter], data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
    """Make a parameter. If it is made from a shared one, it is the tenant's own copy, so no write to it reaches another
    tenant. torch alone would call ``detach``, and refuse its result, because that is a plain tensor."""
    if not isinstance(data, SharedParameter):
        return _new(cls, data, requires_grad)
    made = copy.copy(data)
    made.make_own()
    return made.requires_grad_(requires_grad)


nn.Parameter.__new__ = staticmethod(_new_unshared)  # type: ignore[method-assign,assignment]


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return ``parameter.data`` as a plain tensor, also for a placeholder."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data


_requires_grad: Any = torch.Tensor.requires_grad
_data: Any = torch.Tensor.data


def _is_placeholder(values: torch.Tensor) -> bool:
    return (
        values.numel() > 1
        and values.is_floating_point()
        and values.stride() == (0,) * values.ndim
        and bool(values[(0,) * values.ndim].isnan())
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device and one.equal(other)


def _in_place(name: str) -> Callable[..., SharedParameter]:
    method = getattr(nn.Parameter, name)

    def write(self: SharedParameter, *args: Any, **kwargs: Any) -> SharedParameter:
        self.make_own()
        method(self, *args, **kwargs)
        return self

    return write


_KEEP = {"requires_grad_", "detach_", "share_memory_", "rename_", "copy_", "set_"}
"""Methods whose names end in an underscore and that write nothing, and two that are defined above."""
for _name in dir(torch.Tensor):
    _writes = _name.endswith("_") and not _name.startswith("_")
    if (_writes and _name not in _KEEP) or (_name.startswith("__i") and f"__{_name[3:]}" in dir(torch.Tensor)):
        setattr(SharedParameter, _name, _in_place(_name))


def _cast(name: str) -> Callable[..., Any]:
    method = getattr(nn.Parameter, name)

    def cast(self: SharedParameter, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not SharedParameter or not self.is_placeholder:  # its subclass makes parts of a weight
            return method(self, *args, **kwargs)
        number = values_of(self)[(0,) * self.ndim]
        result = method(number, *args, **kwargs)
        if result is number:
            return self
        return result.expand(self.shape) if isinstance(result, torch.Tensor) else result

    return cast


CASTS = {"to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda"}
"""Methods that change a dtype or a device, which a module that is cast or moved calls. Of a placeholder, they change
one number, which is expanded to the shape again."""
for _name in CASTS:
    setattr(SharedParameter, _name, _cast(_name))


def _make(data: torch.Tensor, fetch: Callable[[], torch.Tensor] | None) -> SharedParameter:
    parameter = SharedParameter(data, requires_grad=False)
    parameter._fetch = fetch
    return parameter


def shared_parameter(parameter: torch.Tensor, device: torch.device | None = None, whole: str = "") -> SharedParameter:
    """Return a frozen parameter on the memory of ``parameter``, or a placeholder on ``device`` for a meta tensor.
    ``whole`` is the name of the base layer that it is inside of, if that is served whole."""
    if parameter.is_meta and device is not None:
        return placeholder(parameter.shape, parameter.dtype, device, partial(_refuse_inside, whole))
    values = parameter.data  # not detach(), which would share a version counter with other tenants
    return _make(values, values.clone)


def fetch_of(parameter: torch.Tensor, layer: str) -> Callable[[], torch.Tensor]:
    """Return how a tenant that makes a base layer's weight trainable gets a copy of it: if it is in the same process as
    the executor, or if the provider allows it."""
    if not parameter.is_floating_point() or hasattr(parameter, "__tensor_flatten__"):
        return partial(_refuse_quantized, layer)
    return partial(_refuse, layer) if parameter.is_meta else parameter.detach().clone


def _refuse_quantized(layer: str) -> torch.Tensor:
    raise PlaceholderError(
        f"{layer}: its weight is quantized, so it cannot be trained or written to; adapt it with PEFT"
    )


def _refuse(layer: str) -> torch.Tensor:
    raise PlaceholderError(
        f"{layer}: its weight stays with the executor, so it cannot be trained or written to here "
        "(modules_to_save, requires_grad_); adapt the layer with PEFT, or ask the provider to allow this weight to "
        f"leave (symbiosis serve --allow-weights {layer}), which is possible unless the weight is quantized or the "
        "executor serves a part of the model"
    )


def _refuse_inside(layer: str) -> torch.Tensor:
    raise PlaceholderError(
        f"{layer or 'a base layer'} is served whole and its weights stay with the executor, so they cannot be trained "
        "or written to here (modules_to_save, requires_grad_); adapt other layers with PEFT, use a client in the "
        "executor's process, or ask the provider not to serve this layer (symbiosis serve --base-layers)"
    )


def placeholder(
    shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device, fetch: Callable[[], torch.Tensor]
) -> SharedParameter:
    """Return a frozen parameter with a shape and no values; ``fetch`` returns a copy of the values."""
    return _make(torch.full((), math.nan, dtype=dtype, device=device).expand(shape), fetch)
