"""The provider's knowledge without any request: the base model, and text of the same distribution as the tenant's.

Legend: b sequences; t tokens; w columns; i in_features; o out_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from symbiosis.core.requests import LayerSpec
from symbiosis.privacy.audit.evidence import Place


class Prior(NamedTuple):
    """Mean [w] and covariance [w, w] of the base model's rows at a place, on the provider's own text."""

    mean: torch.Tensor
    covariance: torch.Tensor


class Public:
    """The base model in the provider's hands.

    Args:
        model: a Llama.
        layers: the executor's layer table.
        text: [b, t] token ids of the provider's own text.
    """

    def __init__(self, model: Any, layers: Sequence[LayerSpec], text: torch.Tensor) -> None:
        self.model = model
        self.layers = layers
        self.inputs = self.run(text)
        """Layer → its input [b·t, w] for the provider's own text."""
        self._priors: dict[int, Prior] = {}

    @torch.no_grad()
    def run(self, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the input [b·t, w] of each layer when the base model reads ``tokens`` [b, t]."""
        found: dict[int, torch.Tensor] = {}

        def keep(index: int) -> Any:
            def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
                found[index] = arguments[0].flatten(0, -2)

            return hook

        with ExitStack() as hooks:
            for spec in self.layers:
                module = self.model.get_submodule(spec.name)
                hooks.callback(module.register_forward_pre_hook(keep(spec.layer)).remove)
            self.model(tokens)
        return found

    def prior(self, place: Place) -> Prior:
        """Return the prior of a place. Of gradients the provider knows nothing: mean 0, all directions alike."""
        layer = place.layers[0]
        if place.backward:
            width = self.layers[layer].out_features
            return Prior(torch.zeros(width), torch.eye(width))
        if layer not in self._priors:
            x = self.inputs[layer]
            self._priors[layer] = Prior(x.mean(0), torch.cov(x.T))
        return self._priors[layer]

    def weight(self, layer: int) -> torch.Tensor:
        """Return the weight [o, i] of a layer."""
        weight: torch.Tensor = self.model.get_submodule(self.layers[layer].name).weight
        return weight

    def layer(self, suffix: str) -> int:
        """Return the index of the first layer whose name ends with ``suffix``."""
        return next(spec.layer for spec in self.layers if spec.name.endswith(suffix))

    def sibling(self, up_proj: int, name: str) -> int:
        """Return the index of another layer of the same MLP as an ``up_proj``."""
        return self.layer(self.layers[up_proj].name.replace("up_proj", name))

    @torch.no_grad()
    def token_rows(self) -> torch.Tensor:
        """Return [vocabulary, w]: the input of the first block's q_proj for each token."""
        inner = self.model.model
        rows: torch.Tensor = inner.layers[0].input_layernorm(inner.embed_tokens.weight)
        return rows

    def token_likeness(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [n, vocabulary] cosines of rows [n, w] of the first block with those of each token."""
        table = self.token_rows()
        center = table.mean(0)
        return F.normalize(rows - center) @ F.normalize(table - center).T
