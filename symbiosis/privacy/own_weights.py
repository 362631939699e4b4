"""A tenant's own copy of the public base weights, which computes the effects of noise without an executor.

Legend: n rows; i in_features; o out_features.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from symbiosis.core.requests import LayerSpec, Results
from symbiosis.core.transport import Channel
from symbiosis.errors import PrivacyError, UsageError
from symbiosis.executor.fingerprint import weights_fingerprint
from symbiosis.executor.fp32_products import times, times_transposed
from symbiosis.executor.layers import is_linear
from symbiosis.executor.loading import load_model
from symbiosis.privacy.masks import MaskedKey
from symbiosis.privacy.typical_sizes import TypicalSizes

_SAMPLES = 64
"""Elements of a weight that are compared whenever the weight is used."""
_GOLDEN_RATIO = 0.6180339887498949
"""Any number of its multiples is spread evenly over (0, 1), modulo 1."""


class _Weight(NamedTuple):
    """A weight, and samples of its elements at the time when it was compared with the executor's.

    The weight shares its memory with the tenant's parameter if both have the same dtype. A change of the parameter in
    place, such as merging an adapter, then changes the weight, and the samples are the only way to detect it.
    """

    name: str
    values: torch.Tensor
    """[o, i], or [i, o] for a Conv1D."""
    transposed: bool
    """Whether the values are [o, i]."""
    positions: torch.Tensor
    """[samples] flat indices, spread over all rows and columns."""
    samples: torch.Tensor
    """Bytes of the elements at these positions. Bytes of NaN are equal to themselves, NaN is not."""

    @classmethod
    def of(cls, name: str, values: torch.Tensor, transposed: bool) -> _Weight:
        rows, columns = values.shape
        steps = torch.arange(_SAMPLES, dtype=torch.float64)
        row = steps.mul(rows / _SAMPLES).long()
        column = steps.mul(_GOLDEN_RATIO).frac().mul(columns).long()
        positions = (row * columns + column).to(values.device)
        return cls(name, values, transposed, positions, values.take(positions).view(torch.uint8))

    def check(self) -> None:
        if not torch.equal(self.values.take(self.positions).view(torch.uint8), self.samples):
            raise PrivacyError(
                f"{self.name} of the tenant's model was changed and has other weights than the executor serves, so "
                "results would be wrong. Give the scheme a folder, or a copy made before the change "
                "(copy.deepcopy(model)), and open another client"
            )


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
        linear = {spec.layer: module for spec, module in modules if spec.linear and is_linear(module)}
        self._weights: dict[int, _Weight] = {}
        for layer, module in linear.items():
            weight: Any = module.weight
            values = weight.detach().to(layers[layer].dtype)
            self._weights[layer] = _Weight.of(layers[layer].name, values, isinstance(module, nn.Linear))
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
            product = times_transposed if weight.transposed is not key.key.pass_.is_backward else times
            effects.append(product(noise.to(weight.values.device), weight.values).to(noise.device))
            weight.check()  # after the product, to detect a change in the meantime
        return tuple(effects)

    def sparse_product(
        self, key: MaskedKey, spec: LayerSpec, columns: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return the product [n, o] of a layer with rows of ``values`` [n, m] in ``columns`` [m] and zeros elsewhere.

        Raises the error of :meth:`check`.
        """
        weight = self._weights[spec.layer]
        device = weight.values.device
        columns, values = columns.to(device), values.to(device)
        if weight.transposed is not key.key.pass_.is_backward:
            part = weight.values.index_select(1, columns).t()
        else:
            part = weight.values.index_select(0, columns)
        weight.check()
        return values.mm(part.to(values.dtype))


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
    except (OSError, ValueError, UsageError) as error:
        raise PrivacyError(f"{scheme}: no model could be loaded from {model}: {error}") from error
    return loaded
