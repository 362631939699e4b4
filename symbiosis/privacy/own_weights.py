"""A tenant's own copy of the public base weights, which computes the effects of noise without an executor.

Legend: n rows; i in_features; o out_features.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.core.requests import LayerSpec, Results
from symbiosis.core.transport import Channel
from symbiosis.errors import PrivacyError, UsageError
from symbiosis.executor.fingerprint import weights_fingerprint
from symbiosis.executor.fp32_products import times, times_transposed
from symbiosis.executor.layers import QuantizedLayer
from symbiosis.executor.loading import load_model
from symbiosis.executor.quantized import is_quantized, parts_of, scales_of
from symbiosis.privacy.masks import MaskedKey
from symbiosis.privacy.precision import check_precision
from symbiosis.privacy.typical_sizes import TypicalSizes

_SAMPLES = 64
"""Elements of a weight that are compared whenever the weight is used."""
_GOLDEN_RATIO = 0.6180339887498949
"""Any number of its multiples is spread evenly over (0, 1), modulo 1."""


class _Weight(ABC):
    """The weight W of a base layer, and samples of its elements at the time when it was compared with the executor's.

    A change of the tenant's parameter in place, such as merging an adapter, may change the weight, too. The samples
    are the only way to detect it.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self.device = device
        self._samples = self._sample()

    def check(self) -> None:
        found = self._sample()
        if len(found) != len(self._samples) or not all(map(torch.equal, found, self._samples)):
            raise PrivacyError(
                f"{self._name} of the tenant's model was changed and has other weights than the executor serves, so "
                "results would be wrong. Give the scheme a folder, or a copy made before the change "
                "(copy.deepcopy(model)), and open another client"
            )

    def _sample(self) -> list[torch.Tensor]:
        return [_samples(part) for part in self.parts()]

    @abstractmethod
    def parts(self) -> Iterable[torch.Tensor]:
        """Return the tensors that the weight consists of now."""

    @abstractmethod
    def product(self, x: torch.Tensor, *, backward: bool) -> torch.Tensor:
        """Return X·Wᵀ [n, o] for X [n, i], or X·W [n, i] for X [n, o], in X's dtype."""

    @abstractmethod
    def sparse_product(self, columns: torch.Tensor, values: torch.Tensor, *, backward: bool) -> torch.Tensor:
        """Return the product of rows of ``values`` [n, m] in ``columns`` [m] and zeros elsewhere."""


class _PlainWeight(_Weight):
    """A matrix, which shares its memory with the tenant's parameter if both have the same dtype."""

    def __init__(self, name: str, values: torch.Tensor, transposed: bool) -> None:
        self._values = values
        """[o, i], or [i, o] for a Conv1D."""
        self._transposed = transposed
        """Whether the values are [o, i]."""
        super().__init__(name, values.device)

    def parts(self) -> Iterable[torch.Tensor]:
        return (self._values,)

    def product(self, x: torch.Tensor, *, backward: bool) -> torch.Tensor:
        return (times_transposed if self._transposed is not backward else times)(x, self._values)

    def sparse_product(self, columns: torch.Tensor, values: torch.Tensor, *, backward: bool) -> torch.Tensor:
        if self._transposed is not backward:
            part = self._values.index_select(1, columns).t()
        else:
            part = self._values.index_select(0, columns)
        return values.mm(part.to(values.dtype))


class _QuantizedWeight(_Weight):
    """The weight of the tenant's own quantized layer, which is dequantized in blocks for each product."""

    def __init__(self, spec: LayerSpec, module: nn.Linear) -> None:
        self._layer = QuantizedLayer(spec, module)
        self._parameter = module.weight
        super().__init__(spec.name, self._layer.device)

    def parts(self) -> Iterable[torch.Tensor]:
        module = self._layer.module
        if module.weight is not self._parameter:
            return ()
        scales = scales_of(module)
        return (*parts_of(self._parameter), *(() if scales is None else (scales,)))

    def product(self, x: torch.Tensor, *, backward: bool) -> torch.Tensor:
        if backward:
            return self._layer.backward((x,), fp32=True)[0]
        return self._layer.forward((x,), bias=False, fp32=True)

    def sparse_product(self, columns: torch.Tensor, values: torch.Tensor, *, backward: bool) -> torch.Tensor:
        spec = self._layer.spec
        rows = values.new_zeros(len(values), spec.out_features if backward else spec.in_features)
        return self.product(rows.index_copy_(1, columns, values), backward=backward)


