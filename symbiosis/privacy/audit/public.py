"""What the provider knows without looking at any request: the base model, and what text looks like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from symbiosis.core.requests import LayerSpec
from symbiosis.privacy.audit.evidence import Place

__all__ = ["Prior", "Public"]


class Prior(NamedTuple):
    """Mean [w] and covariance [w, w] of the rows at a place, as the public model has them on its owner's own text."""

    mean: torch.Tensor
    covariance: torch.Tensor


class Public:
    """The base model in the provider's hands.

    Args:
        model: a Llama-like model.
        layers: the executor's layer table.
        text: [b, t] token ids of the provider's own, distributed as the tenant's are.
    """

    def __init__(self, model: Any, layers: Sequence[LayerSpec], text: torch.Tensor) -> None:
        self.model = model
        self.layers = layers
        self.text = text
        self.inputs = self.run(text)
        """Layer → its input [b·t, w] on the provider's own text."""
        self._priors: dict[int, Prior] = {}

    @torch.no_grad()
    def run(self, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
        """Layer → its input [b·t, w], when the base model reads ``tokens`` [b, t]."""
        found: dict[int, torch.Tensor] = {}

        def keep(index: int) -> Any:
            def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
                found[index] = arguments[0].flatten(0, -2)

            return hook

        hooks = [
            self.model.get_submodule(spec.name).register_forward_pre_hook(keep(spec.layer)) for spec in self.layers
        ]
        try:
            self.model(tokens)
        finally:
            for handle in hooks:
                handle.remove()
        return found

    def prior(self, place: Place) -> Prior:
        """Of gradients the provider knows nothing: mean 0, all directions alike."""
        if place.backward:
            width = self.layers[place.layers[0]].out_features
            return Prior(torch.zeros(width), torch.eye(width))
        layer = place.layers[0]
        if layer not in self._priors:
            x = self.inputs[layer]
            self._priors[layer] = Prior(x.mean(0), torch.cov(x.T))
        return self._priors[layer]

    def weight(self, layer: int) -> torch.Tensor:
        """[o, i]."""
        weight: torch.Tensor = self.model.get_submodule(self.layers[layer].name).weight
        return weight

    def layer(self, name: str) -> int:
        """Index of the layer whose name ends so."""
        return next(spec.layer for spec in self.layers if spec.name.endswith(name))

    @torch.no_grad()
    def first_rows(self) -> torch.Tensor:
        """[vocabulary, w]: what q, k and v of the first block read, for each token."""
        inner = self.model.model
        rows: torch.Tensor = inner.layers[0].input_layernorm(inner.embed_tokens.weight)
        return rows
