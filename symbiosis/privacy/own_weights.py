"""A tenant's own copy of the public base weights: what noise becomes, without asking anybody."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.core.blocks import times, times_transposed
from symbiosis.core.layers import is_linear
from symbiosis.core.loading import load_model
from symbiosis.core.protocols import Channel
from symbiosis.core.requests import LayerSpec
from symbiosis.core.share import weights_fingerprint
from symbiosis.errors import PrivacyError
from symbiosis.privacy.masks import Asked
from symbiosis.privacy.usual import Usual

__all__ = ["OwnWeights", "own_weights"]


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
        self._weights: dict[int, tuple[torch.Tensor, bool]] = {}
        """[o, i] and True, or for a Conv1D [i, o] and False."""
        linear = {spec.layer: module for spec, module in modules if spec.linear and is_linear(module)}
        for layer, module in linear.items():
            weight: Any = module.weight
            self._weights[layer] = weight.detach().to(layers[layer].dtype), isinstance(module, nn.Linear)
        self.usual = _usual(found, weights, layers, linear)

    def effects(self, asked: Asked, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What noise [n, width] becomes at the executor, for each layer of a key: [n, out]."""
        backward = asked.key.pass_.is_backward
        effects = []
        for spec in asked.layers:
            weight, transposed = self._weights[spec.layer]
            product = times_transposed if transposed is not backward else times
            effects.append(product(noise.to(weight.device), weight).to(noise.device))
        return tuple(effects)

    def sparse(self, asked: Asked, spec: LayerSpec, columns: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Rows that are zero but for some columns, times a layer: factors [n, m] of columns [m] → [n, out]."""
        weight, transposed = self._weights[spec.layer]
        columns, factors = columns.to(weight.device), factors.to(weight.device)
        if transposed is not asked.key.pass_.is_backward:
            return factors.mm(weight.index_select(1, columns).to(factors.dtype).t())
        return factors.mm(weight.index_select(0, columns).to(factors.dtype))


def own_weights(model: str | Path | nn.Module, channel: Channel, scheme: str) -> OwnWeights:
    """Those for the executor at the other end of a channel; clients of one process share them, as long as one has them.
    Loads a model, so it takes its time. Raises what :class:`OwnWeights` does."""
    weights = channel.identity().weights
    key = id(model) if isinstance(model, nn.Module) else str(model), weights
    found = _loaded.get(key)
    if found is not None:  # without a wait for who loads another one
        return found
    with _loading:
        found = _loaded.get(key)
        if found is None:
            found = _loaded[key] = OwnWeights(model, channel.layers, weights, scheme)
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