def _samples(values: torch.Tensor) -> torch.Tensor:
    """Return samples of a tensor as bytes: bytes of NaN are equal to themselves, NaN is not."""
    if values.element_size() == 1:  # torch cannot take from some of these dtypes
        values = values.view(torch.uint8)
    columns = values.shape[-1] if values.ndim else 1
    return values.take(_positions(values.numel() // columns, columns, values.device)).view(torch.uint8)


@cache
def _positions(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return the flat indices [samples] of elements that are spread over all rows and columns of a matrix."""
    steps = torch.arange(_SAMPLES, dtype=torch.float64, device="cpu")
    row = steps.mul(rows / _SAMPLES).long()
    column = steps.mul(_GOLDEN_RATIO).frac().mul(columns).long()
    return (row * columns + column).to(device)


class OwnWeights:
    """The weights of the base layers, from a model that the tenant has: a folder, a hub id or a module.

    Raises:
        PrivacyError: the model cannot be loaded, or differs from the executor's by ``layers`` or ``fingerprint``.
    """

    def __init__(
        self, model: str | Path | nn.Module, layers: Sequence[LayerSpec], fingerprint: str, scheme: str
    ) -> None:
        self.model = found = model if isinstance(model, nn.Module) else _load(model, layers[0].dtype, scheme)
        why, advice = f"{scheme}: this {type(found).__name__} has", "give the model that the executor serves"
        modules: list[tuple[LayerSpec, nn.Module]] = []
        for spec in layers:
            try:
                modules.append((spec, found.get_submodule(spec.name)))
            except AttributeError as error:
                raise PrivacyError(f"{why} no {spec.name}; {advice}") from error
        if weights_fingerprint(modules) != fingerprint:
            raise PrivacyError(f"{why} other weights than the executor serves, so results would be wrong; {advice}")
        # The executor's layer gives a product. What else the tenant's module does, as in hooks, does not matter.
        products = [(spec.layer, module) for spec, module in modules if spec.linear]
        linear = {layer: module for layer, module in products if isinstance(module, (nn.Linear, Conv1D))}
        self._weights: dict[int, _Weight] = {}
        for layer, module in linear.items():
            spec, weight = layers[layer], cast(torch.Tensor, module.weight)
            if is_quantized(module):
                self._weights[layer] = _QuantizedWeight(spec, cast(nn.Linear, module))
            else:
                values = weight.detach().to(spec.dtype)
                self._weights[layer] = _PlainWeight(spec.name, values, isinstance(module, nn.Linear))
        known = _typical.setdefault(found, {})
        if fingerprint not in known:
            known[fingerprint] = TypicalSizes(found, layers, linear)
        self.typical = known[fingerprint]

    def check(self) -> None:
        """Raise a PrivacyError if a weight was changed since it was compared with the executor's."""
        for weight in self._weights.values():
            weight.check()

    def effects(self, key: MaskedKey, noise: torch.Tensor) -> Results:
        """Return the effects [n, o] of noise [n, width] for each layer of a key. Raises the error of :meth:`check`."""
        effects = []
        for spec in key.layers:
            weight = self._weights[spec.layer]
            check_precision(weight.device, noise.dtype)
            product = weight.product(noise.to(weight.device), backward=key.key.pass_.is_backward)
            effects.append(product.to(noise.device))
            weight.check()  # after the product, to detect a change in the meantime
        return tuple(effects)

    def sparse_product(
        self, key: MaskedKey, spec: LayerSpec, columns: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return the product [n, o] of a layer with rows of ``values`` [n, m] in ``columns`` [m] and zeros elsewhere.

        Raises the error of :meth:`check`.
        """
        weight = self._weights[spec.layer]
        check_precision(weight.device, values.dtype)
        columns, values = columns.to(weight.device), values.to(weight.device)
        product = weight.sparse_product(columns, values, backward=key.key.pass_.is_backward)
        weight.check()
        return product


_loaded: weakref.WeakValueDictionary[tuple[int | str, str], OwnWeights] = weakref.WeakValueDictionary()
"""(model, fingerprint) → weights, as long as a client of this process uses them."""
_loading = threading.Lock()
_typical: weakref.WeakKeyDictionary[nn.Module, dict[str, TypicalSizes]] = weakref.WeakKeyDictionary()
"""Model → fingerprint → typical sizes. A model is run once for all clients that use it."""


def own_weights(model: str | Path | nn.Module, channel: Channel, scheme: str) -> OwnWeights:
    """Return the tenant's weights for the executor that a channel leads to. Clients of one process share them.

    Loading a model takes long. Raises the errors of :class:`OwnWeights` and of :meth:`OwnWeights.check`.
    """
    fingerprint = channel.identity().weights
    name = id(model) if isinstance(model, nn.Module) else str(model), fingerprint
    found = _loaded.get(name)
    if found is None:  # weights that are loaded are found without waiting for the lock
        with _loading:
            found = _loaded.get(name) or OwnWeights(model, channel.layers, fingerprint, scheme)
            _loaded[name] = found
    found.check()
    return found


def _load(model: str | Path, dtype: torch.dtype, scheme: str) -> nn.Module:
    try:
        loaded: nn.Module = load_model(model, dtype=dtype)
    except (OSError, ValueError, UsageError, ImportError) as error:
        raise PrivacyError(f"{scheme}: no model could be loaded from {model}: {error}") from error
    return loaded
