"""A tenant's own copy of the public base weights: what noise becomes, without asking anybody."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from symbiosis.core.requests import LayerSpec
from symbiosis.core.transport import Channel
from symbiosis.errors import PrivacyError
from symbiosis.executor.fingerprint import weights_fingerprint
from symbiosis.executor.layers import is_linear
from symbiosis.executor.loading import load_model
from symbiosis.executor.products import times, times_transposed
from symbiosis.privacy.masks import Asked
from symbiosis.privacy.usual import Usual

__all__ = ["OwnWeights", "own_weights"]


_WITNESSES = 64
"""Elements of a weight that are compared whenever it is used."""
_GOLDEN = 0.6180339887498949
"""Its multiples are spread evenly over (0, 1), whatever their number."""


class _Weight(NamedTuple):
    """A weight, and what some of its elements were when it was found to be the executor's.

    It shares its memory with the parameter that it was taken from, if that has the same dtype: whoever changes the
    parameter in place (an adapter that is merged does) changes this as well, and no version of a tensor tells. Where
    the parameter is given another tensor, this one stays as it was.
    """

    name: str
    values: torch.Tensor
    """[o, i], or for a Conv1D [i, o]."""
    transposed: bool
    """For an [o, i]."""
    where: torch.Tensor
    """[m]: places of some elements, over all rows and columns."""
    witnesses: torch.Tensor
    """The bytes of these elements. (NaN is not equal to itself; its bytes are.)"""

    @classmethod
    def of(cls, name: str, values: torch.Tensor, transposed: bool) -> _Weight:
        rows, columns = values.shape
        steps = torch.arange(_WITNESSES, dtype=torch.float64)
        row = steps.mul(rows / _WITNESSES).long()
        column = steps.mul(_GOLDEN).frac().mul(columns).long()
        where = (row * columns + column).to(values.device)
        return cls(name, values, transposed, where, values.take(where).view(torch.uint8))

    def check(self) -> None:
        if not torch.equal(self.values.take(self.where).view(torch.uint8), self.witnesses):
            raise PrivacyError(
                f"the tenant's model was changed after it was given: {self.name} has other weights than the executor "
                "serves, and results would be wrong. Give a copy that stays as it is (copy.deepcopy(model), made "
                "before the change) or a folder, and open another client"
            )


class OwnWeights:
    """The weights of the base layers in a layer table, from a model that the tenant has.

    Args:
        model: a folder, a hub id, or a model.
        layers: the executor's layer table.
        weights: the executor's fingerprint of its layers.
        scheme: whose weights they are, for errors.

    Raises:
        PrivacyError: the model is another one.
    """

    def __init__(self, model: str | Path | nn.Module, layers: Sequence[LayerSpec], weights: str, scheme: str) -> None:
        self.model = found = model if isinstance(model, nn.Module) else _load(model, layers[0].dtype, scheme)
        modules: list[tuple[LayerSpec, nn.Module]] = []
        for spec in layers:
            try:
                module = found.get_submodule(spec.name)
            except AttributeError as error:
                raise PrivacyError(
                    f"{scheme}: this {type(found).__name__} has no {spec.name}; give the executor's model"
                ) from error
            modules.append((spec, module))
        if weights_fingerprint(modules) != weights:
            raise PrivacyError(
                f"{scheme}: this {type(found).__name__} has other weights than the executor serves; with another "
                "model results would be wrong"
            )
        self._weights: dict[int, _Weight] = {}
        linear = {spec.layer: module for spec, module in modules if spec.linear and is_linear(module)}
        for layer, module in linear.items():
            weight: Any = module.weight
            values = weight.detach().to(layers[layer].dtype)
            self._weights[layer] = _Weight.of(layers[layer].name, values, isinstance(module, nn.Linear))
        self.usual = _usual(found, weights, layers, linear)

    def check(self) -> None:
        """See to it that the weights are still those of the executor, as far as a sample of each says.

        Raises:
            PrivacyError: somebody changed them.
        """
        for weight in self._weights.values():
            weight.check()

    def effects(self, asked: Asked, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What noise [n, width] becomes at the executor, for each layer of a key: [n, out]. Raises what :meth:`check`
        does."""
        backward = asked.key.pass_.is_backward
        effects = []
        for spec in asked.layers:
            weight = self._weights[spec.layer]
            values = weight.values
            product = times_transposed if weight.transposed is not backward else times
            effects.append(product(noise.to(values.device), values).to(noise.device))
            weight.check()  # afterwards, so that a change meanwhile is seen
        return tuple(effects)

    def sparse(self, asked: Asked, spec: LayerSpec, columns: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Rows that are zero but for some columns, times a layer: factors [n, m] of columns [m] → [n, out]. Raises what
        :meth:`check` does."""
        weight = self._weights[spec.layer]
        values = weight.values
        columns, factors = columns.to(values.device), factors.to(values.device)
        if weight.transposed is not asked.key.pass_.is_backward:
            some = values.index_select(1, columns).t()
        else:
            some = values.index_select(0, columns)
        weight.check()
        return factors.mm(some.to(factors.dtype))


def own_weights(model: str | Path | nn.Module, channel: Channel, scheme: str) -> OwnWeights:
    """Those for the executor at the other end of a channel; clients of one process share them, as long as one has them.
    Loads a model, so it takes its time. Raises what :class:`OwnWeights` and its ``check`` do."""
    weights = channel.identity().weights
    key = id(model) if isinstance(model, nn.Module) else str(model), weights
    found = _loaded.get(key)
    if found is None:  # else without a wait for who loads another one
        with _loading:
            found = _loaded.get(key)
            if found is None:
                found = _loaded[key] = OwnWeights(model, channel.layers, weights, scheme)
                return found
    found.check()
    return found


def _usual(model: nn.Module, weights: str, layers: Sequence[LayerSpec], modules: Mapping[int, nn.Module]) -> Usual:
    """A model is walked once, however many clients come and go."""
    known = _walked.setdefault(model, {})
    if weights not in known:
        known[weights] = Usual(model, layers, modules)
    return known[weights]


_walked: weakref.WeakKeyDictionary[nn.Module, dict[str, Usual]] = weakref.WeakKeyDictionary()
_loading = threading.Lock()
_loaded: weakref.WeakValueDictionary[tuple[int | str, str], OwnWeights] = weakref.WeakValueDictionary()


def _load(model: str | Path, dtype: torch.dtype, scheme: str) -> nn.Module:
    try:
        loaded: nn.Module = load_model(model, dtype=dtype)
    except (OSError, ValueError) as error:
        raise PrivacyError(f"{scheme}: no model could be loaded from {model}: {error}") from error
    return loaded
